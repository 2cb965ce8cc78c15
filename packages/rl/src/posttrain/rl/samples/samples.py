"""Samples, from a prompt to a scored completion, and the rollout made of them. Both are values that never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from typing import Any

import torch

from posttrain.core.errors import DataError
from posttrain.lm.attention.router_replay import OWN, ROUTES
from posttrain.lm.images.image_positions import ImagePositions
from posttrain.lm.images.vision import Shown
from posttrain.rl.generation.protocol import Sampling
from posttrain.rl.policy.logprobs import lay_out, lay_out_values
from posttrain.rl.samples.images import RolloutImages
from posttrain.rl.samples.prompts import PromptCodec


@dataclass(frozen=True)
class Sample:
    """A prompt and the completion of it, of one or several turns; without tokens until the first turn is generated.

    Nothing changes a sample: what happens to it makes another one, by `dataclasses.replace`.

    Attributes:
        row: of the dataset. seed: of its random numbers. prompt: from the row or from an environment.
        prompt_ids: tokens of the prompt. ids: tokens after it, tool answers included.
        logps: of the engine, for each of `ids`; None if unknown. is_exact: see `Completions`.
        learn: for each of `ids`, whether the policy chose it; None: all.
        versions: for each of `ids`, the optimizer step of the weights that wrote it; None in synchronous training.
        routes: the experts with which prompt and completion were read, as in `Completions`; None if unknown.
        finished: whether the completion ended by itself. ending: what else has ended an episode; "": not known.
        completion: decoded as text or messages.
        rollout, place: the number of its batch of prompts in the run, and its own in that.
        row_number: of its row in the dataset, where a curriculum counts them.
        is_evaluated: whether it is of an evaluation, and not learned from.
        shown: the images of the prompt; None for a model of text alone.
        others: the further sequences of its trajectory, where an agent had several conversations.
        turns: of each of its turns, the number in its trajectory and the number of its tokens; None: 0, 1, ..., each
            up to a token that the policy did not choose.
        extra: further columns for reward functions. environment: the object with its tools.
    """

    row: dict[str, Any]
    prompt: Any
    prompt_ids: list[int]
    ids: list[int] = field(default_factory=list)
    logps: list[float] | None = None
    is_exact: bool = False
    learn: list[bool] | None = None
    versions: list[int] | None = None
    routes: torch.Tensor | None = None
    finished: bool = False
    ending: str = ""
    completion: Any = ""
    extra: dict[str, Any] = field(default_factory=dict)
    environment: Any = None
    seed: int = 0
    rollout: int = 0
    place: int = 0
    row_number: int | None = None
    is_evaluated: bool = False
    shown: Shown | None = None
    others: tuple[Sample, ...] = ()
    turns: tuple[tuple[int, int], ...] | None = None

    @property
    def name(self) -> str:
        """As `posttrain trajectories` names it."""
        return f"{self.rollout}/{self.place}"

    @property
    def turn_spans(self) -> list[tuple[int, tuple[int, int]]]:
        """Of each of its turns of the policy, the number in its trajectory, and where it begins and ends in `ids`."""
        learn = self.learn or [True] * len(self.ids)
        if self.turns is None:
            edges = [place for place, (one, next_) in enumerate(pairwise([False, *learn, False])) if one != next_]
            return list(enumerate(zip(edges[::2], edges[1::2], strict=True)))
        found, stop = [], 0
        for number, size in self.turns:  # nothing may stand between two of them
            start = learn.index(True, stop)
            stop = start + size
            found.append((number, (start, stop)))
        return found

    @property
    def num_turns(self) -> int:
        """Turns of the policy in its trajectory."""
        return sum(len(one.turn_spans) for one in self.sequences)

    @property
    def sequences(self) -> list[Sample]:
        """The sequences of tokens of its trajectory: this one and the others."""
        return [self, *self.others]

    @property
    def num_chosen(self) -> int:
        """Tokens of its trajectory that the policy chose."""
        return sum(len(one.ids) if one.learn is None else sum(one.learn) for one in self.sequences)

    @property
    def num_read(self) -> int:
        """Tokens of prompt and completion that the policy has read: all but the last."""
        return len(self.prompt_ids) + len(self.ids) - 1

    def extended(
        self,
        ids: Sequence[int],
        logps: Sequence[float] | None,
        chosen: bool,
        versions: Sequence[int] | None = None,
        routes: torch.Tensor | None = None,
    ) -> Sample:
        """This sample with more tokens behind its completion, which the policy chose or not. With `routes` everything
        up to them was read; those of tokens that were read before stay as they were.
        """
        before = self.versions or []  # tokens of others have the version of the last one before them
        versions = None if self.versions is None else [*before, *(versions or before[-1:] * len(ids))]
        learn = [True] * len(self.ids) if self.learn is None else self.learn
        known = self.logps is not None and logps is not None
        if self.routes is not None and routes is not None:
            routes = torch.cat([self.routes, routes[len(self.routes) :]])
        return replace(
            self,
            ids=[*self.ids, *ids],
            logps=[*(self.logps or ()), *(logps or ())] if known else None,
            learn=[*learn, *[chosen] * len(ids)],
            versions=versions,
            routes=self.routes if routes is None else routes,
        )


def copied(value: Any) -> Any:
    """`value` of a row, with copies of the dicts and lists in it for user code, which may change them."""
    if isinstance(value, dict):
        return {name: copied(one) for name, one in value.items()}
    return [copied(one) for one in value] if isinstance(value, list) else value


def lengths_of(samples: Sequence[Sample]) -> tuple[torch.Tensor, torch.Tensor]:
    """((N,) tokens of the prompt, (N,) tokens that the policy chose) of each trajectory."""
    prompts, chosen = torch.tensor([[len(one.prompt_ids), one.num_chosen] for one in samples]).view(-1, 2).unbind(1)
    return prompts, chosen


def sequences(samples: Sequence[Sample]) -> list[Sample]:
    """The sequences of all trajectories, one after the other."""
    return [one for sample in samples for one in sample.sequences]


def alike(samples: Sequence[Sample]) -> list[tuple[int, list[int]]]:
    """Adjacent samples of one prompt, of equal number together: (how many of each prompt, the places of all)."""
    found: dict[int, list[int]] = {}
    prompts = [(sample.prompt_ids, id(sample.shown)) for sample in samples]
    for _, run in groupby(range(len(samples)), prompts.__getitem__):
        places = [*run]
        found.setdefault(len(places), []).extend(places)
    return [*found.items()]


def complete_in_room(
    samples: Sequence[Sample],
    sampling: Sampling,
    context: int | None,
    complete: Callable[[list[Sample], Sampling], list[Sample]],
) -> list[Sample]:
    """`samples` completed as `sampling` says, with fewer tokens near the end of the `context`; `complete` is called
    once for all samples with the same room.
    """
    by_room: dict[int, list[int]] = {}
    for place, sample in enumerate(samples):
        by_room.setdefault(room_for(sample, sampling.max_new_tokens, context), []).append(place)
    found = list(samples)
    for limit, places in by_room.items():
        done = complete([samples[place] for place in places], replace(sampling, max_new_tokens=limit))
        for place, sample in zip(places, done, strict=True):
            found[place] = sample
    return found


def room_for(sample: Sample, most: int, context: int | None) -> int:
    """Tokens that a completion of `sample` may have: `most`, or fewer near the end of the `context`; a DataError where
    none.
    """
    if (room := room_left(sample, most, context)) < 1:
        raise DataError(
            f"A prompt has {len(sample.prompt_ids)} tokens, and the model reads at most {context} of prompt and "
            f"completion together, so there is no room for a completion. It begins: {str(sample.prompt)[:80]!r}. "
            "Drop or shorten such prompts."
        )
    return room


def room_left(sample: Sample, max_tokens: int, context: int | None) -> int:
    """Tokens that may still be added to a completion."""
    left = max_tokens - len(sample.ids)
    return left if context is None else min(left, context - len(sample.prompt_ids) - len(sample.ids))


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
                logps=None if output["logprobs"] is None else list(map(_best_logp, output["logprobs"][i])),
                learn=None if output.get("env_mask") is None else [bool(m) for m in output["env_mask"][i]],
                completion=codec.decode(sample.prompt, ids, prompt_ids),
                finished=ids[-1] in ends,
                extra=sample.extra | extra,
            )
        )
    return found


def _best_logp(value: Any) -> float:
    value = value[0] if isinstance(value, (list, tuple)) else value  # a top-k list, best first
    return float("nan") if value is None else float(value)


#: Fields of a rollout with a value of each token, which may also be one of each completion; and others of its rows.
OF_TOKENS: tuple[str, ...] = ("advantages", "old_logps", "ref_logps", "sampling_logps", "correction", "entropy_mask")
OF_TOKENS += ("teacher_ids", "teacher_logps", "teacher_places", "groups")
OF_ROWS = ("teacher_rows", "teacher_lengths", "teacher_groups")


@dataclass(frozen=True)
class Rollout:
    """N scored completions of this process, those of a prompt adjacent. Immutable; on the CPU.

    A completion is a sequence of tokens. A trajectory may have several, which are adjacent.

    Attributes:
        prompt_ids, prompt_lengths: (N, P) padded on the right, and (N,).
        completion_ids, completion_lengths: (N, C) padded on the right, and (N,).
        loss_mask: (N, C) bool, the trained tokens.
        advantages: (N,), or (N, C) for advantages of tokens.
        old_logps: (N, C) of the sampling policy, as training computes them; None while that is the current policy.
        ref_logps: (N, C) of the reference policy. sampling_logps: (N, C) of the engine, NaN where unknown.
        correction: (N, C) or (N, 1), see `policy_losses.engine_correction`.
        entropy_mask: (N, C) bool, the tokens at which the policy was most uncertain.
        teacher_ids, teacher_logps: (N, C, K), tokens that a teacher behind a server finds probable, and their
            log-probabilities, -inf where it names fewer.
        teacher_rows, teacher_lengths: (N, L) and (N,), prompt and completion in the tokens of a teacher with others.
        teacher_places: (N, C), the token of `teacher_rows` that begins where this one does; -1 for none.
        groups, teacher_groups: (N, C) and (N, L), which tokens of the completion and of `teacher_rows` cover the same
            text: the number of the text in the row, from 0; -1 for those that are not compared, in `groups` -2 for
            those without a loss.
        versions: (N, C) the optimizer step of the weights that wrote each token; None in synchronous training.
        routes: (N, at most P + C, layers, k) the experts of a mixture with which each token of prompt and completion,
            one behind the other, was read in sampling, -1 for none; None unless they are replayed.
        images: of the prompts; None for a model of text alone.
        trajectories: (N,) the number of the trajectory of each completion, from 0; None where each is one.
    """

    prompt_ids: torch.Tensor
    prompt_lengths: torch.Tensor
    completion_ids: torch.Tensor
    completion_lengths: torch.Tensor
    loss_mask: torch.Tensor
    advantages: torch.Tensor | None = None
    old_logps: torch.Tensor | None = None
    ref_logps: torch.Tensor | None = None
    sampling_logps: torch.Tensor | None = None
    correction: torch.Tensor | None = None
    entropy_mask: torch.Tensor | None = None
    teacher_ids: torch.Tensor | None = None
    teacher_logps: torch.Tensor | None = None
    teacher_rows: torch.Tensor | None = None
    teacher_lengths: torch.Tensor | None = None
    teacher_places: torch.Tensor | None = None
    groups: torch.Tensor | None = None
    teacher_groups: torch.Tensor | None = None
    versions: torch.Tensor | None = None
    routes: torch.Tensor | None = None
    images: RolloutImages | None = None
    trajectories: torch.Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], mask_truncated: bool = False, image_token_id: int | None = None) -> Rollout:
        """The tokens of `samples`, each a trajectory, not yet scored; those that were cut do not count if
        `mask_truncated`. `image_token_id` stands for a feature of an image.
        """
        numbers = [number for number, sample in enumerate(samples) for _ in sample.sequences]
        one_each = len(numbers) == len(samples)
        samples = sequences(samples)
        prompts = [torch.tensor(sample.prompt_ids) for sample in samples]
        completions = [torch.tensor(sample.ids) for sample in samples]
        learn = [torch.tensor(sample.learn or [True] * len(sample.ids)) for sample in samples]
        if mask_truncated:
            learn = [mask & sample.finished for mask, sample in zip(learn, samples, strict=True)]
        logps = None
        if all(sample.logps is not None for sample in samples):
            logps = _stack([torch.tensor(sample.logps, dtype=torch.float32) for sample in samples], 0.0)
        versions = None
        if all(sample.versions is not None for sample in samples):
            versions = _stack([torch.tensor(sample.versions) for sample in samples], 0)
        routes = [sample.routes for sample in samples if sample.routes is not None]
        shown, images = [sample.shown for sample in samples if sample.shown is not None], None
        if len(shown) == len(samples):
            images = RolloutImages.of(shown, [sample.prompt_ids for sample in samples], image_token_id)
        return cls(
            prompt_ids=_stack(prompts, 0),
            prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
            completion_ids=_stack(completions, 0),
            completion_lengths=torch.tensor([len(completion) for completion in completions]),
            loss_mask=_stack(learn, False),
            sampling_logps=logps,
            versions=versions,
            routes=_stack(routes, OWN) if len(routes) == len(samples) > 0 else None,
            images=images,
            trajectories=None if one_each else torch.tensor(numbers),
        )

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def num_trajectories(self) -> int:
        """Trajectories that the completions are of."""
        return len(self.prompt_lengths) if self.trajectories is None else int(self.trajectories[-1]) + 1

    def of_completions(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of trajectories, one for each completion."""
        return values if self.trajectories is None else values[self.trajectories]

    def of_trajectories(self, values: torch.Tensor) -> torch.Tensor:
        """(N,) `values` of completions, summed over each trajectory."""
        if self.trajectories is None:
            return values
        return values.new_zeros(self.num_trajectories).index_add(0, self.trajectories, values)

    def micro_batches(
        self,
        size: int,
        share: bool = False,
        pad_token_id: int = 0,
        multiple: int | None = None,
        positions: ImagePositions | None = None,
    ) -> list[dict[str, Any]]:
        """The inputs of `compute_loss`, `size` trajectories each; see `lay_out` for `share` and `multiple`.

        Args:
            positions: numbers the positions of prompts with images, where they are shared and the model has several
                axes of them.

        They hold the output of `lay_out`, the fields of this class from `advantages` on that are not None, and
        ``tokens_per_row``, the mean number of trained tokens per trajectory of the rollout. Where trajectories have
        several completions, ``trajectories``, (N,), says which are of the same one, and ``first_sequences``, (T,),
        where each of them begins.
        """
        number = self.num_trajectories
        whole = {"tokens_per_row": self.loss_mask.sum() / number}
        found = []
        for start, stop in pairwise(self.begins([*range(0, number, size), number])):
            rows, width = range(start, stop), int(self.completion_lengths[start:stop].max())
            prompts = [self.prompt_ids[i, : self.prompt_lengths[i]] for i in rows]
            completions = [self.completion_ids[i, : self.completion_lengths[i]] for i in rows]
            seen = self.images.shared_layout(rows, prompts, positions) if self.images is not None and share else {}
            mask = self.loss_mask[start:stop, :width]
            part = lay_out(prompts, completions, mask, share, pad_token_id, multiple, **seen) | whole
            if self.images is not None:
                part |= self.images.inputs(part, rows)
            if self.routes is not None:
                routes = self.routes[start:stop]
                part[ROUTES] = lay_out_values(routes, prompts, completions, share, part["input_ids"], OWN)
            for name in (*OF_TOKENS, *OF_ROWS):
                if (values := vars(self)[name]) is not None:
                    values = values[start:stop]
                    part[name] = values[:, :width] if name in OF_TOKENS and values.ndim > 1 else values
            if self.trajectories is not None:
                numbers = self.trajectories[start:stop] - self.trajectories[start]
                firsts = torch.searchsorted(numbers, torch.arange(int(numbers[-1]) + 1))
                part |= {"trajectories": numbers, "first_sequences": firsts}
            found.append(part)
        return found

    def begins(self, trajectories: list[int]) -> list[int]:
        """The completions with which `trajectories` begin; of one more than there are, where the last one ends."""
        if self.trajectories is None:
            return trajectories
        return torch.searchsorted(self.trajectories, torch.tensor(trajectories)).tolist()

    def part(self, start: int, stop: int) -> Rollout:
        """The trajectories `start` to `stop`, of text."""
        first, last = self.begins([start, stop])
        found = Rollout(**{name: values[first:last] for name, values in self.state_dict().items()})
        return found if found.trajectories is None else replace(found, trajectories=found.trajectories - start)

    @classmethod
    def joined(cls, parts: Sequence[Rollout]) -> Rollout:
        """The trajectories of all `parts`, of text and with the same fields."""
        states, numbers, before = [part.state_dict() for part in parts], [], 0
        for part, state in zip(parts, states, strict=True):
            own = state.pop("trajectories", None)
            numbers.append(before + (torch.arange(len(part)) if own is None else own))
            before += part.num_trajectories
        found = cls(**{name: _joined([state[name] for state in states], name) for name in states[0]})
        return found if before == len(found) else replace(found, trajectories=torch.cat(numbers))

    def for_teacher(self, rows: list[torch.Tensor], **marks: Any) -> Rollout:
        """This rollout with `rows` as what a teacher reads of each completion, and the `marks` of their tokens."""
        lengths = torch.tensor([len(row) for row in rows])
        return replace(self, teacher_rows=_stack(rows, 0), teacher_lengths=lengths, **marks)

    def state_dict(self) -> dict[str, Any]:
        """Every tensor by name, for a checkpoint."""
        state = {name: value for name, value in vars(self).items() if value is not None}
        return state if self.images is None else state | {"images": vars(self.images)}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Rollout:
        """The inverse of `state_dict`."""
        images = {"images": RolloutImages(**state["images"])} if "images" in state else {}
        return cls(**{**state, **images})


def _stack(rows: list[torch.Tensor], value: Any) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)


def _joined(parts: list[torch.Tensor], name: str) -> Any:
    if parts[0].ndim == 1:
        return torch.cat(parts)
    return _stack([row for part in parts for row in part], OWN if name == "routes" else 0)
