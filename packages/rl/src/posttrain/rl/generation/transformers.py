"""Generates with the model's own ``generate``: slow, but works for every model that transformers can generate with."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from posttrain.core.models.wrapping import PretrainedModel, base_model, evaluating, replaced, unwrap
from posttrain.lm.images.image_features import features_once
from posttrain.rl.generation.protocol import Completions, Sampling
from posttrain.rl.generation.sampling import (
    check_logps,
    cut,
    ends_with_stop,
    is_float32,
    rope_limit,
    sample,
    stop_window,
    uniforms,
)

if TYPE_CHECKING:
    from transformers import GenerationConfig

    from posttrain.rl.samples.images import RolloutImages


CHANGE_NO_LOGITS = ("cache_implementation", "cache_config", "use_cache", "disable_compile", "compile_config")
"""Fields of `transformers.GenerationConfig` that say how logits are computed, and do not change them."""


class TransformersGenerator:
    """Calls ``model.generate`` with tokens drawn by our sampler, from one seed for each completion.

    Prompts of different lengths are padded on the left, if a trial shows that `model` continues them as alone; if not,
    those of one length are written together.

    Args:
        tokenizer: decodes completions to search them for stop strings; its padding token is used.
        generation_kwargs: further fields of `transformers.GenerationConfig`; they override ours. With ``num_beams``
            above 1, ``generate`` does beam sampling: no seeds and no log-probabilities.
    """

    shares_weights = True

    def __init__(self, tokenizer: Any, generation_kwargs: dict[str, Any] | None = None) -> None:
        self.tokenizer, self.kwargs = tokenizer, dict(generation_kwargs or {})
        self.model: PretrainedModel | None = None

    def sync_weights(self, model: nn.Module) -> None:
        """Generate with `model` itself, so there is nothing to copy."""
        self.model = unwrap(model)

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int] | None = None,
        images: RolloutImages | None = None,
    ) -> Completions:
        """See `Generator.generate`. `images`: those of the prompts."""
        if seeds is None:
            seeds = torch.randint(2**31, (len(prompts) * n,)).tolist()
        if (model := self.model) is None:
            raise RuntimeError("There is no model yet: call sync_weights before generate.")
        length = lambda row: len(prompts[row // n])  # noqa: E731
        order = sorted(range(len(prompts) * n), key=length)
        groups = [list(rows) for _, rows in itertools.groupby(order, key=length)]
        if len(groups) > 1 and self._reads_padding(model):
            groups = [list(range(len(order)))]
        done: dict[int, tuple[list[int], list[float] | None, bool]] = {}
        for rows in groups:
            done |= zip(rows, self._write(model, prompts, rows, n, sampling, seeds, images), strict=True)
        ids, logps, finished = zip(*(done[row] for row in range(len(done))), strict=True)
        known = [row for row in logps if row is not None]
        check_logps(known)
        are_known = len(known) == len(ids)
        is_exact = are_known and is_float32(model) and rope_limit(model) == math.inf
        return Completions([*ids], known if are_known else None, [*finished], is_exact)

    def _write(
        self,
        model: PretrainedModel,
        prompts: Sequence[Sequence[int]],
        rows: Sequence[int],
        n: int,
        sampling: Sampling,
        seeds: Sequence[int],
        images: RolloutImages | None = None,
    ) -> list[tuple[list[int], list[float] | None, bool]]:
        """Those of the `n` completions of each prompt with the numbers `rows`: ids, log-probabilities, finished."""
        device = next(model.parameters()).device
        texts = [list(prompts[row // n]) for row in rows]
        width, pad = max(map(len, texts)), self.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(row)) + row for row in texts], device=device)
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in texts], device=device)
        numbers = uniforms([seeds[row] for row in rows], sampling.max_new_tokens).to(device, torch.float32)
        drawing = _Drawing(sampling, numbers, mask, width)
        inputs = {"input_ids": ids, "attention_mask": mask}
        more: dict[str, Any] = {}
        if images is not None:
            more = images.inputs({name: own.cpu() for name, own in inputs.items()}, [row // n for row in rows])
            inputs |= {name: tensor.to(device) for name, tensor in more["image_inputs"].items()}
        processed = not self.kwargs.keys() <= {*CHANGE_NO_LOGITS}
        raw = base_model(model).register_forward_hook(drawing.look) if processed else contextlib.nullcontext()
        with evaluating(model), raw, features_once(model, more.get("image_copies"), inputs) as shown:
            output = self._generate(model, shown, sampling, drawing)
        completions, finished = cut(output[:, width:].tolist(), sampling, self.tokenizer)
        return list(zip(completions, drawing.logps_of(completions), finished, strict=True))

    def _reads_padding(self, model: PretrainedModel) -> bool:
        """Whether a prompt that is padded on the left is continued as alone. Tried once for each model."""
        if has_own_generate(base_model(model)):
            return True  # which returns no log-probabilities
        if model not in _READ_PADDING:
            size, greedy = base_model(model).config.get_text_config().vocab_size, Sampling(3, temperature=0)
            some = [[(7 * i + 3) % size for i in range(9)], [(5 * i + 2) % size for i in range(4)]]
            limit = 1e-4 if is_float32(model) else 5e-2
            try:
                padded, alone = (self._write(model, some, rows, 1, greedy, [0, 0])[-1] for rows in ((0, 1), (1,)))
                gaps = [abs(a - b) for a, b in zip(padded[1] or (), alone[1] or (), strict=True)]
                _READ_PADDING[model] = padded[0] == alone[0] and max(gaps, default=0.0) < limit
            except Exception:  # any model may fail here, and a failure in earnest is raised without padding
                _READ_PADDING[model] = False
        return _READ_PADDING[model]

    def _generate(
        self, model: PretrainedModel, inputs: Mapping[str, torch.Tensor], sampling: Sampling, drawing: _Drawing
    ) -> torch.Tensor:
        from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

        beams = self.kwargs.get("num_beams", 1) > 1
        drawn = _drawing_options(sampling) | self.kwargs if beams else self.kwargs | {"do_sample": False}
        config = GenerationConfig(**{"use_cache": True} | drawn | _ending_options(sampling, self.tokenizer))
        width, stop = inputs["input_ids"].shape[1], sampling.stop

        def ends(ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            tails = ids[:, width:][:, -stop_window(stop) :].tolist()
            return torch.tensor([ends_with_stop(self.tokenizer, tail, stop) for tail in tails], device=ids.device)

        with replaced(base_model(model), "generation_config", GenerationConfig()):  # its fields would fill in ours
            return model.generate(
                **inputs,
                generation_config=config,
                logits_processor=LogitsProcessorList([] if beams else [drawing]),
                stopping_criteria=StoppingCriteriaList([ends] if stop else []),
                synced_gpus=False,  # the weights are here: processes need not write in step
            )


_READ_PADDING: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def generation_config(sampling: Sampling, tokenizer: Any, more: dict[str, Any]) -> GenerationConfig:
    """`sampling` in the words of transformers, with `more` fields, which override."""
    from transformers import GenerationConfig

    options = _drawing_options(sampling) | _ending_options(sampling, tokenizer)
    if len(sampling.eos_token_ids) == 1:
        (options["eos_token_id"],) = sampling.eos_token_ids
    return GenerationConfig(**options | more)


def has_own_generate(base: PretrainedModel) -> bool:
    """Whether a model below all adapters overrides the ``generate`` of transformers."""
    return getattr(base.generate, "__module__", "") != "transformers.generation.utils"


def _ending_options(sampling: Sampling, tokenizer: Any) -> dict[str, Any]:
    """The options that say where a completion ends, and what is behind it."""
    ends = list(sampling.eos_token_ids) or None
    return {"max_new_tokens": sampling.max_new_tokens, "eos_token_id": ends, "pad_token_id": tokenizer.pad_token_id}


def _drawing_options(sampling: Sampling) -> dict[str, Any]:
    """The options with which `generate` itself samples as `sampling` sets."""
    if sampling.temperature == 0:
        return {"do_sample": False, "repetition_penalty": sampling.repetition_penalty}
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {"do_sample": True} | {name: vars(sampling)[name] for name in names}


class _Drawing:
    """A logits processor that draws the next token of each row itself and leaves `generate` no other choice."""

    def __init__(self, sampling: Sampling, numbers: torch.Tensor, mask: torch.Tensor, width: int) -> None:
        self.sampling, self.numbers, self.mask, self.width = sampling, numbers, mask, width
        self.logps: list[torch.Tensor] = []
        self.raw: torch.Tensor | None = None  # logits as the model gave them, where other processors come before this

    def look(self, module: nn.Module, args: Any, output: Any) -> None:
        """A hook behind the model's forward. A processor may call the model again, which is not looked at."""
        self.raw = output.logits[:, -1] if self.raw is None else self.raw

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        step = input_ids.shape[1] - self.width
        seen = None
        if self.sampling.repetition_penalty != 1:
            real = nn.functional.pad(self.mask.to(scores.dtype), (0, step), value=1)
            seen = torch.zeros_like(scores).scatter_add_(1, input_ids, real) > 0
        tokens, logps = sample(scores, self.numbers[:, step], self.sampling, seen)
        if self.raw is not None:
            raw, self.raw = self.raw.float() / (self.sampling.temperature or 1), None
            logps = raw.gather(1, tokens.unsqueeze(1)).squeeze(1) - raw.logsumexp(-1)
        self.logps.append(logps)
        return torch.full_like(scores, -torch.inf).scatter_(1, tokens.unsqueeze(1), 0.0)

    def logps_of(self, completions: list[list[int]]) -> Sequence[list[float] | None]:
        """The log-probabilities of the sampled tokens; None of each if `generate` did not use our sampler."""
        if len(self.logps) < max(map(len, completions)):
            return [None] * len(completions)
        columns = torch.stack(self.logps, dim=1).tolist()
        return [row[: len(ids)] for row, ids in zip(columns, completions, strict=True)]
