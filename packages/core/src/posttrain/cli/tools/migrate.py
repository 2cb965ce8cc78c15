"""The command ``posttrain migrate``, which rewrites scripts and notebooks for transformers' Trainer or trl."""

from __future__ import annotations

import difflib
import os
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
            notebook = migration.Notebook(source) if file.suffix == ".ipynb" else None
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
