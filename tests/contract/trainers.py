"""Every trainer that keeps the promises of this folder. Adding an algorithm is adding one line to `TRAINERS`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch.nn import functional as F

from posttrain.core import Trainer, TrainingArguments
from posttrain.rl import (
    A2POTrainer,
    CPOTrainer,
    DistillationTrainer,
    DPOTrainer,
    GKDTrainer,
    GMPOTrainer,
    GOLDTrainer,
    GRPOTrainer,
    GRPOWithReplayBufferTrainer,
    IWOPDTrainer,
    KTOTrainer,
    OnlineDPOTrainer,
    ORPOTrainer,
    ReinforcePlusPlusTrainer,
    RewardTrainer,
    RLOOTrainer,
    SDFTTrainer,
    SDPOTrainer,
    TPOTrainer,
)
from posttrain.rl.rewards.score_heads import with_score_head
from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny, tiny_vision

ROWS = 22  # 8 + 8 + 6: the last window of an epoch is short


class ThreeArguments(Trainer):
    """`compute_loss` as code of earlier years has it: three arguments, a mean."""

    def compute_loss(self, model, inputs, return_outputs=False):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        logits = outputs.get("logits")[:, :-1]
        loss = F.cross_entropy(logits.reshape(-1, logits.size(-1)), labels[:, 1:].reshape(-1))
        return (loss, outputs) if return_outputs else loss


class IgnoresTheCount(Trainer):
    """`compute_loss` that accepts `num_items_in_batch` and returns a mean all the same."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        return (outputs.loss, outputs) if return_outputs else outputs.loss


def pad(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """A collator: rows filled up on the right, their labels with -100."""
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 0, "attention_mask": 0, "labels": -100}
    return {k: torch.tensor([row[k] + [v] * (longest - len(row[k])) for row in rows]) for k, v in fill.items()}


def classification_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    rows = tiny.token_rows(num_rows, seed)
    return [
        {"input_ids": r["input_ids"], "attention_mask": r["attention_mask"], "label": sum(r["labels"]) % 3}
        for r in rows
    ]


def text_rows(num_rows: int) -> list[dict[str, str]]:
    words = " ".join(tiny.CORPUS).split()
    return [
        {"prompt": " ".join(words[i : i + 3 + i % 5]), "completion": " " + " ".join(words[i + 7 : i + 10 + i % 7])}
        for i in range(num_rows)
    ]


def arguments(config: type, output_dir: Path | str, **changes: Any) -> Any:
    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=8, num_train_epochs=2, learning_rate=0.05, optim="sgd",
        lr_scheduler_type="linear", logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True,
    )  # fmt: skip
    return config(**(usual | changes))


def causal_lm(trainer_class: type[Trainer] = Trainer, **model: Any) -> Callable[..., Trainer]:
    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        return trainer_class(
            model=tiny.causal_lm(**model),
            args=arguments(TrainingArguments, output_dir, **changes),
            data_collator=pad,
            train_dataset=tiny.token_rows(ROWS),
            eval_dataset=tiny.token_rows(7, seed=1),
            callbacks=callbacks,
        )

    return make


def classifier(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
    return Trainer(
        model=tiny.classifier(),
        args=arguments(TrainingArguments, output_dir, **changes),
        processing_class=tiny.tokenizer(),
        train_dataset=classification_rows(ROWS),
        eval_dataset=classification_rows(7, seed=1),
        callbacks=callbacks,
    )


def sft(**options: Any) -> Callable[..., Trainer]:
    options = dict(options)
    lora, mixture = options.pop("lora", False), options.pop("mixture", False)

    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        peft_config = None
        if lora:
            from peft import LoraConfig

            usual = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
            peft_config = LoraConfig(**usual | (lora if isinstance(lora, dict) else {}))
        changes = {"max_length": 32, "gradient_checkpointing": False} | options | changes
        rows = {"a": text_rows(ROWS)[:5], "b": text_rows(ROWS)[5:]} if mixture else text_rows(ROWS)
        if mixture and changes.pop("streams", False):
            rows = {name: Dataset.from_list(part).to_iterable_dataset() for name, part in rows.items()}
        return SFTTrainer(
            model=tiny.causal_lm(),
            args=arguments(SFTConfig, output_dir, **changes),
            processing_class=tiny.tokenizer(),
            train_dataset=rows,
            eval_dataset=text_rows(7),
            peft_config=peft_config,
            callbacks=callbacks,
        )

    return make


def seq2seq_rows(num_rows: int, seed: int = 0) -> list[dict[str, Any]]:
    """Sources with targets of other lengths, which end with the eos token."""
    sources, targets = tiny.token_rows(num_rows, seed), tiny.token_rows(num_rows, seed + 100, max_length=12)
    return [{**source, "labels": target["input_ids"] + [1]} for source, target in zip(sources, targets, strict=True)]


def count_generated(evaluated: Any) -> dict[str, float]:
    """A `compute_metrics`: tokens that are neither pad nor start, which of a T5 are the same."""
    return {"generated": float((evaluated.predictions > 0).sum())}


def seq2seq(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
    return Seq2SeqTrainer(
        model=tiny.seq2seq_lm(),
        args=arguments(Seq2SeqTrainingArguments, output_dir, **({"predict_with_generate": True} | changes)),
        processing_class=tiny.tokenizer(),
        train_dataset=seq2seq_rows(ROWS),
        eval_dataset=seq2seq_rows(7, seed=1),
        compute_metrics=count_generated,
        callbacks=callbacks,
    )


def preference_rows(num_rows: int) -> list[dict[str, str]]:
    words = " ".join(tiny.CORPUS).split()
    return [
        {
            "prompt": " ".join(words[i : i + 3 + i % 5]),
            "chosen": " " + " ".join(words[i + 7 : i + 10 + i % 7]),
            "rejected": " " + " ".join(words[i + 11 : i + 13 + i % 5]),
            "reference": " " + " ".join(words[i + 5 : i + 8 + i % 4]),
        }
        for i in range(num_rows)
    ]


def preference(trainer_class: type[Trainer], **options: Any) -> Callable[..., Trainer]:
    options, lora = dict(options), options.get("lora", False)
    options.pop("lora", None)

    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        peft_config = None
        if lora:
            from peft import LoraConfig

            peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        return trainer_class(
            model=tiny.reward_model() if trainer_class is RewardTrainer else tiny.causal_lm(),
            args=arguments(
                trainer_class.config_class, output_dir, **({"gradient_checkpointing": False} | options | changes)
            ),
            processing_class=tiny.tokenizer(),
            train_dataset=preference_rows(ROWS),
            eval_dataset=preference_rows(7),
            peft_config=peft_config,
            callbacks=callbacks,
        )

    return make


def digit_sum(completion_ids):
    """A reward with some variance, that anyone can compute."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def online(trainer_class: type[Trainer], **options: Any) -> Callable[..., Trainer]:
    """A trainer that samples; its completions are ragged, since a single letter ends them."""

    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        mine, peft_config = dict(options), None
        prompts, shown = mine.pop("prompts", 9), {"privileged_context": "the"} if trainer_class is SDFTTrainer else {}
        if mine.pop("lora", False):
            from peft import LoraConfig

            peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        if rollouts := mine.pop("windows_per_rollout", None):
            mine["steps_per_generation"] = rollouts * changes.get("gradient_accumulation_steps", 1)
        usual = {
            "num_generations": 2,
            "max_completion_length": 6,
            "gradient_checkpointing": False,
            "generation_kwargs": {"stop": ["e", "a", "o"]},
        }
        return trainer_class(
            model=tiny.causal_lm(initializer_range=0.1),
            reward_funcs=digit_sum,
            args=arguments(trainer_class.config_class, output_dir, **(usual | mine | changes)),
            processing_class=tiny.tokenizer(),
            train_dataset=[shown | {"prompt": row["prompt"]} for row in text_rows(prompts)],
            eval_dataset=[shown | {"prompt": row["prompt"]} for row in text_rows(3)],
            peft_config=peft_config,
            callbacks=callbacks,
        )

    return make


def distilled(trainer_class: type[Trainer], **options: Any) -> Callable[..., Trainer]:
    """A student with a wider teacher."""

    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        mine, peft_config = dict(options), None
        if mine.pop("lora", False):
            from peft import LoraConfig

            peft_config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
        if rollouts := mine.pop("windows_per_rollout", None):
            mine["steps_per_generation"] = rollouts * changes.get("gradient_accumulation_steps", 1)
        usual = {
            "max_completion_length": 6,
            "gradient_checkpointing": False,
            "generation_kwargs": {"stop": ["e", "a", "o"]},
        }
        return trainer_class(
            model=tiny.causal_lm(initializer_range=0.1),
            teacher_model=tiny.causal_lm(seed=3, initializer_range=0.3, hidden_size=48),
            args=arguments(trainer_class.config_class, output_dir, **(usual | mine | changes)),
            processing_class=tiny.tokenizer(),
            train_dataset=text_rows(ROWS),
            eval_dataset=text_rows(3),
            peft_config=peft_config,
            callbacks=callbacks,
        )

    return make


def image_rows(num_rows: int) -> list[dict[str, Any]]:
    """Rows of every trainer, in turn with two images of two sizes, without any, and with one between texts."""
    image = tiny_vision.image
    between = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "now"}]
    asked = [("Which one ?", [(16, 16), (24, 16)]), ("Is there any ?", []), (between, [(16, 24)])]
    rows = []
    for i, texts in enumerate(preference_rows(num_rows)):
        question, sizes = asked[i % 3]
        talk: dict[str, Any] = {"prompt": [{"role": "user", "content": question}]}
        answers = ("completion", "chosen"), ("chosen", "chosen"), ("rejected", "rejected"), ("reference", "reference")
        talk |= {name: [{"role": "assistant", "content": texts[other]}] for name, other in answers}
        rows.append(talk | {"images": [image(5 * i + j, *size) for j, size in enumerate(sizes)]})
    return rows


def images(trainer_class: type[Trainer], columns: str, family: str = "qwen2_5_vl", **options: Any) -> Any:
    """Any trainer that takes images, on rows with and without them; `columns` are those that it reads.

    A reward model gets a head, and a student a teacher of its family.
    """

    def rows(number: int) -> list[dict[str, Any]]:
        return [{name: row[name] for name in ("images", *columns.split())} for row in image_rows(number)]

    def make(output_dir: Path | str, callbacks: list[Any] | None = None, **changes: Any) -> Trainer:
        model, processor = tiny_vision.FAMILIES[family]()
        samples, more = "num_generations" in options, {}
        if samples:
            more["reward_funcs"] = digit_sum_of_images
        if trainer_class is RewardTrainer:
            torch.manual_seed(0)
            model = with_score_head(model)
        if trainer_class is DistillationTrainer:
            more["teacher_model"] = tiny_vision.FAMILIES[family](seed=3)[0]
        usual = {"gradient_checkpointing": False, "learning_rate": 1e-2}
        return trainer_class(
            model=model,
            args=arguments(trainer_class.config_class, output_dir, **(usual | options | changes)),
            processing_class=processor,
            train_dataset=rows(9 if samples else ROWS),
            eval_dataset=rows(3 if samples else 7),
            callbacks=callbacks,
            **more,
        )

    return make


def digit_sum_of_images(completion_ids: list[list[int]], images: list[Any], **columns: Any) -> list[float]:
    """As `digit_sum`, of rows whose images are there."""
    assert len(images) == len(completion_ids)
    return digit_sum(completion_ids)


#: Families of vision-language models whose processors need nothing but pillow.
FAMILIES = [name for name in tiny_vision.FAMILIES if name not in ("pixtral", "mistral3")]
PAIRS = "prompt chosen rejected"
SAMPLES = {"num_generations": 2, "max_completion_length": 6, "generation_kwargs": {"stop": ["e", "a", "o"]}}

TRAINERS: dict[str, Callable[..., Trainer]] = {
    "causal-lm": causal_lm(),
    "dropout": causal_lm(arch="gpt2", resid_pdrop=0.1, embd_pdrop=0.1),
    "classifier": classifier,
    "three-arguments": causal_lm(ThreeArguments),
    "ignores-the-count": causal_lm(IgnoresTheCount),
    "sft": sft(),
    "sft-packed": sft(packing=True, max_length=48),
    "sft-lora": sft(lora=True),
    "sft-dora-head": sft(lora={"use_dora": True, "modules_to_save": ["lm_head"]}),
    "sft-mixture": sft(mixture=True, dataset_weights={"a": 1, "b": 1}, loss_type="dft"),
    "seq2seq": seq2seq,
    "dpo": preference(DPOTrainer),
    "dpo-padded": preference(DPOTrainer, shared_prefix=False),
    "dpo-lora": preference(DPOTrainer, lora=True),
    "dpo-sync": preference(DPOTrainer, sync_ref_model=True, ref_model_sync_steps=2, loss_type=["sigmoid", "ipo"]),
    "kto": preference(KTOTrainer, desirable_weight=1.5),
    "kto-lora": preference(KTOTrainer, lora=True, precompute_ref_log_probs=True),
    "orpo": preference(ORPOTrainer),
    "cpo": preference(CPOTrainer),
    "tpo": preference(TPOTrainer, beta=0.3),
    "simpo": preference(CPOTrainer, loss_type="simpo", cpo_alpha=0.0, beta=2.0),
    "reward": preference(RewardTrainer, center_rewards_coefficient=0.01),
    "grpo": online(GRPOTrainer),
    "grpo-reused": online(GRPOTrainer, windows_per_rollout=2, num_iterations=2, loss_type="dr_grpo", beta=0.05),
    "grpo-sync": online(GRPOTrainer, beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, entropy_coef=0.01),
    "grpo-lora": online(GRPOTrainer, lora=True, beta=0.1, windows_per_rollout=2),
    "grpo-adaptive": online(GRPOTrainer, use_adaptive_entropy=True, top_entropy_quantile=0.5, loss_type="vespo"),
    "grpo-dynamic": online(GRPOTrainer, dynamic_sampling=True, dynamic_sampling_rounds=2, num_iterations=2),
    "grpo-replay": online(GRPOWithReplayBufferTrainer, replay_buffer_size=4, num_iterations=2),
    "rloo": online(RLOOTrainer),
    "online-dpo": online(OnlineDPOTrainer, beta=0.3, prompts=18),
    "rloo-lora": online(RLOOTrainer, lora=True, windows_per_rollout=2, num_iterations=2),
    "distillation": distilled(DistillationTrainer),
    "distillation-lora": distilled(DistillationTrainer, lora=True, beta=0.0, windows_per_rollout=2),
    "distillation-policy": distilled(DistillationTrainer, loss_type="policy_gradient", num_iterations=2),
    "gkd": distilled(GKDTrainer),
    "iw-opd": distilled(IWOPDTrainer),
    "gold": distilled(GOLDTrainer, lmbda=0.5),
    "sdft": online(SDFTTrainer, teacher_model_kind="ema", windows_per_rollout=2),
    "sdpo": online(SDPOTrainer, distillation_weight=0.5, success_reward_threshold=0.3),
    "a2po": online(A2POTrainer, num_value_samples=2, filter_all_incorrect=False),
    "gmpo": online(GMPOTrainer, num_iterations=2),
    "reinforce++": online(ReinforcePlusPlusTrainer, importance_sampling_level="sequence"),
    "sft-images": images(SFTTrainer, "prompt completion"),
    "sft-images-packed": images(SFTTrainer, "prompt completion", packing=True, max_length=96),
    "dpo-images": images(DPOTrainer, PAIRS),
    "kto-images": images(KTOTrainer, PAIRS),
    "orpo-images": images(ORPOTrainer, PAIRS),
    "cpo-images": images(CPOTrainer, PAIRS),
    "tpo-images": images(TPOTrainer, f"{PAIRS} reference", beta=0.3),
    "grpo-images": images(GRPOTrainer, "prompt", **SAMPLES),
    "rloo-images": images(RLOOTrainer, "prompt", **SAMPLES),
    "reward-images": images(RewardTrainer, PAIRS, center_rewards_coefficient=0.01),
    "distillation-images": images(DistillationTrainer, "prompt completion", lmbda=0.5, max_completion_length=6),
}
#: Those without randomness in the forward pass: their result cannot depend on how a window is cut.
EXACT = {name: make for name, make in TRAINERS.items() if name != "dropout"}


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
