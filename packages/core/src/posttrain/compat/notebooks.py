"""A notebook as one script and back, for `posttrain migrate`: its code cells one after the other."""

from __future__ import annotations

import ast
import json
import re

_CELL = re.compile(r"^# %% cell \d+\n", re.MULTILINE)
# What IPython alone reads stands in the script as a statement that does nothing.
_HELD = "pass  # for IPython: "
_FOR_IPYTHON = re.compile(r"^([ \t]*)((?:[\w., ]+=\s*)?[!%]{1,2}[\w./{].*|.*\w\?{1,2})$", re.MULTILINE)
# Magics of a cell of Python; a cell of any other holds something else.
_OF_PYTHON = re.compile(r"%%(capture|time|timeit|prun)\b")
_INSTALLS = re.compile(r"^.*\bpip3? install\b.*\b(trl|transformers)\b.*$", re.MULTILINE)


class Notebook:
    """The notebook in the text of a file. Raises a `ValueError` where it is none."""

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
