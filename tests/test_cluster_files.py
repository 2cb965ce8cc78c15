"""The files for clusters: their syntax, and the names in them."""

import re
import shlex
import subprocess
from pathlib import Path

import yaml

from posttrain.core import ModelConfig
from posttrain.rl import GRPOConfig

FOLDER = Path(__file__).parents[1] / "examples" / "cluster"
KINDS = {"v1": {"Service"}, "apps/v1": {"Deployment"}, "batch/v1": {"Job"}}


def flags_after_grpo(text):
    """The flags of the command line `posttrain grpo`."""
    words = re.split(r"posttrain\.cli grpo", text.replace("\\\n", " "))[1].splitlines()[0]
    return re.findall(r"--(\w+)", words)


def assert_are_arguments(flags):
    known = {*GRPOConfig.__dataclass_fields__, *ModelConfig.__dataclass_fields__}
    assert flags and [flag for flag in flags if flag not in known] == []


def test_the_slurm_file_is_a_shell_script_whose_options_slurm_and_the_trainer_know():
    path = FOLDER / "grpo.sbatch"
    assert subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True).stderr == ""
    text = path.read_text()
    options = [
        shlex.split(line.removeprefix("#SBATCH "))[0] for line in text.splitlines() if line.startswith("#SBATCH")
    ]
    known = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "signal", "output"}
    assert options and {option.lstrip("-").partition("=")[0] for option in options} <= known
    assert text.index("#SBATCH") < text.index("set -euo")  # Slurm reads options up to the first command
    assert_are_arguments(flags_after_grpo(text))


def test_the_slurm_script_starts_a_server_and_the_trainers_on_other_nodes(tmp_path):
    """A dry run: commands of the cluster are replaced by ones that print what they were asked."""
    log = tmp_path / "log"
    for name, body in {"scontrol": "printf 'n0\\nn1\\nn2\\n'", "srun": f'echo "$*" >> {log}'}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_NODELIST": "n[0-2]", "SLURM_JOB_ID": "5"}
    environment |= {"OUTPUT": str(tmp_path / "out"), "CONFIG": "mine.yaml"}
    for checkpoint, expected in ((None, "false"), ("checkpoint-4", "true")):
        if checkpoint is not None:
            (tmp_path / "out" / checkpoint).mkdir(parents=True)
        log.write_text("")
        done = subprocess.run(["bash", str(FOLDER / "grpo.sbatch")], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        trainers = next(line for line in log.read_text().splitlines() if "torchrun" in line)
        assert "--nodelist=n1,n2" in trainers and "--rdzv-endpoint n1:29500" in trainers and "--nnodes 2" in trainers
        assert "grpo mine.yaml" in trainers and "http://n0:8000" in trainers
        assert f"--resume_from_checkpoint {expected}" in trainers


def test_the_kubernetes_file_holds_objects_that_belong_together():
    objects = list(yaml.safe_load_all((FOLDER / "grpo.yaml").read_text()))
    assert all(one["kind"] in KINDS[one["apiVersion"]] and one["metadata"]["name"] for one in objects)
    service, deployment, job = objects
    pod = deployment["spec"]["template"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == pod["metadata"]["labels"]
    (server,) = pod["spec"]["containers"]
    assert server["ports"][0]["containerPort"] == service["spec"]["ports"][0]["targetPort"]
    spec = job["spec"]["template"]["spec"]
    (trainer,) = spec["containers"]
    assert {mount["name"] for mount in trainer["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}
    (script,) = trainer["args"]
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert checked.returncode == 0 and checked.stderr == ""
    assert f"http://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}" in script
    assert spec["restartPolicy"] in ("OnFailure", "Never")
    assert_are_arguments(flags_after_grpo(script))
