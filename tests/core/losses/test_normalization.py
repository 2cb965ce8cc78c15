import pytest
import torch
import transformers
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from posttrain.core.losses import normalization
from posttrain.core.losses.normalization import Objective, count_items, count_rows, count_tokens
from tests import tiny
from tests.contract.trainers import TRAINERS

N = torch.tensor(4.0)
LOSSES = torch.tensor([1.0, 2.0, 3.0, 6.0])


def three(model, inputs, return_outputs=False):
    return LOSSES.mean()


def counted(model, inputs, return_outputs=False, num_items_in_batch=None):
    return LOSSES.sum() / num_items_in_batch


def test_a_loss_that_cannot_take_the_count_is_a_mean_and_one_that_was_declared_is_not_looked_at():
    assert Objective(three, returns_mean=False)(three, None, {}, N) == (torch.tensor(3.0), True)
    assert Objective(counted, returns_mean=False)(counted, None, {}, N) == (torch.tensor(3.0), False)
    assert Objective(counted).is_open and not Objective(three).is_open
    with (ask := Objective(counted)).frozen():
        assert not ask.is_open
    assert ask.is_open


def test_a_loss_that_is_no_tensor_is_named():
    with pytest.raises(TypeError, match="compute_loss returned float"):
        number = lambda model, inputs, num_items_in_batch=None: 3.0  # noqa: E731
        Objective(number)(number, None, {}, N)


def test_the_stock_losses_of_transformers_divide_and_a_classifier_does_not():
    ids = torch.randint(4, 300, (2, 8))
    labels = ids.clone()
    labels[0, :5] = -100
    lm, count = tiny.causal_lm(), torch.tensor(10)
    summed, _ = normalization.model_loss(lm, {"input_ids": ids, "labels": labels}, count, pass_count=True)
    mean, _ = normalization.model_loss(lm, {"input_ids": ids, "labels": labels}, pass_count=True)
    assert count_items({"labels": labels}, shifted=True) == 3 + 7
    torch.testing.assert_close(summed, mean)
    bert = tiny.classifier()
    assert not normalization.accepts_loss_kwargs(bert) or not normalization.shifts_labels(bert)
    assert normalization.shifts_labels(lm) and not normalization.shifts_labels(tiny.seq2seq_lm())


def test_items_are_labels_that_count_and_rows_where_nothing_is_labelled():
    labels = torch.tensor([[-100, 5, 6], [7, 8, -100]])
    assert count_items({"labels": labels}, shifted=False) == 4
    assert count_items({"labels": labels}, shifted=True) == 3
    assert count_items({"labels": torch.tensor([0, 2])}, shifted=True) == 2
    assert count_items({"labels": labels, "shift_labels": torch.tensor([[1, -100]])}, shifted=True) == 1
    assert count_items({"pixel_values": torch.zeros(5, 3)}, shifted=False) == 5
    assert count_rows({"nested": {"x": torch.zeros(3)}}) == 3


@pytest.mark.parametrize(
    "batch",
    [
        {"prompt": ["a", "b", "c"], "ids": torch.zeros(3, 2)},
        {"meta": [{"parts": torch.zeros(7)}] * 3, "ids": torch.zeros(3, 2)},
        {"scale": torch.tensor(1.0), "ids": torch.zeros(3, 2)},
        {"prompt": ["a", "b", "c"], "nested": {"ids": torch.zeros(3, 2)}},
        {"prompt": ["a", "b", "c"]},
        [{"prompt": "a"}] * 3,
        ["a", "b", "c"],
        (torch.zeros(3, 2), torch.zeros(3)),
        torch.zeros(3, 2),
    ],
)
def test_the_rows_of_a_batch_are_counted_whatever_stands_first_in_it(batch):
    assert count_rows(batch) == 3


def test_tokens_are_told_from_padding():
    ids = torch.tensor([[5, 6, 0], [7, 0, 0]])
    assert count_tokens({"input_ids": ids, "attention_mask": (ids > 0).long()}, "input_ids") == (3, 6)
    assert count_tokens({"input_ids": ids}, "input_ids") == (6, 6)
    assert count_tokens({"x": 1}, "input_ids") == (0, 0)


def test_label_smoothing_and_loss_functions_keep_the_labels_from_the_model():
    class Model(nn.Module):
        def forward(self, x, labels=None):
            assert labels is None
            return {"logits": x}

    x, labels = torch.randn(2, 3), torch.tensor([0, 2])
    batch = {"x": x, "labels": labels}
    loss, _ = normalization.model_loss(
        Model(),
        batch,
        N,
        pass_count=False,
        loss_func=lambda out, y, num_items_in_batch: out["logits"].sum() / num_items_in_batch,
    )
    torch.testing.assert_close(loss, x.sum() / 4)
    smoothed, _ = normalization.model_loss(Model(), batch, pass_count=False, label_smoothing=0.2)
    logp = x.log_softmax(-1)
    expected = (0.8 * -logp[range(2), labels] + 0.2 * -logp.mean(-1)).mean()
    torch.testing.assert_close(smoothed, expected)
    assert "labels" in batch


def test_a_model_without_a_loss_says_what_it_gave():
    with pytest.raises(ValueError, match="only logits, from the inputs x"):
        normalization.model_loss(lambda x: {"logits": x}, {"x": N}, pass_count=False)


def test_an_error_of_a_model_that_reads_other_columns_is_not_explained_by_missing_tokens():
    class Fails(transformers.PreTrainedModel):
        config_class = transformers.PretrainedConfig

        def forward(self, x, labels=None):
            raise torch.OutOfMemoryError("CUDA out of memory")

    model = Fails(transformers.PretrainedConfig())
    assert model.main_input_name == "input_ids"
    with pytest.raises(torch.OutOfMemoryError):
        normalization.model_loss(model, {"x": N, "labels": N}, pass_count=False)


class Copies(TorchDispatchMode):
    """Counts the copies from the host to a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += "copy" in str(function) or "lift" in str(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("value", [7, 7.5, torch.tensor(7), torch.tensor(7.5)])
def test_a_count_is_written_on_the_device_and_not_copied_to_it(value):
    with Copies() as copies:
        found = normalization.scalar(value, "meta")
    assert copies.count == 0 and found.device.type == "meta" and found.shape == ()
    here = normalization.scalar(value, "cpu")
    assert here == value and here.dtype == torch.as_tensor(value).dtype


def test_counting_a_window_copies_nothing_to_the_device(tmp_path):
    trainer = TRAINERS["causal-lm"](tmp_path)
    trainer.dist.device = torch.device("meta")
    batch = trainer.data_collator(trainer.train_dataset[:4])
    with Copies() as copies:
        items = trainer.count_window([batch, batch])
    assert copies.count == 0 and items.device.type == "meta"
