"""The program ends, and nothing of it stays behind, whatever reads the data and however the run came to its end."""

import json
from pathlib import Path

import pytest

from tests import programs

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes below /proc")

# Each case is a program: a fork of one that has imported everything, which runs on to its last line and ends there.
PROGRAM = """
import json, os, sys, time
from tests.core import workers_at_the_end as cases
cases.import_all(sys.argv[1], json.loads(sys.argv[2]))
for number, case in enumerate(json.loads(sys.argv[2])):
    sys.stdout.flush()
    child = os.fork()
    if child:
        print("=", json.dumps(cases.watch(child, case.pop("patience", 60))), flush=True)
        continue
    os.setsid()
    log = os.open(f"{sys.argv[1]}/{number}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1), os.dup2(log, 2)
    case.pop("patience", None)
    kept = cases.run(f"{sys.argv[1]}/{number}", **case)
    print("END", flush=True)
    break
"""


def ends(tmp_path, cases):
    """Runs `cases`; for each (exit status, seconds, processes left behind, what it printed)."""
    done = programs.run(["-c", PROGRAM, str(tmp_path), json.dumps(cases)], timeout=60 + 100 * len(cases))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("=")]
    assert len(answers) == len(cases)
    return [(*answer, (tmp_path / f"{number}.txt").read_text()) for number, answer in enumerate(answers)]


def check(tmp_path, cases, status=0):
    for case, (code, seconds, left, text) in zip(cases, ends(tmp_path, cases), strict=True):
        assert code == case.get("status", status), (case, code, seconds, text)
        assert left == 0, (case, text)
        assert ("END" in text) == (code == 0), (case, text)
        for line in text.splitlines():
            if line.startswith("children"):
                assert line == "children 0", (case, text)
    assert cases


def loading(workers=2, persistent=True, rows="map", **more):
    return {"workers": workers, "persistent": persistent, "rows": rows, **more}


KINDS = [
    loading(workers, persistent, rows)
    for rows in ("map", "iterable", "datasets", "stream", "interleaved")
    for workers, persistent in ((0, False), (1, False), (1, True), (2, False), (2, True))
]


@pytest.mark.long
def test_the_program_ends_with_workers_that_live_on_from_epoch_to_epoch(tmp_path):
    check(tmp_path, [
        loading(1), loading(2, rows="stream"), loading(2, how="several trainers"), loading(2, how="error", status=1),
        loading(2, how="sigterm", status=143), loading(2, persistent=False, how="error", status=1),
    ])  # fmt: skip


@pytest.mark.slow
def test_the_program_ends_with_every_kind_of_data_loading(tmp_path):
    check(
        tmp_path,
        [*KINDS, loading(2, prefetch=5), *(loading(1, context=name, patience=400) for name in ("spawn", "forkserver"))],
    )


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["map", "stream"])
@pytest.mark.parametrize("persistent", [False, True])
def test_the_program_ends_however_the_run_does(rows, persistent, tmp_path):
    hows = {
        "several trainers": 0, "error": 1, "error caught": 0, "error in a worker": 1, "exit": 3, "steps": 0, "del": 0,
        "sigterm": 143, "sigint": 130, "sigterm without saving": -15, "sigterm twice": -15, "sigkill": -9, "handler": 0,
        "evaluate": 0, "predict": 0, "iterator kept": 0, "own loader": 0, "own evaluation loader": 0, "thread": 0,
        "stuck worker": 0, "search": 0,
    }  # fmt: skip
    check(tmp_path, [loading(2, persistent, rows, how=how, status=status) for how, status in hows.items()])


@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True])
def test_the_program_ends_with_every_trainer(persistent, tmp_path):
    names = ("classifier", "seq2seq", "sft", "sft-packed", "dpo", "kto", "reward", "grpo")
    check(tmp_path, [loading(1, persistent, trainer=name) for name in names])
