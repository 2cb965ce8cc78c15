"""Two rows and the gradients they make, for the tests of this folder."""

from __future__ import annotations

import torch

LORA = {"task_type": "CAUSAL_LM", "r": 4, "init_lora_weights": False}


def batch(vocab_size=384):
    """(2, 9) input ids, and labels without the first half of one row."""
    ids = torch.randint(4, vocab_size, (2, 9), generator=torch.Generator().manual_seed(1))
    labels = ids.clone()
    labels[0, :4] = -100
    return ids, labels


def gradients(model):
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_same_gradients(actual, expected):
    assert actual.keys() == expected.keys() and actual
    for name, gradient in expected.items():
        assert (actual[name] - gradient).norm() <= 1e-5 * gradient.norm() + 1e-7, name
