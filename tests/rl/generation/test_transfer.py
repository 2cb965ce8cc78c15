"""Weights on their way to vLLM servers, against workers that receive them as vLLM's would."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from posttrain.rl.generation import transfer
from posttrain.rl.generation.server import Refused
from posttrain.rl.generation.vllm_plugin import GlooReceiver, InitInfo
from posttrain.rl.generation.weights import Weights
from tests import tiny
from tests.distributed import jobs


class Workers:
    """The calls of a server and its workers, which receive weights over gloo as those of vLLM with our plugin do."""

    def __init__(self, number, size=1):
        self.url, self.paths, self.version = f"http://127.0.0.1:{8000 + number}", [], "default"
        self.refuses, self.begun, self.received = False, False, [{} for _ in range(size)]
        self.start()

    def start(self):
        self.workers = [GlooReceiver() for _ in self.received]
        for rank, (worker, received) in enumerate(zip(self.workers, self.received, strict=True)):
            worker.device = torch.device("cpu")
            worker.model = SimpleNamespace(load_weights=received.update)
            worker.parallel_config = SimpleNamespace(rank=rank, world_size=len(self.workers), data_parallel_index=0)

    def call(self, path, body=None, empty=False):
        self.paths.append(path)
        body = json.loads(json.dumps(body))
        if path == "/get_world_size":
            return {"world_size": len(self.workers)}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/init_weight_transfer_engine":
            self.on_each(lambda worker: worker.init_transfer_engine(InitInfo(**body["init_info"])))
        if path == "/start_weight_update":
            if self.begun:
                raise Refused("start_weight_update called while a weight update is already active.", 500)
            self.begun = True
        if path == "/update_weights":
            self.begun = not self.refuses
            if self.refuses:
                raise Refused("out of memory", 500)
            self.on_each(lambda worker: worker.update_weights(body["update_info"]))
        if path == "/finish_weight_update":
            assert self.begun
            self.begun, self.version = False, body["weight_version"]
        return None

    def on_each(self, do):
        with ThreadPoolExecutor(len(self.workers)) as pool:
            list(pool.map(do, self.workers))


ORDER = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


def changed(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_worker_of_every_server_gets_the_weights_over_gloo_in_vllms_order(dtype):
    servers, sender = [Workers(0, size=2), Workers(1)], transfer.Gloo(0, 20)
    model = tiny.causal_lm().to(dtype)
    for version in ("one", "two"):
        sender.send(Weights(changed(model)), servers, version)
        for server in servers:
            assert server.version == version
            for received in server.received:
                assert received.keys() == dict(model.named_parameters()).keys()
                assert all(torch.equal(received[name], weight) for name, weight in model.named_parameters())
    for server in servers:
        steps = [path for path in server.paths if path not in ("/get_world_size", "/weight_info")]
        assert steps == ["/init_weight_transfer_engine", *ORDER, *ORDER]


def test_a_server_whose_last_sender_was_killed_in_between_takes_weights():
    servers, model = [Workers(0), Workers(1)], tiny.causal_lm()
    servers[1].begun = True  # it was told that weights come, and none came
    transfer.Gloo(0, 20).send(Weights(changed(model)), servers, "one")
    for server in servers:
        assert server.version == "one"
        assert all(torch.equal(server.received[0][name], weight) for name, weight in model.named_parameters())
    assert servers[1].paths.count("/finish_weight_update") == 2


def test_weights_leave_over_nccl_after_the_optimizer_has_written_them(monkeypatch):
    """vLLM's sender reads them in streams of its own, which wait for nothing that the trainer's stream has to do."""
    order, device = [], torch.device("cuda", 1)
    stream = SimpleNamespace(synchronize=lambda: order.append("written"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda of: stream if of == device else None)
    sender = transfer.Nccl(0)
    sender._engine = SimpleNamespace(send_weights=lambda: order.append("sent"))
    sender._client, sender._source = SimpleNamespace(), SimpleNamespace()
    sender.send(SimpleNamespace(device=device), [], "two")
    assert order == ["written", "sent"] and sender._client.version == "two"


def test_a_server_samples_after_its_device_has_taken_the_weights(monkeypatch):
    """They are copied to it without a wait, from memory that the next weight takes."""
    order = []
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda: order.append("taken"))
    receiver = GlooReceiver()
    receiver.device, receiver._group = torch.device("cpu"), SimpleNamespace(broadcast=lambda weight: None)
    receiver.model = SimpleNamespace(load_weights=lambda pairs: order.extend(name for name, _ in pairs))
    receiver.update_weights({"names": ["a", "b"], "dtype_names": ["float32"] * 2, "shapes": [[2], [3]]})
    assert order == ["a", "b", "taken"]


@pytest.mark.long
def test_weights_in_pieces_are_sent_by_the_first_process_while_all_gather_them(tmp_path):
    kinds = ("grpo", "grpo-lora")
    options = {"out": str(tmp_path), "fsdp": "full_shard"}
    jobs.do(2, [[kind, "send_weights", {"name": kind} | options] for kind in kinds], tmp_path)
    weights, adapter = (jobs.result(tmp_path, kind) for kind in kinds)
    assert weights["same"] == [True, True] and weights["in_pieces"] and weights["count"] > 10
    assert adapter["same"] == [True] and adapter["in_pieces"] and adapter["count"] == 8


def test_a_server_that_was_started_anew_is_connected_anew():
    server, sender, model = Workers(0), transfer.Gloo(0, 20), tiny.causal_lm()
    sender.send(Weights(model), [server], "one")
    server.version = "default"
    server.start()
    sender.send(Weights(changed(model)), [server], "two")
    assert server.paths.count("/init_weight_transfer_engine") == 2
    assert torch.equal(server.received[0]["lm_head.weight"], model.lm_head.weight)


def test_a_server_that_refuses_weights_says_why_at_once_and_can_be_sent_them_later():
    server, sender, model = Workers(0), transfer.Gloo(0, 20), tiny.causal_lm()
    sender.send(Weights(model), [server], "one")
    server.refuses = True
    with pytest.raises(Refused, match="out of memory"):
        sender.send(Weights(model), [server], "two")
    server.refuses = False
    sender.send(Weights(changed(model)), [server], "three")
    assert torch.equal(server.received[0]["lm_head.weight"], model.lm_head.weight) and server.version == "three"


def test_files_in_a_folder_hold_the_weights_in_parts_of_a_bounded_size(tmp_path, monkeypatch):
    model, calls, limit = tiny.causal_lm(), [], 40_000

    class Server:
        url = "http://127.0.0.1:8000"

        def call(self, path, body=None, empty=False):
            if path == "/weight_info":
                return {"weight_version": "default"}
            calls.append((path, body))
            if path == "/collective_rpc":
                files = sorted(Path(body["kwargs"]["weights_path"]).glob("*.safetensors"))
                parts = [load_file(file) for file in files]
                self.read = {name: weight for part in parts for name, weight in part.items()}
                self.sizes = [[weight.nbytes for weight in part.values()] for part in parts]

    monkeypatch.setattr(transfer, "SHARD_BYTES", limit)
    server, sender = Server(), transfer.Folder(tmp_path)
    for version in ("one", "two"):
        sender.send(Weights(changed(model)), [server], version)
        assert server.read.keys() == dict(model.named_parameters()).keys()
        assert all(torch.equal(server.read[name], weight) for name, weight in model.named_parameters())
        assert len(server.sizes) > 2 and all(sum(sizes) <= limit or len(sizes) == 1 for sizes in server.sizes)
        assert calls[-1] == ("/update_weight_version", {"new_version": version})


def test_the_address_of_this_machine_can_be_set(monkeypatch):
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    assert transfer.address_towards("http://127.0.0.1:8000") == "127.0.0.1"
    monkeypatch.setenv("VLLM_HOST_IP", "10.0.0.7")
    assert transfer.address_towards("http://127.0.0.1:8000") == "10.0.0.7"
