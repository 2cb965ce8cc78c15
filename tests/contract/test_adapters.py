"""However an adapter begins, and whatever it stands on: every trainer trains it, compares with the right reference, and
writes what peft reads back.
"""

import functools
import inspect

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, initialize_lora_eva_weights

from posttrain import rl
from posttrain.core.errors import ConfigError, DataError
from posttrain.rl import DPOTrainer, GRPOTrainer
from posttrain.rl.generation.engines import CopiedGenerator
from posttrain.rl.generation.local import LocalGenerator
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract import trainers
from tests.rl.algorithms.test_distillation import serving

IDS = torch.arange(5, 25)[None]
LORA = {"r": 4, "target_modules": ["q_proj", "v_proj"], "lora_dropout": 0.0, "task_type": "CAUSAL_LM"}
#: Every trainer that adds adapters: by its own constructor, with the rows that it takes.
ADDING = [SFTTrainer, *(getattr(rl, name) for name in rl.__all__ if name.endswith("Trainer"))]
SAMPLING = (rl.GRPOTrainer, rl.RLOOTrainer, rl.ReinforcePlusPlusTrainer, rl.OnlineDPOTrainer, rl.A2POTrainer)
TAUGHT = (rl.DistillationTrainer, rl.GKDTrainer)
SERVED = (rl.ServerDistillationTrainer, rl.AsyncDistillationTrainer)


@functools.cache
def teacher_address():
    """Of a server with a teacher, until the tests end."""
    return serving(tiny.causal_lm(seed=3)).__enter__()[0]


def make(trainer_class, model, folder, peft_config, **changes):
    """A run of two steps."""
    kwargs = {
        name: changes.pop(name) for name in ("quantization_config", "optimizer_cls_and_kwargs") if name in changes
    }
    given = changes.pop("train_dataset", None)
    usual, rows = {"max_steps": 2, "gradient_checkpointing": False}, trainers.preference_rows(16)
    if issubclass(trainer_class, (*SAMPLING, *TAUGHT)):
        usual["max_completion_length"] = 4
    if issubclass(trainer_class, SAMPLING):
        rows, kwargs["reward_funcs"] = [{"prompt": row["prompt"]} for row in rows], trainers.digit_sum
        usual["num_generations"] = 2
        if trainer_class is rl.SDPOTrainer:
            usual["success_reward_threshold"] = 0.0  # each completion is one that its teacher may be shown
    elif issubclass(trainer_class, rl.SDFTTrainer):
        rows = [{"prompt": row["prompt"], "privileged_context": "the"} for row in rows]
        usual |= {"max_completion_length": 4, "num_generations": 2}
    elif issubclass(trainer_class, SERVED):
        rows, usual["teacher_server_urls"] = trainers.text_rows(16), {"": teacher_address()}
    elif issubclass(trainer_class, TAUGHT):
        rows, kwargs["teacher_model"] = trainers.text_rows(16), tiny.causal_lm(seed=3)
    elif trainer_class is SFTTrainer:
        rows = trainers.text_rows(16)
    if issubclass(trainer_class, (rl.AsyncGRPOTrainer, rl.AsyncDistillationTrainer)):
        kwargs["generator"] = CopiedGenerator(LocalGenerator(tiny.tokenizer()))
    args = trainers.arguments(trainer_class.config_class, folder, **(usual | changes))
    return trainer_class(
        model,
        args=args,
        train_dataset=rows if given is None else given,
        processing_class=tiny.tokenizer(),
        peft_config=peft_config,
        **kwargs,
    )


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def base():
    return tiny.causal_lm(hidden_size=64, head_dim=16)


# ------------------------------------------------------------------------------------------------------ of 4 bits


@pytest.mark.parametrize("trainer_class", ADDING, ids=lambda c: c.__name__)
def test_every_trainer_loads_a_base_of_4_bits_by_name_and_trains_an_adapter_on_it(trainer_class, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    assert "quantization_config" in inspect.signature(trainer_class).parameters
    of_rewards = trainer_class is rl.RewardTrainer
    (tiny.reward_model if of_rewards else tiny.causal_lm)(hidden_size=64, head_dim=16).save_pretrained(tmp_path / "4")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    lora = LoraConfig(**LORA | ({"task_type": "SEQ_CLS"} if of_rewards else {}))
    run = make(trainer_class, str(tmp_path / "4"), tmp_path / "out", lora, quantization_config=config)
    assert any(type(module).__name__ == "Linear4bit" for module in run.model.modules())
    before = {name: weight.detach().clone() for name, weight in run.model.named_parameters()}
    run.train()
    moved = {name for name, weight in run.model.named_parameters() if not torch.equal(weight, before[name])}
    assert moved and all("lora_" in name or "modules_to_save" in name for name in moved)


# ------------------------------------------------------------------------------------------------- how it begins

BEGINNINGS = ["gaussian", "olora", "orthogonal", "pissa"]


@pytest.mark.parametrize("own", [False, True], ids=["peft_config", "PeftModel"])
@pytest.mark.parametrize("trainer_class", [DPOTrainer, GRPOTrainer])
@pytest.mark.parametrize("init", BEGINNINGS)
def test_the_reference_is_the_model_that_the_run_began_with(init, trainer_class, own, tmp_path):
    """PiSSA and OLoRA take a part of the weights below over, which are then no reference without it."""
    config = LoraConfig(**LORA, init_lora_weights=init)
    model = get_peft_model(base(), config) if own else base()
    run = make(trainer_class, model, tmp_path, None if own else config, beta=0.1)
    with run.reference.use() as reference:
        assert torch.allclose(logits(reference), logits(base()), atol=1e-5)
    assert torch.allclose(logits(run.model), logits(base()), atol=1e-5)
    run.train()
    first = run.state.log_history[0]
    assert first["kl"] == pytest.approx(0, abs=1e-5) if "kl" in first else first["loss"] == pytest.approx(0.693147)


@pytest.mark.parametrize("init", BEGINNINGS)
def test_an_adapter_is_read_back_and_gone_on_with_however_it_began(init, tmp_path, caplog):
    def run(**changes):
        return make(SFTTrainer, base(), tmp_path, LoraConfig(**LORA, init_lora_weights=init), **changes)

    straight = run(save_strategy="steps", save_steps=1)
    straight.train()
    torch.manual_seed(77)
    read = PeftModel.from_pretrained(base(), tmp_path / "checkpoint-2")
    assert torch.allclose(logits(read), logits(straight.model), atol=1e-5)
    resumed = run()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert "with another config" not in caplog.text
    assert torch.equal(logits(resumed.model), logits(straight.model))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"lora_alpha": 64}, "lora_alpha: 8 -> 64"),
        ({"use_rslora": True, "lora_dropout": 0.1}, "lora_dropout: 0.0 -> 0.1; use_rslora: False -> True"),
        ({"init_lora_weights": "gaussian"}, None),
        ({"target_modules": ["v_proj", "q_proj"]}, None),
    ],
)
def test_an_adapter_that_goes_on_with_another_config_is_named_with_what_differs(changes, said, tmp_path, caplog):
    config = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.0, "target_modules": ["q_proj", "v_proj"]}
    config["task_type"] = "CAUSAL_LM"
    make(SFTTrainer, base(), tmp_path, LoraConfig(**config), save_strategy="steps", save_steps=1).train()
    again = make(SFTTrainer, base(), tmp_path, LoraConfig(**config | changes))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    told = [r.getMessage() for r in caplog.records if "was trained with another config" in r.getMessage()]
    assert len(told) == (said is not None) and (said is None or f"({said})" in told[0])


@pytest.mark.parametrize("trainer_class", ADDING, ids=lambda c: c.__name__)
def test_the_first_numbers_of_an_adapter_follow_from_the_seed_alone(trainer_class, tmp_path):
    def begun(drawn):
        of_rewards = trainer_class is rl.RewardTrainer
        model, kind = (tiny.reward_model(), "SEQ_CLS") if of_rewards else (tiny.causal_lm(), "CAUSAL_LM")
        torch.rand(drawn)  # by the script, before
        model = make(trainer_class, model, tmp_path, LoraConfig(**LORA | {"task_type": kind}), seed=5).model
        return [p.detach() for name, p in model.named_parameters() if "lora_A" in name]

    assert all(map(torch.equal, begun(1), begun(2)))


@pytest.mark.parametrize(("init", "says"), [
    ("eva", "peft.initialize_lora_eva_weights"), ("pissa_niter_4", "Set 'pissa' or 'olora'"),
    ("corda", "no|none of them"), ("lora_ga", "depend on chance or on data"),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:.init_lora_weights.")
def test_beginnings_that_a_config_alone_cannot_repeat_are_refused(init, says, tmp_path):
    with pytest.raises(ValueError, match=says):
        make(SFTTrainer, base(), tmp_path, LoraConfig(**LORA, init_lora_weights=init))


def test_a_model_whose_base_cannot_be_found_again_is_refused_too(tmp_path):
    model = get_peft_model(base(), LoraConfig(**LORA, init_lora_weights="pissa_niter_4"))
    with pytest.raises(ValueError, match="pissa_niter_4"):
        make(SFTTrainer, model, tmp_path, None)


@pytest.mark.filterwarnings("ignore:.init_lora_weights.", "ignore:lora with eva")
def test_eva_is_begun_as_the_message_says(tmp_path):
    model = get_peft_model(base(), LoraConfig(**LORA, init_lora_weights="eva"))
    plain = {name: p.detach().clone() for name, p in model.named_parameters() if "lora_A" in name}
    ids = torch.randint(5, 300, (16, 12))
    batches = [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in ids.split(8)]
    initialize_lora_eva_weights(model, batches, show_progress_bar=False)
    run = make(SFTTrainer, model, tmp_path, None, save_strategy="steps", save_steps=2)
    begun = {name: p for name, p in run.model.named_parameters() if "lora_A" in name}
    assert all(p.shape != plain[name].shape or not torch.equal(p, plain[name]) for name, p in begun.items())
    run.train()
    read = PeftModel.from_pretrained(base(), tmp_path / "checkpoint-2")
    assert torch.allclose(logits(read), logits(run.model), atol=1e-5)


# --------------------------------------------------------------------------------------------------------- LoRA+


def test_the_second_factors_of_lora_learn_at_their_own_rate(tmp_path):
    def moved(ratio):
        run = make(SFTTrainer, base(), tmp_path, LoraConfig(**LORA), loraplus_lr_ratio=ratio, max_steps=1)
        run.train()
        return {n: p.detach() for n, p in run.model.named_parameters() if "lora_B" in n}, run

    (plain, _), (faster, run) = moved(None), moved(16)
    for name, weight in plain.items():  # SGD: a step from 0 is the rate times the gradient
        assert torch.allclose(faster[name], 16 * weight, rtol=1e-4, atol=1e-9) and weight.any()
    assert run.state.log_history[0]["learning_rate/lora_B"] == pytest.approx(16 * 0.05)
    held = [id(p) for group in run.optimizer.param_groups for p in group["params"]]
    assert sorted(held) == sorted(id(p) for p in run.model.parameters() if p.requires_grad)


def test_a_rate_of_b_that_nothing_follows_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="the model has none"):
        make(SFTTrainer, base(), tmp_path, None, loraplus_lr_ratio=16).train()
    model = get_peft_model(base(), LoraConfig(**LORA))
    own = {"optimizer_cls_and_kwargs": (torch.optim.SGD, {"lr": 0.1, "params": list(model.parameters())})}
    with pytest.raises(ConfigError, match="given its own parameters"):
        make(SFTTrainer, model, tmp_path, None, loraplus_lr_ratio=16, **own).train()


def test_an_adapter_that_begins_at_invocation_tokens_begins_in_each_text(tmp_path):
    """aLoRA: peft looks for the tokens once in each row, so rows of several texts would adapt the last one alone."""
    invocation = [5, 9, 14]
    ids = [[20 + number, 21, *invocation, 30 + number, *[40, 41, 42] * (number % 3)] for number in range(8)]
    config = LoraConfig(
        r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", alora_invocation_tokens=invocation,
        init_lora_weights=False,
    )  # fmt: skip

    def make(**changes):
        args = trainers.arguments(
            SFTConfig, tmp_path, per_device_train_batch_size=8, max_steps=1, max_length=32, **changes
        )
        model, rows = tiny.causal_lm(initializer_range=0.3), [{"input_ids": row} for row in ids]
        return SFTTrainer(model, args, train_dataset=rows, processing_class=tiny.tokenizer(), peft_config=config)

    trainer = make()
    with torch.no_grad():
        losses = [trainer.model(torch.tensor([row]), labels=torch.tensor([row])).loss * (len(row) - 1) for row in ids]
    trainer.train()
    expected = sum(losses) / sum(len(row) - 1 for row in ids)
    assert trainer.state.log_history[0]["loss"] == pytest.approx(float(expected), rel=1e-5)
    for changes in ({"packing": True}, {"padding_free": True}):
        with pytest.raises(ValueError, match="alora_invocation_tokens.*packing=False and padding_free=False"):
            make(**changes)


@pytest.mark.parametrize("trainer", [GRPOTrainer, rl.GKDTrainer])
def test_prompts_at_which_an_adapter_does_not_begin_are_named(trainer, tmp_path, caplog):
    tokens = tiny.tokenizer()(" two")["input_ids"]
    rows = [{"prompt": "the cat two", "completion": " is"}] * 7 + [{"prompt": "the cat", "completion": " is"}]
    peft_config = LoraConfig(**LORA | {"alora_invocation_tokens": tokens})
    make(trainer, tiny.causal_lm(), tmp_path, peft_config, train_dataset=rows)
    assert "1 of 8 prompts lack alora_invocation_tokens" in caplog.text and "(rows 7)" in caplog.text
    with pytest.raises(DataError, match=r"prompts lack alora_invocation_tokens.*\(rows 7\)"):
        make(trainer, tiny.causal_lm(), tmp_path, peft_config, train_dataset=rows, on_bad_rows="raise")


@pytest.mark.parametrize("trainer", [SFTTrainer, DPOTrainer])
def test_rows_in_which_an_adapter_never_begins_are_named(trainer, tmp_path):
    """aLoRA: without the invocation tokens before a trained one, a row's gradient is 0."""
    invocation = [5, 9, 14]
    whole, without, too_late = [20, *invocation, 30, 31], [20, 21, 30, 31], [20, 21, 30, *invocation]
    rows = [{"prompt_ids": row[:1], "chosen_ids": row[1:], "rejected_ids": [*row[1:-1], 40]}
            for row in (whole, without)]  # fmt: skip
    if trainer is SFTTrainer:
        rows = [{"input_ids": row} for row in (whole, without, too_late)]
    peft_config = LoraConfig(**LORA | {"alora_invocation_tokens": invocation})
    made = make(trainer, tiny.causal_lm(), tmp_path, peft_config, train_dataset=rows)
    (report,) = made.data_reports.values()
    bad = list(range(1, len(rows)))
    assert {why: named for why, named in report.dropped.items() if "alora_invocation_tokens" in why} == report.dropped
    assert list(report.dropped.values()) == [(len(bad), bad)] and report.rows_kept == 1
    with pytest.raises(DataError, match="alora_invocation_tokens.*rows 1"):
        make(trainer, tiny.causal_lm(), tmp_path, peft_config, train_dataset=rows, on_bad_rows="raise")
