"""What saving holds of a model of 70 billion parameters beside each process's share, on shapes alone."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.cli.tools import memory_mesh
from posttrain.cli.tools.memory_count import LiveBytes
from posttrain.core.checkpoint import sharded
from posttrain.core.distributed import sharding
from posttrain.sft import SFTConfig

#: Llama 3 70B, with 2 of its 80 layers.
WIDTH = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
HEAD = 128256 * 8192 * 2  # bytes of its largest matrices


@pytest.fixture
def divided(tmp_path):
    """(model, optimizer with its state, the bytes that live) in one of eight processes."""
    config = LlamaConfig(**WIDTH, num_hidden_layers=2, vocab_size=128256, tie_word_embeddings=False)
    args = SFTConfig(str(tmp_path), fsdp="full_shard", bf16=True, use_cpu=True, report_to="none")
    with memory_mesh.imagined(8):
        mesh = memory_mesh.mesh_of(args, "cpu", config)
        with FakeTensorMode(allow_non_fake_inputs=True):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
            memory_mesh.divide(model, mesh, torch.device("cpu"), "bf16")
            for parameter in model.parameters():
                parameter.grad = torch.zeros_like(parameter)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
            live = LiveBytes()
            with live:
                optimizer.step()
                live.add([*model.parameters(), *model.buffers()])
                live.peak = live.now
                yield model, optimizer, live


def test_a_process_saves_its_parts_where_they_are(divided):
    model, optimizer, live = divided
    before, saved = live.now, (sharded.part(dict(model.state_dict())), sharded.part(optimizer.state_dict()))
    assert live.peak == live.now == before
    assert saved[0]["lm_head.weight"]["values"].nbytes == HEAD // 8


def test_a_model_that_is_gathered_for_one_file_takes_a_matrix_at_a_time_on_the_device(divided):
    model, _, live = divided
    before = live.now
    assert sharding.whole_state_dict(model, keep=lambda name: False) == {}
    assert live.now == before
    assert HEAD <= live.peak - before <= 1.01 * HEAD < 2 * 2**30
