"""Time of a training step beyond the model's own: posttrain, transformers and lightning against a loop written by hand.

    python benchmarks/loop.py [--steps 800] [--rounds 5]

All train the same tiny language model on the same batches with fused AdamW, clipping and a linear schedule, and log
every 10 steps. Contestants take turns; a contestant's figure is the median over the rounds, its ratio the median of the
rounds' ratios to the hand-written loop. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from contextlib import redirect_stderr, redirect_stdout

os.environ.setdefault("OMP_NUM_THREADS", "1")
import torch
from results import write
from torch import nn

VOCABULARY, WIDTH, LENGTH, BATCH = 128, 32, 16, 8


class TinyLM(nn.Module):
    """An embedding, one hidden layer and a head: as little compute as a language model can be."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids, labels=None):
        logits = self.head(torch.relu(self.hidden(self.embed(input_ids))))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


def rows(count: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def collate(batch):
    return {name: torch.stack([row[name] for row in batch]) for name in batch[0]}


def fresh() -> TinyLM:
    torch.manual_seed(0)
    return TinyLM()


def raw(data, steps: int) -> float:
    model, losses = fresh(), []
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
    model.train()
    started, total = time.process_time(), torch.zeros(())
    for step, batch in enumerate(loader, start=1):
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        total += loss.detach()
        if step % 10 == 0:
            losses.append(total.item() / 10)
            total.zero_()
    return time.process_time() - started


def trainer(module: str, data, steps: int, folder: str) -> float:
    if module == "posttrain":
        from posttrain.core import Trainer, TrainerCallback, TrainingArguments
    else:
        from transformers import Trainer, TrainerCallback, TrainingArguments
    seconds = {}

    class Timer(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            seconds["start"] = time.process_time()

        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == steps:  # reading the clock is a call into the system, which the raw loop makes once
                seconds["end"] = time.process_time()

    args = TrainingArguments(
        folder, per_device_train_batch_size=BATCH, num_train_epochs=1, learning_rate=1e-3, logging_steps=10,
        save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=False, remove_unused_columns=False,
    )  # fmt: skip
    Trainer(fresh(), args, data_collator=collate, train_dataset=data, callbacks=[Timer()]).train()
    return seconds["end"] - seconds["start"]


def lightning(data, steps: int, folder: str) -> float:
    import lightning as L

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = fresh()

        def training_step(self, batch, index):
            loss = self.model(**batch)["loss"]
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.0, fused=True)
            schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / steps))
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

        def on_train_start(self):
            self.started = time.process_time()

        def on_train_batch_end(self, outputs, batch, index):
            if index + 1 == steps:
                self.ended = time.process_time()

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    module = Module()
    loader = torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, collate_fn=collate)
    L.Trainer(
        max_epochs=1, accelerator="cpu", log_every_n_steps=10, gradient_clip_val=None, enable_checkpointing=False,
        logger=L.pytorch.loggers.CSVLogger(folder), enable_model_summary=False, default_root_dir=folder,
    ).fit(module, loader)  # fmt: skip
    return module.ended - module.started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, steps = rows(options.steps * BATCH), options.steps
    with tempfile.TemporaryDirectory() as folder:
        contestants = {
            "raw": lambda: raw(data, steps),
            "posttrain": lambda: trainer("posttrain", data, steps, folder),
            "transformers": lambda: trainer("transformers", data, steps, folder),
            "lightning": lambda: lightning(data, steps, folder),
        }
        seconds: dict[str, list[float]] = {}
        for number in range(options.rounds + 1):  # the first round warms up and is not counted
            for name, run in list(contestants.items()):
                try:
                    with open(os.devnull, "w") as null, redirect_stdout(null), redirect_stderr(null):
                        spent = run()
                except ImportError:
                    del contestants[name]
                    continue
                if number:
                    seconds.setdefault(name, []).append(spent)
    table = {
        name: {
            "microseconds_per_step": statistics.median(times) / steps * 1e6,
            "ratio_to_raw": statistics.median(t / r for t, r in zip(times, seconds["raw"], strict=True)),
        }
        for name, times in seconds.items()
    }
    for name, row in table.items():
        print(f"{name:14s} {row['microseconds_per_step']:8.0f} us/step   {row['ratio_to_raw']:.2f} x raw")
    write("loop", {"steps": steps, "rounds": options.rounds, "table": table})


if __name__ == "__main__":
    main()
