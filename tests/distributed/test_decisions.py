"""What a metric decides is decided alike on all processes, also where it differs between them or one alone has it."""

import json
import os
import sys
from pathlib import Path

from posttrain.core import Trainer
from posttrain.core.arguments import TrainingArguments
from posttrain.core.callbacks import EarlyStoppingCallback
from tests import tiny
from tests.contract.trainers import arguments, pad
from tests.programs import together

SCORES = [[1.0, 2.0, 0.5, 0.4], [4.0, 3.0, 5.0, 6.0]]  # of each process, at steps 1 to 4


class OnMain(Trainer):
    """Measures on the main process alone, as trainers of extractive question answering do."""

    def evaluate(self, *args, **kwargs):
        metrics = super().evaluate(*args, **kwargs)
        return metrics if self.args.process_index == 0 else {"eval_loss": metrics["eval_loss"]}


def run(kind, folder):
    rank, calls = int(os.environ.get("RANK", 0)), iter(range(4))
    args = arguments(
        TrainingArguments, folder, per_device_train_batch_size=2, max_steps=4, save_strategy="best", eval_steps=1,
        eval_strategy="steps", metric_for_best_model="score", greater_is_better=True, load_best_model_at_end=True,
        lr_scheduler_type="reduce_lr_on_plateau", lr_scheduler_kwargs={"patience": 0, "factor": 0.5},
    )  # fmt: skip
    trainer = kind(tiny.causal_lm(), args, pad, tiny.token_rows(8), tiny.token_rows(4, seed=1),
                   compute_metrics=lambda found: {"score": SCORES[rank][next(calls)]},
                   callbacks=[EarlyStoppingCallback(early_stopping_patience=2)])  # fmt: skip
    trainer.train()
    state, rates = trainer.state, [group["lr"] for group in trainer.optimizer.param_groups]
    weights = sum(p.double().abs().sum().item() for p in trainer.model.parameters())
    return [
        state.global_step,
        state.best_metric,
        state.best_global_step,
        rates,
        weights,
        [path.name for path in folder.glob("checkpoint-*")],
    ]


def test_processes_whose_metrics_differ_keep_the_same_model_and_learning_rate(tmp_path):
    done = together(2, [__file__, str(tmp_path)])
    assert done.returncode == 0, done.stderr[-4000:]
    for kind in ("Trainer", "OnMain"):
        first, second = (json.loads((tmp_path / f"{kind}-{rank}.json").read_text()) for rank in range(2))
        assert first == second
        assert first[:3] == [4, 2.0, 2] and set(first[3]) == {0.0125} and first[-1] == ["checkpoint-2"]


if __name__ == "__main__":
    for kind in (Trainer, OnMain):
        found = run(kind, Path(sys.argv[1]) / kind.__name__)
        Path(sys.argv[1], f"{kind.__name__}-{os.environ['RANK']}.json").write_text(json.dumps(found))
