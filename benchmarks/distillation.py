"""Distillation beside TRL: the same models, prompts and completions; seconds a step and peak memory.

    python benchmarks/distillation.py                             every task, in float32
    python benchmarks/distillation.py --tasks loss-0.5 --rounds 1
    python benchmarks/distillation.py --tasks train-1.0 --prompts 32

Tasks: `loss` is the divergence and its gradients alone, 1,024 positions of which a half counts; `train` is an optimizer
step on completions that are given, 8 prompts (`--prompts`) of 64 tokens with 16 to 128 tokens each; `step` samples as
many completions of 64 tokens and trains on them. The number is beta. The student is 256 wide, the teacher 512, with
32,000 tokens.

Each run is a process of its own, contestants take turns, and the first round is not counted. Time is in CPU seconds on
one thread.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

from grpo import VOCABULARY, tokenizer

TASKS = tuple(f"{kind}-{beta}" for kind in ("loss", "train", "step") for beta in ("0.0", "0.5", "1.0"))
POSITIONS, STUDENT, TEACHER, LENGTHS = 1024, 256, 512, 8


def model_of(width: int):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(width)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=2,
            num_attention_heads=width // 64, num_key_value_heads=2, head_dim=64, max_position_embeddings=2048,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip


def completions_of(prompts: list) -> list[list[int]]:
    return [
        [2 + (31 * i + 7 * t) % (VOCABULARY - 2) for t in range(16 * (1 + i % LENGTHS))] for i in range(len(prompts))
    ]


def loss_once(contestant: str, beta: float) -> float:
    """CPU seconds of the divergence and its gradients."""
    import torch

    torch.manual_seed(0)
    hidden, weight = torch.randn(8, POSITIONS // 8, STUDENT), torch.randn(VOCABULARY, STUDENT) / STUDENT**0.5
    other, head = torch.randn(8, POSITIONS // 8, TEACHER), torch.randn(VOCABULARY, TEACHER) / TEACHER**0.5
    mask = torch.arange(POSITIONS // 8).expand(8, -1) < POSITIONS // 16
    hidden.requires_grad_()
    weight.requires_grad_()
    if contestant == "posttrain":
        from posttrain.lm.loss.distillation import HeadStates, Measure, linear_divergence

        began = time.process_time()
        labels = torch.where(mask, 0, -100)
        loss, _ = linear_divergence(hidden, weight, labels, HeadStates(other[mask], head), Measure(beta))
    else:
        from trl.trainer.distillation_trainer import _chunked_divergence_loss

        began = time.process_time()
        loss, *_ = _chunked_divergence_loss(hidden, other, weight, head, mask, beta, 1)
    loss.backward()
    return time.process_time() - began


def run(contestant: str, task: str, steps: int, prompts: int) -> dict[str, float]:
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    import torch
    from datasets import Dataset

    torch.set_num_threads(1)
    kind, beta = task.split("-")
    memory = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # noqa: E731
    if kind == "loss":
        if contestant != "posttrain":
            import trl.trainer.distillation_trainer  # noqa: F401
        before = memory()
        loss_once(contestant, float(beta))
        seconds = loss_once(contestant, float(beta))
        return {"seconds_per_step": seconds, "peak_mib": memory(), "extra_mib": memory() - before}
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
        from posttrain.rl import DistillationConfig, DistillationTrainer
    else:
        from transformers import TrainerCallback
        from trl import DistillationConfig, DistillationTrainer
    times = []

    class Timer(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.process_time())

    with tempfile.TemporaryDirectory() as folder:
        longest = 128 if kind == "train" else 64
        args = DistillationConfig(
            output_dir=folder, per_device_train_batch_size=prompts, max_completion_length=longest, max_steps=steps,
            learning_rate=1e-6, beta=float(beta), bf16=False, gradient_checkpointing=False,
            logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        )  # fmt: skip
        generator, rows = torch.Generator().manual_seed(0), []
        for _ in range(64):
            ids = torch.randint(2, VOCABULARY, (64,), generator=generator).tolist()
            rows.append({"prompt": " ".join(map(str, ids))})
        options = {}
        if contestant == "posttrain" and kind == "train":
            options["rollout_func"] = lambda prompts, trainer: {
                "prompt_ids": [trainer.processing_class(prompt)["input_ids"] for prompt in prompts],
                "completion_ids": completions_of(prompts), "logprobs": None,
            }  # fmt: skip
        trainer = DistillationTrainer(
            model_of(STUDENT), model_of(TEACHER), args, Dataset.from_list(rows), processing_class=tokenizer(),
            callbacks=[Timer()], **options,
        )  # fmt: skip
        if contestant != "posttrain" and kind == "train":
            trainer._generate_single_turn = lambda prompt_ids, *_: completions_of(prompt_ids)
        before = memory()
        trainer.train()
    seconds = (times[-1] - times[1]) / (len(times) - 2)
    return {"seconds_per_step": seconds, "peak_mib": memory(), "extra_mib": memory() - before}


def compare(task: str, steps: int, rounds: int, prompts: int) -> dict:
    found: dict[str, list[dict[str, float]]] = {"posttrain": [], "trl": []}
    for number in range(rounds + 1):
        for name in found:
            command = [sys.executable, __file__, "--one", name, task, str(steps), str(prompts)]
            environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                raise SystemExit(f"{name} failed:\n{done.stderr[-3000:]}")
            line = next(text for text in done.stdout.splitlines() if text.startswith("RESULT"))
            if number or not rounds:
                found[name].append(json.loads(line.removeprefix("RESULT")))
    table = {name: {k: statistics.median(r[k] for r in runs) for k in runs[0]} for name, runs in found.items()}
    pairs = list(zip(found["posttrain"], found["trl"], strict=True))
    speed = statistics.median(theirs["seconds_per_step"] / ours["seconds_per_step"] for ours, theirs in pairs)
    ratios = {"speed": speed}
    ratios |= {
        key: statistics.median(ours[key] / theirs[key] for ours, theirs in pairs) for key in ("peak_mib", "extra_mib")
    }
    for name, row in table.items():
        print(f"{task:10s} {name:10s} {row['seconds_per_step']:7.2f} s  peak {row['peak_mib']:6.0f} MiB  "
              f"(+{row['extra_mib']:.0f})")  # fmt: skip
    print(f"{task:10s} posttrain / trl: {speed:.2f} x the speed, {ratios['peak_mib']:.2f} x the peak, "
          f"{ratios['extra_mib']:.2f} x what it adds", flush=True)  # fmt: skip
    return {"table": table, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=8, help="of a step, for train and step")
    parser.add_argument("--output")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        contestant, task, steps, prompts = args.one
        print("RESULT" + json.dumps(run(contestant, task, int(steps), int(prompts))))
        return
    results = {task: compare(task, args.steps, args.rounds, args.prompts) for task in args.tasks}
    if args.output:
        from results import write

        write(args.output, results)


if __name__ == "__main__":
    main()
