"""Completions that a ``rollout_func`` of the user makes, as samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from posttrain.rl.samples.prompts import PromptCodec
from posttrain.rl.samples.samples import Sample


def take_rollout(samples: Sequence[Sample], output: Mapping[str, Any], codec: PromptCodec) -> list[Sample]:
    """`samples` with the output of a ``rollout_func``.

    Args:
        output: ``prompt_ids``, ``completion_ids`` and ``logprobs``, one of each for each sample; ``env_mask``, 0 at
            tokens that the policy did not choose; all other keys go to the reward functions.

    Raises:
        ValueError: a key is missing or has the wrong length.
    """
    needed = ("prompt_ids", "completion_ids", "logprobs")
    if missing := [name for name in needed if name not in output]:
        raise ValueError(f"rollout_func must return {', '.join(needed)} in its dict; {', '.join(missing)} is missing.")
    others = {name: value for name, value in output.items() if name not in (*needed, "env_mask", "completions")}
    for name in (*needed[:2], *(["env_mask"] if output.get("env_mask") is not None else [])):
        if len(output[name]) != len(samples):
            raise ValueError(
                f"rollout_func returned {len(output[name])} of {name} for {len(samples)} prompts; one for each is "
                "needed (a prompt comes num_generations times)."
            )
    found, ends = [], {codec.tokenizer.eos_token_id, codec.tokenizer.pad_token_id}
    for i, sample in enumerate(samples):
        prompt_ids, ids = list(output["prompt_ids"][i]), list(output["completion_ids"][i])
        if not prompt_ids or not ids:
            raise ValueError(
                f"rollout_func returned no tokens for prompt {i}; a prompt and a completion have at least one."
            )
        extra = {
            name: values[i] if isinstance(values, list) and i < len(values) else values
            for name, values in others.items()
        }
        found.append(
            replace(
                sample,
                prompt_ids=prompt_ids,
                ids=ids,
                logps=None if output["logprobs"] is None else _plain_logps(output["logprobs"][i]),
                learn=None if output.get("env_mask") is None else [bool(m) for m in output["env_mask"][i]],
                completion=codec.decode(sample.prompt, ids, prompt_ids),
                finished=ids[-1] in ends,
                extra=sample.extra | extra,
            )
        )
    return found


def _plain_logps(values: Any) -> list[float]:
    first = [value[0] if isinstance(value, (list, tuple)) else value for value in values]  # top-k lists, best first
    return [float("nan") if value is None else float(value) for value in first]
