"""``posttrain dpo`` trains for real: from files on the disk to a model on the disk."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from posttrain.cli import main
from posttrain.core import registry
from posttrain.lm.generate.trajectories import read
from tests import programs, tiny
from tests.contract.trainers import preference_rows


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    """A YAML file that trains on twelve pairs and evaluates on four."""
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    rows = preference_rows(16)
    for name, part in (("train.jsonl", rows[:12]), ("eval.jsonl", rows[12:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in part))
    (tmp_path / "run.yaml").write_text(
        "model_name_or_path: model\ndataset_name: train.jsonl\neval_dataset_name: eval.jsonl\noutput_dir: out\n"
        "max_steps: 4\nper_device_train_batch_size: 4\nlearning_rate: 1e-2\nlogging_steps: 1\neval_strategy: steps\n"
        "eval_steps: 2\nsave_steps: 2\nuse_cpu: yes\nreport_to: none\ndisable_tqdm: true\n"
    )
    return tmp_path / "run.yaml"


def test_dpo_leaves_a_model_that_prefers_what_was_chosen(run_file, tmp_path):
    from transformers import AutoModelForCausalLM

    assert main(["dpo", "run.yaml", "--beta", "0.3", "--loss_type", "sigmoid", "sft"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    margins = [record["rewards/margins"] for record in history if "rewards/margins" in record]
    assert margins[0] == 0 and margins[-1] > 0
    assert json.loads((tmp_path / "out" / "training_args.json").read_text())["loss_type"] == ["sigmoid", "sft"]


def test_every_method_shows_what_it_is_trained_on(run_file, tmp_path, capsys):
    words = ["run.yaml", "--max_steps", "1", "--eval_strategy", "no", "--rows", "2"]
    more = {"kto": 1, "distillation": 0, "grpo": 0, "rloo": 0}  # completions of a row; 0: prompts
    for name, method in registry.methods().items():
        if not method.config.startswith("posttrain.rl."):
            continue
        needed = [f"--{need.split('|')[0]}" for need in method.needs[2:]]
        needed = [word for flag in needed for word in (flag, "model" if "teacher" in flag else "accuracy_reward")]
        flags = [] if more.get(name, 2) else ["--num_generations", "2"] * (name != "distillation")
        assert main(["preview", name, *words, *needed, *flags]) == 0, name
        out = capsys.readouterr().out
        sides = {2: ["chosen: ", "rejected: "], 1: ["completion, good: "], 0: ["prompt 1: "]}[more.get(name, 2)]
        assert all(side in out for side in sides) and out.count(
            "\N{MATHEMATICAL LEFT WHITE SQUARE BRACKET}"
        ) >= 2 * bool(more.get(name, 2)), name
    first = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    assert main(["preview", "dpo", *words]) == 0
    out = capsys.readouterr().out
    assert "12 rows read, 12 kept" in out and first["chosen"].strip() in out


def test_dpo_goes_on_from_its_newest_checkpoint_with_an_adapter(run_file, tmp_path):
    lora = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]
    assert main(["dpo", "run.yaml", "--max_steps", "2", "--lr_scheduler_type", "constant", *lora]) == 0
    assert main(["dpo", "run.yaml", "--resume_from_checkpoint", "true", "--lr_scheduler_type", "constant", *lora]) == 0
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [record["step"] for record in history if "loss" in record] == [1, 2, 3, 4]
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_dpo_trains_on_datasets_that_a_file_for_trl_lists(run_file, tmp_path):
    """Two files of pairs one behind another, of which a quarter is held out: (12 + 4) * 3 / 4 rows are one epoch."""
    text = run_file.read_text().replace("dataset_name: train.jsonl\neval_dataset_name: eval.jsonl\n", "")
    listed = "datasets:\n- path: json\n  data_files: train.jsonl\n- path: eval.jsonl\ntest_split_size: 0.25\n"
    run_file.write_text(text.replace("max_steps: 4\n", "num_train_epochs: 1\n") + listed)
    assert main(["dpo", "--config", "run.yaml"]) == 0
    history = json.loads((tmp_path / "out" / "checkpoint-3" / "trainer_state.json").read_text())["log_history"]
    assert [record["step"] for record in history if "loss" in record] == [1, 2, 3]
    assert [record["step"] for record in history if "eval_loss" in record] == [2, 3]


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_reward_model_is_named_beside_functions(method, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm().save_pretrained("model")
    tiny.classifier(num_labels=1).save_pretrained("judge")
    for folder in ("model", "judge"):
        tiny.tokenizer().save_pretrained(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat", "solution": "4"}\n' * 4)
    words = "--model_name_or_path model --dataset_name prompts.jsonl --reward_model_name_or_path judge --max_steps 1"
    more = "--num_generations 2 --per_device_train_batch_size 4 --max_completion_length 4 --logging_steps 1 --use_cpu"
    end = "--reward_funcs accuracy_reward --output_dir out --report_to none --disable_tqdm".split()
    assert main([method, *words.split(), *more.split(), *end]) == 0
    (record, *_) = [json.loads(line) for line in (tmp_path / "out" / "log.jsonl").read_text().splitlines()]
    found = {name for name in record if name.startswith("rewards/") and name.endswith("/mean")}
    assert len(found) == 2 and "rewards/accuracy_reward/mean" in found


def test_a_stored_trajectory_of_a_distillation_goes_through_the_loss_again(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm(initializer_range=0.1).save_pretrained("model")
    tiny.causal_lm(initializer_range=0.1, seed=1).save_pretrained("teacher")
    for folder in ("model", "teacher"):
        tiny.tokenizer().save_pretrained(folder)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n' * 8)
    words = "--model_name_or_path model --dataset_name prompts.jsonl --teacher_model_name_or_path teacher --max_steps 1"
    end = "--max_completion_length 5 --log_trajectories 1 --use_cpu --output_dir out --report_to none --disable_tqdm"
    assert main(["distillation", *words.split(), *end.split()]) == 0
    capsys.readouterr()
    assert main(["rerun", "out", "--trajectory", "0/0"]) == 0
    assert float(capsys.readouterr().out.split()[-1]) > 0


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_a_stored_trajectory_goes_through_the_loss_again(method, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm(initializer_range=0.1).save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n' * 4)
    words = "--model_name_or_path model --dataset_name prompts.jsonl --reward_funcs tests.contract.trainers:digit_sum"
    more = "--num_generations 2 --per_device_train_batch_size 4 --max_completion_length 5 --max_steps 2 --use_cpu"
    end = "--log_trajectories 2 --learning_rate 0.1 --output_dir out --report_to none --disable_tqdm"
    assert main([method, *words.split(), *more.split(), *end.split()]) == 0
    capsys.readouterr()
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    one, later = (next(t for t in read("out") if t["step"] == step) for step in (1, 2))
    assert one["advantage"] != 0
    for words, ratios_are_one in (([], True), (["--model_name_or_path", "out"], False)):
        assert main(["rerun", "out", "--trajectory", f"{one['rollout']}/{one['sample']}", *words]) == 0
        *lines, last = capsys.readouterr().out.splitlines()
        lines = [line.split(maxsplit=6) for line in lines[lines.index(next(x for x in lines if "log-prob" in x)) + 1 :]]
        (sequence,) = one["sequences"]
        assert [int(line[1]) for line in lines] == sequence["ids"] and {line[2] for line in lines} == {"1"}
        assert [float(line[4]) for line in lines] == pytest.approx(sequence["logps"], abs=1e-4)
        ratios = [float(line[5]) for line in lines]
        assert (ratios == pytest.approx([1.0] * len(ratios), abs=1e-3)) == ratios_are_one
        if ratios_are_one:  # with a ratio of 1 the loss is the advantage
            assert float(last.split()[-1]) == pytest.approx(-one["advantage"], rel=1e-3)
    assert main(["rerun", "out", "--trajectory", "9/9"]) == 2
    assert "9/9 is none of the" in capsys.readouterr().err
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert later["step"] == 2 and not (tmp_path / "out-rerun").exists()


SCRIPT = """
from posttrain.rl import GRPOConfig, GRPOTrainer
from tests import tiny

async def agent(episode, row):
    said = [{"role": "user", "content": row["question"]}]
    answer = await episode.generate(said, max_tokens=4)
    await episode.generate([{"role": "user", "content": "another"}], max_tokens=3)
    return float(len(answer["content"]))

args = GRPOConfig("out", max_steps=1, num_generations=2, per_device_train_batch_size=2, max_completion_length=9,
                  use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no", log_trajectories=1)
tokenizer, rows = tiny.tokenizer(chat_template=tiny.CHATML), [{"question": "the cat"}] * 2
run = GRPOTrainer(tiny.causal_lm(initializer_range=0.1), args=args, train_dataset=rows, agent=agent,
                  processing_class=tokenizer)
run.train()
run.save_model()
"""


def test_a_trajectory_of_an_agent_goes_through_the_loss_of_the_script_that_trained_it(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    (tmp_path / "train.py").write_text(SCRIPT)
    programs.run(["train.py"], cwd=tmp_path, check=True)
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    (one,) = read("out")
    capfd.readouterr()
    assert main(["rerun", "out", "--trajectory", "0/0"]) == 0
    *lines, last = capfd.readouterr().out.splitlines()
    lines = [line.split(maxsplit=6) for line in lines[lines.index(next(x for x in lines if "log-prob" in x)) + 1 :]]
    assert [[int(line[1]) for line in lines if line[0] == str(n)] for n in (0, 1)] == [
        s["ids"] for s in one["sequences"]
    ]
    assert float(last.split()[-1]) == pytest.approx(-one["advantage"], rel=1e-3)  # the policy is that of then
    assert files == {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    assert main(["rerun", "out", "--trajectory", "0/0", "--beta", "1"]) == 2
    assert "started by another program" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--reward_funcs", "nowhere:reward"], "reward_funcs: 'nowhere:reward' cannot be imported"),
        (["--reward_funcs", "unfinished_rewards:reward"], "cannot be imported: '(' was never closed"),
        (["--reward_funcs", "accuracy_reward", "--save_steps", "1", "--output_dir", "/proc/out"], "/proc/out"),
    ],
    ids=["reward", "unfinished reward", "folder"],
)
def test_a_single_problem_that_is_found_before_the_run_is_a_sentence(words, part, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "What is", "solution": "4"}\n' * 8)
    (tmp_path / "unfinished_rewards.py").write_text("def reward(\n")
    usual = "--model_name_or_path model --dataset_name train.jsonl --use_cpu --report_to none --max_steps 1"
    assert main(["grpo", *usual.split(), "--output_dir", "out", *words]) == 2
    said = capsys.readouterr().err
    assert "posttrain grpo: " in said and part in said and "Traceback" not in said
