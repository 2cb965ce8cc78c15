"""The average of the weights: its numbers, its place in checkpoints, and what it is used for."""

import pytest
import torch
from torch import nn

from posttrain.core import TrainerCallback
from posttrain.core.errors import CheckpointError, ConfigError
from posttrain.core.training.ema import EMA
from tests.contract.trainers import TRAINERS, weights

make = TRAINERS["causal-lm"]


def test_an_average_is_the_one_computed_by_hand():
    model = nn.Linear(1, 1, bias=False)
    model.weight.data.fill_(1.0)
    ema = EMA(model, decay=0.9, every=2, start=2)
    for step, value in enumerate([2.0, 3.0, 4.0, 5.0, 6.0, 7.0], start=1):
        model.weight.data.fill_(value)
        ema.update(step)
    # the weights themselves at update 2 (averaging has not begun), then 0.9 a + 0.1 w at updates 4 and 6
    expected = 0.9 * (0.9 * 3.0 + 0.1 * 5.0) + 0.1 * 7.0
    with ema.swapped_in():
        assert model.weight.item() == pytest.approx(expected)
    assert model.weight.item() == 7.0
    ema.copy_to_model()
    assert model.weight.item() == pytest.approx(expected)


@pytest.mark.parametrize(("every", "start", "averaged"), [(1, 0, [2, 3, 4, 5, 6, 7]), (2, 2, [5, 7]), (2, 3, [5, 7])])
def test_a_decay_of_1_is_the_mean_that_torch_computes(every, start, averaged):
    model = nn.Linear(1, 1, bias=False)
    ema, swa = EMA(model, decay=1, every=every, start=start), torch.optim.swa_utils.AveragedModel(model)
    for step, value in enumerate([2.0, 3.0, 4.0, 5.0, 6.0, 7.0], start=1):
        model.weight.data.fill_(value)
        ema.update(step)
        if value in averaged:
            swa.update_parameters(model)
    ema.copy_to_model()
    assert model.weight.item() == pytest.approx(sum(averaged) / len(averaged))
    assert model.weight.item() == pytest.approx(swa.module.weight.item())


def test_small_changes_are_not_lost_in_weights_of_16_bits():
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    model.weight.data.fill_(1.0)
    ema = EMA(model, decay=0.999)
    model.weight.data.fill_(2.0)
    for step in range(1, 101):  # each moves the average by less than bfloat16 can tell apart at 1
        ema.update(step)
    assert ema.state_dict()["averages"]["weight"].item() == pytest.approx(2 - 0.999**100, rel=1e-4)
    with ema.swapped_in():
        assert model.weight.dtype == torch.bfloat16 and model.weight.item() == pytest.approx(1.0952, abs=0.005)


def test_the_tensors_of_an_average_are_listed_once(monkeypatch):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).to(torch.bfloat16))
    ema, lists, real = EMA(model, decay=0.9), [], torch._foreach_lerp_
    monkeypatch.setattr(torch, "_foreach_lerp_", lambda *given: lists.append(given[:2]) or real(*given))
    expected = {name: p.detach().float().clone() for name, p in model.named_parameters()}
    for step in (1, 2):
        for parameter in model.parameters():
            parameter.data.normal_()
        ema.update(step)
        for name, parameter in model.named_parameters():
            expected[name].lerp_(parameter.detach().float(), 1 - 0.9)
    averages = ema.state_dict()["averages"]
    assert all(torch.equal(averages[name], expected[name]) for name in expected) and len(averages) == 4
    (first, weights_of_first), (second, weights_of_second) = lists
    assert first is second and weights_of_first is weights_of_second and len(first) == 2


def test_frozen_weights_have_no_average_and_other_weights_no_place():
    model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    model[0].requires_grad_(False)
    ema = EMA(model, decay=0.9)
    assert ema.state_dict()["averages"].keys() == {"1.weight", "1.bias"}
    with pytest.raises(CheckpointError, match="'0.bias' is in one of the two"):
        EMA(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), decay=0.9).load_state_dict(ema.state_dict())


class Watch(TrainerCallback):
    """Averages the weights in plain torch, and keeps what they are at each evaluation."""

    def __init__(self, decay):
        self.decay, self.average, self.at_evaluation = decay, None, []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.average = {n: p.detach().clone() for n, p in model.named_parameters()}

    def on_optimizer_step(self, args, state, control, model, **kwargs):
        for name, parameter in model.named_parameters():
            self.average[name] = self.decay * self.average[name] + (1 - self.decay) * parameter.detach()

    def on_prediction_step(self, args, state, control, model, **kwargs):
        self.at_evaluation.append(model.lm_head.weight.detach().clone())


@pytest.mark.parametrize(
    ("use", "evaluated", "final"), [("both", True, True), ("eval", True, False), ("final", False, True)]
)
def test_the_average_is_evaluated_and_left_behind_as_asked(use, evaluated, final, tmp_path):
    watch = Watch(0.8)
    options = {"max_steps": 4, "eval_strategy": "steps", "eval_steps": 4, "save_strategy": "steps", "save_steps": 4}
    trainer = make(tmp_path / use, [watch], ema_decay=0.8, ema_use=use, **options)
    trainer.train()
    plain = make(tmp_path / "plain", max_steps=4)
    plain.train()
    average, last = watch.average["lm_head.weight"], weights(plain)["lm_head.weight"]
    assert not torch.allclose(average, last, atol=1e-4)
    torch.testing.assert_close(watch.at_evaluation[-1], average if evaluated else last)
    torch.testing.assert_close(weights(trainer)["lm_head.weight"], average if final else last)
    from safetensors.torch import load_file

    folder = tmp_path / use / "checkpoint-4"
    torch.testing.assert_close(load_file(folder / "model.safetensors")["lm_head.weight"], last)  # to go on from
    torch.testing.assert_close(load_file(folder / "ema.safetensors")["averages.lm_head.weight"], average)


def test_a_resumed_average_goes_on_bit_for_bit(tmp_path):
    options = {"ema_decay": 0.9, "save_strategy": "steps", "save_steps": 2, "max_steps": 5}
    straight, resumed = make(tmp_path, **options), make(tmp_path, **options)
    straight.train()
    expected = weights(straight)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert all(torch.equal(value, expected[name]) for name, value in weights(resumed).items())


def test_the_best_average_is_what_remains(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    trainer = make(tmp_path, ema_decay=0.5, load_best_model_at_end=True, learning_rate=3.0, **options)
    trainer.train()
    assert trainer.state.best_global_step < 4  # or nothing would be shown
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)


def test_weights_are_not_averaged_twice(tmp_path):
    with pytest.raises(ConfigError, match="schedule_free_adamw.*average twice"):
        make(tmp_path, ema_decay=0.9, optim="schedule_free_adamw")


def test_a_checkpoint_without_averages_is_said(tmp_path, caplog):
    make(tmp_path, save_strategy="steps", save_steps=2, max_steps=2).train()
    make(tmp_path, ema_decay=0.9, max_steps=3).train(resume_from_checkpoint=True)
    assert "holds no averaged weights" in caplog.text and "ema_decay: None -> 0.9" in caplog.text
