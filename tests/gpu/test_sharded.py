"""FSDP2 with one process: over nccl on a CUDA device, else over gloo on the CPU."""

import pytest
import torch

from posttrain.core.distributed import shard_settings, sharding
from tests import tiny


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_a_sharded_model_takes_the_steps_of_a_whole_one(precision, tmp_path, device):
    ids = torch.arange(4, 100, device=device).view(4, 24)

    def steps(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        found = []
        for _ in range(3):
            with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return found

    whole = tiny.causal_lm(tie_word_embeddings=True).to(device)
    expected = steps(whole)
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        settings, where = (
            shard_settings.Sharding(),
            torch.device(device, 0) if device == "cuda" else torch.device("cpu"),
        )
        mesh = sharding.make_mesh(settings, device, 1, 1)
        model = sharding.shard(tiny.causal_lm(tie_word_embeddings=True), settings, mesh, where, precision)
        assert sharding.is_sharded(model) and len(sharding.units_of(model)) == 3
        limit = 1e-4 if precision == "no" else 0.02
        assert steps(model) == pytest.approx(expected, rel=limit)
        gathered = sharding.whole_state_dict(model, lambda name: True)
    finally:
        torch.distributed.destroy_process_group()
    if precision == "no":
        for name, value in whole.state_dict().items():
            torch.testing.assert_close(gathered[name].cpu(), value.cpu(), rtol=1e-3, atol=1e-4, msg=name)
