"""Scripts written for transformers' Trainer or trl, rewritten for posttrain by the smallest edit that does it.

A script is parsed and never run. Its text is edited at the places of single nodes, so that all else stays as it is.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import json
import re
import warnings
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

from posttrain.compat import absent_names
from posttrain.core.errors import did_you_mean
from posttrain.core.fields.old_names import Removed, Renamed, old_names
from posttrain.core.training import override_checks

LIBRARIES = ("transformers", "trl")
#: In the order in which a name that several export is looked for, where nothing else speaks for one of them.
PACKAGES = ("core", "sft", "rl", "seq2seq")
UNKNOWN = object()
#: Classes of models that read images, and what the trainers make of such rows, by the package that has them.
SEES = re.compile(r"ImageTextToText|Vision2Seq|VL\w*ForConditionalGeneration|Llava|Idefics|PaliGemma|^PIL$")
WITH_IMAGES = {
    "sft": "takes one dataset of rows with images, whose prompts and completions or messages it lays out itself; "
    "too_long=split and packing that splits rows are refused there, and a collator of the script's own needs "
    "remove_unused_columns=False and skip_prepare_dataset",
    "rl": "takes prompts with images and the processor as processing_class; precomputed log-probabilities of the "
    "reference are refused there, and a vLLM server needs --enable-scale-out",
}
#: A library among the packages that uv installs for a script (PEP 723).
DEPENDENCY = re.compile(r'^(#\s*(?:dependencies = \[.*?)?)("(trl|transformers)\b(?!-)[^"]*")', re.MULTILINE)
IN_A_STRING = "stands where this Python does not tell, as in some f-strings"


@dataclass(frozen=True)
class Note:
    """What a person has to look at, and the line where it was in the script as it was given."""

    line: int
    text: str


@dataclass(frozen=True)
class Migration:
    """A script as it should be, and what could not be rewritten."""

    text: str
    notes: list[Note]


@cache
def faces() -> dict[str, Any]:
    """``{package: module}`` of the packages that are installed."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.import_module(f"posttrain.{package}")
        except ModuleNotFoundError as error:
            if error.name != f"posttrain.{package}":
                raise
    return found


@cache
def homes(name: str) -> tuple[str, ...]:
    """The packages whose own `name` replaces that of a library; what they only hand on may stay where it is."""
    exporting = [package for package, face in faces().items() if name in face.__all__]
    return tuple(p for p in exporting if getattr(faces()[p], name).__module__.startswith("posttrain."))


def migrate(source: str) -> Migration | None:
    """`source` for posttrain; None: no library of it is used. `SyntaxError`: no Python; `ValueError`: null bytes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the script's own strings
        tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, (ast.Import, ast.ImportFrom))]
    if not any(root in (*LIBRARIES, "posttrain") for node in imports for root in _roots(node)):
        return None
    script = _Script(source, tree)
    script.rewrite(imports)
    notes = sorted(set(script.notes), key=lambda note: (note.line, note.text))
    return Migration(_with_dependencies(script.edited()), notes)


def _with_dependencies(text: str) -> str:
    """A script with posttrain's packages among its dependencies, in the place of a library that it imports no more."""
    imported = set(re.findall(r"^\s*(?:from|import) (\w+(?:\.\w+)?)", text, re.MULTILINE))
    ours = [f'"posttrain-{package}"' for package in PACKAGES if f"posttrain.{package}" in imported]
    ours, match = [name for name in ours if name not in text], DEPENDENCY.search(text)
    if not ours or match is None:
        return text
    ours += [match[2]] * any(name.split(".")[0] == match[3] for name in imported)
    return text[: match.start(2)] + ", ".join(ours) + text[match.end() :]


def _roots(node: ast.Import | ast.ImportFrom) -> list[str]:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    return [] if isinstance(node, ast.ImportFrom) and node.level else [name.split(".")[0] for name in names]


def _choose(names: Iterable[str]) -> dict[str, str]:
    """The package that each of `names` is taken from: as few as possible."""
    found = {name: homes(name) for name in names if homes(name)}
    needed = {packages[0] for packages in found.values() if len(packages) == 1}
    return {name: next((p for p in packages if p in needed), packages[0]) for name, packages in found.items()}


@dataclass(frozen=True)
class _Class:
    """A class that is or inherits posttrain's `name`, with `fields` and perhaps a `constructor` of the script."""

    name: str
    fields: frozenset[str] = frozenset()
    constructor: bool = False

    def load(self) -> Any:
        return getattr(faces()[homes(self.name)[0]], self.name)


class _Script:
    """One script while it is rewritten: its text as bytes, in which the parser counts, and what its names stand for."""

    def __init__(self, source: str, tree: ast.Module) -> None:
        self.code, self.tree = source.encode(), tree
        self.newline = b"\r\n" if b"\r\n" in self.code else b"\n"
        self.starts = [0]
        for line in self.code.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[tuple[int, int, bytes]] = []
        self.notes: list[Note] = []
        self.modules: dict[str, str] = {}  # what the name of a module stands for
        self.classes: dict[str, _Class] = {}
        self.attributes: dict[int, str] = {}  # the name of a class, as posttrain exports it, by the id of a node

    def edited(self) -> str:
        code = self.code
        for start, end, text in sorted(set(self.edits), reverse=True):
            code = code[:start] + text + code[end:]
        return code.decode()

    def note(self, node: Any, text: str) -> None:
        self.notes.append(Note(node.lineno, text))

    def span(self, node: Any) -> tuple[int, int]:
        return self.starts[node.lineno - 1] + node.col_offset, self.starts[node.end_lineno - 1] + node.end_col_offset

    def _is_at(self, node: ast.Attribute, root: str) -> bool:
        """Whether `node` is where the parser says: Python 3.11 loses count inside f-strings."""
        start, end = self.span(node)
        text = self.code[start:end]
        return text.startswith(root.encode()) and text.endswith(node.attr.encode())

    def rewrite(self, imports: list[ast.Import | ast.ImportFrom]) -> None:
        for node in imports:
            if isinstance(node, ast.Import):
                for alias in node.names:
                    root = alias.name.split(".")[0]
                    if root in (*LIBRARIES, "posttrain"):
                        self.modules[alias.asname or root] = alias.name if alias.asname else root
            elif node.module == "posttrain" and not node.level and not any(homes(alias.name) for alias in node.names):
                self.modules |= {alias.asname or alias.name: f"posttrain.{alias.name}" for alias in node.names}
            elif node.module and _roots(node):
                self._rewrite_from(node)
        moved, kept = self._rewrite_attributes()
        for node in imports:
            if isinstance(node, ast.Import):
                self._rewrite_import(node, moved, kept)
        # In the order of the script: the base of class TrainingArguments(TrainingArguments) is the imported one.
        written = [node for node in ast.walk(self.tree) if isinstance(node, ast.ClassDef)]
        for class_node in sorted(written, key=lambda node: node.lineno):
            self._read_class(class_node)
        untold = {**WITH_IMAGES} if self._sees() else {}
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        for call in sorted(calls, key=lambda node: node.lineno):
            if what := self._known(call.func):
                if hasattr(what.load(), "config_class") and (word := untold.pop(homes(what.name)[0], None)):
                    self.note(call, f"images: {what.name} {word}")  # once for all trainers of a package
                if not what.constructor:
                    self._rewrite_call(call, what)

    def _sees(self) -> bool:
        """Whether the script is about images: by the classes of its models, or the columns that it reads or names."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.alias) and any(SEES.search(part) for part in node.name.split(".")):
                return True
            if isinstance(node, ast.Attribute) and SEES.search(node.attr):
                return True
            if isinstance(node, ast.ImportFrom) and SEES.search((node.module or "").split(".")[0]):
                return True
            keys = [node.slice] if isinstance(node, ast.Subscript) else node.keys if isinstance(node, ast.Dict) else []
            if any(isinstance(key, ast.Constant) and key.value in ("image", "images") for key in keys):
                return True
        return False

    # ---- imports ----

    def _rewrite_from(self, node: ast.ImportFrom) -> None:
        library = _roots(node)[0]
        if library == "posttrain":
            self.classes |= {a.asname or a.name: _Class(a.name) for a in node.names if homes(a.name)}
        if library not in LIBRARIES and node.module != "posttrain":  # a namespace, which holds no names itself
            return
        if node.names[0].name == "*":
            return self.note(node, f"what `from {node.module} import *` brings is not seen; import names one by one")
        names = {alias.name for alias in node.names}
        chosen = _choose(names.difference(absent_names.INSTEAD if library == "trl" else ()))
        groups: dict[str, list[ast.alias]] = {}
        for alias in node.names:
            module = f"posttrain.{chosen[alias.name]}" if alias.name in chosen else str(node.module)
            groups.setdefault(module, []).append(alias)
            if alias.name in chosen:
                self.classes[alias.asname or alias.name] = _Class(alias.name)
            else:
                self._note_unknown(alias, library, alias.name, node.module)
        stays = node.module if node.module in groups else max(groups, key=lambda module: len(groups[module]))
        added = [_statement(module, names) for module, names in sorted(groups.items()) if module != stays]
        if stays != node.module or added:
            self._restate(node, groups[stays], added, stays)

    def _rewrite_import(self, node: ast.Import, moved: dict[str, list[str]], kept: Counter[str]) -> None:
        ours = {alias: alias.asname or alias.name.split(".")[0] for alias in node.names}
        ours = {a: name for a, name in ours.items() if a.name.split(".")[0] in LIBRARIES and moved.get(name)}
        if ours:
            staying = [alias for alias in node.names if alias not in ours or kept[ours[alias]]]
            packages = {package for name in ours.values() for package in moved[name]}
            self._restate(node, staying, [f"import posttrain.{package}" for package in sorted(packages)])

    def _restate(self, node: Any, staying: list[ast.alias], added: list[str], module: str | None = None) -> None:
        """Leave the names `staying`, of `module`, in the import `node`, and put the statements `added` before it."""
        start, end = self.span(node)
        line_start, line_end = self.starts[node.lineno - 1], self.starts[node.end_lineno]
        alone = not self.code[line_start:start].strip() and self.code[end:line_end].strip()[:1] in (b"", b"#")
        between = self.newline + self.code[line_start:start] if alone else b"; "
        statements = [text.encode() for text in added]
        if staying:
            statements.append(self._without(node, staying, module))
        self.edits.append((start, end, between.join(statements)))

    def _without(self, node: Any, staying: list[ast.alias], module: str | None) -> bytes:
        start, end = self.span(node)
        segment = self.code[start:end]
        if b"(" not in segment and b"\n" in segment and len(staying) < len(node.names):
            # Names over lines that end in backslashes: there are no comments to keep.
            return _statement(module, staying).encode()
        edits = []
        if module is not None and (place := re.match(rb"from[\s\\]+([\w.]+)", segment)):
            edits.append((*place.span(1), module.encode()))
        last = node.names.index(staying[-1])
        for number, alias in enumerate(node.names):
            if alias not in staying:
                first, after = (place - start for place in self.span(alias))
                comma = re.compile(rb"[ \t]*,([ \t]*(?![ \t#]))?").match(segment, after)
                # A null byte, which no script has, marks where something was, for the lines to be tidied below.
                edits.append((first, comma.end() if comma else after, b"\0"))
                if number == last + 1 and alias.lineno == staying[-1].end_lineno:
                    edits.append((self.span(staying[-1])[1] - start, first, b""))
        for first, after, text in sorted(edits, reverse=True):
            segment = segment[:first] + text + segment[after:]
        segment = re.sub(rb"(?m)^[ \t]*\0[ \t\0]*\r?\n", b"", segment)
        segment = re.sub(rb"(?m)^([ \t]*)\0[ \t\0]*(?=#)", rb"\1", segment)  # a comment moves to where the name was
        return re.sub(rb"[ \t]*\0[ \t\0]*(?=\r?\n)", b"", segment).replace(b"\0", b"")

    # ---- names below a module ----

    def _rewrite_attributes(self) -> tuple[dict[str, list[str]], Counter[str]]:
        """Replace ``trl.SFTTrainer``; returns packages needed and uses left, by the module's name in the script."""
        inner = {id(node.value) for node in ast.walk(self.tree) if isinstance(node, ast.Attribute)}
        chains = [list(_chain(n)) for n in ast.walk(self.tree) if isinstance(n, ast.Attribute) and id(n) not in inner]
        plain = [n for n in ast.walk(self.tree) if isinstance(n, ast.Name) and id(n) not in inner]
        kept = Counter(node.id for node in plain)
        bound = {n.id for n in plain if isinstance(n.ctx, ast.Store)}
        bound |= {node.arg for node in ast.walk(self.tree) if isinstance(node, ast.arg)}
        found: dict[str, list[tuple[ast.Attribute, str]]] = {}
        for root, *nodes in chains:
            if not isinstance(root, ast.Name) or root.id not in self.modules:
                continue
            library = self.modules[root.id].split(".")[0]
            known = next((node for node in nodes if homes(node.attr)), None)
            if known is not None:
                self.attributes[id(known)] = known.attr
            if library == "posttrain":
                continue
            if known is not None and root.id not in bound and self._is_at(known, root.id):
                found.setdefault(root.id, []).append((known, known.attr))
                continue
            kept[root.id] += 1
            if known is None:
                name = next((node.attr for node in nodes if node.attr[:1].isupper()), nodes[-1].attr)
                self._note_unknown(root, library, name)
            else:
                why = "is also the name of something else here" if root.id in bound else IN_A_STRING
                self.note(root, f"{root.id}.{known.attr} stays for you to replace: {root.id} {why}")
        moved = {}
        for name, uses in found.items():
            chosen = _choose(attr for _, attr in uses)
            moved[name] = sorted(set(chosen.values()))
            self.edits += [(*self.span(node), f"posttrain.{chosen[attr]}.{attr}".encode()) for node, attr in uses]
        return moved, kept

    def _note_unknown(self, node: Any, library: str, name: str, module: str | None = None) -> None:
        """A word on a name that stays: part of what posttrain replaces, or dropped by transformers from `module`."""
        if library == "trl" and name in absent_names.INSTEAD:
            self.note(node, f"posttrain has no {name}: {absent_names.INSTEAD[name]}")
        elif (library == "trl" and not name.startswith("__")) or "Trainer" in name or "TrainingArguments" in name:
            self.note(node, f"posttrain has no {name}; it stays with {library}")
        elif module is not None and (gone := absent_names.gone_from_transformers(module, name)):
            self.note(node, gone)

    # ---- classes and their arguments ----

    def _known(self, node: ast.expr) -> _Class | None:
        if isinstance(node, ast.Name):
            return self.classes.get(node.id)
        return _Class(self.attributes[id(node)]) if id(node) in self.attributes else None

    def _read_class(self, node: ast.ClassDef) -> None:
        """Remember what a class of the script is, and note what it overrides in vain."""
        base = next(filter(None, map(self._known, node.bases)), None)
        if base is None:
            self.classes.pop(node.name, None)
            return
        theirs: Any = base.load()
        table = old_names(theirs) if hasattr(theirs, "__dataclass_fields__") else {}
        instead = override_checks.INSTEAD | getattr(theirs, "INSTEAD", {}) if hasattr(theirs, "config_class") else {}
        own, methods = set(), set()
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                own.add(part.target.id)
                if part.target.id in table:
                    old = table[part.target.id]
                    text = f"is now {old.new}" if isinstance(old, Renamed) else f"has no effect: {old.why}"
                    self.note(part, f"{node.name}: {part.target.id} {text}")
            elif isinstance(part, ast.FunctionDef):
                methods.add(part.name)
                if part.name in instead:
                    self.note(part, f"{node.name}.{part.name} is never called: {instead[part.name]}")
        for call in ast.walk(node):  # super().__init__(tokenizer=...)
            if isinstance(call, ast.Call) and ast.unparse(call.func).startswith("super(") and not base.constructor:
                if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
                    self._rewrite_call(call, base)
        self.classes[node.name] = _Class(base.name, base.fields | own, base.constructor or "__init__" in methods)

    def _rewrite_call(self, call: ast.Call, what: _Class) -> None:
        given = {word.arg: word.value for word in call.keywords if word.arg is not None}
        judge = _of_config if dataclasses.is_dataclass(what.load()) else _of_trainer
        if judge is _of_trainer and not hasattr(what.load(), "config_class"):
            return
        for word in call.keywords:
            if word.arg is None or word.arg in what.fields:
                continue
            today = judge(what.load(), word.arg, {name: _literal(value) for name, value in given.items()})
            if isinstance(today, str):
                self.note(word, f"{what.name}: {today}")
            elif today is not None and today[0] in given:
                self.note(word, f"{what.name}: {word.arg} is the old name of {today[0]}, given too; keep {today[0]}")
            elif today is not None:
                start, end = self.span(word)
                if not self.code.startswith(word.arg.encode(), start):
                    self.note(word, f"{what.name}: {word.arg} is now {today[0]}; it {IN_A_STRING}")
                elif today[1] == _literal(word.value):
                    self.edits.append((start, start + len(word.arg), today[0].encode()))
                else:
                    value = json.dumps(today[1]) if isinstance(today[1], (str, list)) else repr(today[1])
                    self.edits.append((start, end, f"{today[0]}={value}".encode()))


def _of_config(config_class: type, name: str, given: dict[str, Any]) -> tuple[str, Any] | str | None:
    """What the argument `name` of a config is today: name and value, or what a person has to decide; None: the same."""
    known = {field.name for field in dataclasses.fields(config_class)}
    old, value = old_names(config_class).get(name), given[name]
    if name in known:
        return None
    if isinstance(old, Removed):
        says_nothing = value is not UNKNOWN and value in old.says_nothing
        return None if says_nothing else f"{name} has no effect: {old.why}"
    if isinstance(old, Renamed):
        if value is UNKNOWN:
            if old == Renamed(old.new):
                return old.new, UNKNOWN
            return f"{name} is now {old.new}, which may want another value; the old name still works"
        if value in old.ignore:
            return f"{name}={value!r} has no meaning; leave it out"
        return old.new, old.convert(value)
    literal = {name: value for name, value in given.items() if value is not UNKNOWN}
    accepted = getattr(config_class, "accept_old_names", dict)(dict(literal))
    if name in literal and name not in accepted:
        now = ", ".join(f"{new}={value!r}" for new, value in accepted.items() if value != given.get(new))
        return f"{name} is now {now}"
    hint = getattr(config_class, "unknown_argument_hint", lambda _: "")(name) or did_you_mean(name, known)
    return f"unknown argument {name!r}{hint}"


def _of_trainer(trainer_class: Any, name: str, given: dict[str, Any]) -> tuple[str, Any] | str | None:
    """The same for an argument of a trainer's constructor."""
    constructors = [vars(owner)["__init__"] for owner in trainer_class.__mro__ if "__init__" in vars(owner)]
    known = {name for constructor in constructors for name in inspect.signature(constructor).parameters}
    if name in known:
        return None
    if name in trainer_class.OLD_ARGUMENTS:
        return trainer_class.OLD_ARGUMENTS[name], given[name]
    config = trainer_class.config_class
    old = old_names(config).get(name)
    new = old.new if isinstance(old, Renamed) else name
    if new in {field.name for field in dataclasses.fields(config)}:
        return f"{name} is an argument of its config; pass args={config.__name__}({new}=...)"
    return f"unknown argument {name!r}{did_you_mean(name, known)}"


def _literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return UNKNOWN


def _chain(node: ast.expr) -> list[Any]:
    """The nodes of ``a.b.c``, from the left: of the name and of each attribute."""
    return [*_chain(node.value), node] if isinstance(node, ast.Attribute) else [node]


def _statement(module: str | None, names: list[ast.alias]) -> str:
    """``from module import names``; ``import names`` without a module."""
    listed = ", ".join(f"{alias.name} as {alias.asname}" if alias.asname else alias.name for alias in names)
    return f"from {module} import {listed}" if module else f"import {listed}"


# ---------------------------------------------------------------------------------------------------- notebooks

_CELL = re.compile(r"^# %% cell \d+\n", re.MULTILINE)
# What IPython alone reads stands in the script as a statement that does nothing.
_HELD = "pass  # for IPython: "
_FOR_IPYTHON = re.compile(r"^([ \t]*)((?:[\w., ]+=\s*)?[!%]{1,2}[\w./{].*|.*\w\?{1,2})$", re.MULTILINE)
# Magics of a cell of Python; a cell of any other holds something else.
_OF_PYTHON = re.compile(r"%%(capture|time|timeit|prun)\b")
_INSTALLS = re.compile(r"^.*\bpip3? install\b.*\b(trl|transformers)\b.*$", re.MULTILINE)


class Notebook:
    """The notebook in a file's text, as one script and back: its code cells in order. A `ValueError` if it is none."""

    def __init__(self, text: str) -> None:
        self.content = json.loads(text)
        if not isinstance(self.content, dict) or not isinstance(self.content.get("cells"), list):
            raise ValueError("it holds no cells, as notebooks of nbformat 4 do")
        self._end = "\n" if text.endswith("\n") else ""
        indent = re.match(r"\{\r?\n( +)", text)
        self._indent = len(indent[1]) if indent else 1
        self._cells = [cell for cell in self.content["cells"] if cell.get("cell_type") == "code"]
        texts = ["".join(cell["source"]) for cell in self._cells]
        self.script = "".join(f"# %% cell {n}\n{_held(text)}\n" for n, text in enumerate(texts, 1))

    def with_script(self, script: str) -> str:
        """The text of the file with the cells of `script`, an edited `script` of this notebook."""
        for cell, text in zip(self._cells, _CELL.split(script)[1:], strict=True):
            text = re.sub(rf"^([ \t]*){re.escape(_HELD)}", r"\1", text.removesuffix("\n"), flags=re.MULTILINE)
            cell["source"] = text.splitlines(keepends=True) if isinstance(cell["source"], list) else text
        return json.dumps(self.content, indent=self._indent, ensure_ascii=False) + self._end

    def where(self, line: int) -> str:
        """The place of a line of the script, counted from 1."""
        before = self.script.split("\n")[:line]
        marks = [number for number, text in enumerate(before, 1) if _CELL.match(text + "\n")]
        return f"cell {len(marks)}, line {line - marks[-1]}"

    def installs(self) -> list[tuple[int, str]]:
        """(line of the script, text) of each command that installs trl or transformers."""
        found = [(self.script.count("\n", 0, one.start()) + 1, one[0]) for one in _INSTALLS.finditer(self.script)]
        return [(line, text.strip().removeprefix(_HELD)) for line, text in found]


def _held(text: str) -> str:
    """A cell as Python can read it."""
    if text.lstrip().startswith("%%") and not _OF_PYTHON.match(text.lstrip()):
        return "\n".join(_HELD + line for line in text.split("\n"))
    try:
        ast.parse(text)
    except SyntaxError:
        return _FOR_IPYTHON.sub(rf"\1{_HELD}\2", text)
    return text
