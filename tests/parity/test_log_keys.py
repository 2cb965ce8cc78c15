"""What a dashboard of transformers or trl reads in the log is there, with the same meaning, or a page says why not.

Run with a Python that has trl: ``python -m pytest tests/parity/test_log_keys.py``.
"""

from __future__ import annotations

import fnmatch
import importlib
import re
from pathlib import Path

import pytest
import transformers
from datasets import Dataset

from posttrain import core, rl, sft
from tests import tiny
from tests.contract.trainers import pad, preference_rows, text_rows

trl = pytest.importorskip("trl")

PAGE = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text(encoding="utf-8").split("### Keys of the log")[1]
TRIPLES = preference_rows(8)
PAIRS = [{name: row[name] for name in ("prompt", "chosen", "rejected")} for row in TRIPLES]
PROMPTS = [{"prompt": row["prompt"]} for row in TRIPLES]
VERDICTS = [
    {"prompt": row["prompt"], "completion": row["chosen" if i % 2 else "rejected"], "label": bool(i % 2)}
    for i, row in enumerate(TRIPLES)
]
ONLINE = {"max_completion_length": 6, "num_generations": 2}
#: Trainer -> rows, arguments, and the keys whose values are not compared: explained on the page, or of random samples.
READ = ["*num_tokens", "total_flos"]
LOGITS = ["*logits/*"]
TRAINERS = {
    "Trainer": (tiny.token_rows(8), {}, []),
    "SFTTrainer": (text_rows(8), {}, []),
    "DPOTrainer": (PAIRS, {}, READ + LOGITS),
    "KTOTrainer": (VERDICTS, {}, ["*"]),  # it shuffles its rows, see the table above the keys
    "RewardTrainer": (PAIRS, {}, ["*min_reward", "*max_reward"]),
    "CPOTrainer": (PAIRS, {"cpo_alpha": 0.0, "loss_type": "simpo"}, READ + LOGITS),
    "ORPOTrainer": (PAIRS, {}, [*READ, *LOGITS, "*nll_loss", "*loss", "grad_norm", "*log_odds_chosen"]),
    "TPOTrainer": (TRIPLES, {"loss_type": "tpo-l"}, [*READ, *LOGITS, "*entropy", "eval_loss"]),
    "GRPOTrainer": (PROMPTS, ONLINE, ["*"]),
    "RLOOTrainer": (PROMPTS, ONLINE, ["*"]),
}


def letters(completions, **columns):
    return [float(len(completion)) % 5 for completion in completions]


def trainers(name):
    """(ours, theirs), each the class of a trainer and of its arguments."""
    if name == "Trainer":
        return (core.Trainer, core.TrainingArguments), (transformers.Trainer, transformers.TrainingArguments)
    config = name.replace("Trainer", "Config")
    own = sft if name == "SFTTrainer" else rl
    short = name.removesuffix("Trainer").lower()
    peer = trl if hasattr(trl, name) else importlib.import_module(f"trl.experimental.{short}")
    return (getattr(own, name), getattr(own, config)), (getattr(peer, name), getattr(peer, config))


def record(trainer_class, config_class, name, folder):
    """The first value of each key that a run logs."""
    rows, changes, _ = TRAINERS[name]
    args = config_class(
        output_dir=str(folder / config_class.__module__), per_device_train_batch_size=4, per_device_eval_batch_size=4,
        max_steps=1, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        bf16=False, disable_tqdm=True, gradient_checkpointing=False, eval_strategy="steps", eval_steps=1, optim="sgd",
        **changes,
    )  # fmt: skip
    model = tiny.reward_model(pad_token_id=0) if name == "RewardTrainer" else tiny.causal_lm(initializer_range=0.3)
    more = {"data_collator": pad} if name == "Trainer" else {}
    if changes is ONLINE:
        more["reward_funcs"] = letters
        model.save_pretrained(folder / "model")  # trl loads the reference of RLOO by its name
        model = type(model).from_pretrained(folder / "model")
    if name in ("DPOTrainer", "KTOTrainer"):
        more["ref_model"] = tiny.causal_lm(initializer_range=0.3)
    data = Dataset.from_list(rows)
    trainer = trainer_class(
        model=model, args=args, train_dataset=data, eval_dataset=data, processing_class=tiny.tokenizer(), **more
    )
    trainer.train()
    found = {}
    for logged in trainer.state.log_history:
        found = logged | found
    return found


def explained(key):
    """Whether the page names `key`; a star stands for any part of a name, and keys of evaluations for their own."""
    named = [name for name in re.findall(r"`([^`]+)`", PAGE) if " " not in name]
    return any(fnmatch.fnmatch(one, name) for name in named for one in (key, key.removeprefix("eval_")))


@pytest.mark.rotated
@pytest.mark.parametrize("name", TRAINERS)
def test_the_log_has_the_keys_of_the_peer(name, tmp_path):
    ours, theirs = (record(*classes, name, tmp_path) for classes in trainers(name))
    assert [key for key in theirs if key not in ours and not explained(key)] == []
    left_out = [*TRAINERS[name][2], "*_runtime", "*_per_second", "train_loss"]
    both = [key for key in theirs if key in ours and not any(fnmatch.fnmatch(key, one) for one in left_out)]
    assert {key: ours[key] for key in both} == pytest.approx({key: theirs[key] for key in both}, rel=1e-3, abs=1e-4)
