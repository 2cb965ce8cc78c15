"""A signal to one process, or a flag that a callback sets on one, counts for all of them after the same optimizer step,
and the run resumes to the same bits.
"""

import json

import pytest

from posttrain.core.checkpoint.store import Store
from tests.programs import ROOT, together


def test_processes_stop_together_wherever_a_signal_or_a_callback_asks_one_of_them(tmp_path):
    done = together(2, [str(ROOT / "tests/distributed/leaving.py"), str(tmp_path)], timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    print(f"asking whether to leave takes {answers.pop('microseconds'):.0f} microseconds")
    for later in (False, True):
        straight = answers[f"straight-{later}"]
        for rank, event, step in ((0, "on_step_begin", 1), (1, "on_step_end", 1), (1, "on_prediction_step", 4)):
            name = f"{rank}-{event}-{step}-{later}"
            found = answers[name]
            (one, first), (other, second) = found["codes"]
            assert (one, other) == (143, 143) and first == second, name
            assert step < first <= 8 or (event == "on_prediction_step" and first == 4), name
            assert found["equal"] and (found["step"], found["log"]) == (straight["step"], straight["log"]), name
            store = Store(tmp_path / name)
            assert all(store.verify(path, kind="sha256") == [] for path in store.checkpoints()), name
    for event in ("on_substep_end", "on_step_end"):  # where all raise
        assert answers[event] == {"saved": True, "equal": True, "same_log": True}, event
    ends = {
        "1-on_step_end-3-should_training_stop": 3,
        "0-on_step_begin-2-should_training_stop": 3,  # the step that had begun is finished
        "0-on_epoch_begin-0-should_training_stop": 0,
        "1-on_train_begin-0-should_training_stop": 0,
        "1-on_evaluate-4-should_training_stop": 4,
        "0-on_step_end-2-should_save": 8,
        "1-on_log-3-should_evaluate": 8,
        "1-on_epoch_end-8-should_evaluate": 8,
    }
    for name, step in ends.items():
        assert answers[name]["steps"] == [step, step] and answers[name]["equal"], name
    assert Store(tmp_path / "0-on_step_end-2-should_save").path(2).is_dir()
    assert answers["1-on_log-3-should_evaluate"]["evaluated"] == [3, 4, 8]


@pytest.mark.long
def test_processes_leave_a_rollout_together_wherever_a_signal_comes(tmp_path):
    done = together(2, [str(ROOT / "tests/distributed/leaving_rollouts.py"), str(tmp_path)], timeout=600)
    assert done.returncode == 0, done.stderr[-6000:]
    answers = json.loads((tmp_path / "answers.json").read_text())
    assert answers.pop("slow") == 3  # a process may take longer than ddp_timeout
    for name, found in answers.items():
        assert found["codes"] == [[143, 2, True]] * 2, name
        assert found["equal"] and found["same_log"] and found["problems"] == [] and found["steps"] == 4, name
