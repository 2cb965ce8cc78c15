"""The experts that a mixture chose once are chosen again."""

import pytest
import torch
from torch.nn import functional as F

from posttrain.lm.attention import router_replay
from tests import tiny

ARCHS = ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"]


def mixture(arch, **overrides):
    return tiny.mixture_of_experts(arch=arch, initializer_range=0.3, **overrides).eval()


def ids(rows=2, length=7):
    return torch.randint(2, 384, (rows, length), generator=torch.Generator().manual_seed(0))


def some_routes(rows=2, length=7):
    """Two different experts for each token of each layer, at random."""
    order = torch.rand(rows, length, 2, 4, generator=torch.Generator().manual_seed(1)).argsort(-1)
    return order[..., :2].to(torch.int16)


def test_shares_are_those_of_the_scores_in_training_among_the_experts_of_sampling():
    model = mixture("mixtral", hidden_size=4, num_attention_heads=1, num_key_value_heads=1, head_dim=4)
    router_replay.enable(model)
    layer = model.model.layers[0].mlp
    layer.gate.weight.data = torch.eye(4)
    token = torch.tensor([[3.0, 2.0, 1.0, 0.0]])  # its scores too
    found = {}
    layer.gate.register_forward_hook(lambda module, args, output: found.update(scores=output[1], experts=output[2]))
    layer.register_forward_pre_hook(lambda module, args: (token.expand(2, 4)[None],))
    model(input_ids=ids(1, 2), routes=torch.tensor([[[[2, 0]] * 2, [[-1, -1]] * 2]]))
    assert found["experts"].tolist() == [[2, 0], [0, 1]]
    chosen = [torch.tensor([1.0, 3.0]).softmax(0), torch.tensor([3.0, 2.0]).softmax(0)]
    torch.testing.assert_close(found["scores"], torch.stack(chosen))


@pytest.mark.parametrize("arch", ARCHS)
def test_a_layer_is_the_sum_of_the_experts_that_are_replayed(arch):
    model, routes, seen = mixture(arch), some_routes(), {}
    router_replay.enable(model)
    block = model.model.layers[1].mlp
    block.register_forward_hook(lambda module, args, output: seen.update(given=args[0], made=output))
    router = block.router if arch == "gpt_oss" else block.gate
    router.register_forward_hook(lambda module, args, output: seen.update(shares=output[1]))
    model(input_ids=ids(), routes=routes)
    made = seen["made"][0] if isinstance(seen["made"], tuple) else seen["made"]
    given, experts = seen["given"].flatten(0, 1), block.experts
    expected = torch.zeros_like(given)
    for token, chosen in enumerate(routes[:, :, 1].flatten(0, 1).tolist()):
        for place, expert in enumerate(chosen):
            one = torch.full((1, 1), expert)
            part = experts(given[token : token + 1], one, torch.ones(1, 1))
            expected[token] += seen["shares"][token, place] * part[0]
    if arch in ("glm4_moe", "deepseek_v3"):
        expected += block.shared_experts(given)
    torch.testing.assert_close(made.flatten(0, 1), expected)


@pytest.mark.parametrize("arch", ARCHS)
def test_what_is_recorded_and_replayed_changes_nothing(arch):
    model = mixture(arch)
    expected = model(input_ids=ids()).logits
    router_replay.enable(model)
    with router_replay.Recorder(model) as recorder:
        assert torch.equal(model(input_ids=ids()).logits, expected)
        routes = recorder.take()
    assert routes.shape == (14, 2, 2) and routes.dtype == torch.int16 and len(routes.unique()) == 4
    assert torch.equal(model(input_ids=ids(), routes=routes.view(2, 7, 2, 2)).logits, expected)
    assert not torch.allclose(model(input_ids=ids(), routes=some_routes()).logits, expected, atol=1e-3)
    assert torch.equal(model(input_ids=ids()).logits, expected)


def test_a_layer_that_is_recomputed_chooses_the_same_experts():
    gradients = []
    for checkpointing in (False, True):
        model = mixture("qwen3_moe").train()
        router_replay.enable(model)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        logits = model(input_ids=ids(), routes=some_routes()).logits
        F.cross_entropy(logits.flatten(0, 1), ids().flatten()).backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == len(gradients[1]) > 20
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    assert model.model.layers[0].mlp.gate.weight.grad.abs().sum() > 0


def test_a_model_without_routers_is_refused():
    assert "has no routers" in router_replay.problem_of(tiny.causal_lm())
    with pytest.raises(ValueError, match="Qwen3ForCausalLM"):
        router_replay.enable(tiny.causal_lm())
