"""Draws docs/assets/terminal.svg from a real run: ``python docs/make_terminal.py``.

A few rows are written into an empty folder, and the commands below run there in a terminal of 100 columns. The pictures
of their output are drawn by rich; nothing is written by hand.
"""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

WIDTH = 100
ASSETS = Path(__file__).parent / "assets"
RUN = """
method: sft
model_name_or_path: model
dataset_name: rows.jsonl
output_dir: out
train_on: assistant
max_steps: 12
per_device_train_batch_size: 4
learning_rate: 1e-3
logging_steps: 4
report_to: none
use_cpu: true
"""
COMMANDS = ["posttrain preview run.yaml --rows 2", "posttrain train run.yaml"]


def output_of(command: str, folder: Path) -> str:
    """What `command` writes to a terminal, escape sequences included."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"COLUMNS": str(WIDTH), "LINES": "40", "TERM": "xterm-256color", "OMP_NUM_THREADS": "2"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    process = subprocess.Popen(command, shell=True, cwd=folder, env=environment, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = io.BytesIO()
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not piece:
            break
        written.write(piece)
    assert process.wait() == 0, written.getvalue().decode()
    return written.getvalue().decode()


def lines_shown(output: str) -> list[str]:
    """The lines that stay on the screen: a line that was written over shows what was written last."""
    shown = []
    for line in output.replace("\r\n", "\n").split("\n"):
        last = [part for part in line.split("\r") if re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", part).strip()]
        shown.append(re.sub(r"\x1b\[[0-9;]*[A-LN-Za-ln-z]", "", last[-1]) if last else "")
    return shown


def main() -> None:
    from rich.console import Console
    from rich.text import Text

    from posttrain.core.testing import causal_lm, tokenizer

    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given := os.environ.get("MODEL"):  # the folder of a model to draw the run of
            shutil.copytree(given, folder / "model")
        else:
            causal_lm().save_pretrained(folder / "model")
            tokenizer().save_pretrained(folder / "model")
        (folder / "run.yaml").write_text(RUN.lstrip(), encoding="utf-8")
        rows = [
            {"messages": [{"role": "user", "content": f"{n} + {n}?"}, {"role": "assistant", "content": f"{2 * n}"}]}
            for n in range(40)
        ]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            for line in lines_shown(output_of(command, folder)):
                console.print(Text.from_ansi(line.replace(str(folder), "")), overflow="fold")
    ASSETS.mkdir(exist_ok=True)
    console.save_svg(str(ASSETS / "terminal.svg"), title="posttrain", clear=True)


if __name__ == "__main__":
    main()
