"""Generation beside transformers' `generate`, called as TRL calls it: tokens a second on one thread.

    python benchmarks/generation.py                                  every task in float32 and bfloat16
    python benchmarks/generation.py --tasks 256-64 --dtypes fp32

2 prompts x 8 completions, sampled at temperature 1. The model has 16 million parameters: 4 layers of width 384 and
32,000 tokens. A task is named for the tokens of a prompt and of a completion; ragged: prompts of half that length and
of all of it; early: each token ends its completion with a probability of 2%.

Contestants take turns in one process, and the first round is not counted. Time is CPU time on one thread. Tokens are
those of completions, without what is written after their end.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

VOCABULARY, GROUP, PROMPTS = 32_000, 8, 2
TASKS = ("256-64", "256-128", "1024-64", "1024-128", "256-128-ragged", "256-128-early")


def tokenizer():
    """One token for each number; what is generated stands for nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 1} | {str(i): i for i in range(2, VOCABULARY)}, "<pad>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")


def model_of(dtype: str):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=VOCABULARY, hidden_size=384, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=6,
            num_key_value_heads=2, head_dim=64, max_position_embeddings=2048, tie_word_embeddings=True, pad_token_id=0,
            eos_token_id=1,
        )
    )  # fmt: skip
    return (model.bfloat16() if dtype == "bf16" else model).eval()


def contestants(model, prompts, new: int, ends: list[int]):
    """Functions of a seed that return the completions."""
    import torch
    from transformers import GenerationConfig

    from posttrain.rl.generation import Sampling
    from posttrain.rl.generation.local import LocalGenerator

    ours = LocalGenerator(tokenizer())
    ours.sync_weights(model)
    sampling = Sampling(new, eos_token_ids=tuple(ends))
    rows, width = [prompt for prompt in prompts for _ in range(GROUP)], max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    config = GenerationConfig(
        max_new_tokens=new, do_sample=True, temperature=1.0, top_p=1.0, top_k=0, pad_token_id=0, bos_token_id=None,
        eos_token_id=ends or None, cache_implementation=None,
    )  # fmt: skip

    def posttrain(seed: int) -> list[list[int]]:
        seeds = range(seed * len(rows), (seed + 1) * len(rows))
        return ours.generate(prompts, GROUP, sampling, list(seeds)).ids

    def transformers(seed: int) -> list[list[int]]:
        torch.manual_seed(seed)
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, disable_compile=True)
        found = []
        for row in out[:, width:].tolist():
            end = next((place + 1 for place, token in enumerate(row) if token in ends), len(row))
            found.append(row[:end])
        return found

    return {"posttrain": posttrain, "transformers": transformers}


def compare(task: str, dtype: str, rounds: int) -> dict:
    import torch

    torch.set_num_threads(1)
    length, new, *kind = task.split("-")
    sizes = [int(length) // 2 if kind == ["ragged"] else int(length), int(length)]
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(700, VOCABULARY, (size,), generator=generator).tolist() for size in sizes]
    ends = list(range(1, 1 + VOCABULARY // 50)) if kind == ["early"] else []
    runners = contestants(model_of(dtype), prompts, int(new), ends)
    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        for name, generate in runners.items():
            if number == 0:
                generate(0)
                continue
            start = time.process_time()
            tokens = sum(map(len, generate(number)))
            found.setdefault(name, []).append(tokens / (time.process_time() - start))
    ratios = [a / b for a, b in zip(found["posttrain"], found["transformers"], strict=True)]
    figures = {name: statistics.median(values) for name, values in found.items()}
    ratio = statistics.median(ratios)
    print(
        f"{task:16s} {dtype}  posttrain {figures['posttrain']:6.0f}  transformers {figures['transformers']:6.0f} "
        f"tokens/s  {ratio:.2f} x  ({min(ratios):.2f} to {max(ratios):.2f})", flush=True)  # fmt: skip
    return {"tokens_per_second": figures, "ratio": ratio, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=TASKS, choices=TASKS)
    parser.add_argument("--dtypes", nargs="+", default=("fp32", "bf16"), choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="put the figures into results/generation.json")
    args = parser.parse_args()
    figures = {f"{task} {dtype}": compare(task, dtype, args.rounds) for task in args.tasks for dtype in args.dtypes}
    if args.write:
        import results

        print(results.write("generation", {"tasks": figures}))


if __name__ == "__main__":
    main()
