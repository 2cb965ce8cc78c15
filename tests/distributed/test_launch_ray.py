"""``posttrain launch --ray``, with Ray itself where it is installed."""

import importlib.util
import json
import subprocess
import sys
import time
import types

import pytest

from posttrain.cli.tools import launch, launch_ray
from posttrain.core.errors import ConfigError

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
    code = f"import sys; from posttrain.cli.tools import launch; sys.exit(launch.run({words!r}))"
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
    gpus = [{"CUDA_VISIBLE_DEVICES": number} for number in ("3", "0", "1")]
    places = [launch_ray.Place(f"10.0.0.{node}", 4000 + i, gpus[i]) for i, node in enumerate((1, 2, 1))]
    found = launch_ray.variables_of(places)
    assert [one["LOCAL_RANK"] for one in found] == ["0", "0", "1"]
    assert [one["LOCAL_WORLD_SIZE"] for one in found] == ["2", "1", "2"]
    assert {(one["MASTER_ADDR"], one["MASTER_PORT"], one["WORLD_SIZE"]) for one in found} == {("10.0.0.1", "4000", "3")}
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["3,1", "0", "3,1"]  # LOCAL_RANK numbers them


class FakeRay(types.ModuleType):
    """Ray with two machines of three GPUs: actors are plain objects whose calls end at once."""

    def __init__(self, has_room=True):
        super().__init__("ray")
        self.started, self.removed, self.runs, self.has_room = [], [], [], has_room
        self.util = types.ModuleType("ray.util")
        self.util.placement_group = self._group
        self.util.remove_placement_group = self.removed.append
        self.util.scheduling_strategies = types.ModuleType("ray.util.scheduling_strategies")
        self.util.scheduling_strategies.PlacementGroupSchedulingStrategy = lambda group, **options: options
        self.init = lambda **options: None
        self.shutdown = lambda: None
        self.exceptions = types.SimpleNamespace(RayError=RuntimeError)
        self.cluster_resources = lambda: {"CPU": 4.0, "GPU": 6.0}

    def _group(self, bundles, strategy):
        self.bundles = bundles
        return types.SimpleNamespace(ready=lambda: "ready")

    def wait(self, calls, num_returns=1, timeout=None):
        return (calls[:num_returns], calls[num_returns:]) if self.has_room else ([], calls)

    def get(self, calls, timeout=None):
        return calls

    def remote(self, kind):
        def options(**given):
            number = len(self.started)
            self.started.append(given)
            place = launch_ray.Place(f"node{number % 2}", 4000, {"CUDA_VISIBLE_DEVICES": str(number)})
            call = lambda answer: types.SimpleNamespace(remote=answer)  # noqa: E731
            actor = types.SimpleNamespace(
                place=call(lambda: place), stop=call(lambda: None), keep_running=call(lambda *args: None),
                run=call(lambda words, environment: self.runs.append((number, environment)) or 0),
            )  # fmt: skip
            return types.SimpleNamespace(remote=lambda: actor)

        return types.SimpleNamespace(options=options)


@pytest.fixture
def fake_ray(monkeypatch):
    ray = FakeRay()
    for name, module in {"ray": ray, "ray.util": ray.util}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "ray.util.scheduling_strategies", ray.util.scheduling_strategies)
    return ray


def test_processes_and_engine_on_gpus_are_placed_together_and_numbered_by_machine(fake_ray):
    assert launch_ray.run(["program"], 4, {}, False, "serve", engine_gpus=2) == 0
    assert [bundle.get("GPU") for bundle in fake_ray.bundles] == [1, 1, 1, 1, 2]
    assert [one["num_gpus"] for one in fake_ray.started] == [1, 1, 1, 1, 2] and len(fake_ray.removed) == 1
    assert [one["scheduling_strategy"]["placement_group_bundle_index"] for one in fake_ray.started] == [0, 1, 2, 3, 4]
    names = ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
    assert [(number, *(mine[name] for name in names)) for number, mine in fake_ray.runs] == [
        (0, "0", "0", "2", "0,2"), (2, "1", "1", "2", "0,2"), (1, "2", "0", "2", "1,3"), (3, "3", "1", "2", "1,3"),
    ]  # fmt: skip


def test_an_engine_on_the_cpu_reserves_nothing(fake_ray):
    assert launch_ray.run(["program"], 1, {}, True, "serve") == 0
    assert fake_ray.bundles == [{"CPU": 1.0}] and "scheduling_strategy" not in fake_ray.started[1]


def test_a_cluster_without_room_is_named(fake_ray):
    fake_ray.has_room = False
    with pytest.raises(ConfigError, match=r"no room for .* within 0.1 seconds; it has .*'GPU': 6.0"):
        launch_ray.run(["program"], 8, {}, False, None, timeout=0.1)
    assert len(fake_ray.removed) == 1 and not fake_ray.started


def test_flags_that_ray_leaves_without_effect_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="Ray knows the machines"):
        launch.run(["--ray", "--max_restarts", "2", "program.py"])
    with pytest.raises(ConfigError, match="set ray=True too"):
        launch.run(["--ray_engine", "vllm serve m", "program.py"])
    assert launch_ray.command(["--module", "posttrain.cli", "sft"])[1:] == ["-m", "posttrain.cli", "sft"]
    assert launch_ray.command(["--no-python", "env"]) == ["env"]
