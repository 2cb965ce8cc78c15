"""Run as several processes: SIGTERM to some of them within a rollout, of an agent or of one call of the engine."""

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import torch

from posttrain.core.logging.metrics import is_timing
from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.online.ledger import audit
from tests import tiny
from tests.contract.trainers import arguments, text_rows

AT = 2  # optimizer steps before the rollout in which the signals come
FOREVER = 120
#: Who gets a signal, who hangs in the rollout, what hangs, and further arguments.
CASES = {
    "one of two that hang": ([1], [0, 1], "agent", {}),
    "the first, which waits for the second": ([0], [1], "agent", {}),
    "both, in the engine": ([0, 1], [0, 1], "engine", {}),
    "the second, which waits for the first, sharded": ([1], [0], "engine", {"fsdp": "full_shard"}),
}


class Hanging:
    """Where optimizer step `AT` has been made: it sends this process SIGTERM, once, if that `is_told`."""

    def __init__(self, hangs, is_told):
        self.hangs, self.is_told = hangs, is_told

    def begin(self, step):
        """Whether it hangs now."""
        if step != AT:
            return False
        if self.is_told:
            self.is_told = False
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
        return self.hangs


class Slow(Hanging):
    """Takes longer than `ddp_timeout`."""

    def begin(self, step):
        if step == AT and self.hangs:
            time.sleep(5)
            self.hangs = False
        return False


def make(out, hanging, where, **changes):
    class Engine(LocalGenerator):
        def generate(self, *given, **options):
            if where == "engine" and hanging.begin(trainer.state.global_step):
                time.sleep(FOREVER)
                raise AssertionError("the signal was not heard")
            return super().generate(*given, **options)

    async def agent(episode, row):
        answer = await episode.generate([{"role": "user", "content": row["prompt"]}])
        if where == "agent" and hanging.begin(trainer.state.global_step):
            await asyncio.sleep(FOREVER)
            raise AssertionError("the signal was not heard")
        return float(len(answer["content"]) % 5)

    words = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
    usual = dict(num_generations=2, max_completion_length=6, gradient_checkpointing=False, save_on_signal=True,
                 max_steps=4, sample_ledger=True, logging_steps=1, shuffle_dataset=False)  # fmt: skip
    parts = {"reward_funcs": lambda completions, **_: [float(len(text)) for text in completions]}
    if where == "agent":
        parts = {"agent": agent}
    trainer = GRPOTrainer(
        tiny.causal_lm(initializer_range=0.1), args=arguments(GRPOConfig, out, **(usual | changes)),
        train_dataset=[{"prompt": row["prompt"]} for row in text_rows(24)], processing_class=words,
        generator=Engine(words, batch_invariant=True), **parts,
    )  # fmt: skip
    return trainer


def told(trainer):
    """What a run has logged, and its weights."""
    history = [{k: v for k, v in r.items() if not is_timing(k)} for r in trainer.state.log_history if "loss" in r]
    with trainer.dist.gathered(trainer.model):
        return [{k: v for k, v in r.items() if "seconds" not in k} for r in history], {
            name: parameter.detach().clone() for name, parameter in trainer.model.named_parameters()
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, answers = Path(sys.argv[1]), {}
    straight = {}
    for name, (told_ones, hang, where, changes) in CASES.items():
        kind, out = (where, *changes), folder / name.replace(" ", "-")
        if kind not in straight:
            run = make(folder / f"straight-{len(straight)}", Hanging(False, False), where, **changes)
            run.train()
            straight[kind] = told(run)
        rank = run.dist.process_index
        left, code = make(out, Hanging(rank in hang, rank in told_ones), where, **changes), None
        began = time.monotonic()
        try:
            left.train()
        except SystemExit as end:
            code = end.code
        took = time.monotonic() - began
        codes = left.dist.gather_object((code, left.state.global_step, took < FOREVER / 2))
        resumed = make(out, Hanging(False, False), where, **changes)
        resumed.train(resume_from_checkpoint=True)
        (log, weights), (expected_log, expected) = told(resumed), straight[kind]
        equal = all(torch.equal(weights[k], v) for k, v in expected.items())
        answers[name] = {"codes": codes, "equal": equal, "same_log": log == expected_log[-len(log) :],
                         "problems": audit(out).problems, "steps": len(log), "took": took}  # fmt: skip
    slow = make(folder / "slow", Slow(rank == 1, False), "agent", ddp_timeout=3, max_steps=AT + 1)
    slow.train()
    answers["slow"] = slow.state.global_step
    if slow.is_world_process_zero():
        (folder / "answers.json").write_text(json.dumps(answers))
