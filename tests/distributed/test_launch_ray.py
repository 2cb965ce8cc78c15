"""``posttrain launch --ray``, with Ray itself where it is installed."""

import importlib.util
import json
import subprocess
import sys
import time

import pytest

from posttrain.core.errors import ConfigError
from posttrain.core.tools import launch, launch_ray

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install ray")

PROGRAM = """
import json, os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([float(dist.get_rank() + 1)])
dist.all_reduce(total)
if sys.argv[2] == "fails" and dist.get_rank() == 1:
    sys.exit(7)
found = {"total": total.item(), "local": os.environ["LOCAL_RANK"]}
with open(f"{sys.argv[1]}/{dist.get_rank()}.json", "w") as file:
    json.dump(found | {"mixed": os.environ["ACCELERATE_MIXED_PRECISION"]}, file)
if sys.argv[2] == "waits" and dist.get_rank() == 0:
    import pathlib, time
    while len(pathlib.Path(sys.argv[1], "engine").read_text().split()) < 3:
        time.sleep(0.1)
"""


def run(tmp_path, how, *flags):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = ["--ray", "-n", "2", "--use_cpu", *flags, str(program), str(tmp_path), how]
    code = f"import sys; from posttrain.core.tools import launch; sys.exit(launch.run({words!r}))"
    return subprocess.run([sys.executable, "-c", code], timeout=300, capture_output=True, text=True)


@needs_ray
@pytest.mark.slow
def test_two_processes_meet_on_a_ray_cluster(tmp_path):
    done = run(tmp_path, "works", "--mixed_precision", "bf16")
    assert done.returncode == 0, done.stderr
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    assert found == [{"total": 3.0, "local": str(rank), "mixed": "bf16"} for rank in range(2)]


@needs_ray
@pytest.mark.slow
def test_the_status_of_the_process_that_fails_is_that_of_the_command(tmp_path):
    assert run(tmp_path, "fails").returncode == 7


@needs_ray
@pytest.mark.slow
def test_an_engine_that_dies_is_started_again_and_ends_with_the_trainer(tmp_path):
    engine = f"bash -c 'echo started >> {tmp_path}/engine; exit 3'"
    (tmp_path / "engine").touch()
    done = run(tmp_path, "waits", "--ray_engine", engine)
    assert done.returncode == 0, done.stderr
    starts = (tmp_path / "engine").read_text().count("started")
    time.sleep(2 * launch_ray.PAUSE)
    assert starts >= 3 and (tmp_path / "engine").read_text().count("started") == starts


def test_an_engine_is_kept_running_until_it_is_stopped(tmp_path, monkeypatch):
    """Without Ray: the actor's class is a plain one."""
    import threading

    monkeypatch.setattr(launch_ray, "PAUSE", 0.01)
    host, restarts = launch_ray.Host(), []
    script = f"echo x >> {tmp_path}/starts; [ $(wc -l < {tmp_path}/starts) -ge 3 ] && exec sleep 300; exit 3"
    thread = threading.Thread(target=lambda: restarts.append(host.keep_running(["bash", "-c", script], {})))
    thread.start()
    until = time.monotonic() + 60
    while not ((tmp_path / "starts").exists() and (tmp_path / "starts").read_text().count("x") == 3):
        assert time.monotonic() < until
        time.sleep(0.01)
    host.stop()
    thread.join(60)
    assert restarts == [2] and not thread.is_alive()


def test_processes_are_numbered_on_their_machines():
    places = [("10.0.0.1", 4000), ("10.0.0.2", 4001), ("10.0.0.1", 4002)]
    found = launch_ray.variables_of(places, use_cpu=True)
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "1", "2"]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in found} == {("10.0.0.1", "4000", "3")}
    assert [one["LOCAL_RANK"] for one in launch_ray.variables_of(places, use_cpu=False)] == ["0", "0", "0"]


def test_flags_that_ray_leaves_without_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Ray knows the machines"):
        launch.run(["--ray", "--max_restarts", "2", "program.py"])
    with pytest.raises(ConfigError, match="set ray=True too"):
        launch.run(["--ray_engine", "vllm serve m", "program.py"])
    assert launch_ray.command(["--module", "posttrain.core.cli", "sft"])[1:] == ["-m", "posttrain.core.cli", "sft"]
    assert launch_ray.command(["--no-python", "env"]) == ["env"]
