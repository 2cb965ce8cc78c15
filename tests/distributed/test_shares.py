"""Files of weights that two processes write, each its own, beside the one that the main process writes."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from posttrain.core.checkpoint import shares
from tests import tiny, versions
from tests.distributed import jobs

FSDP = {"fsdp": "full_shard"}
SPLIT = {"parallelism_config": {"tp_size": 2}}
CASES = {
    "plain": FSDP,
    "tied": FSDP | {"tied": True},
    "split": SPLIT,
    "qwen3_moe": FSDP | {"arch": "qwen3_moe"},
    "mixtral": FSDP | {"arch": "mixtral"},
    "gpt_oss": FSDP | {"arch": "gpt_oss"},
    "experts": {"arch": "qwen3_moe", "parallelism_config": {"ep_size": 2}},
}
if not versions.IS_CURRENT:
    del CASES["split"], CASES["experts"]
OTHERS = {"full_disk": FSDP | {"full_disk": True}, "apart": FSDP | {"apart": True}}


@pytest.fixture(scope="session")
def saved(shared):
    def make(folder):
        work = CASES | OTHERS
        jobs.do(2, [[name, "saved_twice", {"out": str(folder / f"{name}.out")} | work[name]] for name in work], folder)

    return jobs.once(shared, "shares", make)


def tensors_in(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", CASES)
def test_the_files_hold_the_tensors_that_one_file_does_under_the_same_names(saved, name):
    one, several = saved / f"{name}.out" / "one", saved / f"{name}.out" / "shares"
    expected, found = tensors_in(one), tensors_in(several)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(found[key], tensor), key
    index = json.loads((several / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in several.glob("*.safetensors"))
    assert len(files) >= 4 and sorted(set(index["weight_map"].values())) == files
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    for key, file in index["weight_map"].items():
        assert key in load_file(several / file)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in expected.values())
    beside = {path.name for path in one.iterdir() if path.suffix != ".safetensors"}
    assert beside == {path.name for path in several.iterdir() if path.suffix != ".safetensors"} - {
        "model.safetensors.index.json"
    }


@pytest.mark.parametrize("name", CASES)
def test_from_pretrained_reads_them(saved, name):
    expected, told = AutoModelForCausalLM.from_pretrained(saved / f"{name}.out" / "one", output_loading_info=True)
    model, info = AutoModelForCausalLM.from_pretrained(saved / f"{name}.out" / "shares", output_loading_info=True)
    assert info == told and not any(info.values())
    for (key, tensor), (_, wanted) in zip(model.state_dict().items(), expected.state_dict().items(), strict=True):
        assert torch.equal(tensor, wanted), key


@pytest.mark.parametrize("name", CASES)
def test_no_process_has_the_model_whole(saved, name):
    main, other = jobs.result(saved, name)
    assert main and other
    assert not set(main) & set(other)


def test_where_one_process_cannot_write_all_say_so(saved):
    main, other = jobs.result(saved, "full_disk")
    failed = f"OSError: [Errno 28] No space left on device: '{saved / 'full_disk.out'}"
    assert main.startswith(f"CheckpointError: The weights were not written: rank 1: {failed}")
    assert other.startswith(failed)


def test_where_no_other_process_sees_the_folder_the_main_one_writes_all(saved):
    main, other = jobs.result(saved, "apart")
    assert main and not other
    folder = saved / "apart.out"
    expected, found = tensors_in(folder / "one"), tensors_in(folder / "shares" / "0")
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in expected)
    assert not (folder / "shares" / "1").exists()
    assert not list((folder / "shares" / "0").glob(".seen-*"))


def test_layers_and_tied_weights_stay_together_and_shares_are_about_equal():
    model = tiny.causal_lm(num_hidden_layers=12, tie_word_embeddings=True)
    parts = shares.divide(model, 4)
    state = model.state_dict()
    assert sorted(name for part in parts for name in part) == sorted(state)
    for layer in range(12):
        assert sum(any(f".layers.{layer}." in name for name in part) for part in parts) == 1
    assert any({"model.embed_tokens.weight", "lm_head.weight"} <= part for part in parts)
    sizes = [sum(state[name].nbytes for name in part) for part in parts]
    largest = max(sum(t.nbytes for n, t in state.items() if f".layers.{i}." in n) for i in range(12))
    assert max(sizes) <= sum(sizes) / 4 + max(largest, state["lm_head.weight"].nbytes * 2)


def test_a_share_of_a_model_of_70_billion_parameters_is_at_most_a_layer_more_than_an_equal_one():
    width = {"hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64, "num_key_value_heads": 8}
    config = LlamaConfig(**width, num_hidden_layers=80, vocab_size=128256, tie_word_embeddings=False)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    state = model.state_dict()
    sizes = [sum(state[name].nbytes for name in part) for part in shares.divide(model, 8)]
    assert sum(sizes) == pytest.approx(131 * 2**30, rel=0.01)
    assert max(sizes) <= 18 * 2**30


def test_more_processes_than_layers_leave_some_without_a_share():
    parts = shares.divide(tiny.causal_lm(), 40)
    assert sum(map(bool, parts)) < 40 and len(set().union(*parts)) == len(tiny.causal_lm().state_dict())
