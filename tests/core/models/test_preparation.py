"""Models are loaded, adapted and changed as asked, and a head that takes the loss gives the numbers of the plain path."""

from __future__ import annotations

import contextlib
import math
import sys
import types

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from posttrain.core.config import validate
from posttrain.core.errors import ConfigError
from posttrain.core.losses import language_modeling
from posttrain.core.losses.language_modeling import (
    count_targets,
    cross_entropy,
    linear_cross_entropy,
    selective_log_softmax,
    shift_labels,
)
from posttrain.core.models import preparation
from tests import tiny

peft = pytest.importorskip("peft")
ARCHITECTURES = ["qwen3", "llama", "mistral", "gemma", "gpt2"]
LORA = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}


@pytest.fixture(autouse=True)
def same_numbers_every_time():
    torch.manual_seed(0)


def batch(vocab_size=384):
    """(2, 9) input ids, and labels without the first half of one row."""
    ids = torch.randint(4, vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


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


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys() and actual
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name


# ---- arguments ----


class Arguments(preparation.ModelSideArguments):
    def __init__(self, **values):
        super().__init__(**values)
        validate(self)


@pytest.mark.parametrize("name", ["activation_checkpointing", "gradient_checkpointing"])
def test_both_names_of_checkpointing_mean_the_same(name, recwarn):
    arguments = Arguments(**{name: True, f"{name}_kwargs": '{"use_reentrant": true}'})
    assert arguments.activation_checkpointing is True and arguments.gradient_checkpointing is True
    assert arguments.activation_checkpointing_kwargs == arguments.gradient_checkpointing_kwargs
    assert arguments.gradient_checkpointing_kwargs == {"use_reentrant": True}
    assert not recwarn.list


def test_checkpointing_is_off_by_default_and_no_longer_undecided():
    assert Arguments().activation_checkpointing is False and Arguments().gradient_checkpointing is False


def test_the_older_name_turns_off_what_a_config_turns_on_by_default():
    from dataclasses import dataclass

    @dataclass
    class OnByDefault(preparation.ModelSideArguments):
        activation_checkpointing: bool | None = True

    arguments = OnByDefault(gradient_checkpointing=False)
    validate(arguments)
    assert arguments.activation_checkpointing is False


def test_naming_a_compile_backend_or_mode_compiles():
    assert Arguments(torch_compile_backend="eager").torch_compile
    assert Arguments(torch_compile_mode="reduce-overhead").torch_compile
    assert not Arguments().torch_compile


def test_bad_model_arguments_are_reported_together():
    with pytest.raises(ConfigError, match=r"(?s)neftune_noise_alpha=-1.*activation_checkpointing_kwargs='reentrant'"):
        Arguments(neftune_noise_alpha=-1, activation_checkpointing_kwargs="reentrant")


# ---- ModelConfig ----


def test_model_config_describes_an_adapter_only_when_asked():
    assert preparation.ModelConfig().peft_config() is None
    config = preparation.ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"], use_rslora=True)
    adapter = config.peft_config()
    assert (adapter.r, adapter.lora_alpha, adapter.lora_dropout) == (4, 32, 0.05)
    assert adapter.target_modules == "all-linear" and adapter.use_rslora and adapter.task_type == "CAUSAL_LM"


def test_model_config_describes_quantization_only_when_asked():
    assert preparation.ModelConfig().quantization_config() is None
    four = preparation.ModelConfig(use_peft=True, load_in_4bit=True, dtype="bfloat16", use_bnb_nested_quant=True)
    four = four.quantization_config()
    assert four.load_in_4bit and four.bnb_4bit_quant_type == "nf4" and four.bnb_4bit_use_double_quant
    assert four.bnb_4bit_compute_dtype == torch.bfloat16
    assert preparation.ModelConfig(use_peft=True, load_in_8bit=True).quantization_config().load_in_8bit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"load_in_4bit": True, "load_in_8bit": True, "use_peft": True}, "cannot both hold"),
        ({"load_in_4bit": True}, "set use_peft=True"),
        ({"dtype": "bf16"}, "dtype='bf16' is not one of auto, float32"),
        ({"lora_rank": 8}, "unknown argument 'lora_rank', did you mean 'lora_r"),
    ],
)
def test_model_config_refuses_what_cannot_work(arguments, message):
    with pytest.raises(ConfigError, match=message):
        preparation.ModelConfig(**arguments)


# ---- loading ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm().to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [
        (None, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
    ],
)
def test_a_model_is_loaded_in_the_dtype_asked_for_and_in_float32_otherwise(saved, kwargs, dtype):
    given = dict(kwargs or {})
    assert preparation.load_causal_lm(saved, kwargs).dtype == dtype
    assert (kwargs or {}) == given


def test_another_auto_class_can_be_named(saved):
    model = preparation.load_causal_lm(str(saved), {"num_labels": 1}, auto_class="AutoModelForSequenceClassification")
    assert model.config.num_labels == 1


def test_an_unknown_dtype_is_named(saved):
    with pytest.raises(ValueError, match="dtype='bfloat17' is not a type of torch, did you mean 'bfloat16'"):
        preparation.load_causal_lm(saved, {"dtype": "bfloat17"})


def test_quantization_given_twice_is_refused(saved):
    with pytest.raises(ValueError, match="given twice"):
        preparation.load_causal_lm(saved, {"quantization_config": object()}, quantization_config=object())


@pytest.mark.parametrize("load", [preparation.load_causal_lm, preparation.load_tokenizer])
def test_a_missing_folder_is_named(load):
    with pytest.raises(FileNotFoundError, match=r"folder './no/such/model' does not exist"):
        load("./no/such/model")


def test_a_name_the_hub_does_not_give_is_named(monkeypatch):
    import transformers

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nand more lines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", offline)
    with pytest.raises(FileNotFoundError, match=r"'some/model' is not a folder here .* couldn't connect .* offline"):
        preparation.load_causal_lm("some/model")


def test_a_tokenizer_is_found_beside_the_model(saved):
    model = preparation.add_adapter(preparation.load_causal_lm(saved), peft.LoraConfig(**LORA))
    assert preparation.load_tokenizer(model).get_vocab() == preparation.load_tokenizer(saved).get_vocab()


def test_a_model_from_nowhere_asks_for_its_tokenizer():
    with pytest.raises(ValueError, match="Pass processing_class"):
        preparation.load_tokenizer(tiny.causal_lm())


# ---- special tokens ----


def test_a_pad_token_is_found_in_the_vocabulary():
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    size = len(tokenizer)
    assert "'<|pad|>'" in preparation.ensure_pad_token(tokenizer)
    assert tokenizer.pad_token == "<|pad|>" and tokenizer.pad_token != tokenizer.eos_token and len(tokenizer) == size
    assert preparation.ensure_pad_token(tokenizer) is None


def test_eos_pads_where_nothing_else_can(monkeypatch):
    monkeypatch.setattr(preparation, "PAD_CANDIDATES", ("<|endoftext|>",))
    tokenizer = tiny.tokenizer()
    tokenizer.pad_token = None
    assert "eos token '<|endoftext|>'" in preparation.ensure_pad_token(tokenizer)
    tokenizer.pad_token = tokenizer.eos_token = None
    monkeypatch.setattr(preparation, "PAD_CANDIDATES", ())
    with pytest.raises(ValueError, match="Set tokenizer.pad_token"):
        preparation.ensure_pad_token(tokenizer)


def test_the_tokenizers_ids_reach_the_configs():
    model, tokenizer = tiny.causal_lm(pad_token_id=7, bos_token_id=5), tiny.tokenizer()
    model.generation_config.eos_token_id = [8, 9]
    assert preparation.align_special_tokens(model, tokenizer) == {"pad_token_id": 0, "eos_token_id": 1}
    assert (model.config.pad_token_id, model.generation_config.pad_token_id) == (0, 0)
    assert model.generation_config.eos_token_id == [1, 8, 9]
    assert model.config.bos_token_id == 5  # the tokenizer has none, which says nothing about the model
    assert preparation.align_special_tokens(model, tokenizer) == {}


def test_a_module_without_a_config_has_nothing_to_align():
    assert preparation.align_special_tokens(nn.Linear(1, 1), tiny.tokenizer()) == {}
    assert preparation.align_special_tokens(tiny.causal_lm(), None) == {}


# ---- wrappers and adapters ----


def test_wrappers_come_off_and_adapters_stay():
    model = tiny.causal_lm()
    assert (
        preparation.unwrap(model) is model
        and preparation.base_model(model) is model
        and not preparation.is_peft_model(model)
    )
    adapted = preparation.add_adapter(model, peft.LoraConfig(**LORA))
    for wrapped in (adapted, nn.DataParallel(adapted), torch.compile(adapted), torch.compile(nn.DataParallel(adapted))):
        assert preparation.unwrap(wrapped) is adapted and preparation.is_peft_model(wrapped)
        assert preparation.base_model(wrapped) is model


def test_a_users_own_attribute_named_module_is_no_wrapper():
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    assert preparation.unwrap(model) is model


def test_an_adapter_trains_alone():
    model = preparation.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    ids, labels = batch()
    model(input_ids=ids, labels=labels).loss.backward()
    trained = gradients(model)
    assert trained and all("lora_" in name for name in trained)


def test_a_second_adapter_is_refused_and_so_is_what_is_none():
    model = preparation.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    with pytest.raises(ValueError, match="merge_and_unload"):
        preparation.add_adapter(model, peft.LoraConfig(**LORA))
    with pytest.raises(TypeError, match="must be a peft.PeftConfig"):
        preparation.add_adapter(tiny.causal_lm(), {"r": 8})


def test_a_quantized_base_needs_an_adapter_which_is_bfloat16():
    model = tiny.causal_lm()
    preparation.check_trainable(model)
    model.is_loaded_in_4bit = True
    with pytest.raises(ValueError, match="Pass peft_config"):
        preparation.check_trainable(model)
    model.hf_quantizer = types.SimpleNamespace(
        is_qat_trainable=True
    )  # as torchao's, for training that knows of the rounding
    preparation.check_trainable(model)
    del model.hf_quantizer
    adapted = preparation.add_adapter(model, peft.LoraConfig(**LORA))
    preparation.check_trainable(adapted)
    assert preparation.is_quantized(adapted)
    assert {p.dtype for p in adapted.parameters() if p.requires_grad} == {torch.bfloat16}
    assert {p.dtype for p in adapted.parameters() if not p.requires_grad} == {torch.float32}


@pytest.mark.parametrize("bits", ["load_in_4bit", "load_in_8bit"])
def test_an_adapter_on_quantized_weights_trains_with_the_loss_in_the_head(bits, tmp_path):
    pytest.importorskip("bitsandbytes")
    tiny.causal_lm(hidden_size=128, intermediate_size=128).save_pretrained(tmp_path)
    config = preparation.ModelConfig(use_peft=True, dtype="bfloat16", **{bits: True})
    base = preparation.load_causal_lm(tmp_path, config.model_init_kwargs(), config.quantization_config())
    assert preparation.is_quantized(base) and type(base.model.layers[0].self_attn.q_proj).__name__.startswith("Linear")
    stored = base.model.layers[0].self_attn.q_proj.weight.data.clone()
    model = preparation.add_adapter(base, config.peft_config()).train()
    preparation.enable_gradient_checkpointing(model)
    assert preparation.supports_loss_in_head(model) is None
    assert torch.equal(base.model.layers[0].self_attn.q_proj.base_layer.weight.data, stored)  # asking changed no layout
    ids, labels = batch()
    with preparation.loss_in_head(model, labels), torch.autocast("cpu", torch.bfloat16):
        loss = model(input_ids=ids).logits[0]
    loss.backward()
    assert len(gradients(model)) == sum(p.requires_grad for p in model.parameters()) > 0


# ---- gradient checkpointing, noise, dropout, kernels ----


@pytest.mark.parametrize("kwargs", [None, {"use_reentrant": True}, {"use_reentrant": False}, {"every_n_layers": 2}])
@pytest.mark.parametrize("adapter", [False, True])
def test_checkpointing_changes_no_gradient(adapter, kwargs):
    ids, labels = batch()
    model = tiny.causal_lm()
    model = preparation.add_adapter(model, peft.LoraConfig(**LORA)) if adapter else model
    model.train()
    model(input_ids=ids, labels=labels).loss.backward()
    expected = gradients(model)
    given = dict(kwargs or {})
    preparation.enable_gradient_checkpointing(model, kwargs)
    assert (
        preparation.base_model(model).is_activation_checkpointing and not preparation.base_model(model).config.use_cache
    )
    assert (kwargs or {}) == given
    model(input_ids=ids, labels=labels).loss.backward()
    assert_same_gradients(gradients(model), expected)


def test_an_adapter_on_a_checkpointed_model_trains_too():
    model = tiny.causal_lm()
    preparation.enable_gradient_checkpointing(model, {"use_reentrant": True})
    adapted = preparation.add_adapter(model, peft.LoraConfig(**LORA)).train()
    ids, labels = batch()
    adapted(input_ids=ids, labels=labels).loss.backward()
    assert len(gradients(adapted)) == sum(p.requires_grad for p in adapted.parameters())


def test_checkpointing_is_turned_on_on_models_with_only_the_older_method():
    class Older(nn.Module):
        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs):
            self.options = gradient_checkpointing_kwargs

    model = Older()
    preparation.enable_gradient_checkpointing(model)
    assert model.options == {"use_reentrant": False}
    with pytest.raises(ValueError, match="Linear has no gradient_checkpointing_enable"):
        preparation.enable_gradient_checkpointing(nn.Linear(1, 1))


@pytest.mark.parametrize("adapter", [False, True])
def test_neftune_noise_is_bounded_in_training_only_and_gone_afterwards(adapter):
    model = tiny.causal_lm()
    embedding = model.get_input_embeddings()
    model = preparation.add_adapter(model, peft.LoraConfig(**LORA)) if adapter else model
    ids, _ = batch()
    clean, clean_logits = embedding(ids), model.eval()(input_ids=ids).logits
    with preparation.neftune(model, alpha=5.0):
        model.train()
        noise = embedding(ids) - clean
        model.eval()
        assert torch.equal(model(input_ids=ids).logits, clean_logits)
    bound = 5.0 / math.sqrt(9 * 32)
    assert noise.abs().max() <= bound * 1.0001 and noise.abs().max() > 0.9 * bound
    assert noise.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.1)  # of a uniform distribution
    model.train()
    assert torch.equal(embedding(ids), clean)


def test_neftune_leaves_with_its_context_even_after_an_error():
    model = tiny.causal_lm().train()
    with contextlib.suppress(KeyError), preparation.neftune(model, alpha=5.0):
        raise KeyError
    assert not model.get_input_embeddings()._forward_hooks
    with preparation.neftune(model, None):
        assert not model.get_input_embeddings()._forward_hooks


def test_dropout_is_off_everywhere():
    ids, _ = batch()
    dropped = {"resid_pdrop": 0.5, "embd_pdrop": 0.5, "attn_pdrop": 0.5}
    for model in (tiny.causal_lm("gpt2", **dropped), tiny.causal_lm("llama", attention_dropout=0.5)):
        model.train()
        assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
        preparation.disable_dropout(model)
        assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_liger_says_why_it_is_not_applied(monkeypatch):
    for name in ("liger_kernel", "liger_kernel.transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "liger-kernel is not installed" in preparation.apply_liger(tiny.causal_lm())

    applied = []
    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = lambda model, **config: applied.append((model, config))
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    assert "no kernels for 'gpt2'" in preparation.apply_liger(tiny.causal_lm("gpt2"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert "need a GPU" in preparation.apply_liger(tiny.causal_lm())
    assert applied == []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = preparation.add_adapter(tiny.causal_lm(), peft.LoraConfig(**LORA))
    assert preparation.apply_liger(model, {"rope": True}) is None
    assert applied == [(preparation.base_model(model), {"rope": True})]


def test_S048_what_liger_replaces_is_said(monkeypatch, caplog):
    def replace_norms(model, **config):
        for module in model.modules():
            if type(module).__name__ == "Qwen3RMSNorm":
                module.forward = types.MethodType(lambda self, x: x, module)

    kernels = types.ModuleType("liger_kernel.transformers")
    kernels._apply_liger_kernel_to_instance = replace_norms
    patches = types.ModuleType("liger_kernel.transformers.monkey_patch")
    patches.MODEL_TYPE_TO_APPLY_LIGER_FN = {"qwen3": None}
    for module in (types.ModuleType("liger_kernel"), kernels, patches):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    model = tiny.causal_lm()
    norms = sum(type(module).__name__ == "Qwen3RMSNorm" for module in model.modules())
    with caplog.at_level("INFO", "posttrain"):
        assert preparation.apply_liger(model) is None
    assert f"the forward of: Qwen3RMSNorm x {norms}." in caplog.text


# ---- the output head ----


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_head_of_usual_models_is_found(arch):
    model = tiny.causal_lm(arch).train()
    head = preparation.causal_head(model)
    assert head.linear is model.get_output_embeddings() and head.weight is head.linear.weight and head.bias is None
    assert (head.softcap, head.scale) == (None, 1.0)
    assert all(module.training for module in model.modules()) and not head.linear._forward_hooks


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
    head = preparation.causal_head(model)
    assert (head.softcap, head.scale) == (softcap, scale)
    ids, labels = batch(96)
    output = model(input_ids=ids, output_hidden_states=True)
    expected = cross_entropy(output.logits, labels, num_items=1)
    given = {"bias": head.bias, "softcap": head.softcap, "scale": head.scale}
    assert_close(linear_cross_entropy(output.hidden_states[-1], head.weight, shift_labels(labels), **given), expected)
    expected.backward()
    wanted = gradients(model)
    with preparation.loss_in_head(model, labels):
        loss = model(input_ids=ids).logits[0]
    assert_close(loss, expected)
    loss.backward()
    assert_same_gradients(gradients(model), wanted)
    assert torch.equal(model(input_ids=ids).logits, output.logits)


def test_a_model_that_does_more_to_its_logits_is_refused():
    model = tiny.causal_lm()
    plain = model.forward

    def forward(*args, **kwargs):
        output = plain(*args, **kwargs)
        output.logits = output.logits + torch.arange(384) / 10
        return output

    model.forward = forward
    assert preparation.causal_head(model) is None
    assert "in a way that is not known here" in preparation.supports_loss_in_head(model)
    with pytest.raises(ValueError, match="not known here"), preparation.loss_in_head(model, batch()[1]):
        pass


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Linear(2, 2), "names no output embedding"),
        (lambda: preparation.add_adapter(tiny.causal_lm(), peft.LoraConfig(target_modules=["lm_head"])), "not a plain"),
        (lambda: torch.compile(tiny.causal_lm()), "compiled"),
        (lambda: nn.DataParallel(tiny.causal_lm()), "DataParallel"),
        (
            lambda: special_arch("RecurrentGemma", lru_width=32, block_types=["recurrent", "attention"]),
            "caps its logits",
        ),
    ],
)
def test_where_the_head_cannot_take_the_loss_a_sentence_says_why(make, reason):
    assert reason in preparation.supports_loss_in_head(make())


ADAPTED = {
    "lora": dict(LORA),
    "lora and a trained head": dict(LORA, modules_to_save=["lm_head"]),
    "tied": None,
}


@pytest.mark.parametrize("kind", [*ARCHITECTURES, *ADAPTED])
def test_the_head_takes_the_loss_with_the_numbers_of_the_plain_path(kind):
    if kind in ADAPTED:
        model = tiny.causal_lm(tie_word_embeddings=kind == "tied")
        model = preparation.add_adapter(model, peft.LoraConfig(**ADAPTED[kind])) if ADAPTED[kind] else model
    else:
        model = tiny.causal_lm(kind)
    assert preparation.supports_loss_in_head(model) is None
    ids, labels = batch()
    mask = torch.ones_like(ids)
    logits = model(input_ids=ids, attention_mask=mask).logits
    expected = cross_entropy(logits, labels, num_items=13)
    expected.backward()
    wanted = gradients(model)
    with preparation.loss_in_head(model, labels, chunk_size=5):
        loss, correct, entropy = model(input_ids=ids, attention_mask=mask).logits
        (loss / 13).backward()
    assert_close(loss / 13, expected, rtol=1e-5, atol=0)
    assert_same_gradients(gradients(model), wanted)
    targets = shift_labels(labels)
    kept = targets != -100
    assert kept.sum() == count_targets(labels, shifted=False) == 13
    assert correct == (logits.argmax(-1) == targets)[kept].sum()
    assert_close(entropy, torch.distributions.Categorical(logits=logits).entropy()[kept].sum().detach())
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, logits)  # the head is itself again


def test_the_head_takes_labels_that_are_aligned_already():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with preparation.loss_in_head(model, labels) as _, torch.no_grad():
        expected = model(input_ids=ids).logits
    with preparation.loss_in_head(model, shift_labels(labels), shifted=True, return_stats=False), torch.no_grad():
        assert_close(model(input_ids=ids).logits, expected[:1])


def test_label_smoothing_reaches_the_head():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with torch.no_grad():
        expected = cross_entropy(model(input_ids=ids).logits, labels, num_items=1, label_smoothing=0.1)
        with preparation.loss_in_head(model, labels, label_smoothing=0.1):
            assert_close(model(input_ids=ids).logits[0], expected)


def test_the_head_is_itself_again_after_an_error():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with contextlib.suppress(KeyError), preparation.loss_in_head(model, labels):
        raise KeyError
    assert model(input_ids=ids).logits.shape == (2, 9, 384)


def test_labels_of_another_length_are_refused():
    model, (ids, labels) = tiny.causal_lm(), batch()
    with preparation.loss_in_head(model, labels[:, :5]), pytest.raises(ValueError, match="must be the shape of labels"):
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
    with preparation.logps_in_head(model, labels, temperature=0.7, return_entropy=True):
        logps, entropy = model(input_ids=ids).logits
    (logps.exp() * kept * upstream).sum().backward()
    assert_close(logps, expected, rtol=1e-5, atol=1e-6)
    assert_close(entropy, (torch.distributions.Categorical(logits=logits / 0.7).entropy() * kept).detach())
    assert_same_gradients(gradients(model), wanted)


def test_virtual_tokens_of_prompt_tuning_carry_no_label():
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model, (ids, labels) = preparation.add_adapter(tiny.causal_lm(), config), batch()
    logits = model(input_ids=ids).logits
    expected = cross_entropy(logits[:, 3:], labels, num_items=1)
    expected.backward()
    wanted = gradients(model)
    with preparation.loss_in_head(model, labels):
        loss = model(input_ids=ids).logits[0]
    assert_close(loss, expected)
    loss.backward()
    assert_same_gradients(gradients(model), wanted)
    with preparation.logps_in_head(model, labels), torch.no_grad():
        assert_close(model(input_ids=ids).logits.sum(), -expected.detach())


def test_bfloat16_heads_are_found_and_take_the_loss(monkeypatch):
    # The whole logits are rounded to bfloat16, as the head's are where its products are.
    monkeypatch.setattr(language_modeling, "emulates_bfloat16", lambda device_type: False)
    model, (ids, labels) = tiny.causal_lm().to(torch.bfloat16), batch()
    assert preparation.causal_head(model) is not None
    with torch.no_grad():
        expected = cross_entropy(model(input_ids=ids).logits, labels, num_items=1)
        with preparation.loss_in_head(model, labels):
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
    assert preparation.supports_loss_in_head(wrapped) is None
    assert (preparation.causal_head(wrapped) is None) == (
        wrapper == "fsdp2"
    )  # its weight is in pieces between forwards
    with preparation.loss_in_head(wrapped, labels):
        loss = wrapped(input_ids=ids).logits[0]
    with preparation.logps_in_head(wrapped, labels):
        logps = wrapped(input_ids=ids).logits
    for total in (loss, -logps.sum()):
        assert_close(total, expected)
        total.backward()
        found = {name: getattr(g, "full_tensor", lambda g=g: g)() for name, g in gradients(model).items()}
        assert_same_gradients(found, wanted)
