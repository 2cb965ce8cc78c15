"""Adapters train alone, also on quantized weights."""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.checkpoint import weights
from posttrain.core.errors import CheckpointError, ConfigError
from posttrain.core.models import gradient_checkpointing, trainable
from posttrain.lm.loading import adapters, arguments, loading
from posttrain.lm.loss import lm_head
from tests import tiny, versions
from tests.core.models.gradients import LORA, batch, gradients

peft = pytest.importorskip("peft")


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def test_an_adapter_trains_alone():
    model = adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    ids, labels = batch()
    model(input_ids=ids, labels=labels).loss.backward()
    trained = gradients(model)
    assert trained and all("lora_" in name for name in trained)


@pytest.mark.parametrize(("model", "task"), [("reward_model", "SEQ_CLS"), ("seq2seq_lm", "SEQ_2_SEQ_LM")])
def test_an_adapter_is_for_what_its_model_does(model, task):
    for given in (None, "CAUSAL_LM", task):
        config = peft.LoraConfig(r=2, task_type=given)
        assert adapters.add_adapter(getattr(tiny, model)(), config).peft_config["default"].task_type == task
        assert config.task_type == given
    with pytest.raises(ConfigError, match="'SEQ_CLS' is for classifiers, and the model is a Qwen3ForCausalLM; set"):
        adapters.add_adapter(tiny.causal_lm("qwen3"), peft.LoraConfig(r=2, task_type="SEQ_CLS"))


class Copies(TorchDispatchMode):
    """Counts copies to another type."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.number += func is torch.ops.aten._to_copy.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("more", [{}, {"lora_dropout": 0.2}, {"use_dora": True}], ids=["plain", "dropout", "dora"])
def test_under_autocast_a_layer_reads_its_input_as_it_is_with_the_same_gradients(more):
    ids, labels = batch()
    found = []
    for leaves_casts in (False, True):
        torch.manual_seed(0)
        model = adapters.add_adapter(tiny.causal_lm().to(torch.bfloat16), peft.LoraConfig(**LORA | more))
        if leaves_casts:
            model = adapters.set_trained(model, None, None)
        torch.manual_seed(1)
        with Copies() as copies, torch.autocast("cpu", torch.bfloat16):
            model(input_ids=ids, labels=labels).loss.backward()
        found.append((gradients(model), copies.number))
    (expected, before), (ours, after) = found
    assert all(torch.equal(expected[name], ours[name]) for name in expected)
    assert any(gradient.any() for name, gradient in ours.items() if "lora_A" in name)
    assert after < before if "use_dora" not in more else after == before
    # Without autocast the input is brought to the adapter's type, as before.
    assert torch.isfinite(model(input_ids=ids).logits).all()


def test_a_second_adapter_is_refused_and_so_is_what_is_none():
    model = adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    with pytest.raises(ValueError, match="merge_and_unload"):
        adapters.add_adapter(model, peft.LoraConfig(**LORA | {"r": 3}))
    with pytest.raises(TypeError, match="must be a peft.PeftConfig"):
        adapters.add_adapter(tiny.causal_lm(), {"r": 8})


def test_targets_that_match_nothing_are_refused_with_those_there_are():
    with pytest.raises(ValueError, match="not found in the base model") as caught:
        adapters.add_adapter(tiny.causal_lm(), peft.LoraConfig(target_modules=["c_attn"]))
    [note] = caught.value.__notes__
    assert "down_proj, gate_proj, k_proj, lm_head, o_proj, q_proj, up_proj, v_proj" in note and "all-linear" in note


def test_adapters_of_experts_have_no_dropout_and_it_is_said_what_to_set():
    given = peft.LoraConfig(target_parameters=["mlp.experts.down_proj"], use_dora=True, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="set lora_dropout=0, and leave out use_dora"):
        adapters.check_peft_config(given)  # before a model is loaded
    if not versions.IS_CURRENT:
        return  # the peft of then left experts out
    spread = peft.LoraConfig(target_modules="all-linear", lora_dropout=0.1, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="lora_dropout") as refusal:
        adapters.add_adapter(tiny.mixture_of_experts(), spread)
    assert refusal.value.__notes__ == [adapters.OF_TENSORS]


@pytest.mark.parametrize("config", [peft.LoraConfig(**LORA), None], ids=["equal", "the same"])
def test_the_adapter_that_a_script_has_put_on_itself_is_trained(config):
    given = peft.LoraConfig(**LORA)
    model = peft.get_peft_model(tiny.causal_lm(), given)
    with pytest.warns(UserWarning, match="already has the adapter"):
        assert adapters.add_adapter(model, config or given) is model
    assert list(model.peft_config) == ["default"]


def test_the_folder_of_an_adapter_is_trained_as_the_adapter_that_it_is(tmp_path):
    tiny.causal_lm().save_pretrained(tmp_path / "base")
    ids, _ = batch()
    given = peft.get_peft_model(loading.load_causal_lm(tmp_path / "base"), peft.LoraConfig(**LORA))
    with torch.no_grad():
        for name, parameter in given.named_parameters():
            parameter.add_(torch.randn_like(parameter) if "lora_B" in name else 0)
    given.save_pretrained(tmp_path / "adapter")
    loaded = loading.load_causal_lm(tmp_path / "adapter")
    torch.testing.assert_close(loaded(input_ids=ids).logits, given(input_ids=ids).logits)
    trained = {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}
    assert trained and trained == {name for name, parameter in given.named_parameters() if parameter.requires_grad}
    trainable.check_trainable(loaded)
    with pytest.raises(ValueError, match="would add another"):
        adapters.add_adapter(loaded, peft.LoraConfig(**LORA | {"r": 3}))
    from transformers import AutoModelForCausalLM

    inside = AutoModelForCausalLM.from_pretrained(tmp_path / "adapter")  # transformers puts it into the layers
    with pytest.raises(ValueError, match="folder by name"):
        adapters.add_adapter(inside, peft.LoraConfig(**LORA))
    (tmp_path / "adapter" / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    with pytest.raises(CheckpointError, match="does not name the base"):
        loading.load_causal_lm(tmp_path / "adapter")


def test_what_is_trained_and_not_written_with_the_adapter_is_noticed(tmp_path):
    config = peft.LoraConfig(**LORA, modules_to_save=["lm_head"])
    model = adapters.add_adapter(tiny.causal_lm(), config)
    model.save_pretrained(tmp_path)
    weights.check_adapters(model, tmp_path)
    next(p for name, p in model.named_parameters() if name.endswith("norm.weight")).requires_grad_(True)
    with pytest.raises(CheckpointError, match=r"outside of the adapter: .*norm.weight"):
        weights.check_adapters(model, tmp_path)


def test_a_quantized_base_needs_an_adapter_which_is_bfloat16():
    model = tiny.causal_lm()
    trainable.check_trainable(model)
    model.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="Pass peft_config"):
        trainable.check_trainable(model)
    model.hf_quantizer = types.SimpleNamespace(
        is_qat_trainable=True
    )  # as torchao's, for training that knows of the rounding
    trainable.check_trainable(model)
    del model.hf_quantizer
    adapted = adapters.add_adapter(model, peft.LoraConfig(**LORA))
    trainable.check_trainable(adapted)
    assert trainable.is_quantized(adapted)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_an_adapter_on_quantized_weights_trains_with_the_loss_in_the_head(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny.causal_lm(hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    config = arguments.ModelConfig(use_peft=True, dtype="bfloat16", **{bits: True})
    base = loading.load_causal_lm(tmp_path, config.model_init_kwargs(), config.quantization_config())
    assert trainable.is_quantized(base) and type(base.model.layers[0].self_attn.q_proj).__name__.startswith("Linear")
    stored = base.model.layers[0].self_attn.q_proj.weight.data.clone()
    model = adapters.add_adapter(base, config.peft_config()).train()
    gradient_checkpointing.enable_gradient_checkpointing(model)
    assert lm_head.supports_loss_in_head(model) is None
    assert torch.equal(base.model.layers[0].self_attn.q_proj.base_layer.weight.data, stored)  # asking changed no layout
    ids, labels = (tensor.to(base.device) for tensor in batch())  # a GPU, where there is one
    with lm_head.loss_in_head(model, labels), torch.autocast(base.device.type, torch.bfloat16):
        loss = model(input_ids=ids).logits[0]
    loss.backward()
    assert len(gradients(model)) == sum(p.requires_grad for p in model.parameters()) > 0


@pytest.mark.parametrize("name", ["PromptTuningConfig", "PrefixTuningConfig", "PromptEncoderConfig"])
def test_virtual_tokens_are_there_once_for_each_token_that_is_written(name):
    """transformers 5.24 named the cache anew, by whose name peft 0.21.2 knows what was read."""
    torch.manual_seed(0)
    asked = getattr(peft, name)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = adapters.set_trained(tiny.causal_lm(initializer_range=0.3), asked, None).eval()
    written = prompt = torch.tensor([[5, 6, 7, 8]])
    for _ in range(6):
        logits = model(input_ids=written, attention_mask=torch.ones_like(written), use_cache=False).logits
        written = torch.cat([written, logits[:, -1:].argmax(-1)], 1)
    options = dict(attention_mask=torch.ones_like(prompt), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert model.generate(input_ids=prompt, **options).tolist() == written.tolist()
