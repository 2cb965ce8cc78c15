"""Agents improve by reinforcement learning through an endpoint, unchanged (Luo et al. 2025, Agent Lightning,
https://arxiv.org/abs/2508.03680).

make quickstart                                     # installs SmolLM2-135M-Instruct
python examples/claims/agents.py

Two agents that speak OpenAI's API over HTTP. `game`: guess_the_number.py, a game of up to three turns, with a new small
model. `calculator`: asks SmolLM2-135M-Instruct for products of numbers of two and three digits, which it does not know
by heart, and runs the calculator that it may call; the reward is 1 for an answer that ends with the product. The model
has seen a few calls before (`shown`), and is measured on other products; the settings were chosen with seed 100, which
is not measured. The same function trains and evaluates.
"""

from __future__ import annotations

import json
import random
import re
import tempfile
from typing import Any

import arms
import guess_the_number
import httpx
import pretrained
import torch
from datasets import Dataset
from grpo_gsm8k import calculator
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import get_json_schema

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.sft import SFTConfig, SFTTrainer

SETTINGS = {
    "games": 200, "shown": 12, "sft_epochs": 2.0, "sft_rate": 1e-4, "updates": 16, "batch": 32, "grpo_rate": 2e-5,
    "held_out": 24,
}  # fmt: skip
SMOKE = {"games": 1, "shown": 4, "sft_epochs": 1.0, "updates": 1, "batch": 8, "held_out": 2}
TOOL = get_json_schema(calculator)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n"
    "{% endif %}{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def agent(episode: Any, row: dict[str, Any]) -> float:
    """Asks for the product, and runs the calls of up to two turns."""
    messages = [question(row)]
    headers = {"authorization": f"Bearer {episode.api_key}"}
    async with httpx.AsyncClient(base_url=episode.base_url, headers=headers, timeout=600) as policy:
        for _ in range(3):
            body = {"messages": messages, "tools": [TOOL], "max_tokens": 40}
            message = (await policy.post("/chat/completions", json=body)).json()["choices"][0]["message"]
            messages.append(message)
            if not message.get("tool_calls"):
                break
            for call in message["tool_calls"]:
                messages.append({"role": "tool", "tool_call_id": call["id"], "content": result_of(call["function"])})
    numbers = re.findall(r"\d+", message["content"] or "")
    return float(numbers[-1:] == [str(row["a"] * row["b"])])


def result_of(function: dict[str, str]) -> str:
    try:
        return str(calculator(**json.loads(function["arguments"])))
    except Exception as error:
        return f"error: {error}"


def question(row: dict[str, Any]) -> dict[str, str]:
    return {"role": "user", "content": f"How much is {row['a']} times {row['b']}?"}


def problems(count: int, seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"a": rng.randint(100, 999), "b": rng.randint(12, 99)} for _ in range(count)]


def shown_calls(count: int, seed: int) -> Dataset:
    """Of each problem two rows: a call, and the answer after its result."""
    rows = []
    for row in problems(count, seed):
        arguments = {"expression": f"{row['a']} * {row['b']}"}
        call = {"role": "assistant", "content": "", "tool_calls": [
            {"type": "function", "function": {"name": "calculator", "arguments": arguments}}]}  # fmt: skip
        result = {"role": "tool", "content": str(row["a"] * row["b"])}
        answer = {"role": "assistant", "content": f"The answer is {row['a'] * row['b']}"}
        rows.append({"prompt": [question(row)], "completion": [call], "tools": [TOOL]})
        rows.append({"prompt": [question(row), call, result], "completion": [answer], "tools": [TOOL]})
    return Dataset.from_list(rows)


def measure(
    arm: str,
    seed: int,
    games: int,
    shown: int,
    sft_epochs: float,
    sft_rate: float,
    updates: int,
    batch: int,
    grpo_rate: float,
    held_out: int,
) -> arms.Figures:
    """The share of episodes that end well before training and after, of 16 of every number and 4 of every product."""
    usual = {"seed": seed, "gradient_checkpointing": False, "save_strategy": "no", "report_to": "none",
             "logging_strategy": "no", "disable_tqdm": True}  # fmt: skip
    with tempfile.TemporaryDirectory() as out:
        if arm == "game":
            torch.manual_seed(seed)  # the first weights
            trainer = guess_the_number.trainer(out=out, max_steps=games, **usual)
        else:
            folder = pretrained.needed()
            tokenizer = AutoTokenizer.from_pretrained(folder)
            tokenizer.chat_template = TEMPLATE
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # its files are in bfloat16
            args = SFTConfig(out, num_train_epochs=sft_epochs, per_device_train_batch_size=8, learning_rate=sft_rate,
                             bf16=True, **usual)  # fmt: skip
            SFTTrainer(model, args, train_dataset=shown_calls(shown, seed + 1), processing_class=tokenizer).train()
            args = GRPOConfig(
                out, max_steps=updates, per_device_train_batch_size=batch, num_generations=8, learning_rate=grpo_rate,
                lr_scheduler_type="constant_with_warmup", warmup_steps=5, max_completion_length=120,
                num_generations_eval=4, per_device_eval_batch_size=batch, bf16=True, **usual,
            )  # fmt: skip
            new = problems(updates * batch // 8, seed + 1000)
            trainer = GRPOTrainer(model, None, args, new, problems(held_out, 0), tokenizer, agent=agent)
        before = trainer.evaluate()["eval_reward"]
        trainer.train()
        return {"before": before, "after": trainer.evaluate()["eval_reward"]}


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    told, holds, fails = [], True, False
    for arm, found in figures.items():
        gains = [one["after"] - one["before"] for one in found]
        mean, low, high = (100 * bound for bound in arms.bounds(gains))
        before, after = (100 * arms.bounds(arms.column(figures, arm, name))[0] for name in ("before", "after"))
        holds, fails = holds and low > 0, fails or high < 0
        told.append(f"{arm} from {before:.1f}% to {after:.1f}%, {mean:+.1f} points [{low:+.1f}, {high:+.1f}]")
    return f"{'Holds' if holds else 'Does not hold' if fails else 'Not shown'}: {'; '.join(told)}."


if __name__ == "__main__":
    arms.run(
        "Agents improve by reinforcement learning through an endpoint, unchanged", "https://arxiv.org/abs/2508.03680",
        ["game", "calculator"], measure, verdict, SETTINGS, SMOKE,
    )  # fmt: skip
