"""Tests of a CUDA device. Those without the mark `gpu` also run without one, on the emulated device or on the CPU."""

from __future__ import annotations

import contextlib

import pytest
import torch

from tests import tiny
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda


@pytest.fixture(autouse=True)
def heads_of_16_numbers(monkeypatch):
    """Flex attention has no kernel for smaller ones."""
    causal_lm, reward_model = tiny.causal_lm, tiny.reward_model

    def wider(arch="qwen3", *args, **overrides):
        return causal_lm(arch, *args, **({} if arch == "gpt2" else {"head_dim": 16}) | overrides)

    monkeypatch.setattr(tiny, "causal_lm", wider)
    monkeypatch.setattr(tiny, "reward_model", lambda *args, **more: reward_model(*args, **{"head_dim": 16} | more))


@pytest.fixture
def cuda():
    """Within the test ``device="cuda"`` is a device: the real one, or else the emulated one."""
    with contextlib.nullcontext() if torch.cuda.is_available() else EmulatedCuda():
        yield


@pytest.fixture
def device() -> str:
    """The real CUDA device, or else the CPU."""
    return "cuda" if torch.cuda.is_available() else "cpu"
