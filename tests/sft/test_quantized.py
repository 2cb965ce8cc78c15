"""Adapters on a base of 4 or 8 bits, on the CPU build of bitsandbytes: loaded as asked, trained, resumed to the bit."""

import json
import re
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from posttrain.cli import main
from posttrain.core.models import trainable
from posttrain.lm.loading import loading
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

pytest.importorskip("bitsandbytes")

ROWS = [{"prompt": text[:30], "completion": text[30:60]} for text in tiny.CORPUS] * 2
LORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "up_proj"])
DORA = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj"], use_dora=True)
FOUR = {
    "load_in_4bit": True,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
}
EIGHT = {"load_in_8bit": True}
#: How a script may ask for it: what becomes an argument of the trainer, and what becomes `model_init_kwargs`.
WAYS = {
    "argument": lambda bits: (BitsAndBytesConfig(**bits), None),
    "argument as a dict": lambda bits: (bits, None),
    "in model_init_kwargs": lambda bits: (None, {"quantization_config": BitsAndBytesConfig(**bits)}),
    "in model_init_kwargs as a dict": lambda bits: (None, {"quantization_config": bits}),
    "in model_init_kwargs as JSON": lambda bits: (None, json.dumps({"quantization_config": bits})),
    "field by field": lambda bits: (None, dict(bits)),
    "both, as older scripts do": lambda bits: (
        BitsAndBytesConfig(**bits),
        {name: True for name in bits if "load" in name},
    ),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.causal_lm(hidden_size=64, head_dim=16, intermediate_size=128).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def make(base, out, bits, way="argument", peft_config=LORA, **changes):
    config, kwargs = WAYS[way](bits)
    usual = dict(
        output_dir=str(out), per_device_train_batch_size=4, max_steps=4, learning_rate=1e-2, logging_steps=1,
        max_length=64, save_steps=1, report_to="none", use_cpu=True, disable_tqdm=True, model_init_kwargs=kwargs,
    )  # fmt: skip
    torch.manual_seed(1)
    args = SFTConfig(**(usual | changes))
    return SFTTrainer(base, args, train_dataset=ROWS, peft_config=peft_config, quantization_config=config)


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def state(trainer):
    return {name: value for name, value in trainer.model.state_dict().items() if isinstance(value, torch.Tensor)}


def kinds(trainer):
    return {type(module).__name__ for module in trainer.model.get_base_model().modules()} & {
        "Linear4bit",
        "Linear8bitLt",
    }


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("bits", [FOUR, EIGHT], ids=["4 bits", "8 bits"])
def test_a_base_is_quantized_however_it_is_asked_for(bits, way, base, tmp_path):
    trainer = make(base, tmp_path, bits, way)
    assert kinds(trainer) == {"Linear4bit" if bits is FOUR else "Linear8bitLt"}
    config = trainer.model.get_base_model().config.quantization_config
    if bits is FOUR:
        assert config.bnb_4bit_quant_type == "nf4" and config.bnb_4bit_compute_dtype == torch.bfloat16
        if way != "both, as older scripts do":
            assert config.bnb_4bit_use_double_quant
            quantized = next(
                m for m in trainer.model.modules() if type(m).__name__ == "Linear4bit" and m.weight.dtype == torch.uint8
            )
            assert quantized.weight.quant_state.nested


CHANGES = [{}, {"gradient_checkpointing": False}, {"bf16": True}, {"packing": True}]
# Of 8 bits that were never on a GPU, peft 0.21 cannot tell the magnitudes that DoRA begins with.
LEARNED = [(bits, changes) for bits in (FOUR, EIGHT) for changes in CHANGES] + [(FOUR, {"peft_config": DORA})]


@pytest.mark.rotated
@pytest.mark.parametrize(
    ("bits", "changes"), LEARNED, ids=lambda value: "DoRA" if "peft_config" in value else str(value)
)
def test_adapters_learn_on_it_and_a_run_goes_on_to_the_same_bits(bits, changes, base, tmp_path):
    straight = make(base, tmp_path, bits, **changes)
    before = {name: value.clone() for name, value in state(straight).items()}
    straight.train()
    assert losses(straight)[-1] < losses(straight)[0] - 0.02
    changed = {name for name, value in state(straight).items() if not torch.equal(value, before[name])}
    assert changed == {name for name, p in straight.model.named_parameters() if p.requires_grad}
    assert {p.dtype for p in straight.model.parameters() if p.requires_grad} == {torch.bfloat16}
    resumed = make(base, tmp_path, bits, **changes)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    expected = state(straight)
    assert [name for name, value in state(resumed).items() if not torch.equal(value, expected[name])] == []
    assert losses(resumed) == losses(straight)
    assert not (tmp_path / "checkpoint-4" / "model.safetensors").exists()


def test_experts_that_stay_as_they_are_are_told_and_train_in_4_bits_where_asked(tmp_path, caplog):
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    tiny.mixture_of_experts(hidden_size=64, head_dim=16).save_pretrained(tmp_path / "base")

    def run():
        four = BitsAndBytesConfig(**FOUR)
        model = loading.load_causal_lm(str(tmp_path / "base"), quantization_config=four)
        for module in list(model.modules()):
            for name in [n for n, p in module.named_parameters(recurse=False) if p.ndim == 3]:
                parametrize.replace_parameter_4bit(module, name, quant_type="nf4", compress_statistics=True)
        args = SFTConfig(
            str(tmp_path / "out"), max_steps=4, save_steps=2, use_cpu=True, report_to="none", logging_steps=1,
            learning_rate=1e-2,
        )  # fmt: skip
        torch.manual_seed(1)
        lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        return SFTTrainer(model, args, train_dataset=ROWS, peft_config=lora, processing_class=tiny.tokenizer())

    straight, resumed = run(), run()
    assert "the experts of this Qwen3MoeForCausalLM, 3" in caplog.text and "stay in torch.float32" in caplog.text
    experts = [p for n, p in straight.model.named_parameters() if ".experts." in n]
    assert experts and all(p.dtype is torch.uint8 for p in experts)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert losses(resumed) == losses(straight) and losses(straight)[-1] < losses(straight)[0]
    expected = dict(straight.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters())


def test_recomputed_layers_change_no_adapter(base, tmp_path):
    trained = []
    for on in (False, True):
        trainer = make(base, tmp_path / str(on), FOUR, gradient_checkpointing=on)
        trainer.train()
        trained.append({name: p for name, p in trainer.model.named_parameters() if p.requires_grad})
    assert all(torch.equal(parameter, trained[1][name]) for name, parameter in trained[0].items())


def test_what_was_trained_is_what_peft_puts_on_a_base_of_the_same_bits(base, tmp_path):
    trainer = make(base, tmp_path, FOUR)
    trainer.train()
    ids = torch.arange(4, 20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**FOUR), dtype=torch.float32
    )
    loaded = PeftModel.from_pretrained(loaded, tmp_path / "checkpoint-4").eval()
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected, rtol=0, atol=5e-3)  # float32 adapters there
        with loaded.disable_adapter():
            assert (loaded(input_ids=ids).logits - expected).abs().max() > 0.05


def test_a_model_that_was_quantized_before_is_trained_too(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**FOUR), dtype=torch.float32
    )
    model.save_pretrained(tmp_path / "four")
    tiny.tokenizer().save_pretrained(tmp_path / "four")
    args = SFTConfig(
        str(tmp_path / "out"), max_steps=3, use_cpu=True, report_to="none", logging_steps=1, learning_rate=1e-2
    )
    trainer = SFTTrainer(str(tmp_path / "four"), args, train_dataset=ROWS, peft_config=LORA)
    assert kinds(trainer) == {"Linear4bit"}
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]
    with pytest.raises(ValueError, match="Pass peft_config"):
        SFTTrainer(str(tmp_path / "four"), args, train_dataset=ROWS)


# On processors with AVX512-BF16, layers that an evaluation packed passed no gradient on
def test_an_evaluation_before_training_takes_no_gradient_away(base, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        base, quantization_config=BitsAndBytesConfig(**FOUR), dtype=torch.float32
    )
    with torch.no_grad():
        model.eval()(torch.arange(4, 20)[None])  # before a trainer sees it
    args = SFTConfig(
        str(tmp_path),
        max_steps=1,
        use_cpu=True,
        report_to="none",
        logging_steps=1,
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    tokenizer = tiny.tokenizer()
    trainer = SFTTrainer(model, args, train_dataset=ROWS, processing_class=tokenizer, peft_config=LORA)
    trainer.evaluate(trainer.train_dataset)
    trainer.train()
    assert trainer.state.log_history[-2]["grad_norm"] > 1e-3
    first = {
        name for name, p in trainer.model.named_parameters() if "layers.0" in name and "lora_B" in name and p.any()
    }
    assert len(first) == 3  # each adapter of the first layer, far below the loss, moved


def test_quantized_weights_alone_are_refused_with_the_remedy(base, tmp_path):
    with pytest.raises(ValueError, match=r"quantized weights.* cannot be trained themselves. Pass peft_config"):
        make(base, tmp_path, FOUR, peft_config=None)


def test_two_descriptions_that_differ_are_refused(base):
    for config in (BitsAndBytesConfig(load_in_8bit=True), {"load_in_8bit": True}):
        with pytest.raises(ValueError, match="load_in_4bit=True, which contradicts quantization_config"):
            loading.load_causal_lm(base, {"load_in_4bit": True}, config)
    plain = loading.load_causal_lm(base, {"load_in_4bit": False, "load_in_8bit": False})
    assert not trainable.is_quantized(plain)


def test_torchaos_eight_bits_are_trained_on_and_resumed_to_the_bit(base, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    def run():
        args = SFTConfig(
            str(tmp_path),
            max_steps=4,
            save_steps=2,
            use_cpu=True,
            report_to="none",
            logging_steps=1,
            learning_rate=1e-2,
        )
        torch.manual_seed(1)
        quantized = TorchAoConfig(Int8WeightOnlyConfig())
        return SFTTrainer(base, args, train_dataset=ROWS, peft_config=LORA, quantization_config=quantized)

    straight, resumed = run(), run()
    assert trainable.is_quantized(straight.model)
    straight.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert losses(resumed) == losses(straight) and losses(straight)[-1] < losses(straight)[0]
    expected = dict(straight.model.named_parameters())
    assert all(torch.equal(p, expected[name]) for name, p in resumed.model.named_parameters() if p.requires_grad)


def rounded_to(bits):
    """Of torchao: weights of 4 or 8 bits, or of 4 beside activations of 8; or both in MXFP8 or MXFP4."""
    from torchao import quantization

    if bits.startswith("MX"):
        from torchao.prototype.mx_formats import MXDynamicActivationMXWeightConfig
        from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

        kind = {"MXFP8": torch.float8_e4m3fn, "MXFP4": torch.float4_e2m1fn_x2}[bits]
        return MXDynamicActivationMXWeightConfig(32, kind, kind, KernelPreference.EMULATED)
    group = quantization.PerGroup(32)
    if bits == "8 and 4":
        options = {"weight_dtype": torch.int4, "weight_granularity": group}
        return quantization.Int8DynamicActivationIntxWeightConfig(**options)
    return quantization.IntxWeightOnlyConfig(torch.int4 if bits == "4" else torch.int8, granularity=group)


@pytest.mark.parametrize("bits", ["4", "8", "8 and 4", "MXFP8", "MXFP4"])
def test_what_torchao_rounds_in_training_is_what_it_exports_to_the_bit(bits, base, tmp_path):
    pytest.importorskip("torchao")
    from torchao.quantization import quantize_
    from torchao.quantization.qat import QATConfig
    from transformers import TorchAoConfig

    from posttrain.lm.loss.lm_head import supports_loss_in_head

    dtype = torch.bfloat16 if bits.startswith("MX") else torch.float32

    def run():
        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
        prepared = QATConfig(rounded_to(bits), step="prepare")
        quantize_(model, prepared, filter_fn=lambda part, path: type(part) is torch.nn.Linear and path != "lm_head")
        args = SFTConfig(
            str(tmp_path / "out"), max_steps=4, save_steps=2, use_cpu=True, report_to="none", logging_steps=1,
            learning_rate=1e-2, check_saved_model=False,
        )  # fmt: skip
        return SFTTrainer(model, args, train_dataset=ROWS, processing_class=tiny.tokenizer())

    straight, resumed = run(), run()
    assert supports_loss_in_head(straight.model) is None
    straight.train()
    straight.save_model()
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    assert losses(resumed) == losses(straight) and losses(straight)[-1] < losses(straight)[0]

    def logits(model):
        with torch.no_grad():
            return model.eval()(input_ids=torch.arange(4, 20)[None]).logits

    expected, as_saved = logits(straight.model), AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert (logits(as_saved) - expected).abs().max() > 1e-3
    config = TorchAoConfig(rounded_to(bits))
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=config, dtype=dtype)
    rounded.save_pretrained(tmp_path / "rounded")
    for model in (rounded, AutoModelForCausalLM.from_pretrained(tmp_path / "rounded")):
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=0)


def test_the_page_on_torchaos_rounding_in_training_runs(base, tmp_path, monkeypatch):
    pytest.importorskip("torchao")
    page = Path(__file__).resolve().parents[2] / "docs" / "adapters.md"
    [code] = re.findall(r"```python3\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    exec(code.replace('"Qwen/Qwen3-0.6B"', repr(base)), {"__name__": "__main__"})
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out-4bit")
    assert "Intx" in type(found.model.layers[0].mlp.up_proj.weight).__name__


def test_other_methods_reach_transformers_as_they_are(base, monkeypatch):
    from transformers import AwqConfig, GPTQConfig

    given = []
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda path, **kwargs: given.append(kwargs))
    configs = GPTQConfig(bits=4, dataset=["a"], tokenizer=base), AwqConfig(bits=4), {"quant_method": "fp8"}
    for config in configs:
        loading.load_causal_lm(base, quantization_config=config)
        loading.load_causal_lm(base, {"quantization_config": config})
    assert [kwargs["quantization_config"] for kwargs in given] == [
        each for config in configs for each in (config, config)
    ]


def test_the_command_line_trains_on_four_bits(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    words = (
        f"sft --model_name_or_path {base} --dataset_name rows.jsonl --output_dir out --use_peft --load_in_4bit "
        "--lora_r 4"
    )
    words += (
        " --use_bnb_nested_quant --lora_target_modules q_proj v_proj --max_steps 2 --use_cpu --report_to none "
        "--max_length 64"
    )
    assert main(words.split()) == 0
    assert json.loads((tmp_path / "out" / "adapter_config.json").read_text())["r"] == 4
    assert json.loads((tmp_path / "out" / "checkpoint-2" / "trainer_state.json").read_text())["global_step"] == 2
