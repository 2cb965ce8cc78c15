"""What no machine changes, beside TRL and transformers: operations, bytes, and waits of one training step.

    python benchmarks/counts.py                                every task
    python benchmarks/counts.py --tasks sft-packed dpo-77      some
    python benchmarks/counts.py --size 64                      a smaller model

Everything runs on the emulated GPU of `tests/gpu_rehearsal/emulated_cuda.py`, so that waits of the host are seen.
Counted is one optimizer step after the first, or one evaluation: multiplications and additions of matrix products and
attention, operations dispatched to the device (views included), bytes of the device above those that weights and
optimizer take, and how often the host waited. Kernels are those of the CPU. Attention over segments counts as one
operation, and so do PyTorch's own and its `rms_norm`; what a Triton kernel would do in one operation elsewhere is
several, for both.

Graph breaks are those of `torch_compile=True`, as each library compiles, in one step on the CPU that traces alone.

The table goes into docs/speed.md as it is printed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

TASKS = {
    "sft": "SFT, padded, batch 4",
    "sft-packed": "SFT, packed, batch 4",
    "sft-20": "SFT, a fifth of the tokens labelled",
    "dpo-40": "DPO, prompts 40% of the tokens",
    "dpo-77": "DPO, prompts 77% of the tokens",
    "grpo-256": "GRPO, a prompt of 256 x 8 completions of 32, generated",
    "grpo-1024": "GRPO, a prompt of 1,024 x 8 completions of 32, generated",
    "seq2seq": "an evaluation that generates, T5, 32 rows (transformers)",
}
VOCABULARY = 8192


def tokenizer():
    """One token for each number."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1} | {str(i): i for i in range(2, VOCABULARY)}, "<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def model_of(size: int) -> Any:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=size, intermediate_size=3 * size, num_hidden_layers=4,
            num_attention_heads=4, num_key_value_heads=2, head_dim=max(size // 4, 16), max_position_embeddings=4096,
            tie_word_embeddings=True, pad_token_id=0, eos_token_id=1, bos_token_id=None,
        )
    )  # fmt: skip


def texts(lengths: list[int]) -> list[list[int]]:
    import torch

    generator = torch.Generator().manual_seed(0)
    return [torch.randint(2, VOCABULARY, (length,), generator=generator).tolist() for length in lengths]


def counting() -> Any:
    """An emulated GPU that counts floating-point operations as well."""
    from tests.gpu_rehearsal.emulated_cuda import CudaTensor, EmulatedCuda

    class Counting(EmulatedCuda):
        def run(self, func, args, kwargs):
            out = super().run(func, args, kwargs)
            name = func._schema.name.removeprefix("aten::")
            if name in ("mm", "addmm", "bmm", "baddbmm") and isinstance(args[-1], CudaTensor):
                left, right = args[-2:]
                self.flops += 2 * left.numel() * right.shape[-1]
            elif name.startswith("_scaled_dot_product"):
                shapes = args[1:4] if name.endswith("backward") else args[:3]
                query, key, value = (tensor.shape for tensor in shapes)
                pairs = query[0] * query[1] * query[2] * key[2]
                times = 2.5 if name.endswith("backward") else 1.0
                self.flops += int(times * 2 * pairs * (query[3] + value[3]))
            return out

    return Counting()


def trainer_of(contestant: str, task: str, size: int, folder: str, callbacks: list[Any], **changes: Any) -> Any:
    """The trainer of a task, in float32 and with everything else equal."""
    from datasets import Dataset

    common = {
        "output_dir": folder, "max_steps": 3, "learning_rate": 1e-5, "bf16": False, "logging_steps": 100,
        "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "gradient_checkpointing": False,
        "optim": "adamw_torch_fused", **changes,
    }  # fmt: skip
    kind, _, rest = task.partition("-")
    if contestant == "posttrain":
        import posttrain.rl as online
        import posttrain.sft as supervised
    else:
        os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
        import trl as online
        import trl as supervised
    if kind == "sft":
        lengths = [64 + 37 * (i % 8) for i in range(64)]
        share = 0.2 if rest == "20" else 0.5
        rows = [{"prompt_ids": ids[: int(len(ids) * (1 - share))], "whole": ids} for ids in texts(lengths)]
        tokens = [
            {
                "input_ids": row["whole"],
                "labels": [-100] * len(row["prompt_ids"]) + row["whole"][len(row["prompt_ids"]) :]
                if rest == "20" else row["whole"],
            }
            for row in rows
        ]  # fmt: skip
        if rest == "20" and contestant == "trl":  # it reads labels from a mask
            tokens = [
                {"input_ids": row["input_ids"], "completion_mask": [int(label != -100) for label in row["labels"]]}
                for row in tokens
            ]
        options = {"packing": rest == "packed", "max_length": 512, "per_device_train_batch_size": 4}
        args = supervised.SFTConfig(**common, **options)
        return supervised.SFTTrainer(
            model_of(size), args=args, train_dataset=Dataset.from_list(tokens), processing_class=tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
    if kind == "dpo":
        prompt = 40 * int(rest) * 2 // (100 - int(rest))
        rows = [
            {
                name: " ".join(map(str, ids))
                for name, ids in zip(("prompt", "chosen", "rejected"), texts([prompt, 40, 40]), strict=True)
            }
            for _ in range(32)
        ]
        args = online.DPOConfig(**common, per_device_train_batch_size=4)
        reference = {} if contestant == "posttrain" else {"ref_model": model_of(size)}  # it loads one by its name
        return online.DPOTrainer(
            model_of(size), args=args, train_dataset=Dataset.from_list(rows), processing_class=tokenizer(), **reference,
            callbacks=callbacks,
        )  # fmt: skip
    rows = [{"prompt": " ".join(map(str, ids))} for ids in texts([int(rest)] * 16)]
    args = online.GRPOConfig(
        **common, per_device_train_batch_size=8, num_generations=8, max_completion_length=32, beta=0.0
    )
    reward = lambda completion_ids, **kwargs: [sum(ids) % 101 / 101 for ids in completion_ids]  # noqa: E731
    return online.GRPOTrainer(
        model_of(size), reward, args, Dataset.from_list(rows), processing_class=tokenizer(), callbacks=callbacks
    )


def seq2seq_of(contestant: str, size: int, folder: str) -> Any:
    import torch
    from transformers import DataCollatorForSeq2Seq, T5Config, T5ForConditionalGeneration

    if contestant == "posttrain":
        from posttrain.seq2seq import Seq2SeqTrainer, Seq2SeqTrainingArguments
    else:
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCABULARY, d_model=size, d_kv=size // 4, d_ff=2 * size, num_layers=2, num_decoder_layers=2,
            num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )
    )  # fmt: skip
    rows = [{"input_ids": a, "labels": a[:20]} for a in texts([20 + i % 12 for i in range(32)])]
    args = Seq2SeqTrainingArguments(
        output_dir=folder, predict_with_generate=True, generation_max_length=24, per_device_eval_batch_size=16,
        report_to="none", disable_tqdm=True,
    )  # fmt: skip
    words = tokenizer()
    return Seq2SeqTrainer(
        model, args=args, eval_dataset=rows, processing_class=words, data_collator=DataCollatorForSeq2Seq(words, model),
        compute_metrics=lambda found: {"tokens": float((found.predictions > 0).sum())},
    )  # fmt: skip


def measure(contestant: str, task: str, size: int) -> dict[str, int]:
    """The counts of one step, or of one evaluation."""
    import torch

    torch.set_num_threads(1)
    if contestant == "posttrain":
        from posttrain.core import TrainerCallback
    else:
        from transformers import TrainerCallback
    counts: dict[str, int] = {}

    def begin(gpu):
        gpu.flops = gpu.dispatched = 0
        gpu.waits.clear()
        gpu.peak = gpu.live
        return gpu.live

    def end(gpu, before):
        counts.update(flops=gpu.flops, operations=gpu.dispatched, bytes=gpu.peak - before, waits=len(gpu.waits))

    with tempfile.TemporaryDirectory() as folder, counting() as gpu:

        class Counter(TrainerCallback):
            before = 0

            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == 1:
                    self.before = begin(gpu)
                elif state.global_step == 2:
                    end(gpu, self.before)

        if task == "seq2seq":
            trainer = seq2seq_of(contestant, size, folder)
            trainer.evaluate()  # tries things once
            before = begin(gpu)
            trainer.evaluate()
            end(gpu, before)
        else:
            trainer_of(contestant, task, size, folder, [Counter()]).train()
    if task != "seq2seq":
        counts["breaks"] = graph_breaks(contestant, task, size)
    return counts


def graph_breaks(contestant: str, task: str, size: int) -> int:
    """How often torch.compile had to leave a graph while it traced one optimizer step."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    changes = {"torch_compile": True, "torch_compile_backend": "eager", "max_steps": 1, "use_cpu": True}
    with tempfile.TemporaryDirectory() as folder:
        trainer_of(contestant, task, size, folder, [], **changes).train()
    return sum(counters["graph_break"].values())


def compare(task: str, size: int) -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = {}
    peer = "transformers" if task == "seq2seq" else "trl"
    for name in ("posttrain", peer):
        command = [sys.executable, __file__, "--one", name, task, "--size", str(size)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        line = next((text for text in done.stdout.splitlines() if text.startswith("RESULT")), None)
        if line is None:
            print(f"{task}: {name} left out: {done.stderr.strip().splitlines()[-1]}", flush=True)
            continue
        found[name] = json.loads(line.removeprefix("RESULT"))
    if peer in found and "posttrain" in found:
        found["ratio"] = {k: round(v / max(found[peer][k], 1), 3) for k, v in found["posttrain"].items()}
    return found


def table(figures: dict[str, Any]) -> str:
    """Markdown: of each task ours and the peer's."""
    lines = [
        "| one step | GFLOP | operations | MiB at the peak | waits | graph breaks |",
        "|---|---|---|---|---|---|",
    ]
    columns = (("flops", 1e9, ".2f"), ("operations", 1, ",.0f"), ("bytes", 2**20, ".1f"), ("waits", 1, ",.0f"))
    for task, found in figures.items():
        ours, theirs = found.get("posttrain"), found.get("trl") or found.get("transformers")
        if ours is None or theirs is None:
            continue
        cells = [f"{ours[name] / unit:{form}} / {theirs[name] / unit:{form}}" for name, unit, form in columns]
        cells.append(f"{ours['breaks']} / {theirs['breaks']}" if "breaks" in ours and "breaks" in theirs else "-")
        lines.append(f"| {TASKS[task]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--size", type=int, default=128, help="width of the model")
    parser.add_argument("--output", default="counts", help="name of the file in results/; empty: none is written")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        sys.modules["triton"] = None  # type: ignore[assignment]  # TRL would start kernels that need a real GPU
        print("RESULT", json.dumps(measure(*options.one, options.size)))
        return
    sys.path.insert(0, str(Path(__file__).parent))
    from results import write

    figures: dict[str, Any] = {}
    for task in options.tasks:
        figures[task] = compare(task, options.size)
        print(table({task: figures[task]}).splitlines()[-1], flush=True)
        if options.output:
            write(options.output, {"size": options.size, "tasks": figures})
    print(table(figures))


if __name__ == "__main__":
    main()
