"""Reads the signatures of packages from their releases, without installing them: many need a GPU to be imported."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: What `make signatures` downloads: the newest that this version of posttrain was compared with.
RELEASES = (
    "flash-attn==2.8.3",
    "bitsandbytes==0.50.2",
    "torchao==0.18.0",
    "liger-kernel==0.8.5",
    "deepspeed==0.19.8",
    "vllm==0.33.0",
)
#: What transformers calls for a model's `attn_implementation`, by the version in its name. The third has no package
#: on PyPI: it is a folder of the sources of the second.
FLASH_ATTENTION = {
    2: ("flash-attn==2.8.3", "flash_attn.flash_attn_varlen_func"),
    3: ("flash-attn-3==2.8.3", "hopper.flash_attn_interface.flash_attn_varlen_func"),
    4: ("flash-attn-4==4.0.0b36", "flash_attn.cute.flash_attn_varlen_func"),
}
HOPPER = "https://github.com/Dao-AILab/flash-attention/archive/refs/tags/v2.8.3.tar.gz"
FOLDER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "posttrain" / "releases"
#: Sources, where the wheel is large or there is none. Their set-up is asked for the version and builds nothing.
SOURCES = ("flash-attn", "deepspeed", "vllm")
QUIET = {"FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE", "DS_BUILD_OPS": "0", "VLLM_TARGET_DEVICE": "empty"}


def package_of(release: str) -> str:
    """The package that is imported: ``flash_attn`` of ``flash-attn==2.8.3``."""
    return release.partition("==")[0].replace("-", "_")


def archive_of(release: str) -> Path | None:
    """The file in `FOLDER`; None if it was not downloaded."""
    version = release.partition("==")[2]
    found = [path for path in FOLDER.glob(f"{package_of(release)}-{version}*") if path.suffix in (".whl", ".gz")]
    return found[0] if found else None


def fetch() -> None:
    """Download the `RELEASES` and those of `FLASH_ATTENTION` that are not in `FOLDER` yet: 100 MB."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    with tempfile.TemporaryDirectory() as build:
        wanted = dict.fromkeys([*RELEASES, *(release for release, _ in FLASH_ATTENTION.values())])
        missing = [release for release in wanted if archive_of(release) is None]
        if any(release.startswith("vllm") for release in missing):  # what its set-up imports
            needs = ["setuptools-rust", "setuptools-scm", "jinja2", "wheel", "packaging"]
            subprocess.run([*pip, "install", "--target", build, *needs], check=True)
        for release in missing:
            name, _, version = release.partition("==")
            if name == "flash-attn-3":
                urllib.request.urlretrieve(HOPPER, FOLDER / f"{package_of(release)}-{version}.tar.gz")
                continue
            kind = "--no-binary" if name in SOURCES else "--only-binary"
            command = [*pip, "download", "--no-deps", "--no-build-isolation", kind, name, "--dest", str(FOLDER)]
            own = {"PYTHONPATH": build, "VLLM_VERSION_OVERRIDE": version} | QUIET
            subprocess.run([*command, release], check=True, env=os.environ | own)


@dataclass(frozen=True)
class Signature:
    """What a call has to fit.

    Attributes:
        names: parameters that can be given by position or name, in order, without ``self``. only: those by name alone.
        required: parameters without a default. more, more_names: whether it takes ``*args``, ``**kwargs``.
    """

    names: tuple[str, ...]
    only: tuple[str, ...]
    required: frozenset[str]
    more: bool = False
    more_names: bool = False

    def problem(self, positions: int, names: set[str], complete: bool) -> str | None:
        """Why a call with `positions` arguments and these `names` fails; `complete`: it gives nothing else."""
        known = {*self.names, *self.only}
        if not self.more_names and (unknown := sorted(names - known)):
            return f"takes no {', '.join(unknown)}"
        if positions > len(self.names) and not self.more:
            return f"takes {len(self.names)} arguments by position, and is given {positions}"
        if twice := sorted(names & {*self.names[:positions]}):
            return f"is given {', '.join(twice)} by position too"
        if complete and (absent := sorted(self.required - names - {*self.names[:positions]})):
            return f"needs {', '.join(absent)}"
        return None


#: Of what takes anything, as far as the syntax tree shows.
OPEN = Signature((), (), frozenset(), more=True, more_names=True)


class Release:
    """The modules of one release, in the folder `package` of its archive."""

    def __init__(self, release: str, archive: Path, package: str = "") -> None:
        self.package = package or package_of(release)
        self.texts: dict[str, str] = {}
        self._bindings: dict[str, dict[str, ast.AST]] = {}
        if archive.suffix == ".whl":
            with zipfile.ZipFile(archive) as files:
                for name in files.namelist():
                    self._add(name, lambda name=name: files.read(name))
        else:
            with tarfile.open(archive) as files:
                for member in files:
                    self._add(member.name.partition("/")[2], lambda member=member: files.extractfile(member).read())

    def _add(self, name, read) -> None:
        if name.startswith(self.package + "/") and name.endswith(".py"):
            module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            self.texts[module] = read().decode()

    def bindings(self, module: str) -> dict[str, ast.AST]:
        """Name -> what binds it at the top of `module`, in conditions too."""
        if module in self._bindings:
            return self._bindings[module]
        found = self._bindings[module] = {}
        for node in _statements(ast.parse(self.texts[module]).body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                found.setdefault(node.name, node)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                for name in node.names:
                    if name.name == "*":
                        star = self.bindings(self._from(module, node))
                        found |= {own: node for own in star if own not in found}
                    else:
                        found.setdefault(name.asname or name.name.partition(".")[0], node)
            elif isinstance(node, (ast.Assign, ast.AnnAssign)):
                for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                    if isinstance(target, ast.Name):
                        found.setdefault(target.id, node)
        return found

    def _from(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = module.split(".")
        if any(other.startswith(module + ".") for other in self.texts):  # a package imports from itself
            package.append("")
        return ".".join([*package[: -node.level], *([node.module] if node.module else [])])

    def find(self, path: str) -> tuple[str, ast.AST | None]:
        """The module and the definition of a dotted `path`; (module, None) for a module, and for what an attribute of
        an object has in turn.

        Raises:
            LookupError: there is none.
        """
        parts = path.split(".")
        for depth in range(len(parts), 0, -1):
            if (module := ".".join(parts[:depth])) in self.texts:
                return self._inside(module, parts[depth:], path)
        raise LookupError(path)

    def _inside(self, module: str, names: list[str], path: str) -> tuple[str, ast.AST | None]:
        if not names:
            return module, None
        node = self.bindings(module).get(names[0])
        if isinstance(node, ast.ImportFrom):
            whole = self._from(module, node)
            named = next((one.name for one in node.names if (one.asname or one.name) == names[0]), names[0])
            return self.find(".".join([whole, named, *names[1:]]))
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Attribute)):
            return self._inside(module, [*ast.unparse(node.value).split("."), *names[1:]], path)
        if isinstance(node, ast.ClassDef) and len(names) > 1:
            member = self._member(module, node, names[1], path)
            return member if len(names) == 2 else (module, None)
        if node is None or len(names) > 1:
            raise LookupError(path)
        return module, node

    def _member(self, module: str, kind: ast.ClassDef, name: str, path: str) -> tuple[str, ast.AST]:
        for place, one in self._classes(module, kind):
            for node in one.body:
                named = [node.name] if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else _targets(node)
                if name in named and not _is_overload(node):
                    return place, node
            for node in ast.walk(one):  # what its methods set
                if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, ast.Store):
                    if ast.unparse(node) in (f"self.{name}", f"self.__dict__['{name}']"):
                        return place, node
        raise LookupError(path)

    def _classes(self, module: str, kind: ast.ClassDef) -> list[tuple[str, ast.ClassDef]]:
        """`kind` and its bases in this package, in the order in which attributes are looked up, nearly."""
        found = [(module, kind)]
        for base in kind.bases:
            try:
                place, node = self._inside(module, ast.unparse(base).partition("[")[0].split("."), "")
            except LookupError:  # of another package
                continue
            if isinstance(node, ast.ClassDef):
                found += self._classes(place, node)
        return found

    def signature(self, path: str) -> Signature:
        """What a call of `path` takes.

        Raises:
            LookupError: there is no such function, class or method.
        """
        module, node = self.find(path)
        if node is None:
            return OPEN
        if isinstance(node, ast.FunctionDef):
            # A function whose first parameter is named so is a method.
            return _of_function(node, method=bool(node.args.args) and node.args.args[0].arg in ("self", "cls"))
        if not isinstance(node, ast.ClassDef):
            raise LookupError(f"{path} is not called")
        classes = self._classes(module, node)
        for place, one in classes:
            made = next((m for m in one.body if isinstance(m, ast.FunctionDef) and m.name == "__init__"), None)
            if made is not None:
                return _of_function(made, method=True)
            if any("dataclass" in ast.unparse(decorator) for decorator in one.decorator_list) or _is_struct(one):
                return self._of_fields(place, one)
        return OPEN

    def _of_fields(self, module: str, kind: ast.ClassDef) -> Signature:
        names, required = [], set()
        for _, one in reversed(self._classes(module, kind)):
            for node in one.body:
                if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                    names.append(node.target.id)
                    if node.value is None:
                        required.add(node.target.id)
        return Signature(tuple(names), (), frozenset(required))


def _is_overload(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("overload" in ast.unparse(one) for one in node.decorator_list)


def _is_struct(kind: ast.ClassDef) -> bool:
    return any("Struct" in ast.unparse(base) or "BaseModel" in ast.unparse(base) for base in kind.bases)


def _targets(node: ast.AST) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _of_function(node: ast.FunctionDef, method: bool) -> Signature:
    own = [argument.arg for argument in [*node.args.posonlyargs, *node.args.args]]
    with_default = len(node.args.defaults)
    required = set(own[: len(own) - with_default])
    only = [argument.arg for argument in node.args.kwonlyargs]
    required |= {name for name, default in zip(only, node.args.kw_defaults, strict=True) if default is None}
    if method:
        required.discard(own[0])
        own = own[1:]
    return Signature(
        tuple(own), tuple(only), frozenset(required), node.args.vararg is not None, node.args.kwarg is not None
    )


def _statements(body: list[ast.stmt]) -> list[ast.stmt]:
    """Those of `body`, and of the conditions and attempts in it."""
    found = []
    for node in body:
        if isinstance(node, ast.If):
            found += _statements(node.body) + _statements(node.orelse)
        elif isinstance(node, ast.Try):
            found += _statements(node.body) + [s for h in node.handlers for s in _statements(h.body)]
        else:
            found.append(node)
    return found
