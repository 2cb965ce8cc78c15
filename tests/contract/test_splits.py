"""However a window is cut into micro-batches, the weights that it leads to are the same."""

import pytest
import torch

from tests.contract.trainers import EXACT, weights


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights that one micro-batch a window leads to, by trainer; trained once each."""
    known = {}

    def trained(name):
        if name not in known:
            trainer = EXACT[name](tmp_path_factory.mktemp(name))
            before = weights(trainer)
            trainer.train()
            known[name] = before, weights(trainer), [log["loss"] for log in trainer.state.log_history if "loss" in log]
        return known[name]

    return trained


@pytest.mark.rotated
@pytest.mark.parametrize(("batch", "accumulation"), [(2, 4), (1, 8)])
@pytest.mark.parametrize("name", EXACT)
def test_cutting_a_window_differently_changes_nothing(name, batch, accumulation, whole, tmp_path):
    before, expected, losses = whole(name)
    trainer = EXACT[name](tmp_path, per_device_train_batch_size=batch, gradient_accumulation_steps=accumulation)
    trainer.train()
    assert trainer.state.global_step == len(losses)
    assert [log["loss"] for log in trainer.state.log_history if "loss" in log] == pytest.approx(
        losses, rel=1e-5, abs=1e-6
    )
    for key, value in weights(trainer).items():
        torch.testing.assert_close(value, expected[key], rtol=0, atol=1e-6, msg=key)
    assert any(not torch.equal(before[key], expected[key]) for key in before)


@pytest.mark.rotated
@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_evaluation_loss_does_not_depend_on_its_batch_size(name, batch, tmp_path):
    expected = EXACT[name](tmp_path, per_device_eval_batch_size=7).evaluate()["eval_loss"]
    assert EXACT[name](tmp_path, per_device_eval_batch_size=batch).evaluate()["eval_loss"] == pytest.approx(
        expected, rel=1e-6, abs=1e-6
    )
