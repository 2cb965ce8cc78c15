"""Norms of gradients, weights and updates by part of the model, and what callbacks log."""

import math

import pytest
import torch

from posttrain.core import ActivationMonitorCallback, ParameterMonitorCallback, TrainerCallback, UtilizationCallback
from posttrain.core.logging.monitors import norm, parts
from tests import tiny
from tests.contract.trainers import causal_lm


def trained(folder, *callbacks, **changes):
    trainer = causal_lm()(folder, list(callbacks), max_steps=2, **changes)
    trainer.train()
    return trainer, [record for record in trainer.state.log_history if "loss" in record]


def test_parts_are_layers_and_the_modules_outside(tmp_path):
    model = tiny.causal_lm()
    model.lm_head.requires_grad_(False)
    found = parts(model)
    assert set(found) == {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"}
    assert sum(len(group) for group in found.values()) == sum(p.requires_grad for p in model.parameters())
    assert norm([torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]).item() == 5.0


def test_norms_of_plain_descent_are_those_of_its_formula(tmp_path):
    before = {name: norm(group).item() for name, group in parts(tiny.causal_lm()).items()}
    _, records = trained(tmp_path, ParameterMonitorCallback(every=2), learning_rate=0.05, lr_scheduler_type="constant")
    first, second = records
    names = [name.removeprefix("weight_norm/") for name in first if name.startswith("weight_norm/")]
    assert set(names) == set(before)
    for part in names:
        assert first[f"weight_norm/{part}"] == pytest.approx(before[part], rel=1e-6)
        step = 0.05 * first[f"grad_norm/{part}"]  # of SGD without momentum
        assert first[f"update_ratio/{part}"] == pytest.approx(step / before[part], rel=1e-3)
    whole = math.sqrt(sum(first[f"grad_norm/{part}"] ** 2 for part in names))
    assert whole == pytest.approx(min(first["grad_norm"], 1.0), rel=1e-4)  # after clipping
    assert not any(name.startswith("weight_norm/") for name in second)  # every second step


def test_without_updates_no_copy_is_kept(tmp_path):
    monitor = ParameterMonitorCallback(every=1, updates=False)
    _, records = trained(tmp_path, monitor)
    assert not any(name.startswith("update_ratio/") for record in records for name in record)
    with pytest.raises(ValueError, match="every=0 must be >= 1"):
        ParameterMonitorCallback(every=0)


class Counts(TrainerCallback):
    def on_substep_end(self, args, state, control, **kwargs):
        self.log_metric("substeps", 1.0)

    def on_step_end(self, args, state, control, **kwargs):
        self.log_metric("count", state.global_step)


def test_callbacks_log_the_mean_over_the_steps_of_a_record(tmp_path):
    _, records = trained(
        tmp_path, Counts(), logging_steps=2, gradient_accumulation_steps=2, per_device_train_batch_size=4
    )
    assert records[0]["count"] == 1.5 and records[0]["substeps"] == 1.0
    with pytest.raises(RuntimeError, match="outside of an event.*on_step_end"):
        Counts().log_metric("step", 1)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_activations_of_each_layer_are_those_that_a_forward_pass_gives(checkpointed, tmp_path):
    kept: dict[str, list[torch.Tensor]] = {"0": [], "1": []}

    class Keeps(TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **kwargs):
            for name, layer in enumerate(model.model.layers):
                layer.register_forward_hook(lambda m, i, out, name=str(name): kept[name].append(out.detach().clone()))

    monitor = ActivationMonitorCallback(every=2)
    trainer, (first, second) = trained(tmp_path, Keeps(), monitor, gradient_checkpointing=checkpointed)
    for name, outputs in kept.items():
        assert first[f"activation_rms/model.layers.{name}"] == pytest.approx(outputs[0].square().mean().sqrt().item())
        assert first[f"activation_max/model.layers.{name}"] == pytest.approx(outputs[0].abs().max().item())
    assert {name for name in first if "activation" in name} == {
        f"activation_{what}/model.layers.{i}" for what in ("rms", "max") for i in (0, 1)
    }
    assert not any("activation" in name for name in second)  # every second step
    assert len(trainer.model.model.layers[0]._forward_hooks) == 1  # the test's own: the callback took its off
    with pytest.raises(ValueError, match="every=0 must be >= 1"):
        ActivationMonitorCallback(every=0)


def test_utilization_is_a_share_and_no_part_of_the_history(tmp_path):
    class Reads(TrainerCallback):
        records: list[dict] = []

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.records.append(dict(logs))

    _, history = trained(tmp_path, UtilizationCallback(), Reads())
    shares = [record["perf/cpu_utilization"] for record in Reads.records if "loss" in record]
    assert len(shares) == 2 and all(0 <= share <= 1 for share in shares)
    assert not any("utilization" in name for record in history for name in record)
