"""`DPOTrainer` from outside: preferences in, a policy out that holds to the weights it was given."""

import json
import math

import datasets
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F

from posttrain.core import TrainingArguments
from posttrain.core.errors import CheckpointError, ConfigError, DataError, NonFiniteError
from posttrain.rl import DPOConfig, DPOTrainer, KTOTrainer, ORPOTrainer
from posttrain.rl.preference import precomputed
from tests import tiny
from tests.contract.trainers import arguments, preference_rows
from tests.flash_stand_in import stand_in_for_flash_attention

ROWS = preference_rows(16)
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def config(output_dir, **changes):
    usual = dict(
        output_dir=str(output_dir), per_device_train_batch_size=4, max_steps=2, learning_rate=0.05, optim="sgd",
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        gradient_checkpointing=False,
    )  # fmt: skip
    return DPOConfig(**(usual | changes))


def make(output_dir, rows=ROWS, model=None, cls=DPOTrainer, **changes):
    parts = {
        name: changes.pop(name) for name in ("ref_model", "peft_config", "eval_dataset", "callbacks") if name in changes
    }
    model = tiny.causal_lm() if model is None else model
    parts["compute_metrics"] = changes.pop("compute_metrics", None)
    return cls(
        model, args=config(output_dir, **changes), train_dataset=rows, processing_class=tiny.tokenizer(), **parts
    )


def logs(trainer):
    trainer.train()
    return [record for record in trainer.state.log_history if "loss" in record]


def batch_of(trainer):
    return next(iter(trainer.get_train_dataloader()))


# ------------------------------------------------------------------------------------------------------- what comes out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"shared_prefix": False},
        {"shared_prefix": False, "padding_free": True},
        {"precompute_ref_log_probs": True},
        {"peft_config": LORA, "learning_rate": 5.0},
        {"gradient_checkpointing": True},
        {"bf16": True},
        {"pad_to_multiple_of": 8, "shared_prefix": False},
    ],
    ids="shared padded flat precomputed lora checkpointed bf16 multiple".split(),
)
def test_it_learns_to_prefer_the_chosen_completions(changes, tmp_path):
    records = logs(make(tmp_path, max_steps=12, eval_dataset=ROWS, **changes))
    first, last = records[0], records[-1]
    tolerance = 1e-2 if "bf16" in changes else 1e-4
    assert first["loss"] == pytest.approx(math.log(2), abs=tolerance)
    assert first["rewards/margins"] == pytest.approx(0, abs=tolerance)
    assert last["loss"] < first["loss"] and last["rewards/margins"] > 0.02 and last["rewards/accuracies"] > 0.7


@pytest.mark.parametrize("changes", [{"shared_prefix": False}, {"shared_prefix": False, "padding_free": True},
                                     {"precompute_ref_log_probs": True}],
                                     ids="padded flat precomputed".split())  # fmt: skip
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_every_way_of_reading_gives_the_same_run(changes, lora, tmp_path):
    adapter = {"peft_config": LORA} if lora else {}
    expected = logs(make(tmp_path / "shared", max_steps=4, **adapter))
    for record, other in zip(expected, logs(make(tmp_path / "other", max_steps=4, **adapter, **changes)), strict=True):
        for name, value in record.items():
            if name != "num_tokens":  # a shared prompt is read once
                assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize("changes", [{}, {"shared_prefix": False, "padding_free": True}], ids="shared flat".split())
def test_a_model_with_flash_attention_reads_prompts_once_and_no_padding(changes, tmp_path, monkeypatch):
    expected = logs(make(tmp_path / "plain", max_steps=2, **changes))
    stand_in_for_flash_attention(monkeypatch, version=3)
    model = tiny.causal_lm(attn_implementation="flash_attention_3")
    found = logs(make(tmp_path / "flash", model=model, max_steps=2, **changes))
    assert [r["loss"] for r in found] == pytest.approx([r["loss"] for r in expected], rel=1e-4)


@pytest.mark.parametrize("shared", [True, False])
def test_activations_in_host_memory_change_nothing(shared, monkeypatch, tmp_path):
    plain = make(tmp_path / "plain", max_steps=3, shared_prefix=shared)
    expected = logs(plain)
    monkeypatch.setattr(
        "posttrain.lm.attention.activation_offloading.offloading_problem", lambda device: None
    )  # they are copied all the same
    moved = make(tmp_path / "moved", max_steps=3, shared_prefix=shared, activation_offloading=True)
    assert logs(moved) == expected and moved._offload.moved > 0
    for (name, value), (_, other) in zip(
        plain.model.state_dict().items(), moved.model.state_dict().items(), strict=True
    ):
        assert torch.equal(value, other), name


def alone(model, prompt, completion):
    """The logits of a completion's tokens, from whole logits of one row, and its log-probability."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    return logits, logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()


def test_the_metrics_are_those_of_the_pairs(tmp_path):
    trainer = make(tmp_path, beta=0.3, ref_model=tiny.causal_lm(seed=1), eval_dataset=ROWS)
    sums = {}

    def add(name, value, count=1):
        total, number = sums.get(name, (0.0, 0))
        sums[name] = total + float(value), number + count

    for row in trainer.eval_dataset:
        rewards = {}
        for side in ("chosen", "rejected"):
            prompt, completion = row["prompt_ids"], row[f"{side}_ids"]
            logits, logp = alone(trainer.model, prompt, completion)
            rewards[side] = 0.3 * float(logp - alone(trainer.ref_model, prompt, completion)[1])
            add(f"rewards/{side}", rewards[side])
            add(f"logps/{side}", logp)
            add(f"logits/{side}", logits.mean(-1).sum(), len(completion))
            add("entropy", -(logits.softmax(-1) * logits.log_softmax(-1)).sum(), len(completion))
        add("rewards/margins", rewards["chosen"] - rewards["rejected"])
        add("rewards/accuracies", rewards["chosen"] > rewards["rejected"])
        add("loss", F.softplus(torch.tensor(rewards["rejected"] - rewards["chosen"])))
    metrics = trainer.evaluate()
    for name, (total, count) in sums.items():
        assert metrics[f"eval_{name}"] == pytest.approx(total / count, rel=1e-4, abs=1e-5), name


def test_the_prompt_of_a_pair_is_read_once(tmp_path):
    trainer = make(tmp_path)
    rows = [trainer.train_dataset[i] for i in range(4)]
    batch = trainer.data_collator(rows)
    assert batch["input_ids"].shape == (
        1, sum(len(r["prompt_ids"]) - 1 + len(r["chosen_ids"]) + len(r["rejected_ids"]) for r in rows),
    )  # fmt: skip
    assert trainer.count_items(batch) == 4


def test_the_model_reads_each_batch_once_and_never_sees_labels(tmp_path):
    trainer = make(tmp_path)
    calls = []
    trainer.model.register_forward_pre_hook(lambda module, args, kwargs: calls.append(set(kwargs)), with_kwargs=True)
    trainer.compute_loss(trainer.model, batch_of(trainer))
    assert len(calls) == 1 and "labels" not in calls[0]


def test_plain_training_arguments_are_taken_over(tmp_path):
    args = TrainingArguments(str(tmp_path), max_steps=1, use_cpu=True, report_to="none", learning_rate=0.5)
    trainer = DPOTrainer(tiny.causal_lm(), args=args, train_dataset=ROWS, processing_class=tiny.tokenizer())
    assert isinstance(trainer.args, DPOConfig) and trainer.args.learning_rate == 0.5 and trainer.beta == 0.1


def test_a_model_by_name_and_its_tokenizer_are_loaded(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    trainer = DPOTrainer(str(tmp_path / "model"), args=config(tmp_path / "out"), train_dataset=ROWS)
    assert logs(trainer)[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_what_is_saved_loads_without_us(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make(tmp_path)
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(loaded(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)
    assert loaded.config._attn_implementation in ("sdpa", "eager")
    AutoTokenizer.from_pretrained(tmp_path / "final")


# -------------------------------------------------------------------------------------------------------- the reference


def test_the_reference_is_the_weights_that_were_passed_and_not_those_of_its_name(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)  # trained since, in this process
    assert logs(make(tmp_path / "out", model=model))[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_a_policy_that_was_changed_since_is_refused(tmp_path):
    trainer = make(tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="Before the first optimizer step, policy and reference already differ"):
        trainer.train()


def test_a_policy_that_is_not_finite_is_named_as_such_not_as_changed(tmp_path):
    trainer = make(tmp_path)
    with torch.no_grad():
        trainer.model.lm_head.weight.fill_(float("nan"))
    with pytest.raises(NonFiniteError, match="Step 1"):
        trainer.train()


@pytest.mark.parametrize("kind", [DPOTrainer, KTOTrainer])
@pytest.mark.parametrize("precompute", [False, True])
def test_a_policy_whose_router_is_random_in_training_alone_is_compared_as_it_evaluates(kind, precompute, tmp_path):
    options = {"precompute_ref_log_probs": precompute, "max_steps": 1, "gradient_checkpointing": False}
    made = [
        kind(
            tiny.mixture_of_experts(arch="mixtral", router_jitter_noise=0.2), processing_class=tiny.tokenizer(),
            args=arguments(kind.config_class, tmp_path, **options), train_dataset=ROWS[:8],
        )
        for _ in range(2)
    ]  # fmt: skip
    made[0].train()
    assert made[0].state.global_step == 1
    with torch.no_grad():
        made[1].model.lm_head.weight.mul_(1.5)
    with pytest.raises(ValueError, match="policy and reference already differ"):
        made[1].train()


def test_an_adapter_that_does_not_start_at_zero_is_refused(tmp_path):
    noisy = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="init_lora_weights"):
        make(tmp_path, peft_config=noisy, model=tiny.causal_lm(initializer_range=0.3)).train()


def test_a_reference_that_lacks_tokens_is_refused_before_it_reads_one(tmp_path):
    with pytest.raises(ValueError, match="ref_model has 300 tokens and model 384: it cannot read all that the tok"):
        make(tmp_path, ref_model=tiny.causal_lm(vocab_size=300))
    padded = tiny.causal_lm(vocab_size=400)
    make(tmp_path, model=padded, ref_model=tiny.causal_lm(seed=3)).train()  # of more rows than there are tokens


def test_another_model_may_be_the_reference_on_purpose(tmp_path):
    assert logs(make(tmp_path, ref_model=tiny.causal_lm(seed=1), beta=1.0))[0]["rewards/margins"] != 0


def test_an_adapter_that_was_trained_before_is_part_of_its_reference(tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(
        tiny.causal_lm(initializer_range=0.3), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    )
    base = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer = make(tmp_path, model=model, save_strategy="steps", save_steps=1)
    assert logs(trainer)[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    changed = {name for name, p in trainer.model.named_parameters() if name in base and not torch.equal(p, base[name])}
    assert changed and all(".default." in name for name in changed)
    assert make(tmp_path, model=trainer.model).ref_model is not None
    again = make(
        tmp_path,
        model=PeftModel.from_pretrained(
            tiny.causal_lm(initializer_range=0.3), str(tmp_path / "checkpoint-2"), is_trainable=True
        ),
    )
    assert logs(again)[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


def test_synchronizing_moves_the_reference(tmp_path):
    trainer = make(tmp_path, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=1.0, max_steps=4)
    margins = [record["rewards/margins"] for record in logs(trainer)]
    assert margins[0] == margins[2] == 0 and margins[1] != 0 and margins[3] != 0


def test_resuming_with_another_reference_is_refused(tmp_path):
    changes = dict(save_strategy="steps", save_steps=1)
    make(tmp_path, **changes).train()
    from transformers import AutoModelForCausalLM

    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2")
    for before in (False, True):
        with pytest.raises(CheckpointError, match="another reference than this one"):
            trainer = make(tmp_path, model=trained, max_steps=4, precompute_ref_log_probs=before, **changes)
            trainer.train(resume_from_checkpoint=True)


def test_new_rows_have_no_reference_once_it_was_let_go(tmp_path):
    trainer = make(tmp_path, precompute_ref_log_probs=True, eval_dataset=ROWS[:4])
    assert trainer.ref_model is None
    before = trainer.evaluate(ROWS[:4])  # not yet let go
    assert before["eval_loss"] == trainer.evaluate()["eval_loss"]
    trainer.train()
    trainer.evaluate()
    with pytest.raises(ValueError, match="Cannot compute reference log-probs.*no longer exists"):
        trainer.evaluate(ROWS[4:8])
    with_adapter = make(tmp_path, precompute_ref_log_probs=True, peft_config=LORA)
    assert "eval_loss" in with_adapter.evaluate(ROWS[4:8])


def test_rows_evaluated_before_training_keep_their_reference_after_it(tmp_path):
    runs = {}
    for kept in (False, True):
        trainer = make(tmp_path / str(kept), precompute_ref_log_probs=kept)
        before = trainer.evaluate(ROWS[4:8])["eval_loss"]
        trainer.train()
        runs[kept] = before, trainer.evaluate(ROWS[4:8])["eval_loss"]
    assert runs[True] == pytest.approx(runs[False], rel=1e-5)
    assert runs[True][0] == pytest.approx(math.log(2), abs=1e-5)
    assert abs(runs[True][1] - math.log(2)) > 1e-3  # it would be log 2 under the trained policy as its own reference


def test_log_probabilities_of_a_stream_cannot_be_precomputed(tmp_path):
    stream = datasets.Dataset.from_list(ROWS).to_iterable_dataset()
    with pytest.raises(ValueError, match="streaming=False"):
        make(tmp_path, rows=stream, precompute_ref_log_probs=True)
    assert logs(make(tmp_path, rows=stream))[0]["loss"] == pytest.approx(math.log(2), abs=1e-4)


# ----------------------------------------------------------------------------------------------- code of other trainers


def get_logps(logits, inputs):
    """What a user's function of that name does: log-probabilities of the completions' tokens, summed."""
    logps = logits[:, :-1].log_softmax(-1).gather(-1, inputs["input_ids"][:, 1:, None]).squeeze(-1)
    return (logps * inputs["completion_mask"][:, 1:]).sum(1)


class AsPrinted(DPOTrainer):
    """As the documentation of transformers prints it, parentheses and all."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        outputs = model(**inputs)
        logits = outputs.logits
        logps = get_logps(logits, inputs)
        chosen_logps, rejected_logps = logps.chunk(2, dim=0)  # batch is [chosen, rejected]
        ref_logits = self.ref_model(**inputs).logits
        ref_logps = get_logps(ref_logits, inputs)
        ref_chosen_logps, ref_rejected_logps = ref_logps.chunk(2, dim=0)  # batch is [chosen, rejected]
        chosen_scores = chosen_logps - ref_chosen_logps
        rejected_scores = rejected_logps - ref_rejected_logps
        per_sequence_loss = -F.logsigmoid(self.beta * chosen_scores - rejected_scores)
        loss = per_sequence_loss.mean()
        return (loss, outputs) if return_outputs else loss


class AsMeant(AsPrinted):
    """The same with the parentheses of equation 7, from our own scores."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        chosen, rejected, _ = self.score(model, inputs)
        loss = -F.logsigmoid(self.beta * (chosen.log_ratio - rejected.log_ratio)).mean()
        return (loss, {"logits": chosen.logp}) if return_outputs else loss


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_the_printed_subclass_runs(lora, tmp_path):
    adapter = {"peft_config": LORA} if lora else {}
    trainer = make(tmp_path, cls=AsPrinted, max_steps=6, eval_dataset=ROWS[:5], **adapter)
    records = logs(trainer)
    assert records[0]["loss"] == pytest.approx(math.log(2), abs=1e-4) and records[-1]["loss"] < math.log(2)
    assert trainer.evaluate()["eval_loss"] > 0
    assert trainer.predict(ROWS[:5]).predictions.shape[0] == 10  # the model's logits of chosen and rejected rows


def test_a_mean_of_its_own_is_the_mean_over_the_window(tmp_path):
    expected = logs(make(tmp_path / "whole"))
    for trainer in (make(tmp_path / "own", cls=AsMeant),
    make(tmp_path / "cut", cls=AsMeant, per_device_train_batch_size=1,
                                                              gradient_accumulation_steps=4)):  # fmt: skip
        assert [r["loss"] for r in logs(trainer)] == pytest.approx([r["loss"] for r in expected], rel=1e-5)


def test_a_loss_of_ones_own_is_one_method(tmp_path):
    class Squared(DPOTrainer):
        def preference_loss(self, chosen, rejected, inputs):
            return (self.beta * (chosen.log_ratio - rejected.log_ratio) - 1) ** 2

    records = logs(make(tmp_path, cls=Squared, max_steps=6))
    assert records[0]["loss"] == pytest.approx(1, abs=1e-4) and records[-1]["loss"] < 1


def test_the_sft_loss_is_a_mean_over_the_tokens_of_the_window(tmp_path):
    changes = dict(loss_type=["sigmoid", "sft"], loss_weights=[0.0, 1.0])
    whole = logs(make(tmp_path / "whole", **changes))
    cut = logs(make(tmp_path / "cut", per_device_train_batch_size=1, gradient_accumulation_steps=4, **changes))
    assert [r["loss"] for r in cut] == pytest.approx([r["loss"] for r in whole], rel=1e-6)


def test_rewards_reach_compute_metrics(tmp_path):
    seen = {}

    def accuracy(prediction):
        seen["shape"] = prediction.predictions.shape
        return {"right": float((prediction.predictions.argmax(1) == prediction.label_ids).mean())}

    trainer = make(tmp_path, ref_model=tiny.causal_lm(seed=1), eval_dataset=ROWS, compute_metrics=accuracy)
    metrics = trainer.evaluate()
    assert seen["shape"] == (16, 2) and metrics["eval_right"] == metrics["eval_rewards/accuracies"]


def test_policy_and_reference_answer_side_by_side(tmp_path):
    trainer = make(tmp_path, eval_dataset=ROWS, num_eval_samples=2, max_sample_tokens=4)
    trainer.evaluate()
    samples = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text("utf-8").splitlines()]
    assert [sample["prompt"] for sample in samples] == [row["prompt"] for row in ROWS[:2]]
    assert all(s["step"] == 0 and s["policy"] == s["reference"] for s in samples)


# ------------------------------------------------------------------------------------------------------ what is refused


def test_all_problems_of_a_config_are_told_together():
    with pytest.raises(ConfigError) as caught:
        DPOConfig("out", beta=0, loss_type=["sigmiod"], loss_weights=[1.0, 2.0], label_smoothing=0.5,
        sync_ref_model=True,
                  precompute_ref_log_probs=True)  # fmt: skip
    message = str(caught.value)
    for part in ("beta=0 must be > 0", "did you mean 'sigmoid'", "2 numbers for 1 losses",
    "label_smoothing=0.5 must be < 0.5",
                 "sync_ref_model=True changes the reference"):  # fmt: skip
        assert part in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_type": "exo_pair"}, "exo_pair needs label_smoothing > 0"),
        ({"loss_type": "hinge", "label_smoothing": 0.1}, "label_smoothing=0.1 has no meaning for hinge"),
        ({"loss_type": ["apo_zero"], "f_divergence_type": "forward_kl"}, "has no meaning for apo_zero"),
        ({"loss_type": ["aot"], "use_weighting": True}, "weighs pairs, which aot takes apart"),
        ({"ref_adapter_name": "base"}, "ref_adapter_name='base' has no effect: .* pass ref_model"),
        ({"reference_free": True}, "CPOTrainer"),
        ({"ld_alpha": 1.5}, "ld_alpha=1.5 must be <= 1"),
    ],
)
def test_what_cannot_work_is_refused_with_a_way_out(changes, message):
    with pytest.raises(ConfigError, match=message):
        DPOConfig("out", **changes)


def test_old_names_of_losses_are_understood():
    assert DPOConfig("out", loss_type="ipo").loss_type == ["ipo"]
    old = DPOConfig("out", rpo_alpha=0.5)
    assert (old.loss_type, old.loss_weights) == (["sigmoid", "sft"], [1.0, 0.5])


def test_arguments_that_the_trainer_took_before_are_its_configs_now(tmp_path):
    with pytest.warns(FutureWarning, match=r"beta= is now DPOConfig\(beta=...\)"):
        trainer = DPOTrainer(
            tiny.causal_lm(), args=config(tmp_path), train_dataset=ROWS, tokenizer=tiny.tokenizer(), beta=0.4
        )
    assert trainer.beta == 0.4
    with pytest.raises(TypeError, match="unknown argument 'dataset', did you mean 'train_dataset'"):
        DPOTrainer(tiny.causal_lm(), args=None, dataset=[])
    with pytest.raises(TypeError, match="unknown argument 'traindataset'.*train_dataset"):
        DPOTrainer(tiny.causal_lm(), args=config(tmp_path), traindataset=ROWS, processing_class=tiny.tokenizer())


def test_the_model_cannot_be_its_own_reference(tmp_path):
    model = tiny.causal_lm()
    with pytest.raises(ValueError, match="ref_model is the model itself"):
        make(tmp_path, model=model, ref_model=model)


def test_sharing_that_is_asked_for_and_cannot_be_is_refused(tmp_path):
    with pytest.raises(ValueError, match="shared_prefix=True cannot be: AsPrinted overrides compute_loss"):
        make(tmp_path, cls=AsPrinted, shared_prefix=True)


def test_rows_at_fault_are_counted_and_refused_where_that_is_asked_for(tmp_path, caplog):
    rows = [*ROWS, ROWS[0] | {"rejected": ROWS[0]["chosen"]}, ROWS[1] | {"chosen": ""}]
    report = make(tmp_path, rows=rows).data_reports["train"]
    assert report.dropped == {"chosen and rejected are equal": (1, [16]), "chosen is empty": (1, [17])}
    with pytest.raises(DataError, match="Row 16"):
        make(tmp_path, rows=rows, faulty_rows="error")


def test_no_number_is_asked_of_the_device_within_a_step(tmp_path, monkeypatch):
    trainer = make(tmp_path)
    batch = batch_of(trainer)
    trainer.compute_loss(trainer.model, batch)  # finds out, once, whether the policy starts at its reference
    for name in ("item", "__float__", "__bool__", "__int__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda self, name=name: pytest.fail(f"{name} of a tensor"))
    trainer.compute_loss(trainer.model, batch)


# ------------------------------------------------------------------------------------------- models of other kinds


@pytest.mark.parametrize("cls", [DPOTrainer, KTOTrainer, ORPOTrainer])
def test_rows_are_padded_to_a_multiple_or_it_is_said_that_there_is_no_padding(cls, tmp_path, caplog):
    def made(**changes):
        usual = {"use_cpu": True, "report_to": "none", "pad_to_multiple_of": 32}
        args = cls.config_class(str(tmp_path), **usual | changes)
        return batch_of(cls(tiny.causal_lm(), args=args, train_dataset=ROWS, processing_class=tiny.tokenizer()))

    assert made(shared_prefix=False)["input_ids"].shape[1] % 32 == 0
    assert "pad_to_multiple_of" not in caplog.text
    for changes in ({}, {"shared_prefix": False, "padding_free": True}):
        caplog.clear()
        assert len(made(**changes)["input_ids"]) == 1
        assert "pad_to_multiple_of=32 has no effect: a batch is one row" in caplog.text


def test_a_model_that_cannot_share_prompts_is_trained_all_the_same(tmp_path, monkeypatch, caplog):
    from posttrain.lm.attention import varlen_attention

    expected = logs(make(tmp_path / "shared"))
    monkeypatch.setattr(varlen_attention, "segments_problem", lambda *args, **options: "It reads from both ends.")
    caplog.set_level("INFO", logger="posttrain")
    trainer = make(tmp_path / "plain")
    told = [record.getMessage() for record in caplog.records if "It reads from both ends." in record.getMessage()]
    assert told == ["Prompts are not shared between completions: It reads from both ends."]
    assert batch_of(trainer)["input_ids"].shape[0] == 8
    assert [r["loss"] for r in logs(trainer)] == pytest.approx([r["loss"] for r in expected], rel=1e-5)
    with pytest.raises(ValueError, match="padding_free=True cannot be: It reads from both ends"):
        make(tmp_path, padding_free=True)


def test_a_head_that_cannot_take_the_loss_gives_its_logits(tmp_path, monkeypatch):
    from posttrain.lm.loss import lm_head

    expected = logs(make(tmp_path / "in the head", use_weighting=True))
    monkeypatch.setattr(lm_head, "find_head", lambda model: (None, "It is carved in stone."))
    found = logs(make(tmp_path / "whole", use_weighting=True))
    for record, other in zip(expected, found, strict=True):
        for name, value in record.items():
            assert other[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_a_mixture_of_experts_balances_its_load(tmp_path):
    import transformers

    def experts():
        torch.manual_seed(0)
        return transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(
                vocab_size=384, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
                decoder_sparse_step=1, pad_token_id=0, eos_token_id=1, max_position_embeddings=512,
            )
        )  # fmt: skip

    plain = make(tmp_path, model=experts(), router_aux_loss_coef=0.0)
    balanced = make(tmp_path, model=experts(), router_aux_loss_coef=0.5)
    batch = batch_of(balanced)
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    expected = 0.5 * float(balanced.model(**inputs, output_router_logits=True).aux_loss)
    difference = balanced.compute_loss(balanced.model, batch) - plain.compute_loss(plain.model, batch_of(plain))
    assert float(difference) == pytest.approx(expected, rel=1e-5) and expected > 0.1
    by_default = make(tmp_path, model=experts(), max_steps=1, logging_steps=1)
    assert by_default.router_aux_loss_coef == 0.001 and by_default.aux_loss_enabled  # as its config says
    by_default.train()
    assert by_default.state.log_history[0]["aux_loss"] == pytest.approx(2 * expected, rel=0.2)
    with pytest.raises(ValueError, match="no mixture of experts"):
        make(tmp_path, router_aux_loss_coef=0.5)


def test_the_reference_can_be_asked_for_a_batch(tmp_path):
    for changes in ({}, {"peft_config": LORA}):
        trainer = make(tmp_path, max_steps=1, **changes)
        batch = batch_of(trainer)
        before = trainer.compute_ref_log_probs(trainer.ref_model, batch)
        trainer.train()
        for model in (trainer.model, trainer.ref_model):  # the policy stands for its reference
            for was, now in zip(before, trainer.compute_ref_log_probs(model, batch), strict=True):
                torch.testing.assert_close(now, was)
        assert [side.shape for side in before] == [(len(batch["completion_mask"]) // 2,)] * 2


def test_an_inner_method_of_trl_is_called_by_nobody_and_told_of(tmp_path, caplog):
    class Own(DPOTrainer):
        def _compute_loss(self, model, inputs, return_outputs):
            raise AssertionError

    make(tmp_path, cls=Own)
    assert "Own overrides methods that nothing calls here: _compute_loss (override preference_loss" in caplog.text


# --------------------------------------------------------------------------------- what is kept of the reference


def computed(monkeypatch):
    """Which rows the reference is asked for, batch by batch."""
    asked, compute = [], precomputed.compute

    def counted(size, batch_size, columns, ask, dist):
        return compute(size, batch_size, columns, lambda rows: asked.append(len(rows)) or ask(rows), dist)

    monkeypatch.setattr(precomputed, "compute", counted)
    return asked


@pytest.mark.parametrize("cached", [False, True], ids=["list", "dataset"])
def test_log_probabilities_of_the_reference_are_kept_for_the_next_start(cached, tmp_path, monkeypatch, caplog):
    asked = computed(monkeypatch)
    rows = ROWS
    if cached:
        datasets.Dataset.from_list(ROWS).to_json(tmp_path / "rows.jsonl")
        rows = datasets.load_dataset("json", data_files=str(tmp_path / "rows.jsonl"), cache_dir=tmp_path / "cache")[
            "train"
        ]
    first = make(tmp_path, rows, precompute_ref_log_probs=True).train_dataset
    assert sum(asked) == 16
    (kept,) = tmp_path.rglob("reference-logps-*.safetensors")
    assert ("cache" in kept.parts) == cached
    asked.clear()
    caplog.set_level("INFO")
    trainer = make(tmp_path, rows, precompute_ref_log_probs=True)
    assert not asked and str(kept) in caplog.text and trainer.train_dataset[:] == first[:]
    assert trainer.train_dataset["ref_chosen_logps"][0] < -1
    trainer.train()
    # What they follow from: the weights, however little they moved; the rows; the settings.
    other = tiny.causal_lm()
    with torch.no_grad():
        other.lm_head.weight[7, 3] += 1e-3
    for changes in ({"model": other}, {"rows": rows if cached else ROWS[:8], "ld_alpha": 0.5}, {"bf16": True}):
        asked.clear()
        make(tmp_path, **{"rows": rows, **changes}, precompute_ref_log_probs=True)
        assert asked, changes


def test_code_of_the_users_own_is_asked_at_each_start(tmp_path, monkeypatch):
    class Halved(DPOTrainer):
        def completion_logp(self, scores):
            return super().completion_logp(scores) / 2

    asked = computed(monkeypatch)
    for _ in range(2):
        make(tmp_path, cls=Halved, precompute_ref_log_probs=True)
    assert sum(asked) == 32 and not list(tmp_path.rglob("reference-logps-*"))


def test_the_reference_is_asked_for_so_many_rows_at_a_time(tmp_path, monkeypatch):
    asked = computed(monkeypatch)
    few = make(tmp_path / "3", precompute_ref_log_probs=True, precompute_ref_batch_size=3).train_dataset
    assert asked == [3, 3, 3, 3, 3, 1]
    asked.clear()
    many = make(tmp_path / "None", precompute_ref_log_probs=True).train_dataset
    assert asked == [4, 4, 4, 4]  # as in training
    assert few["ref_chosen_logps"][:] == pytest.approx(many["ref_chosen_logps"][:], rel=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_given_by_name_has_the_attention_that_was_asked_for(implementation, tmp_path):
    from posttrain.core import ModelConfig

    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    asked = ModelConfig(model_name_or_path=str(tmp_path / "model"), attn_implementation=implementation)
    options = {"attn_implementation": asked.attn_implementation}
    trainer = make(tmp_path, model=asked.model_name_or_path, model_init_kwargs=options, shared_prefix=False)
    assert trainer.model.config._attn_implementation == implementation
    assert trainer.ref_model.config._attn_implementation == implementation
    assert math.isfinite(logs(trainer)[-1]["loss"])


@pytest.mark.parametrize("layout", ["shared_prefix", "padding_free", "padded"])
def test_rows_are_measured_as_they_are_read(layout, tmp_path):
    layouts = {"shared_prefix": layout == "shared_prefix", "padding_free": layout == "padding_free"}
    it = make(tmp_path, max_batch_tokens=100, **layouts)
    alone = [it.data_collator([it.train_dataset[i]])["input_ids"].numel() for i in range(len(ROWS))]
    assert it.row_lengths(it.train_dataset) == alone and min(alone) < max(alone)
    sizes = [batch["input_ids"].numel() for batch in it.get_train_dataloader()]
    assert max(sizes) <= 100 and sum(sizes) >= sum(alone)
