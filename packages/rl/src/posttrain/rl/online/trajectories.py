"""Samples as the trajectories that a run stores, see `posttrain.lm.generate.trajectories`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from posttrain.core.errors import ConfigError
from posttrain.core.evaluation.eval_loop import eval_mode
from posttrain.lm.generate.trajectories import FINISHED, Trajectory
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.samples import Sample


def stored(
    samples: Sequence[Sample], scores: Scores, advantages: torch.Tensor, step: int, tokenizer: Any
) -> list[Trajectory]:
    """A trajectory for each sample, with its share of `scores` and `advantages`, (n,) of these and perhaps of more;
    `step` learns from them.
    """
    totals = scores.totals.tolist()
    found = []
    for i, sample in enumerate(samples):
        given = scores.turns[i].values() if scores.turns else ()
        one = {
            "step": step,
            "rollout": sample.rollout,
            "sample": sample.place,
            "prompt": sample.prompt,
            "completion": sample.completion,
            "rewards": {n: _known(r) for n, r in zip(scores.names, scores.rewards[i].tolist(), strict=True)},
            "reward": _known(totals[i]),
            "advantage": advantages[i].item(),
            "ending": sample.ending or (FINISHED if sample.finished else "length"),
            "turns": sample.num_turns,
            "tokens": sample.num_chosen,
            "sequences": [_sequence(each, tokenizer) for each in sample.sequences],
        }
        if of_turns := [turns.turns for turns in given]:
            known = ([value for value in rewards if value is not None] for rewards in zip(*of_turns, strict=True))
            one["turn_rewards"] = [sum(rewards) if rewards else None for rewards in known]
        found.append(one)
    return found


def replayed(trainer: Any, one: Trajectory) -> str:
    """What the loss of `trainer`, with its weights of now, reads of each token of a stored trajectory, and the loss:
    the ratio is to the log-probabilities of then, the advantage that of the whole trajectory. Raises ConfigError where
    the loss reads what trajectories do not hold.
    """
    shows_image = any(trainer.sampler.image_token_id in each["prompt_ids"] for each in one["sequences"])
    besides = "the images of its row" if shows_image else trainer.reads_besides
    if besides := besides or ("the entropies of its rollout" if trainer.top_entropy_quantile < 1 else ""):
        problem = f"the loss of {type(trainer).__name__} reads {besides}, which trajectories do not hold"
        raise ConfigError("rerun --trajectory", [problem])
    first, *others = [
        Sample(
            {},
            one["prompt"],
            each["prompt_ids"],
            each["ids"],
            finished=one["ending"] == FINISHED,
            learn=list(map(bool, each["learn"])),
            logps=each["logps"] and [math.nan if logp is None else logp for logp in each["logps"]],
        )
        for each in one["sequences"]
    ]
    maker, samples = trainer.rollout_maker, [first, *others]
    rollout = maker.of([replace(first, others=tuple(others))])
    (now,) = maker.logps_of(trainer.model, rollout)
    before = (
        now if rollout.sampling_logps is None else rollout.sampling_logps.where(rollout.sampling_logps.isfinite(), now)
    )
    advantages = rollout.of_completions(torch.tensor([one["advantage"]]))
    rollout = trainer.complete_rollout(replace(rollout, advantages=advantages, old_logps=before), samples)
    (inputs,) = map(trainer.prepare_inputs, maker.parts_of(rollout))
    with eval_mode(trainer.model), torch.no_grad(), trainer.compute_loss_context_manager():
        loss = trainer.compute_loss(trainer.model, inputs, num_items_in_batch=trainer.count_items(inputs))
    lines = ["sequence  token      learn  log-probability       of then       ratio  text"]
    for row, each in enumerate(one["sequences"]):
        columns = each["ids"], rollout.loss_mask[row].tolist(), now[row].tolist(), before[row].tolist(), each["tokens"]
        for token, learns, new, old, text in zip(*columns, strict=False):  # tensors are padded
            ratio = math.exp(new - old)
            lines.append(f"{row:8}  {token:5}  {int(learns):9}  {new:15.5f}  {old:12.5f}  {ratio:10.5f}  {text!r}")
    return "\n".join([*lines, f"advantage {one['advantage']:.6g}, loss {loss.item():.6g}"])


def _sequence(sample: Sample, tokenizer: Any) -> dict[str, Any]:
    return {
        "prompt": tokenizer.decode(sample.prompt_ids),
        "prompt_ids": sample.prompt_ids,
        "ids": sample.ids,
        "tokens": tokenizer.batch_decode([[token] for token in sample.ids]),
        "learn": [int(chosen) for chosen in sample.learn or [True] * len(sample.ids)],
        "logps": None if sample.logps is None else [_known(round(logp, 5)) for logp in sample.logps],
        "versions": sample.versions,
    }


def _known(value: float) -> float | None:
    return None if math.isnan(value) else value
