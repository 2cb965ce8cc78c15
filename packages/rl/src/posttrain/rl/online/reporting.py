"""Reports the completions of a run: metrics, a table in the terminal, files."""

from __future__ import annotations

import base64
import io
import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from posttrain.core.config import value_of
from posttrain.core.distributed.strategies.base import Distributed
from posttrain.core.files import run_goes_on, write_text
from posttrain.core.logging import terminal
from posttrain.core.logging.metrics import Metrics
from posttrain.core.logging.trackers import show_table
from posttrain.lm.generate import trajectories
from posttrain.lm.generate.samples import append_lines
from posttrain.rl.losses.advantages import equal_groups, standard_deviation, total_rewards
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.trajectories import stored
from posttrain.rl.rewards.scoring import Scores
from posttrain.rl.samples.images import ImagePrompts
from posttrain.rl.samples.samples import Sample, lengths_of

logger = logging.getLogger(__name__)


SQUARES, PROMPTS = "/squares", "/prompts"
"""Behind the name of a metric, the sum of its squares over the prompts of which it is known, and their number."""
STALE_GAP = 0.5
"""Mean difference of log-probabilities from which stale completions are warned of. They differ by design."""


@dataclass(frozen=True)
class Summary:
    """Statistics of the completions of one process; `Summary.join` joins those of all processes.

    Attributes:
        rewards, failed: (N, F), names, weights: see `posttrain.rl.rewards.scoring.Scores`.
        prompt_lengths: (N,) tokens of each prompt. lengths: (N,) sampled tokens of each completion.
        finished: (N,) bool, whether each ended.
        kl: (2, N), the KL of the sampling policy from the reference, summed over trained tokens, and their count; None
            without a reference.
    """

    rewards: torch.Tensor
    failed: torch.Tensor
    prompt_lengths: torch.Tensor
    lengths: torch.Tensor
    finished: torch.Tensor
    kl: torch.Tensor | None = None
    names: Sequence[str] = ()
    weights: torch.Tensor | None = None

    @classmethod
    def of(cls, samples: Sequence[Sample], scores: Scores, kl: torch.Tensor | None = None) -> Summary:
        prompts, lengths = lengths_of(samples)
        finished = torch.tensor([one.finished for one in samples])
        return cls(scores.rewards, scores.failed, prompts, lengths, finished, kl, scores.names, scores.weights)

    @classmethod
    def join(cls, parts: Sequence[Summary], order: torch.Tensor) -> Summary:
        """The completions of all processes: those of `parts` one after the other, taken in this `order`."""
        columns = zip(*((p.rewards, p.failed, p.prompt_lengths, p.lengths, p.finished) for p in parts), strict=True)
        rewards, failed, prompts, lengths, finished = (torch.cat(column)[order] for column in columns)
        kls = [part.kl for part in parts if part.kl is not None]
        kl = torch.cat(kls, 1)[:, order] if kls else None
        return cls(rewards, failed, prompts, lengths, finished, kl, parts[0].names, parts[0].weights)

    def metrics(self, group_size: int) -> dict[str, tuple[float, Any]]:
        """``reward``, ``rewards/<name>/mean``, ``completions/mean_length`` ..., as `Metrics.update` takes them; unknown
        ones are left out. Standard deviations are over all completions.
        """
        total = total_rewards(self.rewards, self.weights)
        lengths, done = self.lengths.float(), self.lengths[self.finished].float()
        found = {
            "completions/mean_length": lengths.mean(),
            "completions/clipped_ratio": 1 - self.finished.float().mean(),
        }
        if self.names:
            found |= {
                "reward": total.nanmean(),
                "reward_std": standard_deviation(total).squeeze(-1),
                "frac_reward_zero_std": equal_groups(total, group_size).float().mean(),
                "rewards/none": total.isnan().float().mean(),
            }
        for column, name in enumerate(self.names):
            values = self.rewards[:, column]
            found[f"rewards/{name}/mean"] = mean = values.nanmean()
            found[f"rewards/{name}/std"] = mean if mean.isnan() else standard_deviation(values).squeeze(-1)
            if self.failed[:, column].any():
                found[f"rewards/{name}/failed"] = self.failed[:, column].float().mean()
        if self.kl is not None:
            found["kl"] = self.kl[0].sum() / self.kl[1].sum().clamp(min=1)
        if len(done):
            found["completions/mean_terminated_length"] = done.mean()
        numbers = {name: value.item() for name, value in found.items()}
        return {name: (value, 1) for name, value in numbers.items() if not math.isnan(value)} | self._extremes()

    def sums(self, group_size: int, threshold: float) -> dict[str, tuple[float, Any]]:
        """(sum, count) of each evaluation metric: rewards, lengths, ``avg@k`` and ``pass@k`` (of the first function's
        rewards from `threshold` on), and what `with_errors` needs of the last two over prompts. As
        `Metrics.update` takes them.
        """
        total, size, names = total_rewards(self.rewards, self.weights), len(self.lengths), self.names
        columns = {"reward": total} if names else {}
        columns |= {f"rewards/{n}/mean": self.rewards[:, i] for i, n in enumerate(names)}
        found = self._extremes()
        found |= {name: (float(values.nansum()), int((~values.isnan()).sum())) for name, values in columns.items()}
        found["completions/mean_length"] = int(self.lengths.sum()), size
        found["completions/clipped_ratio"] = size - int(self.finished.sum()), size
        if len(ended := self.lengths[self.finished]):
            found["completions/mean_terminated_length"] = int(ended.sum()), len(ended)
        if not names:
            return found
        equal = equal_groups(total, group_size)
        found["frac_reward_zero_std"] = int(equal.sum()), len(equal)
        averages = total.double().view(-1, group_size).nanmean(1)
        of_prompts = {f"avg@{group_size}": averages[~averages.isnan()].tolist()}
        passed = (self.rewards[:, 0] >= threshold).view(-1, group_size).sum(1).tolist()
        for k in sorted({1, group_size}):
            of_prompts[f"pass@{k}"] = [pass_at_k(group_size, right, k) for right in passed]
        for name, values in of_prompts.items():
            found[name] = sum(values), len(values)
            found[name + SQUARES] = sum(value**2 for value in values), "sum"
            found[name + PROMPTS] = len(values), "sum"
        return found

    def _extremes(self) -> dict[str, tuple[float, Any]]:
        """(value, "min" or "max") of the extreme lengths: ``completions/min_length`` ..."""
        found: dict[str, tuple[float, Any]] = {}
        for part, lengths in (("", self.lengths), ("terminated_", self.lengths[self.finished])):
            if len(lengths):
                found[f"completions/min_{part}length"] = int(lengths.min()), "min"
                found[f"completions/max_{part}length"] = int(lengths.max()), "max"
        return found


def with_errors(metrics: Mapping[str, float]) -> dict[str, float]:
    """`metrics` with standard errors, ``<name>_stderr``, in place of the sums that `Summary.sums` has for them.

    Completions of a prompt are not independent, prompts are: Miller 2024, https://arxiv.org/abs/2411.00640, section 2.
    """
    found = {name: value for name, value in metrics.items() if not name.endswith((SQUARES, PROMPTS))}
    for name in list(found):
        if (number := metrics.get(name + PROMPTS, 0)) > 1:
            variance = max(metrics[name + SQUARES] / number - found[name] ** 2, 0.0)
            found[f"{name}_stderr"] = math.sqrt(variance / (number - 1))
    return found


def pass_at_k(num: int, passed: int, k: int) -> float:
    r"""The probability that at least one of k completions drawn from `num` is among the `passed` ones.

    Chen et al. 2021, https://arxiv.org/abs/2107.03374, equation 1: :math:`1 - \binom{n-c}{k} / \binom{n}{k}`.
    """
    return 1 - math.comb(num - passed, k) / math.comb(num, k)


def learning_problem(logs: Mapping[str, float], from_rewards: bool = True) -> str | None:
    """A warning if a log record shows that nothing was learned, `from_rewards` perhaps, or that something is wrong;
    else None.
    """
    if not any(logs.get(f"agent/{name}", 1) for name in ("turns", "failed", "cut/tokens", "cut/seconds")):
        return (
            "No episode has asked the policy, so there was nothing to learn. The agent must send its requests to "
            "episode.base_url with episode.api_key, and a command to OPENAI_BASE_URL with OPENAI_API_KEY."
        )
    shown = logs.get("self_distillation/reprompt_sample_fraction")
    if shown == 0:
        return (
            "The teacher was shown nothing, so the self-distillation had nothing to learn: no completion had another "
            f"one in its group that succeeded (mean reward {logs.get('reward', math.nan):.3g}), and no row feedback. "
            "Lower success_reward_threshold, sample more completions, or give rows a privileged_context with "
            "include_environment_feedback=True."
        )
    if from_rewards and shown is None and logs.get("frac_reward_zero_std") == 1 and logs.get("rewards/none") != 1:
        return (
            f"In every group all rewards were equal (mean reward {logs.get('reward', math.nan):.3g}), so there was "
            "nothing to learn. Make the prompts easier or harder, sample more completions (do_sample=False makes those "
            "of a group equal), or use graded rewards."
        )
    # An agent may ask for fewer tokens itself.
    if logs.get("completions/clipped_ratio") == 1 and logs.get("agent/cut/tokens", 1) == 1:
        return (
            "Every completion was cut at max_completion_length. Raise it, or check that the model generates an "
            "end-of-sequence token."
        )
    gap, oldest = logs.get("sampling/sampling_logp_difference/mean", 0.0), logs.get("staleness/max", 0.0)
    if oldest and gap > STALE_GAP:
        return (
            f"The policy has moved by a factor of {math.exp(gap):.2f} on average from the token probabilities with "
            f"which completions were sampled, up to {oldest:.0f} optimizer steps before. Set a lower max_staleness, or "
            "a lower learning_rate."
        )
    if gap > 0.1 and not oldest:
        return (
            "The generation engine's token probabilities differ from the trainer's by a factor of "
            f"{math.exp(gap):.2f} on average: its weights may be stale, or its precision too low."
        )
    if logs.get("entropy", 1.0) < 1e-3:
        return "The policy has almost no entropy left: completions of a prompt will be alike, and training stalls."
    return None


def log_clipping(
    metrics: Metrics,
    ratio: torch.Tensor,
    advantages: torch.Tensor,
    mask: torch.Tensor,
    epsilon: float,
    epsilon_high: float,
) -> None:
    """Log the shares of tokens, or of completions where `ratio` is (N, 1), at which
    `posttrain.rl.losses.policy_losses.clipped` has no gradient.
    """
    below, above = (ratio < 1 - epsilon) & (advantages < 0), (ratio > 1 + epsilon_high) & (advantages > 0)
    kinds = {"low": below.float(), "high": above.float(), "region": below.float() + above.float()}
    found = {f"clip_ratio/{name}_mean": ((held * mask).sum(), mask.sum()) for name, held in kinds.items()}
    low, high = ((kinds[name] * mask).sum(1) / mask.sum(1) for name in ("low", "high"))  # (N,) shares of each row
    least = torch.stack([low, -high]).nan_to_num(nan=torch.inf).amin(1)  # a row without a token has none
    least = least.masked_fill(least.isinf(), torch.nan)
    metrics.update(found | {"clip_ratio/low_min": (least[0], "min"), "clip_ratio/high_max": (-least[1], "max")})


# ---------------------------------------------------------------------------------------------------------- the table


class Reporter:
    """Shows the completions of a run: in the terminal, in files, and at trackers, where ``log_completions`` is set;
    with those of `images` that prompts have.
    """

    def __init__(self, args: RolloutConfig, dist: Distributed, images: ImagePrompts | None) -> None:
        self.args, self.dist, self.images = args, dist, images
        self.evaluated: list[dict[str, Any]] = []  # rows of the evaluation that goes on, shown at its end

    def store(self, samples: list[Sample], scores: Scores, advantages: torch.Tensor, step: int, tokenizer: Any) -> None:
        """Write the first ``log_trajectories`` samples of a rollout."""
        if not self.dist.peer_rank:
            made = stored(samples[: self.args.log_trajectories], scores, advantages, step, tokenizer)
            path = trajectories.path_of(self.args.output_dir, self.dist.rank)
            with run_goes_on(str(path)):
                append_lines(path, made)

    def rows(self, samples: list[Sample], scores: Scores, advantages: torch.Tensor, step: int) -> list[dict[str, Any]]:
        """A row of the table for each sample: step, prompt, completion, rewards, what functions added, advantage."""
        made = []
        for i, sample in enumerate(samples):
            row = {"step": step, "prompt": sample.prompt, "completion": sample.completion}
            row |= dict(zip(scores.names, scores.rewards[i].tolist(), strict=True))
            row |= {name: values[i] for name, values in scores.columns.items() if len(values) == len(samples)}
            row["advantage"] = advantages[i].mean().item()
            if self.images is not None and self.args.log_multimodal:
                row["images"] = self.images.pictures(sample.row, sample.prompt)
            made.append(row)
        return made

    def show(self, rows: list[dict[str, Any]], title: str, stem: str, step: int) -> None:
        """Print, write and track `rows` of all processes, where that is asked for."""
        if not self.args.log_completions:
            return
        rows = [row for part in self.dist.gather_object(rows) for row in part]
        if not (rows and self.dist.is_main):
            return
        args = self.args
        seen = {plain_text(row["prompt"]): row for row in reversed(rows)}
        shown = list(seen.values())[::-1] if args.log_unique_prompts else rows
        terminal.write(table(shown, title, args.num_completions_to_print))
        track(shown, stem, args.report_to)
        path = Path(args.output_dir) / "completions" / f"{stem}_{step:05d}"
        with run_goes_on(str(path)):
            path = write(rows, path, args.log_multimodal)
            if repo := value_of(args, "log_completions_hub_repo"):
                upload(path, repo, args.hub_token)


def table(rows: Sequence[Mapping[str, Any]], title: str, limit: int | None = None, width: int = 60) -> str:
    """`rows` as text: prompts and completions cut to `width`, numbers to two places."""
    shown = list(rows)[:limit] if limit is not None else list(rows)
    if not shown:
        return ""
    columns = [name for name in shown[0] if name != "images"]
    cells = [[_cell(row.get(column), width) for column in columns] for row in shown]
    rule = ["-" * max(map(len, column)) for column in zip(columns, *cells, strict=True)]
    return f"{title}\n{terminal.aligned([columns, rule, *cells])}"


def _cell(value: Any, width: int) -> str:
    if isinstance(value, float):
        return "none" if math.isnan(value) else f"{value:.2f}"
    # A line break would break the row, and an escape sequence the terminal.
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in plain_text(value))
    return text if len(text) <= width else f"{text[: width // 2 - 2]} ... {text[-(width // 2 - 3) :]}"


def plain_text(value: Any) -> str:
    """A prompt or completion as one text: messages with their roles."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(message, Mapping) for message in value):
        return "\n".join(_message(message) for message in value)
    return str(value)


def _message(message: Mapping[str, Any]) -> str:
    calls = "".join(f" {json.dumps(call, default=str)}" for call in message.get("tool_calls") or ())
    thoughts = message.get("reasoning_content") or message.get("thinking")
    thoughts = f"<think>{thoughts}</think> " if thoughts else ""
    content = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(part.get("text") or f"<{part.get('type')}>" for part in content)
    return f"[{message.get('role')}] {thoughts}{content}{calls}"


def write(rows: Sequence[Mapping[str, Any]], path: Path, with_images: bool = True) -> Path:
    """Write `rows` as ``<path>.parquet``, or as ``.jsonl`` where that cannot hold them. Returns the file."""
    import pyarrow
    from pyarrow import parquet

    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{name: _storable(value, with_images) for name, value in row.items()} for row in rows]
    try:
        columns = {name: [row.get(name) for row in rows] for name in rows[0]}
        parquet.write_table(pyarrow.table(columns), path.with_suffix(".parquet"))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError):  # columns of mixed kinds
        lines = (json.dumps(row, default=_as_text, ensure_ascii=False) + "\n" for row in rows)
        write_text(path.with_suffix(".jsonl"), "".join(lines))
        return path.with_suffix(".jsonl")
    return path.with_suffix(".parquet")


def track(rows: Sequence[Mapping[str, Any]], name: str, report_to: Sequence[str]) -> None:
    """Send `rows` as the table `name` to trackers with tables and an active run."""

    def cell(key: str, value: Any) -> Any:
        return value if isinstance(value, (int, float)) or key == "images" else plain_text(value)

    show_table([{key: cell(key, value) for key, value in row.items()} for row in rows], name, list(report_to))


def upload(path: Path, repo: str, token: str | None = None) -> None:
    """Upload a file to the dataset `repo` on the Hub, which is created as private. A failure is only logged."""
    from huggingface_hub import HfApi

    try:
        api = HfApi(token=token)
        api.create_repo(repo, repo_type="dataset", private=True, exist_ok=True)
        api.upload_file(path_or_fileobj=str(path), path_in_repo=path.name, repo_id=repo, repo_type="dataset")
    except Exception as error:  # an upload error must not end the run
        logger.warning("%s was not uploaded to %s: %s", path.name, repo, error)


def _as_text(value: Any) -> str:
    return base64.b64encode(value).decode() if isinstance(value, bytes) else str(value)


def _png(image: Any) -> dict[str, Any]:
    """An image as columns of images hold it in files of Hugging Face's datasets."""
    file = io.BytesIO()
    image.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": None}


def _storable(value: Any, with_images: bool) -> Any:
    """`value` with messages as text of JSON-like parts, and images as files; parts with an image are left out unless
    `with_images`.
    """
    if isinstance(value, float) and math.isnan(value):
        return None
    if isinstance(value, list) and all(hasattr(one, "save") for one in value):
        return [_png(image) for image in value]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        parts = []
        for message in value:
            content = message.get("content")
            if isinstance(content, list) and not with_images:
                content = [part for part in content if part.get("type") == "text"]
            elif isinstance(content, list):  # an image itself is in the column `images`
                content = [{k: v for k, v in part.items() if not hasattr(v, "save")} for part in content]
            parts.append({**message, "content": content})
        return json.dumps(parts, default=str, ensure_ascii=False)
    return value
