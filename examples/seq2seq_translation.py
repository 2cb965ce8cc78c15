"""Train a small translation model from nothing, English to German, and score what it writes by BLEU and chrF.

python examples/seq2seq_translation.py                            # the 300 sentence pairs that come with the project
python examples/seq2seq_translation.py --data my/multi30k         # all 29,000: train.en.gz, train.de.gz, ... in a
folder
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from pathlib import Path

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import MarianConfig, MarianMTModel, PreTrainedTokenizerFast

from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments, text_metrics, tokenize

SLICE = Path(__file__).parent / "data" / "multi30k"


def read(folder: Path, split: str, stem: str) -> Dataset:
    """Rows of ``en`` and ``de``: from JSON Lines, or from two files of one sentence a line."""
    if (folder / f"{split}.jsonl").is_file():
        return Dataset.from_list([json.loads(line) for line in (folder / f"{split}.jsonl").open(encoding="utf-8")])
    sides = {side: gzip.open(folder / f"{stem}.{side}.gz", "rt", encoding="utf-8") for side in ("en", "de")}
    return Dataset.from_dict({side: lines.read().splitlines() for side, lines in sides.items()})


def train_tokenizer(rows: Dataset, size: int) -> PreTrainedTokenizerFast:
    """One byte-level BPE vocabulary for both languages; every text ends with </s>."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    special = ["<pad>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": special, "initial_alphabet": alphabet, "show_progress": False}
    bpe.train_from_iterator([*rows["en"], *rows["de"]], trainers.BpeTrainer(vocab_size=size, **options))
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    full = Path(os.environ.get("POSTTRAIN_DATA", "")) / "multi30k"
    parser.add_argument("--data", type=Path, default=full if full.is_dir() else SLICE, help="folder of the sentences")
    parser.add_argument("--output", default="out/translation", help="where the model and its tokenizer go")
    parser.add_argument("--epochs", type=float, default=6)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--bf16", action="store_true", help="faster where the processor has bfloat16")
    given = parser.parse_args()

    train, test = read(given.data, "train", "train"), read(given.data, "test", "test_2016_flickr")
    tokenizer = train_tokenizer(train, size=6000)
    torch.manual_seed(0)
    layers = {
        f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 3), ("attention_heads", 8))
    }
    size = {"d_model": given.width, "encoder_ffn_dim": 2 * given.width, "decoder_ffn_dim": 2 * given.width}
    config = MarianConfig(
        vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=None,
        max_position_embeddings=256, scale_embedding=True, activation_function="relu", **layers, **size,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        model=MarianMTModel(config),
        args=Seq2SeqTrainingArguments(
            output_dir=given.output,
            num_train_epochs=given.epochs,
            per_device_train_batch_size=64,
            per_device_eval_batch_size=64,
            learning_rate=1e-3,
            warmup_steps=0.1,
            label_smoothing_factor=0.1,
            train_sampling_strategy="group_by_length",
            predict_with_generate=True,
            generation_max_length=80,
            eval_strategy="epoch",
            save_strategy="no",
            logging_steps=50,
            bf16=given.bf16,
        ),
        train_dataset=tokenize(train, tokenizer, "en", "de"),
        eval_dataset=tokenize(test, tokenizer, "en", "de"),
        processing_class=tokenizer,
        compute_metrics=text_metrics(tokenizer, ["bleu", "chrf"]),
    )
    trainer.train()
    trainer.save_model()
    print({name: round(value, 2) for name, value in trainer.evaluate(num_beams=4).items()})


if __name__ == "__main__":
    main()
