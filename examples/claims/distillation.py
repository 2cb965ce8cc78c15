"""A student that a larger model teaches, on answers that the student writes, takes fewer operations than GRPO to the
teacher's accuracy (Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation/).

python examples/claims/distillation.py

Sums and differences of two whole numbers with results below 100. The teacher, of 0.49 million parameters, has learned
from all of them but the held-out ones, which are calculator steps of GSM8K; the student, a quarter as large, from 660
calculator steps. From there it goes on with problems without results, by 256 answers for each optimizer step:
`distillation` compares them token by token with the teacher (reverse divergence, one answer to a problem), and GRPO's
reward is 1 for the right result (8 answers to a problem). Both end 3 points below the teacher's accuracy on the
held-out problems, or with the budget.

Counted are multiplications and additions of matrix products and of attention, by PyTorch's own counter: those of
sampling, of the teacher's reading and of training. Evaluation is not counted, and neither is what the teacher learned
before, which is told beside it.
"""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import arithmetic
import arms
import calculator
import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode

from posttrain.core import TrainerCallback
from posttrain.rl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

DIGITS = 2
POINTS = 0.03  # below the teacher's accuracy
TEACHER, STUDENT = 128, 64  # width, of 3 layers
SETTINGS = {
    "teacher_epochs": 20.0, "student_epochs": 30.0, "batch": 256, "distillation_rate": 1e-3, "grpo_rate": 5e-4,
    "look_every": 10, "budget": 2e12, "problems": 800,
}  # fmt: skip
SMOKE = {"teacher_epochs": 0.1, "student_epochs": 0.2, "batch": 16, "look_every": 1, "budget": 1e8, "problems": 20}


class Start(NamedTuple):
    """What both ways have in common."""

    teacher: Any
    student: Any
    tokenizer: Any
    problems: Dataset
    held_out: Dataset
    teacher_operations: float


def every_problem(but: Dataset) -> Dataset:
    """All sums and differences with numbers and results from 0 to 99, without those of `but`."""
    aside, rows = set(but["prompt"]), []
    for result in range(10**DIGITS):
        for number in range(result + 1):
            for problem, found in (
                (f"{number:02}+{result - number:02}=", result),
                (f"{result:02}-{number:02}=", result - number),
            ):
                rows += [] if problem in aside else [{"prompt": problem, "result": f"{found:02}"}]
    return Dataset.from_list(rows)


@functools.lru_cache(maxsize=1)
def start(seed: int, teacher_epochs: float, student_epochs: float) -> Start:
    """The seed sets the split, the first weights and the order of the rows."""
    student, tokenizer, _, held_out = arithmetic.fine_tuned(seed, student_epochs, marks=1, width=STUDENT)
    problems = every_problem(held_out)
    with tempfile.TemporaryDirectory() as out:
        teacher = calculator.make_model(tokenizer, seed + 1000, TEACHER)
        taught = calculator.fine_tune(teacher, tokenizer, problems, teacher_epochs, seed, Path(out))
    rows = problems.select(random.Random(seed).sample(range(len(problems)), len(problems)))
    return Start(teacher, student, tokenizer, rows, held_out, float(taught.state.total_flos))


def accuracy(model: Any, tokenizer: Any, rows: Dataset) -> float:
    """Of the most probable answers."""
    return sum(calculator.right(calculator.answer(model, tokenizer, rows), rows["result"])) / len(rows)


def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """The operations of an attention over all pairs, from the shapes (batch, heads, length, width)."""
    return 2 * query[0] * query[1] * query[2] * key[2] * (query[3] + value[3])


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
    """The scores once more, then the gradients of query, key, value and scores: five products in place of two."""
    pairs = query[0] * query[1] * query[2] * key[2]
    return 2 * pairs * (3 * query[3] + 2 * value[3])


def counter() -> FlopCounterMode:
    """PyTorch's counter with the attention of the CPU, which it leaves out."""
    aten = torch.ops.aten
    return FlopCounterMode(
        display=False,
        custom_mapping={
            aten._scaled_dot_product_flash_attention_for_cpu: attention,
            aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
        },
    )


class Race(TrainerCallback):
    """Ends training at the goal, or when the budget is spent; looks at the accuracy after every few optimizer steps.

    Attributes:
        operations: spent on training so far, without those of looking. best: accuracy. reached: whether at the goal.
    """

    def __init__(
        self, counted: FlopCounterMode, look: Callable[[Any], float], goal: float, every: int, budget: float
    ) -> None:
        self.counted, self.look, self.goal, self.every, self.budget = counted, look, goal, every, budget
        self.operations = self.aside = self.best = 0.0
        self.reached = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        before = self.counted.get_total_flops()
        self.operations = before - self.aside
        spent = self.operations >= self.budget
        if state.global_step % self.every == 0 or spent:
            found = self.look(model)
            self.best, self.reached = max(self.best, found), found >= self.goal
            self.aside += self.counted.get_total_flops() - before
        control.should_training_stop |= spent or self.reached


def measure(
    arm: str,
    seed: int,
    teacher_epochs: float,
    student_epochs: float,
    batch: int,
    distillation_rate: float,
    grpo_rate: float,
    look_every: int,
    budget: float,
    problems: int,
) -> arms.Figures:
    """Operations until the goal, or all that were spent; and the accuracies of teacher and student."""
    given = start(seed, teacher_epochs, student_epochs)
    held_out = given.held_out.select(range(problems))
    teacher, before = (accuracy(model, given.tokenizer, held_out) for model in (given.teacher, given.student))
    counted = counter()
    race = Race(counted, lambda model: accuracy(model, given.tokenizer, held_out), teacher - POINTS, look_every, budget)
    student, usual = copy.deepcopy(given.student), {
        "max_steps": 100_000, "per_device_train_batch_size": batch, "max_completion_length": DIGITS + 1, "seed": seed,
        "warmup_steps": 5, "lr_scheduler_type": "constant_with_warmup", "gradient_checkpointing": False,
        "logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    trainer: Any
    with tempfile.TemporaryDirectory() as out:
        if arm == "distillation":
            args = DistillationConfig(out, learning_rate=distillation_rate, **usual)
            trainer = DistillationTrainer(
                student, copy.deepcopy(given.teacher), args, given.problems.remove_columns("result"),
                processing_class=given.tokenizer, callbacks=[race],
            )  # fmt: skip
        else:
            args = GRPOConfig(out, learning_rate=grpo_rate, num_generations=8, **usual)
            trainer = GRPOTrainer(
                student, calculator.right, args, given.problems, processing_class=given.tokenizer, callbacks=[race]
            )
        with counted:
            trainer.train()
    return {
        "teacher": teacher, "before": before, "best": race.best, "reached": float(race.reached),
        "operations": race.operations, "updates": float(trainer.state.global_step),
        "teacher_operations": given.teacher_operations,
    }  # fmt: skip


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    taught, rewarded = (arms.column(figures, arm, "reached") for arm in ("distillation", "grpo"))
    operations = [arms.column(figures, arm, "operations") for arm in ("grpo", "distillation")]
    logs = [torch.tensor(column, dtype=torch.double).log().tolist() for column in operations]
    ratios = [a - b for a, b in zip(*logs, strict=True)]
    times, low, high = (torch.tensor(bound).exp().item() for bound in arms.bounds(ratios))
    n, all_taught, all_rewarded = len(taught), all(taught), all(rewarded)
    holds = all_taught and low > 1  # GRPO's are a lower bound where it did not get there
    fails = all_rewarded and (high < 1 or not any(taught))
    ended = [100 * arms.bounds(arms.column(figures, arm, "best"))[0] for arm in ("distillation", "grpo")]
    goal = 100 * (arms.bounds(arms.column(figures, "grpo", "teacher"))[0] - POINTS)
    return (
        f"{'Holds' if holds else 'Does not hold' if fails else 'Not shown'}: distillation came to within 3 points of "
        f"the teacher ({goal:.1f}%) in {sum(taught):.0f} of {n} seeds and GRPO in {sum(rewarded):.0f}; GRPO took "
        f"{'' if all_rewarded else 'at least '}{times:.1f} times the operations [{low:.1f}, {high:.1f}] and came to "
        f"{ended[1]:.1f}%, distillation to {ended[0]:.1f}%."
    )


if __name__ == "__main__":
    arms.run(
        "On-policy distillation takes fewer operations than GRPO to the same accuracy",
        "https://thinkingmachines.ai/blog/on-policy-distillation/", ["distillation", "grpo"], measure, verdict,
        SETTINGS, SMOKE,
    )  # fmt: skip
