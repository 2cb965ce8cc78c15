"""A job of torchrun that trains a tiny model, and notes which rows each process has read in which step, one line each.

    python -m tests.distributed.elastic_job FOLDER '{"steps": 40, "dropout": 0.1, "pace": 0.05}' FLAGS OF TORCHRUN

It is torchrun's own agent, which forks its processes where torchrun starts Python anew: they need not import anything.
"""

import json
import os
import sys
import time
from pathlib import Path

import accelerate  # noqa: F401  # for its processes, which then need not
import torch
import torch.distributed.tensor
from torch.distributed import run as torchrun
from torch.distributed.launcher.api import elastic_launch

from posttrain.core import DataCollatorForSeq2Seq, Trainer, TrainerCallback, TrainingArguments
from posttrain.core.data.pipeline import is_filler
from tests import tiny

ROWS = 50


class Ledger:
    """The notes of one process; the first says that it is there."""

    def __init__(self, folder):
        (folder / "ledger").mkdir(exist_ok=True)
        name = f"{time.time_ns()}-{os.environ['RANK']}.jsonl"
        self.file = open(folder / "ledger" / name, "w", buffering=1)
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.note(pid=os.getpid(), agent=os.getppid(), world=int(os.environ["WORLD_SIZE"]), restarts=restarts)

    def note(self, **what):
        self.file.write(json.dumps(what) + "\n")


class Marked(Trainer):
    """Notes the rows of each micro-batch: the first token of a row is its number."""

    ledger = attempt = None

    def training_step(self, model, inputs, num_items_in_batch=None):
        rows = [] if is_filler(inputs) else (inputs["input_ids"][:, 0] - 4).tolist()
        self.ledger.note(attempt=self.attempt, step=self.state.global_step + 1, rows=rows)
        return super().training_step(model, inputs, num_items_in_batch)


class Pace(TrainerCallback):
    """Notes where a start begins, and leaves time to be killed in a step."""

    def __init__(self, ledger, seconds):
        self.ledger, self.seconds = ledger, seconds

    def on_train_begin(self, args, state, control, **kwargs):
        self.ledger.note(start=state.global_step)

    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(self.seconds)


def rows():
    found = tiny.token_rows(ROWS, max_length=8)
    for number, row in enumerate(found):
        row["input_ids"][0] = 4 + number
    return found


def train(folder, steps, dropout, pace):
    torch.set_num_threads(1)
    folder, ledger = Path(folder), Ledger(Path(folder))
    args = TrainingArguments(
        str(folder / "out"), global_batch_size=8, per_device_train_batch_size=2, max_steps=steps, save_steps=2,
        save_total_limit=3, logging_steps=5, learning_rate=1e-2, optim="adamw_torch", adam_epsilon=1e-3,
        resume_from_checkpoint="auto", use_cpu=True, report_to="none", disable_tqdm=True, report=False, ddp_timeout=60,
        log_level="info",
    )  # fmt: skip
    model = tiny.causal_lm("gpt2", resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout)
    collator = DataCollatorForSeq2Seq(tiny.tokenizer())
    callbacks = [Pace(ledger, pace)]
    trainer = Marked(model, args, train_dataset=rows(), data_collator=collator, callbacks=callbacks)
    trainer.ledger, trainer.attempt = ledger, trainer.dist.broadcast_object(time.time_ns())
    trainer.train()
    if trainer.dist.is_main:
        torch.save(model.state_dict(), folder / "weights.pt")


if __name__ == "__main__":
    folder, options, *flags = sys.argv[1:]
    config = torchrun.config_from_args(torchrun.parse_args([*flags, "nothing"]))[0]
    config.start_method = "fork"
    tiny.causal_lm("gpt2"), tiny.tokenizer()  # and all that these import
    elastic_launch(config, train)(folder, *(json.loads(options)[name] for name in ("steps", "dropout", "pace")))
