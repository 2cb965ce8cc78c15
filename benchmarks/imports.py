"""What importing a trainer costs on top of torch, in fresh processes that take turns: the least CPU seconds of each.

python benchmarks/imports.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import subprocess
import sys

from results import write

CONTESTANTS = {
    "torch": "import torch",
    "posttrain Trainer": "from posttrain.core import Trainer",
    "posttrain SFTTrainer": "from posttrain.sft import SFTTrainer",
    "transformers Trainer": "from transformers import Trainer",
    "trl SFTTrainer": "from trl import SFTTrainer",
    "lightning Trainer": "from lightning import Trainer",
}
CLOCK = "import time; t = time.process_time()\n{statement}\nprint(time.process_time() - t)"


def seconds(statement: str) -> float | None:
    command = [sys.executable, "-W", "ignore", "-c", CLOCK.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True)
    return float(done.stdout.split()[-1]) if done.returncode == 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first round fills the caches of the file system
        for name, statement in CONTESTANTS.items():
            spent = seconds(statement)
            if number and spent is not None:
                times.setdefault(name, []).append(spent)
    torch_seconds = min(times["torch"])  # other programs only add
    table = {}
    for name, spent in times.items():
        ratio = min(spent) / torch_seconds
        table[name] = {"cpu_seconds": min(spent), "times_torch": ratio}
        print(f"{name:22s} {min(spent):6.2f} s   {ratio:.2f} x torch ({torch_seconds:.2f} s)")
    write("imports", {"rounds": rounds, "table": table})


if __name__ == "__main__":
    main()
