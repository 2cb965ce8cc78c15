"""Models and tokenizers are loaded as asked, and what is missing is named."""

from __future__ import annotations

import json
import re

import pytest
import torch
from safetensors import safe_open

from posttrain.cli import main
from posttrain.core.errors import CheckpointError, MissingModelError
from posttrain.lm.loading import adapters, loading
from tests import tiny
from tests.core.models.gradients import LORA

peft = pytest.importorskip("peft")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    tiny.causal_lm().to(torch.bfloat16).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("kwargs", "dtype"),
    [
        (None, torch.float32),
        ({"dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "auto"}, torch.bfloat16),
        ({"torch_dtype": torch.float16}, torch.float16),
    ],
)
def test_a_model_is_loaded_in_the_dtype_asked_for_and_in_float32_otherwise(saved, kwargs, dtype):
    given = dict(kwargs or {})
    assert loading.load_causal_lm(saved, kwargs).dtype == dtype
    assert (kwargs or {}) == given


def test_another_auto_class_can_be_named(saved):
    model = loading.load_causal_lm(str(saved), {"num_labels": 1}, auto_class="AutoModelForSequenceClassification")
    assert model.config.num_labels == 1


def test_an_unknown_dtype_is_named(saved):
    with pytest.raises(ValueError, match="dtype='bfloat17' is not a type of torch, did you mean 'bfloat16'"):
        loading.load_causal_lm(saved, {"dtype": "bfloat17"})


def test_quantization_given_twice_is_refused(saved):
    with pytest.raises(ValueError, match="given twice"):
        loading.load_causal_lm(saved, {"quantization_config": object()}, quantization_config=object())


@pytest.mark.parametrize("load", [loading.load_causal_lm, loading.load_tokenizer])
def test_a_missing_folder_is_named(load):
    with pytest.raises(FileNotFoundError, match=r"folder './no/such/model' does not exist"):
        load("./no/such/model")


def test_a_name_the_hub_does_not_give_is_named(monkeypatch):
    import transformers

    def offline(*args, **kwargs):
        raise OSError("We couldn't connect to 'https://huggingface.co'\nand more lines")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", offline)
    with pytest.raises(FileNotFoundError, match=r"'some/model' is not a folder here .* couldn't connect .* offline"):
        loading.load_causal_lm("some/model")


def test_a_tokenizer_is_found_beside_the_model(saved):
    model = adapters.add_adapter(loading.load_causal_lm(saved), peft.LoraConfig(**LORA))
    assert loading.load_tokenizer(model).get_vocab() == loading.load_tokenizer(saved).get_vocab()


def test_a_model_from_nowhere_asks_for_its_tokenizer():
    with pytest.raises(ValueError, match="Pass processing_class"):
        loading.load_tokenizer(tiny.causal_lm())


def test_a_tokenizer_whose_file_is_a_pointer_of_git_lfs_is_named(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"tokenizer.json is a pointer of Git LFS.* Run: git lfs pull"):
        loading.load_tokenizer(tmp_path)


def test_a_tokenizer_whose_file_is_cut_is_named(tmp_path):
    tiny.tokenizer().save_pretrained(tmp_path)
    whole = (tmp_path / "tokenizer.json").read_text(encoding="utf-8")
    (tmp_path / "tokenizer.json").write_text(whole[: len(whole) // 2], encoding="utf-8")
    with pytest.raises(CheckpointError, match=f"the tokenizer in {str(tmp_path)!r} is damaged"):
        loading.load_tokenizer(tmp_path)


def test_attention_that_ignores_a_bound_on_scores_is_not_trained_with(tmp_path, caplog):
    import transformers

    from posttrain.sft import SFTConfig, SFTTrainer

    config = dict(vocab_size=384, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    config |= dict(num_key_value_heads=2, head_dim=8, attn_logit_softcapping=0.1, initializer_range=1.0)
    model = transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**config)).eval()
    ids = torch.arange(4, 30).unsqueeze(0)
    model.set_attn_implementation("eager")
    expected = model(input_ids=ids).logits
    model.config._attn_implementation = "sdpa"  # which transformers 5.17 chooses by itself
    args = SFTConfig(str(tmp_path), report_to="none", use_cpu=True, max_length=32)
    trainer = SFTTrainer(model, args, train_dataset=[{"text": "one"}], processing_class=tiny.tokenizer())
    assert "eager attention now" in caplog.text and "attn_logit_softcapping=0.1" in caplog.text
    assert torch.equal(trainer.model.eval()(input_ids=ids).logits, expected)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 77.0}},
    ],
    ids=["as it is called", "as it was called", "with a base of its own"],
)
def test_rope_scaling_keeps_the_models_own_base_of_the_angles_and_is_saved(kwargs, saved, tmp_path):
    own = loading.load_causal_lm(saved)
    model = loading.load_causal_lm(saved, kwargs)
    given = next(iter(kwargs.values()))
    theta = given.get("rope_theta", own.config.rope_parameters["rope_theta"])
    assert model.config.rope_parameters["rope_type"] == "yarn" and model.config.rope_parameters["rope_theta"] == theta
    ids = torch.arange(4, 64)[None]
    with torch.no_grad():
        logits = model(ids).logits
        assert (logits - own(ids).logits).abs().max() > 1e-3
        model.save_pretrained(tmp_path)
        torch.testing.assert_close(loading.load_causal_lm(tmp_path)(ids).logits, logits, rtol=0, atol=0)


# ------------------------------------------------------------------------------------------------------ rules of angles

YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize("given", [YARN, {"type": "yarn", "factor": 4.0}, {"full_attention": YARN}])
def test_the_rule_of_layers_of_full_attention_is_changed_and_saved(given, tmp_path):
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    own = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in ANGLES.items()}
    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, sliding_window=8)
    config = Gemma3TextConfig(**size, layer_types=["sliding_attention", "full_attention"], rope_parameters=own)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "a")
    model = loading.load_causal_lm(tmp_path / "a", {"rope_parameters": given}).eval()
    assert model.config.rope_parameters["sliding_attention"] == own["sliding_attention"]
    rule = {name: model.config.rope_parameters["full_attention"][name] for name in ("rope_theta", *YARN)}
    assert rule == YARN | {"rope_theta": 5e5}
    model.save_pretrained(tmp_path / "b")
    again, plain = (AutoModelForCausalLM.from_pretrained(tmp_path / name).eval() for name in "ba")
    ids = torch.arange(4, 44).unsqueeze(0)
    assert torch.equal(again(ids).logits, model(ids).logits)
    assert not torch.allclose(plain(ids).logits, model(ids).logits, atol=1e-5)


ANGLES = {"full_attention": 5e5, "sliding_attention": 1e4}
SECTIONS = {"rope_theta": 1e4, "mrope_section": [2, 1, 1], "rope_type": "default"}


def test_what_no_rule_has_is_kept():
    assert loading.angles(SECTIONS, YARN) == {"rope_theta": 1e4, "mrope_section": [2, 1, 1]} | YARN
    assert loading.angles({"rope_theta": 1e4, **YARN}, {"rope_type": "default"}) == {
        "rope_theta": 1e4,
        "rope_type": "default",
    }


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("yarn", "must be a mapping, such as"),
        ({"rope_type": "yarm", "factor": 4.0}, "'yarm' is no rule, did you mean 'yarn'"),
        ({"rope_type": "yarn"}, "yarn needs factor too"),
        ({"rope_type": "llama3", "factor": 8}, "llama3 needs low_freq_factor, high_freq_factor too"),
        ({"rope_type": "linear", "factor": 0.5}, "the factor must be a number of at least 1"),
        ({"rope_type": "linear", "factor": "4"}, "the factor must be a number of at least 1"),
    ],
)
def test_what_is_no_rule_is_said(given, said):
    with pytest.raises(ValueError, match=said):
        loading.angles(SECTIONS, given)
    with pytest.raises(ValueError, match="no 'chunked_attention'; give rules by kind, of full_attention"):
        loading.angles({"full_attention": SECTIONS}, {"chunked_attention": YARN})


def of_two_files(folder):
    """The second of two files of weights is not there, as after a copy that broke off."""
    weights = folder / "model.safetensors"
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    with safe_open(str(weights), "pt") as file:
        names = {name: files[number % 2] for number, name in enumerate(file.keys())}
    weights.rename(folder / files[0])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))


def edited(folder, old, new):
    file = folder / "config.json"
    file.write_text(file.read_text().replace(old, new))


@pytest.mark.parametrize(
    ("damage", "error", "says"),
    [
        (of_two_files, CheckpointError, "index.json names model-00002-of-00002.safetensors, which the folder lacks"),
        (lambda folder: (folder / "model.safetensors").unlink(), MissingModelError, "no file named model.safetensors"),
        (
            lambda folder: (folder / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
            CheckpointError,
            "is a pointer of Git LFS, not the file itself. Run: git lfs pull",
        ),
        (
            lambda folder: edited(folder, '"hidden_size": 32', '"hidden_size": 64'),
            CheckpointError,
            "have other shapes than its config.json says",
        ),
        (lambda folder: edited(folder, '"qwen3"', '"qwen99"'), ValueError, "qwen99"),
    ],
    ids=["missing file", "no weights", "LFS", "shapes", "model type"],
)
def test_what_is_wrong_in_a_models_folder_is_a_sentence_and_no_traceback(damage, error, says, tmp_path, capsys):
    tiny.causal_lm().save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    damage(tmp_path)
    with pytest.raises(error, match=re.escape(says)):
        loading.load_causal_lm(tmp_path)
    assert main(["chat", str(tmp_path), "--device", "cpu"]) in (1, 2)
    assert says in capsys.readouterr().err


def test_an_index_that_is_not_read_may_name_files_that_were_not_downloaded(tmp_path):
    """As that of weights in pickles, which downloads leave out where there are safetensors."""
    tiny.causal_lm().save_pretrained(tmp_path)
    index = json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-00002.bin"}})
    (tmp_path / "pytorch_model.bin.index.json").write_text(index)
    loaded = loading.load_causal_lm(tmp_path).state_dict()
    assert all(torch.equal(value, loaded[name]) for name, value in tiny.causal_lm().state_dict().items())
