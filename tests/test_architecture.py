"""The rules of the source tree: layers, no circles, siblings apart, short hooks, cheap imports.

A failure names the import to move. When the plan itself changes, change the tables here and `docs/architecture.md`
together.
"""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# The layers of the core distribution, from the lowest: each imports itself and those above it in this list. A line
# names folders, and the files beside them; the longest name that a module begins with decides.
LAYERS = """
    core.errors core.fields core.files core.config core.registry core.state
    core.data
    core.models
    core.losses
    core.callbacks core.logging
    core.distributed
    core.optim
    core.checkpoint
    core.evaluation
    core.hub
    core.arguments core.training
    lm.text
    lm.loading
    lm.images
    lm.attention lm.preparation
    lm.loss
    core.trainer
    lm.generate lm.trainer
    compat
    cli.report
    cli cli.tools
    core core.testing
""".strip().splitlines()
LAYER = {name: layer for layer, names in enumerate(LAYERS) for name in names.split()}
# What takes a trainer, because it is a part of its face.
KNOWS_TRAINERS = LAYER["core.trainer"]
# The lowest layer needs nothing that has to be installed besides these.
LOWEST_PACKAGES = {"torch", "numpy"}
LOWEST = LAYER["core.state"]

# What lies in the wheel of each distribution, and what it may import.
CORE = {"core", "lm", "compat", "cli"}
ALLOWED = {"core": CORE, "seq2seq": {"seq2seq", *CORE}, "sft": {"sft", *CORE}, "rl": {"rl", *CORE}}
EMPTY_NAMES = {"utils", "util", "helpers", "helper", "misc", "common"}
# Only these may know how processes are started, wrapped and sharded, and the memory plan, which imagines them.
BACKENDS = {"accelerate", "deepspeed", "torch.nn.parallel", "torch.distributed.fsdp", "torch.distributed.tensor"}
BACKENDS_FOLDERS = ("core/distributed/", "cli/tools/memory_mesh.py")
FORBIDDEN_NAMES = {"Trainer", "TrainingArguments", "Seq2SeqTrainer", "Seq2SeqTrainingArguments"}
FORBIDDEN_NAMES |= {"TrainerCallback", "TrainerState", "TrainerControl"}

# Files of more than 500 lines, and why they are one file.
LONG = {
    "rl/online/trainer.py": "the one base of online trainers, from their arguments to the methods to override",
    "core/trainer.py": "the loop, and every overridable method, in one class",
}
# The methods that users override, under the names of transformers' Trainer.
HOOKS = """
    get_train_dataloader get_eval_dataloader get_test_dataloader _get_train_sampler _get_eval_sampler create_optimizer
    get_decay_parameter_names get_optimizer_cls_and_kwargs create_scheduler create_optimizer_and_scheduler train
    get_batch_samples training_step compute_loss prediction_step evaluation_loop evaluate predict log save_model
    _save_checkpoint _load_from_checkpoint add_callback pop_callback remove_callback _prepare_inputs
    _set_signature_columns_if_needed log_metric state_dict load_state_dict count_items windows
""".split()
LONG_HOOKS = {
    "train": "the loop itself",
    "training_step": "the one place where a loss is scaled, with every case in sight",
    "train_on_window": "one optimizer step, read from top to bottom with the order of its events",
    "accumulate": "every micro-batch of a step, with the order of its events",
    "windows": "the calls of get_batch_samples, in every signature and with every count that it ever had",
}


@dataclass(frozen=True)
class Import:
    """One import statement: `where` is the importing file, `target` a dotted module or a name in one."""

    where: str
    line: int
    target: str
    only_typing: bool
    at_import_time: bool

    def __str__(self) -> str:
        return f"{self.where}:{self.line} imports {self.target}"


@cache
def sources() -> dict[str, Path]:
    """Every module of the product: ``"core/trainer.py"`` -> path."""
    found = {}
    for package in ALLOWED:
        base = ROOT / "packages" / package / "src" / "posttrain"
        found |= {str(path.relative_to(base)): path for path in sorted(base.rglob("*.py"))}
    return found


@cache
def package_of(where: str) -> str:
    """The distribution that a file is in: core, seq2seq, sft or rl."""
    return sources()[where].relative_to(ROOT / "packages").parts[0]


@cache
def tree(where: str) -> ast.Module:
    return ast.parse(sources()[where].read_text(encoding="utf-8"))


def module_of(where: str) -> str:
    """``cli/__init__.py`` -> ``posttrain.cli``."""
    return "posttrain." + where.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def modules() -> dict[str, str]:
    return {module_of(where): where for where in sources()}


def walk(node: ast.AST, only_typing: bool = False, at_import_time: bool = True) -> Iterator[tuple[ast.AST, bool, bool]]:
    """Every node below `node`, with whether it is read by type checkers alone and whether importing the file runs
    it.
    """
    for child in ast.iter_child_nodes(node):
        typing, runs = only_typing, at_import_time and not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and child in node.body:
            typing = True
        yield child, typing, runs
        yield from walk(child, typing, runs)


@cache
def imports(where: str) -> tuple[Import, ...]:
    found = []
    for node, typing, runs in walk(tree(where)):
        if isinstance(node, ast.Import):
            found += [Import(where, node.lineno, name.name, typing, runs) for name in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = (
                    module_of(where).split(".") if where.endswith("__init__.py") else module_of(where).split(".")[:-1]
                )
                base = ".".join([*package[: len(package) - node.level + 1], *([base] if base else [])])
            found += [Import(where, node.lineno, f"{base}.{name.name}", typing, runs) for name in node.names]
    return tuple(found)


def all_imports() -> list[Import]:
    return [one for where in sources() for one in imports(where)]


def our_module(target: str) -> str | None:
    """The module of ours that `target` is, or is a name in."""
    while target.startswith("posttrain."):
        if target in modules():
            return target
        target = target.rpartition(".")[0]
    return None


def layer(module: str) -> int | None:
    """The line of LAYERS that names `module`, or the folder that it is in; None outside the core distribution."""
    name = module.removeprefix("posttrain.")
    while name not in LAYER:
        name, dot, _ = name.rpartition(".")
        if not dot:
            return None
    return LAYER[name]


def in_core() -> list[str]:
    return [where for where in sources() if package_of(where) == "core"]


def test_the_search_finds_the_code():
    assert len(sources()) > 15 and "core/trainer.py" in sources()
    assert any(one.target == "torch" for one in all_imports())


def test_nobody_owns_the_namespace():
    assert sorted(ROOT.glob("packages/*/src/posttrain/__init__.py")) == []
    assert sorted(ROOT.glob("packages/*/src/posttrain/*.py")) == []


def test_each_package_is_typed():
    typed = {path.parent.name for path in ROOT.glob("packages/*/src/posttrain/*/py.typed")}
    assert typed == set().union(*ALLOWED.values())


def test_siblings_never_meet():
    wrong = []
    for one in all_imports():
        package = package_of(one.where)
        if one.target.split(".")[0] == "posttrain" and one.target.split(".")[1] not in ALLOWED[package]:
            wrong.append(str(one))
    assert wrong == []


def test_every_module_of_the_core_distribution_has_its_layer():
    named = set(LAYER) - {"core"}
    wrong = [where for where in in_core() if layer(module_of(where)) is None]
    wrong += [where for where in in_core() if where.startswith("core/") and layer(module_of(where)) == LAYER["core"]]
    assert sorted(set(wrong) - {"core/__init__.py", "core/testing.py", "lm/__init__.py"}) == []
    assert [name for name in named if f"posttrain.{name}" not in modules()] == [], "a folder that is gone"
    assert len(LAYERS) <= 25


def test_a_newcomer_finds_nine_files_or_fewer_beside_the_folders():
    assert len([where for where in sources() if where.startswith("core/") and where.count("/") == 1]) <= 9


def test_imports_point_down_or_along_a_layer():
    wrong = []
    for one in all_imports():
        here, there = module_of(one.where), our_module(one.target)
        if package_of(one.where) != "core" or there is None or layer(there) is None or one.only_typing:
            continue
        if layer(there) > layer(here) and here != "posttrain.core":
            wrong.append(f"{one}: {LAYERS[layer(here)].strip()} is below {there.removeprefix('posttrain.')}")
    assert wrong == []


def test_the_lowest_layers_need_torch_numpy_and_the_standard_library():
    allowed = LOWEST_PACKAGES | set(sys.stdlib_module_names) | {"posttrain"}
    lowest = [one for one in all_imports() if (layer(module_of(one.where)) or 0) <= LOWEST and one.where in in_core()]
    assert lowest and [str(one) for one in lowest if one.target.split(".")[0] not in allowed] == []


def test_no_import_goes_in_a_circle():
    graph = {module: set() for module in modules()}
    for one in all_imports():
        there = our_module(one.target)
        if there is not None and not one.only_typing and there != module_of(one.where):
            graph[module_of(one.where)].add(there)
    assert circles(graph) == []


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules that reach each other (strongly connected components of more than one), Tarjan 1972."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(node: str) -> None:
        number[node] = low[node] = len(number)
        stack.append(node)
        for neighbour in graph[node]:
            if neighbour not in number:
                visit(neighbour)
                low[node] = min(low[node], low[neighbour])
            elif neighbour in stack:
                low[node] = min(low[node], number[neighbour])
        if low[node] == number[node]:
            start = stack.index(node)
            group = stack[start:]
            del stack[start:]
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in number:
            visit(node)
    return found


def test_the_search_for_circles_finds_one():
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == [["b", "c"]]


def test_modules_take_what_they_need_and_no_trainer():
    wrong = []
    for where in in_core():
        if (layer(module_of(where)) or 0) < KNOWS_TRAINERS:
            for node in ast.walk(tree(where)):
                if isinstance(node, ast.arg) and node.arg == "trainer":
                    wrong.append(f"{where}:{node.lineno} takes a trainer")
    assert wrong == []


def test_files_are_named_for_what_they_hold():
    assert [where for where in sources() if set(where.removesuffix(".py").split("/")) & EMPTY_NAMES] == []


@pytest.mark.parametrize("package", ["core", "rl", "seq2seq", "sft"])
def test_tests_stand_in_the_folders_of_what_they_test(package):
    """tests/core has the folders of posttrain.core, and lm, cli and compat, which are in the same wheel."""
    sources, tests = ROOT / "packages" / package / "src" / "posttrain", ROOT / "tests" / package
    homes = [sources / package, sources] if package == "core" else [sources / package]
    folders = {path.parent.relative_to(tests) for path in tests.rglob("test_*.py")}
    strange = [str(folder) for folder in folders if not any((home / folder).is_dir() for home in homes)]
    assert folders and not strange


def test_long_files_say_why():
    long = {w for w, path in sources().items() if len(path.read_text(encoding="utf-8").splitlines()) > 500}
    assert sorted(long - set(LONG)) == []
    assert sorted(set(LONG) - set(sources())) == [], "a reason is given for a file that is gone"


def test_hooks_are_short():
    places = {"core/trainer.py": "Trainer", "compat/trainer_names.py": "TrainerNames"}
    lengths = {
        method.name: body_lines(method, where)
        for where, name in places.items()
        for method in class_nodes()[f"{module_of(where)}.{name}"].body
        if isinstance(method, ast.FunctionDef) and (name == "Trainer" or method.name in HOOKS)
    }
    assert sorted(set(HOOKS) - set(lengths)) == [], "a hook that users of transformers know is missing"
    hooks = {*HOOKS, *(name for name in lengths if not name.startswith("_"))}
    assert {name: lengths[name] for name in hooks if lengths[name] > 10 and name not in LONG_HOOKS} == {}


def body_lines(function: ast.FunctionDef, where: str) -> int:
    """Lines of code in the body: without docstring, comments and empty lines."""
    first = function.body[1:] if ast.get_docstring(function) is not None else function.body
    text = sources()[where].read_text(encoding="utf-8").splitlines()
    lines = text[first[0].lineno - 1 : function.end_lineno] if first else []
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def test_no_trainer_of_others_is_used():
    wrong = []
    for one in all_imports():
        parts = one.target.split(".")
        foreign = parts[0] == "transformers" and (
            parts[-1] in FORBIDDEN_NAMES or (len(parts) > 1 and parts[1].startswith(("trainer", "training_args")))
        )
        if foreign or parts[0] in ("trl", "lightning", "composer"):
            wrong.append(str(one))
    assert wrong == []


def test_backends_are_known_in_one_folder():
    wrong = []
    for one in all_imports():
        for backend in BACKENDS:
            known = one.target == backend or one.target.startswith(backend + ".")
            if known and not one.where.startswith(BACKENDS_FOLDERS):
                wrong.append(str(one))
    assert wrong == []


HEAVY = """
    datasets peft pandas bitsandbytes deepspeed transformers.modeling_utils transformers.trainer
    transformers.training_args trl wandb tensorboard mlflow matplotlib
""".split()
#: The packages that importing a trainer may load beside torch, and as many modules of the standard library at most.
LIGHT, STANDARD = {"posttrain", "numpy", "huggingface_hub", "safetensors", "xxhash", "packaging"}, 30
TRAINERS = (
    "from posttrain.core import Trainer, TrainingArguments",
    "from posttrain.sft import SFTTrainer",
    "from posttrain.rl import DPOTrainer, RewardTrainer, GRPOTrainer, DistillationTrainer, OnlineDPOTrainer",
    "from posttrain.seq2seq import Seq2SeqTrainer",
)


def loaded(statement: str) -> set[str]:
    """The modules that a new interpreter loads by a statement beyond those of ``import torch``."""
    code = f"import sys, torch\nbefore = {{*sys.modules}}\n{statement}\nprint(*({{*sys.modules}} - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return {*done.stdout.split()}


@pytest.mark.parametrize("statement", TRAINERS)
def test_importing_a_trainer_loads_what_is_light_and_no_more_of_torch(statement):
    """The rest of torch, such as torch._dynamo with sympy, doubles the time that `import torch` takes."""
    found = {name.partition(".")[0] for name in loaded(statement)} - LIGHT
    found = {name for name in found if not name.startswith(("_cython", "cython_runtime"))}
    assert found <= sys.stdlib_module_names and len(found) <= STANDARD


def test_importing_the_command_line_is_cheap():
    assert not loaded("import posttrain.cli") & {*HEAVY}


# What each class of arguments may define for itself; see `posttrain.core.training.preflight`.
HOOKS_OF_ARGUMENTS = {"_normalize", "_problems", "_preflight"}


def private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@cache
def class_nodes() -> dict[str, ast.ClassDef]:
    """Every class of the product by ``module.name``."""
    return {
        f"{module_of(where)}.{node.name}": node
        for where in sources()
        for node in ast.walk(tree(where))
        if isinstance(node, ast.ClassDef)
    }


def private_names(node: ast.ClassDef, used: bool) -> set[str]:
    """Private names that a class defines, and sets on ``self``; if `used`, also those it reads of ``self``."""
    found = {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in node.body:
        targets = child.targets if isinstance(child, ast.Assign) else [getattr(child, "target", None)]
        found |= {target.id for target in targets if isinstance(target, ast.Name)}
    for child in ast.walk(node):
        if isinstance(child, ast.Attribute):
            of_self = isinstance(child.value, ast.Name) and child.value.id == "self"
            of_super = isinstance(child.value, ast.Call) and getattr(child.value.func, "id", "") == "super"
            if (of_self and isinstance(child.ctx, ast.Store)) or (used and (of_self or of_super)):
                found.add(child.attr)
    return {name for name in found if private(name)}


def test_no_package_uses_private_names_of_the_core():
    """What a subclass in another package needs is public; else only we could write subclasses."""
    wrong, seen = [], set()
    for name, node in sorted(class_nodes().items()):
        module, _, kind = name.rpartition(".")
        if module.split(".")[1] in CORE or not hasattr(importlib.import_module(module), kind):
            continue
        bases = getattr(sys.modules[module], kind).__mro__
        owners = [
            f"{base.__module__}.{base.__qualname__}"
            for base in bases
            if base.__module__.split(".")[1:2] and base.__module__.split(".")[1] in CORE
        ]
        nodes = [class_nodes().get(owner) for owner in owners]
        of_core = {private for node in nodes if node is not None for private in private_names(node, used=False)}
        wrong += [f"{name}.{used}" for used in sorted(private_names(node, used=True) & of_core - HOOKS_OF_ARGUMENTS)]
        seen |= of_core
    assert {"_evaluate", "_fire", "_longest_first", "_train_batch_size"} <= seen, "the search finds nothing"
    assert wrong == []


def test_a_trainer_is_one_class_and_its_accessors():
    from posttrain.core import Trainer

    assert [kind.__name__ for kind in Trainer.__mro__] == ["Trainer", "TrainerNames", "object"]
    node = class_nodes()["posttrain.compat.trainer_names.TrainerNames"]
    sets = {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
    assert sets <= {"hp_name", "hp_search_backend"}


def test_one_module_names_kinds_of_accelerators():
    """Elsewhere torch.accelerator and `posttrain.core.data.accelerator` are asked, so that XPU trains as CUDA does."""
    found = []
    for where, path in sources().items():
        if where.startswith("core/distributed/") or where == "core/data/accelerator.py":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            if text == "cuda" or text.startswith("cuda:"):
                found.append(f"{where}:{node.lineno} {text!r}")
            elif isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.cuda":
                found.append(f"{where}:{node.lineno} torch.cuda")
    assert not found


def test_the_repository_holds_sources_alone():
    """No package, archive or model that a tool downloaded is committed: a history never gets rid of it."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True)
    if listed.returncode:
        pytest.skip("this is no clone")
    files = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    large = {str(path.relative_to(ROOT)) for path in files if path.exists() and path.stat().st_size > 300_000}
    assert large <= {"examples/data/gsm8k/train.jsonl", "examples/data/gsm8k_preferences/train.jsonl"}
    endings = (".whl", ".gz", ".zip", ".safetensors", ".bin", ".pt", ".so")
    assert [str(path) for path in files if path.name.endswith(endings)] == []


def test_each_text_is_written_by_what_names_its_file_in_an_error():
    """A failed write (a full disk, a limit to the size of files) does not know its file; `Path.write_text` neither.

    The files of a checkpoint are named by their folder, in `Store.writing` and `save_model`.
    """
    in_checkpoints = {f"core/checkpoint/{name}.py" for name in "codec manifest shares transaction".split()}
    in_checkpoints |= {"core/files/__init__.py", "core/training/saving.py"}
    writers = {where for where, path in sources().items() if ".write_text(" in path.read_text(encoding="utf-8")}
    assert writers == in_checkpoints, "write it by posttrain.core.files.write_text"
