"""Runs the notebooks of examples/notebooks and stores them with what their cells put out.

python docs/make_notebooks.py                                                 all of them: ten minutes on two cores
python docs/make_notebooks.py agent                                           one
python docs/make_notebooks.py --model out/models/SmolLM2-135M-Instruct sft    with a model that is here already
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import nbclient
import nbformat

from posttrain.core.logging.noise import MESSAGES

FOLDER = Path(__file__).resolve().parents[1] / "examples" / "notebooks"
WIDGETS = "application/vnd.jupyter.widget-view+json"  # progress bars, which nobody can see once they are stored


def make(path: Path, model: str | None) -> float:
    """Run the notebook at `path`, with `model` in place of its own, and store it; returns the seconds."""
    notebook = nbformat.read(path, as_version=4)
    sources = [cell.source for cell in notebook.cells]
    names = {}
    for cell in notebook.cells:
        lines = [line for line in cell.source.splitlines() if line.startswith("MODEL = ")]
        if model is not None and "parameters" in cell.metadata.get("tags", ()) and lines:
            names = {os.path.abspath(model): lines[0].split('"')[1]}
            cell.source += f"\nMODEL = {os.path.abspath(model)!r}"
    began = time.monotonic()
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    seconds = time.monotonic() - began
    for cell, source in zip(notebook.cells, sources, strict=True):
        cell.source = source
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = joined(cell.outputs)
            for output in cell.outputs:
                for here, there in names.items() if "text" in output else ():
                    output.text = output.text.replace(here, there)
    notebook.metadata.pop("widgets", None)
    notebook.metadata["language_info"] = {"name": "python"}
    nbformat.write(notebook, path)
    return seconds


def joined(outputs: list) -> list:
    """What is seen of `outputs`: one text of each stream, without progress bars and what the commands leave out too."""
    kept: list = []
    for one in outputs:
        if WIDGETS in one.get("data", {}) or str(one.get("text", "")).startswith(tuple(MESSAGES.values())):
            continue
        if kept and one.output_type == "stream" and kept[-1].get("name") == one.name:
            kept[-1].text += one.text
        else:
            kept.append(one)
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; all by default")
    parser.add_argument("--model", help="a folder, in place of the name on the Hub")
    given = parser.parse_args()
    for name in given.names or known:
        print(f"{name}: {make(FOLDER / f'{name}.ipynb', given.model):.0f} seconds", flush=True)


if __name__ == "__main__":
    main()
