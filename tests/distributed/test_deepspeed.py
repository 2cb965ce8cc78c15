"""DeepSpeed's engine behind the same loop: the numbers of one process, at each stage of ZeRO."""

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

from posttrain.core import TrainingArguments
from posttrain.core.distributed import deepspeed
from posttrain.core.errors import ConfigError
from tests.distributed import jobs
from tests.distributed.test_equal import assert_equal_runs
from tests.distributed.test_launch import free_port
from tests.distributed.test_resume_elsewhere import USUAL

AUTO = {
    "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "train_batch_size": "auto",
    "gradient_clipping": "auto", "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {"type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}},
}  # fmt: skip


def zero(stage, **more):
    """Stage 3 divides every weight: by default such small ones stay whole on each process."""
    sizes = {"stage": stage, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": 0}
    return AUTO | {"zero_optimization": sizes | more}


# ---- the configuration, which needs no DeepSpeed ----


def arguments(**changes):
    usual = {"use_cpu": True, "per_device_train_batch_size": 3, "gradient_accumulation_steps": 4, "max_grad_norm": 0.5}
    return TrainingArguments("out", **(usual | changes))


def test_auto_follows_the_arguments(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = torch.nn.Linear(1, 1)
    model.config = types.SimpleNamespace(hidden_size=32)
    filled = deepspeed.fill(deepspeed.read(zero(3)), arguments(), "bf16", model)
    assert filled["train_micro_batch_size_per_gpu"] == 3 and filled["gradient_accumulation_steps"] == 4
    assert filled["train_batch_size"] == 24 and filled["gradient_clipping"] == 0.5
    assert filled["bf16"] == {"enabled": True} and filled["zero_optimization"]["reduce_bucket_size"] == 1024
    assert "optimizer" not in filled and "scheduler" not in filled  # the arguments make them


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"train_micro_batch_size_per_gpu": 5}, "per_device_train_batch_size is 3"),
        ({"gradient_clipping": 1.0}, "max_grad_norm is 0.5"),
        ({"bf16": {"enabled": True}}, "bf16 is False"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}, "learning_rate is 5e-05"),
        ({"optimizer": {"type": "Lamb", "params": {}}}, "name an optimizer in optim"),
        ({"scheduler": {"type": "OneCycle", "params": {"cycle_max_lr": 1}}}, "set lr_scheduler_type"),
        ({"activation_checkpointing": {"number_checkpoints": "auto"}},
        "activation_checkpointing.number_checkpoints is 'auto'"),
    ],
)  # fmt: skip
def test_what_contradicts_the_arguments_is_refused(changes, said):
    with pytest.raises(ConfigError, match="deepspeed") as caught:
        deepspeed.fill(deepspeed.read(AUTO | changes), arguments(), "no")
    assert said in str(caught.value)


def test_a_file_is_read_and_a_wrong_one_is_named_at_construction(tmp_path):
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(zero(2)))
    assert arguments(deepspeed=str(path)).deepspeed == str(path)
    path.write_text("{")
    with pytest.raises(ConfigError, match="zero.json"):
        arguments(deepspeed=str(path))


def test_what_accelerate_launch_says_is_understood(monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "3")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "cpu")
    assert deepspeed.is_asked_for(None)
    config = deepspeed.fill(deepspeed.read(None), arguments(), "no")
    assert config["zero_optimization"] == {"stage": 3, "offload_optimizer": {"device": "cpu"}}


# ---- the engine ----

#: AdamW moves a weight by the sign of its gradient where epsilon is tiny, and a sum's order decides that of a zero.
ADAMW = {"optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
#: One for each need: weights, adapters, a reference, generation, a reference that follows.
TRAINERS = ["sft", "sft-lora", "dpo", "grpo", "grpo-sync"]


@pytest.fixture(scope="session")
def engine():
    pytest.importorskip(
        "deepspeed", reason="deepspeed is not installed: it comes as source alone, and `make test-deepspeed` builds it"
    )


@pytest.fixture(scope="session")
def runs(shared, engine):
    def make(folder):
        usual = USUAL | {"logging_steps": 1}
        jobs.do(1, [["straight", "train", usual | {"out": str(folder / "straight")}]], folder)
        configs = {f"zero{n}": zero(n) for n in (1, 2, 3)}
        configs |= {"offload2": zero(2, **OFFLOADED), "offload3": zero(3, **OFFLOADED, offload_param={"device": "cpu"})}
        work = [
            [label, "train", usual | {"out": str(folder / label), "deepspeed": config}]
            for label, config in configs.items()
        ]
        for n in (2, 3):
            cut = {"out": str(folder / f"cut{n}"), "cut": 3, "evaluate": False, "deepspeed": zero(n)}
            on = {"out": str(folder / f"on{n}"), "resume": str(folder / f"cut{n}"), "deepspeed": zero(n)}
            on |= {"max_shard_size": "30KB"}  # files that the processes write between them, where weights are sharded
            work += [[f"cut{n}", "train", usual | cut], [f"on{n}", "train", usual | on]]
            own = {"out": str(folder / f"adam{n}"), "deepspeed": zero(n, **OFFLOADED)}
            work += [[f"adam{n}", "with_cpu_adam", usual | own]]
        work += [["generation", "generation", {"out": str(folder / "generation"), "deepspeed": zero(3)}]]
        jobs.do(2, work, folder, DS_ACCELERATOR="cpu")

    return jobs.once(shared, "deepspeed", make)


@pytest.mark.parametrize("label", ["zero1", "zero2", "zero3", "on2", "on3", "offload2", "offload3", "adam2", "adam3"])
def test_two_processes_under_deepspeed_do_what_one_does(label, runs):
    found, expected = jobs.result(runs, label), jobs.result(runs, "straight")
    assert found["step"] == expected["step"]
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=2e-6, msg=key)
    for key in ("loss", "grad_norm"):
        values = [[record[key] for record in run["log"] if key in record] for run in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-4)
    assert found["eval"]["eval_loss"] == pytest.approx(expected["eval"]["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("label", ["zero2", "zero3", "on3", "offload3"])
def test_the_saved_model_is_whole(label, runs):
    from transformers import AutoModelForCausalLM

    assert (runs / label / "final" / "model.safetensors.index.json").exists() == (label == "on3")
    model = AutoModelForCausalLM.from_pretrained(runs / label / "final")
    for key, value in jobs.result(runs, label)["weights"].items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0, msg=key)


def test_the_record_counts_divided_weights_whole(runs):
    records = [json.loads((runs / label / "run.json").read_text()) for label in ("straight", "zero3")]
    whole, divided = (record["starts"][0]["model"] for record in records)
    assert divided == whole and divided["trained"] > 0


def test_a_divided_model_generates_and_gathered_no_process_waits_for_another(runs):
    found = jobs.result(runs, "generation")
    assert found["pieces"].shape[1] == found["length"] and torch.equal(found["pieces"], found["gathered"])
    assert (64, 32) in found["shapes"]  # the whole of an MLP's weight
    assert found["told"].startswith("A trainer with deepspeed trains once")


@pytest.fixture(scope="session")
def trainers(shared, engine):
    def make(folder):
        def work(below, **changes):
            return [[n, "train", ADAMW | {"name": n, "out": str(below / n)} | changes] for n in TRAINERS]

        (folder / "alone").mkdir()
        jobs.do(1, work(folder / "alone"), folder / "alone")
        jobs.do(2, work(folder, deepspeed=zero(3)), folder, DS_ACCELERATOR="cpu")

    return jobs.once(shared, "deepspeed-trainers", make)


@pytest.mark.parametrize("name", TRAINERS)
def test_two_processes_with_divided_weights_train_as_one(name, trainers):
    assert_equal_runs(jobs.result(trainers, name), jobs.result(trainers / "alone", name))


SCRIPT = """
import torch
from transformers import HfArgumentParser
from posttrain.core import TrainingArguments
from tests.contract.trainers import causal_lm

torch.set_num_threads(1)
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
options = {"deepspeed": args.deepspeed, "gradient_accumulation_steps": args.gradient_accumulation_steps}
trainer = causal_lm()(args.output_dir, per_device_train_batch_size=args.per_device_train_batch_size, **options)
trainer.train()
trainer.save_model(args.output_dir)
if trainer.is_world_process_zero():
    print("STEPS", trainer.state.global_step, "PROCESSES", trainer.dist.world_size, flush=True)
"""


def test_the_launcher_of_deepspeed_starts_what_one_process_does(engine, tmp_path):
    from transformers import AutoModelForCausalLM

    script, config = tmp_path / "train.py", tmp_path / "zero3.json"
    script.write_text(SCRIPT)
    config.write_text(json.dumps(zero(3)))
    launcher = [str(Path(sys.executable).with_name("deepspeed")), "--num_gpus", "2", "--master_port", str(free_port())]
    asked = [str(script), "--use_cpu", "--per_device_train_batch_size"]
    commands = {
        "alone": [sys.executable, *asked, "8"],
        "two": [*launcher, *asked, "2", "--gradient_accumulation_steps", "2", "--deepspeed", str(config)],
    }
    for label, command in commands.items():
        command += ["--output_dir", str(tmp_path / label)]
        env = jobs.environment(DS_ACCELERATOR="cpu")
        done = subprocess.run(command, cwd=jobs.ROOT, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr[-5000:]
        assert f"STEPS 6 PROCESSES {1 if label == 'alone' else 2}" in done.stdout
    found, expected = (AutoModelForCausalLM.from_pretrained(tmp_path / label).state_dict() for label in commands)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)
