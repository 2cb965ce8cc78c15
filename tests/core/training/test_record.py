"""The log of a run, without a trainer."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.logging.metrics import FLOPS, TOKENS
from posttrain.core.state import TrainerState
from posttrain.core.training.plan import Progress
from posttrain.core.training.record import Record


def record(**args):
    usual = {"include_num_input_tokens_seen": "all", "max_tokens": float("inf")}
    return Record(SimpleNamespace(**(usual | args)), SimpleNamespace(gather_object=lambda value: [value]))


def test_a_record_is_the_mean_of_the_steps_that_had_a_label():
    log, state = record(), TrainerState(global_step=3)
    progress = Progress(learning_rate=0.5, grad_norm=torch.tensor(2.0))
    log.step(torch.tensor(1.0), torch.tensor(4), {"kl": torch.tensor(0.25)})
    log.step(torch.tensor(float("nan")), torch.tensor(0), {})
    log.step(torch.tensor(2.0), None, {})
    logs = log.of_steps(state, progress, 0, {"learning_rate/head": 0.1}, None)
    shown = {name: value for name, value in logs.items() if not name.startswith("perf/")}
    assert shown == {"loss": 1.5, "kl": 0.25, "grad_norm": 2.0, "learning_rate": 0.5, "learning_rate/head": 0.1}
    assert progress.last_logged == 3 and progress.mean_loss(had_losses=True) == 1.5


def test_the_loss_of_a_step_is_added_without_a_product():
    class Products(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += function is torch.ops.aten.mul.Tensor
            return function(*args, **(kwargs or {}))

    log = record()
    with Products() as products:
        log.step(torch.tensor(1.0), torch.tensor(4), {})
        log.step(torch.tensor(2.0), torch.tensor(0), {})
    assert products.number == 0 and log.metrics.drain() == {"loss": (1.0, 1)}


@pytest.mark.parametrize(("which", "tokens"), [("all", 10), ("non_padding", 7)])
def test_tokens_and_operations_are_moved_to_the_state_once(which, tokens):
    log, state = record(include_num_input_tokens_seen=which), TrainerState()
    log.metrics.add_sum(TOKENS, 7, 10)
    log.metrics.add_sum(FLOPS, 60.0, 0)
    log.store_counts(state)
    log.store_counts(state)
    assert (state.num_input_tokens_seen, state.total_flos) == (tokens, 60.0)


def test_a_run_without_a_finite_loss_has_none():
    log, progress = record(), Progress()
    log.step(torch.tensor(float("inf")), None, {})
    rest, metrics = log.of_run(TrainerState(global_step=1), progress, 0, 8, 1)
    assert rest == {} and metrics["train_loss"] != metrics["train_loss"] and metrics["nonfinite_steps"] == 1
