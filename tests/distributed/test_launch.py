"""Every launcher starts the same program; `posttrain launch` reads what `accelerate config` writes."""

import json
import subprocess
import sys

import pytest

from posttrain.cli import main, method
from posttrain.cli.tools import launch
from posttrain.core import registry
from posttrain.core.distributed import environment
from posttrain.core.errors import ConfigError
from tests import programs
from tests.distributed import jobs

#: A script as people write them: its arguments come from the command line, with whatever the launcher adds.
SCRIPT = """
import json, os, sys
import torch
from transformers import HfArgumentParser
from posttrain.core import TrainingArguments
from tests.contract.trainers import causal_lm

torch.set_num_threads(1)
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
options = dict(fsdp=args.fsdp, fsdp_config=args.fsdp_config, use_cpu=args.use_cpu)
trainer = causal_lm()(args.output_dir, max_steps=1, per_device_train_batch_size=2, **options)
trainer.train()
said = dict(size=trainer.dist.world_size, fsdp=trainer.is_fsdp_enabled, precision=trainer.dist.precision,
            rank=trainer.args.process_index, local=args.local_rank, device=str(trainer.args.device),
            loss=trainer.state.log_history[0]["loss"])
if trainer.is_world_process_zero():
    print("SAID", json.dumps(said), flush=True)
"""
OLD = [sys.executable, "-m", "torch.distributed.launch", "--nproc_per_node", "2"]
OURS = [sys.executable, "-m", "posttrain.cli", "launch"]
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]

#: The file that the mission's document shows, for one machine without GPUs.
SEED = """
compute_environment: LOCAL_MACHINE
distributed_type: MULTI_CPU
downcast_bf16: 'no'
gpu_ids: all
machine_rank: 0 #change rank as per the node
main_process_ip: 127.0.0.1
main_process_port: {port}
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: true
"""


def free_port():
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def plain_script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return [str(path), "--output_dir", str(tmp_path / "out"), "--use_cpu"]


@pytest.fixture
def script(plain_script, tmp_path):
    """A script that is `plain_script` after the imports, whatever a launcher hands to it."""
    program, *arguments = plain_script
    programs.run(["-c", ""], seed=1)  # so that there is somebody to ask
    path = tmp_path / "forked.py"
    path.write_text(f"import sys\nfrom tests.forked import main\nmain('1', {program!r}, *sys.argv[1:])\n")
    return [str(path), *arguments]


def start(command, **changes):
    done = subprocess.run(
        command, cwd=jobs.ROOT, env=jobs.environment(**changes), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-5000:]
    (said,) = [line[5:] for line in done.stdout.splitlines() if line.startswith("SAID ")]
    return json.loads(said), done


@pytest.mark.rotated("launchers")
def test_the_launcher_of_earlier_years_and_its_flag(script):
    said, _ = start([*OLD, "--master_port", str(free_port()), *script])
    assert said["size"] == 2 and said["local"] == 0  # it was handed --local-rank=0


@pytest.mark.rotated("launchers")
def test_processes_without_a_gpu_are_joined_without_being_told_to_use_the_cpu(script):
    said, _ = start([*OURS, "-n", "2", *(word for word in script if word != "--use_cpu")], CUDA_VISIBLE_DEVICES="")
    assert (said["size"], said["device"]) == (2, "cpu")


@pytest.mark.rotated("launchers")
def test_posttrain_launch_reads_the_file_of_accelerate(script, tmp_path):
    file = tmp_path / "config_file.yaml"
    file.write_text(SEED.format(port=free_port()))
    said, _ = start([*OURS, "--config_file", str(file), *script])
    assert (said["size"], said["precision"], said["fsdp"], said["device"]) == (2, "bf16", False, "cpu")


@pytest.mark.rotated("launchers")
def test_flags_of_accelerate_shard_the_model(script):
    flags = ["--num_processes=2", "--use_fsdp", "--mixed_precision=no", "--cpu", "--fsdp_sharding_strategy=1"]
    flags += [
        "--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP",
        "--fsdp_transformer_layer_cls_to_wrap=Qwen3DecoderLayer",
    ]
    flags += ["--fsdp_state_dict_type=FULL_STATE_DICT"]
    said, _ = start([*OURS, *flags, *script])
    assert (said["size"], said["fsdp"], said["precision"]) == (2, True, "no")


@pytest.mark.slow
def test_a_preset_shards_the_model(script):
    said, _ = start([*OURS, "--accelerate_config", "fsdp2", "--num_processes", "2", "--cpu", *script])
    assert (said["size"], said["fsdp"], said["precision"]) == (2, True, "bf16")


@pytest.mark.rotated("launchers")
def test_accelerate_launch_starts_several_where_it_does(script):
    """With --multi_gpu it goes through torch's launcher, on the CPU too; what it puts into the environment is
    understood.
    """
    flags = [
        "--multi_gpu",
        "--num_processes",
        "2",
        "--mixed_precision",
        "bf16",
        "--main_process_port",
        str(free_port()),
    ]
    said, done = start([*ACCELERATE, *flags, *script])
    assert (said["size"], said["precision"]) == (2, "bf16") and "started one" not in done.stderr


@pytest.mark.rotated("launchers")
def test_accelerate_launch_on_the_cpu_starts_one_process_and_is_told_so(plain_script):
    said, done = start([*ACCELERATE, "--cpu", "--num_processes", "2", *plain_script])
    if said["size"] == 1:  # as accelerate 1.15 does
        assert "started one process instead of 2" in done.stderr


def test_lost_processes_are_noticed_by_the_command_line_alone():
    asked = {"ACCELERATE_MIXED_PRECISION": "no"}
    command = ["/usr/bin/python", "/usr/bin/accelerate", "launch", "--cpu", "--num_processes", "4", "train.py"]
    assert "instead of 4" in environment.lost_processes(asked, command)
    assert "instead of 4" in environment.lost_processes(asked, [*command[:4], "-n", "4", "train.py"])
    assert environment.lost_processes(asked, [*command[:4], "train.py"]) is None
    assert environment.lost_processes(asked | {"RANK": "0"}, command) is None
    assert environment.lost_processes({}, command) is None
    assert environment.lost_processes(asked, ["bash", "run.sh", "--num_processes", "4"]) is None


def test_a_method_of_posttrain_is_a_program_too():
    args, _ = launch.read({})
    assert launch.program_words(args, ["sft", "run.yaml"]) == ["--module", "posttrain.cli", "sft", "run.yaml"]
    with pytest.raises(ConfigError, match="neither a file here nor a method"):
        launch.program_words(args, ["stf", "run.yaml"])


def test_a_run_starts_its_processes_as_its_file_and_its_flags_say(monkeypatch, tmp_path, capsys):
    started = []
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(launch, "environment", lambda args: {})
    monkeypatch.setattr(launch, "start", lambda words: started.append(words) or 0)
    file = tmp_path / "run.yaml"
    file.write_text("method: sft\nmodel_name_or_path: m\nnum_processes: 2\naccelerate_config: fsdp2\n")
    for run, most in ((["sft", str(file)], "2"), (["train", str(file), "--num_processes", "3", "--smoke"], "3")):
        assert main(run) == 0
        words = started.pop()
        assert words[:2] == ["--nproc-per-node", most] and words[-len(run) - 2 :] == ["--module", "posttrain.cli", *run]
    assert main(["sft", str(file), "--accelerate_config"]) == 2 and not started
    assert "--accelerate_config has no value" in capsys.readouterr().err
    for variable in ("RANK", method.ALONE):  # in one of them, or where one process is compared
        with monkeypatch.context() as inside:
            inside.setenv(variable, "1")
            assert method.launcher_words([str(file)]) == []
    settings, problems = method.settings_of(registry.method("sft"), [str(file)])
    assert set(settings) == {"model_name_or_path"} and not problems


@pytest.mark.parametrize("name", launch.PRESETS)
def test_every_preset_can_be_started_as_it_is(name):
    args, notes = launch.read({"config_file": launch.parse.Setting("--accelerate_config", name)})
    assert not notes and (name != "single_gpu" or args.num_processes == 1)
    assert launch.environment(args)["ACCELERATE_MIXED_PRECISION"] == "bf16"


# ---- the file ----


def read(text, tmp_path, **flags):
    file = tmp_path / "config.yaml"
    file.write_text(text)
    settings = {"config_file": str(file)} | flags
    return launch.read({name: launch.parse.Setting(f"--{name}", value) for name, value in settings.items()})


def test_every_key_of_the_file_is_read_or_said_to_have_no_effect(tmp_path):
    args, notes = read(SEED.format(port=9898), tmp_path)
    assert (args.num_processes, args.num_machines, args.machine_rank, args.use_cpu) == (2, 1, 0, True)
    assert launch.torchrun_words(args)[-6:] == [
        "--node-rank",
        "0",
        "--master-addr",
        "127.0.0.1",
        "--master-port",
        "9898",
    ]
    (note,) = notes
    assert "same_network has no effect" in note


def test_two_machines_meet_where_the_file_says(tmp_path):
    text = SEED.format(port=9898).replace("127.0.0.1", "192.168.20.1").replace("num_machines: 1", "num_machines: 2")
    text = text.replace("num_processes: 2", "num_processes: 8").replace("use_cpu: true", "use_cpu: false")
    text = text.replace("MULTI_CPU", "MULTI_GPU").replace("gpu_ids: all", "gpu_ids: 0,2")
    args, _ = read(text, tmp_path, machine_rank="1")
    words = launch.torchrun_words(args)
    assert words[:4] == ["--nproc-per-node", "4", "--nnodes", "2"]
    assert words[-6:] == ["--node-rank", "1", "--master-addr", "192.168.20.1", "--master-port", "9898"]
    assert launch.environment(args)["CUDA_VISIBLE_DEVICES"] == "0,2"
    args, _ = read(text.replace("static", "c10d"), tmp_path)
    assert launch.torchrun_words(args)[-4:] == ["--rdzv-endpoint", "192.168.20.1:9898", "--rdzv-id", "posttrain"]


def test_sections_become_what_accelerate_calls_them(tmp_path):
    text = """
distributed_type: FSDP
num_processes: 2
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,Block
  fsdp_state_dict_type: SHARDED_STATE_DICT
parallelism_config:
  parallelism_config_dp_replicate_size: 1
  parallelism_config_dp_shard_size: 2
"""
    found = launch.environment(read(text, tmp_path)[0])
    assert found["ACCELERATE_USE_FSDP"] == "true" and found["FSDP_VERSION"] == "2"
    assert found["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "LlamaDecoderLayer,Block"
    assert found["PARALLELISM_CONFIG_DP_SHARD_SIZE"] == "2"
    deepspeed = "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config: {deepspeed_config_file: zero.json}\n"
    found = launch.environment(read(deepspeed, tmp_path)[0])
    assert found["ACCELERATE_USE_DEEPSPEED"] == "true" and found["ACCELERATE_DEEPSPEED_CONFIG_FILE"] == "zero.json"


def test_everything_wrong_is_said_together(tmp_path):
    text = "distributed_type: TPU\nnum_proceses: 2\nmixed_precision: fp8\nfp8_config: {backend: TE}\nnum_machines: 2\n"
    with pytest.raises(ConfigError) as caught:
        read(text, tmp_path)
    said = "\n".join(caught.value.problems)
    for part in ("config.yaml:1", "TPU", "config.yaml:2", "did you mean 'num_processes'", "fp8", "main_process_ip"):
        assert part in said, part
    assert len(caught.value.problems) == 5


def test_a_launch_without_a_program_is_refused(capsys):
    assert main(["launch", "--num_processes", "2"]) == 2
    assert "no PROGRAM" in capsys.readouterr().err
    assert main(["launch", "--help"]) == 0
    assert "--num_processes" in capsys.readouterr().out
