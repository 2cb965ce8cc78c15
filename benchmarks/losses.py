"""Time and memory of the loss over a large vocabulary: hidden states and head weight in, loss and gradients out.

    python benchmarks/losses.py              151,936 words x 4096 tokens x 256 wide, about ten minutes on one core
    python benchmarks/losses.py --small      a few seconds; writes no file

Every measurement is a fresh process that runs one method once, so that the peak resident memory is that method's and no
method profits from memory another one has touched. Rounds are interleaved: what else the machine does in the meantime
falls on all methods alike. Seconds are CPU seconds of one thread, which other processes on the machine lengthen less
than wall seconds. Compare the ratios, which travel.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from results import write

BASELINE = "transformers loss on whole logits"
TRL = "trl chunked, stats"
METHODS = [
    BASELINE,
    TRL,
    "trl chunked",
    "torch checkpoint per 256 rows",
    "torch linear_cross_entropy",
    "torch linear_cross_entropy, chunked",
    "posttrain linear_cross_entropy",
    "posttrain linear_cross_entropy, stats",
    "posttrain token_logps",
    "transformers, 20 % labelled",
    "trl chunked, stats, 20 % labelled",
    "posttrain, 20 % labelled",
]


def loss_of(method: str, hidden, weight, labels):
    """The summed loss by one method; raises LookupError where this torch does not have it."""
    import torch
    import torch.nn.functional as F

    from posttrain.lm.loss import language_modeling

    if method.startswith("transformers"):
        from transformers.loss.loss_utils import ForCausalLMLoss

        logits = F.linear(hidden, weight)
        return ForCausalLMLoss(logits, None, len(weight), num_items_in_batch=1, shift_labels=labels)
    if method.startswith("trl chunked"):
        try:
            from trl.kernels import ChunkedLogProbFunction
            from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE
        except ImportError:
            raise LookupError("trl is not installed") from None
        # As its SFTTrainer does on a CPU: all positions are scored, and those without a label count for nothing.
        outputs = ("log_probs", "entropy", "is_top1") if "stats" in method else ("log_probs",)
        scores = ChunkedLogProbFunction.apply(
            hidden, weight, None, labels.clamp(min=0), 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, outputs
        )
        return -scores[0].masked_fill(labels == -100, 0).sum()
    if method == "torch checkpoint per 256 rows":
        from torch.utils.checkpoint import checkpoint

        def chunk(states, targets):
            return F.cross_entropy(F.linear(states, weight).float(), targets, reduction="sum")

        pairs = zip(hidden.split(256), labels.split(256), strict=True)
        return sum(checkpoint(chunk, states, targets, use_reentrant=False) for states, targets in pairs)
    if method.startswith("torch linear_cross_entropy"):
        if not hasattr(F, "linear_cross_entropy"):
            raise LookupError("this torch has no linear_cross_entropy")
        options = {"options": torch.nn.LinearCrossEntropyOptions()} if method.endswith("chunked") else {}
        return F.linear_cross_entropy(hidden, weight, labels, reduction="sum", **options)
    if method == "posttrain token_logps":
        return -language_modeling.token_logps(hidden, weight, labels).sum()
    if method.endswith("stats"):
        return language_modeling.linear_cross_entropy(hidden, weight, labels, return_stats=True)[0]
    return language_modeling.linear_cross_entropy(hidden, weight, labels)


def resident_mib(field: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measure(method: str, dtype: str, vocab: int, tokens: int, width: int) -> dict:
    """Run one method once, forward and backward, in this process."""
    import torch

    torch.manual_seed(0)
    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    hidden = torch.randn(tokens, width).to(kind).requires_grad_()
    weight = (torch.randn(vocab, width) / width**0.5).to(kind).requires_grad_()
    labels = torch.randint(vocab, (tokens,))
    if "20 %" in method:
        labels[torch.rand(tokens) > 0.2] = -100
    try:  # imports, thread pools and kernels are warm before the clock starts
        loss_of(method, hidden[:2, :8].detach(), weight[:64, :8].detach().requires_grad_(), labels[:2] % 64).backward()
    except LookupError as error:
        return {"skipped": str(error)}
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = resident_mib("VmRSS")
    wall, cpu = time.perf_counter(), time.process_time()
    loss = loss_of(method, hidden, weight, labels)
    loss.backward()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "seconds": cpu,
        "wall_seconds": wall,
        "extra_mib": resident_mib("VmHWM") - before,
        "loss": loss.item() / tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="8,192 x 1024 x 64, one round.")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument("--output", default="losses", help="Name of the file in results/; empty: none is written.")
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        method, dtype, *size = args.one
        print(json.dumps(measure(method, dtype, *map(int, size))))
        return

    vocab, tokens, width = (8192, 1024, 64) if args.small else (151_936, 4096, 256)
    rounds = 1 if args.small else args.rounds
    print(f"vocabulary {vocab} x {tokens} tokens x {width} wide, forward and backward, median of {rounds}")
    runs: dict[tuple[str, str], list[dict]] = {}
    for done in range(1, rounds + 1):
        for dtype in args.dtypes:
            for method in args.methods:
                command = [sys.executable, __file__, "--one", method, dtype, str(vocab), str(tokens), str(width)]
                environment = os.environ | {"OMP_NUM_THREADS": "1"}
                finished = subprocess.run(command, capture_output=True, text=True, env=environment)
                if finished.returncode:
                    sys.exit(f"{method} failed:\n{finished.stderr}")
                run = json.loads(finished.stdout.splitlines()[-1])
                print(f"  {dtype} {method}: {run}", file=sys.stderr, flush=True)
                runs.setdefault((dtype, method), []).append(run)
        if args.output and not args.small:  # after every round: an interrupted run leaves what it has measured
            size = {"vocabulary": vocab, "tokens": tokens, "width": width, "rounds": done}
            write(args.output, {"size": size, "results": summarize(runs)})
    for row in summarize(runs):
        if "skipped" in row:
            print(f"{row['dtype']:9} {row['method']:38} {row['skipped']}")
            continue
        compared = "".join(
            f"  {peer} {row['times_faster' + suffix]:5.2f}x, {row['times_less_memory' + suffix]:5.1f}x less"
            for peer, suffix in (("transformers", ""), ("trl", "_than_trl"))
            if row["times_faster" + suffix] is not None
        )
        print(
            f"{row['dtype']:9} {row['method']:38} {row['seconds']:7.2f} s {row['extra_mib']:6.0f} MiB{compared}"
            f"  loss {row['loss']:.5f}"
        )


def summarize(runs: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """One row for each dtype and method: medians over the rounds, and ratios to the loss of transformers."""
    rows: dict[tuple[str, str], dict] = {}
    for (dtype, method), measured in runs.items():
        row = {"dtype": dtype, "method": method}
        rows[dtype, method] = row
        if "skipped" in measured[0]:
            row |= measured[0]
            continue
        row |= {key: round(statistics.median(run[key] for run in measured), 4) for key in measured[0]}
        row["all_seconds"] = [round(run["seconds"], 3) for run in measured]
        peers = {"": "transformers, 20 % labelled" if "20 %" in method else BASELINE}
        peers["_than_trl"] = f"{TRL}, 20 % labelled" if "20 %" in method else TRL
        for suffix, peer in peers.items():
            other = rows.get((dtype, peer), {})
            row["times_faster" + suffix] = round(other["seconds"] / row["seconds"], 2) if "seconds" in other else None
            row["times_less_memory" + suffix] = (
                round(other["extra_mib"] / row["extra_mib"], 2) if "seconds" in other else None
            )
    return list(rows.values())


if __name__ == "__main__":
    main()
