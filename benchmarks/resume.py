"""Time to resume a run after many batches beside transformers, from a dataset with random access and from a stream.

    python benchmarks/resume.py [--batches 20000] [--rounds 3]

Each contestant first trains so many steps itself (batches of 8 rows of 128 tokens, a model of one weight), with a
checkpoint early on and one at the end. What is timed is `train(resume_from_checkpoint=...)` from its call to the end of
the first step it makes, in a process of its own: once from the early checkpoint, once from the late one. The difference
is what the position costs. The stream is `datasets`' iterable dataset over the same rows, which can say and take back
its position.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EARLY, BATCH, LENGTH, ROWS = 100, 8, 128, 400_000


def make_trainer(contestant: str, kind: str, folder: Path, steps: int):
    import numpy as np
    import torch
    from datasets import load_from_disk

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import Trainer, TrainerCallback, TrainingArguments
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments

    class OneWeight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(()))

        def forward(self, input_ids, labels=None):
            return {"loss": (self.weight - input_ids.float().mean()) ** 2}

    torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))])  # the first optimizer of a process imports half of torch
    ended = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            ended.append(time.perf_counter())
            control.should_save = state.global_step in (EARLY, steps)

    def collate(rows):
        ids = torch.from_numpy(np.array([row["input_ids"] for row in rows]))
        return {"input_ids": ids, "labels": ids}

    rows = load_from_disk(str(folder / "rows"))
    rows = rows.to_iterable_dataset() if kind == "stream" else rows
    args = TrainingArguments(
        str(folder / contestant / kind), per_device_train_batch_size=BATCH, max_steps=steps, learning_rate=1e-6,
        optim="sgd", save_strategy="no", logging_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    return Trainer(OneWeight(), args, collate, rows, callbacks=[Timer()]), ended


def run(contestant: str, kind: str, folder: Path, steps: int, checkpoint: int | None) -> dict[str, float]:
    if checkpoint is None:
        trainer, _ = make_trainer(contestant, kind, folder, steps)
        started = time.perf_counter()
        trainer.train()
        return {"seconds": time.perf_counter() - started}
    trainer, ended = make_trainer(contestant, kind, folder, checkpoint + 1)
    path = Path(trainer.args.output_dir) / f"checkpoint-{checkpoint}"
    started = time.perf_counter()
    trainer.train(resume_from_checkpoint=str(path))
    return {"seconds": ended[0] - started}


def child(*arguments: object) -> float:
    command = [sys.executable, __file__, "--one", *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{arguments} failed:\n{done.stderr[-3000:]}")
    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
    return json.loads(line.removeprefix("RESULT"))["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=20_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        contestant, kind, folder, steps, checkpoint = options.one
        number = None if checkpoint == "None" else int(checkpoint)
        print("RESULT", json.dumps(run(contestant, kind, Path(folder), int(steps), number)))
        return
    import numpy as np
    from datasets import Dataset
    from results import write

    table = {}
    with tempfile.TemporaryDirectory() as name:
        folder, contestants = Path(name), ("posttrain", "transformers")
        ids = np.random.default_rng(0).integers(
            0, 1000, (min(ROWS, BATCH * options.batches * 2), LENGTH), dtype=np.int32
        )
        Dataset.from_dict({"input_ids": ids}).save_to_disk(str(folder / "rows"))
        for kind in ("map", "stream"):
            trained = {who: child(who, kind, folder, options.batches, None) for who in contestants}
            found = {who: {EARLY: [], options.batches: []} for who in contestants}
            for _ in range(options.rounds):
                for who in contestants:
                    for checkpoint in found[who]:
                        found[who][checkpoint].append(child(who, kind, folder, options.batches, checkpoint))
            table[kind] = {}
            for who in contestants:
                early, late = (statistics.median(found[who][checkpoint]) for checkpoint in found[who])
                table[kind][who] = {"early": early, "late": late, "position": late - early, "training": trained[who]}
                print(
                    f"{kind:6s} {who:12s} resumes after {EARLY} batches in {early:6.2f} s, after {options.batches:,} "
                    f"in {late:6.2f} s: the position costs {late - early:6.2f} s (training took {trained[who]:.0f} s)",
                      flush=True)  # fmt: skip
    write("resume", {"batches": options.batches, "rounds": options.rounds, "early": EARLY, "table": table})


if __name__ == "__main__":
    main()
