"""Sequence-to-sequence training and generation beside transformers: the same model, rows, batches and tokens.

    POSTTRAIN_DATA=... python benchmarks/seq2seq.py [--rounds 3] [--rows 256] [--beams 1 4]

Multi30k English to German (the slice in examples/data, or all of it where POSTTRAIN_DATA names a folder that holds it),
a vocabulary of 8,000 and a T5 of 2 + 2 layers of width 64, trained for a while first, so that outputs end where
sentences do. Each run is a process of its own and contestants take turns; the first round is not counted. Training is
measured per step, after the second; evaluation from end to end: loss, generation, gathering and a metric on the token
ids.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SLICE = Path(__file__).parents[1] / "examples" / "data" / "multi30k"
VOCABULARY, BATCH = 8_000, 32


def pairs(split: str) -> list[dict[str, str]]:
    """Rows of ``{"en", "de"}``."""
    folder = Path(os.environ.get("POSTTRAIN_DATA", "/nowhere")) / "multi30k"
    stem = {"train": "train", "test": "test_2016_flickr"}[split]
    if folder.is_dir():
        columns = [
            gzip.open(folder / f"{stem}.{side}.gz", "rt", encoding="utf-8").read().splitlines() for side in ("en", "de")
        ]
        return [{"en": en, "de": de} for en, de in zip(*columns, strict=True)]
    return [json.loads(line) for line in (SLICE / f"{split}.jsonl").open(encoding="utf-8")]


def prepare(folder: Path, steps: int) -> None:
    """A tokenizer, a model that was trained for `steps`, and tokenized rows, for both contestants to load."""
    import torch
    from datasets import Dataset
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

    from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments, tokenize

    rows = {split: pairs(split) for split in ("train", "test")}
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=True), decoders.ByteLevel()
    texts = (text for row in rows["train"] for text in row.values())
    special = ["<pad>", "</s>"]
    bpe.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, show_progress=False)
    )
    bpe.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<pad>", eos_token="</s>")
    for split, part in rows.items():
        tokenize(Dataset.from_list(part), tokenizer, "en", "de").save_to_disk(str(folder / split))
    tokenizer.save_pretrained(folder / "model")
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=VOCABULARY, d_model=64, d_kv=16, d_ff=256, num_layers=2, num_heads=4, decoder_start_token_id=0,
        dropout_rate=0.0,
    )  # fmt: skip
    trainer = Seq2SeqTrainer(
        T5ForConditionalGeneration(config),
        Seq2SeqTrainingArguments(
            str(folder / "out"), max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3,
            report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
        ),
        train_dataset=Dataset.load_from_disk(str(folder / "train")),
        processing_class=tokenizer,
    )  # fmt: skip
    trainer.train()
    trainer.model.save_pretrained(folder / "model")


def run(contestant: str, folder: Path, num_rows: int, beams: int, steps: int) -> dict[str, float | str]:
    import torch
    from datasets import Dataset
    from transformers import AutoTokenizer, DataCollatorForSeq2Seq, T5ForConditionalGeneration

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
        from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    else:
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, TrainerCallback
    times: list[float] = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    model = T5ForConditionalGeneration.from_pretrained(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")

    def compute_metrics(evaluated) -> dict[str, float]:
        texts = tokenizer.batch_decode(evaluated.predictions.clip(min=0), skip_special_tokens=True)
        digest = hashlib.sha256("\n".join(texts).encode()).hexdigest()
        return {"texts": int(digest[:12], 16), "words": float(sum(len(text.split()) for text in texts))}

    trainer = Seq2SeqTrainer(
        model,
        Seq2SeqTrainingArguments(
            str(folder / contestant), predict_with_generate=True, generation_max_length=64, generation_num_beams=beams,
            per_device_eval_batch_size=BATCH, per_device_train_batch_size=BATCH, max_steps=steps or 1,
            learning_rate=0.0, report_to="none", save_strategy="no", logging_steps=1000, use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.load_from_disk(str(folder / "train")),
        eval_dataset=Dataset.load_from_disk(str(folder / "test")).select(range(num_rows)),
        data_collator=DataCollatorForSeq2Seq(tokenizer, model=model),
        processing_class=tokenizer,
        compute_metrics=compute_metrics,
        callbacks=[Timer()],
    )  # fmt: skip
    start = time.process_time()
    metrics = trainer.evaluate()
    found = {"evaluate_s": time.process_time() - start}
    found |= {"loss": metrics["eval_loss"], "texts": f"{metrics['eval_texts']:x}", "words": metrics["eval_words"]}
    if steps:
        trainer.train()
        found["step_ms"] = 1000 * (times[-1] - times[1]) / (len(times) - 2)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rows", type=int, default=256, help="rows of the test set")
    parser.add_argument("--beams", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--steps", type=int, default=40, help="training steps that are measured")
    parser.add_argument("--pretrain", type=int, default=600, help="training steps before anything is measured")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        name, folder, beams, steps = options.one
        print("RESULT", json.dumps(run(name, Path(folder), options.rows, int(beams), int(steps))))
        return
    from results import write

    rows = min(options.rows, len(pairs("test")))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    table: dict[str, dict] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), options.pretrain)
        for beams in options.beams:
            steps = options.steps if beams == options.beams[0] else 0
            found: dict[str, list[dict]] = {"posttrain": [], "transformers": []}
            for number in range(options.rounds + 1):
                for name in found:
                    command = [
                        sys.executable,
                        __file__,
                        "--rows",
                        str(rows),
                        "--one",
                        name,
                        folder,
                        str(beams),
                        str(steps),
                    ]
                    done = subprocess.run(command, capture_output=True, text=True, env=environment)
                    if done.returncode:
                        raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
                    line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
                    if number:
                        found[name].append(json.loads(line.removeprefix("RESULT")))
            same = len({one["texts"] for runs in found.values() for one in runs}) == 1
            ratios = {
                key: statistics.median(b[key] / a[key] for a, b in zip(*found.values(), strict=True))
                for key in ("evaluate_s", "step_ms") if key in found["posttrain"][0]
            }  # fmt: skip
            medians = {
                name: {key: statistics.median(one[key] for one in runs) for key in runs[0] if key != "texts"}
                for name, runs in found.items()
            }
            table[f"beams_{beams}"] = {"table": medians, "speedup": ratios, "same_texts": same}
            for name, row in medians.items():
                print(f"{beams} beams  {name:13s} " + "  ".join(f"{key} {value:.4g}" for key, value in row.items()))
            print(
                f"{beams} beams  speed-up "
                + ", ".join(f"{k} {v:.2f}x" for k, v in ratios.items())
                + f", same texts: {same}"
            )
    write("seq2seq", {"rows": rows, "rounds": options.rounds, "pretrain": options.pretrain, **table})


if __name__ == "__main__":
    main()
