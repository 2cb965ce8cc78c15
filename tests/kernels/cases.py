"""The kernels of a training step that are compiled where it runs, each compiled for a GPU that is not there.

    python -m tests.kernels.cases 90                # all, for an H100: a line of JSON each
    python -m tests.kernels.cases 90 flex-64-window # this one

Triton stands beside the environment (`make kernels`). What torch and flash-attn compile themselves, matrix products
and attention of packed documents in 16 bits among them, is not covered.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from unittest import mock

from tests.kernels.absent_gpu import AbsentGpu


def flex(
    gpu: AbsentGpu, size: int, *, dtype: str = "bfloat16", groups: int = 2, trained: bool = True,
    window: int | None = None, softcap: float | None = None, lengths: tuple[int, ...] = (64, 48), prompt: int = 256,
) -> None:  # fmt: skip
    """Segments' attention on a GPU, forward and backward, with 8 heads of `size`."""
    import torch
    from torch.nn.attention import flex_attention

    from posttrain.lm.attention import varlen_attention
    from posttrain.lm.attention.segments import Segments

    segments = Segments.groups([(prompt, list(lengths))])
    shapes = [(1, heads, segments.num_tokens, size) for heads in (8, groups, groups)]
    tensors = [torch.randn(shape, dtype=getattr(torch, dtype), requires_grad=trained) for shape in shapes]
    compiled = varlen_attention._flex_attention
    compiled.cache_clear()
    with (
        mock.patch.object(flex_attention, "_validate_device", lambda *args: None),  # the CPU has no backward
        mock.patch.object(compiled.__wrapped__, "__defaults__", (gpu.backend,)),
    ):
        out = varlen_attention._on_gpu(*tensors, segments, size**-0.5, window, softcap)
        if trained:
            out.float().sum().backward()


def layers(gpu: AbsentGpu, family: str) -> None:
    """The layers of a small model that ``torch_compile=True`` compiles, in a step in bf16."""
    import torch

    from posttrain.core.models.compiling import compiled
    from tests import tiny

    model = tiny.causal_lm(family).train()
    rows = torch.arange(64).reshape(2, 32)
    with compiled(model, gpu.backend), torch.autocast("cpu", torch.bfloat16):
        model(input_ids=rows, attention_mask=torch.ones_like(rows), labels=rows, use_cache=False).loss.backward()


def liger(gpu: AbsentGpu, family: str) -> None:
    """A step of a small model whose layers ``use_liger_kernel=True`` has replaced, in bf16."""
    import torch

    from posttrain.core.models.liger import apply_liger
    from tests import tiny

    model = tiny.causal_lm(family).to(torch.bfloat16).train()
    with mock.patch.object(torch.accelerator, "is_available", lambda: True):
        assert apply_liger(model) is None
    rows = torch.arange(64).reshape(2, 32)
    model(input_ids=rows).logits.float().sum().backward()


def scores(gpu: AbsentGpu, dtype: str = "bfloat16", softcap: float | None = None) -> None:
    """Losses, statistics and gradients of a tile of logits."""
    import torch

    from posttrain.lm.loss import fused_scores
    from posttrain.lm.loss.language_modeling import TOKEN_STATS

    tile = torch.randn(8, 151_936, dtype=getattr(torch, dtype))
    found, rule = torch.empty(5, 8), {"softcap": softcap, "scale": 1.0, "temperature": 1.0, "smoothing": 0.0}
    labels = torch.zeros(8, dtype=torch.long)
    for with_gradient in (True, False):
        fused_scores.score(tile, labels, found, TOKEN_STATS, **rule, with_gradient=with_gradient)


def decoding(gpu: AbsentGpu, dtype: str = "bfloat16", size: int = 128) -> None:
    """A token of each row: heads that turn, and what they attend to."""
    import torch

    from posttrain.rl.generation import decode_kernels

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=getattr(torch, dtype))

    mixed, turns, weight = numbers(4, 6, size), numbers(4, 1, size), numbers(4, size)
    for one in (weight, None):
        decode_kernels.turn(mixed, 4, one, 1e-6, turns, turns)
    parts = mixed.split((2, 2, 2), 1)
    kept = [tuple(numbers(*shape) for _ in range(2)) for shape in ((2, 2, 300, size), (8, 64, size))]
    places, owners = torch.arange(8).view(4, 2), torch.tensor([0, 0, 1, 1])
    decode_kernels.attend(*parts, *kept, places, owners, torch.tensor([300, 200]), torch.tensor([5]), 0.1)


CASES: dict[str, Callable[[AbsentGpu], None]] = {
    **{f"flex-{size}": partial(flex, size=size) for size in (64, 128, 256)},
    **{f"flex-{size}-window": partial(flex, size=size, window=100) for size in (64, 128, 256)},
    **{f"flex-{size}-softcap": partial(flex, size=size, softcap=50.0) for size in (64, 128, 256)},
    **{f"flex-{size}-float16": partial(flex, size=size, dtype="float16") for size in (64, 128, 256)},
    **{f"flex-{size}-float32": partial(flex, size=size, dtype="float32") for size in (64, 128, 256)},
    "flex-128-window-softcap": partial(flex, size=128, window=100, softcap=50.0),
    "flex-128-no-groups": partial(flex, size=128, groups=8),
    "flex-64-short": partial(flex, size=64, prompt=20, lengths=(8, 6)),  # torch has another kernel below 128 tokens
    "flex-64-short-evaluated": partial(flex, size=64, prompt=20, lengths=(8, 6), trained=False),
    "flex-128-evaluated": partial(flex, size=128, trained=False),
    "scores": scores,
    "scores-softcap-float32": partial(scores, dtype="float32", softcap=30.0),
    **{f"decoding-{size}": partial(decoding, size=size) for size in (64, 128, 256)},
    "decoding-128-float32": partial(decoding, dtype="float32"),
    **{f"layers-{family}": partial(layers, family=family) for family in ("qwen3", "llama", "gemma2")},
    **{f"liger-{family}": partial(liger, family=family) for family in ("qwen3", "llama", "gemma2")},
}


def main() -> None:
    import torch

    number, *names = sys.argv[1:]
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        gpu = AbsentGpu(int(number))
        gpu.install()
        for name in names or CASES:
            before = len(gpu.kernels)
            torch._dynamo.reset()  # which compiles a second shape of the same function for any shape
            try:
                CASES[name](gpu)
            except Exception as error:
                traceback.print_exc()
                what = f"{type(error).__name__}: {error}".replace("\n", " ")[:300]
                print(json.dumps({"case": name, "error": what}), flush=True)
            for kernel in gpu.kernels[before:]:
                print(json.dumps({"case": name, "kernel": asdict(kernel)}), flush=True)


if __name__ == "__main__":
    main()
