"""What supervised fine-tuning is for, one promise after another. The mark `mission` has the number of the promise in
our plan; details are tested beside.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel
from transformers import AutoConfig, AutoModelForCausalLM

from posttrain.core import TrainingArguments
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.core.test_mission import install_liger

TEXTS = [{"text": text} for text in tiny.CORPUS] * 2
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.0, task_type="CAUSAL_LM")
USUAL = dict(max_steps=2, per_device_train_batch_size=4, logging_steps=1, save_strategy="no", report_to="none",
use_cpu=True,
             disable_tqdm=True, learning_rate=1e-2)  # fmt: skip


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A model with its tokenizer in a folder, as from the Hub."""
    folder = tmp_path_factory.mktemp("base")
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return str(folder)


def tune(out, model=None, rows=TEXTS, peft_config=None, **changes):
    args = SFTConfig(str(out), **(USUAL | {"max_length": 64} | changes))
    model = tiny.causal_lm() if model is None else model
    tokenizer = tiny.tokenizer()
    return SFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer, peft_config=peft_config)


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


@pytest.mark.mission("S140")
@pytest.mark.parametrize("arch", ["llama", "mistral", "gemma"])
def test_three_lines_train_a_causal_language_model(arch, tmp_path):
    trainer = tune(tmp_path, tiny.causal_lm(arch), max_steps=8)
    trainer.train()
    assert losses(trainer)[-1] < losses(trainer)[0]


@pytest.mark.mission("S141")
def test_packing_puts_more_tokens_into_a_batch_and_no_document_sees_another(tmp_path):
    plain, packed = tune(tmp_path, max_length=128), tune(tmp_path, max_length=128, packing=True)
    assert len(packed.train_dataset) < len(plain.train_dataset)
    model = packed.model.eval()
    row = packed.train_dataset[0]
    starts = [0, *torch.tensor(row["seq_lengths"]).cumsum(0).tolist()]
    assert len(starts) > 2  # several documents
    batch = {name: value for name, value in packed.data_collator([row]).items() if name != "labels"}
    with torch.no_grad():
        together = model(**batch).logits[0]
        for start, end in itertools.pairwise(starts):
            alone = model(torch.tensor([row["input_ids"][start:end]])).logits[0]
            torch.testing.assert_close(together[start:end], alone, rtol=0, atol=1e-5)


@pytest.mark.mission("S141")
@pytest.mark.parametrize(("packing", "eval_packing"), [(False, True), (True, False), (True, None)])
def test_evaluation_rows_are_packed_as_asked_for_and_their_loss_stays(packing, eval_packing, tmp_path):
    args = SFTConfig(str(tmp_path), **(USUAL | {"max_length": 128, "packing": packing, "eval_packing": eval_packing}))
    options = dict(train_dataset=TEXTS, eval_dataset=TEXTS[:6], processing_class=tiny.tokenizer())
    trainer = SFTTrainer(tiny.causal_lm(), args, **options)
    packed = packing if eval_packing is None else eval_packing
    assert (len(trainer.train_dataset) < len(TEXTS), len(trainer.eval_dataset) < 6) == (packing, packed)
    plain = SFTTrainer(tiny.causal_lm(), SFTConfig(str(tmp_path), **(USUAL | {"max_length": 128})), **options)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.mission("S142")
def test_lora_saves_its_adapter_alone_which_peft_loads(tmp_path):
    trainer = tune(tmp_path, peft_config=LORA)
    trainer.train()
    trainer.save_model(str(tmp_path / "adapter"))
    assert not (tmp_path / "adapter" / "model.safetensors").exists()
    loaded = PeftModel.from_pretrained(tiny.causal_lm(), tmp_path / "adapter").eval()
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, trainer.model.eval()(ids).logits)
        assert not torch.equal(loaded(ids).logits, tiny.causal_lm().eval()(ids).logits)


@pytest.mark.mission("S143")
@pytest.mark.parametrize("use_cpu", [True, pytest.param(False, marks=pytest.mark.gpu)], ids=["cpu", "gpu"])
def test_adapters_are_trained_on_a_base_of_four_bits(use_cpu, base, tmp_path):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    args = SFTConfig(str(tmp_path), **(USUAL | {"use_cpu": use_cpu, "max_length": 64}))
    options = dict(quantization_config=BitsAndBytesConfig(load_in_4bit=True), peft_config=LORA)
    trainer = SFTTrainer(base, args, train_dataset=TEXTS, **options)
    before = {name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()}
    assert trainer.train().global_step == 2
    after = dict(trainer.model.named_parameters())
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if "lora_" in name}
    assert {p.dtype for name, p in after.items() if "q_proj.base_layer" in name} == {torch.uint8}


@pytest.fixture
def printed(base, tmp_path, monkeypatch):
    """`printed(**arguments)`: a script with `SFTTrainer`, as tutorials print it."""
    monkeypatch.chdir(tmp_path)

    def run(to="cpu", **arguments):
        train_dataset = Dataset.from_list([{**row, "label": index % 2} for index, row in enumerate(TEXTS)])
        args = TrainingArguments(**({"disable_tqdm": True, "max_steps": 3} | arguments))
        model = AutoModelForCausalLM.from_pretrained(base, low_cpu_mem_usage=True).to(to)
        trainer = SFTTrainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            dataset_text_field="text",
            max_seq_length=32,
        )
        trainer.train()
        return trainer

    return run


@pytest.mark.mission("S145", "S146", "S147", "S149")
def test_arguments_of_earlier_versions_are_taken_with_a_warning_each(printed):
    with pytest.warns(FutureWarning) as warned:
        trainer = printed(output_dir="out", per_device_train_batch_size=2)
    said = [str(warning.message) for warning in warned]
    assert sum("dataset_text_field" in text for text in said) == sum("max_seq_length" in text for text in said) == 1
    places = [warning.filename for warning in warned if "is now" in str(warning.message)]
    assert set(places) == {__file__}, "each names the line of the script"
    assert isinstance(trainer.args, SFTConfig) and trainer.args.per_device_train_batch_size == 2
    assert trainer.args.max_length == 32 == max(len(row["input_ids"]) for row in trainer.train_dataset)
    assert trainer.state.global_step == 3
    batch = next(iter(trainer.get_train_dataloader()))
    assert "label" not in batch and batch["labels"].shape == batch["input_ids"].shape


@pytest.mark.mission("S148")
def test_the_tokenizer_is_that_of_the_models_folder(base, tmp_path):
    args = SFTConfig(str(tmp_path), **USUAL)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base))
    trainer = SFTTrainer(model=model, args=args, train_dataset=TEXTS)
    assert trainer.processing_class.get_vocab() == tiny.tokenizer().get_vocab()
    with pytest.raises(ValueError, match="processing_class"):
        SFTTrainer(model=tiny.causal_lm(), args=args, train_dataset=TEXTS)


@pytest.mark.mission("S150")
@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_model_that_was_loaded_sparingly_and_moved_is_taken(printed):
    trainer = printed(to=0, output_dir="out")
    assert trainer.state.global_step == 3 and trainer.model.device == torch.device(0)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_script_of_001_with_neftune_and_liger_runs_as_printed(printed, monkeypatch):
    if not torch.cuda.is_available():
        install_liger(monkeypatch)  # which the page says to install first
    trainer = printed(output_dir="your-model", neftune_noise_alpha=0.1, use_liger_kernel=True)
    embeddings, ids = trainer.model.get_input_embeddings().train(), torch.tensor([[5, 6]], device=trainer.model.device)
    assert torch.equal(embeddings(ids), embeddings.weight[ids])
