"""A head that takes the loss gives the numbers of the plain path."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from posttrain.core.losses import cross_entropy, selective_log_softmax, shift_labels
from posttrain.lm.loading import adapters
from posttrain.lm.loss import lm_head
from posttrain.lm.loss.distillation import Measure, divergence_terms
from posttrain.lm.loss.language_modeling import linear_cross_entropy
from tests import tiny
from tests.core.models.gradients import LORA, assert_same_gradients, batch, gradients

peft = pytest.importorskip("peft")


ARCHITECTURES = ["qwen3", "llama", "mistral", "gemma", "gpt2"]


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def special_arch(name, **config):
    """A tiny model whose logits are not plainly its head's output."""
    import transformers

    size = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    size |= {"num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**(size | config)))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_head_of_usual_models_is_found(arch):
    model = tiny.causal_lm(arch).train()
    head, _ = lm_head.find_head(model)
    assert head.linear is model.get_output_embeddings() and head.weight is head.linear.weight and head.bias is None
    assert (head.softcap, head.scale) == (None, 1.0)
    assert all(module.training for module in model.modules()) and not head.linear._forward_hooks


def assert_loss_and_gradients_in_head(model, ids, labels, expected):
    """The loss taken in the head is `expected`, and so are its gradients."""
    expected.backward()
    wanted = gradients(model)
    with lm_head.loss_in_head(model, labels):
        loss = model(input_ids=ids).logits[0]
    assert_close(loss, expected)
    loss.backward()
    assert_same_gradients(gradients(model), wanted)


@pytest.mark.parametrize(
    ("arch", "config", "softcap", "scale"),
    [
        ("Gemma2", {"query_pre_attn_scalar": 8, "final_logit_softcapping": 20.0}, 20.0, 1.0),
        ("Cohere", {"logit_scale": 0.25}, None, 0.25),
        ("Granite", {"logits_scaling": 8.0}, None, 0.125),
        ("HyperCLOVAX", {"logits_scaling": 0.5}, None, 0.5),
    ],
)
def test_softcap_and_scale_are_found_and_give_the_models_loss(arch, config, softcap, scale):
    model = special_arch(arch, **config)
    head, _ = lm_head.find_head(model)
    assert (head.softcap, head.scale) == (softcap, scale)
    ids, labels = batch(96)
    output = model(input_ids=ids, output_hidden_states=True)
    expected = cross_entropy(output.logits, labels, num_items=1)
    given = {"bias": head.bias, "softcap": head.softcap, "scale": head.scale}
    assert_close(linear_cross_entropy(output.hidden_states[-1], head.weight, shift_labels(labels), **given), expected)
    assert_loss_and_gradients_in_head(model, ids, labels, expected)
    assert torch.equal(model(input_ids=ids).logits, output.logits)


def test_a_model_that_does_more_to_its_logits_is_refused():
    model = tiny.causal_lm()
    plain = model.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits + torch.arange(384) / 10
        return output

    model.forward = forward
    assert lm_head.find_head(model)[0] is None
    assert "in an unknown way" in lm_head.supports_loss_in_head(model)
    with pytest.raises(ValueError, match="in an unknown way"), lm_head.loss_in_head(model, batch()[1]):
        pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "names no output embedding"),
        (lambda: adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(target_modules=["lm_head"])), "not a plain"),
        (lambda: torch.compile(tiny.causal_lm()), "compiled"),
        (lambda: nn.DataParallel(tiny.causal_lm()), "DataParallel"),
        (
            lambda: special_arch("RecurrentGemma", lru_width=32, block_types=["recurrent", "attention"]),
            "caps its logits",
        ),
    ],
)
def test_where_the_head_cannot_take_the_loss_a_sentence_says_why(make, reason):
    assert reason in lm_head.supports_loss_in_head(make())


ADAPTED = {
    "lora": dict(LORA),
    "lora and a trained head": dict(LORA, modules_to_save=["lm_head"]),
    "tied": None,
}


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *ADAPTED])
def test_the_head_takes_the_loss_with_the_numbers_of_the_plain_path(kind):
    if kind in ADAPTED:
        model = tiny.causal_lm(tie_word_embeddings=kind == "tied")
        model = adapters.add_adapter(model, peft.LoraConfig(**ADAPTED[kind])) if ADAPTED[kind] else model
    else:
        model = tiny.causal_lm(kind)
    assert lm_head.supports_loss_in_head(model) is None
    ids, labels = batch()
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=mask).logits
    expected = cross_entropy(logits, labels, num_items=13)
    expected.backward()
    wanted = gradients(model)
    with lm_head.loss_in_head(model, labels, chunk_size=5):
        loss, correct, entropy = model(input_ids=ids, attention_mask=mask).logits
        (loss / 13).backward()
    assert_close(loss / 13, expected, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model), wanted)
    targets = shift_labels(labels)
    kept = targets != -100
    assert kept.sum() == 13
    assert correct == (logits.argmax(-1) == targets)[kept].sum()
    assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy()[kept].sum().detach())
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)  # the head is itself again


def test_the_head_takes_labels_that_are_aligned_already():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with lm_head.loss_in_head(model, labels) as _, torch.no_grad():
        expected = model(input_ids=ids).logits
    with lm_head.loss_in_head(model, shift_labels(labels), shifted=True, return_stats=False), torch.no_grad():
        assert_close(model(input_ids=ids).logits, expected[:1])


def test_label_smoothing_reaches_the_head():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with torch.no_grad():
        expected = cross_entropy(model(input_ids=ids).logits, labels, num_items=1, label_smoothing=0.1)
        with lm_head.loss_in_head(model, labels, label_smoothing=0.1):
            assert_close(model(input_ids=ids).logits[0], expected)


def test_the_head_is_itself_again_after_an_error():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with contextlib.suppress(KeyError), lm_head.loss_in_head(model, labels):
        raise KeyError
    assert model(input_ids=ids).logits.shape == (2, 9, 384)


def test_labels_of_another_length_are_refused():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with lm_head.loss_in_head(model, labels[:, :5]), pytest.raises(ValueError, match="must be the shape of labels"):
        model(input_ids=ids)


@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_the_head_gives_log_probabilities_with_any_gradient(arch):
    model, (ids, labels) = tiny.causal_lm(arch), batch()
    targets = shift_labels(labels)
    kept, upstream = targets != -100, torch.randn(2, 9)
    logits = model(input_ids=ids).logits
    expected = selective_log_softmax(logits / 0.7, targets.clamp(min=0)) * kept
    (expected.exp() * kept * upstream).sum().backward()
    wanted = gradients(model)
    with lm_head.logps_in_head(model, labels, temperature=0.7, stats=("entropy",)):
        logps, entropy = model(input_ids=ids).logits
    (logps.exp() * kept * upstream).sum().backward()
    assert_close(logps, expected, rtol=1e-5, atol=1e-6)
    assert_close(entropy, (torch.distributions.Categorical(logits=logits / 0.7).entropy() * kept).detach())
    assert_same_gradients(gradients(model), wanted)


def test_virtual_tokens_of_prompt_tuning_carry_no_label():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, (ids, labels) = adapters.add_adapter(tiny.causal_lm(), config), batch()
    logits = model(input_ids=ids).logits
    expected = cross_entropy(logits[:, 3:], labels, num_items=1)
    assert_loss_and_gradients_in_head(model, ids, labels, expected)
    with lm_head.logps_in_head(model, labels), torch.no_grad():
        assert_close(model(input_ids=ids).logits.sum(), -expected.detach())


def test_bfloat16_heads_are_found_and_take_the_loss():
    model, (ids, labels) = tiny.causal_lm().to(torch.bfloat16), batch()
    assert lm_head.find_head(model)[0] is not None
    with torch.no_grad():
        expected = cross_entropy(model(input_ids=ids).logits, labels, num_items=1)
        with lm_head.loss_in_head(model, labels):
            assert_close(model(input_ids=ids).logits[0], expected, rtol=1e-5, atol=0)


@pytest.fixture
def one_process_group(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch is built without distributed")
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_the_head_takes_the_loss_through_ddp_and_fsdp(wrapper, one_process_group):
    from torch.distributed.fsdp import fully_shard

    model, (ids, labels) = tiny.causal_lm(), batch()
    expected = cross_entropy(model(input_ids=ids).logits, labels, num_items=1)
    expected.backward()
    wanted = gradients(model)
    if wrapper == "ddp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        for module in (
            *model.model.layers,
            model.lm_head,
            model,
        ):  # the head is freed after forward, and gathered again
            fully_shard(module)
        wrapped = model
    assert lm_head.supports_loss_in_head(wrapped) is None
    with lm_head.loss_in_head(wrapped, labels):
        loss = wrapped(input_ids=ids).logits[0]
    with lm_head.logps_in_head(wrapped, labels):
        logps = wrapped(input_ids=ids).logits
    for total in (loss, -logps.sum()):
        assert_close(total.cpu(), expected)  # with a GPU, fully_shard moves the model there
        total.backward()
        found = {name: getattr(g, "full_tensor", lambda g=g: g)().cpu() for name, g in gradients(model).items()}
        assert_same_gradients(found, wanted)


# ----------------------------------------------------------------------------------------- a teacher and a student


@pytest.mark.parametrize(("student", "teacher"), [("Qwen3", "Llama"), ("Mistral", "Gemma2"), ("Gemma2", "Cohere")])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_a_divergence_in_the_head_is_that_of_whole_logits(student, teacher, beta):
    options = {"Gemma2": {"final_logit_softcapping": 2.0, "hidden_size": 48}, "Cohere": {"logit_scale": 0.5}}
    student, teacher = (special_arch(name, **options.get(name, {})) for name in (student, teacher))
    student.train()
    ids = torch.randint(4, 96, (3, 9))
    labels = ids.masked_fill(torch.rand(3, 9) < 0.4, -100)
    at = labels != -100
    with torch.no_grad(), lm_head.states_in_head(teacher, labels) as found:
        teacher(input_ids=ids)
    with torch.no_grad():
        expected_teacher = (teacher(input_ids=ids).logits[at] / 0.8).log_softmax(-1)
    own = (student(input_ids=ids).logits[at] / 0.8).log_softmax(-1)
    expected = divergence_terms(own, expected_teacher, beta).sum()
    with lm_head.divergence_in_head(student, labels, found[0], Measure(beta, 0.8), chunk_size=5):
        loss, entropy = student(input_ids=ids).logits
    assert_close(loss, expected, rtol=1e-4, atol=1e-5)
    assert_close(entropy, -(own.exp() * own).sum().detach(), rtol=1e-4, atol=1e-4)
    loss.backward()
    ours = gradients(student)
    expected.backward()
    for name, gradient in gradients(student).items():
        assert (ours[name] - gradient).norm() <= 1e-3 * gradient.norm() + 1e-6, name
