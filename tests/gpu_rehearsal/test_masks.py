"""Padding masks of models of transformers on an emulated GPU: no wait, and the outputs of the CPU."""

import pytest
import torch

from posttrain.core.data.pipeline import to_device
from posttrain.lm.attention.padding_masks import announce_masks
from posttrain.rl.generation.decoding import DecoderStep
from tests import tiny, versions
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")

IDS = torch.arange(24).reshape(2, 12).mul(7).remainder(300) + 4
FULL = torch.ones(2, 12, dtype=torch.long)
RIGHT, LEFT = FULL.clone(), FULL.clone()
RIGHT[1, 7:] = 0
LEFT[0, :4] = 0

MODELS = {
    "qwen3": lambda: tiny.causal_lm(),
    "eager": lambda: tiny.causal_lm(attn_implementation="eager"),
    "sliding": lambda: tiny.causal_lm("mistral", sliding_window=4),
    "bert": lambda: tiny.classifier(),
    "t5": lambda: tiny.seq2seq_lm(use_cache=False),
}


def batch(model, mask):
    inputs = {"input_ids": IDS, "attention_mask": mask}
    if model.config.is_encoder_decoder:  # of one shape, and not alike
        inputs |= {"decoder_input_ids": IDS.flip(0), "decoder_attention_mask": RIGHT if mask is FULL else FULL}
    return inputs


def logits(model, inputs):
    options = {} if model.config.model_type in ("bert", "t5") else {"use_cache": False}
    return model(**inputs, **options).logits


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_those_of_the_cpu_without_a_wait(name):
    model = MODELS[name]().eval()
    inputs = [batch(model, mask) for mask in (FULL, RIGHT, LEFT)]
    with torch.no_grad():
        expected = [logits(model, one) for one in inputs]
        with EmulatedCuda() as gpu:
            model.to("cuda")
            announce_masks(model)
            announce_masks(model)  # a second time adds nothing
            sent = [to_device(one, "cuda", non_blocking=True) for one in inputs]
            gpu.waits.clear()
            found = [logits(model, one) for one in sent]
            # That of transformers 5.17 itself waits for eager attention's mask.
            assert not gpu.waits or (name == "eager" and not versions.IS_CURRENT), [
                wait.stack[:4] for wait in gpu.waits
            ]
            for one, other, mask in zip(found, expected, (FULL, RIGHT, LEFT), strict=True):
                one = one.cpu()
                if other.ndim == 3 and name != "t5":  # what padding gives is nobody's
                    one, other = one[mask.bool()], other[mask.bool()]
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_masks_that_the_host_does_not_know_are_looked_into():
    model = tiny.causal_lm().eval()
    with torch.no_grad():
        expected = logits(model, batch(model, RIGHT))[RIGHT.bool()]
        with EmulatedCuda() as gpu:
            model.to("cuda")
            announce_masks(model)
            sent = to_device(batch(model, FULL), "cuda", non_blocking=True)
            logits(model, sent)
            computed = sent | {"attention_mask": sent["attention_mask"] * RIGHT.to("cuda")}
            gpu.waits.clear()
            one = logits(model, computed).cpu()[RIGHT.bool()]
            assert [wait.kind for wait in gpu.waits].count("read a scalar") == 2
            sent["attention_mask"].mul_(RIGHT.to("cuda"))  # in place, so that the host's copy is out of date
            other = logits(model, sent).cpu()[RIGHT.bool()]
    torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(other, expected, rtol=1e-4, atol=1e-5)


def test_a_forward_that_failed_leaves_nothing_behind():
    from posttrain.lm.attention.padding_masks import _KNOWN

    def fails(module, args):
        raise RuntimeError("no memory left")

    model = tiny.causal_lm().eval()
    with EmulatedCuda():
        model.to("cuda")
        announce_masks(model)
        sent = to_device(batch(model, FULL), "cuda", non_blocking=True)
        handle = model.register_forward_pre_hook(fails)
        with pytest.raises(RuntimeError, match="no memory left"):
            logits(model, sent)
        handle.remove()
        logits(model, sent)
        assert _KNOWN.get() == ()


def test_the_hooks_do_not_keep_a_model_from_the_fast_step_of_generation():
    model = tiny.causal_lm()
    announce_masks(model)
    assert DecoderStep.of(model) is not None
    model.model.layers[0].mlp.register_forward_hook(lambda *args: None)
    assert DecoderStep.of(model) is None
