"""Grade-school problems with a calculator: the policy calls it, reads what it says, and is rewarded for right answers.

python examples/grpo_gsm8k.py                                    # a GPU
python examples/grpo_gsm8k.py --model my/model --steps 500       # your own, as long as its chat template knows tools
"""

from __future__ import annotations

import argparse
import ast
import operator

from datasets import load_dataset

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.rewards import accuracy_reward

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
ASK = "Solve the problem. Use the calculator for every step, and end with the answer after ####.\n\n"


def calculator(expression: str) -> float:
    """Compute an expression of numbers with + - * / and brackets.

    Args:
        expression: For example "48 / 2".
    """
    return value_of(ast.parse(expression, mode="eval").body)


def value_of(node: ast.AST) -> float:
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](value_of(node.left), value_of(node.right))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -value_of(node.operand)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return node.value
    raise ValueError("only numbers, + - * / and brackets")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="Qwen/Qwen3-0.6B", help="name on the Hub, or a folder")
    parser.add_argument("--data", default="openai/gsm8k", help="name on the Hub, or a folder with train and test files")
    parser.add_argument("--output", default="out/grpo", help="where the model and its completions go")
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--length", type=int, default=512, help="tokens of a completion, the calculator's included")
    given = parser.parse_args()

    rows = load_dataset(given.data, "main" if given.data == "openai/gsm8k" else None)
    rows = rows.map(
        lambda row: {"prompt": [{"role": "user", "content": ASK + row["question"]}], "solution": row["answer"]}
    )
    trainer = GRPOTrainer(
        model=given.model,
        reward_funcs=accuracy_reward,
        args=GRPOConfig(
            output_dir=given.output,
            max_steps=given.steps,
            num_generations=8,
            gradient_accumulation_steps=4,
            max_completion_length=given.length,
            max_tool_calling_iterations=6,
            log_completions=True,
            num_completions_to_print=4,
        ),
        train_dataset=rows["train"],
        eval_dataset=rows["test"].select(range(min(100, len(rows["test"])))),
        tools=[calculator],
    )
    trainer.train()
    print("Held-out pass@1:", trainer.evaluate()["eval_pass@1"])
    trainer.save_model()


if __name__ == "__main__":
    main()
