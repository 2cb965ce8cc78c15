"""trl's own trainers, subclasses of transformers' `Trainer`, log the same with ours below them: records, metrics of
their own, evaluations, the best checkpoint and its weights.
"""

import json
import subprocess
import sys

import pytest

from tests.programs import environment

pytest.importorskip("trl")

#: Times, and what is counted in another way (docs/migrating.md).
LEFT_OUT = ("_runtime", "_per_second", "total_flos", "step_time")


@pytest.fixture(scope="module", params=[1, pytest.param(2, marks=pytest.mark.slow)], ids=["alone", "two processes"])
def logs(request, tmp_path_factory):
    folder, whose = tmp_path_factory.mktemp("logs"), ("theirs", "ours")
    start = ["torch.distributed.run", "--standalone", f"--nproc-per-node={request.param}", "-m"]
    command = [sys.executable, "-m", *start[: 4 * (request.param > 1)], "tests.parity.their_trainers"]
    env = environment(TRL_EXPERIMENTAL_SILENCE="1")
    running = [subprocess.Popen([*command, one, folder / one], env=env, stderr=subprocess.PIPE) for one in whose]
    errors = [process.communicate(timeout=600)[1].decode() for process in running]
    assert [process.returncode for process in running] == [0, 0], errors
    return [json.loads((folder / one).read_text()) for one in whose]


#: On two processes: these evaluations are means of the means of batches there; GKD's sums are divided by the tokens of
#: both, and averaged over both once more.
OTHERWISE_ON_TWO = ("CPO", "ORPO", "TPO", "GKD")


@pytest.mark.parametrize("name", ["SFT", "DPO", "Reward", "KTO", "CPO", "GKD", "ORPO", "TPO", "GRPO", "RLOO", "LoRA"])
def test_a_trainer_of_theirs_logs_the_same_with_ours_below(name, logs, request):
    if name in OTHERWISE_ON_TWO and "two processes" in request.node.name:
        pytest.skip(f"{name} is another on two processes there")
    theirs, ours = (log[f"{name}Trainer"] for log in logs)
    assert [record.get("step") for record in ours] == [record.get("step") for record in theirs]
    assert sum(len(record) for record in theirs) > 50
    for record, own in zip(theirs, ours, strict=True):
        for metric, value in record.items():
            # The loss of trl's RLOO is a mean, and transformers adds up those of a step's two micro-batches.
            value = value / 2 if (name, metric) == ("RLOO", "grad_norm") else value
            if not metric.endswith(LEFT_OUT):
                assert own[metric] == pytest.approx(value, rel=1e-4, abs=1e-5), (metric, record, own)
