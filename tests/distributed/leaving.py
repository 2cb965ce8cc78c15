"""Run as several processes: a signal to one of them alone, in the middle of training and inside an evaluation; saves in
the background; callbacks that ask for something on one process alone.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch

from posttrain.core import TrainerCallback
from posttrain.core.checkpoint import blocks
from posttrain.core.logging.metrics import is_timing
from tests.contract.trainers import TRAINERS


class SignalTo(TrainerCallback):
    """Sends SIGTERM to one process of the job, at an event of a step."""

    def __init__(self, rank, event, step):
        def hear(args, state, control, **kwargs):
            if state.global_step == step and args.process_index == rank and not self.sent:
                self.sent = True
                os.kill(os.getpid(), signal.SIGTERM)

        self.sent = False
        setattr(self, event, hear)


class AskOn(TrainerCallback):
    """Sets a flag of the control on one process alone, at an event of a step."""

    def __init__(self, rank, event, step, flag):
        def hear(args, state, control, **kwargs):
            if state.global_step == step and args.process_index == rank:
                setattr(control, flag, True)

        setattr(self, event, hear)


ASKED = [
    (1, "on_step_end", 3, "should_training_stop"),
    (0, "on_step_begin", 2, "should_training_stop"),
    (0, "on_epoch_begin", 0, "should_training_stop"),
    (1, "on_train_begin", 0, "should_training_stop"),
    (1, "on_evaluate", 4, "should_training_stop"),
    (0, "on_step_end", 2, "should_save"),
    (1, "on_log", 3, "should_evaluate"),
    (1, "on_epoch_end", 8, "should_evaluate"),
]


class RaiseAt(TrainerCallback):
    """Raises on every process, at an event of a step."""

    def __init__(self, event, step):
        def hear(args, state, control, **kwargs):
            if state.global_step == step:
                raise ValueError("broken")

        setattr(self, event, hear)


def trainer_in(out, later, callbacks=(), **more):
    changes = dict(
        per_device_train_batch_size=2, max_steps=8, save_strategy="steps", save_steps=3, logging_steps=3,
        optim="adamw_torch", eval_strategy="steps", eval_steps=4, per_device_eval_batch_size=1, save_async=later,
    )  # fmt: skip
    return TRAINERS["dropout"](out, callbacks=list(callbacks), **(changes | more))


def told(trainer):
    history = [{k: v for k, v in r.items() if not is_timing(k)} for r in trainer.state.log_history]
    return {"step": trainer.state.global_step, "log": history}


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, answers = Path(sys.argv[1]), {}
    blocks.SMALL = 1
    for later in (False, True):
        straight = trainer_in(folder / f"straight-{later}", later)
        straight.train()
        answers[f"straight-{later}"] = told(straight)
        for rank, event, step in ((0, "on_step_begin", 1), (1, "on_substep_end", 1), (1, "on_prediction_step", 4)):
            if event == "on_substep_end":
                event = "on_step_end"
            name = f"{rank}-{event}-{step}-{later}"
            stopped, code = trainer_in(folder / name, later, [SignalTo(rank, event, step)]), None
            try:
                stopped.train()
            except SystemExit as end:
                code = end.code
            codes = stopped.dist.gather_object((code, stopped.state.global_step))
            resumed = trainer_in(folder / name, later)
            resumed.train(resume_from_checkpoint=True)
            expected = straight.model.state_dict()
            equal = all(torch.equal(v, expected[k]) for k, v in resumed.model.state_dict().items())
            answers[name] = {"codes": codes, "equal": equal, **told(resumed)}
    for rank, event, step, flag in ASKED:
        name = f"{rank}-{event}-{step}-{flag}"
        asked = trainer_in(folder / name, False, [AskOn(rank, event, step, flag)])
        asked.train()
        steps = asked.dist.gather_object(asked.state.global_step)
        evaluated = [record["step"] for record in asked.state.log_history if "eval_loss" in record]
        if "stop" in flag:  # its newest checkpoint may be of an earlier step
            asked = trainer_in(folder / name, False)
            asked.train(resume_from_checkpoint=True if asked.store.checkpoints() else None)
        expected = straight.model.state_dict()
        equal = all(torch.equal(v, expected[k]) for k, v in asked.model.state_dict().items())
        answers[name] = {"steps": steps, "evaluated": evaluated, "equal": equal}
    accumulate = {"gradient_accumulation_steps": 2}
    whole = trainer_in(folder / "whole", False, **accumulate)
    whole.train()
    for event in ("on_substep_end", "on_step_end"):
        failing = trainer_in(folder / event, False, [RaiseAt(event, 4)], save_on_exception=True, **accumulate)
        try:
            failing.train()
        except ValueError:
            saved = failing.store.path(4).is_dir()
        resumed = trainer_in(folder / event, False, **accumulate)
        resumed.train(resume_from_checkpoint=True)
        expected = whole.model.state_dict()
        equal = all(torch.equal(v, expected[k]) for k, v in resumed.model.state_dict().items())
        answers[event] = {"saved": saved, "equal": equal, "same_log": told(resumed) == told(whole)}
    watch = straight.run.watch
    watch.begin()
    started = time.perf_counter()
    for _ in range(2000):
        watch.due()
    answers["microseconds"] = (time.perf_counter() - started) / 2000 * 1e6
    watch.settle(straight.dist.gather_object)
    watch.end()
    if straight.is_world_process_zero():
        (folder / "answers.json").write_text(json.dumps(answers))
