"""How far the log-probabilities of an engine are from the trainer's, for the tokens that it sampled.

    python benchmarks/numerics.py                     every architecture, precision and adapter: a minute
    python benchmarks/numerics.py --engine vllm       vLLM in place of the trainer's own engine: half an hour
    python benchmarks/numerics.py --model FOLDER      a model of your own, in each precision and with each adapter

Untrained models of 4 layers and a width of 256, with weights large enough that tokens have different probabilities.
Each writes completions for prompts of different lengths; the trainer then reads each text alone, whole. The difference
is what importance sampling would correct. `bfloat16` is that of the weights; `autocast`: weights in float32, products
in bfloat16, as in training with ``bf16=True``, beside which vLLM has its weights in bfloat16. Kernels are those of the
CPU. vLLM is used as `vllm_mode="colocate"` does, with adapters merged, each model in a process of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

import results  # noqa: E402
import torch  # noqa: E402

from posttrain.core.testing import causal_lm, tokenizer  # noqa: E402
from posttrain.rl.generation.local import LocalGenerator, problem  # noqa: E402
from posttrain.rl.generation.protocol import Sampling  # noqa: E402

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gpt2")
PRECISIONS = ("float32", "bfloat16", "autocast")
ADAPTERS = ("none", "lora")
WIDTH = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 4096, "head_dim": 64}
WIDTH_OF_GPT2 = {"n_embd": 256, "n_layer": 4, "vocab_size": 4096}


def model_of(architecture: str, path: str | None) -> Any:
    if path is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    torch.manual_seed(0)
    width = WIDTH_OF_GPT2 if architecture == "gpt2" else WIDTH
    tied = architecture in ("gemma", "gemma2", "gpt2")  # as those that were published, and vLLM knows no others
    return causal_lm(architecture, initializer_range=0.1, tie_word_embeddings=tied, **width).eval()


def adapted(model: Any) -> Any:
    """`model` with a LoRA that changes it."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=16, target_modules="all-linear", init_lora_weights=False)).eval()


@torch.no_grad()
def of_trainer(model: Any, prompt: list[int], written: list[int], temperature: float) -> torch.Tensor:
    """The log-probability of each token of `written`."""
    logits = model(input_ids=torch.tensor([prompt + written]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return (logits.float() / temperature).log_softmax(-1).gather(1, torch.tensor(written)[:, None])[:, 0]


def vllm_of(model: Any, precision: str) -> Any:
    """vLLM in this process, for a model that it reads from a folder."""
    from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator

    folder = tempfile.mkdtemp(prefix="numerics-")
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    model.config._name_or_path = folder
    dtype = "float32" if precision == "float32" else "bfloat16"
    small = {"enforce_eager": True, "max_model_len": 256, "gpu_memory_utilization": 0.2}
    return VLLMColocatedGenerator({**small, "dtype": dtype})


def gap(
    engine_name: str, architecture: str, precision: str, adapter: str, path: str | None, rows: int, new: int
) -> dict[str, Any]:
    """Differences of log-probabilities, engine minus trainer, over all tokens that were written."""
    torch.set_num_threads(1)
    model = model_of(architecture, path)
    model = model.bfloat16() if precision == "bfloat16" else model
    engine = vllm_of(model, precision) if engine_name == "vllm" else LocalGenerator(tokenizer())
    model = adapted(model).to(model.dtype) if adapter == "lora" else model
    size = model.config.get_text_config().vocab_size
    prompts = [[(37 * place + 11 * row + 5) % size for place in range(9 + 7 * row)] for row in range(rows)]
    sampling = Sampling(max_new_tokens=new)
    engine.sync_weights(model)
    low = torch.autocast("cpu", torch.bfloat16) if precision == "autocast" else contextlib.nullcontext()
    with low:
        if engine_name == "local" and (why := problem(model)) is not None:
            return {"left_out": why}
        made = engine.generate(prompts, 4, sampling, seeds=range(4 * rows))
        expected = [of_trainer(model, prompts[i // 4], ids, sampling.temperature) for i, ids in enumerate(made.ids)]
    assert made.logps is not None
    found = torch.cat([torch.tensor(logps) for logps in made.logps])
    difference = found - torch.cat(expected)
    return {
        "tokens": len(found), "mean": float(difference.abs().mean()), "largest": float(difference.abs().max()),
        "bias": float(difference.mean()), "logp": float(found.mean()),
    }  # fmt: skip


def alone(*given: Any) -> dict[str, Any]:
    """`gap` in a process of its own, since vLLM sets up torch.distributed, and stays."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(gap, *given).result()


def table(runs: list[dict[str, Any]]) -> str:
    """Markdown: a row for each architecture and adapter, mean and largest gap in each precision."""
    lines = ["| model | adapter | " + " | ".join(PRECISIONS) + " |", "|---" * (2 + len(PRECISIONS)) + "|"]
    for name, adapter in dict.fromkeys((run["model"], run["adapter"]) for run in runs):
        cells = []
        for precision in PRECISIONS:
            kind = name, adapter, precision
            one = next((r for r in runs if (r["model"], r["adapter"], r["precision"]) == kind), {"left_out": ""})
            cells.append("-" if "left_out" in one else f"{one['mean']:.1e}, {one['largest']:.1e}")
        lines.append(f"| {name} | {adapter} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(words: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("local", "vllm"), default="local")
    parser.add_argument("--architectures", nargs="+", choices=ARCHITECTURES, default=[*ARCHITECTURES])
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=[*PRECISIONS])
    parser.add_argument("--adapters", nargs="+", choices=ADAPTERS, default=[*ADAPTERS])
    parser.add_argument("--model", help="a folder or a name, in place of the architectures")
    parser.add_argument("--prompts", type=int, default=6, help="of which each gets 4 completions")
    parser.add_argument("--new", type=int, default=48, help="tokens of a completion")
    parser.add_argument("--output", help="name of the file in results/; empty: none is written")
    options = parser.parse_args(words)
    runs = []
    for name in [options.model] if options.model else options.architectures:
        for adapter in options.adapters:
            for precision in options.precisions:
                given = options.engine, name, precision, adapter, options.model, options.prompts, options.new
                found = alone(*given) if options.engine == "vllm" else gap(*given)
                runs.append({"model": name, "adapter": adapter, "precision": precision} | found)
    file = {"local": "numerics", "vllm": "numerics_vllm"}[options.engine] if options.output is None else options.output
    if file:
        results.write(file, {"new": options.new, "runs": runs})
    print(table(runs))
    return runs


if __name__ == "__main__":
    main()
