"""Packed rows through `SFTTrainer`, by every attention implementation, several rows in a batch: as each document
alone.
"""

import pytest
import torch
from datasets import Dataset

from posttrain.lm.attention import flash_attention, varlen_attention
from posttrain.sft import SFTConfig, SFTTrainer
from posttrain.sft.collators import SFTCollator
from posttrain.sft.packing import documents_leak
from tests.flash_stand_in import stand_in_for_flash_attention
from tests.tiny import causal_lm, tokenizer

#: With windows shorter than documents, where the architecture has them.
ARCHITECTURES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 5},
    "mistral": {"sliding_window": 5},
}
LENGTHS = [9, 12, 7, 11, 5, 15, 3, 18, 6, 8, 10, 4, 13, 2]


def documents(vocab_size=384):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(4, vocab_size, (length,), generator=generator).tolist() for length in LENGTHS]


def model_of(arch, implementation):
    return causal_lm(arch, attn_implementation=implementation, **ARCHITECTURES.get(arch, {}))


def trainer_of(tmp_path, model, rows, **options):
    options = {"max_length": 24, "packing": True, "report_to": "none", "use_cpu": True} | options
    args = SFTConfig(str(tmp_path), per_device_train_batch_size=rows, bf16=False, **options)
    dataset = Dataset.from_dict({"input_ids": documents()})
    return SFTTrainer(model=model, args=args, train_dataset=dataset, processing_class=tokenizer())


def alone(model, ids, labels=None):
    """(logits of one document, its summed loss), by the model's own attention over it and nothing else."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    targets = ids[1:] if labels is None else labels[1:]
    return logits, torch.nn.functional.cross_entropy(logits[:-1].float(), targets, reduction="sum")


def assert_as_alone(trainer, alone_model, atol=1e-5):
    """Loss, gradients and logits of each batch against those of its documents, one forward each."""
    model = trainer.model.eval()
    seen = 0
    for batch in trainer.get_train_dataloader():
        batch = trainer._prepare_inputs(batch)
        starts = (batch["position_ids"].flatten() == 0).nonzero().flatten().tolist()
        texts = batch["input_ids"].flatten().tensor_split(starts[1:])
        labels = batch["labels"].flatten().tensor_split(starts[1:])
        texts = [text for text, own in zip(texts, labels, strict=True) if (own != -100).any()]  # padding has none
        seen += len(texts)

        found = trainer.compute_loss(model, dict(batch), num_items_in_batch=1)
        gradients = torch.autograd.grad(found, list(model.parameters()))
        results = [alone(alone_model, text) for text in texts]
        expected = sum(loss for _, loss in results)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=atol)
        for ours, theirs in zip(gradients, torch.autograd.grad(expected, list(alone_model.parameters())), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=atol * max(1.0, float(theirs.abs().max())))

        outputs = trainer.compute_loss(model, dict(batch), return_outputs=True)[1]
        logits = outputs.logits.flatten(0, 1).tensor_split(starts[1:])
        logits = [part for part, own in zip(logits, labels, strict=True) if (own != -100).any()]
        for ours, (theirs, _) in zip(logits, results, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=atol)
    assert seen == len(LENGTHS)


def cases():
    for arch in ARCHITECTURES:
        for implementation in ("eager", "sdpa", "segments", "flash_attention_2"):
            for rows in (1, 2, 3):
                short = rows == 2 and (implementation == "flash_attention_2" or arch in ("qwen3", "mistral"))
                marks = () if short else (pytest.mark.slow,)
                if (arch, implementation) != ("gemma2", "sdpa"):  # which transformers does not have
                    yield pytest.param(arch, implementation, rows, marks=marks)


@pytest.mark.parametrize(("arch", "implementation", "rows"), list(cases()))
def test_packed_documents_train_as_if_alone(tmp_path, arch, implementation, rows, monkeypatch):
    if implementation == "flash_attention_2":
        calls = stand_in_for_flash_attention(monkeypatch, any_dtype=True)
        monkeypatch.setattr(flash_attention, "precision_problem", lambda *args: None)  # compared in float32
    elif implementation != "segments":
        monkeypatch.setattr(varlen_attention, "segments_problem", lambda *args, **options: "masks are tried here")
    masks = "eager" if arch == "gemma2" else "sdpa"
    plain = masks if implementation == "segments" else implementation
    trainer = trainer_of(tmp_path, model_of(arch, plain), rows)
    assert trainer._reads_segments == (implementation == "segments")
    batch = next(iter(trainer.get_train_dataloader()))
    if implementation == "flash_attention_2":
        assert len(batch["input_ids"]) == 1 and batch["max_length_q"] <= 24
        calls.clear()
    assert_as_alone(trainer, model_of(arch, plain))
    if implementation == "flash_attention_2":
        assert max(len(lengths) for lengths in calls) > rows  # several documents a row reached the kernel


@pytest.mark.parametrize("arch", ["gemma2", "mistral"])
@pytest.mark.parametrize(
    ("implementation", "version"),
    [("flash_attention_3", 3), ("flash_attention_4", 4), ("kernels-community/flash-attn3", 3)],
)
def test_packed_documents_reach_every_flash_attention(tmp_path, arch, implementation, version, monkeypatch):
    """Window, softcap, scale and borders by the parameters of each release."""
    calls = stand_in_for_flash_attention(monkeypatch, any_dtype=True, version=version)
    monkeypatch.setattr(flash_attention, "precision_problem", lambda *args: None)
    trainer = trainer_of(tmp_path, model_of(arch, implementation), 2)
    assert not trainer._reads_segments and "kernels-community/" in trainer.model.config._attn_implementation
    calls.clear()
    assert_as_alone(trainer, model_of(arch, "eager"))
    assert max(map(len, calls)) > 2


@pytest.mark.parametrize("options", [{"padding_free": True, "packing": False}, {"neftune_noise_alpha": 5.0}], ids=str)
def test_flash_attention_is_told_of_documents_in_every_layout(tmp_path, options, monkeypatch):
    stand_in_for_flash_attention(monkeypatch, any_dtype=True)
    monkeypatch.setattr(flash_attention, "precision_problem", lambda *args: None)
    trainer = trainer_of(tmp_path, model_of("qwen3", "flash_attention_2"), 2, **options)
    rows = next(iter(trainer.get_train_dataloader()))["input_ids"].shape[0]
    assert rows == (2 if "neftune_noise_alpha" in options else 1)  # whose noise is scaled by the length of a row
    assert_as_alone(trainer, model_of("qwen3", "flash_attention_2"))


def test_the_leak_of_two_rows_is_found_where_one_row_keeps_documents_apart(monkeypatch):
    stand_in_for_flash_attention(monkeypatch, any_dtype=True)
    model = model_of("qwen3", "flash_attention_2")
    assert documents_leak(model) > 1e-2  # rows of several documents, told by positions alone
    for keep_rows in (False, True):
        assert documents_leak(model, collate=SFTCollator(0, flash_kwargs=True, keep_rows=keep_rows)) == 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_packed_rows_train_under_flash_attention_in_mixed_precision(tmp_path, dtype, monkeypatch):
    calls = stand_in_for_flash_attention(monkeypatch)  # which refuses float32, as the kernels do
    model = model_of("qwen3", "flash_attention_2").to(getattr(torch, dtype))
    args = SFTConfig(
        str(tmp_path), per_device_train_batch_size=2, bf16=True, use_cpu=True, packing=True, max_length=24, max_steps=2,
        report_to="none", eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    dataset = Dataset.from_dict({"input_ids": documents()})
    trainer = SFTTrainer(model, args, train_dataset=dataset, eval_dataset=dataset, processing_class=tokenizer())
    assert calls  # the trial at construction reached the kernel, under autocast
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert trainer.state.global_step == 2 and all(4 < loss < 8 for loss in losses)


def test_flash_attention_in_float32_is_refused_at_construction(tmp_path, monkeypatch):
    stand_in_for_flash_attention(monkeypatch)
    with pytest.raises(ValueError, match="float32 without mixed precision.*bf16=True"):
        trainer_of(tmp_path, model_of("qwen3", "flash_attention_2"), 2)


@pytest.mark.rotated
@pytest.mark.long
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("arch", ["qwen3", "mistral", "gemma2"])
def test_packed_documents_are_read_as_if_alone_under_flex_attention(tmp_path, arch, rows, monkeypatch):
    monkeypatch.setattr(varlen_attention, "segments_problem", lambda *args, **options: "masks are tried here")
    trainer = trainer_of(tmp_path, model_of(arch, "flex_attention"), rows)
    reference = model_of(arch, "eager" if arch == "gemma2" else "sdpa").eval()  # sdpa knows no softcap
    batch = next(iter(trainer.get_train_dataloader()))
    starts = (batch["position_ids"].flatten() == 0).nonzero().flatten().tolist()
    inputs = {name: batch[name] for name in ("input_ids", "position_ids")}
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):  # what its kernels compute, not compiled
        found = trainer.model.eval()(**inputs, use_cache=False).logits.flatten(0, 1).tensor_split(starts[1:])
        for text, logits in zip(batch["input_ids"].flatten().tensor_split(starts[1:]), found, strict=True):
            torch.testing.assert_close(logits, alone(reference, text)[0], rtol=0, atol=1e-5)
