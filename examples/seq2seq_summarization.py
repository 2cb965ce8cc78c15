"""Train a small model from nothing to say in one sentence what a problem asks, and score it by ROUGE.

python examples/seq2seq_summarization.py                          # GSM8K: a problem -> the question that it comes to
python examples/seq2seq_summarization.py --data my.jsonl --source document --target summary --model google-t5/t5-small
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import torch
from datasets import Dataset, load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedTokenizerFast, T5Config

from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments, text_metrics, tokenize

GSM8K = Path(__file__).parent / "data" / "gsm8k"


def questions(split: str) -> Dataset:
    """Rows of a problem and its last sentence."""
    problems = [json.loads(line)["question"] for line in (GSM8K / f"{split}.jsonl").open(encoding="utf-8")]
    return Dataset.from_list([{"source": text, "target": re.split(r"(?<=[.!?])\s+", text)[-1]} for text in problems])


def from_nothing(texts: list[str]) -> tuple[torch.nn.Module, PreTrainedTokenizerFast]:
    """A T5 of 3 + 3 layers and width 128, and its tokenizer."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=4000, special_tokens=["<pad>", "</s>"]))
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=4000, d_model=128, d_kv=32, d_ff=512, num_layers=3, num_heads=4, decoder_start_token_id=0
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
    return AutoModelForSeq2SeqLM.from_config(config), tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", help="JSON Lines with a column of texts and one of summaries; GSM8K without")
    parser.add_argument("--source", default="source", help="column of the texts")
    parser.add_argument("--target", default="target", help="column of the summaries")
    parser.add_argument("--model", help="a pretrained model to fine-tune; a small one from nothing without")
    parser.add_argument("--output", default="out/summarization", help="where the model and its tokenizer go")
    parser.add_argument("--epochs", type=float, default=20)
    given = parser.parse_args()

    if given.data:
        parts = load_dataset("json", data_files=given.data, split="train").train_test_split(0.05, seed=0)
    else:
        parts = {split: questions(split) for split in ("train", "test")}
    if given.model:
        model = AutoModelForSeq2SeqLM.from_pretrained(given.model)
        tokenizer = AutoTokenizer.from_pretrained(given.model)
    else:
        model, tokenizer = from_nothing([*parts["train"][given.source], *parts["train"][given.target]])
    options = {"max_source_length": 512, "max_target_length": 64}
    rows = {name: tokenize(part, tokenizer, given.source, given.target, **options) for name, part in parts.items()}
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir=given.output,
            num_train_epochs=given.epochs,
            per_device_train_batch_size=32,
            per_device_eval_batch_size=32,
            learning_rate=2e-3,
            warmup_steps=0.1,
            train_sampling_strategy="group_by_length",
            predict_with_generate=True,
            generation_max_length=65,
            eval_strategy="steps",
            eval_steps=0.25,
            save_strategy="no",
            logging_steps=50,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"],
        processing_class=tokenizer,
        compute_metrics=text_metrics(tokenizer, ["rouge"]),
    )
    trainer.train()
    trainer.save_model()
    print({name: round(value, 2) for name, value in trainer.evaluate(num_beams=4).items()})


if __name__ == "__main__":
    main()
