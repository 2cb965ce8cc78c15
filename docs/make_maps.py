"""The maps of the packages, one page each: their folders and files, by the first sentence of each docstring. gen-files
runs this when the site is built, see ``mkdocs.yml``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import mkdocs_gen_files

PACKAGES = Path(__file__).resolve().parents[1] / "packages"
WHERE = {part: PACKAGES / "core" / "src" / "posttrain" / part for part in ("core", "lm", "compat", "cli")}
WHERE |= {part: PACKAGES / part / "src" / "posttrain" / part for part in ("sft", "seq2seq", "rl")}


def purpose(path: Path) -> str:
    """The first sentence of a file's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:").replace("|", "\\|")


def page_of(part: str, folder: Path) -> str:
    lines = [f"# Map of posttrain.{part}\n", f"{purpose(folder / '__init__.py')}.\n"]
    for path in [folder, *sorted(p.parent for p in folder.rglob("__init__.py") if p.parent != folder)]:
        files = sorted(file for file in path.glob("*.py") if file.name != "__init__.py")
        if path != folder:
            lines += [f"\n## {path.relative_to(folder).as_posix()}\n", f"{purpose(path / '__init__.py')}.\n"]
        if files:
            lines += ["| file | what it is for |", "|---|---|"]
            lines += [f"| `{file.name}` | {purpose(file)} |" for file in files]
    return "\n".join(lines) + "\n"


for name, home in WHERE.items():
    with mkdocs_gen_files.open(f"maps/{name}.md", "w") as page:
        page.write(page_of(name, home))
