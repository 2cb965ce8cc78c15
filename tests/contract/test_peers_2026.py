"""What went wrong in other trainers in 2026, with the number of the report: here it comes out right.

The number before a name is that of an issue or pull request of trl, of ms-swift where the name says so.
"""

from __future__ import annotations

import copy
import math
import time

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.core.logging.metrics import Metrics, means
from posttrain.lm.loading.adapters import add_adapter
from posttrain.rl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, KTOTrainer
from posttrain.rl.generation import Sampling, transfer
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.server import Refused
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
from posttrain.rl.generation.weights import Weights
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import arguments, preference_rows
from tests.rl.generation.test_transfer import Workers, changed
from tests.rl.generation.test_vllm_colocated import model as colocated_model  # noqa: F401 - a fixture

IDS = torch.arange(2, 14).view(1, 12)
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
#: As Qwen3's: a thought stands before "</think>", with or without its beginning, and every answer shows one.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set parts = "
    "m.content.split('</think>') %}{% set thought = parts[0].split('<think>')[-1].strip() if parts | length > 1 else "
    "'' %}<think>\n{{ thought }}\n</think>\n\n{{ parts[-1].strip() }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
#: As DeepSeek's: the generation prompt opens a thought that an answer need not begin with.
OPENS_A_THOUGHT = tiny.CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def shaken(model, seed=0):
    """`model` with an adapter that changes what it says, as a trained one does."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def adapted_experts():
    config = LoraConfig(r=4, target_parameters=EXPERTS, task_type="CAUSAL_LM")
    return get_peft_model(tiny.mixture_of_experts(initializer_range=0.1), config)


def grpo(folder, rewards, **changes):
    """GRPO on one prompt whose four completions have 2, 4, 6 and 3 tokens, of which the first two end by themselves."""
    written = [[5, 1], [6, 7, 8, 1], [9, 10, 11, 12, 13, 14], [15, 16, 17]]

    def rollout(prompts, trainer):
        ids = trainer.processing_class(prompts)["input_ids"]
        return {"prompt_ids": ids, "completion_ids": [written[i % 4] for i in range(len(prompts))], "logprobs": None}

    usual = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 6, "max_steps": 1}
    usual |= {"num_train_epochs": 1, "learning_rate": 1e-3, "gradient_checkpointing": False, "scale_rewards": "none"}
    trainer = GRPOTrainer(
        tiny.causal_lm(initializer_range=0.1), rewards, arguments(GRPOConfig, folder, **(usual | changes)),
        [{"prompt": "How many ?"}] * 4, processing_class=tiny.tokenizer(), rollout_func=rollout,
    )  # fmt: skip
    trainer.train()
    return next(record for record in trainer.state.log_history if "loss" in record)


def points(completion_ids):
    return [{2: 1.0, 4: 0.0, 6: 2.0, 3: 5.0}[len(ids)] for ids in completion_ids]


def test_6380_a_mean_over_tokens_is_that_of_all_processes_and_not_a_mean_of_their_means():
    ranks = [Metrics(), Metrics()]
    for metrics, (total, tokens) in zip(ranks, [(3.0, 12), (3.0, 4)], strict=True):
        metrics.add_sum("kl", torch.tensor(total), torch.tensor(tokens))
    parts = []
    for metrics in ranks:
        metrics.drain(lambda part: parts.append(part) or [part])
    assert means(Metrics().drain(lambda _: parts)) == {"kl": 0.375}  # 6 of 16 tokens, not (3/12 + 3/4) / 2


@pytest.mark.parametrize("loss_type", ["dapo", "bnpo"])
def test_6439_a_truncated_completion_is_in_neither_part_of_the_mean_over_tokens(loss_type, tmp_path):
    # The advantages are -1, -2, 0 and 3. At the first step the loss is their mean over the 2 + 4 tokens that are left.
    record = grpo(tmp_path, points, loss_type=loss_type, mask_truncated_completions=True)
    assert record["loss"] == pytest.approx(-(2 * -1 + 4 * -2) / 6, abs=1e-6)


@pytest.mark.parametrize("written", ["", "<think>\n"], ids=["closed", "whole"])
@pytest.mark.parametrize("assistant_only", [False, True])
def test_6363_a_thought_that_the_generation_prompt_opened_is_trained_on_once(written, assistant_only, tmp_path):
    answer = f"{written}2 + 2 = 4\n</think>\n\nNatalia sold 4"
    rows = [{"messages": [{"role": "user", "content": "2 + 2 ?"}, {"role": "assistant", "content": answer}]}]
    args = arguments(SFTConfig, tmp_path, assistant_only_loss=assistant_only, max_length=128)
    tokenizer = tiny.tokenizer(chat_template=THINKING)
    row = SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tokenizer).train_dataset[0]
    text = tokenizer.decode(row["input_ids"])
    assert text.count("<think>") == text.count("</think>") == text.count("2 + 2 = 4") == 1
    if assistant_only:
        kept = tokenizer.decode([i for i, trained in zip(row["input_ids"], row["labels"], strict=True) if trained >= 0])
        assert "2 + 2 = 4\n</think>\n\nNatalia sold 4<|im_end|>" in kept and "2 + 2 ?" not in kept


@pytest.mark.parametrize("kept", ["chosen", "rejected", "both", "none"])
def test_6433_a_completion_loses_no_tokens_to_a_prompt_that_is_shorter_in_the_other(kept, tmp_path):
    tokenizer = tiny.tokenizer(chat_template=OPENS_A_THOUGHT)
    question = [{"role": "user", "content": "2 + 2 ?"}]
    answers = {
        name: ("<think>\n2 + 2\n</think>\n\n" if kept in (name, "both") else "") + said
        for name, said in (("chosen", "Natalia sold 4"), ("rejected", "Weng earns 5"))
    }
    row = {"prompt": question} | {name: [{"role": "assistant", "content": answer}] for name, answer in answers.items()}
    args = arguments(DPOConfig, tmp_path, max_length=128)
    trainer = DPOTrainer(tiny.causal_lm(), args=args, train_dataset=[row, row], processing_class=tokenizer)
    prepared = trainer.train_dataset[0]
    for name, answer in answers.items():
        turn = f"<|im_start|>assistant\n{answer}<|im_end|>"
        text = tokenizer.decode(prepared["prompt_ids"] + prepared[f"{name}_ids"])
        assert turn in text, text
        assert answer in "<think>\n" + tokenizer.decode(prepared[f"{name}_ids"])


def test_6796_a_sync_that_the_server_refuses_is_an_error_with_its_words_and_not_a_hang():
    server, sender, model = Workers(0), transfer.Gloo(0, 20), tiny.causal_lm()
    sender.send(Weights(model), [server], "one")
    server.refuses, began = True, time.monotonic()
    with pytest.raises(Refused, match="out of memory"):
        sender.send(Weights(model), [server], "two")
    assert time.monotonic() - began < 10  # the limit is 20 seconds, and the broadcast itself has none
    server.refuses = False
    sender.send(Weights(changed(model)), [server], "three")
    assert torch.equal(server.received[0]["lm_head.weight"], model.lm_head.weight)


@pytest.mark.parametrize("kind", [DPOTrainer, KTOTrainer, GRPOTrainer], ids=lambda kind: kind.__name__)
def test_5222_the_reference_of_a_trained_adapter_on_experts_is_that_adapter_and_not_the_base(kind, tmp_path):
    policy = shaken(adapted_experts())
    before = policy(input_ids=IDS).logits.detach()
    with policy.disable_adapter():
        assert (policy(input_ids=IDS).logits - before).abs().max() > 1e-2
    usual = {"per_device_train_batch_size": 4, "max_steps": 2, "num_train_epochs": 1, "beta": 0.3}
    usual |= {"gradient_checkpointing": False, "learning_rate": 0.5}
    more = {"reward_funcs": lambda completion_ids: [float(sum(ids) % 7) for ids in completion_ids]}
    if kind is GRPOTrainer:
        usual |= {"num_generations": 4, "max_completion_length": 4}
    trainer = kind(
        policy, args=arguments(kind.config_class, tmp_path, **usual), train_dataset=preference_rows(8),
        processing_class=tiny.tokenizer(), **(more if kind is GRPOTrainer else {}),
    )  # fmt: skip
    trainer.train()
    first, last = (trainer.state.log_history[i] for i in (0, 1))
    key = "kl" if kind is GRPOTrainer else "rewards/chosen"
    assert first[key] == pytest.approx(0, abs=1e-5) and abs(last[key]) > 1e-5
    with trainer.reference.use() as reference:
        torch.testing.assert_close(reference(input_ids=IDS).logits, before, rtol=0, atol=1e-5)


def test_ms_swift_6173_experts_get_the_adapter_that_is_asked_for_or_it_is_said(tmp_path):
    named = ["q_proj", "gate_proj", "up_proj", "down_proj"]
    with_experts = add_adapter(tiny.mixture_of_experts(), LoraConfig(r=2, target_modules=named))
    assert any(p.requires_grad and ".experts." in name for name, p in with_experts.named_parameters())
    # Mixtral's modules have other names, and its experts are not modules at all
    with pytest.warns(
        UserWarning, match="'down_proj', 'gate_proj', 'up_proj' match nothing .*target_parameters=.*gate_up_proj"
    ):
        add_adapter(tiny.mixture_of_experts(arch="mixtral"), LoraConfig(r=2, target_modules=named))
    model = shaken(adapted_experts())
    model.save_pretrained(tmp_path)
    from peft import PeftModel

    again = PeftModel.from_pretrained(tiny.mixture_of_experts(initializer_range=0.1), tmp_path).eval()
    torch.testing.assert_close(again(input_ids=IDS).logits, model(input_ids=IDS).logits)


def test_6688_a_thousand_syncs_of_an_adapter_on_bfloat16_leave_every_weight_as_it_was():
    config = LoraConfig(r=4, target_modules=["q_proj"])
    model = shaken(get_peft_model(tiny.causal_lm(num_hidden_layers=1, vocab_size=64).bfloat16(), config))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    weights = Weights(model)
    first = {name: weight.clone() for name, weight in weights}
    for _ in range(998):
        for _ in weights:
            pass
    assert all(torch.equal(weight, first[name]) for name, weight in weights)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    # What merging in place and taking it out again does, a few times: the fault is one of this dtype
    merged = copy.deepcopy(model)
    for _ in range(20):
        merged.merge_adapter()
        merged.unmerge_adapter()
    assert not torch.equal(merged.state_dict()[NAME], before[NAME])


NAME = "base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight"


def test_5312_an_engine_that_slept_writes_with_the_weights_of_the_last_sync(colocated_model):  # noqa: F811
    engine, local = VLLMColocatedGenerator({"max_model_len": 64}, sleeps=True), LocalGenerator(tiny.tokenizer())
    prompts, seeds, sampling = [[5, 9, 14], [7, 8]], [1, 2, 3, 4], Sampling(9, 0.7, eos_token_ids=tuple(range(40)))
    for synced in (True, False, True, False):  # the rounds of a dialogue are asked for without a sync between them
        if synced:
            changed(colocated_model)
            for generator in (engine, local):
                generator.sync_weights(colocated_model)
        expected, found = (generator.generate(prompts, 2, sampling, seeds) for generator in (local, engine))
        assert found.ids == expected.ids


def test_a_reward_that_never_applies_changes_no_advantage_and_no_metric(tmp_path):
    def nothing(completion_ids):
        return [None] * len(completion_ids)

    alone, beside = grpo(tmp_path / "1", points), grpo(tmp_path / "2", [points, nothing])
    for key in ("loss", "grad_norm", "reward", "reward_std", "rewards/points/mean"):
        assert beside[key] == alone[key], key
    assert not [key for key, value in beside.items() if isinstance(value, float) and math.isnan(value)]


def test_5902_a_completion_without_any_reward_is_in_no_baseline_and_teaches_nothing(tmp_path):
    def some(completion_ids):
        return [None if point == 2 else point for point in points(completion_ids)]

    # Of 1, 0 and 5 the mean is 2: advantages -1, -2 and 3 of 2, 4 and 3 tokens; the fourth has none.
    record = grpo(tmp_path, some, loss_type="dr_grpo")
    assert record["loss"] == pytest.approx(-(2 * -1 + 4 * -2 + 3 * 3) / (4 * 6), abs=1e-6)
    assert record["reward"] == pytest.approx(2.0)
