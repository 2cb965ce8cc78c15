"""Three thousand updates with logging, evaluation and saving: memory, threads and files do not grow."""

import gc
import os
import threading
from pathlib import Path

import pytest

from posttrain.core import TrainerCallback
from tests.contract.trainers import TRAINERS

STEPS, WARM_UP, EVERY = 3000, 1000, 100


class Look(TrainerCallback):
    """Memory in MiB, threads and open files of this process, every so many updates."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % EVERY == 0:
            gc.collect()
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            files = len(os.listdir("/proc/self/fd"))
            self.seen.append(
                (state.global_step, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, threading.active_count(), files)
            )


def slope(points):
    """MiB per 1,000 updates, by least squares."""
    xs, ys = [x for x, *_ in points], [y for _, y, *_ in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    over = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True))
    return 1000 * over / sum((x - mean_x) ** 2 for x in xs)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("name", ["causal-lm", "sft", "dpo", "grpo"])
def test_three_thousand_updates_leave_nothing_behind(name, later, tmp_path):
    look = Look()
    trainer = TRAINERS[name](
        tmp_path, callbacks=[look], max_steps=STEPS, logging_steps=10, eval_strategy="steps", eval_steps=200,
        save_strategy="steps", save_steps=100, save_total_limit=2, save_async=later, optim="adamw_torch",
        learning_rate=1e-4,
    )  # fmt: skip
    trainer.train()
    after = [point for point in look.seen if point[0] >= WARM_UP]
    assert slope(after) < 10, after
    for column in (2, 3):
        assert max(point[column] for point in after[-5:]) <= max(point[column] for point in after[:5]), after
    assert len(trainer.store.checkpoints()) == 2
