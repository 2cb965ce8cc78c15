"""Weights on their way to an engine: names that it knows, adapters merged into copies, and the model left as it is."""

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from posttrain.rl.generation.weights import Weights
from tests import tiny
from tests.distributed import jobs


def adapted(model, config, scale=0.1, seed=0):
    from peft import get_peft_model

    made = get_peft_model(model, config, adapter_name="mine")
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.requires_grad:
                parameter.add_(scale * torch.randn_like(parameter))
    return made.eval()


def lora(**options):
    from peft import LoraConfig

    return LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"]} | options)


def kinds():
    from peft import IA3Config, VeraConfig

    return {
        "lora": (tiny.causal_lm, lora()),
        "dora of embedding": (tiny.causal_lm, lora(target_modules=["o_proj", "embed_tokens"], use_dora=True)),
        "head trained whole": (tiny.causal_lm, lora(modules_to_save=["lm_head"])),
        "single tokens": (tiny.causal_lm, lora(trainable_token_indices=[3, 4])),
        "single tokens, tied": (
            lambda: tiny.causal_lm(tie_word_embeddings=True),
            lora(trainable_token_indices=[3, 4]),
        ),
        "ia3": (tiny.causal_lm, IA3Config(target_modules=["v_proj", "down_proj"], feedforward_modules=["down_proj"])),
        "vera": (tiny.causal_lm, VeraConfig(r=4, target_modules=["q_proj"])),
        "experts": (
            tiny.mixture_of_experts,
            lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ),
    }


@pytest.mark.parametrize("kind", kinds())
def test_what_is_sent_is_the_model_with_its_adapter_under_the_names_of_the_model(kind, tmp_path):
    make, config = kinds()[kind]
    plain = make()
    plain.save_pretrained(tmp_path)
    names = [name for name, _ in Weights(plain)]
    model = adapted(plain, config)
    ids = torch.arange(2, 26).view(2, 12)
    expected, without = model(ids).logits, make()(ids).logits
    weights = Weights(model)
    sent = dict(weights)
    assert list(sent) == names and len(weights) == len(names)
    assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in sent.items()] == weights.facts
    save_file({name: weight.contiguous() for name, weight in sent.items()}, tmp_path / "model.safetensors")
    engine = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="float32").eval()
    torch.testing.assert_close(engine(ids).logits, expected, atol=1e-5, rtol=0)
    assert (expected - without).abs().max() > 1e-3


def test_a_thousand_syncs_of_a_lora_in_bfloat16_that_moves_leave_no_drift():
    """Each sends the base with the adapter as it is then, rounded once; the base keeps its bits, and an adapter that is
    back where it was gives the weights that it gave at first.
    """
    model = adapted(tiny.causal_lm().bfloat16(), lora(trainable_token_indices=[5]), scale=3.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    first, values = {name: weight.clone() for name, weight in Weights(model)}, [one.clone() for one in trained]
    layer, name = model.get_base_model().model.layers[0].self_attn.q_proj, "model.layers.0.self_attn.q_proj.weight"
    for number in range(1_000):
        with torch.no_grad():
            for parameter, value in zip(trained, values, strict=True):
                parameter.copy_(value * (1 + 0.3 * (1 + number % 7)))
        sent = dict(Weights(model))
        if number % 100 == 0:
            a, b = layer.lora_A["mine"].weight.float(), layer.lora_B["mine"].weight.float()
            merged = layer.base_layer.weight.float() + layer.scaling["mine"] * (b @ a)
            assert torch.equal(sent[name], merged.bfloat16()) and not torch.equal(sent[name], first[name])
    with torch.no_grad():
        for parameter, value in zip(trained, values, strict=True):
            parameter.copy_(value)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    for name, weight in Weights(model):
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, first[name]), name


def test_an_engine_that_stops_in_the_middle_leaves_the_model_as_it_was():
    model = adapted(tiny.causal_lm(), lora())
    ids = torch.arange(2, 14).view(1, 12)
    before = model(ids).logits
    stream = iter(Weights(model))
    for _ in range(5):
        next(stream)
    assert torch.equal(model(ids).logits, before)  # while it waits, and not only when it is done
    stream.close()
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_an_adapter_on_one_of_two_tied_weights_is_refused(module):
    model = adapted(tiny.causal_lm(tie_word_embeddings=True), lora(target_modules=["q_proj", module]))
    with pytest.raises(ValueError, match="embed_tokens.weight and lm_head.weight are one weight"):
        Weights(model)


def test_experts_are_sent_one_by_one_as_a_checkpoint_holds_them(tmp_path):
    from safetensors.torch import load_file

    model = tiny.mixture_of_experts()
    model.save_pretrained(tmp_path)
    saved, weights = load_file(tmp_path / "model.safetensors"), Weights(model)
    sent = dict(weights)
    assert sent.keys() == saved.keys() and len(sent) == len(weights) == 45  # 25 parameters
    assert all(torch.equal(weight, saved[name]) for name, weight in sent.items())
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in sent
    assert [(name, weight.dtype, tuple(weight.shape)) for name, weight in sent.items()] == weights.facts


@pytest.mark.long
def test_weights_in_pieces_are_put_together_one_at_a_time(tmp_path):
    jobs.do(2, [["pieces", "stream_weights", {"out": str(tmp_path), "fsdp": "full_shard"}]], tmp_path)
    found = jobs.result(tmp_path, "pieces")
    assert found["equal"] == [True, True]
    assert found["still_in_pieces"] and found["all"] > 10 and found["alive"] <= 2  # one, and the one before it
