"""Weights for engines that have a copy of the model, and the test that they have the right ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from posttrain.core.models import base_model, is_peft_model, unwrap
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.generation.transformers import evaluating

LARGEST_GAP = 0.1
"""Mean difference of log-probabilities after a sync from which an engine is taken to have other weights."""
PROBE = Sampling(8, temperature=2.0)
"""How the tokens of the test are drawn: at a temperature that tells log-probabilities before it from those after it."""

Named = list[tuple[str, torch.Tensor]]
Written = tuple[list[int], list[float] | None, bool]
"""Tokens of a completion, their log-probabilities, and whether it ended by itself."""


def named_weights(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names, as the model below all adapters has them, and whole weights, with adapters merged into them.

    Raises:
        ValueError: a weight is quantized, and cannot be sent as the engine would read it.
    """
    merges = is_peft_model(model)
    tuner = getattr(getattr(unwrap(model), "base_model", None), "prefix", "lora_") if merges else "lora_"
    if merges:
        unwrap(model).merge_adapter()
    try:
        for name, weight in base_model(model).named_parameters():
            if tuner in name or "original_module" in name:
                continue
            if not weight.is_floating_point():
                raise ValueError(
                    f"{name} is quantized ({weight.dtype}), and vLLM takes whole weights. Load the model without a "
                    "quantization_config, or leave use_vllm out."
                )
            weight = weight.detach()
            weight = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            name = name.replace(".base_layer", "").replace("modules_to_save.default.", "")
            yield name, weight.clone() if merges else weight
    finally:
        if merges:
            unwrap(model).unmerge_adapter()


@torch.no_grad()
def check(
    model: nn.Module,
    write: Callable[[list[int]], Written],
    scaled: bool | None,
    who: str,
    prompt: list[int] | None = None,
) -> bool:
    """Let an engine write a few tokens and compare its log-probabilities of them with those of `model`.

    Args:
        write: completes a prompt as `PROBE` says.
        scaled: whether the engine divides logits by the temperature first; None: whatever comes nearer.
        who: the engine, for the message.
        prompt: what is completed; None: some tokens.

    Returns:
        `scaled`, or what was found out.

    Raises:
        ValueError: they differ by `LARGEST_GAP` or more, on average.
    """
    size = base_model(model).config.vocab_size
    prompt = prompt or [(37 * place + 5) % size for place in range(8)]
    ids, logps, _ = write(prompt)
    if logps is None:
        raise ValueError(
            f"{who} tells no log-probabilities, so nobody knows whether it has the weights that are trained."
        )
    gaps = {way: _gap(model, prompt, ids, logps, PROBE.temperature if way else 1.0) for way in (True, False)}
    found = gaps[True] <= gaps[False] if scaled is None else scaled
    if not gaps[found] < LARGEST_GAP:
        raise ValueError(
            f"After the weights were sent, log-probabilities of {who} differ from the trainer's by {gaps[found]:.2g} on "
            "average: it has other weights, or another model. Serve the model that is trained."
        )
    return found


def _gap(model: nn.Module, prompt: list[int], ids: list[int], logps: Sequence[float], temperature: float) -> float:
    device = next(model.parameters()).device
    with evaluating(model):
        logits = model(input_ids=torch.tensor([prompt + ids], device=device)).logits[0, len(prompt) - 1 : -1]
    mine = (
        (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(ids, device=device)[:, None]).squeeze(1)
    )
    gaps = (mine.cpu() - torch.tensor(logps, dtype=torch.float32)).abs()
    return float(gaps.nanmean()) if len(ids) else math.inf
