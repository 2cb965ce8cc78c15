"""Pure functions that turn rewards into advantages.

N completions in groups of size G, one group for each prompt: rows ``i * G`` to ``(i + 1) * G`` are group i. A reward of
NaN means that no reward function applied: the completion enters no mean, and its advantage is 0.
"""

from __future__ import annotations

import torch

EPSILON = 1e-4
"""Added to standard deviations before dividing by them."""


def total_rewards(rewards: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """The weighted sum over the reward functions that applied: (N, F), (F,) -> (N,); NaN where none did."""
    weighted = rewards if weights is None else rewards * weights
    return weighted.nansum(1).masked_fill(rewards.isnan().all(1), torch.nan)


def standard_deviation(values: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The sample standard deviation (n - 1) over `dim`, which is kept, without NaN; 0 for fewer than two values."""
    known = ~values.isnan()
    count = known.sum(dim, keepdim=True)
    mean = values.nansum(dim, keepdim=True) / count.clamp(min=1)
    apart = torch.where(known, values - mean, torch.zeros_like(values))
    largest = apart.abs().amax(dim, keepdim=True)
    plain, scaled = (
        (values.square().sum(dim, keepdim=True) / (count - 1).clamp(min=1)).sqrt()
        for values in (apart, apart / largest)
    )
    return torch.where(plain.isinf(), scaled * largest, plain)  # squares from 1e20 on overflow


def group_advantages(rewards: torch.Tensor, group_size: int, scale: str = "group") -> torch.Tensor:
    r"""GRPO, Shao et al. 2024, https://arxiv.org/abs/2402.03300, section 4.1.2:
    :math:`(r_i - \bar r) / (\sigma + 10^{-4})`.

    (N,) -> (N,), with a group size of G.

    Args:
        scale: what the standard deviation is taken over: "group"; "batch", all N (Liu et al. 2025,
            https://arxiv.org/abs/2508.08221); or "none" for no division (Dr. GRPO, https://arxiv.org/abs/2503.20783).
    """
    groups = rewards.view(-1, group_size)
    centred = groups - groups.nanmean(1, keepdim=True)
    if scale in ("group", "batch"):
        centred = centred / (standard_deviation(groups if scale == "group" else rewards) + EPSILON)
    elif scale != "none":
        raise ValueError(f"scale={scale!r} is not one of group, batch, none.")
    return centred.flatten().nan_to_num(nan=0.0)


def decoupled_advantages(rewards: torch.Tensor, group_size: int, weights: torch.Tensor | None = None) -> torch.Tensor:
    """GDPO, https://arxiv.org/abs/2601.05242: each reward function is normalised in its group, then the weighted sum is
    normalised over the batch, so that none drowns another by its scale. (N, F) -> (N,).
    """
    groups = rewards.view(-1, group_size, rewards.shape[1])
    each = (groups - groups.nanmean(1, keepdim=True)) / (standard_deviation(groups, 1) + EPSILON)
    return whitened(total_rewards(each.reshape(rewards.shape), weights))


def whitened(rewards: torch.Tensor) -> torch.Tensor:
    """Mean 0 and standard deviation 1 over all N: (N,) -> (N,)."""
    return ((rewards - rewards.nanmean()) / (standard_deviation(rewards) + EPSILON)).nan_to_num(nan=0.0)


def leave_one_out_advantages(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    r"""RLOO, Ahmadian et al. 2024, https://arxiv.org/abs/2402.14740, equation 8: the baseline of a completion is the
    mean reward of the others of its group, :math:`r_i - \frac{1}{G-1}\sum_{j \ne i} r_j`. (N,) -> (N,).
    """
    groups = rewards.view(-1, group_size)
    others = (~groups.isnan()).sum(1, keepdim=True) - 1
    baseline = (groups.nansum(1, keepdim=True) - groups) / others
    return (groups - baseline).flatten().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def reinforce_plus_plus_advantages(rewards: torch.Tensor, group_size: int, baseline: bool = True) -> torch.Tensor:
    """REINFORCE++, Hu et al. 2025, https://arxiv.org/abs/2501.03262: normalised over the whole batch, not in each
    group. With `baseline`, the paper's variant for several completions a prompt, less the mean of the group. (N,) ->
    (N,).
    """
    if baseline:
        groups = rewards.view(-1, group_size)
        rewards = (groups - groups.nanmean(1, keepdim=True)).flatten()
    return whitened(rewards)


def equal_groups(rewards: torch.Tensor, group_size: int) -> torch.Tensor:
    """Groups without a signal: all rewards equal, or fewer than two known. (N,) -> (N / G,) bool."""
    return (standard_deviation(rewards.view(-1, group_size)) < 1e-8).squeeze(1)
