"""Messages equal those of the SDK tinker 0.38, byte for byte, and others are refused."""

import math

import pytest
import torch

from posttrain.rl.samples.samples import Sample
from posttrain.rl.training_server import wire

#: What the SDK sends for two rows, the loss "ppo" and two options.
REQUEST = bytes.fromhex(
    "0a096d3a747261696e3a3010ac021a640a100a0e0a0c050000002c0100007011010012300a0d7461726765745f746f6b656e73121f0a182c01"
    "000000000000701101000000000001000000000000001802220103121e0a077765696768747312130a0c000000000000803f0000003f180122"
    "01031a440a080a060a040700000012200a0d7461726765745f746f6b656e73120f0a080900000000000000180222010112160a077765696768"
    "7473120b0a040000803f1801220101220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411000000000000e83f3a1f0a12636c"
    "69705f6c6f775f7468726573686f6c64120909000000000000e83f3a0b0a046e6f74651203120161"
)
OUTPUT = bytes.fromhex(
    "0a0b41727261795265636f7264123a12360a086c6f6770726f6273122a0a0c0000c0bf000000c0000080be1218000000000000000008000000"
    "000000000c00000000000000180118021a130a086c6f73733a73756d110000000000000440"
)
SAMPLES = bytes.fromhex(
    "0a14120803000000010000001a08000000bf000080bf0a0e08011204040000001a04000000c012080000c07f000040c0"
)


def test_a_request_of_the_sdk_is_read():
    request = wire.ForwardBackward(REQUEST)
    assert (request.model_id, request.seq_id, request.loss, request.forward_only) == ("m:train:0", 300, "ppo", False)
    assert request.options() == {"clip_low_threshold": 0.75, "note": "a"}
    first, second = request.data()
    assert first.tokens == [5, 300, 70000] and second.tokens == [7]
    assert first.inputs["target_tokens"].tolist() == [300, 70000, 1] and first.inputs["weights"].tolist() == [0, 1, 0.5]
    assert second.inputs["target_tokens"].dtype == torch.int64 and second.inputs["weights"].tolist() == [1]


def test_the_forward_alone_is_known():
    assert wire.ForwardBackward(REQUEST + bytes([6 << 3, 1])).forward_only


def test_answers_are_those_that_the_sdk_reads():
    logps = [torch.tensor([-1.5, -2.0]), torch.tensor([-0.25])]
    assert wire.forward_backward_output(logps, {"loss:sum": 2.5}) == OUTPUT
    one = Sample({}, "", [5], [3, 1], logps=[-0.5, -1.0], finished=True)
    samples = [one, Sample({}, "", [5], [4], logps=[-2.0])]
    assert wire.sample_response(samples, torch.tensor([math.nan, -3.0])) == SAMPLES


def test_numbers_of_several_bytes_come_back():
    fields = wire.read(wire.write([(1, 0), (2, 127), (3, 128), (4, 2**40), (100, "text"), (5, 0.5)]))
    assert [fields[i] for i in (1, 2, 3, 4, 100)] == [[0], [127], [128], [2**40], [b"text"]] and len(fields[5][0]) == 8


@pytest.mark.parametrize("body", [b"\x0a\xff", REQUEST[:-1], b"\x80" * 12, b"\x0b\x01", b'{"model_id": "m"}'])
def test_what_is_no_message_is_refused(body):
    with pytest.raises(ValueError, match=r"cut off|does not end|unknown"):
        wire.ForwardBackward(body)


def test_rows_that_are_not_read_are_named():
    image = wire.write([(3, wire.write([(1, wire.write([(2, b"png")]))]))])
    with pytest.raises(ValueError, match=r"data\[0\].model_input holds an image"):
        wire.ForwardBackward(image).data()
    sparse = wire.write([(2, b"csr"), (3, wire.FLOAT32)])
    row = wire.write([(2, wire.write([(1, "weights"), (2, sparse)]))])
    with pytest.raises(ValueError, match=r"data\[0\].weights is sparse"):
        wire.ForwardBackward(wire.write([(3, row)])).data()
