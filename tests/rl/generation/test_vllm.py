"""The client of a vLLM server, against local servers that speak the HTTP interfaces with a tiny model behind them."""

import copy
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.agents.environments import Environments
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.transfer import address_towards
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.generation.weights import Weights
from posttrain.rl.samples.samples import Sample
from tests import tiny


class Server(ThreadingHTTPServer):
    def __init__(self, model, handler, **settings):
        super().__init__(("127.0.0.1", 0), handler)
        self.paths, self.lock, self.engine = [], threading.Lock(), LocalGenerator(tiny.tokenizer())
        self.model, self.failures, self.version, self.connections = model, 0, "default", 0
        self.settings = {
            "mode": "raw_logprobs",
            "longest": None,
            "dtype": "torch.bfloat16",
        } | settings
        self.engine.sync_weights(model)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def write(self, prompts, n, asked, seeds):
        """(ids, logprobs as this server tells them, finished)."""
        more = asked.get("generation_kwargs", asked)
        sampling = Sampling(
            asked["max_tokens"], asked["temperature"], asked["top_p"], max(asked["top_k"], 0), stop=tuple(more["stop"]),
            eos_token_ids=tuple(more["stop_token_ids"]),
        )  # fmt: skip
        with self.lock:  # the model is one, and attends in another way while it generates
            done = self.engine.generate(prompts, n, sampling, seeds)
            if self.settings["mode"] == "raw_logprobs":
                logps = [self.raw(prompts[i // n], ids) for i, ids in enumerate(done.ids)]
                return done.ids, logps, done.finished
        return done.ids, done.logps, done.finished

    def read_weights(self, weights_path):
        from safetensors.torch import load_file

        weights = {name: w for path in Path(weights_path).glob("*.safetensors") for name, w in load_file(path).items()}
        missing, unknown = self.model.load_state_dict(weights, strict=False)
        assert not missing and not unknown

    @torch.no_grad()
    def raw(self, prompt, ids):
        logits = self.model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        return logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1).tolist()


class Direct:
    """Hands weights to a server of this process, ``take(weights, server)``."""

    def __init__(self, take):
        self.take = take

    def send(self, weights, servers, version):
        for server in servers:
            server.call("/start_weight_update", {}, empty=True)
            self.take(weights, server)
            server.call("/finish_weight_update", {"weight_version": version}, empty=True)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *args):
        pass

    protocol_version = "HTTP/1.1"  # connections are kept, as real servers do

    def setup(self):
        super().setup()
        self.server.connections += 1

    def answer(self, body, code=200):
        self.send_response(code)
        said = json.dumps(body).encode()
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def asked(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        self.server.last = asked
        if self.server.failures:
            self.server.failures -= 1
            self.answer("busy", 503)
            return None
        return asked


class OpenAI(Handler):
    """What ``vllm serve`` answers."""

    def do_GET(self):
        path = self.path.split("?")[0]
        known = {
            "/health": None,
            "/server_info": {
                "vllm_config": {
                    "model_config": {
                        "logprobs_mode": self.server.settings["mode"],
                        "max_model_len": self.server.settings["longest"],
                        "dtype": self.server.settings["dtype"],
                    }
                }
            },
            "/v1/models": {"data": [{"id": "tiny"}]},
            "/weight_info": {"weight_version": self.server.version},
        }
        self.answer(known.get(path), 200 if path in known else 404)

    def do_POST(self):
        if (asked := self.asked()) is None:
            return
        if self.path == "/collective_rpc":
            return self.answer({"results": [self.server.read_weights(**asked["kwargs"])]})
        if self.path != "/v1/completions":
            asked |= {"weight_version": asked["new_version"]} if "new_version" in asked else {}
            self.server.version = asked.get("weight_version", self.server.version)
            return self.answer(None)
        if len(asked["prompt"]) + asked["max_tokens"] > (self.server.settings["longest"] or 999):
            return self.answer("too long", 400)
        n = asked["n"]
        seeds = [asked["seed"] + number for number in range(n)]  # as vLLM counts them
        done = self.server.write([asked["prompt"]], n, asked, seeds)
        choices = [
            {"index": i, "token_ids": ids, "logprobs": {"token_logprobs": logps}, "finish_reason": reason}
            for i, (ids, logps, reason) in enumerate(
                zip(*done[:2], [("length", "stop")[f] for f in done[2]], strict=True)
            )
        ]
        self.answer({"choices": choices[::-1]})  # in whatever order


@pytest.fixture
def model():
    return tiny.causal_lm(initializer_range=0.3).eval()


@pytest.fixture
def serve(model):
    made = []

    def begin(handler=OpenAI, **settings):
        made.append(Server(copy.deepcopy(model), handler, **settings))
        return made[-1]

    yield begin
    for server in made:
        server.shutdown()


def client_of(server):
    def send(weights, target):
        server.model.load_state_dict(dict(weights), strict=False)

    url = f"http://127.0.0.1:{server.server_port}/"
    return VLLMServerGenerator(url, timeout=5, transport=Direct(send))


def train_a_little(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)


def test_the_servers_completions_are_those_of_the_weights_that_were_sent(model, serve):
    server = serve()
    train_a_little(model)
    client, local = client_of(server), LocalGenerator(tiny.tokenizer())
    client.sync_weights(model)
    names = ["/pause?mode=wait", "/start_weight_update", "/finish_weight_update", "/reset_prefix_cache", "/resume"]
    assert server.paths[:5] == names
    local.sync_weights(model)
    sampling = Sampling(9, eos_token_ids=tuple(range(40)))
    prompts, seeds = [[5, 9, 14], [7, 8]], [1, 2, 3, 4]
    found, expected = client.generate(prompts, 2, sampling, seeds), local.generate(prompts, 2, sampling, seeds)
    assert found.ids == expected.ids and found.finished == expected.finished and not found.is_exact
    for mine, theirs in zip(found.logps, expected.logps, strict=True):
        assert mine == pytest.approx(theirs, abs=1e-5)


def test_a_server_without_vllms_interface_is_refused(model, serve):
    class Old(Handler):
        def do_GET(self):
            self.answer({"status": "ok"}, 200 if self.path == "/health" else 404)

    with pytest.raises(ValueError, match="has no /v1/models, which vLLM's has. Start it with vllm serve"):
        client_of(serve(Old)).sync_weights(model)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_weights_that_did_not_arrive_are_noticed(model, serve, mode):
    client = client_of(serve(mode=mode))
    with torch.no_grad():
        model.lm_head.weight.mul_(3)
    client._transport = Direct(lambda weights, server: None)  # nothing is sent
    with pytest.raises(ValueError, match="differ from the trainer's"):
        client.sync_weights(model)


def test_in_float32_weights_that_are_a_little_old_are_noticed(model, serve):
    clients = {dtype: client_of(serve(dtype=f"torch.{dtype}")) for dtype in ("float32", "bfloat16")}
    for client in clients.values():
        client._transport = Direct(lambda weights, server: None)
        client.sync_weights(model)
    with torch.no_grad():
        model.lm_head.weight.mul_(1.05)
    clients["bfloat16"].sync_weights(model)  # as far apart as two engines in bfloat16 may be
    with pytest.raises(ValueError, match="differ from the trainer's by 0.0[1-9]"):
        clients["float32"].sync_weights(model)


def test_log_probabilities_before_the_temperature_are_not_told(model, serve):
    client = client_of(serve())
    client.sync_weights(model)
    assert client.generate([[5]], 1, Sampling(3, temperature=0.5), [1]).logps is None


def test_a_busy_server_is_asked_again(model, serve, monkeypatch):
    server = serve()
    client, waits = client_of(server), []
    client.sync_weights(model)
    monkeypatch.setattr("posttrain.rl.generation.server.time.sleep", waits.append)
    server.failures = 2
    assert len(client.generate([[5]], 1, Sampling(3), [1]).ids[0]) == 3 and waits == [1, 2]
    server.failures = 9
    with pytest.raises(ConnectionError, match='503: "busy"'):
        client.generate([[5]], 1, Sampling(3), [1])


def test_a_pattern_is_asked_for_as_the_server_knows_it(model, serve):
    server = serve()
    client = client_of(server)
    client.options = {"structured_outputs": {"regex": "a+"}, "presence_penalty": 0.5}
    client.sync_weights(model)
    client.generate([[5]], 1, Sampling(3), [1])
    assert server.last["structured_outputs"] == {"regex": "a+"} and server.last["presence_penalty"] == 0.5


def client_of_several(servers, monkeypatch):
    monkeypatch.setattr("posttrain.rl.generation.server.time.sleep", lambda seconds: None)
    by_port = {str(server.server_port): server for server in servers}

    def send(weights, target):
        by_port[target.url[-5:].strip(":")].model.load_state_dict(dict(weights), strict=False)

    urls = ", ".join(f"http://127.0.0.1:{port}" for port in by_port)
    return VLLMServerGenerator(urls, timeout=5, transport=Direct(send))


def completions_of(server):
    return server.paths.count("/v1/completions")


def test_the_completions_of_a_prompt_are_one_request_over_connections_that_are_kept(model, serve):
    server = serve()
    client = client_of(server)
    client.sync_weights(model)
    before, connections = completions_of(server), server.connections
    assert connections == 1  # all that was said so far
    prompts = [[5 + number] for number in range(6)]
    for _ in range(4):
        done = client.generate(prompts, 8, Sampling(3), list(range(48)))
        assert len(done.ids) == 48
    assert completions_of(server) - before == 4 * 6 and server.connections - connections <= 6


def test_prompts_go_to_the_server_with_the_least_to_do(model, serve, monkeypatch):
    servers = [serve(), serve()]
    client, alone = client_of_several(servers, monkeypatch), LocalGenerator(tiny.tokenizer())
    train_a_little(model)
    client.sync_weights(model)
    alone.sync_weights(model)
    before = [completions_of(server) for server in servers]
    prompts, seeds = [[5 + number] for number in range(8)], list(range(16))
    barrier = threading.Barrier(8)  # all are under way before one is done
    for server in servers:
        write = server.write
        monkeypatch.setattr(server, "write", lambda *asked, write=write: (barrier.wait(60), write(*asked))[1])
    found = client.generate(prompts, 2, Sampling(4), seeds)
    assert [completions_of(server) - count for server, count in zip(servers, before, strict=True)] == [4, 4]
    assert found.ids == alone.generate(prompts, 2, Sampling(4), seeds).ids


@pytest.mark.parametrize("event", ["gone", "started anew"])
def test_a_server_that_is_lost_while_it_writes_is_replaced_by_the_others(model, serve, monkeypatch, event):
    servers = [serve(), serve()]
    client, alone = client_of_several(servers, monkeypatch), LocalGenerator(tiny.tokenizer())
    train_a_little(model)
    client.sync_weights(model)
    alone.sync_weights(model)
    lost, other = servers
    fresh = tiny.causal_lm(seed=7, initializer_range=0.3).state_dict()

    def start_anew(*asked):
        lost.version = "default"
        lost.model.load_state_dict(fresh)
        return write(*asked)

    write = lost.write
    if event == "gone":
        lost.failures = 99
    else:
        monkeypatch.setattr(lost, "write", start_anew)
    prompts, seeds = [[5 + number] for number in range(6)], list(range(6))
    expected = alone.generate(prompts, 1, Sampling(6), seeds).ids
    assert client.generate(prompts, 1, Sampling(6), seeds).ids == expected
    before = completions_of(lost)
    assert client.generate(prompts, 1, Sampling(6), seeds).ids == expected
    assert completions_of(lost) == before  # it is not asked until it was sent weights again
    lost.failures = 0
    monkeypatch.setattr(lost, "write", write)
    client.sync_weights(model)
    assert client.generate(prompts, 1, Sampling(6), seeds).ids == expected
    assert completions_of(lost) > before + 1
    lost.version = other.version = "default"
    with pytest.raises(ConnectionError, match="was started anew, and has lost the weights.*resume the run from its"):
        client.generate(prompts, 1, Sampling(6), seeds)


def test_a_server_that_does_not_answer_in_time_is_given_up(model, serve, monkeypatch):
    server, answered = serve(), threading.Event()
    client = client_of_several([server], monkeypatch)
    client.sync_weights(model)
    write = server.write
    monkeypatch.setattr(server, "write", lambda *asked: (answered.wait(20), write(*asked))[1])
    client.servers[0].timeout = 0.2
    with pytest.raises(ConnectionError, match="has not answered /v1/completions within 0.2 seconds.*vllm_request_tim"):
        client.generate([[5]], 1, Sampling(3), [1])
    answered.set()


def test_servers_that_were_started_differently_are_refused(model, serve, monkeypatch):
    client = client_of_several([serve(), serve(mode="processed_logprobs")], monkeypatch)
    with pytest.raises(ValueError, match="different options, .*--logprobs-mode"):
        client.sync_weights(model)


def test_a_server_of_a_short_context_is_checked_with_a_short_prompt(model, serve):
    client = client_of(serve(longest=12))
    client.sync_weights(model)
    with pytest.raises(ConnectionError, match="400: .too long"):
        client.generate([[5] * 10], 1, Sampling(3), [1])


def test_a_server_that_takes_no_weights_is_refused_with_what_to_set(model, serve):
    with pytest.raises(ValueError, match="was started with weight transfer off.*or set vllm_weight_folder"):
        VLLMServerGenerator(f"http://127.0.0.1:{serve().server_port}").sync_weights(model)


def test_a_server_that_is_not_there_is_said():
    with pytest.raises(ConnectionError, match="cannot be reached"):
        VLLMServerGenerator("http://127.0.0.1:9", timeout=0.1).sync_weights(tiny.causal_lm())


def test_the_address_towards_a_server_of_this_machine_is_its_own():
    assert address_towards("http://127.0.0.1:8000") == "127.0.0.1"


@pytest.mark.parametrize("modules_to_save", [None, ["lm_head"]])
def test_adapters_are_sent_as_the_model_that_they_amount_to(model, modules_to_save):
    from peft import LoraConfig, get_peft_model

    names = dict(model.named_parameters())
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=modules_to_save)
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn_like(parameter))
    before = {name: parameter.clone() for name, parameter in adapted.named_parameters()}
    sent = dict(Weights(adapted))
    for name, parameter in adapted.named_parameters():
        torch.testing.assert_close(parameter, before[name], atol=1e-6, rtol=0)
    whole = dict(adapted.merge_and_unload().named_parameters())
    assert sent.keys() == names.keys() == whole.keys()
    for name, weight in whole.items():
        torch.testing.assert_close(sent[name], weight.detach(), atol=1e-6, rtol=0)


def test_a_trainer_samples_from_a_server(model, serve, tmp_path, monkeypatch):
    server = serve(mode="processed_logprobs")
    sent, read = [], server.read_weights
    monkeypatch.setattr(server, "read_weights", lambda **where: (sent.append(where), read(**where))[1])

    with pytest.warns(UserWarning, match="vllm_max_model_length=99 has no effect without"):
        args = GRPOConfig(
            output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=5,
            max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
            disable_tqdm=True, use_vllm=True, vllm_mode="server", vllm_server_host="127.0.0.1",
            vllm_server_port=server.server_port, vllm_max_model_length=99, vllm_weight_folder=str(tmp_path / "shared"),
        )  # fmt: skip

    def spread(completion_ids):
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    trainer = GRPOTrainer(model, spread, args, [{"prompt": "the cat"}] * 3, None, tiny.tokenizer())
    trainer.train()
    assert len(sent) == 3
    for record in trainer.state.log_history[:3]:  # the server has the weights of each update
        assert record["sampling/sampling_logp_difference/max"] < 1e-4
        low, high = (record[f"sampling/importance_sampling_ratio/{end}"] for end in ("min", "max"))
        assert low <= record["sampling/importance_sampling_ratio/mean"] <= high and high == pytest.approx(1, abs=1e-3)


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


ASKED = [{"role": "user", "content": "2 and 3?"}]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def taught(model):
    """`model`, which has learned to call the tool and to say what it answers."""
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    answered = [
        {"role": "assistant", "content": CALL},
        {"role": "tool", "content": "5"},
        {"role": "assistant", "content": "It is 5"},
    ]
    tools = Environments([add]).schemas_of(Sample({}, None, []))
    text = tokenizer.apply_chat_template([*ASKED, *answered], tools=tools, tokenize=False)
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    labels = ids.clone()
    labels[0, : len(tokenizer(text[: text.index(CALL)])["input_ids"])] = -100
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = model(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if loss < 0.01:
            return model.eval()
    raise AssertionError("it has not learned to call")


@pytest.fixture(scope="module")
def caller():
    return taught(tiny.causal_lm(initializer_range=0.1))


def completed(engine, model, out, **options):
    """Two completions of `ASKED` by a trainer with that engine, tools called in between."""
    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=2, num_generations=2, max_completion_length=150,
        use_cpu=True, temperature=0.05, report_to="none", **options,
    )  # fmt: skip
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    trainer = GRPOTrainer(
        model, lambda completions, **others: [0.0] * len(completions), args, [{"prompt": ASKED}] * 2, None, tokenizer,
        tools=[add], generator=engine,
    )  # fmt: skip
    samples = trainer.new_samples([{"prompt": ASKED}] * 2)
    trainer.generator.sync_weights(trainer.model)
    return trainer.generate(samples, trainer.sampling())


def assert_called(samples):
    tokenizer = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    for one in samples:
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 3}}}
        assert one.completion == [
            {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "5"},
            {"role": "assistant", "content": "It is 5"},
        ]  # fmt: skip
        told = "\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(one.ids) == f"{CALL}<|im_end|>{told}It is 5<|im_end|>" and one.finished
        assert tokenizer.decode([i for i, learn in zip(one.ids, one.learn, strict=True) if not learn]) == told


@pytest.mark.long
@pytest.mark.parametrize("kind", ["local", "transformers", "continuous", "vllm"])
def test_every_engine_goes_through_the_same_tool_loop(kind, caller, serve, tmp_path):
    model, engine = copy.deepcopy(caller), None
    if kind == "vllm":
        server = serve()
        server.model.load_state_dict(model.state_dict())
        engine = client_of(server)
    options = {
        "transformers": {"cache_implementation": "dynamic"},
        "continuous": {"use_transformers_continuous_batching": True},
    }
    if kind == "continuous":
        options[kind]["transformers_continuous_batching_config"] = {"num_blocks": 32, "block_size": 32}
    assert_called(completed(engine, model, tmp_path, **options.get(kind, {})))
