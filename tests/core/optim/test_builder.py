import importlib.util
import inspect
import logging
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from posttrain.core import TrainingArguments
from posttrain.core.checkpoint import codec, sharded
from posttrain.core.errors import ConfigError
from posttrain.core.optim import builder
from posttrain.core.optim.by_name import OF_PYTORCH_OPTIMIZER, OPTIMIZERS, REFUSED, package_of, target_matrices
from posttrain.core.optim.layerwise import Layerwise
from posttrain.core.optim.low_rank import SIDES, Apollo, galore, projection
from posttrain.core.optim.resumable import adafactor_class
from tests import tiny

NEEDS = {"schedule_free": "schedulefree", "stable_adamw": "optimi", "bnb": "bitsandbytes"}
NEEDS |= {"adamw_torch_4bit": "torchao", "adamw_torch_8bit": "torchao", "anyprecision": "torchdistx"}
NEEDS |= dict.fromkeys(("adamw_8bit", "paged", "ademamix", "lion"), "bitsandbytes")
NEEDS_EXACTLY = dict.fromkeys(OF_PYTORCH_OPTIMIZER, "pytorch_optimizer")
COMPILED = ("adamw_torch_4bit", "adamw_torch_8bit")  # by torchao, which takes a minute on a CPU
NEEDS |= {"xla": "torch_xla", "npu": "torch_npu"}
#: Of pytorch-optimizer: the rates of those that find their own, or make small steps; and those without a weight decay.
RATES = dict.fromkeys(("prodigy", "adamg", "lars", "avagrad", "adadelta", "adamod"), 1.0)
RATES |= dict.fromkeys(("dadaptadam", "dadaptadan", "ranger"), 0.1)
WITHOUT_DECAY = ("amos", "fromage", "msvag", "nero", "sm3", "srmm")


@dataclass
class Arguments(TrainingArguments):
    max_steps: int = 10


def arguments(optim="sgd", **kwargs):
    low_rank = optim.startswith(("galore_", "apollo_")) and "optim_target_modules" not in kwargs
    return Arguments(optim=optim, **({"optim_target_modules": "all-linear"} if low_rank else {}), **kwargs)


class Net(nn.Module):
    """An embedding, two linear layers with biases, a norm and a head."""

    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(16, 8)
        self.up, self.norm, self.down = nn.Linear(8, 24), nn.LayerNorm(24), nn.Linear(24, 8)
        self.lm_head = nn.Linear(8, 16, bias=False)

    def forward(self, ids):
        hidden = self.embedding(ids)
        return self.lm_head(hidden + self.down(torch.relu(self.norm(self.up(hidden)))))


def loss_of(model, ids):
    return nn.functional.cross_entropy(model(ids).float(), (ids + 1) % 16)


def train(model, optimizer, steps, first=0):
    """Learn to name the next of 16 tokens; returns the losses."""
    losses = []
    getattr(optimizer, "train", lambda: None)()
    for step in range(first, first + steps):
        ids = torch.randint(16, (32,), generator=torch.Generator().manual_seed(step))
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def weights(model):
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], msg=lambda text, name=name: f"{name}: {text}", **tolerance)


def skip_without_library(name):
    for part, module in (NEEDS | NEEDS_EXACTLY).items():
        if (
            name == part if part in NEEDS_EXACTLY else part in name and name not in NEEDS_EXACTLY
        ) and importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    for problem in builder.package_problems(arguments(name)):
        pytest.skip(str(problem))


# ------------------------------------------------------------------------------------------------------ every optimizer


@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in COMPILED else n for n in OPTIMIZERS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_every_optimizer_learns_and_goes_on_exactly_from_its_state(name, dtype, tmp_path):
    skip_without_library(name)
    options = {"optim_args": "rank=4, update_proj_gap=3"} if name.startswith(("galore_", "apollo_")) else {}
    options |= {"optim_args": "precondition_frequency=3"} if name == "soap" else {}
    rate = RATES.get(name, 1e-2)
    decay = 0.0 if name in WITHOUT_DECAY else 0.01
    args = arguments(name, learning_rate=rate, weight_decay=decay, lr_scheduler_type="constant", **options)

    model, everything = Net().to(dtype), torch.arange(16)
    straight, before = builder.build(model, args), loss_of(model, everything)
    train(model, straight, 16)
    assert loss_of(model, everything) < before or dtype is torch.bfloat16  # to which small steps are lost

    begun = Net().to(dtype)
    first = builder.build(begun, args)
    train(begun, first, 7)
    resumed = Net(seed=1).to(dtype)
    resumed.load_state_dict(begun.state_dict())
    second = builder.build(resumed, args)
    codec.save_tree(first.state_dict(), tmp_path / "optimizer")
    sharded.load_optimizer(codec.load_tree(tmp_path / "optimizer"), second)
    before = torch.get_rng_state()
    train(resumed, second, 9, first=7)
    assert_same(weights(resumed), weights(model), rtol=0, atol=0)
    assert torch.equal(before, torch.get_rng_state())  # each process would draw others


def test_every_optimizer_of_transformers_is_known():
    from transformers.training_args import OptimizerNames

    names = {member.value for member in OptimizerNames}
    assert names <= OPTIMIZERS.keys()
    assert OPTIMIZERS.keys() - names == {"muon", "adamw_bf16", *OF_PYTORCH_OPTIMIZER}
    assert Arguments(optim=OptimizerNames.ADAFACTOR).optim == "adafactor"
    assert builder.optimizer_class_and_kwargs(SimpleNamespace(**vars(arguments()) | {"optim": OptimizerNames.SGD}))


@pytest.mark.parametrize(
    ("name", "optim_args"),
    [
        ("adamw_torch", None),
        ("adamw_torch_fused", None),
        ("adafactor", None),
        ("sgd", "momentum=0.9, nesterov=true"),
        ("adagrad", "lr_decay=0.1,eps=1e-8"),
        ("rmsprop", "momentum=0.5, alpha=0.9, centered=True"),
        ("adamw_bnb_8bit", None),
        ("paged_adamw_32bit", None),
        ("lion_32bit", None),
        ("rmsprop_bnb", None),
        ("ademamix", "beta3=0.999, t_alpha=5"),
        ("grokadamw", "lamb=3.0"),
        ("schedule_free_adamw", "r=0.5"),
        ("schedule_free_sgd", None),
        ("schedule_free_radam", None),
        ("stable_adamw", None),
    ],
)
@pytest.mark.filterwarnings("ignore:Paged optimizers are not supported on CPU")
def test_updates_equal_those_of_transformers(name, optim_args, tmp_path):
    from transformers import Trainer
    from transformers import TrainingArguments as TheirArguments

    skip_without_library(name)
    if name == "grokadamw":
        pytest.importorskip("grokadamw")
    common = {"learning_rate": 1e-2, "optim": name, "optim_args": optim_args, "warmup_steps": 2}
    common |= {} if name == "grokadamw" else {"adam_beta2": 0.99}  # transformers leaves it out there
    theirs, mine = Net(), Net()
    arguments_of_theirs = TheirArguments(tmp_path, weight_decay=0.1, report_to="none", use_cpu=True, **common)
    their_class, their_kwargs = Trainer.get_optimizer_cls_and_kwargs(arguments_of_theirs, theirs)
    names = builder.decay_parameter_names(theirs)
    train(theirs, their_class(builder.parameter_groups(theirs, names, 0.1), **their_kwargs), 5)
    train(mine, builder.build(mine, Arguments(weight_decay=0.1, **common)), 5)
    assert_same(weights(mine), weights(theirs), rtol=1e-5, atol=1e-6)


def test_what_an_optimizer_of_pytorch_optimizer_is_not_told_is_its_own_default(monkeypatch):
    pytest.importorskip("pytorch_optimizer")
    (group, _) = builder.build(Net(), arguments("soap", learning_rate=1e-2, weight_decay=0.1)).param_groups
    assert (group["betas"], group["lr"], group["weight_decay"]) == ((0.95, 0.95), 1e-2, 0.1)
    told = arguments("soap", adam_beta2=0.9, adam_epsilon=1e-6, optim_args="precondition_frequency=3")
    (group, _) = builder.build(Net(), told).param_groups
    assert (group["betas"], group["eps"], group["precondition_frequency"]) == ((0.9, 0.9), 1e-6, 3)
    for changes, missing in (({"optim_args": "rank=3"}, "rank"), ({"adam_epsilon": 1e-6}, "eps")):
        with pytest.raises(ConfigError, match=f"optim='lion' has no {missing}; it takes lr, betas"):
            builder.build(Net(), arguments("lion", **changes))
    with pytest.raises(ConfigError, match="optim='nero' has no weight_decay; it takes lr, beta"):
        builder.build(Net(), arguments("nero", weight_decay=0.1))
    with pytest.raises(ConfigError, match=r"are two, and optim='adan' has betas=\(0.98, 0.92, 0.99\); set those in"):
        builder.build(Net(), arguments("adan", adam_beta1=0.95))
    (group, _) = builder.build(Net(), arguments("adan", optim_args="betas=(0.9, 0.9, 0.9)")).param_groups
    assert group["betas"] == (0.9, 0.9, 0.9)


def test_every_name_of_pytorch_optimizer_is_taken_or_refused_with_a_reason():
    library = pytest.importorskip("pytorch_optimizer")
    names = set(library.get_supported_optimizers())
    assert names == {*OF_PYTORCH_OPTIMIZER, *REFUSED} | (names & OPTIMIZERS.keys())
    assert not REFUSED.keys() & OPTIMIZERS.keys()
    for name, why in REFUSED.items():
        with pytest.raises(ConfigError) as refusal:
            arguments(name)
        assert f"optim='{name}' of pytorch-optimizer {why}" in str(refusal.value)


def test_an_optimizer_that_is_not_installed_names_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pytorch_optimizer", None)
    with pytest.raises(ImportError, match=r"optim='prodigy'.*pip install 'pytorch-optimizer>=4.1'"):
        builder.build(Net(), arguments("prodigy"))
    with pytest.raises(ConfigError, match="optim='sophiah' is not one of"):
        arguments("sophiah")


# ------------------------------------------------------------------------------------------------------- by the paper


@pytest.mark.parametrize("scale_parameter", [False, True])
def test_adafactor_equals_that_of_transformers(scale_parameter):
    from transformers.optimization import Adafactor as Theirs

    options = {"lr": 1e-2, "weight_decay": 0.1, "beta1": 0.9, "scale_parameter": scale_parameter}
    theirs, mine = Net(), Net()
    train(theirs, Theirs(theirs.parameters(), relative_step=False, **options), 5)
    train(mine, adafactor_class()(mine.parameters(), **options), 5)
    assert_same(weights(mine), weights(theirs), rtol=1e-5, atol=1e-7)


def test_adafactor_keeps_a_row_and_a_column_per_matrix_in_float32_even_after_loading():
    model = Net().bfloat16()
    optimizer = adafactor_class()(model.parameters(), lr=1e-2)
    train(model, optimizer, 2)
    state = optimizer.state[model.up.weight]
    shapes = {name: tuple(value.shape) for name, value in state.items() if name not in ("step", "RMS")}
    assert shapes == {"exp_avg_sq_row": (24,), "exp_avg_sq_col": (8,)}
    other = adafactor_class()(model.parameters(), lr=1e-2)
    other.load_state_dict(optimizer.state_dict())
    for name in shapes:
        torch.testing.assert_close(other.state[model.up.weight][name], state[name], rtol=0, atol=0)
        assert state[name].dtype is torch.float32


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("shape", [(4, 7), (7, 4)])
def test_galore_over_sgd_steps_along_the_leading_singular_vectors_of_the_gradient(shape, side):
    weight, grad = nn.Parameter(torch.randn(shape)), torch.randn(shape)
    before, weight.grad = weight.detach().clone(), grad
    u, s, vh = torch.linalg.svd(grad, full_matrices=False)
    galore(torch.optim.SGD)([weight], [weight], rank=2, scale=0.5, proj_type=side, lr=0.1).step()
    torch.testing.assert_close(weight.detach(), before - 0.1 * 0.5 * (u[:, :2] * s[:2]) @ vh[:2])
    assert weight.grad is grad


def test_galore_at_full_rank_over_sgd_is_sgd():
    plain, low_rank = Net(), Net()
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 3)
    matrices = target_matrices(low_rank, "all-linear")
    train(low_rank, galore(torch.optim.SGD)(low_rank.parameters(), matrices, rank=8, scale=1.0, lr=0.1), 3)
    assert_same(weights(low_rank), weights(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("side", "left", "right"), [
    ("std", (4, 2), None), ("reverse_std", None, (2, 7)), ("left", (4, 2), None), ("right", None, (2, 7)),
    ("full", (4, 2), (2, 7)),
])  # fmt: skip
def test_projections_are_orthonormal_and_on_the_side_asked_for(side, left, right):
    for vectors, shape in zip(projection(torch.randn(4, 7), 2, side), (left, right), strict=True):
        assert (vectors is None) == (shape is None)
        if shape is not None:
            assert vectors.shape == shape
            tall = vectors if shape[0] > shape[1] else vectors.T
            torch.testing.assert_close(tall.T @ tall, torch.eye(2))


def test_galore_keeps_state_of_the_rank_and_renews_the_subspace_after_the_gap():
    model = Net()
    args = arguments("galore_adamw", optim_args="rank=2, update_proj_gap=3", optim_target_modules=["up"])
    optimizer = builder.build(model, args)
    assert [len(group["params"]) for group in optimizer.param_groups] == [3, 4, 1]  # decaying, not decaying, projected
    assert {group.get("rank") for group in optimizer.param_groups} == {None, 2}
    state, subspaces = optimizer.state[model.up.weight], []
    for step in range(4):
        train(model, optimizer, 1, first=step)
        subspaces.append(state["right"])
    assert state["exp_avg"].shape == (24, 2) and state["right"].shape == (2, 8) and state["left"] is None
    assert subspaces[0] is subspaces[2] and subspaces[0] is not subspaces[3]
    assert optimizer.state[model.down.weight]["exp_avg"].shape == (8, 24)


def test_weight_decay_of_projected_matrices_acts_on_the_matrix():
    weight = nn.Parameter(torch.ones(4, 4))
    weight.grad = torch.zeros(4, 4)
    galore(torch.optim.AdamW)([weight], [weight], rank=2, lr=0.1, weight_decay=0.5).step()
    torch.testing.assert_close(weight.detach(), torch.full((4, 4), 1 - 0.1 * 0.5))


def fed(make_optimizer, steps=7):
    """Two matrices and a vector after some updates with given gradients."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(7, 4), (4, 7), (5,)]
    parameters = [nn.Parameter(torch.randn(shape, generator=draw)) for shape in shapes]
    optimizer = make_optimizer(parameters[:2], parameters[2:])
    for _ in range(steps):
        for parameter, shape in zip(parameters, shapes, strict=True):
            parameter.grad = torch.randn(shape, generator=draw)
        optimizer.step()
    return {str(shape): parameter.detach() for shape, parameter in zip(shapes, parameters, strict=True)}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("proj_type", ["std", "reverse_std", "left", "right"])  # full: Adam blows up rounding errors
def test_galore_adamw_equals_the_authors_code(proj_type):
    library = pytest.importorskip("galore_torch")
    low_rank = {"rank": 2, "update_proj_gap": 3, "scale": 0.25, "proj_type": proj_type}
    theirs = fed(lambda m, v: library.GaLoreAdamW([{"params": v}, {"params": m, **low_rank}], lr=0.1, eps=1e-8))
    mine = fed(lambda m, v: galore(torch.optim.AdamW)([*m, *v], m, lr=0.1, weight_decay=0.0, **low_rank))
    assert_same(mine, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale_type", ["channel", "tensor"])
def test_apollo_equals_the_authors_code(scale_type):
    library = pytest.importorskip("apollo_torch")
    low_rank = {"rank": 2, "update_proj_gap": 3, "scale": 2.0, "scale_type": scale_type, "proj": "svd"}
    groups = {"proj_type": "std", **low_rank}
    theirs = fed(lambda m, v: library.APOLLOAdamW([{"params": v}, {"params": m, **groups}], lr=0.1, eps=1e-8))
    mine = fed(lambda m, v: Apollo([*m, *v], m, lr=0.1, **low_rank))
    assert_same(mine, theirs, rtol=1e-4, atol=1e-5)


def test_apollo_scales_each_channel_of_the_gradient_and_its_noise_is_its_own():
    weight, grad = nn.Parameter(torch.zeros(4, 7)), torch.randn(4, 7)
    weight.grad = grad
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    optimizer = Apollo([weight], [weight], rank=2, lr=0.1)
    optimizer.step()
    torch.testing.assert_close(torch.rand(1), expected)
    factors = weight.detach() / grad
    torch.testing.assert_close(factors, factors[:1].expand(4, 7))
    # Adam's first update is +-1 in each of the 2 entries of a channel, hence of length sqrt(2).
    low_rank = optimizer.state[weight]["projection"].T @ grad
    torch.testing.assert_close(factors[0], -0.1 * 2**0.5 / torch.linalg.vector_norm(low_rank, dim=0), rtol=1e-4, atol=0)


def test_apollo_lets_the_norm_of_an_update_grow_by_one_percent_a_step():
    weight = nn.Parameter(torch.zeros(4, 7))
    optimizer, lengths = Apollo([weight], [weight], rank=2, lr=0.1), []
    for sign in (1.0, -1.0, -1.0):  # the momentum nearly vanishes, then comes back
        weight.grad = torch.full((4, 7), sign)
        optimizer.step()
        lengths.append(optimizer.state[weight]["length"].item())
    assert lengths[1] < 0.1 * lengths[0] and lengths[2] == pytest.approx(1.01 * lengths[1], rel=1e-4)


@pytest.mark.parametrize(("layerwise", "plain"), [
    ("lomo", "sgd"), ("galore_adamw_layerwise", "galore_adamw"), ("apollo_adamw_layerwise", "apollo_adamw"),
    ("galore_adafactor_layerwise", "galore_adafactor"),
])  # fmt: skip
def test_layerwise_updates_equal_those_after_the_backward_pass(layerwise, plain):
    proj = {"optim_args": "proj=svd, rank=4"} if "apollo" in plain else {}
    inside, after = Net(), Net()
    train(inside, builder.build(inside, arguments(layerwise, learning_rate=1e-2, weight_decay=0.1, **proj)), 4)
    train(after, builder.build(after, arguments(plain, learning_rate=1e-2, weight_decay=0.1, **proj)), 4)
    assert_same(weights(inside), weights(after), rtol=1e-4, atol=1e-5)


def test_layerwise_drops_gradients_and_follows_the_learning_rate():
    model = Net()
    optimizer = builder.build(model, arguments("lomo", learning_rate=1.0))
    before = weights(model)
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # as a schedule sets it
    train(model, optimizer, 1)
    assert_same(weights(model), before, rtol=0, atol=0)
    model(torch.arange(4)).sum().backward()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layerwise_optimizer_that_is_gone_updates_nothing():
    model = Net()
    optimizer = builder.build(model, arguments("lomo", learning_rate=1.0))
    before = weights(model)
    del optimizer
    model(torch.arange(4)).sum().backward()
    assert_same(weights(model), before, rtol=0, atol=0)
    assert model.up.weight.grad is not None


def test_adalomo_steps_in_proportion_to_the_size_of_a_parameter():
    weight = nn.Parameter(torch.full((3, 5), 2.0))
    optimizer = Layerwise([weight], adafactor_class(), lr=0.1, scale_parameter=True)
    weight.sum().backward()
    torch.testing.assert_close(weight.detach(), torch.full((3, 5), 2.0 - 0.1 * 2.0))
    assert optimizer.state[weight]["step"] == 1


def test_lomo_equals_the_authors_code():
    library = pytest.importorskip("lomo_optim")
    theirs, mine = Net(), Net()
    optimizer = library.Lomo(theirs, lr=0.05)
    mine_optimizer = builder.build(mine, arguments("lomo", learning_rate=0.05))
    for step in range(3):
        ids = torch.randint(16, (32,), generator=torch.Generator().manual_seed(step))
        optimizer.fused_backward(nn.functional.cross_entropy(theirs(ids), (ids + 1) % 16), 0.05)
        train(mine, mine_optimizer, 1, first=step)
    assert_same(weights(mine), weights(theirs), rtol=1e-5, atol=1e-6)


def test_muon_trains_hidden_matrices_and_adamw_the_rest():
    model, expected = Net(), Net()
    options = {"learning_rate": 1e-2, "weight_decay": 0.1}
    train(model, builder.build(model, arguments("muon", **options)), 1)

    hidden = [expected.up.weight, expected.down.weight]
    muon = torch.optim.Muon(hidden, lr=1e-2, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    decaying = [expected.embedding.weight, expected.lm_head.weight]
    rest = [p for p in expected.parameters() if p.dim() == 1]
    groups = [{"params": decaying, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2)
    train(expected, SimpleNamespace(step=lambda: (muon.step(), adamw.step()), zero_grad=lambda: None), 1)
    assert_same(weights(model), weights(expected), rtol=1e-5, atol=1e-6)


def test_muon_leaves_embeddings_and_the_head_of_a_language_model_to_adamw():
    for arch in ("llama", "gpt2"):
        model = tiny.causal_lm(arch)
        optimizer = builder.build(model, arguments("muon"))
        by_muon = {id(p) for group in optimizer.param_groups if "algorithm" in group for p in group["params"]}
        names = {name for name, parameter in model.named_parameters() if id(parameter) not in by_muon}
        matrices = {name for name in names if model.get_parameter(name).dim() == 2}
        assert matrices and not any("layers" in name or ".h." in name for name in matrices)
        assert len(by_muon) == {"llama": 14, "gpt2": 8}[arch]


# ----------------------------------------------------------------------------------------------------------- parameters


@pytest.mark.parametrize("make", [tiny.causal_lm, lambda: tiny.causal_lm("gpt2"), tiny.classifier, tiny.seq2seq_lm])
def test_the_same_parameters_decay_as_in_transformers(make):
    from transformers import Trainer

    model = make()
    names = builder.decay_parameter_names(model)
    assert set(names) == set(Trainer.get_decay_parameter_names(None, model))
    order = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert names == [name for name in order if name in set(names)]
    assert any("embed" in name or "wte" in name or "shared" in name for name in names)


def test_norms_are_known_by_class_or_by_name():
    class ScaleRMSNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    model = nn.ModuleDict({
        "ln_f": ScaleRMSNorm(), "ln": nn.GroupNorm(2, 4), "mixer_norm": nn.Linear(4, 4), "normalizer": nn.Linear(4, 4),
    })  # fmt: skip
    assert builder.decay_parameter_names(model) == ["normalizer.weight"]


def test_groups_hold_trainable_parameters_in_the_order_of_the_model():
    model = Net()
    model.down.weight.requires_grad = False
    decay, rest = builder.parameter_groups(model, builder.decay_parameter_names(model), 0.1)
    assert (decay["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    expected = [model.embedding.weight, model.up.weight, model.lm_head.weight]
    assert all(a is b for a, b in zip(decay["params"], expected, strict=True))
    expected = [model.up.bias, model.norm.weight, model.norm.bias, model.down.bias]
    assert all(a is b for a, b in zip(rest["params"], expected, strict=True))


def test_a_group_without_parameters_is_kept():
    groups = builder.build(nn.Linear(2, 2, bias=False), arguments()).param_groups
    assert [len(group["params"]) for group in groups] == [1, 0]


def test_a_frozen_model_is_refused():
    with pytest.raises(ConfigError, match="nothing to train"):
        builder.build(Net().requires_grad_(False), arguments())


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ["up", "down", "lm_head"]),
        ("all_linear", ["up", "down", "lm_head"]),
        (".*o.*", ["down"]),
        (["up", "lm_head"], ["up", "lm_head"]),
        (["ow"], ["down"]),
        ([r"u.", "n.*m"], ["up"]),
    ],
)
def test_targets_are_names_parts_or_regular_expressions(targets, names):
    model = Net()
    chosen = target_matrices(model, targets)
    assert all(a is model.get_submodule(b).weight for a, b in zip(chosen, names, strict=True))


def test_targets_that_match_nothing_are_refused_with_the_layers_that_there_are():
    args = arguments("galore_adamw", optim_target_modules=["attention"])
    with pytest.raises(
        ConfigError, match=r"\['attention'\] selects no trainable linear layer.*model\.layers\.\*\.mlp\.up"
    ):
        builder.build(tiny.causal_lm("llama"), args)


@pytest.mark.parametrize("name", ["adamw_8bit", "rmsprop_bnb_8bit"])
def test_embeddings_keep_32_bit_state_in_8_bit_optimizers(name):
    manager = pytest.importorskip("bitsandbytes").optim.GlobalOptimManager.get_instance()
    model = nn.Sequential(nn.Embedding(512, 64), nn.Linear(64, 512))
    of_the_process = [dict(manager.pid2config), dict(manager.index2config), [*manager.module_weight_config_triple]]
    optimizer = builder.build(model, arguments(name))
    model(torch.arange(8)).sum().backward()
    optimizer.step()
    assert optimizer.state[model[0].weight]["state1"].dtype is torch.float32
    assert optimizer.state[model[1].weight]["state1"].dtype is torch.uint8

    # What was said of this model's first matrix must not hold for the first matrix of the next.
    other = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    optimizer = builder.build(other, arguments(name))
    other(torch.ones(8, 64)).sum().backward()
    optimizer.step()
    assert {optimizer.state[layer.weight]["state1"].dtype for layer in other} == {torch.uint8}
    assert [manager.pid2config, manager.index2config, manager.module_weight_config_triple] == of_the_process


# ------------------------------------------------------------------------------------------------------------ arguments


def test_the_default_is_fused_adamw():
    optimizer = builder.build(Net(), Arguments())
    assert isinstance(optimizer, torch.optim.AdamW)
    wanted = {"lr": 5e-5, "betas": (0.9, 0.999), "eps": 1e-8, "fused": True, "weight_decay": 0.0}
    assert wanted.items() <= optimizer.param_groups[0].items()


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("rank=64, update_proj_gap=100, scale=0.10", {"rank": 64, "update_proj_gap": 100, "scale": 0.1}),
        ("a=1e-3,b=true , c=False,d=none", {"a": 1e-3, "b": True, "c": False, "d": None}),
        ("proj_type=reverse_std", {"proj_type": "reverse_std"}),
        ("betas=(0.9, 0.95), x=1", {"betas": (0.9, 0.95), "x": 1}),
        ({"rank": 8}, {"rank": 8}),
        (None, {}),
        ("", {}),
    ],
)
def test_options_are_read_as_literals(text, options):
    assert builder.parse_optim_args(text) == options


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"optim": "galore_adamw", "optim_args": "rnk=64"}, "'rnk' is not an option .* rank, .*, did you mean 'rank'"),
        ({"optim": "adamw_torch", "optim_args": "weight_decay=0.1"}, "set weight_decay instead"),
        ({"optim": "lomo", "optim_args": "momentum=0.1"}, "which takes none"),
        ({"optim": "soap", "optim_args": "weight_decay=0.1"}, "option of optim='soap'; set weight_decay instead"),
        ({"optim": "soap", "optim_args": "lr=0.1"}, "option of optim='soap'; set learning_rate instead"),
        ({"optim": "galore_adamw_layerwise", "optim_args": "rnk=1"}, "did you mean 'rank'"),
        ({"optim": "sgd", "optim_args": "momentum"}, "'momentum' is not of the form key=value"),
        ({"optim": "sgd", "optim_args": "momentum=high"}, "momentum='high' must be of type float"),
        ({"optim": "sgd", "optim_args": "nesterov=1"}, "nesterov=1 must be of type bool"),
        ({"optim": "galore_adamw", "optim_args": "rank=2.5"}, "rank=2.5 must be of type int"),
        ({"optim": "adamw"}, "did you mean 'adamw_torch'|did you mean 'adamw_8bit'|is not one of"),
        ({"optim": "galore_adamw", "optim_target_modules": None}, "needs optim_target_modules"),
        ({"optim": "galore_adamw", "optim_target_modules": "*attn"}, "is no regular expression"),
        ({"optim": "lomo", "gradient_accumulation_steps": 4}, "set gradient_accumulation_steps=1"),
        ({"optim": "apollo_adamw_layerwise", "fp16": True}, "set bf16=True"),
        ({"optim": "schedule_free_adamw", "warmup_steps": 0.1, "max_steps": -1}, "to a number of steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
        ({"adam_beta2": 1.0}, "adam_beta2"),
        ({"max_grad_norm": -1.0}, "max_grad_norm"),
    ],
)
def test_what_cannot_work_is_refused_with_the_arguments(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        arguments(**kwargs)


@pytest.mark.parametrize("name", [n for n in OPTIMIZERS if n not in OF_PYTORCH_OPTIMIZER])
def test_an_unknown_option_of_any_optimizer_is_refused(name):
    with pytest.raises(ConfigError, match=f"'no_such_option' is not an option of optim='{name}', which takes"):
        arguments(name, optim_args="no_such_option=1")


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_target_modules_are_read_or_said_to_be_without_effect(name, caplog):
    skip_without_library(name)
    with caplog.at_level(logging.WARNING, "posttrain"):
        builder.build(Net(), arguments(name, optim_target_modules=["up"]))
    said = "has no effect. Leave it out" in caplog.text
    assert said != name.startswith(("galore_", "apollo_", "muon"))


def test_a_target_that_selects_nothing_beside_one_that_does_is_named(caplog):
    with caplog.at_level(logging.WARNING, "posttrain"):
        builder.build(Net(), arguments("muon", optim_target_modules=["up", "donw"]))
    assert [r.getMessage() for r in caplog.records] == [
        "optim_target_modules: 'donw' selects no trainable linear layer of this model."
    ]


def test_layerwise_optimizers_are_refused_in_a_run_of_several_processes(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="over the 2 processes; use 'galore_adamw'"):
        arguments("galore_adamw_layerwise")
    with pytest.raises(ConfigError, match="set optim='adamw_bf16', or leave it out"):
        arguments("adamw_torch_8bit", optim_args="bf16_stochastic_round=True")


@pytest.mark.parametrize(("name", "optim_args"), [
    ("galore_adamw", "proj_type=both"), ("apollo_adamw", "proj=qr"), ("apollo_adamw", "scale_type=row"),
])  # fmt: skip
def test_words_that_an_option_does_not_know_are_refused(name, optim_args):
    with pytest.raises(ConfigError, match="is not one of"):
        builder.build(Net(), arguments(name, optim_args=optim_args))


def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "schedulefree", None)
    with pytest.raises(ImportError, match=r"pip install 'schedulefree>=1.4'"):
        builder.build(Net(), arguments("schedule_free_sgd"))


@pytest.mark.parametrize(
    ("optim", "library", "name"),
    [("paged_lion_8bit", "bitsandbytes.optim", "Lion"), ("schedule_free_sgd", "schedulefree", "SGDScheduleFree")],
)
def test_a_library_may_make_its_classes_when_they_are_asked_for(optim, library, name, monkeypatch):
    module = ModuleType(library)
    module.__getattr__ = {name: torch.optim.Adagrad}.__getitem__
    for package in {library.partition(".")[0], library}:
        monkeypatch.setitem(sys.modules, package, module)
    assert builder.optimizer_class_and_kwargs(arguments(optim), None)[0] is torch.optim.Adagrad


@pytest.mark.parametrize(
    ("optim", "library", "name", "more"),
    [
        ("adamw_torch_xla", "torch_xla.amp.syncfree", "AdamW", {}),
        ("adamw_torch_npu_fused", "torch_npu.optim", "NpuFusedAdamW", {}),
        ("adamw_anyprecision", "torchdistx.optimizers", "AnyPrecisionAdamW",
         {"use_kahan_summation": True, "momentum_dtype": torch.float16, "variance_dtype": torch.float32,
          "compensation_buffer_dtype": torch.bfloat16}),
    ],
)  # fmt: skip
def test_the_class_of_another_device_gets_what_the_arguments_say(optim, library, name, more, monkeypatch):
    class Theirs(torch.optim.AdamW):
        def __init__(self, params, **given):
            self.given = given
            super().__init__(params, **{key: given[key] for key in ("lr", "betas", "eps")})

    parts = library.split(".")
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    setattr(module, name, Theirs)
    texts = "use_kahan_summation=True, momentum_dtype=float16" if more else None
    args = arguments(optim, learning_rate=1e-2, adam_beta1=0.8, adam_epsilon=1e-6, weight_decay=0.1, optim_args=texts)
    model, plain = Net(), Net()
    optimizer = builder.build(model, args)
    assert optimizer.given == {"lr": 1e-2, "betas": (0.8, 0.999), "eps": 1e-6, **more}
    settings = arguments("adamw_torch", learning_rate=1e-2, adam_beta1=0.8, adam_epsilon=1e-6, weight_decay=0.1)
    train(model, optimizer, 3)
    train(plain, builder.build(plain, settings), 3)
    assert_same(weights(model), weights(plain), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if package_of(name)])
def test_an_optimizer_of_a_package_that_is_missing_names_itself_and_the_command(name, monkeypatch):
    module, command = package_of(name)
    monkeypatch.setitem(sys.modules, module, None)
    (problem,) = builder.package_problems(arguments(name))
    assert f"optim='{name}'" in str(problem) and f"pip install '{command}'" in str(problem)


def test_what_depends_on_the_model_asks_for_it():
    with pytest.raises(TypeError, match="pass it too"):
        builder.optimizer_class_and_kwargs(arguments("galore_adamw"))


def test_settings_without_effect_are_named(caplog):
    with caplog.at_level(logging.WARNING):
        builder.build(Net(), arguments("adalomo"))
    assert "max_grad_norm=1.0 has no effect" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        builder.build(Net(), arguments("adalomo", max_grad_norm=None))
    assert caplog.text == ""


def test_a_schedule_on_top_of_schedule_free_is_named(caplog):
    pytest.importorskip("schedulefree")
    with caplog.at_level(logging.WARNING):
        builder.build(Net(), arguments("schedule_free_adamw"))
    assert "set 'constant'" in caplog.text


def test_a_class_of_ones_own_gets_the_usual_groups():
    model = Net()
    chosen = (torch.optim.SGD, {"lr": 0.5})
    optimizer = builder.build(model, arguments(weight_decay=0.1), ["up.weight"], chosen)
    assert [(len(g["params"]), g["weight_decay"], g["lr"]) for g in optimizer.param_groups] == [
        (1, 0.1, 0.5),
        (7, 0.0, 0.5),
    ]
    only = [{"params": [model.up.weight]}]
    assert (
        builder.build(model, arguments(), None, (torch.optim.SGD, {"lr": 0.5, "params": only})).param_groups[0]["lr"]
        == 0.5
    )


def test_a_factory_of_ones_own_gets_the_model():
    class Factory:
        def __call__(self, model, lr):
            return torch.optim.SGD(model.parameters(), lr=lr)

    assert len(builder.build(Net(), arguments(), None, (Factory, {"lr": 0.5})).param_groups) == 1


def test_users_add_optimizers_by_name():
    @builder.register("nesterov")
    def nesterov(args, model, *, momentum: float = 0.9):
        return torch.optim.SGD, {"lr": args.learning_rate, "momentum": momentum, "nesterov": True}

    try:
        optimizer = builder.build(Net(), arguments("nesterov", optim_args="momentum=0.5"))
        assert optimizer.defaults["nesterov"] and optimizer.defaults["momentum"] == 0.5
        with pytest.raises(ConfigError, match="which takes momentum"):
            arguments("nesterov", optim_args="momentun=0.5")
    finally:
        del OPTIMIZERS["nesterov"]
        builder.register("sgd")(OPTIMIZERS["sgd"])
    with pytest.raises(ConfigError, match="optim='nesterov' is not one of"):
        arguments("nesterov")


def test_every_option_says_its_type():
    for name, factory in OPTIMIZERS.items():
        for option in inspect.signature(factory, eval_str=True).parameters.values():
            if option.kind is option.KEYWORD_ONLY:
                assert option.annotation is not option.empty and option.default is not option.empty, (name, option)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_groups_stepped_in_one_kernel_step_as_torch_steps_them(weight_decay):
    def trained(make):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 2))
        optimizer = make(model)
        for number in range(6):
            if number == 3:
                optimizer.param_groups[1]["lr"] *= 0.5  # from here on the groups differ
            model(torch.randn(5, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return list(model.parameters()), optimizer.state_dict()

    args = arguments("adamw_torch_fused", weight_decay=weight_decay)
    options = {"lr": 0.01, "fused": True}
    ours = trained(lambda model: builder.build(model, args, class_and_kwargs=(torch.optim.AdamW, options)))
    theirs = trained(
        lambda model: torch.optim.AdamW(
            builder.parameter_groups(model, builder.decay_parameter_names(model), weight_decay), **options
        )
    )
    assert all(torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True))
    assert ours[1]["param_groups"] == theirs[1]["param_groups"] and ours[1]["state"].keys() == theirs[1]["state"].keys()
