"""The client of a vLLM server, against a local server that speaks its HTTP interface with a tiny model behind it."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.vllm import VLLMServerGenerator
from tests import tiny


class Server(ThreadingHTTPServer):
    def __init__(self, model):
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths, self.lock, self.engine = [], threading.Lock(), LocalGenerator(tiny.tokenizer())
        self.model = model
        self.engine.sync_weights(model)
        threading.Thread(target=self.serve_forever, daemon=True).start()


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    def answer(self, body, code=200):
        self.send_response(code)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def do_GET(self):
        path = self.path.split("?")[0]
        known = {
            "/health": None,
            "/server_info": {"vllm_config": {"model_config": {"logprobs_mode": "raw_logprobs"}}},
            "/v1/models": {"data": [{"id": "tiny"}]},
        }
        self.answer(known.get(path), 200 if path in known else 404)

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.paths.append(self.path)
            if self.path != "/v1/completions":
                return self.answer(None)
            sampling = Sampling(asked["max_tokens"], asked["temperature"], asked["top_p"], asked["top_k"],
                                stop=tuple(asked["stop"]), eos_token_ids=tuple(asked["stop_token_ids"]))  # fmt: skip
            done = self.server.engine.generate([asked["prompt"]], 1, sampling, [asked["seed"]])
        reason = "stop" if done.finished[0] else "length"
        logprobs = {"token_logprobs": done.logps[0]}
        self.answer({"choices": [{"token_ids": done.ids[0], "logprobs": logprobs, "finish_reason": reason}]})


@pytest.fixture
def model():
    return tiny.causal_lm(initializer_range=0.3).eval()


@pytest.fixture
def server(model):
    made = Server(copy.deepcopy(model))
    yield made
    made.shutdown()


def client_of(server):
    def send(weights, client):
        server.model.load_state_dict(dict(weights), strict=False)

    return VLLMServerGenerator(f"http://127.0.0.1:{server.server_port}/", timeout=5, send=send)


def test_the_servers_completions_are_those_of_the_weights_that_were_sent(model, server):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    client, local = client_of(server), LocalGenerator(tiny.tokenizer())
    client.sync_weights(model)
    assert server.paths[:3] == ["/start_weight_update", "/finish_weight_update", "/reset_prefix_cache"]
    local.sync_weights(model)
    sampling = Sampling(9, eos_token_ids=tuple(range(40)))
    prompts, seeds = [[5, 9, 14], [7, 8]], [1, 2, 3, 4]
    found, expected = client.generate(prompts, 2, sampling, seeds), local.generate(prompts, 2, sampling, seeds)
    assert found.ids == expected.ids and found.finished == expected.finished and not found.is_exact
    for mine, theirs in zip(found.logps, expected.logps, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_weights_that_did_not_arrive_are_noticed(model, server):
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    client = client_of(server)
    client._send = lambda weights, client: None
    with pytest.raises(ValueError, match="differ from the trainer's"):
        client.sync_weights(model)


def test_log_probabilities_before_the_temperature_are_not_told(model, server):
    client = client_of(server)
    client.sync_weights(model)
    assert client.generate([[5]], 1, Sampling(3, temperature=0.5), [1]).logps is None


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(ConnectionError, match="cannot be reached"):
        VLLMServerGenerator("http://127.0.0.1:9", timeout=0.1).sync_weights(tiny.causal_lm())
