"""A student that a larger model teaches, on answers that the student writes, takes fewer operations than GRPO to the
teacher's accuracy (Lu et al. 2025, https://thinkingmachines.ai/blog/on-policy-distillation/).

python examples/claims/distillation.py

Sums and differences of two whole numbers with results below 100. The teacher, of 0.49 million parameters, has learned
from all of them but the calculator steps of GSM8K, on which everybody is measured; the student, a quarter as large, has
learned from a third of these, 660. From there it goes on with the teacher's problems, now without results:
`distillation` compares its answers token by token with the teacher (reverse divergence, 64 answers for each optimizer
step, one to a problem), and GRPO's reward is 1 for the right result (256 answers, 8 to a problem). Both end 3 points
below the teacher's accuracy on held-out steps, or after about as many operations, 6.8e12.

Batch and learning rate were chosen with seed 100, which is not measured, from four tries of each by the accuracy after
4e11 to 6e11 operations: 64 answers at 1e-3 and 2e-3, 128 at 2e-3 and 4e-3; of GRPO 256 answers at 2e-4 and 1e-3, 512 at
2e-4 and 5e-4. A constant rate left the accuracy rising and falling by ten points from look to look, so it falls to 0.

Counted are multiplications and additions of matrix products and of attention, by PyTorch's own counter: those of
sampling, of the teacher's reading and of training, in every fiftieth optimizer step, for the 49 after it too.
Evaluation is not counted, and neither is what the teacher learned before.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import arithmetic
import arms
import calculator
import torch
from datasets import Dataset
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from posttrain.core import TrainerCallback
from posttrain.rl import DistillationConfig, DistillationTrainer, GRPOConfig, GRPOTrainer

DIGITS = 2
COUNT_EVERY = 50  # optimizer steps. An answer has at most 3 tokens, so all steps are alike; counting takes time
POINTS = 0.03  # below the teacher's accuracy
TEACHER, STUDENT = 128, 64  # width, of 3 layers
SETTINGS = {
    "teacher_epochs": 10.0, "student_epochs": 60.0,
    "distillation_batch": 64, "distillation_rate": 1e-3, "distillation_updates": 6000,
    "grpo_batch": 256, "grpo_rate": 2e-4, "grpo_updates": 7200,
    "look_every": 1e11, "problems": 800,
}  # fmt: skip
SMOKE = {
    "teacher_epochs": 0.1, "student_epochs": 0.2, "distillation_batch": 16, "distillation_updates": 3,
    "grpo_batch": 16, "grpo_updates": 3, "look_every": 1e8, "problems": 20,
}  # fmt: skip


def new_problems() -> Dataset:
    """All sums and differences with numbers and results from 0 to 99, without the calculator steps of GSM8K."""
    aside = {row["prompt"] for part in calculator.read(0, DIGITS, "+-") for row in part}
    rows = []
    for result in range(10**DIGITS):
        for number in range(result + 1):
            for problem, found in (
                (f"{number:02}+{result - number:02}=", result),
                (f"{result:02}-{number:02}=", result - number),
            ):
                rows += [] if problem in aside else [{"prompt": problem, "result": f"{found:02}"}]
    return Dataset.from_list(rows)


@functools.cache
def teacher_of(epochs: float) -> Any:
    """The same for all seeds. Once trained, it is kept in `arms.KEPT`."""
    folder = arms.KEPT / f"teacher-{TEACHER}-{epochs:g}"
    if (folder / "config.json").is_file():
        return AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = calculator.make_tokenizer()
    teacher = calculator.make_model(tokenizer, 0, TEACHER)
    with tempfile.TemporaryDirectory() as out:
        calculator.fine_tune(teacher, tokenizer, new_problems(), epochs, 0, Path(out))
    teacher.save_pretrained(folder)
    return teacher


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
    """Ends training at the goal; looks at the accuracy after every `look_every` operations, and at the end.

    Attributes:
        operations: spent on training so far. best: accuracy. reached: whether at the goal.
    """

    def __init__(self, look: Callable[[Any], float], goal: float, look_every: float) -> None:
        self.look, self.goal, self.look_every = look, goal, look_every
        self.operations = self.of_update = self.best = self.looked = 0.0
        self.reached = False
        self.counter = counter()

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.counter.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        step = state.global_step
        if (step - 1) % COUNT_EVERY == 0:
            self.of_update = self.counter.get_total_flops()
            self.counter.__exit__(None, None, None)
        self.operations += self.of_update
        last = step == state.max_steps
        if last or self.operations >= self.looked + self.look_every:
            found, self.looked = self.look(model), self.operations
            self.best, self.reached = max(self.best, found), found >= self.goal
        control.should_training_stop |= self.reached
        if not (last or self.reached) and step % COUNT_EVERY == 0:
            self.counter.__enter__()


def measure(
    arm: str,
    seed: int,
    teacher_epochs: float,
    student_epochs: float,
    distillation_batch: int,
    distillation_rate: float,
    distillation_updates: int,
    grpo_batch: int,
    grpo_rate: float,
    grpo_updates: int,
    look_every: float,
    problems: int,
) -> arms.Figures:
    """Operations until the goal, or all that were spent; the accuracies of the teacher and of the student before and at
    its best.
    """
    first, tokenizer, _, held_out = arithmetic.fine_tuned(seed, student_epochs, width=STUDENT)
    teacher, new, held_out = teacher_of(teacher_epochs), new_problems(), held_out.select(range(problems))
    of_teacher, before = (accuracy(model, tokenizer, held_out) for model in (teacher, first))
    student = copy.deepcopy(first)
    race = Race(lambda model: accuracy(model, tokenizer, held_out), of_teacher - POINTS, look_every)
    batch, rate, updates = (
        (distillation_batch, distillation_rate, distillation_updates) if arm == "distillation"
        else (grpo_batch, grpo_rate, grpo_updates)
    )  # fmt: skip
    usual: dict[str, Any] = {
        "per_device_train_batch_size": batch,
        "learning_rate": rate,
        "max_steps": updates,
        "seed": seed,
        "warmup_steps": 5,
        "num_generations": 1 if arm == "distillation" else 8,
        "max_completion_length": DIGITS + 1,
        "gradient_checkpointing": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer: Any
    with tempfile.TemporaryDirectory() as out:
        if arm == "distillation":
            args = DistillationConfig(out, **usual)
            rows = new.remove_columns("result")
            trainer = DistillationTrainer(
                student, copy.deepcopy(teacher), args, rows, processing_class=tokenizer, callbacks=[race]
            )
        else:
            args = GRPOConfig(out, **usual)
            trainer = GRPOTrainer(
                student, calculator.right, args, new, processing_class=tokenizer, callbacks=[race]
            )  # fmt: skip
        trainer.train()
    return {
        "teacher": of_teacher, "before": before, "best": race.best, "reached": float(race.reached),
        "operations": race.operations, "updates": float(trainer.state.global_step),
    }  # fmt: skip


def verdict(figures: dict[str, list[arms.Figures]]) -> str:
    taught, rewarded = (arms.column(figures, arm, "reached") for arm in ("distillation", "grpo"))
    operations = [arms.column(figures, arm, "operations") for arm in ("grpo", "distillation")]
    logs = [torch.tensor(column, dtype=torch.double).log().tolist() for column in operations]
    ratios = [a - b for a, b in zip(*logs, strict=True)]
    times, low, high = (torch.tensor(bound).exp().item() for bound in arms.bounds(ratios))
    least, n, all_taught, all_rewarded = torch.tensor(min(ratios)).exp().item(), len(taught), all(taught), all(rewarded)
    # Where GRPO did not get there, its operations are a lower bound in each seed, and their spread tells nothing.
    holds = all_taught and (low if all_rewarded else least) > 1
    fails = all_rewarded and (high < 1 or not any(taught))
    took = f"{times:.1f} times the operations [{low:.1f}, {high:.1f}]"
    took = took if all_rewarded else f"at least {least:.2f} times the operations in each seed"
    ended = [100 * arms.bounds(arms.column(figures, arm, "best"))[0] for arm in ("distillation", "grpo")]
    ahead = [100 * bound for bound in arms.bounds(arms.differences(figures, "distillation", "grpo", "best"))]
    before, goal = (100 * arms.bounds(arms.column(figures, "grpo", name))[0] for name in ("before", "teacher"))
    return (
        f"{'Holds' if holds else 'Does not hold' if fails else 'Not shown'}: from {before:.1f}%, distillation came to "
        f"within 3 points of the teacher ({goal - 100 * POINTS:.1f}%) in {sum(taught):.0f} of {n} seeds and GRPO in "
        f"{sum(rewarded):.0f}; {f'GRPO took {took}; ' if all_taught else ''}distillation came to {ended[0]:.1f}% and "
        f"GRPO to {ended[1]:.1f}%, {ahead[0]:+.1f} points [{ahead[1]:+.1f}, {ahead[2]:+.1f}]."
    )


if __name__ == "__main__":
    arms.run(
        "On-policy distillation takes fewer operations than GRPO to the same accuracy",
        "https://thinkingmachines.ai/blog/on-policy-distillation/", ["distillation", "grpo"], measure, verdict,
        SETTINGS, SMOKE,
    )  # fmt: skip
