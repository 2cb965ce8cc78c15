"""The messages of the training API that are no JSON: Protocol Buffers, https://protobuf.dev/programming-guides/encoding.

The numbers of the fields are those that tinker 0.38 sends and reads.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from posttrain.rl.samples.samples import Sample

CONTENT_TYPE = "application/x-protobuf"
NUMBER, DOUBLE, SIZED = 0, 1, 2
FLOAT32, INT64 = 1, 2
Fields = dict[int, list[Any]]
Value = int | float | bytes | str
TYPES = {FLOAT32: torch.float32, INT64: torch.int64}


def read(message: bytes) -> Fields:
    """The values of each field by its number: ints, or bytes; a ValueError where this is no such message."""
    found: Fields = {}
    place = 0
    while place < len(message):
        key, place = _number(message, place)
        kind = key & 7
        value: Any = 8
        if kind in (NUMBER, SIZED):
            value, place = _number(message, place)
        if kind in (DOUBLE, SIZED):
            value, place = message[place : place + value], place + value
        if kind not in (NUMBER, DOUBLE, SIZED) or place > len(message):
            raise ValueError(f"it is cut off, or its field {key >> 3} is of the type {kind}, which is unknown")
        found.setdefault(key >> 3, []).append(value)
    return found


def write(fields: Iterable[tuple[int, Value]]) -> bytes:
    """A message of these numbers and values: an int, a float, a text, or bytes, such as those of a message."""
    found = bytearray()
    for number, value in fields:
        if isinstance(value, int):
            found += _as_number(number << 3 | NUMBER) + _as_number(value)
        elif isinstance(value, float):
            found += _as_number(number << 3 | DOUBLE) + struct.pack("<d", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            found += _as_number(number << 3 | SIZED) + _as_number(len(data)) + data
    return bytes(found)


def _number(message: bytes, place: int) -> tuple[int, int]:
    """(the number at `place`, the place behind it)."""
    value = shift = 0
    while place < len(message) and shift < 70:
        byte, place = message[place], place + 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, place
        shift += 7
    raise ValueError("a number in it does not end")


def _as_number(value: int) -> bytes:
    return bytes([value]) if value < 0x80 else bytes([value & 0x7F | 0x80]) + _as_number(value >> 7)


def _one(fields: Fields, number: int, default: Any) -> Any:
    """The last value of a field, which counts; a text where `default` is one."""
    value = fields[number][-1] if number in fields else default
    return value.decode() if isinstance(default, str) and isinstance(value, bytes) else value


@dataclass(frozen=True)
class Datum:
    """A row: the T tokens that the model reads, and what the loss reads by name, (T,) each."""

    tokens: list[int]
    inputs: dict[str, torch.Tensor]


class ForwardBackward:
    """A request for gradients, or for log-probabilities alone (`forward_only`)."""

    def __init__(self, body: bytes) -> None:
        fields = read(body)
        self.model_id, self.seq_id = _one(fields, 1, ""), _one(fields, 2, 0)
        self.loss, self.forward_only = _one(fields, 4, ""), bool(_one(fields, 6, 0))
        self._rows, self._options = fields.get(3, []), fields.get(7, [])

    def options(self) -> dict[str, float | str]:
        """The options of the loss, by name."""
        found: dict[str, float | str] = {}
        for pair in map(read, self._options):
            value = read(_one(pair, 2, b""))
            is_text = 2 in value
            found[_one(pair, 1, "")] = _one(value, 2, "") if is_text else _unpacked("d", _one(value, 1, b""))[0]
        return found

    def data(self) -> list[Datum]:
        """The rows; a ValueError where one holds what is not read here, such as an image."""
        return [_datum(read(row), f"data[{number}]") for number, row in enumerate(self._rows)]


def _datum(fields: Fields, where: str) -> Datum:
    chunks = [read(chunk) for chunk in fields.get(1, [])]
    if any({*chunk} - {1} for chunk in chunks):
        raise ValueError(f"{where}.model_input holds an image or sound; this server reads tokens alone. Leave it out.")
    data = b"".join(_one(read(_one(chunk, 1, b"")), 1, b"") for chunk in chunks)
    named = {_one(pair, 1, ""): read(_one(pair, 2, b"")) for pair in map(read, fields.get(2, []))}
    inputs = {name: _tensor(tensor, f"{where}.{name}") for name, tensor in named.items()}
    return Datum(list(_unpacked(f"{len(data) // 4}i", data)), inputs)


def _unpacked(kind: str, data: bytes) -> tuple[Any, ...]:
    """The numbers of `kind` in `data`; a ValueError where it has other than those."""
    try:
        return struct.unpack(f"<{kind}", data)
    except struct.error as error:
        raise ValueError(f"tokens or an option of the loss are cut off: {error}") from error


def _tensor(fields: Fields, where: str) -> torch.Tensor:
    """(numbers,) of a dense tensor, whose shape is not looked at."""
    dtype = TYPES.get(_one(fields, 3, 0))
    if dtype is None or 2 in fields:
        raise ValueError(f"{where} is sparse or neither float32 nor int64. Send a list with a number for each token.")
    data = bytearray(_one(fields, 1, b""))
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)


def _floats(values: torch.Tensor) -> bytes:
    return values.detach().float().cpu().contiguous().numpy().astype("<f4").tobytes()


def forward_backward_output(logps: Sequence[torch.Tensor], metrics: Mapping[str, float]) -> bytes:
    """The answer to a `ForwardBackward`, with the log-probabilities (T,) of each row. The name of a metric ends in how
    the values of several requests are joined: ``"loss:sum"``.
    """
    places = struct.pack(f"<{len(logps) + 1}q", 0, *itertools.accumulate(4 * len(each) for each in logps))
    batched = write([(1, b"".join(map(_floats, logps))), (2, places), (3, FLOAT32)])
    record = write([(2, write([(1, "logprobs"), (2, batched)])), (3, len(logps))])
    pairs = [(3, write([(1, name), (2, float(value))])) for name, value in metrics.items()]
    return write([(1, "ArrayRecord"), (2, record), *pairs])


def sample_response(samples: Sequence[Sample], prompt_logps: torch.Tensor | None) -> bytes:
    """Completions, and log-probabilities of their prompt, (P,) with NaN where there is none; None: not asked for."""
    fields: list[tuple[int, Value]] = []
    for one in samples:
        tokens, values = struct.pack(f"<{len(one.ids)}i", *one.ids), _floats(torch.tensor(one.logps or []))
        fields.append((1, write([*[(1, 1)] * (not one.finished), (2, tokens), (3, values)])))
    return write(fields if prompt_logps is None else [*fields, (2, _floats(prompt_logps))])
