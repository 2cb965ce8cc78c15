"""Cross-entropy of logits that are there already, with labels, smoothing and an ignore index."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from posttrain.core.data.collators import IGNORE_INDEX
from posttrain.core.data.host_copies import host_copy, know


def shift_labels(labels: torch.Tensor, ignore_index: int = IGNORE_INDEX) -> torch.Tensor:
    """Align (B, T) labels with the logits of a causal model: position t holds the token that t predicts, t + 1.

    The last position predicts nothing and holds `ignore_index`.
    """
    shifted, copy = F.pad(labels[..., 1:], (0, 1), value=ignore_index), host_copy(labels)
    return shifted if copy is None else know(shifted, F.pad(copy[..., 1:], (0, 1), value=ignore_index))


def cross_entropy(
    logits: torch.Tensor,
    labels: torch.Tensor,
    num_items: torch.Tensor | int | None = None,
    shift: bool = True,
    label_smoothing: float = 0.0,
    ignore_index: int = IGNORE_INDEX,
    dft: bool = False,
) -> torch.Tensor:
    r"""Cross-entropy of logits that are there already, in float32.

    With smoothing :math:`\epsilon` (Szegedy et al. 2016, https://arxiv.org/abs/1512.00567, section 7) a target costs
    :math:`-(1-\epsilon)\log p_y - \frac{\epsilon}{V}\sum_v \log p_v`. Returns a 0-d tensor; zero, with zero gradients,
    where no position has a label.

    Args:
        logits: (B, T, V) or (N, V). labels: (B, T) or (N,).
        num_items: what the sum is divided by; the number of targets in `labels` when None.
        shift: the logits at t predict the label at t + 1 (a causal model); False when labels are aligned already.
        dft: weight each loss as `dynamic_weights` has it.
    """
    labels = shift_labels(labels, ignore_index) if shift else labels
    labels = labels.reshape(-1).to(logits.device)
    logits = logits.reshape(-1, logits.shape[-1]).to(torch.promote_types(logits.dtype, torch.float32))
    options: dict[str, Any] = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    if dft:
        losses = F.cross_entropy(logits, labels, reduction="none", **options)
        total = (losses * dynamic_weights(losses)).sum()
    else:
        total = F.cross_entropy(logits, labels, reduction="sum", **options)
    count = torch.as_tensor((labels != ignore_index).sum() if num_items is None else num_items, device=total.device)
    return total / torch.where(count == 0, torch.ones_like(count), count)  # a sum over no target is 0, and stays 0


def selective_log_softmax(logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """``log_softmax(logits)[index]`` in float32 without storing the log-softmax: logits (..., V), index (...) ->
    (...).
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.gather(-1, index.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def dynamic_weights(losses: torch.Tensor) -> torch.Tensor:
    r"""What Dynamic Fine-Tuning multiplies cross-entropies with, Wu et al. 2025, https://arxiv.org/abs/2508.05629, eq.
    9.

    .. math:: L = -\sum_t \operatorname{sg}(p_t) \log p_t, \quad p_t = \exp(-\mathrm{loss}_t)

    The gradient of cross-entropy is that of a policy whose reward is 1 / p, which is large where the model finds the
    target improbable; the weight p, a constant to the gradient (sg), takes that out. Returns p, detached, in the shape
    of `losses`.

    Args:
        losses: of any shape, -log p of each target.
    """
    return losses.detach().neg().exp()
