"""What a run of several processes does where collectives have the manners of NCCL (`nccl_like`)."""

from __future__ import annotations

import json
import re

import pytest
import torch

from tests import programs, rotation
from tests.distributed import jobs, test_failures, test_leaving

NCCL_LIKE = str(jobs.ROOT / "tests" / "distributed" / "nccl_like.py")
FAULTY = test_failures.FAULTY
RUNS = {
    "ddp": ("causal-lm", {}),
    "fsdp": ("causal-lm", {"fsdp": "full_shard", "optim": "adamw_torch", "learning_rate": 1e-3}),
    "packed": ("sft-packed", {}),
    "adapter": ("sft-lora", {"fsdp": "full_shard"}),
    "pairs": ("dpo", {}),
    "online": ("grpo-reused", {"fsdp": "full_shard"}),
}


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory):
    """{"gloo" or "nccl": the folder of the results of those of `RUNS` that are asked for}."""
    folder, done = tmp_path_factory.mktemp("runs"), {}
    asked = rotation.wanted(request.session, "trained", RUNS)
    for kind, before in (("gloo", []), ("nccl", [NCCL_LIKE])):
        done[kind] = folder / kind
        done[kind].mkdir()
        work = [
            [label, "train", {"name": name, "out": str(done[kind] / f"out-{label}")} | changes]
            for label, (name, changes) in RUNS.items()
            if label in asked
        ]
        words = [*before, str(jobs.WORKER), str(done[kind]), json.dumps(work)]
        finished = programs.together(2, words, timeout=400)
        assert finished.returncode == 0, finished.stderr[-6000:]
    return done


@pytest.mark.rotated(one_in=3)
@pytest.mark.parametrize("label", RUNS)
def test_training_is_that_of_gloo_bit_for_bit(label, trained):
    one, other = (jobs.result(trained[kind], label) for kind in ("gloo", "nccl"))
    assert one["weights"].keys() == other["weights"].keys() and one["step"] == other["step"] > 1
    assert all(torch.equal(value, other["weights"][name]) for name, value in one["weights"].items())
    assert one["log"] == other["log"] and one["eval"].keys() == other["eval"].keys()


@pytest.mark.slow
def test_a_signal_or_a_flag_stops_all_processes_together(tmp_path, monkeypatch):
    together = programs.together
    monkeypatch.setattr(test_leaving, "together", lambda n, words, **named: together(n, [NCCL_LIKE, *words], **named))
    test_leaving.test_processes_stop_together_wherever_a_signal_or_a_callback_asks_one_of_them(tmp_path)


def suffer(act, out, mode, monkeypatch):
    """As in `test_failures`."""
    monkeypatch.setattr(test_failures, "BEFORE", [NCCL_LIKE])
    return test_failures.suffer(act, out, mode)


@pytest.mark.rotated("faults")
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_process_that_hangs_is_found_where_the_others_wait_for_their_device(mode, tmp_path, monkeypatch):
    done, seconds = suffer("is_stuck", tmp_path, mode, monkeypatch)
    assert seconds < 6 + 20  # when the watchdog of NCCL ends the process
    assert "SIGABRT" not in done.stderr
    found = test_failures.root_cause(done.stderr) + done.stderr
    assert "has waited 6 s for the others in what the device computes" in found
    assert re.search(r"rank 1 did not wait for the others \(step 2, .*is_stuck \(distributed/faulty.py", done.stderr)
    assert "train_on_window" in (tmp_path / "hang/rank-0.txt").read_text()


@pytest.mark.rotated("faults")
def test_a_hang_before_a_rollout_is_found_by_those_that_generate(tmp_path, monkeypatch):
    """Generation reads each token from the device, so what it waits for first is what the others owe it."""
    done, seconds = suffer("is_stuck", tmp_path, "rollouts", monkeypatch)
    assert seconds < 6 + 20 and "SIGABRT" not in done.stderr
    assert "rank 0 has waited 6 s for the others in what the device computes" in done.stderr
    assert re.search(r"rank 1 did not wait for the others .*is_stuck \(distributed/faulty.py", done.stderr)


@pytest.mark.rotated("faults")
@pytest.mark.parametrize("act", ["raises", "is_killed"])
def test_the_others_end_soon_when_a_process_is_lost_though_they_would_save_at_a_signal(act, tmp_path, monkeypatch):
    """A signal is not heard within CUDA, and a collective with a process that is gone never ends."""
    done, seconds = suffer(act, tmp_path, "saves", monkeypatch)
    assert seconds < 20 < 30  # torchrun kills what has not ended after 30 s
    cause = test_failures.root_cause(done.stderr)
    assert "rank      : 1" in cause
    assert ("the reward file has no row 7" if act == "raises" else "SIGKILL") in cause
    assert "rank 0 waits for the others in what the device computes" in (tmp_path / "hang/rank-0.txt").read_text()
    assert "and rank 1 has ended" in (tmp_path / "hang/rank-0.txt").read_text()


def test_a_collective_that_does_not_end_ends_the_process_by_sigabrt(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torch, datetime\n"
        "import torch.distributed as dist\n"
        "dist.init_process_group(timeout=datetime.timedelta(seconds=1))\n"
        "x = torch.ones(3)\n"
        "dist.all_reduce(x)\n"
        "assert x.tolist() == [2, 2, 2]\n"
        "if dist.get_rank() == 1:\n"
        "    time.sleep(60)\n"
        "dist.all_reduce(x)\n"
        "y = x * 2 + 1\n"
        "print('queued', flush=True)\n"
        "try:\n"
        "    y.sum().item()\n"
        "except BaseException:\n"
        "    print('heard', flush=True)\n"
    )
    done = programs.together(2, [NCCL_LIKE, str(script)])
    assert done.returncode == -6 and "queued" in done.stdout and "heard" not in done.stdout
    assert "collective operation timeout: ALLREDUCE" in done.stderr
