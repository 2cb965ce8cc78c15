"""Adapters on published float8 weights: the base is what its blocks and scales say, and the adapter learns on it."""

import json

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig
from safetensors.torch import load_file, save_file

from posttrain.lm.loading.loading import load_causal_lm
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

BLOCK = 16
LAYERS = ("self_attn", "mlp")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(a folder as finegrained float8 is published, the weights that it stands for)."""
    folder = tmp_path_factory.mktemp("float8")
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    stored, meant = {}, {}
    for name, weight in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = weight.to(torch.bfloat16)
        if weight.ndim == 2 and any(f".{part}." in name for part in LAYERS):
            blocks = weight.unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK))
            scale = blocks.abs().amax((1, 3)) / torch.finfo(torch.float8_e4m3fn).max
            wide = scale[:, None, :, None]
            stored[name] = (blocks / wide).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            read = stored[name].float().unflatten(0, (-1, BLOCK)).unflatten(2, (-1, BLOCK)) * wide
            meant[name] = read.flatten(2).flatten(0, 1)
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    quantized = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    return str(folder), meant


def test_a_machine_without_kernels_reads_the_weights_that_are_meant(base):
    folder, meant = base
    found = load_causal_lm(folder).state_dict()
    assert set(found) == set(meant)
    for name, weight in meant.items():
        torch.testing.assert_close(found[name].float(), weight.float(), rtol=2**-8, atol=0, msg=name)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "auto"])
def test_all_weights_get_one_type_and_multiply(base, dtype):
    model = load_causal_lm(base[0], {"dtype": dtype})
    expected = torch.float32 if dtype == "auto" else getattr(torch, dtype)  # the config's own, of the tiny model
    assert {parameter.dtype for parameter in model.parameters()} == {expected}
    assert model(input_ids=torch.arange(8)[None]).logits.isfinite().all()


def test_an_adapter_is_trained_on_them_and_goes_on(base, tmp_path):
    def run(steps):
        args = SFTConfig(
            str(tmp_path), max_steps=steps, save_steps=2, learning_rate=1e-2, per_device_train_batch_size=4,
            logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=True, bf16=False, max_length=32,
        )  # fmt: skip
        rows = Dataset.from_list([{"text": text} for text in tiny.CORPUS[:4]])
        return SFTTrainer(base[0], args, train_dataset=rows, peft_config=LoraConfig(r=4, target_modules="all-linear"))

    trainer = run(4)
    before = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    trainer.train()
    losses = [record["loss"] for record in trainer.state.log_history if "loss" in record]
    assert losses[-1] < losses[0] - 0.05
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters() if not p.requires_grad)
    saved = load_file(tmp_path / "checkpoint-4" / "adapter_model.safetensors")
    assert saved and all(".lora_" in name for name in saved)
    resumed = run(4)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = dict(trainer.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters() if p.requires_grad)
