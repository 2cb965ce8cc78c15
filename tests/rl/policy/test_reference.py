"""The reference is what the policy was when it was passed, whatever form it takes."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model

from posttrain.core.distributed.strategies import Distributed
from posttrain.core.errors import CheckpointError
from posttrain.rl import DPOTrainer, GRPOTrainer
from posttrain.rl.policy.logprobs import score_completions
from posttrain.rl.policy.reference import (
    AdapterReference,
    FrozenReference,
    PolicyAsReference,
    fingerprint,
    make_reference,
    sync_problem,
)  # fmt: skip
from tests import tiny
from tests.contract.trainers import TRAINERS, preference
from tests.distributed import jobs

IDS = torch.tensor([[5, 6, 7, 8, 9]])


def adapted(init=True):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=init, task_type="CAUSAL_LM")
    return get_peft_model(tiny.causal_lm(), config)


def shake(model):
    """Change everything that is trained, as an optimizer would."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))


def logits(reference):
    with reference.use() as model:
        return model(input_ids=IDS).logits


CASES = {
    "copy": (tiny.causal_lm, False, False),
    "adapter off": (adapted, True, False),
    "second adapter": (lambda: adapted(init=False), False, False),
    "second adapter that moves": (adapted, True, True),
}


@pytest.mark.parametrize("case", CASES)
def test_it_stays_what_the_policy_was(case):
    make, fresh_adapter, moves = CASES[case]
    policy = make()
    before = policy(input_ids=IDS).logits.detach()
    trained = {name for name, p in policy.named_parameters() if p.requires_grad}
    reference = make_reference(policy, None, fresh_adapter, moves)
    torch.testing.assert_close(logits(reference), before, rtol=0, atol=0)
    shake(policy)
    torch.testing.assert_close(logits(reference), before, rtol=0, atol=0)
    torch.testing.assert_close(reference.model(input_ids=IDS).logits, before, rtol=0, atol=0)
    assert not torch.allclose(policy(input_ids=IDS).logits, before)
    assert {name for name, p in policy.named_parameters() if p.requires_grad} == trained
    assert not logits(reference).requires_grad


def test_it_costs_no_second_model_with_an_adapter():
    policy = adapted()
    count = sum(p.numel() for p in policy.parameters())
    make_reference(policy, None, fresh_adapter=True)
    assert sum(p.numel() for p in policy.parameters()) == count


@pytest.mark.parametrize("experts", [False, True])
def test_a_new_adapter_needs_no_copy_of_itself(experts):
    if experts:  # of which peft knows one adapter at a time
        config = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
        policy = get_peft_model(tiny.mixture_of_experts(), config)
    else:
        policy = adapted()
    before = policy(input_ids=IDS).logits.detach()
    reference = make_reference(policy, None, fresh_adapter=False)
    assert list(policy.peft_config) == ["default"]
    torch.testing.assert_close(logits(reference), before, rtol=0, atol=0)
    shake(policy)
    torch.testing.assert_close(logits(reference), before, rtol=0, atol=0)
    assert not torch.allclose(policy(input_ids=IDS).logits, before)
    reference.load_state_dict(reference.state_dict(), "here")
    with pytest.raises(CheckpointError, match="another reference"):
        reference.load_state_dict({"fingerprint": "0"}, "here")
    trained = make_reference(policy, None, fresh_adapter=False) if not experts else None
    assert experts or (trained.adapter == "reference" and "reference" in policy.peft_config)


def test_dropout_of_the_policy_is_off_in_its_reference():
    policy = get_peft_model(tiny.causal_lm("gpt2", resid_pdrop=0.5), LoraConfig(target_modules=["c_attn"]))
    reference = make_reference(policy.train(), None, fresh_adapter=True)
    assert torch.equal(logits(reference), logits(reference)) and policy.training
    assert make_reference(tiny.causal_lm().train(), None, False).model.training is False


def test_moving_it_takes_the_mean_of_the_weights():
    policy = tiny.causal_lm()
    reference = make_reference(policy, None, False, moves=True)
    old = copy.deepcopy(reference.weights())
    shake(policy)
    reference.sync(policy, 0.6)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(reference.weights()[name], 0.6 * parameter.detach() + 0.4 * old[name])


def test_moving_the_second_adapter_makes_it_the_first():
    policy = adapted()
    reference = make_reference(policy, None, True, moves=True)
    shake(policy)
    reference.sync(policy, 1.0)
    torch.testing.assert_close(logits(reference), policy(input_ids=IDS).logits.detach())


def test_what_cannot_be_moved_is_said():
    assert "ref_model_mixup_alpha=1" in sync_problem(adapted(), None, 0.6)
    assert sync_problem(adapted(), None, 1.0) is None and sync_problem(tiny.causal_lm(), None, 0.6) is None
    assert "architecture and sizes" in sync_problem(tiny.causal_lm(), tiny.causal_lm(hidden_size=16), 0.6)
    assert "adapter" in sync_problem(adapted(), tiny.causal_lm(), 1.0)


@pytest.mark.parametrize("make", [tiny.causal_lm, adapted], ids=["model", "adapter"])
def test_a_checkpoint_keeps_what_tells_another_reference_from_it(make):
    reference = make_reference(make(), None, fresh_adapter=True)
    make_reference(make(), None, fresh_adapter=True).load_state_dict(reference.state_dict(), "run")
    other = make()
    with torch.no_grad():
        next(other.parameters()).mul_(1.001)
    with pytest.raises(CheckpointError, match="another reference than this one"):
        make_reference(other, None, fresh_adapter=True).load_state_dict(reference.state_dict(), "run")


def test_a_reference_that_moves_is_kept_whole():
    policy = tiny.causal_lm()
    reference = make_reference(policy, None, False, moves=True)
    shake(policy)
    reference.sync(policy, 0.5)
    again = make_reference(tiny.causal_lm(), None, False, moves=True)
    again.load_state_dict(reference.state_dict(), "run")
    assert fingerprint(again.weights()) == fingerprint(reference.weights())


def test_precomputed_numbers_need_the_policy_before_it_is_trained_only():
    policy = tiny.causal_lm()
    reference = PolicyAsReference(policy)
    state = reference.state_dict()
    shake(policy)
    reference.let_go()
    assert reference.is_gone and reference.model is None and reference.state_dict() == state
    with pytest.raises(CheckpointError, match="another reference"):
        PolicyAsReference(policy).load_state_dict(state, "run")


def test_a_model_that_is_passed_is_used():
    given = tiny.causal_lm(seed=1)
    reference = make_reference(adapted(), given, fresh_adapter=True)
    assert isinstance(reference, FrozenReference) and reference.model is given
    assert not any(p.requires_grad for p in given.parameters())
    assert not isinstance(reference, AdapterReference)


@pytest.mark.parametrize("tied", [False, True])
def test_a_copy_in_the_training_precision_computes_what_the_policy_computes(tied, tmp_path):
    trainer = preference(DPOTrainer)(tmp_path, bf16=True)
    policy = tiny.causal_lm(tie_word_embeddings=tied)
    trainer.model = policy
    reference = make_reference(policy, None, fresh_adapter=False)
    whole = sum(p.numel() * p.element_size() for p in reference.model.parameters())
    reference.place(trainer.dist)
    dtypes = {name: p.dtype for name, p in reference.model.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == torch.bfloat16
    assert dtypes["model.norm.weight"] == dtypes["model.embed_tokens.weight"] == torch.float32
    assert sum(p.numel() * p.element_size() for p in reference.model.parameters()) < 0.75 * whole + 384 * 32 * 4 * tied
    rows = [trainer.train_dataset[i] for i in range(4)]
    inputs = trainer.data_collator(rows)
    with trainer.compute_loss_context_manager(), torch.no_grad(), reference.use() as frozen:
        mine, its = (score_completions(model.eval(), inputs).logps for model in (policy, frozen))
    assert torch.equal(mine, its) and mine.abs().max() > 1


@pytest.mark.parametrize("kind", [DPOTrainer, GRPOTrainer])
def test_the_copy_is_put_where_the_policy_is(kind, tmp_path, monkeypatch):
    placed = []
    place = Distributed.place
    monkeypatch.setattr(
        Distributed, "place", lambda self, model, trained=False: placed.append(model) or place(self, model, trained)
    )
    trainer = TRAINERS["dpo" if kind is DPOTrainer else "grpo"](
        tmp_path, **({} if kind is DPOTrainer else {"beta": 0.1})
    )
    assert any(model is trainer.reference.model for model in placed)


@pytest.mark.long
@pytest.mark.parametrize("name", ["dpo", pytest.param("grpo", marks=pytest.mark.slow)])
def test_a_reference_beside_a_policy_in_pieces_is_in_pieces_too(name, tmp_path):
    moves = {"beta": 0.1, "sync_ref_model": True, "ref_model_sync_steps": 1}
    options = moves if name == "grpo" else {}
    jobs.do(1, [["one", "reference", {"name": name, "out": str(tmp_path / "1"), **options}]], tmp_path)
    work = ["two", "reference", {"name": name, "out": str(tmp_path / "2"), "fsdp": "full_shard", **options}]
    jobs.do(2, [work], tmp_path)
    one, two = jobs.result(tmp_path, "one"), jobs.result(tmp_path, "two")
    assert two["in_pieces"] == [True, True] and one["in_pieces"] == [False]
    assert two["held"][0] <= 0.6 * one["held"][0]
    if name == "dpo":
        assert two["state"] == one["state"]
    else:
        torch.testing.assert_close(two["state"], one["state"], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(two["loss"], one["loss"], atol=2e-5, rtol=1e-4)


def test_the_reference_of_a_mixtures_adapter_stays_what_it_was():
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    policy = get_peft_model(tiny.mixture_of_experts(), config).eval()
    shake(policy)
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    expected = policy(input_ids=IDS).logits
    reference = make_reference(policy, None, fresh_adapter=False)
    torch.testing.assert_close(logits(reference), expected, rtol=0, atol=1e-6)
    shake(policy)
    moved = policy(input_ids=IDS).logits
    assert (moved - expected).abs().max() > 1e-2
    torch.testing.assert_close(logits(reference), expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(policy(input_ids=IDS).logits, moved, rtol=0, atol=1e-6)
    assert {name for name, parameter in policy.named_parameters() if parameter.requires_grad} == trained


def test_a_script_may_make_and_move_its_reference():
    from types import SimpleNamespace

    from posttrain.rl import SyncRefModelCallback, create_reference_model

    model = tiny.causal_lm()
    reference = create_reference_model(model)
    assert not reference.training and not any(p.requires_grad for p in reference.parameters())
    before = reference.lm_head.weight.clone()
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
    shared = create_reference_model(model, num_shared_layers=1)
    own, its = dict(model.named_parameters()), dict(shared.named_parameters())
    once = {name for name in own if own[name] is its[name]}
    assert once == {name for name in own if not own[name].requires_grad}
    assert once == {name for name in own if "embed_tokens" in name or "layers.0." in name} and not shared.training
    assert any(p.requires_grad for p in own.values()) and not any(p.requires_grad for p in its.values())
    with pytest.raises(ValueError, match=r"no parameter of the model has 'blocks\.9'"):
        create_reference_model(model, 9, pattern="blocks.{layer}")
    callback = SyncRefModelCallback(reference, accelerator=None)
    args = SimpleNamespace(ref_model_sync_steps=2, ref_model_mixup_alpha=0.25)
    callback.on_step_end(args, SimpleNamespace(global_step=1), None, model=model)
    assert torch.equal(reference.lm_head.weight, before)
    callback.on_step_end(args, SimpleNamespace(global_step=2), None, model=model)
    assert torch.allclose(reference.lm_head.weight, before + 0.25)
