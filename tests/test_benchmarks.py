"""Benchmarks that wait for a GPU, or for a free hour, still run: at their smallest, on the CPU."""

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("gpu")


def columns(text):
    """Of the rows of a Markdown table, below its header."""
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return rows[1:]


def test_the_figures_of_a_gpu_are_written_at_their_smallest(gpu, tmp_path, monkeypatch, capsys):
    one, other = (task for task in gpu.TASKS if task.kind == "sft" and task.packed)  # the other is of another part
    changed = gpu.replace(one, contestants=("posttrain", "trl", "posttrain+compile"))
    monkeypatch.setattr(gpu, "TASKS", (changed, other))
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)  # no other library is there
    assert gpu.main(["--smallest", "--part", "sft", "--folder", str(tmp_path)]) == 0
    record = json.loads((tmp_path / "gpu.json").read_text())
    written = record["machine"]["versions"]["torch"]  # with or without the build, as a package's metadata has it
    assert written.partition("+")[0] == torch.__version__.partition("+")[0]
    ours, trl, compiled = record["runs"]
    assert ours["contestant"] == "posttrain" and ours["unit"] == "tokens" and ours["loss"] < 8
    assert ours["per_second"] * ours["seconds_per_step"] == pytest.approx(changed.batch * 48)
    assert trl["left_out"] == "trl is not installed" and "CPU" in compiled["left_out"]
    [row] = columns((tmp_path / "gpu.md").read_text())
    assert row[:2] == [changed.name, "posttrain"] and row[2].endswith("tokens") and row[3] == row[4] == "-"
    assert len(row) == 9 and row[6] == row[8] == "-"
    assert f"- left out: {changed.name}, trl: trl is not installed" in (tmp_path / "gpu.md").read_text()
    assert "57.8% MFU" in capsys.readouterr().out


def test_the_page_has_what_is_expected_beside_what_was_measured(gpu):
    task = gpu.TASKS[0].name
    run = {"task": task, "contestant": "posttrain", "per_second": 1000.0, "unit": "tokens", "seconds_per_step": 0.4}
    machine = {"device": "NVIDIA H200", "versions": {}, "python": "3.12", "product_flops": 8e14}
    machine["copied_bytes_per_second"] = 4e12
    runs = [run | {"flops": 2e14, "peak_gib": 44.3}]
    [row] = columns(gpu.table({"date": "", "machine": machine, "tests": {}, "runs": runs}))
    assert row[3:] == ["20.2%", "25.0%", "0.400", "0.100", "44.3", "43.8"]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(7))
def test_what_is_expected_is_what_a_plan_counts(number, gpu, tmp_path):
    from posttrain.cli.tools import memory_mesh, memory_plan
    from posttrain.core import registry
    from posttrain.lm.loading.arguments import ModelConfig

    task = gpu.TASKS[number]
    method, length = registry.method(task.kind), task.length + task.completion
    gpu.config_of(task).save_pretrained(tmp_path)
    given = gpu.arguments_of(task, str(tmp_path), [], 3) | {"bf16": True, "use_cpu": True}
    given |= (
        {"max_completion_length": task.completion, "num_generations": task.group}
        if task.group > 1
        else {"max_length": length}
    )
    given |= {"packing": True} if task.packed else {}
    lora = {"use_peft": True, "lora_r": 16, "lora_dropout": 0.0, "lora_target_modules": ["all-linear"]}
    model = ModelConfig(model_name_or_path=str(tmp_path), dtype=task.dtype, **(lora if task.lora else {}))
    with memory_mesh.imagined(1):
        run = registry.Run(method.config_class(**given), model, None)
        work = method.workload(run, None)
        if task.kind == "dpo":  # what posttrain plan takes as --prompt_length
            work = dataclasses.replace(work, prompt=task.length)
        found = memory_plan.measure(run, work)
    assert found.peak / 2**30 == pytest.approx(gpu.PLANNED[task.name], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("part", ["sft", "large", "preference", "online"])
def test_every_task_of_a_gpu_runs_at_its_smallest(part, gpu, tmp_path):
    assert gpu.main(["--smallest", "--part", part, "--folder", str(tmp_path)]) == 0
    runs = json.loads((tmp_path / "gpu.json").read_text())["runs"]
    assert {row["task"] for row in runs} == {task.name for task in gpu.TASKS if task.part == part}
    for row in runs:
        if row["contestant"] == "posttrain" or "left_out" not in row:
            assert row["per_second"] > 0, row


def test_without_a_gpu_the_others_say_so_and_measure_nothing(gpu, tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    assert gpu.main(["--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "No CUDA device is visible, and this needs one: Torch not compiled with CUDA" in said or torch.version.cuda
    assert "docs/gpu.md" in said and not (tmp_path / "gpu.json").exists()


def test_a_part_of_tests_says_which_failed_and_which_were_left_out(gpu, tmp_path, monkeypatch):
    left_out = "@pytest.mark.skip(reason='no flash')\ndef test_c(): pass\n"
    (tmp_path / "test_it.py").write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n" + left_out, encoding="utf-8"
    )
    monkeypatch.setitem(gpu.TESTS, "kernels", [str(tmp_path / "test_it.py")])
    found = gpu.tests_of("kernels", gpu.time.monotonic() + 60, tmp_path / "log", [])
    assert (found["passed"], found["failed"], found["finished"]) == (1, ["test_b"], True)
    assert list(found["skipped"].values()) == [1] and "no flash" in next(iter(found["skipped"]))


def test_what_needs_a_package_that_is_missing_is_left_out(gpu, monkeypatch):
    def left_out(absent):
        monkeypatch.setattr(gpu, "find_spec", lambda name: None if name == absent else name)
        return {gpu.missing("posttrain", task, False) for task in gpu.TASKS} - {None}

    assert left_out("datasets") == {"datasets is not installed"} and left_out("peft") == {"peft is not installed"}
    assert left_out("trl") == set()
    assert gpu.missing("trl", gpu.TASKS[0], False) == "trl is not installed"


def test_a_run_that_fails_is_a_row_with_its_last_line(gpu, tmp_path):
    found = gpu.asked(["run", "posttrain", '{"absent": 1}', "[1, 1]"], 60, tmp_path / "log")
    assert "unexpected keyword argument 'absent'" in found["left_out"] and gpu.is_failure(found)
    assert "Traceback" in (tmp_path / "log").read_text()


def test_parts_that_run_apart_are_one_record_on_one_machine_alone(gpu, tmp_path):
    machine = {"device": "one", "versions": {"torch": "2"}, "python": "3"}
    record = gpu.open_record(tmp_path / "gpu.json", machine)
    record["runs"].append({"part": "sft", "task": "a", "contestant": "trl", "left_out": "trl is not installed"})
    gpu.save(record, tmp_path)
    assert gpu.open_record(tmp_path / "gpu.json", machine)["runs"] == record["runs"]
    assert gpu.open_record(tmp_path / "gpu.json", machine | {"device": "another"})["runs"] == []
    assert not gpu.is_failure(record["runs"][0])


def test_the_operations_of_a_token_are_those_that_torch_counts(gpu):
    task = gpu.replace(gpu.smallest(gpu.TASKS[0]), batch=2)
    model = gpu.model_of(task)
    model.set_attn_implementation("eager")  # of which torch counts the products
    ids = torch.arange(2 * 48).view(2, 48) + 2
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = {str(name): count for name, count in counter.get_flop_counts()["Global"].items()}
    products = sum(count for name, count in counts.items() if name in ("aten.mm", "aten.addmm"))
    shape = gpu.SHAPES["tiny"]
    assert products == 2 * 48 * gpu.flops_of_token(shape, 0, lora=False)
    attention = 2 * 48 * (gpu.flops_of_token(shape, 48, False) - gpu.flops_of_token(shape, 0, False))
    assert counts["aten.bmm"] == pytest.approx(attention, rel=1e-3)  # and the angles of the rotary embedding
    sizes = gpu.SHAPES["0.6B"].weights, gpu.SHAPES["8B"].weights
    assert sizes == (pytest.approx(0.596e9, rel=0.01), pytest.approx(7.57e9, rel=0.01))  # embeddings are no products
    assert gpu.tokens_seen([4]) == 2.5 and sum(gpu.documents_of(4096)) == 4096


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    return importlib.import_module("counts")


def test_the_counts_of_a_step_are_made_for_a_tiny_model(counts, monkeypatch):
    monkeypatch.setattr(counts, "VOCABULARY", 600)
    found = counts.measure("posttrain", "dpo-40", 16)
    assert (found["waits"], found["breaks"]) == (0, 0)
    # Of 4 pairs: the policy's forward and backward and the reference's forward, over each prompt once.
    tokens, weights = 4 * (53 + 2 * 40), 4 * (16 * 16 * 2 * (4 + 2) + 3 * 16 * 48)
    head = 10 * 4 * 2 * 40 * 600 * 16  # completions alone, and the policy's logits twice
    attention = 9 * 4 * 4 * 16 * 8 * (53 * 54 // 2 + 2 * 40 * 53 + 40 * 41)
    assert found["flops"] == pytest.approx(8 * tokens * weights + head + attention, rel=0.1)
    assert found["operations"] < 1450
    [row] = columns(counts.table({"dpo-40": {"posttrain": found, "trl": found}}))
    assert row[0] == counts.TASKS["dpo-40"] and row[4:] == ["0 / 0", "0 / 0"]


def test_the_counts_of_the_page_are_those_on_record(counts):
    recorded = json.loads((FOLDER / "results" / "counts.json").read_text())
    assert counts.table(recorded["tasks"]) in (FOLDER.parent / "docs" / "speed.md").read_text()
    assert list(recorded["tasks"]) == list(counts.TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft-packed", "dpo-77", "grpo-256", "seq2seq"])
def test_the_counts_on_record_are_those_of_a_run(task, counts):
    recorded = json.loads((FOLDER / "results" / "counts.json").read_text())
    command = [sys.executable, counts.__file__, "--one", "posttrain", task, "--size", str(recorded["size"])]
    found = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    expected = recorded["tasks"][task]["posttrain"]
    assert json.loads(found.stdout.split("RESULT")[1]) == pytest.approx(expected, rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["sft-packed", "dpo-77"])
def test_a_step_takes_less_of_everything_than_one_of_trl(task, counts):
    ratio = counts.compare(task, 16)["ratio"]
    assert ratio["flops"] < 0.6 and ratio["operations"] < 0.8 and ratio["bytes"] < 0.3 and ratio["waits"] == 0


def test_the_gap_between_engine_and_trainer_is_rounding(monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    numerics = importlib.import_module("numerics")
    words = ["--architectures", "qwen3", "--prompts", "2", "--new", "8", "--output", ""]
    runs = numerics.main(words)
    gaps = {(run["adapter"], run["precision"]): run["mean"] for run in runs}
    assert len(runs) == 6 and all(run["tokens"] > 8 and run["logp"] < -1 for run in runs)
    for adapter in numerics.ADAPTERS:
        assert gaps[adapter, "float32"] < 1e-5 < gaps[adapter, "bfloat16"] < 0.1
        assert 1e-5 < gaps[adapter, "autocast"] < 0.1
    rows = columns(capsys.readouterr().out)
    assert [row[:2] for row in rows] == [["qwen3", "none"], ["qwen3", "lora"]] and "-" not in rows[0][2:]
