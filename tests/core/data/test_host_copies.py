import torch

from posttrain.core.data.host_copies import host_copy, know, places_of
from posttrain.core.losses import shift_labels
from posttrain.lm.attention.segments import Segments, with_segments, without_padding
from tests.gpu_rehearsal.emulated_cuda import EmulatedCuda


def test_on_the_cpu_a_tensor_is_its_own_copy():
    mask = torch.tensor([[True, False], [False, True]])
    assert host_copy(mask) is mask
    assert places_of(mask).tolist() == [0, 3]


def test_what_was_changed_since_is_not_known():
    with EmulatedCuda() as gpu:
        from posttrain.core.data.pipeline import to_device

        batch = {"labels": torch.tensor([[1, -100, 3]]), "weights": torch.ones(3)}
        moved = to_device(batch, "cuda", non_blocking=True)
        assert host_copy(moved["labels"]).tolist() == [[1, -100, 3]]
        assert host_copy(moved["weights"]) is None  # numbers that count nothing
        assert host_copy(moved["labels"].clone()) is None
        moved["labels"].add_(1)
        assert host_copy(moved["labels"]) is None
        moved = to_device(batch, "cuda", non_blocking=True)
        batch["labels"].fill_(0)
        assert host_copy(moved["labels"]) is None
        assert gpu.waits == []
        assert places_of(torch.ones(2, dtype=torch.bool, device="cuda")).shape == (2,)
        assert [wait.kind for wait in gpu.waits] == ["count what is not zero"]


def test_rows_without_padding_are_those_of_the_cpu_and_wait_for_nothing():
    rows = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]]),
        "labels": torch.tensor([[5, 6, 7, -100], [8, -100, -100, -100]]),
        "attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]),
    }
    packed = {
        "input_ids": torch.tensor([[5, 6, 7, 0], [8, 9, 4, 4]]),
        "labels": torch.tensor([[5, 6, 7, -100], [8, -100, 4, 4]]),
        "position_ids": torch.tensor([[0, 1, 2, 0], [0, 1, 0, 1]]),
        "seq_lengths": torch.tensor([[3, 0], [2, 2]]),
    }
    for batch in (rows, packed):
        for arrange in (without_padding, with_segments):
            expected = arrange(batch)
            with EmulatedCuda() as gpu:
                moved = {name: know(tensor.to("cuda", non_blocking=True), tensor) for name, tensor in batch.items()}
                found = arrange(moved)
                assert gpu.waits == []
                assert shift_labels(found["labels"]).is_cuda and host_copy(shift_labels(found["labels"])) is not None
                for name, value in expected.items():
                    if isinstance(value, Segments):
                        assert found[name] == value
                    else:
                        assert torch.equal(found[name].cpu(), value), name
                labels = host_copy(found["labels"])
                assert torch.equal(labels, expected["labels"])
    assert without_padding(rows)["input_ids"].tolist() == [[5, 6, 7, 8, 9]]
    assert without_padding(rows)["labels"].tolist() == [[-100, 6, 7, -100, -100]]
