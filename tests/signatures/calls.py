"""Finds by the syntax tree how this project calls packages that need a GPU, and compares it with their releases.

``python -m tests.signatures.calls`` (`make signatures`) fetches the releases and prints a table.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from tests.signatures.releases import FLASH_ATTENTION, RELEASES, Release, archive_of, fetch, package_of

ROOT = Path(__file__).parents[2]
PACKAGES = frozenset(map(package_of, RELEASES))
#: What an expression is that the syntax tree does not show, by file.
KNOWN: dict[str, dict[str, tuple[str, ...]]] = {
    "resumable.py": {
        "quantized": ("torchao.optim.subclass_8bit.OptimState8bit", "torchao.optim.subclass_4bit.OptimState4bit")
    },
    "builder.py": {"manager": ("bitsandbytes.optim.GlobalOptimManager",)},
    "strategies/deepspeed.py": {"self.engine": ("deepspeed.runtime.engine.DeepSpeedEngine",)},
    "vllm_colocated.py": {"self._llm": ("vllm.LLM",), "llm": ("vllm.LLM",)},
    "transfer.py": {"self._engine": ("vllm.distributed.weight_transfer.nccl_engine.NCCLTrainerWeightTransferEngine",)},
}


@dataclass(frozen=True)
class Use:
    """A name of a package, or a call of it.

    Attributes:
        path: dotted. place: file and line. positions: arguments by position; None: it is not called.
        names: of arguments. complete: whether nothing else is given.
    """

    path: str
    place: str
    positions: int | None = None
    names: frozenset[str] = frozenset()
    complete: bool = True

    @property
    def package(self) -> str:
        return self.path.partition(".")[0]

    def problem(self, release: Release) -> str | None:
        """Why it fails with `release`."""
        try:
            if self.positions is None:
                release.find(self.path)
                return None
            return release.signature(self.path).problem(self.positions, set(self.names), self.complete)
        except LookupError as error:
            return f"there is no {error.args[0]}"


def uses() -> list[Use]:
    """All in the packages' sources."""
    found: dict[Use, None] = {}
    for path in sorted(ROOT.glob("packages/*/src/**/*.py")):
        text = path.read_text(encoding="utf-8")
        if any(package in text for package in PACKAGES):
            found |= dict.fromkeys(_Reader(path, ast.parse(text)).uses())
    return [*found, *of_optimizers()]


def of_optimizers() -> Iterator[Use]:
    """How an optimizer of these packages is made: by names in a table, so the table is asked."""
    from posttrain.core import TrainingArguments
    from posttrain.core.optim import by_name, resumable

    class Classes(dict[str, type]):
        def __init__(self, module: str, *_: Any, **__: Any) -> None:
            self.module = module

        def __missing__(self, name: str) -> type:
            return type(name, (), {"__module__": self.module})

        __getattr__ = __missing__
        __dict__ = property(lambda self: self)  # type: ignore[assignment]

    resumable.torchao_adamw.cache_clear()
    args = TrainingArguments("unused", use_cpu=True, report_to="none")
    with mock.patch.object(by_name, "require", Classes), mock.patch.object(resumable, "require", Classes):
        for name, factory in by_name.OPTIMIZERS.items():
            package, _ = by_name.package_of(name) or ("", "")
            if package in PACKAGES and not name.startswith("galore"):  # which wraps another
                kind, given = factory(args, None)
                base = kind.__mro__[-2]
                yield Use(f"{base.__module__}.{base.__name__}", f"optim={name!r}", 1, frozenset(given))
    resumable.torchao_adamw.cache_clear()


def of_flash_attention(version: int) -> Use:
    """What a packed row needs of the kernel of that version; transformers calls it, and leaves out what it lacks."""
    rule = {"causal", "softmax_scale", "window_size", "softcap", "deterministic"}
    names = frozenset(rule | {f"{name}_{of}" for name in ("cu_seqlens", "max_seqlen") for of in "qk"})
    return Use(FLASH_ATTENTION[version][1], f"attn_implementation='flash_attention_{version}'", 3, names)


class _Reader:
    """Reads one file."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self.path, self.tree = path, tree
        self.known = next((known for end, known in KNOWN.items() if str(path).endswith(end)), {})
        self.functions = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        self.named: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                self.named |= {name.asname or name.name: f"{node.module}.{name.name}" for name in node.names}
            elif isinstance(node, ast.Import):
                self.named |= {name.name: name.name for name in node.names if not name.asname}
            elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                if (required := self._required(node.value)) is not None:
                    self.named[node.targets[0].id] = required

    def uses(self) -> Iterator[Use]:
        for function in [self.tree, *self.functions.values()]:
            for node in ast.walk(function):
                yield from self._use(node, function)

    def _use(self, node: ast.AST, function: ast.AST) -> Iterator[Use]:
        if isinstance(node, ast.ImportFrom) and not node.level and node.module:
            for name in node.names:
                yield from self._made([f"{node.module}.{name.name}"], node)
        elif isinstance(node, ast.Call) and isinstance(function, ast.FunctionDef):
            stars = any(isinstance(argument, ast.Starred) for argument in node.args)
            names, complete = self._keys(ast.Dict([k.arg and ast.Constant(k.arg) for k in node.keywords],
                                                  [k.value for k in node.keywords]), function)  # fmt: skip
            positions = sum(not isinstance(argument, ast.Starred) for argument in node.args)
            yield from self._made(self._paths(node.func), node, positions, names, complete and not stars)
        elif isinstance(node, ast.Attribute) and ast.unparse(node) not in self.known:
            yield from self._made(self._paths(node), node)
        elif (
            isinstance(function, ast.FunctionDef)
            and isinstance(node, ast.Return)
            and isinstance(node.value, ast.Tuple)
            and len(node.value.elts) == 2
        ):
            kind, options = node.value.elts  # a class of optimizers and its arguments, beside the parameters
            names, complete = self._keys(options, function)
            yield from self._made(self._paths(kind), node, 1, names, complete)

    def _made(
        self, paths: list[str], node: ast.AST, positions: int | None = None, names: frozenset[str] = frozenset(),
        complete: bool = True,
    ) -> Iterator[Use]:  # fmt: skip
        place = f"{self.path.relative_to(ROOT)}:{node.lineno}"
        for path in paths:
            if path.partition(".")[0] in PACKAGES:
                yield Use(path, place, positions, names, complete)

    def _required(self, node: ast.AST) -> str | None:
        """The module that ``require("...")`` or a function of this file that returns one gives."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return None
        if node.func.id == "require" and isinstance(node.args[0], ast.Constant):
            return node.args[0].value
        function = self.functions.get(node.func.id)
        last = function.body[-1] if function is not None else None
        return self._required(last.value) if isinstance(last, ast.Return) and last.value is not None else None

    def _paths(self, node: ast.AST) -> list[str]:
        """The dotted paths that an expression may be."""
        if (known := self.known.get(ast.unparse(node))) is not None:
            return list(known)
        if isinstance(node, ast.Attribute):
            return [f"{path}.{node.attr}" for path in self._paths(node.value)]
        if isinstance(node, ast.Name):
            return [self.named[node.id]] if node.id in self.named else []
        return [required] if (required := self._required(node)) is not None else []

    def _keys(self, node: ast.AST, function: ast.AST) -> tuple[frozenset[str], bool]:
        """The keys of a dict as far as they can be read, and whether that is all."""
        if isinstance(node, ast.Dict):
            keys, complete = set(), True
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant):
                    keys.add(key.value)
                else:
                    more, whole = self._keys(value, function) if key is None else (frozenset(), False)
                    keys |= more
                    complete &= whole
            return frozenset(keys), complete
        if isinstance(node, ast.BinOp):
            (left, one), (right, other) = self._keys(node.left, function), self._keys(node.right, function)
            return left | right, one and other
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in self.functions:
            last = self.functions[node.func.id].body[-1]
            return self._keys(last.value, function) if isinstance(last, ast.Return) else (frozenset(), False)
        if isinstance(node, ast.Name):
            keys, complete, seen = frozenset(), True, False
            for one in ast.walk(function):
                given = isinstance(one, ast.AugAssign) or (isinstance(one, ast.Assign) and len(one.targets) == 1)
                target = (one.target if isinstance(one, ast.AugAssign) else one.targets[0]) if given else None
                if isinstance(one, ast.AnnAssign):
                    target = one.target
                if isinstance(target, ast.Name) and target.id == node.id:
                    more, whole = self._keys(one.value, function)
                    keys, complete, seen = keys | more, complete and whole, True
                elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == node.id:
                    keys |= {target.slice.value} if isinstance(target.slice, ast.Constant) else set()
            return keys, complete and seen
        return frozenset(), False


def main() -> int:
    fetch()
    found, failed = uses(), 0
    compared = [(name, package_of(name), found) for name in RELEASES]
    compared += [
        (name, path.partition(".")[0], [of_flash_attention(version)])
        for version, (name, path) in FLASH_ATTENTION.items()
    ]
    for name, package, those in compared:
        archive = archive_of(name)
        assert archive is not None
        release = Release(name, archive, package)
        for use in (use for use in those if use.package == package):
            problem = use.problem(release)
            failed += problem is not None
            if use.positions is not None or problem:
                given = f"({', '.join([*['_'] * (use.positions or 0), *(f'{name}=' for name in sorted(use.names))])})"
                print(f"{name:22} {problem or 'fits'}: {use.path}{given}  {use.place}")
    print(f"{len(found)} names and calls, {failed} of which do not fit.")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
