"""The kernels of a decoding step: what torch's operations give.

Without a GPU, Triton's interpreter runs them: TRITON_INTERPRET=1, as `make kernels` has it.
"""

import os

import pytest
import torch

pytest.importorskip("triton")

if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("needs a CUDA device, or TRITON_INTERPRET=1", allow_module_level=True)

from posttrain.core.data import accelerator
from posttrain.rl.generation.block import FixedBlock
from posttrain.rl.generation.decoding import DecoderStep, Decoding
from tests import tiny

DTYPES = [torch.float32, torch.float16]
if torch.cuda.is_available():
    DTYPES.append(torch.bfloat16)  # whose products Triton's interpreter takes for those of whole numbers


@pytest.mark.parametrize(("groups", "share", "size"), [(2, 2, 16), (1, 3, 20), (3, 1, 64)])
@pytest.mark.parametrize("lengths", [(70, 70), (5, 90, 33)], ids=["equal", "ragged"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_attends_as_by_torchs_operations(dtype, lengths, groups, share, size, device, monkeypatch):
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr(accelerator, "has_kernels", lambda tensor, answer=has_kernels: answer)
        generator = torch.Generator().manual_seed(0)

        def numbers(*shape, generator=generator):
            return torch.randn(*shape, generator=generator).to(device, dtype)

        block = FixedBlock(lengths, 2, torch.device(device), max_new=200)
        block.store(0, *(numbers(1, groups, sum(lengths), size) for _ in range(2)))
        for step in range(70):
            rows = block.num_rows
            mixed = numbers(rows, groups * (share + 2), size)  # as a decoder's product gives them
            parts = mixed.split((groups * share, groups, groups), 1)
            found.append(block.attend(0, *parts, size**-0.5, None).float().cpu())
            block.advance()
            if step == 3:
                block.keep([0, 2, 3])
            if step == 66:
                block.keep([1, 2])
    half = len(found) // 2
    for expected, one in zip(found[:half], found[half:], strict=True):
        assert one.shape == expected.shape
        assert (one - expected).norm() <= (1e-5 if dtype == torch.float32 else 1e-2) * expected.norm()


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_step_gives_the_logits_of_torchs_operations(dtype, arch, device, monkeypatch):
    model = tiny.causal_lm(arch).to(device, dtype).eval()
    found = []
    for has_kernels in (False, True):
        monkeypatch.setattr(accelerator, "has_kernels", lambda tensor, answer=has_kernels: answer)
        step, decoding = DecoderStep.of(model), Decoding(torch.device(device), is_fixed=True)
        block = FixedBlock([3, 5], 2, torch.device(device))
        config = model.config
        shape = 1, config.num_key_value_heads, 8, config.head_dim
        for layer in range(config.num_hidden_layers):
            generator = torch.Generator().manual_seed(layer)
            block.store(layer, *(torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2)))
        decoding.blocks = [block]
        with torch.no_grad():
            for token in range(4):
                tokens = torch.arange(4, device=device) + 4 * token
                found.append(decoding.next_logits(model, step, tokens, block.positions).float().cpu())
                block.advance()
    for expected, one in zip(found[:4], found[4:], strict=True):
        assert (one - expected).norm() <= (1e-5 if dtype == torch.float32 else 2e-2) * expected.norm()
