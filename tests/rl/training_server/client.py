"""A client of the training API by its HTTP bodies alone, and the loop of peft and torch that it is compared with."""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import struct

import torch

from posttrain.rl.agents.endpoint import serving
from posttrain.rl.rewards import background
from posttrain.rl.training_server.policies import Base
from posttrain.rl.training_server.server import TrainingServer
from tests import tiny

HEADERS = {"X-API-Key": "tml-test", "Content-Type": "application/json"}
PROTOBUF = "application/x-protobuf"
ROWS = [([5, 6, 7, 8, 9], [6, 7, 8, 9, 10], [0.0, 0.0, 1.0, 1.0, 0.5]), ([11, 12, 13], [12, 13, 14], [1.0, 1.0, 1.0])]


def number(value):
    found = b""
    while value > 127:
        found, value = found + bytes([value % 128 + 128]), value // 128
    return found + bytes([value])


def sized(field, data):
    data = data.encode() if isinstance(data, str) else data
    return number(field * 8 + 2) + number(len(data)) + data


def tensor(values):
    is_whole = all(isinstance(value, int) for value in values)
    data = struct.pack(f"<{len(values)}{'q' if is_whole else 'f'}", *values)
    return sized(1, data) + number(3 * 8) + number(2 if is_whole else 1)


def message(model, rows, loss="cross_entropy", seq=0, names=("target_tokens", "weights"), only=False, **options):
    """The body of forward_backward; each row: its tokens, then the inputs `names`."""
    body = sized(1, model) + number(2 * 8) + number(seq) + sized(4, loss) + number(6 * 8) + number(only)
    for tokens, *inputs in rows:
        row = sized(1, sized(1, sized(1, struct.pack(f"<{len(tokens)}i", *tokens))))
        row += b"".join(
            sized(2, sized(1, name) + sized(2, tensor(values))) for name, values in zip(names, inputs, strict=True)
        )
        body += sized(3, row)
    for name, value in options.items():
        body += sized(7, sized(1, name) + sized(2, number(8 + 1) + struct.pack("<d", value)))
    return body


def fields(data):
    """[(field, value)] of a message, read without posttrain."""
    found, place = [], 0

    def take():
        nonlocal place
        value = shift = 0
        while True:
            byte, place = data[place], place + 1
            value, shift = value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while place < len(data):
        key = take()
        if key % 8 == 0:
            found.append((key // 8, take()))
            continue
        size = 8 if key % 8 == 1 else take()
        found.append((key // 8, data[place : place + size]))
        place += size
    return found


def floats(data):
    return [value for (value,) in struct.iter_unpack("<f", data)]


class Client:
    """A server of a tiny model in this process, and what is sent to it.

    Attributes:
        model: the base. session: which is begun.
    """

    def __init__(self, output, model=None, key=None, **options):
        self.model = tiny.causal_lm() if model is None else model
        self.base = Base(self.model, tiny.tokenizer(), "tiny", **options)
        self.training = TrainingServer(self.base, output, key)
        self.server, listening, self.address = serving(self.training.app(), "127.0.0.1")
        asyncio.run_coroutine_threadsafe(self.server.serve(sockets=[listening]), background.event_loop())
        self.sessions = 0
        self.begin()

    def begin(self):
        self.session, self.models, self.samplers = self.json("create_session", {})["session_id"], 0, 0

    def close(self):
        self.server.should_exit = True
        self.training.worker.close()

    def send(self, path, body, headers=None, method="POST"):
        """(status, type, body)."""
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=60)
        connection.request(method, f"/api/v1/{path}", body, HEADERS | (headers or {}))
        answer = connection.getresponse()
        found = answer.status, answer.getheader("content-type"), answer.read()
        connection.close()
        return found

    def json(self, path, body, status=200):
        code, _, found = self.send(path, json.dumps(body).encode())
        assert code == status, found
        return json.loads(found)

    def result(self, answer):
        """The result behind an answer: a dict, or bytes."""
        code, kind, found = self.send("retrieve_future", json.dumps({"request_id": answer["request_id"]}).encode())
        assert code == 200, found
        return found if kind == PROTOBUF else json.loads(found)

    def do(self, route, /, **body):
        return self.result(self.json(route, body))

    def create(self, rank=4, seed=1, base="tiny", **lora):
        body = {"session_id": self.session, "model_seq_id": self.models, "base_model": base}
        self.models += 1
        return self.do("create_model", **body, lora_config={"rank": rank, "seed": seed, **lora})

    def submit(self, *given, **options):
        code, _, found = self.send("forward_backward", message(*given, **options), {"Content-Type": PROTOBUF})
        assert code == 200, found
        return json.loads(found)

    def forward_backward(self, *given, **options):
        """(the loss, the log-probabilities of each row)."""
        found = self.result(self.submit(*given, **options))
        assert isinstance(found, bytes), found
        parts = fields(found)
        metric = dict(fields(next(value for field, value in parts if field == 3)))
        record = dict(fields(next(value for field, value in parts if field == 2)))
        assert metric[1] == b"loss:sum" and dict(parts)[1] == b"ArrayRecord"
        batched = dict(fields(dict(fields(record[2]))[2]))
        ends = [end // 4 for (end,) in struct.iter_unpack("<q", batched[2])]
        logps = floats(batched[1])
        assert record[3] == len(ends) - 1
        return struct.unpack("<d", metric[2])[0], [logps[a:b] for a, b in itertools.pairwise(ends)]

    def step(self, model, **params):
        return self.do("optim_step", model_id=model, adam_params={"learning_rate": 1e-2, **params})

    def sampler(self, model=None, path=None):
        """The sampler of the weights that `model` has now, of saved ones, or of the base."""
        self.samplers += 1
        about = {"sampling_session_seq_id": self.samplers}
        if model is not None:
            return self.do("save_weights_for_sampler", model_id=model, **about)["sampling_session_id"]
        body = {"session_id": self.session, "model_path": path, "base_model": None if path else "tiny", **about}
        return self.json("create_sampling_session", body)["sampling_session_id"]

    def ask(self, sampler, prompt, seq, count=1, status=200, more=None, **params):
        body = {"sampling_session_id": sampler, "seq_id": seq, "num_samples": count, "sampling_params": params}
        body["prompt"] = {"chunks": [{"type": "encoded_text", "tokens": prompt}]}
        return self.json("asample", body | (more or {}), status)

    def sample(self, *given, **options):
        """([(tokens, log-probabilities, whether a stop ended them)], log-probabilities of the prompt or None)."""
        found = self.result(self.ask(*given, **options))
        assert isinstance(found, bytes), found
        parts = fields(found)
        rows = [dict(fields(value)) for field, value in parts if field == 1]
        rows = [([i for (i,) in struct.iter_unpack("<i", row[2])], floats(row[3]), row.get(1, 0) == 0) for row in rows]
        return rows, next((floats(value) for field, value in parts if field == 2), None)


def logps_of(model, tokens, targets):
    """(T,) log-probabilities by the model's own logits."""
    logits = model(input_ids=torch.tensor([tokens])).logits[0].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(targets).unsqueeze(1)).squeeze(1)
