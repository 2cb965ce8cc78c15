"""An adapter that is merged is the model that was trained, as `from_pretrained` reads it; else nothing is written."""

import json

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from posttrain.cli import main
from posttrain.cli.tools.merge import merge
from posttrain.core.errors import CheckpointError
from tests import tiny

LM = {"task_type": "CAUSAL_LM"}
LORA = LM | {"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]}
KINDS = {
    "lora": lambda: LoraConfig(**LORA),
    "dora": lambda: LoraConfig(**LORA, use_dora=True),
    "rslora": lambda: LoraConfig(**LORA, use_rslora=True),
    "head": lambda: LoraConfig(**LORA, modules_to_save=["lm_head"]),
    "embedding": lambda: LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
    "tokens": lambda: LoraConfig(**LORA, trainable_token_indices=[40, 41]),
    "ia3": lambda: peft.IA3Config(**LM, target_modules=["k_proj", "v_proj"], feedforward_modules=[]),
}
IDS = torch.arange(30, 60)[None]


@pytest.fixture
def base(tmp_path):
    return folder_of(tmp_path / "base", tiny.causal_lm())


def folder_of(folder, model):
    model.save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def adapter_of(folder, base, config, scale=0.2, auto_class=AutoModelForCausalLM, **options):
    """A folder with an adapter that was pushed about as far as training does, and the logits of base and adapter."""
    model = peft.get_peft_model(auto_class.from_pretrained(base, dtype=torch.float32, **options), config)
    torch.manual_seed(2)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        size = max(float(parameter.data.std()), 0.2) if parameter.dim() > 1 else 0.2  # the B of LoRA is 0 at first
        parameter.data += scale * size * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return str(folder), logits(model)


def logits(model):
    with torch.no_grad():
        return model.eval()(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits


@pytest.mark.parametrize("tied", [False, True], ids=["apart", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merged_model_computes_what_base_and_adapter_do(kind, tied, tmp_path):
    base = folder_of(tmp_path / "base", tiny.causal_lm(tie_word_embeddings=tied))
    adapter, expected = adapter_of(tmp_path / "adapter", base, KINDS[kind]())
    outcome = merge(adapter, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)
    assert outcome.dtype == "float32" and outcome.base == base
    assert outcome.mean <= outcome.largest < 1e-4 and outcome.effect > 1e-3
    assert loaded.config.tie_word_embeddings == (tied and kind not in ("head", "embedding"))
    assert AutoTokenizer.from_pretrained(tmp_path / "out").chat_template == tiny.CHATML
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_the_stated_difference_is_that_of_the_weights_rounding(tmp_path):
    base = folder_of(tmp_path / "base", tiny.causal_lm().to(torch.bfloat16))
    adapter, expected = adapter_of(tmp_path / "adapter", base, KINDS["lora"]())
    rounded = merge(adapter, tmp_path / "rounded")
    exact = merge(adapter, tmp_path / "exact", dtype="float32")
    assert (rounded.dtype, exact.dtype) == ("bfloat16", "float32")
    assert exact.largest < 1e-4 < rounded.largest < 0.1 and rounded.effect == pytest.approx(exact.effect)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded", dtype="auto")
    assert loaded.dtype == torch.bfloat16
    difference = (logits(loaded.float()) - expected).abs().mean()
    assert difference == pytest.approx(rounded.mean, rel=0.5)  # other tokens, the same order
    assert f"{rounded.mean:.3g} in the mean" in str(rounded) and f"{rounded.largest:.3g} at most" in str(rounded)


def test_an_adapter_that_rounding_would_swallow_is_refused_and_nothing_is_written(tmp_path):
    base = folder_of(tmp_path / "base", tiny.causal_lm(initializer_range=0.2).to(torch.bfloat16))
    adapter, _ = adapter_of(tmp_path / "adapter", base, KINDS["lora"](), scale=0.03)
    with pytest.raises(
        CheckpointError, match=r"of the .* that the adapter changes.* More than 1% of the adapter is lost"
    ):
        merge(adapter, tmp_path / "out", tolerance=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "base"]
    assert merge(adapter, tmp_path / "out", tolerance=1.0).mean > 0


def test_a_merge_that_went_wrong_is_refused(base, tmp_path, monkeypatch):
    adapter, _ = adapter_of(tmp_path / "adapter", base, KINDS["lora"]())
    forget = peft.tuners.lora.Linear.merge
    monkeypatch.setattr(peft.tuners.lora.Linear, "merge", lambda self, **options: None)
    with pytest.raises(CheckpointError, match="100.00% of the"):
        merge(adapter, tmp_path / "out")
    assert forget is not peft.tuners.lora.Linear.merge and not (tmp_path / "out").exists()


def test_an_adapter_trained_on_four_bits_is_merged_into_the_weights_they_were_made_of(tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    base = folder_of(
        tmp_path / "base", tiny.causal_lm(hidden_size=64, head_dim=16, intermediate_size=128).to(torch.bfloat16)
    )
    four = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    adapter, _ = adapter_of(tmp_path / "adapter", base, KINDS["lora"](), quantization_config=four)
    outcome = merge(adapter, tmp_path / "out")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    whole = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter)
    assert outcome.base == base and not hasattr(merged.config, "quantization_config")
    assert (logits(merged) - logits(whole)).abs().mean() < 0.1 * outcome.effect
    assert all(p.dtype == torch.float32 for p in merged.parameters())

    quantized = AutoModelForCausalLM.from_pretrained(base, quantization_config=four)
    folder_of(tmp_path / "four", quantized)
    with pytest.raises(
        CheckpointError, match=r"four holds quantized weights.*Name the model that they were made of: --base"
    ):
        merge(adapter, tmp_path / "again", base=str(tmp_path / "four"))


def test_a_classifiers_adapter_is_merged_with_its_head(base, tmp_path):
    config = LoraConfig(task_type="SEQ_CLS", r=4, target_modules=["q_proj"])
    options = {"auto_class": AutoModelForSequenceClassification, "num_labels": 3, "pad_token_id": 0}
    adapter, expected = adapter_of(tmp_path / "adapter", base, config, **options)
    merge(adapter, tmp_path / "out")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), expected, rtol=1e-5, atol=1e-5)


def test_what_cannot_be_merged_says_why(base, tmp_path):
    adapter, _ = adapter_of(tmp_path / "adapter", base, KINDS["lora"]())
    with pytest.raises(CheckpointError, match="There is no adapter in .*base"):
        merge(base, tmp_path / "out")
    with pytest.raises(FileExistsError, match="name a new folder"):
        merge(adapter, base)
    prompt = peft.get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), peft.PromptTuningConfig(**LM, num_virtual_tokens=3)
    )
    prompt.save_pretrained(tmp_path / "prompt")
    with pytest.raises(CheckpointError, match="PROMPT_TUNING, whose virtual tokens are no part of any weight"):
        merge(tmp_path / "prompt", tmp_path / "out")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    for name, said in ((None, "--base MODEL"), ("/no/such/model", "does not exist")):
        (tmp_path / "adapter" / "adapter_config.json").write_text(
            json.dumps(config | {"base_model_name_or_path": name})
        )
        with pytest.raises((CheckpointError, FileNotFoundError), match=said):
            merge(adapter, tmp_path / "out")
    assert merge(adapter, tmp_path / "out", base=base).base == base


def test_the_command_merges_and_says_by_how_much(base, tmp_path, capsys):
    adapter, expected = adapter_of(tmp_path / "adapter", base, KINDS["lora"]())
    assert main(["merge", adapter, str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    said = capsys.readouterr().out
    assert f"Merged into {base} in bfloat16: the logits differ" in said and "The model is in" in said
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert (logits(merged) - expected).abs().max() < 0.05
    assert main(["merge", adapter, str(tmp_path / "out")]) == 1 and "name a new folder" in capsys.readouterr().err
    assert main(["merge", adapter, "--bas", "x", "--dtype", "int3"]) == 2
    said = capsys.readouterr().err
    assert "did you mean 'base" in said and "ADAPTER FOLDER" in said and "--dtype=int3 is not one of" in said
    assert main(["merge", "--help"]) == 0
    assert "posttrain merge ADAPTER FOLDER" in capsys.readouterr().out


# An adapter holds no config: on its base alone it would read these rows with other angles.
def test_an_adapter_on_a_base_whose_config_the_run_changed_is_read_with_that_change(tmp_path):
    from posttrain.cli.tools import load
    from posttrain.sft import SFTConfig, SFTTrainer

    base = folder_of(tmp_path / "base", tiny.causal_lm(initializer_range=0.3))
    rope = {"rope_type": "yarn", "factor": 4.0}
    args = SFTConfig(
        str(tmp_path / "out"), max_steps=2, save_steps=1, learning_rate=1e-2, use_cpu=True, report_to="none",
        model_init_kwargs={"rope_parameters": rope, "dtype": "float32", "use_cache": False},
    )  # fmt: skip
    rows = [{"prompt": text[:30], "completion": text[30:60]} for text in tiny.CORPUS]
    trainer = SFTTrainer(base, args, train_dataset=rows, peft_config=LoraConfig(**LORA))
    trainer.train()
    trainer.save_model()
    expected = logits(trainer.model)
    plain = AutoModelForCausalLM.from_pretrained(base)
    assert (logits(peft.PeftModel.from_pretrained(plain, tmp_path / "out")) - expected).abs().max() > 1e-2
    for folder in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        torch.testing.assert_close(logits(load.load(folder, device="cpu")[0]), expected, rtol=0, atol=1e-5)
    merge(tmp_path / "out", tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.rope_parameters["rope_type"] == "yarn"
    torch.testing.assert_close(logits(merged), expected, rtol=1e-5, atol=1e-5)
