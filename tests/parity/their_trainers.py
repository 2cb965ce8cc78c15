"""Trains with trl's own trainers, on transformers' `Trainer` or on ours, and writes what they logged.

    python -m tests.parity.their_trainers theirs|ours FILE

Run by `test_their_trainers.py`. Ours takes the place of transformers' by its name, before trl is imported.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from pathlib import Path

import transformers
from datasets import Dataset, disable_progress_bars

import posttrain.core
from tests import tiny
from tests.contract.trainers import preference_rows

HOMES = ("", ".trainer", ".trainer_callback", ".trainer_utils", ".training_args")
REPLACED = (
    "Trainer TrainingArguments TrainerCallback TrainerState TrainerControl EvalPrediction EarlyStoppingCallback "
    "PredictionOutput EvalLoopOutput TrainOutput ProgressCallback DefaultFlowCallback PrinterCallback"
).split()


def replace() -> None:
    """Let transformers have our classes under its names, as after a change of the import lines of trl."""
    for home in HOMES:
        module = importlib.import_module(f"transformers{home}")
        for name in REPLACED:
            if hasattr(module, name):
                setattr(module, name, getattr(posttrain.core, name))


def runs():
    """(trainer, config, model, rows, other arguments) of each trainer of trl."""
    import trl
    from trl.experimental import cpo, gkd, kto

    pairs = preference_rows(8)
    sides = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs for side in ("chosen", "rejected")
    ]  # fmt: skip
    chats = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
             for row in pairs]  # fmt: skip
    policy = {"ref_model": tiny.causal_lm()}
    yield trl.SFTTrainer, trl.SFTConfig, tiny.causal_lm(), [{"text": row["chosen"]} for row in pairs], {}
    yield trl.DPOTrainer, trl.DPOConfig, tiny.causal_lm(), pairs, policy
    yield trl.RewardTrainer, trl.RewardConfig, tiny.reward_model(), pairs, {}
    yield kto.KTOTrainer, kto.KTOConfig, tiny.causal_lm(), sides, policy
    yield cpo.CPOTrainer, cpo.CPOConfig, tiny.causal_lm(), pairs, {}
    yield gkd.GKDTrainer, gkd.GKDConfig, tiny.causal_lm(), chats, {"teacher_model": tiny.causal_lm(seed=1)}


def logged(kind, config, model, rows, others) -> list[dict[str, float]]:
    with tempfile.TemporaryDirectory() as folder:
        own = {"lmbda": 0.0} if kind.__name__ == "GKDTrainer" else {}
        args = config(
            output_dir=folder, max_steps=3, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            logging_steps=1, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, use_cpu=True,
            bf16=False, load_best_model_at_end=True, report_to="none", disable_tqdm=True, learning_rate=1e-2, **own,
        )  # fmt: skip
        data = Dataset.from_list(rows)
        trainer = kind(
            model=model, args=args, train_dataset=data, eval_dataset=data.select(range(4)),
            processing_class=tiny.tokenizer(), **others,
        )  # fmt: skip
        trainer.train()
        last = trainer.evaluate()
        return [*trainer.state.log_history, {"best": float(trainer.state.best_global_step)} | last]


if __name__ == "__main__":
    disable_progress_bars()
    transformers.set_seed(0)
    if sys.argv[1] == "ours":
        replace()
    from accelerate import PartialState

    PartialState()  # for the loggers of accelerate, which trl's constructors use before ours begins
    found = {run[0].__name__: logged(*run) for run in runs()}
    Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
