"""What is sent to vLLM's own sender over NCCL, whose communication alone is left out."""

import torch

from posttrain.rl.generation import transfer
from posttrain.rl.generation.weights import Weights
from tests import tiny

ORDER = ["/start_weight_update", "/update_weights", "/finish_weight_update"]


class Recorder:
    def __init__(self, number, size):
        self.url, self.size, self.calls = f"http://127.0.0.1:{8000 + number}", size, []

    def call(self, path, body=None, empty=False):
        self.calls.append((path, body))
        return {"world_size": self.size}


def test_nccl_sends_each_weight_by_vllms_own_sender_to_all_workers(monkeypatch):
    from vllm.distributed.weight_transfer import nccl_engine

    opened, sent = [], []
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: opened.append(info) or "group")
    take = lambda iterator, group, **options: sent.append({name: weight.clone() for name, weight in iterator})  # noqa: E731
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", take)
    servers, sender, model = [Recorder(0, 2), Recorder(1, 1)], transfer.Nccl(51216), tiny.mixture_of_experts()
    for version in ("one", "two"):
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        sender.send(Weights(model), servers, version)
        weights = dict(Weights(model))
        assert sent[-1].keys() == weights.keys() and all(torch.equal(sent[-1][n], w) for n, w in weights.items())
    assert len(opened) == 1 and opened[0].world_size == 4 and opened[0].master_address == "127.0.0.1"
    for server, offset in zip(servers, (1, 3), strict=True):
        calls = server.calls[1:]  # after its size was asked for
        assert [path for path, _ in calls] == ["/init_weight_transfer_engine", *ORDER, *ORDER]
        init = calls[0][1]["init_info"]
        assert init["rank_offset"] == offset and init["world_size"] == 4 and init["master_port"] == 51216
        info = {"names": list(weights), "dtype_names": ["float32"] * len(weights)}
        assert calls[2][1]["update_info"] == info | {"shapes": [list(weight.shape) for weight in weights.values()]}
        assert [calls[place][1] for place in (3, 6)] == [{"weight_version": "one"}, {"weight_version": "two"}]
