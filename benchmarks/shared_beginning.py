"""LoRA on short answers whose rows begin alike, with that beginning computed once and once a row.

    python benchmarks/shared_beginning.py [--model FOLDER] [--rounds 3] [--dtypes float32 bfloat16]

The model is SmolLM2-135M (`examples/pretrained.py`), unless another is named; rows are the reviews of examples/data,
asked as in `make quickstart`, 16 in a batch. Both sides take turns in one process, on one thread; time is that of a
forward and a backward pass in CPU seconds, the first round is not counted. Losses of both sides are compared.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))


def run(folder: str, dtype: str, rounds: int, batch: int) -> dict[str, Any]:
    import quickstart
    import torch
    from peft import LoraConfig

    from posttrain.lm.attention import segments
    from posttrain.sft import SFTConfig, SFTTrainer

    torch.set_num_threads(1)
    torch.manual_seed(0)
    _, train, _ = quickstart.read_reviews()
    trainer = SFTTrainer(
        folder,
        SFTConfig(
            output_dir="out/shared_beginning", per_device_train_batch_size=batch, gradient_checkpointing=False,
            model_init_kwargs={"dtype": dtype}, report_to="none", use_cpu=True, save_strategy="no",
        ),
        train_dataset=quickstart.as_turns(train[: batch * (rounds + 1)], chats=True),
        peft_config=LoraConfig(r=8, lora_alpha=16, target_modules="all-linear"),
    )  # fmt: skip
    found: dict[str, list[float]] = {"once a row": [], "once": []}
    losses: dict[str, list[float]] = {name: [] for name in found}
    least = segments.WORTH_SHARING
    for number, rows in enumerate(trainer.get_train_dataloader()):
        tokens = int(rows["attention_mask"].sum())
        for name, segments.WORTH_SHARING in (("once a row", float("inf")), ("once", least)):
            started = time.process_time()
            loss = trainer.compute_loss(trainer.model, dict(rows))
            loss.backward()
            trainer.model.zero_grad()
            if number:
                found[name].append(tokens / (time.process_time() - started))
                losses[name].append(loss.item())
    speeds = {name: statistics.median(values) for name, values in found.items()}
    ratio = statistics.median(b / a for a, b in zip(*found.values(), strict=True))
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"{dtype}: {speeds['once a row']:.0f} -> {speeds['once']:.0f} tokens of the data a CPU second, "
          f"{ratio:.2f} x; the losses differ by {apart:.1g} at most", flush=True)  # fmt: skip
    return {"tokens_per_second": speeds, "ratio": ratio, "largest_difference_of_losses": apart}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder or name; by default SmolLM2-135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--dtypes", nargs="+", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    options = parser.parse_args()
    import pretrained
    from results import write

    folder = options.model or pretrained.folder()
    if folder is None:
        raise SystemExit(pretrained.__doc__)
    figures = {dtype: run(str(folder), dtype, options.rounds, options.batch) for dtype in options.dtypes}
    write("shared_beginning", {"rounds": options.rounds, "batch": options.batch, "dtypes": figures})


if __name__ == "__main__":
    main()
