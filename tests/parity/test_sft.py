"""SFT beside TRL: the same rows in the same order give the same loss, gradient norm and accuracy, step by step.

Run with a Python that has trl: ``python -m pytest tests/parity/test_sft.py``.
"""

import dataclasses

import pytest
import transformers

from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

trl = pytest.importorskip("trl")

COMPARED = ("loss", "grad_norm", "learning_rate", "mean_token_accuracy", "entropy")
TEXTS = [{"text": text[: 20 + 7 * number]} for number, text in enumerate(tiny.CORPUS * 4)]
# TRL tokenizes prompt and completion together, so a word's beginning is where they are parted.
COMPLETIONS = [{"prompt": "Question: 2 + 3\n", "completion": text["text"]} for text in TEXTS]
CHATS = [
    {"messages": [
        {"role": "user", "content": row["text"][:15]}, {"role": "assistant", "content": row["text"][15:30]},
        {"role": "user", "content": "and then"}, {"role": "assistant", "content": row["text"][30:]},
    ]}
    for row in TEXTS
]  # fmt: skip
# As tiny.CHATML, and marked for TRL, which finds the assistant's turns by these marks alone.
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}{% "
    "generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}{{ message['content'] "
    "}}<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# A batch of 64 holds every packed row, so it does not matter which documents share one.
PACKED = {"packing": True, "max_length": 48, "per_device_train_batch_size": 64}
RUNS = {
    "padded": (TEXTS, {}),
    "accumulated": (TEXTS, {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}),
    "truncated": (TEXTS, {"max_length": 20}),
    "packed": (TEXTS, PACKED),
    "packed, longer ones split": (TEXTS, PACKED | {"packing_strategy": "bfd_split", "max_length": 24}),
    "padding-free": (TEXTS, {"padding_free": True, "max_length": None}),
    "completions": (COMPLETIONS, {}),
    "completions and prompts": (COMPLETIONS, {"completion_only_loss": False}),
    "completions, packed": (COMPLETIONS, PACKED | {"max_length": 64}),
    "conversations": (CHATS, {}),
    "assistant's turns": (CHATS, {"assistant_only_loss": True}),
    "recomputed": (TEXTS, {"gradient_checkpointing": True}),
    "whole logits there, chunks here": (TEXTS, {"loss_type": "nll"}),
    "bf16": (TEXTS, {"bf16": True}),
}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, router_aux_loss_coef=0.5)
ADAPTERS = {
    "lora": {},
    "dora": {"use_dora": True},
    "rslora": {"use_rslora": True},
    "head trained whole": {"modules_to_save": ["lm_head"]},
}


def run(trainer_class, config_class, output_dir, rows, adapter=None, arch="qwen3", model=None, **changes):
    from datasets import Dataset

    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=4, max_steps=5, learning_rate=0.5, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, bf16=False, disable_tqdm=True,
        max_length=128, gradient_checkpointing=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    model = tiny.causal_lm(arch, initializer_range=0.2, **(model or {}))
    if adapter is not None:
        from peft import LoraConfig, get_peft_model

        options = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "task_type": "CAUSAL_LM"}
        model = get_peft_model(model, LoraConfig(**(options | adapter)))
    trainer = trainer_class(
        model=model,
        args=config_class(**(usual | changes)),
        train_dataset=Dataset.from_list(rows),
        processing_class=tiny.tokenizer(chat_template=MARKED),
    )
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def assert_equal_logs(ours, theirs, tolerance=1e-4, compared=COMPARED):
    assert len(ours) == len(theirs) == 5
    for step, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        for name in compared:
            assert mine[name] == pytest.approx(other[name], rel=tolerance, abs=tolerance), f"{name} of step {step}"


@pytest.mark.rotated
@pytest.mark.parametrize("name", RUNS)
def test_each_step_is_the_same(name, tmp_path):
    rows, changes = RUNS[name]
    theirs = run(trl.SFTTrainer, trl.SFTConfig, tmp_path / "theirs", rows, **changes)
    assert theirs[-1]["loss"] < theirs[0]["loss"] - 1e-2, "nothing happened, so nothing is compared"
    ours = run(SFTTrainer, SFTConfig, tmp_path / "ours", rows, **changes)
    # What TRL logs of a window is the mean of the means of its micro-batches; ours is that of its tokens.
    compared = COMPARED[:3] if name == "accumulated" else COMPARED
    assert_equal_logs(ours, theirs, 3e-2 if name == "bf16" else 1e-4, compared)


@pytest.mark.parametrize("name", ADAPTERS)
def test_with_adapters_too(name, tmp_path):
    options = {"adapter": ADAPTERS[name], "learning_rate": 2.0}
    theirs = run(trl.SFTTrainer, trl.SFTConfig, tmp_path / "theirs", COMPLETIONS, **options)
    assert theirs[0]["grad_norm"] > 1e-2
    assert_equal_logs(run(SFTTrainer, SFTConfig, tmp_path / "ours", COMPLETIONS, **options), theirs)


@pytest.mark.parametrize("coef", [None, 2.0, 0.0])
def test_with_the_loss_of_a_router_too(coef, tmp_path):
    options = {"arch": "qwen3_moe", "model": EXPERTS, "router_aux_loss_coef": coef}
    theirs = run(trl.SFTTrainer, trl.SFTConfig, tmp_path / "theirs", TEXTS, **options)
    ours = run(SFTTrainer, SFTConfig, tmp_path / "ours", TEXTS, **options)
    assert ("aux_loss" in theirs[0]) == (coef != 0)
    assert_equal_logs(ours, theirs, compared=COMPARED + (("aux_loss",) if coef != 0 else ()))


def test_every_argument_of_trl_is_known_with_its_default():
    theirs, ours = ({f.name: f.default for f in dataclasses.fields(config)} for config in (trl.SFTConfig, SFTConfig))
    common = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    own = (theirs.keys() - common) | {"learning_rate", "logging_steps"}
    assert len(own) >= 20
    assert {name: ours[name] for name in own} == {name: theirs[name] for name in own}
    args = trl.SFTConfig("out", use_cpu=True), SFTConfig("out", use_cpu=True)
    assert args[0].gradient_checkpointing == args[1].gradient_checkpointing
