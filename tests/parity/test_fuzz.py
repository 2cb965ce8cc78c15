"""Random arguments lead a trainer of transformers or trl and ours to the same losses, gradients, metrics and events,
and to the same weights, checkpoints and best step.

Each seed draws some arguments of all trainers and some of its own, and what is around them: another model, an adapter,
rows in another form, a stream, several evaluation sets, callbacks, a run that is resumed. A difference is told with the
fewest of these that show it. What differs on purpose stands in `DOCUMENTED`, with a line of docs/migrating.md.
"""

from __future__ import annotations

import copy
import importlib
import json
import os
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import zip_longest
from math import isfinite
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
pytest.importorskip("trl")

from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    DataCollatorForSeq2Seq,
    EarlyStoppingCallback,
    TrainerCallback,
)

from tests import tiny
from tests.contract.trainers import pad, preference_rows, text_rows
from tests.parity import test_online as online
from tests.parity.test_online_preferences import generated
from tests.parity.test_preference_family import unpaired
from tests.programs import together

DRAWS = 40
PROCESSES, DRAWS_OF_TWO = 1, 3
#: The exit status of a process whose peer refuses the arguments.
REFUSED = 75
#: So often, at most, where nothing can be compared.
DRAWN_AGAIN = 9
#: Rows of training data, and of an evaluation. They fill no batch, but where `run` needs full ones.
ROWS, EVALUATED = 22, 7
#: By `Peer.model`; else a causal language model.
AUTO = {"reward": AutoModelForSequenceClassification, "seq2seq": AutoModelForSeq2SeqLM}
Settings = dict[str, Any]
USUAL = dict(
    per_device_train_batch_size=4,
    max_steps=4,
    learning_rate=0.01,
    logging_steps=1,
    save_strategy="no",
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
    gradient_checkpointing=False,
)


def ways(name: str, *values: Any) -> list[Settings]:
    return [{name: value} for value in values]


class Asks(TrainerCallback):
    """Asks for what no argument asks for."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_log |= state.global_step == 2
        control.should_evaluate |= state.global_step == 3
        control.should_save |= state.global_step == 1


class Declines(TrainerCallback):
    """Asks for less than the arguments, which another callback has answered before."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 2:
            control.should_log = control.should_evaluate = control.should_save = False


class EndsEpochs(TrainerCallback):
    """Leaves each epoch after two steps."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop = state.global_step % 2 == 0


class EndsInside(TrainerCallback):
    """Ends the run as its third step begins."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = state.global_step == 2


class Freezes(TrainerCallback):
    """Trains no norm after the first step, and each step at half the learning rate that the schedule gives."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_" in name:
                parameter.requires_grad_(False)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group in optimizer.param_groups:
            group["lr"] /= 2


class Patience(EarlyStoppingCallback):
    def __init__(self) -> None:
        super().__init__(early_stopping_patience=1)


CALLBACKS = {kind.__name__: kind for kind in (Asks, Declines, EndsEpochs, EndsInside, Freezes, Patience)}


#: What every trainer takes; one of the ways of each line is drawn, or none.
COMMON = [
    ways("per_device_train_batch_size", 1, 2, 8),
    ways("gradient_accumulation_steps", 2, 3),
    [{"num_train_epochs": epochs, "max_steps": -1} for epochs in (0.5, 1, 1.5)],
    ways("learning_rate", 1e-3, 5e-2),
    [
        *ways("lr_scheduler_type", "cosine", "constant", "constant_with_warmup", "polynomial", "inverse_sqrt"),
        {"lr_scheduler_type": "cosine_with_restarts", "lr_scheduler_kwargs": {"num_cycles": 2}},
        {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr": 1e-3}},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": {"num_decay_steps": 2}, "warmup_steps": 1},
        {
            "lr_scheduler_type": "cosine_warmup_with_min_lr",
            "lr_scheduler_kwargs": {"min_lr_rate": 0.1, "warmup_lr_rate": 0.2},
            "warmup_steps": 2,
        },
        {
            "lr_scheduler_type": "reduce_lr_on_plateau",
            "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5},
            "eval_strategy": "steps",
            "eval_steps": 1,
        },
    ],
    ways("warmup_steps", 1, 2, 0.3),
    ways("weight_decay", 0.1),
    ways("max_grad_norm", 0.0, 0.05, 10.0),
    ways("optim", "sgd", "adamw_torch", "adagrad", "rmsprop", "adafactor"),
    [{"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-5}],
    [*ways("logging_steps", 2, 3, 0.4), {"logging_steps": 2, "logging_first_step": True}],
    ways("logging_strategy", "epoch", "no"),
    ways("max_steps", 1, 7, 13),
    [
        {"eval_strategy": "steps", "eval_steps": 2},
        {"eval_strategy": "epoch"},
        {"eval_strategy": "steps", "eval_steps": 1, "eval_delay": 2},
        {"eval_strategy": "steps", "eval_steps": 0.5, "eval_on_start": True, "per_device_eval_batch_size": 2},
    ],
    [
        {"save_strategy": "steps", "save_steps": 2},
        {"save_strategy": "epoch", "save_total_limit": 1},
        {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "save_only_model": True},
        {"save_strategy": "steps", "save_steps": 0.5, "eval_strategy": "steps", "eval_steps": 0.5},
        {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"},
        {
            "save_strategy": "steps",
            "save_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
        },
        {
            "save_strategy": "epoch",
            "eval_strategy": "epoch",
            "num_train_epochs": 2,
            "max_steps": -1,
            "load_best_model_at_end": True,
            "metric_for_best_model": "eval_loss",
            "greater_is_better": True,
            "save_total_limit": 1,
        },
    ],
    ways("seed", 7),
    ways("data_seed", 3),
    ways("dataloader_drop_last", True),
    ways("train_sampling_strategy", "sequential", "random", "group_by_length"),
    ways("bf16", True),
    [
        *ways("gradient_checkpointing", True),
        *(
            {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": value}}
            for value in (True, False)
        ),
    ],
    ways("include_num_input_tokens_seen", "all", "non_padding"),
    ways("eval_accumulation_steps", 1),
    ways("prediction_loss_only", True),
    ways("average_tokens_across_devices", False),
    ways("torch_empty_cache_steps", 2),
    ways("bf16_full_eval", True),
    ways("auto_find_batch_size", True),
    ways("dataloader_num_workers", 1),
    ways("dataloader_pin_memory", False),
    ways("remove_unused_columns", False),
    ways("accelerator_config", {"split_batches": True}, {"gradient_accumulation_kwargs": {"sync_each_batch": True}}),
]
#: A quarter of our runs is stopped after a step and resumed from a checkpoint, ours or the peer's of that step; the
#: peer's are not interrupted.
RESUMED = [
    {"stopped_after": step, "save_strategy": "steps", "save_steps": step - 1, **whose}
    for step in (2, 3)
    for whose in ({}, {"from_theirs": True})
]
ADAPTERS = [
    {"r": 4, "target_modules": ["q_proj", "v_proj"]},
    {"r": 2, "target_modules": "all-linear", "use_rslora": True, "lora_alpha": 8},
    {"r": 4, "target_modules": ["q_proj", "down_proj"], "modules_to_save": ["lm_head"]},
    {"r": 4, "target_modules": ["o_proj"], "use_dora": True},
    {"r": 4, "target_modules": ["v_proj", "embed_tokens"], "bias": "all"},
]
#: What is around the arguments, which `run` reads; one of the ways of some lines is drawn.
AROUND = [
    ways("kind", "llama", "gpt2", "gemma2", "qwen3_moe"),
    [{"adapter": number, **more} for number in range(len(ADAPTERS)) for more in ({}, {"adapted_before": True})],
    ways("eval_sets", True),
    ways("stream", True),
    ways("callback", *CALLBACKS),
    ways("measured", True),
]
PREFERENCE = [ways("max_length", 32, None), ways("disable_dropout", False), ways("pad_to_multiple_of", 8)]
SYNC = [[{"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}]]
SAMPLED = [
    ways("num_generations", 2),
    ways("num_iterations", 2),
    ways("per_device_train_batch_size", 8),
    [{"steps_per_generation": 2, "gradient_accumulation_steps": 2}],
    ways("beta", 0.0, 0.1, 0.5),
    ways("epsilon", 0.05),
    ways("epsilon_high", 0.3),
    ways("temperature", 0.7),
    ways("mask_truncated_completions", True),
    ways("shuffle_dataset", True),
    ways("pad_to_multiple_of", 8),
    *SYNC,
]
ROLLOUTS = {"num_generations": 4, "max_completion_length": 8, "shuffle_dataset": False}
DISTILLED = [ways("beta", 0.0, 0.3, 1.0), ways("temperature", 0.7, 1.5)]


@dataclass
class Peer:
    """A trainer of a peer, ours of the same name, what is drawn for them and what both are given."""

    theirs: str
    ours: str
    name: str
    own: list[list[Settings]]
    rows: Callable[[int], list[Settings]]
    usual: Settings = field(default_factory=dict)
    given: Callable[[Path, Settings], Settings] = lambda folder, settings: {}
    model: str = "model"
    sampled: Callable[[Any, bool], None] | None = None
    #: Whether the peer can evaluate; trl's online DPO hands its batch of prompts to the model.
    evaluates: bool = True
    #: Other forms of the rows.
    forms: dict[str, Callable[[Settings], Settings]] = field(default_factory=dict)

    def config(self, module: Any) -> Any:
        arguments = f"{self.name}TrainingArguments" if self.model == "seq2seq" else f"{self.name}Config"
        return getattr(module, arguments if self.name else "TrainingArguments")


def prompts(number: int) -> list[Settings]:
    words = online.WORDS
    return [{"prompt": " ".join(words[i : i + 3 + i % 3])} for i in range(number)]


def chats(number: int) -> list[Settings]:
    sides = ("user", "prompt"), ("assistant", "completion")
    return [{"messages": [{"role": role, "content": row[name]} for role, name in sides]} for row in text_rows(number)]


def said(role: str, text: str) -> list[Settings]:
    return [{"role": role, "content": text}]


def as_chat(row: Settings) -> Settings:
    """A row of texts as one of messages: the prompt of a user, and what an assistant answers."""
    return {
        key: text if not isinstance(text, str) else said("user" if key == "prompt" else "assistant", text)
        for key, text in row.items()
    }


def with_system(row: Settings) -> Settings:
    chat = as_chat(row)
    return chat | {"prompt": said("system", "Answer in one word.") + chat["prompt"]}


def implicit(row: Settings) -> Settings:
    """A row whose completions begin with its prompt."""
    sides = {key: row["prompt"] + text for key, text in row.items() if key in ("chosen", "rejected")}
    return {key: text for key, text in row.items() if key not in ("prompt", "reference")} | sides


def implicit_chat(row: Settings) -> Settings:
    chat = as_chat(row)
    return {key: chat["prompt"] + chat[key] for key in ("chosen", "rejected")}


def of_several_turns(row: Settings) -> Settings:
    first, last = as_chat(row), as_chat({"prompt": "And then?", "completion": row["completion"][::-1]})
    return {"messages": first["prompt"] + first["completion"] + last["prompt"] + last["completion"]}


def with_more(row: Settings) -> Settings:
    """Columns that no trainer reads."""
    return row | {"id": f"row {len(row['prompt'])}", "score": 0.5, "tags": ["a", "b"]}


CHATS = {"chat": as_chat, "system": with_system, "more": with_more}
PAIRS = {**CHATS, "implicit": implicit, "implicit chat": implicit_chat}
TEXTS = {
    **CHATS,
    "text": lambda row: {"text": row["prompt"] + row["completion"]},
    "turns": of_several_turns,
    "tokens": lambda row: {"input_ids": tiny.tokenizer()(row["prompt"] + row["completion"])["input_ids"]},
}


def referenced(folder: Path, settings: Settings) -> Settings:
    """A reference model of its own: trl finds none for a model in memory."""
    model = folder / settings.get("kind", "model")
    return {} if "adapter" in settings else {"ref_model": AutoModelForCausalLM.from_pretrained(model)}


def taught(folder: Path, settings: Settings) -> Settings:
    return {"teacher_model": AutoModelForCausalLM.from_pretrained(folder / "teacher")}


def translated(folder: Path, settings: Settings) -> Settings:
    model = AutoModelForSeq2SeqLM.from_pretrained(folder / "seq2seq")
    given: Settings = {"data_collator": DataCollatorForSeq2Seq(tiny.tokenizer(), model)}
    if settings.get("predict_with_generate"):
        given["compute_metrics"] = lambda found: {"written": int(found.predictions[found.predictions > 0].sum())}
    return given


def grpo_rollouts(trainer: Any, is_theirs: bool) -> None:
    trainer.rollout_func = online.rollout


def rloo_rollouts(trainer: Any, is_theirs: bool) -> None:
    online.engine_of(trainer, online.trl if is_theirs else None)


def online_dpo_rollouts(trainer: Any, is_theirs: bool) -> None:
    if is_theirs:
        trainer._generate = lambda model, prompts, images: generated(trainer, prompts)
    else:
        trainer.rollout_func = online.rollout


def distillation_rollouts(trainer: Any, is_theirs: bool) -> None:
    if not is_theirs:
        trainer.rollout_func = online.rollout
        return
    asked: list[Any] = []
    tokenize = trainer._tokenize_prompts
    trainer._tokenize_prompts = lambda prompts: asked.append(prompts) or tokenize(prompts)
    trainer._generate_single_turn = lambda *_: online.rollout(asked[-1], trainer)["completion_ids"]


PEERS = {
    "trainer": Peer(
        "transformers",
        "posttrain.core",
        "",
        [ways("label_smoothing_factor", 0.1), ways("remove_unused_columns", False)],
        tiny.token_rows,
        given=lambda *_: {"data_collator": pad},
    ),
    "seq2seq": Peer(
        "transformers",
        "posttrain.seq2seq",
        "Seq2Seq",
        [
            ways("label_smoothing_factor", 0.1),
            [
                {"predict_with_generate": True, "generation_max_length": 24, "generation_num_beams": beams}
                for beams in (1, 2)
            ],
        ],
        tiny.token_rows,
        given=translated,
        model="seq2seq",
    ),
    "sft": Peer(
        "trl",
        "posttrain.sft",
        "SFT",
        [
            ways("max_length", 32, None),
            ways("completion_only_loss", False),
            ways("pad_to_multiple_of", 8),
            ways("shuffle_dataset", True),
            ways("loss_type", "nll", "dft"),
            [{"padding_free": True, "max_length": None}],
            [{"packing": True, "max_length": 48, "per_device_train_batch_size": 64}],
        ],
        lambda n: [{"prompt": r["prompt"], "completion": r["completion"]} for r in text_rows(n)],
        {"max_length": 64},
        forms=TEXTS,
    ),
    "dpo": Peer(
        "trl",
        "posttrain.rl",
        "DPO",
        [
            *PREFERENCE,
            *SYNC,
            ways("beta", 0.05, 1.0),
            ways("ld_alpha", 0.3),
            [
                *ways(
                    "loss_type",
                    ["hinge"],
                    ["ipo"],
                    ["bco_pair"],
                    ["aot"],
                    ["apo_zero"],
                    ["apo_down"],
                    ["nca_pair"],
                    ["sigmoid_norm"],
                    ["sppo_hard"],
                ),
                *({"loss_type": [name], "label_smoothing": 0.1} for name in ("robust", "exo_pair", "aot_unpaired")),
                {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]},
            ],
            ways("f_divergence_type", "forward_kl", "js_divergence", "alpha_divergence"),
            ways("use_weighting", True),
            ways("precompute_ref_log_probs", True),
        ],
        preference_rows,
        given=referenced,
        forms=PAIRS,
    ),
    "kto": Peer(
        "trl",
        "posttrain.rl",
        "KTO",
        [
            *PREFERENCE,
            *SYNC,
            ways("beta", 0.05, 1.0),
            ways("desirable_weight", 1.5),
            ways("undesirable_weight", 0.5),
            ways("precompute_ref_log_probs", True),
        ],
        unpaired,
        {"loss_type": "apo_zero_unpaired", "train_sampling_strategy": "sequential"},
        referenced,
        forms=CHATS,
    ),
    "reward": Peer(
        "trl",
        "posttrain.rl",
        "Reward",
        [*PREFERENCE[1:], ways("center_rewards_coefficient", 0.05)],
        preference_rows,
        model="reward",
        forms={**PAIRS, "margin": lambda row: row | {"margin": len(row["chosen"]) / 50}},
    ),
    "grpo": Peer(
        "trl",
        "posttrain.rl",
        "GRPO",
        [
            *SAMPLED,
            ways("loss_type", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
            ways("importance_sampling_level", "sequence"),
            ways("scale_rewards", "batch", "none"),
            ways("delta", 1.5),
            ways("top_entropy_quantile", 0.5),
            ways("entropy_coef", 0.1),
            ways("cast_lm_head_to_fp32", True),
            ways("use_bias_correction_kl", False),
            ways("num_generations_eval", 2),
        ],
        prompts,
        {"per_device_train_batch_size": 4, **ROLLOUTS},
        lambda *_: {"reward_funcs": online.digit_sum},
        sampled=grpo_rollouts,
    ),
    "rloo": Peer(
        "trl",
        "posttrain.rl",
        "RLOO",
        [*SAMPLED, ways("normalize_advantages", True), ways("reward_clip_range", (0.2, 0.6))],
        prompts,
        {"per_device_train_batch_size": 4, **ROLLOUTS},
        lambda *_: {"reward_funcs": online.digit_sum},
        sampled=rloo_rollouts,
    ),
    "cpo": Peer(
        "trl.experimental.cpo",
        "posttrain.rl",
        "CPO",
        [
            *PREFERENCE[1:2],
            ways("beta", 0.05, 1.0),
            ways("label_smoothing", 0.1),
            ways("simpo_gamma", 0.2),
            [*ways("loss_type", "hinge", "ipo", "simpo"), {"loss_type": "simpo", "alpha": 0.25}],
        ],
        preference_rows,
        {"cpo_alpha": 0.0},
        forms=PAIRS,
    ),
    "orpo": Peer(
        "trl.experimental.orpo",
        "posttrain.rl",
        "ORPO",
        [*PREFERENCE[1:2], ways("beta", 0.05, 1.0)],
        preference_rows,
        {"learning_rate": 1e-6},
        forms=PAIRS,
    ),
    "tpo": Peer(
        "trl.experimental.tpo",
        "posttrain.rl",
        "TPO",
        [
            *PREFERENCE,
            ways("beta", 0.05, 1.0),
            ways("loss_type", "hinge", "ipo", "tpo-l"),
            ways("tpo_alpha", 0.0, 0.3),
            ways("tpo_l_gamma", 0.2),
            ways("label_smoothing", 0.1),
        ],
        preference_rows,
        forms=CHATS,
    ),
    "online-dpo": Peer(
        "trl.experimental.online_dpo",
        "posttrain.rl",
        "OnlineDPO",
        [
            ways("beta", 0.3, 1.0),
            ways("loss_type", "ipo"),
            ways("missing_eos_penalty", 0.5),
            ways("disable_dropout", False),
        ],
        prompts,
        {"max_new_tokens": 8, "eval_strategy": "no", "eval_on_start": False, "load_best_model_at_end": False},
        lambda *_: {"reward_funcs": online.digit_sum},
        sampled=online_dpo_rollouts,
        evaluates=False,
    ),
    "gkd": Peer(
        "trl.experimental.gkd",
        "posttrain.rl",
        "GKD",
        [*DISTILLED, ways("disable_dropout", False)],
        chats,
        {"lmbda": 0.0},
        taught,
    ),
    "distillation": Peer(
        "trl",
        "posttrain.rl",
        "Distillation",
        [*DISTILLED, ways("pad_to_multiple_of", 8)],
        prompts,
        {"max_completion_length": 8, "shuffle_dataset": False},
        taught,
        sampled=distillation_rollouts,
    ),
}


def agreement(evaluated: Any) -> dict[str, float]:
    """A `compute_metrics`: labels that the logits tell, or the sum of rewards."""
    found, labels = evaluated.predictions, evaluated.label_ids
    if isinstance(found, tuple) or getattr(found, "ndim", 0) < 3:
        return {"sum": float(sum(part.sum() for part in found))}
    right, known = found.argmax(-1)[:, :-1] == labels[:, 1:], labels[:, 1:] != -100
    return {"right": float(right[known].sum()), "known": float(known.sum())}


def draw(name: str, seed: Any) -> Settings:
    """Some arguments, for both trainers of a name; what the peer's line above sets is not drawn from `COMMON`."""
    chance, peer = random.Random(f"{name} {seed}"), PEERS[name]
    own = chance.sample(peer.own, min(len(peer.own), chance.randint(1, 4)))
    forms = [ways("form", *peer.forms)] if peer.forms else []
    around = chance.sample([line for line in AROUND + forms if fits(name, line)], chance.choice([0, 0, 1, 1, 2, 3]))
    lines = chance.sample(COMMON, chance.randint(3, 8)) + own + around
    drawn: Settings = {}
    for line in lines:
        drawn |= {key: value for key, value in chance.choice(line).items() if line in peer.own or key not in peer.usual}
    return drawn | chance.choice([*RESUMED, *[{}] * 12])


def fits(name: str, line: list[Settings]) -> bool:
    """Whether what is around the arguments can be given to a trainer."""
    causal = PEERS[name].model == "model"
    if "measured" in line[0]:
        return name in ("trainer", "sft", "reward")
    return causal or not {"kind", "adapter"} & line[0].keys()


class Stop(TrainerCallback):
    """Ends a run after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


#: Of a run here. A run of transformers whose stream has fewer batches than a window of accumulation never ends.
MOST_EVENTS = 1000


class Events(TrainerCallback):
    """The events of a run, each with its step and epoch."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []


def _record(event: str) -> Callable[..., None]:
    def method(self: Events, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append((event, state.global_step, round(state.epoch or 0.0, 6)))
        if len(self.seen) > MOST_EVENTS:
            raise RuntimeError("The run does not end.")

    return method


for event in (
    "train_begin",
    "train_end",
    "epoch_begin",
    "epoch_end",
    "step_begin",
    "step_end",
    "substep_end",
    "pre_optimizer_step",
    "optimizer_step",
    "evaluate",
    "save",
    "log",
):
    setattr(Events, f"on_{event}", _record(event))


@dataclass
class Outcome:
    log: list[Settings]
    events: list[tuple[str, int, float]]
    error: str | None = None
    #: The lengths of the trained parameters, by name.
    weights: dict[str, float] = field(default_factory=dict)
    #: The step and the metric of the best weights, and the checkpoints that are left.
    kept: Settings = field(default_factory=dict)
    #: The step of a checkpoint of the peer from which the run went on.
    since: int = 0


#: What `run` reads of the settings; all others are arguments.
READ = "stopped_after from_theirs kind adapter adapted_before form eval_sets stream callback measured".split()
RAISED = (AssertionError, AttributeError, LookupError, NotImplementedError, RuntimeError, TypeError, ValueError)


def adapted(model: Any, trained: bool) -> Any:
    """`model` with numbers in its adapter that do not depend on what was drawn before; a new one adds nothing yet."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in sorted(model.named_parameters()):
        drawn = any(f"lora_{part}.default" in name for part in ("A", "B", "embedding_A", "embedding_B"))
        if drawn and (trained or parameter.any()):
            parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model


def checkpoints(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("checkpoint-")) for path in output.glob("checkpoint-*"))


def run(name: str, is_theirs: bool, settings: Settings, folder: Path, output: Path) -> Outcome:
    """A run with `settings`.

    With "stopped_after" ours ends after that step, and another one resumes it; with "from_theirs" ours resumes the
    peer's run, which is in the folder "True" beside `output`.
    """
    peer = PEERS[name]
    module = importlib.import_module(peer.theirs if is_theirs else peer.ours)
    around = {key: settings.get(key) for key in READ}
    own = copy.deepcopy({key: value for key, value in settings.items() if key not in READ})  # transformers fills dicts
    arguments = USUAL | peer.usual | own
    # Where the loss is a mean over rows, trl takes the mean of micro-batches' means: equal ones are compared.
    means = accumulates(settings) and name not in ("trainer", "seq2seq", "sft")
    number = 24 if means or name in ONLINE else ROWS
    form = peer.forms.get(around["form"], lambda row: row)

    def rows(count: int) -> Dataset:
        return Dataset.from_list([form(row) for row in peer.rows(count)])

    def trained(stop: int | None, resumed: str | None) -> tuple[Any, Events]:
        torch.manual_seed(0)
        events = Events()
        callbacks = [events, *([Stop(stop)] if stop else [])]
        callbacks += [CALLBACKS[around["callback"]]()] if around["callback"] else []
        model = AUTO.get(peer.model, AutoModelForCausalLM).from_pretrained(folder / (around["kind"] or peer.model))
        options = peer.given(folder, settings)
        before = around["adapted_before"] or name == "trainer"
        if around["adapter"] is not None:
            adapter = LoraConfig(**ADAPTERS[around["adapter"]], lora_dropout=0.0, task_type="CAUSAL_LM")
            options |= {} if before else {"peft_config": adapter}
            model = adapted(get_peft_model(model, adapter), trained=True) if before else model
        if around["measured"]:
            options["compute_metrics"] = agreement
        trainer = getattr(module, f"{peer.name}Trainer")(
            model=model,
            args=peer.config(module)(str(output), **arguments),
            callbacks=callbacks,
            train_dataset=rows(number).to_iterable_dataset() if around["stream"] else rows(number),
            eval_dataset={"a": rows(EVALUATED), "b": rows(4)} if around["eval_sets"] else rows(EVALUATED),
            processing_class=tiny.tokenizer(),
            **options,
        )
        if around["adapter"] is not None and not before:
            adapted(trainer.model, trained=False)
        if peer.sampled:
            peer.sampled(trainer, is_theirs)
        trainer.train(resume_from_checkpoint=resumed)
        return trainer, events

    stop = None if settings.get("save_only_model") else around["stopped_after"]
    theirs, since = output.parent / "True", 0
    try:
        if is_theirs or not stop:
            trainer, events = trained(None, None)
        elif around["from_theirs"]:
            since = next(iter(checkpoints(theirs)), 0)
            trainer, events = trained(None, str(theirs / f"checkpoint-{since}") if since else None)
        else:
            trainer, events = trained(stop, None)
            if trainer.state.max_steps > stop:
                trainer, events = trained(None, str(output / f"checkpoint-{checkpoints(output)[-1]}"))
        if peer.evaluates:
            trainer.evaluate()
        if name == "trainer":
            predicted = trainer.predict(rows(5))
            trainer.log({key: value for key, value in predicted.metrics.items() if "model_preparation" not in key})
    except RAISED as error:
        if PROCESSES > 1:  # the others may wait for this one
            text = f"{type(error).__name__}: {error}"
            sys.exit(REFUSED if is_theirs or refusal(name, text, arguments) else text)
        return Outcome([], [], f"{type(error).__name__}: {error}")
    state, parameters = trainer.state, trainer.model.named_parameters()
    return Outcome(
        copy.deepcopy(state.log_history),
        events.seen,
        weights={name: float(one.detach().float().norm()) for name, one in parameters if one.requires_grad},
        kept={"best step": state.best_global_step, "best": state.best_metric, "checkpoints": checkpoints(output)},
        since=since,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("fuzz")
    tiny.causal_lm(initializer_range=0.1).save_pretrained(path / "model")
    tiny.causal_lm(seed=5, initializer_range=0.3, hidden_size=48).save_pretrained(path / "teacher")
    tiny.reward_model(pad_token_id=0).save_pretrained(path / "reward")
    tiny.seq2seq_lm().save_pretrained(path / "seq2seq")
    for kind in ("llama", "gpt2", "gemma2", "qwen3_moe"):
        tied = {"tie_word_embeddings": True} if kind == "llama" else {}
        tiny.causal_lm(kind, initializer_range=0.1, **tied).save_pretrained(path / kind)
    return path


@dataclass
class Documented:
    """What differs on purpose: these keys of the log, "events", or "refused: " and an argument, where `when` holds."""

    trainers: list[str]
    keys: list[str]
    line: str  # of docs/migrating.md
    when: Callable[[Settings], bool] = lambda settings: True


def accumulates(settings: Settings) -> bool:
    return settings.get("gradient_accumulation_steps", 1) * PROCESSES > 1


def split(settings: Settings) -> bool:
    """Whether a record is of several batches."""
    several = {"logging_strategy", "eval_strategy", "callback"} & {*settings}
    return accumulates(settings) or settings["logging_steps"] != 1 or bool(several)


def saves_by_eval_loss(settings: Settings) -> bool:
    return settings.get("save_strategy") == "best" and settings.get("metric_for_best_model") in ("loss", "eval_loss")


def keeps_the_best(settings: Settings) -> bool:
    return settings.get("load_best_model_at_end", False)


def shuffles_anew(settings: Settings) -> bool:
    """Prompts are shuffled by another seed than `seed`, or for a second epoch."""
    many = settings["max_steps"] < 0 or settings["per_device_train_batch_size"] == 8 or accumulates(settings)
    return settings["shuffle_dataset"] and (many or "data_seed" in settings or settings.get("num_generations") == 2)


def breaks_windows(settings: Settings) -> bool:
    """Whether a pass over a stream does not end with an accumulation window."""
    size, window = settings["per_device_train_batch_size"], settings.get("gradient_accumulation_steps", 1)
    return "stream" in settings and any(-(-rows // size) % window for rows in (ROWS, 24))


def leaves_rows_out(settings: Settings) -> bool:
    window = settings["per_device_train_batch_size"] * settings.get("gradient_accumulation_steps", 1)
    return 24 % (window * PROCESSES) > 0


#: Those whose peers read the rows as they are, and not a rollout at a time.
ONLINE = ["gkd", "online-dpo"]
SAMPLING = ["grpo", "rloo", "distillation"]
DOCUMENTED = [
    Documented([*PEERS], ["metrics"], "Metrics of a record are means over all its tokens or rows", split),
    Documented([*PEERS], ["eval metrics"], "Metrics of a record", lambda s: "per_device_eval_batch_size" in s),
    Documented(SAMPLING, ["eval metrics"], "Metrics of a record are means over all its tokens or rows"),
    Documented(
        [*PEERS],
        ["weights", "eval_loss", "eval metrics", "test_loss"],
        "After an evaluation in half precision",
        lambda s: s.get("bf16_full_eval", False),
    ),
    Documented([*PEERS], ["checkpoints"], '`save_strategy="best"` keeps', lambda s: s.get("save_strategy") == "best"),
    Documented([*PEERS], ["checkpoints"], "The newest whole checkpoint and", lambda s: s.get("save_total_limit") == 1),
    Documented(
        [*PEERS],
        ["eval_loss", "eval metrics"],
        "The best model comes with its reference",
        lambda s: keeps_the_best(s) and s.get("sync_ref_model", False),
    ),
    Documented(
        ["cpo", "orpo", "tpo"], ["order"], "the load-balancing loss of a", lambda s: s.get("kind") == "qwen3_moe"
    ),
    Documented(
        ["grpo", "rloo"],
        ["order"],
        "GRPO, RLOO: groups stay together in a rollout",
        lambda s: s.get("kind") == "qwen3_moe" and (accumulates(s) or "steps_per_generation" in s),
    ),
    # Which is a sum of rounding in a rollout of its own policy: its sign decides when the rate is lowered.
    Documented(
        SAMPLING,
        ["order"],
        "`eval_loss` is the exact mean",
        lambda s: s.get("lr_scheduler_type") == "reduce_lr_on_plateau",
    ),
    Documented([*PEERS], ["epoch"], "For a stream without a length", lambda s: "stream" in s),
    Documented(["trainer"], ["order"], "in models whose class is not named", lambda s: s.get("kind") == "gpt2"),
    Documented(
        ["gkd", "online-dpo", *SAMPLING],
        ["order"],
        "a model with learned positions, such as",
        lambda s: s.get("kind") == "gpt2",
    ),
    Documented(ONLINE, ["order"], "a stream is shuffled", lambda s: "stream" in s),
    Documented(["seq2seq"], ["refused: predict_with_generate"], "`prediction_loss_only=True` beside"),
    Documented(
        [*PEERS],
        ["order", "epoch", "events"],
        "`dataloader_drop_last` leaves out the last",
        lambda s: "stream" in s and "dataloader_drop_last" in s and ROWS % s["per_device_train_batch_size"] > 0,
    ),
    Documented([*PEERS], ["order", "epoch", "events"], "A pass over a stream ends with", breaks_windows),
    Documented(
        [*PEERS],
        ["order"],
        "A resumed run freezes",
        lambda s: s.get("callback") == "Freezes" and "from_theirs" in s,
    ),
    Documented(
        [*PEERS],
        ["order"],
        "A reference that `sync_ref_model` had",
        lambda s: s.get("sync_ref_model", False) and "from_theirs" in s,
    ),
    Documented([*PEERS], ["best step"], "`best_global_step` is", lambda s: s["save_strategy"] == "no"),
    Documented(["dpo", "kto", "tpo"], ["refused: max_length"], "Rows that cannot be used are counted and named"),
    Documented([*PEERS], ["num_input_tokens_seen"], "`num_input_tokens_seen` counts what the model reads"),
    Documented([*PEERS], ["order"], "is a function of `data_seed`", lambda s: "group_by_length" in s.values()),
    Documented(SAMPLING, ["order"], "is a function of `data_seed`", shuffles_anew),
    Documented(
        [*PEERS],
        [f"refused: {name}" for name in ("label_smoothing", "train_sampling_strategy", "dataloader_drop_last")],
        "`label_smoothing` for a loss that has none",
    ),
    Documented([*PEERS], ["refused: save_steps"], "`save_steps` and `eval_steps` of two kinds", keeps_the_best),
    Documented(
        ["cpo", "orpo"],
        ["logits/chosen", "logits/rejected", "eval_logits/chosen", "eval_logits/rejected"],
        "`logits/chosen` and `logits/rejected` of CPO",
    ),
    Documented(
        ["orpo"],
        ["loss", "nll_loss", "grad_norm", "train_loss", "eval_loss", "eval_nll_loss"],
        "ORPO, CPO: the likelihood",
    ),
    Documented(
        ["cpo", "orpo"],
        ["order"],
        "CPO, ORPO: a conversation ends",
        lambda s: s.get("form") in ("chat", "system", "implicit chat"),
    ),
    Documented(["orpo"], ["events"], "ORPO, CPO: the likelihood", saves_by_eval_loss),
    Documented(["reward"], ["eval_sum"], "Reward models: `compute_metrics` gets"),
    Documented(
        [*PEERS],
        ["order", "events"],
        "A stop requested in `on_step_begin`",
        lambda s: s.get("callback") == "EndsInside" and accumulates(s),
    ),
    Documented(["rloo"], ["frac_reward_zero_std"], "RLOO: `frac_reward_zero_std`"),
    Documented(["online-dpo"], ["objective/kl"], "`objective/kl` of online DPO"),
    Documented(["online-dpo"], ["grad_norm", "order"], "Online DPO takes the mean of the gradients", accumulates),
    Documented(["seq2seq", "tpo"], ["order"], "A `compute_loss` that returns a mean is weighted", accumulates),
    Documented(["tpo"], ["eval_loss", "entropy"], "TPO: `eval_loss`"),
    Documented([*PEERS], ["eval_loss"], "`eval_loss` is the exact mean", lambda s: "per_device_eval_batch_size" in s),
    Documented(SAMPLING, ["eval_loss"], "`eval_loss` is the exact mean"),
    Documented(SAMPLING, ["events"], "`eval_loss` is the exact mean", saves_by_eval_loss),
    Documented(["grpo"], ["eval_loss"], "GRPO: `eval_loss` leaves out the entropy bonus"),
    Documented(
        ["sft"],
        ["num_tokens", "eval_num_tokens"],
        "joined rows are filled up",
        lambda s: "pad_to_multiple_of" in s and (s.get("packing", False) or s.get("padding_free", False)),
    ),
    Documented(
        [*PEERS],
        ["num_tokens", "eval_num_tokens"],
        "`num_tokens`, `eval_num_tokens`",
        lambda s: s.get("include_num_input_tokens_seen") == "all",
    ),
    Documented(
        ["dpo", "kto", "cpo", "orpo", "tpo"], ["num_tokens", "eval_num_tokens"], "`num_tokens`, `eval_num_tokens`"
    ),
    Documented(["grpo"], ["order"], "`top_entropy_quantile`", lambda s: "top_entropy_quantile" in s and accumulates(s)),
    Documented(["grpo"], ["order"], "GRPO: `bnpo`", lambda s: s.get("loss_type") == "bnpo" and accumulates(s)),
    Documented(["grpo"], ["order"], "the entropy bonus", lambda s: "entropy_coef" in s and accumulates(s)),
    Documented(ONLINE, ["order", "epoch", "events"], "leave out the rows that do not fill", leaves_rows_out),
    Documented(
        ["rloo"],
        ["loss", "train_loss"],
        "RLOO: truncated completions",
        lambda s: s.get("mask_truncated_completions", False),
    ),
]
#: Compared however a record is split; all others are "metrics" in the table above.
#: On two processes, besides.
OF_TWO = [
    Documented(["trainer"], ["test_loss"], "Predictions and metrics have each row once."),
    Documented(["gkd"], ["order"], "GKD on several processes has the gradient of one."),
    Documented(["dpo"], ["order"], "DPO: `sft` is a mean over all tokens", lambda s: "sft" in s.get("loss_type", "")),
    Documented([*PEERS], ["train_loss"], "`train_loss` is a mean over all steps and processes", split),
]
WHOLE = {
    "weights",
    "loss",
    "grad_norm",
    "learning_rate",
    "epoch",
    "train_loss",
    "eval_loss",
    "num_input_tokens_seen",
    "num_tokens",
    "eval_num_tokens",
    "eval_written",
}
#: Not a result of training.
CLOCK = ("runtime", "per_second", "total_flos", "step_time")


def explained(name: str, key: str, settings: Settings) -> bool:
    kinds = {key, "order", "metrics", *(["eval metrics"] if key.startswith("eval_") else [])}
    if key in WHOLE - {"learning_rate"}:
        kinds = {key, "order"}
    elif key in ("events", "best step", "best", "checkpoints"):
        kinds = {key}
    return any(name in one.trainers and kinds & {*one.keys} and one.when(settings) for one in DOCUMENTED)


def refusal(name: str, error: str, settings: Settings) -> bool:
    keys = (key for one in DOCUMENTED if name in one.trainers for key in one.keys if key.startswith("refused: "))
    return any(f"{key.removeprefix('refused: ')}=" in error for key in keys)


def records(side: Outcome, key: str) -> list[Settings]:
    """The records with a number for `key`; the peers add the count of tokens of unlogged steps to the last one."""
    found = (record for record in side.log if isinstance(record.get(key), int | float))
    return [record for record in found if key != "num_tokens" or "train_loss" not in record]


def begun_before(side: Outcome) -> int | None:
    """The step of the record that was begun before the peer's checkpoint, which does not tell what was summed."""
    steps = [0, *(record["step"] for record in side.log if "loss" in record)]
    return None if side.since in steps else next((step for step in steps if step > side.since), None)


def differences(name: str, settings: Settings, folder: Path, tmp: Path) -> dict[str, str] | None:
    """What differs, by key of the log or "events" or "refused"; None where nothing can be compared: the peer refuses
    the arguments or diverges, or ours refuses what the documentation says.
    """
    theirs, ours = (run(name, is_theirs, settings, folder, tmp / str(is_theirs)) for is_theirs in (True, False))
    everything, resumed = USUAL | PEERS[name].usual | settings, "stopped_after" in settings
    if theirs.error or ours.error:
        diverged = str(ours.error).startswith("NonFiniteError") and not all(map(isfinite, theirs.weights.values()))
        known = theirs.error or diverged or refusal(name, str(ours.error), everything)
        return None if known else {"refused": str(ours.error)}
    found, broken = {}, begun_before(ours)
    # In bfloat16 another order of additions is another rounding, and each step adds to it.
    rounded, near = settings.get("bf16"), {"rel": 1e-3, "abs": 1e-4}
    first = None if not rounded else 0 if split(everything) else 1
    if name == "orpo":  # its loss differs on purpose, and so do the weights from then on
        first = 1
    elif settings.get("optim") == "rmsprop" and not rounded:  # its first steps are as long for gradients of rounding
        first = 0 if settings.get("logging_strategy") == "epoch" else 3
    elif settings.get("learning_rate") == 0.05 and settings.get("optim") != "sgd" and not rounded:
        first, near = 3, {"rel": 1e-2, "abs": 1e-3}  # steps as long as the weights let rounding grow
    near = {"rel": 5e-2, "abs": 2e-2} if rounded else near
    # A weight that rounds the other way decides between two continuations that are about as likely.
    writes_others = rounded or settings.get("bf16_full_eval")
    for key in sorted({key for record in theirs.log for key in record}):
        if any(part in key for part in CLOCK) or explained(name, key, everything):
            continue
        since = "from_theirs" in settings and key.endswith(("train_loss", "num_tokens"))
        if since or (key == "train_loss" and first is not None):  # of steps that are not compared too
            continue
        if key == "eval_written" and writes_others:
            continue
        logged = [records(side, key)[:first] for side in (theirs, ours)]
        if ours.since and settings.get("logging_strategy") == "epoch":
            # An epoch that ended with the checkpoint is logged after it was saved, and not again by whoever goes on.
            logged[0] = [record for record in logged[0] if record["step"] != ours.since]
            logged[1] = [record for record in logged[1] if record["step"] != ours.since]
        if key == "loss":
            logged = [[record for record in side if record["step"] != broken] for side in logged]
        if key.endswith("accuracies"):  # of a tie, as before the first update, the rounding decides
            margins = [record.get(key.replace("accuracies", "margins"), 1.0) for record in logged[0]]
            logged = [
                [record for record, margin in zip(side, margins, strict=False) if abs(margin) > near["abs"]]
                for side in logged
            ]
        expected, got = ([record[key] for record in side] for side in logged)
        if got and got != pytest.approx(expected, nan_ok=True, **near):
            found[key] = f"{expected} there, {got} here"
    best = [side.kept["best step"] for side in (theirs, ours)] if keeps_the_best(everything) else [None, None]
    by_another_loss = best[0] != best[1] and explained(name, "eval_loss", everything)  # which has chosen the weights
    if first is None and not by_another_loss and not explained(name, "weights", everything):
        far = [key for key, norm in theirs.weights.items() if ours.weights.get(key) != pytest.approx(norm, **near)]
        if far or theirs.weights.keys() != ours.weights.keys():
            found["weights"] = f"{ {key: (theirs.weights[key], ours.weights.get(key)) for key in far[:3]} }"
    if first is None and not resumed and not explained(name, "eval_loss", everything):
        for key, value in theirs.kept.items():
            same = ours.kept[key] == (pytest.approx(value, **near) if isinstance(value, float) else value)
            if not same and not explained(name, key, everything):
                found[key] = f"{value} there, {ours.kept[key]} here"
    length = 2 if "stream" in settings else 3  # epochs of a stream are counted in another way
    expected, got = ([event[:length] for event in side.events] for side in (theirs, ours))
    if not resumed and expected != got and not explained(name, "events", everything):
        at = next(i for i, pair in enumerate(zip_longest(expected, got)) if pair[0] != pair[1])
        found["events"] = f"{expected[at : at + 3]} there, {got[at : at + 3]} here"
    return found


def fewest(name: str, settings: Settings, keys: set[str], folder: Path, tmp: Path) -> Settings:
    """The settings without those that a difference does not need."""
    for dropped in list(settings):
        fewer = {key: value for key, value in settings.items() if key != dropped}
        if keys & (differences(name, fewer, folder, tmp / dropped) or {}).keys():
            settings = fewer
    return settings


def check(name: str, seed: int, folder: Path, tmp: Path) -> None:
    found, settings = None, {}
    for again in range(DRAWN_AGAIN + 1):
        settings = draw(name, f"{seed}.{again}" if again else seed)
        found = differences(name, settings, folder, tmp / f"whole{again}")
        if found is not None:
            break
    assert found is not None, f"{name} {seed}: {DRAWN_AGAIN + 1} draws were refused, and nothing was compared"
    if found:
        least = fewest(name, settings, set(found), folder, tmp)
        raise AssertionError(f"{name} with {least} (of {settings}): {found}")


@pytest.mark.parametrize("name", ["trainer", "seq2seq", "sft", "dpo", "grpo"])
@pytest.mark.parametrize("seed", range(2))
def test_a_few_random_settings(name, seed, folder, tmp_path):
    check(name, seed, folder, tmp_path)


@pytest.mark.parametrize("stream", [{}, {"stream": True}], ids=str)
@pytest.mark.parametrize("own", [{}, {"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_rollouts_go_on_after_a_checkpoint_of_a_peer(name, own, stream, folder, tmp_path):
    saved = {"stopped_after": 3, "from_theirs": True, "save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    settings = saved | own | stream | {"gradient_accumulation_steps": 2}
    assert differences(name, settings, folder, tmp_path) == {}
    assert len(run(name, False, settings, folder, tmp_path / "False").log) > 6


@pytest.mark.parametrize("name", ["dpo", "kto"])
def test_the_reference_of_an_adapter_goes_on_after_a_checkpoint_of_a_peer(name, folder, tmp_path):
    saved = {"stopped_after": 3, "from_theirs": True, "save_strategy": "steps", "save_steps": 2}
    assert differences(name, saved | {"adapter": 0, "adapted_before": True}, folder, tmp_path) == {}


def test_every_difference_stands_in_the_documentation():
    page = (Path(__file__).parents[2] / "docs" / "migrating.md").read_text()
    assert [one.line for one in [*DOCUMENTED, *OF_TWO] if one.line not in page] == []


def of_two(name: str, seed: str) -> Settings:
    """Settings with which batches go round, so that none is filled up, and each process reads its own rows."""
    settings = draw(name, seed)
    for key in ("stream", "auto_find_batch_size", "per_device_eval_batch_size", "packing"):
        settings.pop(key, None)
    settings.pop("precompute_ref_log_probs", None)  # trl's processes look for one another's temporary files
    if settings.get("per_device_train_batch_size", 1) > 2:
        del settings["per_device_train_batch_size"]
    return settings | ({"label_smoothing_factor": 0.1} if name == "seq2seq" else {})  # else the peer's is doubled


def compare_two(name: str, seed: int, folder: Path, tmp: Path) -> None:
    for again in range(DRAWN_AGAIN + 1):
        done = together(2, [__file__, name, f"{seed}.{again}", str(folder), str(tmp / str(again))], timeout=120)
        if done.returncode != REFUSED:
            break
    assert done.returncode == 0, done.stderr[-4000:]
    found, settings = json.loads((tmp / str(again) / "found.json").read_text())
    assert not found, f"{name} with {settings} on two processes: {found}"


@pytest.mark.parametrize("name", ["trainer", "sft"])
def test_a_few_random_settings_on_two_processes(name, folder, tmp_path):
    compare_two(name, 0, folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("seed", range(1, DRAWS_OF_TWO))
def test_random_settings_on_two_processes(name, seed, folder, tmp_path):
    compare_two(name, seed, folder, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_random_settings(name, seed, folder, tmp_path):
    check(name, seed, folder, tmp_path)


if __name__ == "__main__":  # two processes, started by the tests above
    torch.set_num_threads(1)
    name, seed, models, tmp = sys.argv[1], sys.argv[2], Path(sys.argv[3]), Path(sys.argv[4])
    ROWS, EVALUATED, PROCESSES = 24, 8, 2
    USUAL |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2}
    DOCUMENTED += OF_TWO
    settings = of_two(name, seed)
    found = differences(name, settings, models, tmp)
    if found is None:
        sys.exit(REFUSED)
    if torch.distributed.get_rank() == 0:
        (tmp / "found.json").write_text(json.dumps([found, settings], default=str))
    torch.distributed.destroy_process_group()
