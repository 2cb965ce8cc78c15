"""Trains with trl's own trainers, on transformers' `Trainer` or on ours, and writes what they logged.

    python -m tests.parity.their_trainers theirs|ours FILE

Run by `test_their_trainers.py`. Ours takes the place of transformers' by its name, before trl is imported.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import tempfile
from pathlib import Path

import torch
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
    from peft import LoraConfig
    from trl.experimental import cpo, gkd, kto, orpo, tpo

    pairs = preference_rows(8)
    sides = [
        {"prompt": row["prompt"], "completion": row[side], "label": side == "chosen"}
        for row in pairs for side in ("chosen", "rejected")
    ]  # fmt: skip
    chats = [{"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
             for row in pairs]  # fmt: skip
    policy, texts = {"ref_model": tiny.causal_lm()}, [{"text": row["chosen"]} for row in pairs]
    yield trl.SFTTrainer, trl.SFTConfig, tiny.causal_lm(), texts, {}
    yield trl.DPOTrainer, trl.DPOConfig, tiny.causal_lm(), pairs, policy
    yield trl.RewardTrainer, trl.RewardConfig, tiny.reward_model(), pairs, {}
    yield kto.KTOTrainer, kto.KTOConfig, tiny.causal_lm(), sides, policy
    yield cpo.CPOTrainer, cpo.CPOConfig, tiny.causal_lm(), pairs, {}
    yield gkd.GKDTrainer, gkd.GKDConfig, tiny.causal_lm(), chats, {"teacher_model": tiny.causal_lm(seed=1)}
    yield orpo.ORPOTrainer, orpo.ORPOConfig, tiny.causal_lm(), pairs, {}
    third = [row | {"reference": row["chosen"]} for row in pairs]
    yield tpo.TPOTrainer, tpo.TPOConfig, tiny.causal_lm(), third, {}
    prompts, rewards = [{"prompt": row["prompt"]} for row in pairs], {"reward_funcs": vowels}
    yield trl.GRPOTrainer, trl.GRPOConfig, tiny.causal_lm(), prompts, rewards
    yield trl.RLOOTrainer, trl.RLOOConfig, tiny.causal_lm(), prompts, rewards
    lora = LoraConfig(r=4, lora_dropout=0.0, task_type="CAUSAL_LM")
    on_sft = type("LoRATrainer", (trl.SFTTrainer,), {})
    yield on_sft, trl.SFTConfig, tiny.causal_lm(), texts, {"peft_config": lora}


def vowels(completions, **_) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def draw_from_one_stream() -> None:
    """Let what is sampled depend on earlier samples alone: a base may draw from torch's own numbers in between."""
    stream, draw = torch.Generator().manual_seed(0), torch.multinomial
    torch.multinomial = lambda *args, **others: draw(*args, **others | {"generator": stream})


def logged(kind, config, model, rows, others) -> list[dict[str, float]]:
    batch, best = {"per_device_train_batch_size": 2, "learning_rate": 1e-2}, {"load_best_model_at_end": True}
    if "reward_funcs" in others:  # the loss of groups that are sampled alike is 0 but for rounding: no best model
        batch = {"per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "learning_rate": 1e-3}
        best = {"num_generations": 4, "max_completion_length": 8, "beta": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        own = {"lmbda": 0.0} if kind.__name__ == "GKDTrainer" else {}
        args = config(
            output_dir=folder, max_steps=3, gradient_accumulation_steps=2, logging_steps=1, eval_strategy="steps",
            eval_steps=1, save_strategy="steps", save_steps=1, use_cpu=True, bf16=False, report_to="none",
            disable_tqdm=True, **batch, **best, **own,
        )  # fmt: skip
        data = Dataset.from_list(rows)
        trainer = kind(
            model=model, args=args, train_dataset=data, eval_dataset=data.select(range(4)),
            processing_class=tiny.tokenizer(), **others,
        )  # fmt: skip
        draw_from_one_stream()
        trainer.train()
        last = trainer.evaluate()
        return [*trainer.state.log_history, {"best": float(trainer.state.best_global_step or 0)} | last]


if __name__ == "__main__":
    disable_progress_bars()
    transformers.set_seed(0)
    if sys.argv[1] == "ours":
        replace()
    found = {run[0].__name__: logged(*run) for run in runs()}
    if int(os.environ.get("RANK", 0)) == 0:
        Path(sys.argv[2]).write_text(json.dumps(found), encoding="utf-8")
