"""The size of the house may only fall: compares its figures with those on record.

``python .ci/house.py`` fails where a figure is above ``.ci/house.json``; ``--write`` records what there is. Whoever
raises one says why in the same commit. The last three lists are files, functions and changes of file that an optimizer
step, a save and a GRPO step of tiny models pass through.
"""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
RECORD = Path(__file__).with_name("house.json")
SOURCES = sorted(ROOT.glob("packages/*/src/posttrain/**/*.py"))
PRIVATE_ENGLISH = r"\b(?:told|nobody|somebody|kin|afresh|borne|reckoned|gone on from)\b"
#: Files, functions and changes of file by which two traces may differ.
DUE = 4
#: What importing the Trainer must not load beside what `import torch` loads.
HEAVY = ("torch._dynamo", "torch._inductor", "sympy", "transformers", "datasets", "pandas")


def module_of(path: Path) -> str:
    name = path.as_posix().split("/src/")[1].removesuffix(".py").replace("/", ".")
    return name.removesuffix(".__init__")


def imported(tree: ast.AST, typing: bool = False) -> Iterator[str]:
    """The dotted names that a file imports, but for type checkers alone."""
    for child in ast.iter_child_nodes(tree):
        only = typing or (isinstance(tree, ast.If) and "TYPE_CHECKING" in ast.unparse(tree.test) and child in tree.body)
        if isinstance(child, ast.ImportFrom) and not only:
            yield from (f"{child.module}.{name.name}" for name in child.names)
        elif isinstance(child, ast.Import) and not only:
            yield from (name.name for name in child.names)
        yield from imported(child, only)


def reached(start: list[str], graph: dict[str, set[str]]) -> set[str]:
    found: set[str] = set()
    while start:
        module = start.pop()
        if module not in found:
            found.add(module)
            start.extend(graph[module])
    return found


def static() -> dict[str, Any]:
    """What the source files alone show."""
    texts = {module_of(path): path.read_text(encoding="utf-8") for path in SOURCES}
    graph: dict[str, set[str]] = {}
    for module, text in texts.items():
        names = [name for name in imported(ast.parse(text)) if name.startswith("posttrain.")]
        graph[module] = {name if name in texts else name.rpartition(".")[0] for name in names} & texts.keys()
    lines = {module: len(text.splitlines()) for module, text in texts.items()}
    by = Counter()
    for module, number in lines.items():
        by[module.split(".")[1]] += number
    core = {module for module in texts if module.startswith("posttrain.core")}
    everything = "\n".join(texts.values())
    return {
        **{f"lines of {package}": number for package, number in sorted(by.items())},
        "lines of all": sum(lines.values()),
        "modules of core that Trainer never reaches": len(
            core - reached(["posttrain.core.trainer", "posttrain.core.arguments"], graph)
        ),
        "files over 500 lines": sum(number > 500 for number in lines.values()),
        "lines of the longest file": max(lines.values()),
        "files directly in rl": len([*ROOT.glob("packages/rl/src/posttrain/rl/*.py")]),
        "fmt: skip": everything.count("fmt: skip"),
        "getattr and hasattr": len(re.findall(r"\b(?:getattr|hasattr)\(", everything)),
        "private English": len(re.findall(PRIVATE_ENGLISH, everything, re.IGNORECASE)),
    }


def loaded() -> int:
    """How many of `HEAVY` importing the Trainer loads."""
    code = f"""
import sys, torch
before = set(sys.modules)
from posttrain.core import Trainer
print(*[name for name in {HEAVY!r} if name in sys.modules and name not in before])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return len(done.stdout.split())


def names_on(kind: type) -> int:
    """Methods and properties of a class and its bases."""
    of_class = (callable, lambda value: isinstance(value, (property, staticmethod, classmethod)))
    held = [vars(base).items() for base in kind.__mro__[:-1]]
    return len({name for items in held for name, value in items if any(test(value) for test in of_class)})


class Trace:
    """Files and functions of ours that run between `start` and `stop`, and how often the file changes."""

    def start(self) -> None:
        self.files: set[str] = set()
        self.functions: set[tuple[str, str]] = set()
        self.changes, self.now, self._stack = 0, "", []
        sys.setprofile(self._see)

    def stop(self) -> list[int]:
        sys.setprofile(None)
        return [len(self.files), len(self.functions), self.changes]

    def _see(self, frame: Any, event: str, _: Any) -> None:
        name, function = frame.f_code.co_filename, frame.f_code.co_qualname
        is_ours = "/src/posttrain/" in name and not function.endswith(("<genexpr>", "comp>"))
        if event not in ("call", "return") or not is_ours:
            return
        if event == "call":
            self.files.add(name)
            self.functions.add((name, function))
            self._stack.append(name)
        elif self._stack:
            self._stack.pop()
        here = self._stack[-1] if self._stack else self.now
        self.changes += here != self.now
        self.now = here


def traced() -> dict[str, Any]:
    """The way of an optimizer step, a save and a GRPO step."""
    import torch
    from datasets import Dataset

    from posttrain.core import Trainer, TrainerCallback, TrainingArguments
    from posttrain.core.testing import causal_lm, tokenizer
    from posttrain.rl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(1)
    found: dict[str, Any] = {"names on Trainer": names_on(Trainer), "names on GRPOTrainer": names_on(GRPOTrainer)}
    trace = Trace()

    class OneStep(TrainerCallback):
        def __init__(self, first: int, name: str) -> None:
            self.first, self.name = first, name

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == self.first + 1:
                found[self.name] = trace.stop()
            elif state.global_step == self.first:
                trace.start()

    class Saves(Trainer):
        def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
            if self.state.global_step == 2:
                return super()._save_checkpoint(*args, **kwargs)
            trace.start()
            super()._save_checkpoint(*args, **kwargs)
            self.saving.settle()
            found["save"] = trace.stop()

    def length(completions: list[Any], **_: Any) -> list[float]:
        return [float(len(str(completion))) for completion in completions]

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 384, (32, 12), generator=generator).tolist()
    rows = [{"input_ids": row, "attention_mask": [1] * 12, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        common = {"output_dir": folder, "report_to": "none", "logging_steps": 1000, "use_cpu": True}
        common |= {"disable_tqdm": True, "save_strategy": "no"}
        args = TrainingArguments(max_steps=5, per_device_train_batch_size=2, **common)
        Trainer(model=causal_lm(), args=args, train_dataset=rows, callbacks=[OneStep(2, "step")]).train()
        saving = common | {"save_strategy": "steps", "save_steps": 2, "save_total_limit": 1}
        args = TrainingArguments(max_steps=4, per_device_train_batch_size=2, **saving)
        Saves(model=causal_lm(), args=args, train_dataset=rows).train()
        prompts = Dataset.from_list([{"prompt": text} for text in ("the cat", "a dog sat", "one two", "hello")] * 4)
        sizes = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 8, "beta": 0.0}
        GRPOTrainer(
            model=causal_lm(), reward_funcs=length, args=GRPOConfig(max_steps=3, **sizes, **common),
            train_dataset=prompts, processing_class=tokenizer(), callbacks=[OneStep(1, "GRPO step")],
        ).train()  # fmt: skip
    return found


def main() -> int:
    with contextlib.redirect_stdout(sys.stderr):
        found = static() | {"heavy packages that importing the Trainer loads": loaded()} | traced()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        print(f"{len(found)} figures of the house are on record now.")
        return 0
    allowed = json.loads(RECORD.read_text(encoding="utf-8"))
    above = {name: value for name, value in found.items() if _is_above(value, allowed[name])}
    for name, value in above.items():
        print(f"{name}: {value}, and {allowed[name]} is on record. It may only fall: remove as much elsewhere.")
    return 1 if above else 0


def _is_above(value: Any, most: Any) -> bool:
    if isinstance(value, list):  # a look that is due once in a while may fall into the traced step, or not
        return any(one > other + DUE for one, other in zip(value, most, strict=True))
    return value > most


if __name__ == "__main__":
    raise SystemExit(main())
