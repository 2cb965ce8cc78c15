import numpy as np
import pytest
import torch

from posttrain.core.evaluation import predictions


def test_ragged_predictions_are_filled_with_minus_100():
    joined = predictions.join([np.ones((1, 2), int), np.ones((2, 3), int)])
    assert joined.tolist() == [[1, 1, -100], [1, 1, 1], [1, 1, 1]]
    assert predictions.join([(np.zeros(1), np.ones((1, 1))), (np.zeros(2), np.ones((2, 2)))])[1].shape == (3, 2)


def test_a_view_does_not_keep_what_it_is_a_part_of():
    logits = torch.zeros(2, 1000, 8)
    kept = predictions.to_numpy((logits[:, -1], logits))
    assert kept[0].base is None or not np.shares_memory(kept[0], logits.numpy())
    assert np.shares_memory(kept[1], logits.numpy())  # and what is whole is not copied


@pytest.mark.parametrize("widths", [(3, 3, 3, 3), (1, 2, 3, 4), (4, 1, 1, 1)])
def test_small_batches_are_put_together_on_the_way(widths, monkeypatch):
    monkeypatch.setattr(predictions, "BLOCK", 100)
    parts = [np.arange(2 * width).reshape(2, width) for width in widths]
    kept = predictions.Kept(concatenate=True)
    for part in parts:
        kept.add([(part, {"a": part[:, 0]}, None, None)])
    assert len(kept.blocks) + len(kept.small) < len(parts)
    logits, labels, inputs, losses = kept.joined()
    expected = np.full((8, max(widths)), -100)
    for index, part in enumerate(parts):
        expected[2 * index : 2 * index + 2, : part.shape[1]] = part
    np.testing.assert_array_equal(logits, expected)
    np.testing.assert_array_equal(labels["a"], expected[:, 0])
    assert inputs is losses is None and kept.blocks == kept.small == []
