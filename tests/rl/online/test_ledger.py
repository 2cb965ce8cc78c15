"""The ledger: every completion has one line that counts, also where the trainer was killed."""

import json
import random
import signal
import time
from pathlib import Path

import pytest

from posttrain.rl import GRPOTrainer, RLOOTrainer
from posttrain.rl.online.ledger import Ledger, audit, prompt_id
from posttrain.rl.samples.samples import Sample
from tests import programs, tiny
from tests.contract.trainers import arguments, digit_sum, text_rows

ROOT = Path(__file__).parents[3]
WAIT = 240  # seconds after which a test that hangs fails


def make(out, kind=GRPOTrainer, rows=13, **changes):
    usual = {"num_generations": 2, "max_completion_length": 6, "gradient_checkpointing": False, "max_staleness": 2,
             "generation_kwargs": {"stop": ["e", "a", "o"]}}  # fmt: skip
    return kind(
        model=tiny.causal_lm(initializer_range=0.1),
        reward_funcs=digit_sum,
        args=arguments(kind.config_class, out, **(usual | changes)),
        processing_class=tiny.tokenizer(),
        train_dataset=[{"prompt": row["prompt"]} for row in text_rows(rows)],
    )


def sample(rollout, place, versions, ids=(5, 6)):
    return Sample({}, "x", [1, 2], ids=list(ids), versions=versions, rollout=rollout, place=place)


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("bound", [0, 2])
def test_every_completion_has_a_line(kind, bound, tmp_path):
    trainer = make(tmp_path, kind, max_staleness=bound, sample_ledger=True)
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and found.left_out == [] and found.dropped == {}
    steps = trainer.state.global_step
    assert [line["step"] for line in found.used] == [step for step in range(1, steps + 1) for _ in range(8)]
    assert [line["sample"] for line in found.used] == list(range(8)) * steps
    assert all(line["engine"].endswith("Generator") and 0 <= line["reward"] < 1 for line in found.used)
    ages = {line["step"] - 1 - line["versions"][0] for line in found.used}
    assert ages == {0} if bound == 0 else max(ages) == 2
    known = {prompt_id(trainer.codec.encode(row["prompt"])) for row in text_rows(13)}
    assert {line["prompt"] for line in found.used} <= known and len({line["prompt"] for line in found.used}) > 8


def test_no_ledger_is_written_unless_it_is_wanted(tmp_path):
    make(tmp_path / "a", max_staleness=0, max_steps=1).train()
    make(tmp_path / "b", max_staleness=1, max_steps=1, sample_ledger=False).train()
    assert list(tmp_path.glob("*/samples-*")) == []


def test_completions_that_dynamic_sampling_leaves_out_have_a_line(tmp_path):
    trainer = make(tmp_path, rows=40, dynamic_sampling=True, dynamic_sampling_rounds=3, num_train_epochs=1)
    trainer.rewards.functions[:] = [lambda completion_ids: [float(sum(ids) % 5 == 0) for ids in completion_ids]]
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and found.left_out
    assert len(found.used) == 8 * trainer.state.global_step


def test_an_audit_finds_what_is_used_twice_missing_or_too_old(tmp_path):
    ledger = Ledger(tmp_path, 0, "engine")
    ledger.began(1)
    ledger.used([sample(0, 0, [0]), sample(0, 1, [0])], [1.0, 0.0], 0, 1)
    ledger.used([sample(0, 1, [0])], [0.0], 0, 2)
    ledger.used([sample(2, 0, [0, 1])], [float("nan")], 0, 3)
    found = audit(tmp_path)
    assert found.problems == [
        "sample (0, 1) was used 2 times",
        "rollout 1 has no line",
        "rollout 2 lacks the samples [1]",
        "sample (2, 0) was 2 steps old in step 3, above 1",
    ]
    assert found.used[-1]["reward"] is None and found.used[-1]["versions"] == [0, 1]


def test_lines_after_the_checkpoint_do_not_count_once_a_run_resumes(tmp_path):
    ledger = Ledger(tmp_path, 0, "engine")
    ledger.used([sample(5, 0, [0])], [1.0], 0, 1)  # of another run in this folder
    ledger.began(1)
    for step in (1, 2, 3):
        ledger.used([sample(step - 1, 0, [step - 1])], [1.0], 0, step)
    with ledger.path.open("ab") as file:
        file.write(b'{"rollout": 3, "sam')  # killed
    ledger.resumed(2, 1)
    ledger.used([sample(2, 0, [2], ids=(7, 8, 9))], [0.5], 0, 3)
    ledger.dropped(3, "the run has ended")
    found = audit(tmp_path)
    assert found.problems == [] and found.dropped == {3: "the run has ended"}
    assert [(line["rollout"], line["step"], line["tokens"]) for line in found.used] == [(0, 1, 2), (1, 2, 2), (2, 3, 3)]


# ---- killed

SCRIPT = """
import sys
sys.path.insert(0, {root!r})
from tests.rl.online.test_ledger import make
make({out!r}, max_steps={steps}, num_train_epochs=99, save_strategy="steps", save_steps=2, save_total_limit=2,
     max_staleness={bound}).train(resume_from_checkpoint={resume!r})
"""


def run_until(out, lines, resume, steps, bound):
    """Train in a process of its own, which is killed when its ledger has so many lines more; whether it ended."""
    path = Path(out) / "samples-0.jsonl"
    before = path.read_bytes().count(b"\n") if path.exists() else 0
    script = SCRIPT.format(root=str(ROOT), out=str(out), steps=steps, bound=bound, resume=resume)
    process = programs.Program(["-c", script])
    until = time.monotonic() + WAIT
    while process.poll() is None:
        assert time.monotonic() < until, "the run hangs"
        if path.exists() and path.read_bytes().count(b"\n") - before >= lines:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    _, errors = process.communicate()
    assert process.returncode in (0, -signal.SIGKILL), errors[-2000:]
    return process.returncode == 0


def kill_again_and_again(out, times, steps, bound, seed):
    draw = random.Random(seed)
    ended = False
    for _ in range(times):
        has_checkpoint = bool(list(Path(out).glob("checkpoint-*")))
        ended = ended or run_until(out, draw.randint(18, 60), has_checkpoint, steps, bound)
    has_checkpoint = bool(list(Path(out).glob("checkpoint-*")))
    assert ended or run_until(out, 10**9, has_checkpoint, steps, bound)
    found = audit(out)
    assert found.problems == []
    assert [line["step"] for line in found.used] == [step for step in range(1, steps + 1) for _ in range(8)]
    # rollouts count on without a gap, and each is 4 other prompts of an epoch of 13
    assert [line["rollout"] for line in found.used] == [number for number in range(steps) for _ in range(8)]
    epochs = [found.used[start : start + 24] for start in range(0, 8 * (steps - steps % 3), 24)]
    assert all(len({line["prompt"] for line in epoch}) == 12 for epoch in epochs)
    texts = [json.loads(text) for text in (Path(out) / "samples-0.jsonl").read_text().splitlines() if text[-1:] == "}"]
    return sum("resumed" in line for line in texts)


@pytest.mark.long
def test_a_trainer_that_is_killed_uses_each_sample_once(tmp_path):
    assert kill_again_and_again(tmp_path, times=1, steps=8, bound=2, seed=0) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_trainer_that_is_killed_ten_times_uses_each_sample_once(seed, tmp_path):
    assert kill_again_and_again(tmp_path, times=10, steps=60, bound=3, seed=seed) >= 5
