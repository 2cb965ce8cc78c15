"""Draws docs/assets/terminal.svg and report.png from one real run: ``python docs/make_pictures.py MODEL_FOLDER``.

The rows of examples/data/reviews are written into an empty folder as conversations, and the commands below run there in
a terminal of 100 columns. rich draws what they print, and Chromium the upper part of the run's report; nothing is
written by hand. README's pictures are of SmolLM2-135M, whose folder ``python examples/pretrained.py`` writes.
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
REPORT = (1100, 1000)  # pixels
ASSETS = Path(__file__).parent / "assets"
REVIEWS = Path(__file__).parents[1] / "examples" / "data" / "reviews"
RUN = """
method: sft
model_name_or_path: {model}
dataset_name: reviews.jsonl
eval_share: 0.05
output_dir: reviews
train_on: assistant
use_peft: true
lora_r: 8
learning_rate: 5e-4
max_steps: 60
per_device_train_batch_size: 16
eval_strategy: steps
eval_steps: 10
logging_steps: 2
report_to: none
use_cpu: true
"""
COMMANDS = ["posttrain preview run.yaml --rows 1", "posttrain train run.yaml"]
XTERM = (  # xterm's colours: on the greens of rich's own theme, the black text of trained tokens cannot be read
    [(0, 0, 0), (205, 0, 0), (0, 205, 0), (205, 205, 0), (92, 160, 238), (205, 0, 205), (0, 205, 205), (229, 229, 229)],
    [(127, 127, 127), (255, 0, 0), (0, 255, 0), (255, 255, 0), (92, 92, 255), (255, 0, 255), (0, 255, 255), (255,) * 3],
)


def write_rows(file: Path) -> None:
    """Short reviews, each with its label as the answer of the assistant."""
    with open(file, "w", encoding="utf-8") as target:
        for line in (REVIEWS / "train.jsonl").read_text(encoding="utf-8").splitlines():
            review = json.loads(line)
            if len(review["text"]) <= 80:
                question = f"Is this review positive or negative? {review['text']}"
                talk = [{"role": "user", "content": question}, {"role": "assistant", "content": review["label"]}]
                target.write(json.dumps({"messages": talk}) + "\n")


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


def draw_report(page: Path, picture: Path) -> None:
    """The upper part of a report in Chromium."""
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert program is not None, "Chromium is not installed: apt-get install chromium"
    width, height = REPORT
    command = [program, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--window-size={width},{height}", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


def main() -> None:
    from rich.console import Console
    from rich.terminal_theme import TerminalTheme
    from rich.text import Text

    if len(sys.argv) != 2 or not Path(sys.argv[1], "config.json").is_file():
        raise SystemExit("usage: python docs/make_pictures.py MODEL_FOLDER, a folder that from_pretrained reads")
    model = Path(sys.argv[1]).resolve()
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / model.name).symlink_to(model)
        (folder / "run.yaml").write_text(RUN.lstrip().format(model=model.name), encoding="utf-8")
        write_rows(folder / "reviews.jsonl")
        for command in COMMANDS:
            console.print(Text.assemble(("$ ", "bold green"), (command, "bold")))
            for line in lines_shown(output_of(command, folder)):
                console.print(Text.from_ansi(line.replace(str(folder), "")), overflow="fold")
        ASSETS.mkdir(exist_ok=True)
        theme = TerminalTheme((41, 41, 41), (229, 229, 229), *XTERM)
        console.save_svg(str(ASSETS / "terminal.svg"), title="posttrain", theme=theme)
        draw_report(folder / "reviews" / "report.html", ASSETS / "report.png")


if __name__ == "__main__":
    main()
