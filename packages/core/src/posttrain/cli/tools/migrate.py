"""The command ``posttrain migrate``, which rewrites scripts and notebooks for transformers' Trainer or trl."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shutil
import tempfile
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from posttrain.core.errors import ConfigError

HELP = """posttrain migrate SCRIPT.py [NOTEBOOK.ipynb | FOLDER ...] [--write]

Rewrite scripts and notebooks for transformers' Trainer or trl: import the names that posttrain has from it, and rename
old arguments. The rest of a script does not change. Manual decisions are listed with their lines. Nothing is run.

  --write  change the files; without it the changes are only shown
"""
#: Folders of other people's code.
LEFT_OUT = {"__pycache__", "site-packages", "node_modules"}
_CELL = re.compile(r"^# %% cell \d+\n", re.MULTILINE)
# What IPython alone reads stands in the script as a statement that does nothing.
_HELD = "pass  # for IPython: "
_FOR_IPYTHON = re.compile(r"^([ \t]*)((?:[\w., ]+=\s*)?[!%]{1,2}[\w./{].*|.*\w\?{1,2})$", re.MULTILINE)
# Magics of a cell of Python; a cell of any other holds something else.
_OF_PYTHON = re.compile(r"%%(capture|time|timeit|prun)\b")
_INSTALLS = re.compile(r"^.*\bpip3? install\b.*\b(trl|transformers)\b.*$", re.MULTILINE)


def run(words: list[str]) -> int:
    """Show or make the changes; 1 where a file cannot be read as Python, else 0."""
    paths = [Path(word) for word in words if word != "--write"]
    problems = [f"unknown flag {path}" for path in paths if str(path).startswith("-")]
    problems += [f"{path} does not exist" for path in paths if not str(path).startswith("-") and not path.exists()]
    if not paths:
        problems.append("it takes the scripts to rewrite, or folders of them")
    if problems:
        raise ConfigError("migrate", problems)
    return _migrate(scripts(paths), write="--write" in words)


def scripts(paths: Iterable[Path]) -> Iterator[Path]:
    """The files among `paths`, and scripts and notebooks in their folders, hidden ones left out; each once."""
    found: dict[Path, None] = {}
    for path in paths:
        inside = sorted([*path.rglob("*.py"), *path.rglob("*.ipynb")]) if path.is_dir() else [path]
        for file in inside:
            parts = file.relative_to(path).parts[:-1]
            if not any(part in LEFT_OUT or part.startswith(".") for part in parts):
                found[file] = None
    return iter(found)


def _migrate(files: Iterable[Path], write: bool) -> int:
    from posttrain.compat import migration

    changed = "rewritten" if write else "to be rewritten"
    counts = {changed: 0, "as it should be": 0, "without transformers and trl": 0, "not readable": 0}
    for file in files:
        try:
            source, encoding = read(file)
            notebook = Notebook(source) if file.suffix == ".ipynb" else None
            source = source if notebook is None else notebook.script
            done = migration.migrate(source)
        except (SyntaxError, ValueError, OSError) as error:
            counts["not readable"] += 1
            line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
            print(f"{file}{line}: {getattr(error, 'msg', error)}; left as it is")
            continue
        if done is None:
            counts["without transformers and trl"] += 1
            continue
        counts[changed if done.text != source else "as it should be"] += 1
        if done.text != source:
            if write:
                text = done.text if notebook is None else notebook.with_script(done.text)
                replace(file, text.encode(encoding))
                print(f"{file}: rewritten")
            else:
                before, after = source.splitlines(), done.text.splitlines()
                print("\n".join(difflib.unified_diff(before, after, str(file), str(file), lineterm="")))
        notes = [(note.line, note.text) for note in done.notes]
        if notebook is not None and done.text != source:
            notes += [(line, f"install posttrain's packages too: {text}") for line, text in notebook.installs()]
        for place, text in notes:
            print(f"{file}:{place}: {text}" if notebook is None else f"{file}, {notebook.where(place)}: {text}")
    missing = [f"posttrain-{name}" for name in migration.PACKAGES if name not in migration.faces()]
    if missing:
        print(f"Not installed, so that what they have stays as it is: {', '.join(missing)}.")
    said = ", ".join(f"{count} {what}" for what, count in counts.items() if count)
    hint = " Nothing was written; --write does." if counts[changed] and not write else ""
    print(f"Scripts: {said or 'none was found'}.{hint}")
    return 1 if counts["not readable"] else 0


def read(file: Path) -> tuple[str, str]:
    """The text of a script with its line ends as they are, and the encoding that it declares."""
    with file.open("rb") as stream:
        encoding, _ = tokenize.detect_encoding(stream.readline)
    return file.read_bytes().decode(encoding), encoding


def replace(file: Path, content: bytes) -> None:
    """Put `content` in the place of `file`, whole or not at all, with its permissions; a link stays a link."""
    target = os.path.realpath(file)
    handle, unfinished = tempfile.mkstemp(dir=os.path.dirname(target), prefix=".migrate-")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        shutil.copymode(target, unfinished)
        os.replace(unfinished, target)
    except BaseException:
        os.unlink(unfinished)
        raise


class Notebook:
    """The notebook in the text of a file, as one script and back: its code cells one after the other. Raises a
    `ValueError` where it is none.
    """

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
