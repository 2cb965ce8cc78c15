"""The command ``posttrain new``: recipes, which are runs to begin with."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
from pathlib import Path

from posttrain.cli import parse
from posttrain.core.errors import did_you_mean
from posttrain.core.logging.terminal import aligned

HELP = """posttrain new                 list the recipes
posttrain new NAME [FOLDER]   write one into FOLDER [default: NAME]

A recipe is a starting config: run.yaml, with comments, and rows.jsonl, 20 made-up rows that show the format of the
data; some have a train.py. Its first lines say how to run it, what to expect, and which GPU it needs."""
FOLDER = Path(__file__).resolve().parents[1] / "recipes"
#: Programs have this ending in the package, where they are no modules.
PROGRAM = ".py.in"


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A starting config.

    Args:
        name: what it is called. title: what it does.
        command: what starts it, in its folder. model: what it trains.
        memory: estimated by ``posttrain plan`` for that model, in GiB.
        folder: where its files are.
    """

    name: str
    title: str
    command: str
    model: str
    memory: float
    folder: Path


def recipes() -> list[Recipe]:
    """All recipes, by name."""
    return [_read(folder) for folder in sorted(FOLDER.iterdir()) if (folder / "run.yaml").is_file()]


def _read(folder: Path) -> Recipe:
    text = (folder / "run.yaml").read_text(encoding="utf-8")
    title, command = re.search(r"\A# [\w-]+: (.+)", text), re.search(r"^# Run: +([^;\n]+)", text, re.MULTILINE)
    model = re.search(r"^model_name_or_path: (\S+)", text, re.MULTILINE)
    memory = re.search(r"^# Memory: +([\d.]+) GiB", text, re.MULTILINE)
    if not (title and command and model and memory):
        raise ValueError(f"{folder / 'run.yaml'} lacks its title, how to run it, its memory or the name of a model.")
    return Recipe(folder.name, title[1], command[1].strip(), model[1], float(memory[1]), folder)


def write(name: str, folder: str | os.PathLike[str] | None = None) -> list[Path]:
    """Write the files of a recipe. Returns what was written. Raises a `ValueError` where there is no such recipe, and a
    `FileExistsError` where one of the files is there; nothing is written then.

    Args:
        folder: where; by default one of the recipe's name. It is made.
    """
    known = {recipe.name: recipe for recipe in recipes()}
    if name not in known:
        raise ValueError(f"there is no recipe {name!r}{did_you_mean(name, known)} (known: {', '.join(known)})")
    target = Path(name if folder is None else folder)
    files = {source: target / source.name.replace(PROGRAM, ".py") for source in sorted(known[name].folder.iterdir())}
    if taken := [str(path) for path in files.values() if path.exists()]:
        raise FileExistsError(f"{taken[0]} is there already; name another folder.")
    target.mkdir(parents=True, exist_ok=True)
    for source, path in files.items():
        shutil.copyfile(source, path)
    return list(files.values())


def run(words: list[str]) -> None:
    """List the recipes, or write one out."""
    if not words:
        print(table(recipes()))
        print("\nposttrain new NAME [FOLDER] writes one into a folder.")
        return
    what = "the name of a recipe and perhaps a folder"
    names, _ = parse.typed_flags("new", words, {}, names=min(max(len(words), 1), 2), what=what)
    with parse.reported("new"):
        written = write(*names)
    folder = written[0].parent
    print("\n".join(f"wrote {path}" for path in written))
    print(f"\nPut your rows into {folder / 'rows.jsonl'}, then: cd {folder} && {_read(FOLDER / names[0]).command}")


def table(found: list[Recipe]) -> str:
    """The recipes for people, a line each."""
    rows = [("recipe", "", "trains", "GiB, estimated")]
    rows += [(r.name, r.title, r.model, f"{r.memory:.1f}") for r in found]
    return aligned(rows)
