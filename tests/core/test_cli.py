"""The command line: values mean the same in YAML and in flags; every problem is said before anything is loaded."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from posttrain.cli import help, main, parse
from posttrain.cli.source import DataSource, read
from posttrain.core import registry
from posttrain.core.arguments import TrainingArguments
from posttrain.core.config import opt
from posttrain.core.errors import ConfigError, DataError
from posttrain.core.hub import uploads
from tests import tiny

ROWS = [{"text": f"row {index}"} for index in range(10)]


@dataclass
class TeachConfig(TrainingArguments):
    """How rows become lessons."""

    max_length: int | None = opt(1024, "Longest row, in tokens.", min=1, aliases=("max_seq_length",))
    weights: list[float] | None = opt(None, "Weight of each lesson.")
    templates: list[str] | None = opt(None, "Names of templates.")
    options: dict | str | None = opt(None, "Anything else.")
    learning_rate: float = opt(2e-5, "Peak learning rate.", min=0)


@dataclass
class Recorder:
    """A method that writes down what it was asked to do."""

    runs: list[registry.Run] = field(default_factory=list)

    def __call__(self, run: registry.Run) -> None:
        if run.data.dataset_name == "raise":
            raise DataError("row 3 is empty")
        self.runs.append(run)


@pytest.fixture
def recorder(monkeypatch, tmp_path):
    module = types.ModuleType("teaching")
    module.TeachConfig = TeachConfig
    monkeypatch.setitem(sys.modules, "teaching", module)
    record = Recorder()
    method = registry.Method("teach", "Teach a model.", "teaching:TeachConfig", record)
    monkeypatch.setattr(registry, "methods", lambda: {"teach": method})
    monkeypatch.setattr(help, "methods", lambda: {"teach": method})
    monkeypatch.chdir(tmp_path)
    return record


def teach(recorder, *words: str, yaml: str | None = None) -> registry.Run:
    """The run that the command line `words`, after the file `yaml`, asks for."""
    if yaml is not None:
        Path("run.yaml").write_text(yaml)
        words = ("run.yaml", *words)
    assert main(["teach", *words, "--model_name_or_path", "m", "--dataset_name", "hub/d"]) == 0
    return recorder.runs[-1]


def refused(capsys, *words: str) -> list[str]:
    assert main(list(words)) == 2
    out, err = capsys.readouterr()
    assert out == "" and "Traceback" not in err
    return err.splitlines()


# ---- values ----


@pytest.mark.parametrize(
    ("text", "name", "value"),
    [
        ("1e-5", "learning_rate", 1e-5),
        ("1", "learning_rate", 1.0),
        ("no", "eval_strategy", "no"),
        ("epoch", "save_strategy", "epoch"),
        ("yes", "full_determinism", True),
        ("true", "full_determinism", True),
        ("off", "dataloader_pin_memory", False),
        ("0", "dataloader_pin_memory", False),
        ("-1", "max_steps", -1),
        ("1e3", "max_steps", 1000),
        ("0.1", "warmup_steps", 0.1),
        ("null", "data_seed", None),
        ("none", "data_seed", None),
        ("none", "report_to", []),
        ("tensorboard", "report_to", ["tensorboard"]),
        ("007", "run_name", "007"),
        ("no", "run_name", "no"),
        ("12:30:45", "run_name", "12:30:45"),
        ("null", "run_name", None),
        ("1.5", "weights", [1.5]),
        ("007", "templates", ["007"]),
        (
            "{num_cycles: 2, min_lr: 1e-6, other: no}",
            "options",
            {"num_cycles": 2, "min_lr": 1e-6, "other": "no"},
        ),
        ('{"num_cycles": 2}', "options", {"num_cycles": 2}),
    ],
)
def test_a_value_means_the_same_in_a_file_and_in_a_flag(recorder, text, name, value):
    quoted = f"'{text}'" if text.startswith('{"') else text
    by_file = getattr(teach(recorder, yaml=f"{name}: {quoted}\n").config, name)
    by_flag = getattr(teach(recorder, f"--{name}", text).config, name)
    assert by_file == by_flag == value
    assert type(by_flag) is type(by_file)


def test_flags_come_in_every_usual_form(recorder):
    words = "--bf16 --no_dataloader_pin_memory --max-steps=-1 --templates a b --weights 1 2.5 --eval_steps 0.5".split()
    config = teach(recorder, *words).config
    assert (config.bf16, config.dataloader_pin_memory, config.max_steps) == (True, False, -1)
    assert (config.templates, config.weights, config.eval_steps) == (["a", "b"], [1.0, 2.5], 0.5)


def test_a_flag_without_a_value_is_true_for_a_switch_alone(recorder, capsys):
    words = {name: parse.Setting(f"--{name}", "true", is_bare=True) for name in ("bf16", "resume_from_checkpoint")}
    (config,) = parse.configs([TeachConfig], words, [])
    assert config.bf16 is config.resume_from_checkpoint is True  # such fields say what they mean alone
    words = "teach --model_name_or_path --dataset_name d --run_name --templates --max_steps --config".split()
    said = "\n".join(refused(capsys, *words))
    for name in ("model_name_or_path", "run_name", "templates", "max_steps", "config"):
        assert f"  - --{name} has no value; write --{name} VALUE" in said
    assert "5 problems" in said and not recorder.runs


def test_lists_and_mappings_of_a_file_are_read(recorder):
    config = teach(recorder, yaml="templates: [a, '1']\nweights:\n  - 1\n  - 1e-3\noptions:\n  a: 1e-3\n").config
    assert (config.templates, config.weights, config.options) == (["a", "1"], [1.0, 1e-3], {"a": 1e-3})


def test_an_empty_value_of_a_file_is_none(recorder):
    assert teach(recorder, yaml="max_length:\n").config.max_length is None


def test_flags_win_over_files_and_later_files_over_earlier_ones(recorder, tmp_path):
    (tmp_path / "base.yaml").write_text("seed: 1\nmax_length: 10\nlearning_rate: 0.1\n")
    (tmp_path / "more.yaml").write_text("seed: 2\nmax_length: 20\n")
    config = teach(recorder, "base.yaml", "more.yaml", "--seed", "3").config
    assert (config.seed, config.max_length, config.learning_rate) == (3, 20, 0.1)
    assert teach(recorder, "--config", "base.yaml").config.max_length == 10


def test_each_value_reaches_the_config_that_has_the_field(recorder):
    run = teach(recorder, "--use_peft", "--dataset_train_split", "all", "--seed", "5")
    assert (run.model.model_name_or_path, run.model.use_peft) == ("m", True)
    assert (run.data.dataset_name, run.data.dataset_train_split, run.config.seed) == ("hub/d", "all", 5)


def test_old_names_work_in_files_and_flags(recorder, capsys):
    run = teach(recorder, "--group_by_length", yaml="max_seq_length: 64\nwarmup_ratio: 0.1\nevaluation_strategy: no\n")
    assert (run.config.max_length, run.config.warmup_steps) == (64, 0.1)
    assert (run.config.train_sampling_strategy, run.config.eval_strategy) == ("group_by_length", "no")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 4 and "TeachConfig: max_seq_length=64 is now max_length=64" in lines


# ---- problems ----


def test_every_problem_of_every_config_is_said_at_once_with_its_place(recorder, capsys, tmp_path):
    (tmp_path / "run.yaml").write_text("learning_rate: fast\nseed: 1\nlearning_rte: 1\nseed: 2\nmax_steps: 0\n")
    first, *lines = refused(
        capsys, "teach", "run.yaml", "gone.yaml", "--num_train_epochs", "-2", "--dataset_name", "rows.jsonl",
        "--eval_share", "1.5", "--run_name", "a", "b", "--save_strategy", "bets",
    )  # fmt: skip
    assert first == "posttrain teach: 11 problems"
    text = "\n".join(lines)
    for expected in (
        "run.yaml:4: seed is already set at run.yaml:2; keep one",
        "gone.yaml: No such file or directory",
        "run.yaml:1: learning_rate='fast' must be of type float",
        "run.yaml:3: unknown argument 'learning_rte', did you mean 'learning_rate'?",
        "run.yaml:5: max_steps=0 would train nothing",
        "--num_train_epochs: num_train_epochs=-2.0 must be >= 0",
        "--dataset_name: dataset_name='rows.jsonl' does not exist",
        "--eval_share: eval_share=1.5 must be < 1",
        "--run_name: run_name=['a', 'b'] holds 2 values and takes one",
        "--save_strategy: save_strategy='bets' is not one of no, steps, epoch, best, did you mean 'best'?",
        "model_name_or_path is needed",
    ):
        assert expected in text, expected
    assert recorder.runs == []


@pytest.mark.parametrize(
    ("content", "message"),
    [("a: [1", "is not valid YAML"), ("- a\n- b\n", "must hold `name: value` lines"), ("text", "must hold")],
)
def test_a_file_that_is_no_settings_is_said_to_be_so(recorder, capsys, tmp_path, content, message):
    (tmp_path / "bad.yaml").write_text(content)
    assert message in "\n".join(
        refused(capsys, "teach", "bad.yaml", "--model_name_or_path", "m", "--dataset_name", "d")
    )


def test_an_unknown_method_suggests_the_nearest(recorder, capsys):
    (said,) = refused(capsys, "tech")
    assert said.startswith("posttrain tech: unknown method or command 'tech', did you mean 'teach'? (methods: teach; ")
    (said,) = refused(capsys, "generat")
    assert "did you mean 'generate'?" in said and "commands: train, new, launch, " in said
    (said,) = refused(capsys, "plan", "tech")
    assert said == "posttrain plan: unknown method 'tech', did you mean 'teach'? (methods: teach)"
    assert refused(capsys, "--seed", "1") == ["posttrain --seed: the method comes first, before --seed"]


def test_data_that_cannot_be_used_ends_without_a_traceback(recorder, capsys):
    assert main(["teach", "--model_name_or_path", "m", "--dataset_name", "raise"]) == 1
    assert capsys.readouterr().err == "posttrain teach: row 3 is empty\n"


def test_a_model_that_cannot_be_found_ends_without_a_traceback(recorder, capsys, monkeypatch):
    from posttrain.lm.loading import loading

    def train(*_, **__):
        with loading.explain_missing("hub/m", "tokenizer"):
            raise OSError("We couldn't connect")

    monkeypatch.setattr("posttrain.cli.training.train", train)
    assert main(["teach", "--model_name_or_path", "hub/m", "--dataset_name", "d"]) == 1
    said = capsys.readouterr().err
    assert said.startswith("posttrain teach: 'hub/m' is not a folder here") and "We couldn't connect" in said


@pytest.mark.parametrize("command", ["chat", "serve"])
def test_a_folder_without_a_tokenizer_is_said_to_be_one(command, tmp_path, capsys):
    tiny.causal_lm().save_pretrained(tmp_path / "model")
    assert main([command, str(tmp_path / "model")]) == 1
    said = capsys.readouterr().err
    assert "holds no tokenizer" in said and "AutoTokenizer.from_pretrained('BASE').save_pretrained(" in said


def test_ctrl_c_outside_of_the_steps_of_a_run_ends_without_a_traceback(recorder, capsys, monkeypatch):
    from posttrain.core.training.preemption import Interrupted

    stops = [KeyboardInterrupt(), Interrupted(130)]

    def train(*_, **__):
        raise stops.pop(0)

    monkeypatch.setattr("posttrain.cli.training.train", train)
    words = ["teach", "--model_name_or_path", "m", "--dataset_name", "d"]
    assert main(words) == 130
    assert capsys.readouterr().err == "\nposttrain teach: interrupted.\n"
    with pytest.raises(SystemExit) as ended:  # the checkpoint is written, and the run has said where
        main(words)
    assert ended.value.code == 130


def test_only_the_first_process_says_what_is_wrong(recorder, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["tech"]) == 2
    assert capsys.readouterr().err == ""


# ---- help ----


def test_help_lists_methods_and_commands(recorder, capsys):
    for words in ([], ["--help"], ["help"]):
        assert main(words) == 0
        text = capsys.readouterr().out
        assert re.search(r"^  teach +Teach a model\.$", text, re.M) and re.search(r"^  env +", text, re.M)


def test_help_of_a_method_shows_every_argument_with_its_default_by_group(recorder, capsys):
    assert main(["teach", "--help"]) == 0
    text = capsys.readouterr().out
    assert "How rows become lessons (TeachConfig)" in text and "(RunArguments)" in text and "(DataSource)" in text
    assert "--max_length INT\n        Longest row, in tokens. [>= 1; default 1024]" in text
    assert "--learning_rate FLOAT\n        Peak learning rate. [>= 0; default 2e-05]" in text
    names = [known.name for config in (TeachConfig, DataSource) for known in dataclasses.fields(config)]
    assert [name for name in names if f"  --{name} " not in text] == []
    assert text.count("--learning_rate ") == 1


def test_help_starts_without_torch():
    code = (
        "import sys; from posttrain.cli import main; status = main(['--help']); "
        "print(status, sorted(set(sys.modules) & {'torch', 'numpy', 'transformers', 'datasets', 'peft'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "0 []"
    assert "sft" in done.stdout


def test_env_names_versions_and_hardware(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    for name in ("python", "posttrain-core", "torch", "cpu", "memory"):
        assert f"\n{name} " in text or text.startswith(f"{name} ")


# ---- check ----


def test_check_writes_what_it_read_as_one_file_that_reads_the_same(recorder, capsys):
    Path("model.yaml").write_text("model_name_or_path: m\nhub_token: hf_abcdefgh\nrun_name: '007 # x'\n")
    Path("data.toml").write_text("""dataset_name = ["hub/d"]
bf16 = false
weights = [1, 2.5]
run_name = "a: b"
[options]
num_cycles = 2
""")
    words = ["check", "teach", "model.yaml", "data.toml", "--learning_rate", "1e-5", "--no_dataloader_pin_memory"]
    assert main(words) == 0 and not recorder.runs
    out, err = capsys.readouterr()
    assert "learning_rate: 1e-5\n" in out and "hf_abc" not in out + err and "hub_token" in err
    teach(recorder, *words[2:])
    before = recorder.runs[-1]
    before.config.hub_token = None
    assert before == teach(recorder, yaml=out)
    assert (before.config.options, before.config.weights, before.config.bf16) == ({"num_cycles": 2}, [1.0, 2.5], False)


def test_check_finds_what_training_would(recorder, capsys):
    Path("run.toml").write_text('model_name_or_path = "m"\ndataset_name = "hub/d"\n\nlearning_rat = 1\n')
    assert "run.toml:4: unknown argument 'learning_rat'" in refused(capsys, "check", "teach", "run.toml")[0]
    Path("run.toml").write_text("x = = 1")
    assert "run.toml is not valid TOML: Invalid value" in refused(capsys, "check", "teach", "run.toml")[0]
    assert "name the method first" in refused(capsys, "check", "--bf16")[0]


# ---- what a run leaves ----


def test_a_failed_upload_shows_in_the_exit_status(recorder, monkeypatch):
    uploader = uploads.Uploader(TeachConfig("out"), "out", retry_waits=())
    monkeypatch.setattr(uploader, "_send", lambda upload: 1 / 0)
    run = Recorder.__call__

    def upload(self, asked):
        run(self, asked)
        uploader.push("out", blocking=True)

    monkeypatch.setattr(Recorder, "__call__", upload)
    words = ["teach", "--model_name_or_path", "m", "--dataset_name", "hub/d"]
    assert main(words) == 3
    monkeypatch.setattr(uploader, "_send", lambda upload: "https://address")
    assert main(words) == 0


@pytest.mark.long
def test_a_reader_that_has_gone_ends_a_command_quietly():
    command = [sys.executable, "-c", "import sys; from posttrain.cli import main; sys.exit(main(['grpo', '-h']))"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        program.stdout.close()
        assert program.stderr.read() == ""
    assert program.returncode == 141


# ---- smoke ----


def test_a_smoke_run_is_short_and_keeps_nothing(recorder, capsys, tmp_path):
    run = teach(recorder, "--smoke", "--eval_strategy", "epoch", "--output_dir", "real", "--load_best_model_at_end",
                "--save_strategy", "epoch", "--max_steps", "500")  # fmt: skip
    config, resumed = recorder.runs[-2].config, run.config
    assert (config.max_steps, config.save_steps, config.eval_steps, config.logging_steps) == (2, 2, 2, 1)
    assert config.check_saved_model and config.resume_from_checkpoint is None
    assert (resumed.max_steps, resumed.resume_from_checkpoint, resumed.output_dir) == (3, True, "real-smoke")
    assert (config.output_dir, config.eval_strategy, config.load_best_model_at_end) == ("real-smoke", "steps", True)
    assert run.data.max_rows == 32
    out = capsys.readouterr().out
    assert "for a third one.\nThe smoke run passed: data, model, training, evaluation, a checkpoint" in out
    teach(recorder, "--smoke")
    assert "The smoke run passed: data, model, training, a checkpoint" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


# ---- the dataset ----


def write_rows(folder, name: str, rows: list[dict]) -> str:
    path = folder / name
    if name.endswith(".jsonl"):
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif name.endswith(".json"):
        path.write_text(json.dumps(rows))
    elif name.endswith(".csv"):
        path.write_text("text\n" + "".join(f"{row['text']}\n" for row in rows))
    elif name.endswith(".txt"):
        path.write_text("".join(f"{row['text']}\n" for row in rows))
    else:
        import datasets

        datasets.Dataset.from_list(rows).to_parquet(str(path))
    return str(path)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json", "rows.csv", "rows.txt", "rows.parquet"])
def test_files_of_every_kind_are_read(tmp_path, name):
    train, held_out = DataSource(dataset_name=write_rows(tmp_path, name, ROWS)).load()
    assert [row["text"] for row in train] == [row["text"] for row in ROWS]
    assert held_out is None


def test_a_file_of_rows_that_is_a_pointer_of_git_lfs_is_named(tmp_path):
    (tmp_path / "rows.parquet").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(DataError, match=r"rows.parquet is a pointer of Git LFS.* Run: git lfs pull"):
        DataSource(dataset_name=str(tmp_path / "rows.parquet")).load()


def test_evaluation_rows_come_from_a_file_a_split_or_a_share(tmp_path):
    import datasets

    file = write_rows(tmp_path, "rows.jsonl", ROWS)
    other = write_rows(tmp_path, "other.jsonl", ROWS[:3])
    assert [len(part) for part in DataSource(dataset_name=file, eval_dataset_name=other).load()] == [10, 3]
    shared = DataSource(dataset_name=file, eval_share=0.2)
    assert [len(part) for part in shared.load()] == [8, 2]
    assert shared.load()[1]["text"] == shared.load()[1]["text"]
    folder = str(tmp_path / "saved")
    rows = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": rows, "test": rows.take(4)}).save_to_disk(folder)
    assert [len(part) for part in DataSource(dataset_name=folder).load()] == [10, 4]
    assert [len(part) for part in DataSource(dataset_name=folder, max_rows=2).load()] == [2, 2]


def test_several_files_are_read_one_after_the_other(tmp_path):
    files = [write_rows(tmp_path, "a.jsonl", ROWS[:3]), write_rows(tmp_path, "b.jsonl", ROWS[3:])]
    assert [row["text"] for row in DataSource(dataset_name=files).load()[0]] == [row["text"] for row in ROWS]


def test_rows_can_be_streamed(tmp_path):
    source = DataSource(dataset_name=write_rows(tmp_path, "a.jsonl", ROWS), dataset_streaming=True, max_rows=2)
    assert [row["text"] for row in source.load()[0]] == ["row 0", "row 1"]


def test_a_split_that_does_not_exist_names_those_that_do(tmp_path):
    import datasets

    datasets.DatasetDict({"all": datasets.Dataset.from_list(ROWS)}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(DataError, match="has no split 'train'; it has all. Set dataset_train_split."):
        DataSource(dataset_name=str(tmp_path / "saved")).load()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"dataset_name": "./nowhere"}, "does not exist"),
        ({"dataset_name": ["a.csv", "b.jsonl"]}, "mixes kinds of files"),
        ({"dataset_name": ["hub/a", "hub/b"]}, "mixes kinds of files"),  # the second would not be read
        ({"dataset_name": "hub/d", "eval_share": 0.1, "dataset_streaming": True}, "cannot be taken from a stream"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused(kwargs, message):
    with pytest.raises(ConfigError, match=message):
        DataSource(**kwargs)


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("broken.jsonl", '{"text": "whole"}\n{"text": "hal', "JSON parse error: .* in row 1"),
        ("empty.jsonl", "", "it has no rows"),
        ("rows.parquet", "no parquet", "Parquet"),
        ("absent.jsonl", None, "it does not exist"),  # and is not looked for on the Hub
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong_in_it(name, text, said, tmp_path):
    if text is not None:
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=f"{name} cannot be read: {said}"):
        read(str(tmp_path / name), None, streaming=False)


def test_a_file_that_no_reader_takes_is_not_looked_for_on_the_hub(tmp_path):
    (tmp_path / "rows.xlsx").write_text("")
    with pytest.raises(ConfigError, match="rows.xlsx' is no file of rows; convert it to one that ends in .json, "):
        DataSource(dataset_name=str(tmp_path / "rows.xlsx"))


def test_no_kind_of_files_of_a_folder_is_left_out(tmp_path):
    """`datasets` reads the kind of which there are most files: here the licence."""
    for name, text in (("rows.jsonl", '{"text": "row"}\n'), ("LICENSE.txt", "yours"), ("more/notes.txt", "a note")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="several kinds, and only one .* rows.jsonl, LICENSE.txt"):
        DataSource(dataset_name=str(tmp_path)).load()
    (tmp_path / "more" / "notes.txt").rename(tmp_path / "more" / "notes")
    assert DataSource(dataset_name=str(tmp_path)).load()[0]["text"] == ["row"]  # and one licence is no rows
    (tmp_path / "rows.csv").write_text("text\nother\n", encoding="utf-8")
    with pytest.raises(DataError, match="several kinds"):
        DataSource(dataset_name=str(tmp_path)).load()
    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: all\n  data_files: rows.jsonl\n---\n")
    assert DataSource(dataset_name=str(tmp_path)).load()[0]["text"] == ["row"]


@pytest.mark.parametrize(("ending", "separator"), [("csv", ","), ("tsv", "\t")])
@pytest.mark.parametrize("streaming", [False, True])
def test_cells_of_a_folder_are_texts_as_those_of_a_file(tmp_path, ending, separator, streaming):
    cells = [("007", "NA"), ("True", ""), ("null", "1")]
    lines = [separator.join(row) for row in [("prompt", "completion"), *cells]]
    (tmp_path / f"rows.{ending}").write_text("\n".join(lines), encoding="utf-8")
    for name in (tmp_path, tmp_path / f"rows.{ending}"):
        rows, _ = DataSource(dataset_name=str(name), dataset_streaming=streaming).load()
        assert [(row["prompt"], row["completion"] or "") for row in rows] == cells


def test_a_dataset_with_several_configs_names_them(tmp_path):
    configs = "".join(f"- config_name: {name}\n  data_files: {name}.jsonl\n" for name in ("main", "socratic"))
    (tmp_path / "README.md").write_text(f"---\nconfigs:\n{configs}---\n", encoding="utf-8")
    for name in ("main", "socratic"):
        write_rows(tmp_path, f"{name}.jsonl", ROWS)
    with pytest.raises(DataError, match=r"Set dataset_config to one of \['main', 'socratic'\]"):
        DataSource(dataset_name=str(tmp_path)).load()
    assert len(DataSource(dataset_name=str(tmp_path), dataset_config="main").load()[0]) == len(ROWS)


def test_a_dataset_behind_no_network_is_reported_in_a_sentence(recorder, monkeypatch):
    def offline(*args, **kwargs):
        raise ConnectionError("Couldn't reach 'hub/d' on the Hub (LocalEntryNotFoundError)")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(DataError, match="hub/d cannot be read: Couldn't reach 'hub/d' on the Hub"):
        DataSource(dataset_name="hub/d").load()


# ---- the registry ----


def test_installed_methods_are_found_and_a_broken_one_is_left_out(monkeypatch, caplog):
    class Broken:
        name, value = "broken", "nowhere:METHOD"

        def load(self):
            raise ImportError("No module named 'nowhere'")

    good = registry.Method("good", "Good.", "json:JSONDecoder", lambda run: None)
    working = types.SimpleNamespace(name="good", value="x:y", load=lambda: good)
    monkeypatch.setattr(registry, "entry_points", lambda group: [working, Broken()])
    registry.methods.cache_clear()
    try:
        assert registry.methods() == {"good": good} and registry.method("good") is good
        assert "'broken'" in caplog.text and "No module named 'nowhere'" in caplog.text
        assert good.config_class is json.JSONDecoder
    finally:
        registry.methods.cache_clear()


def test_the_classes_that_have_a_field_are_known(recorder):
    assert registry.configs_with("max_length") == ["TeachConfig"]
    assert registry.configs_with("max_lengthh") == []
    with pytest.raises(ConfigError, match="which TeachConfig has"):
        TrainingArguments(max_length=4)


def test_values_are_read_by_the_first_type_that_fits():
    assert parse.convert("1", (bool, type(None))) is True
    assert parse.convert("1", (bool, int)) == 1 and parse.convert("1", (bool, int)) is not True
    assert parse.convert("all", (str, bool)) == "all"
    assert parse.convert("[1, 2]", (dict, list)) == [1, 2]
    with pytest.raises(ValueError, match="must be of type bool"):
        parse.convert("maybe", (bool,))


def test_columns_can_be_called_otherwise(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"question": str(i), "answer": "a", "id": i}) + "\n" for i in range(3)))
    names = {"question": "prompt", "answer": "completion"}
    for streaming in (False, True):
        source = DataSource(dataset_name=str(rows), rename_columns=names, dataset_streaming=streaming)
        assert list(source.load()[0])[1] == {"prompt": "1", "completion": "a", "id": 1}
    with pytest.raises(DataError, match="no column 'text'; the columns are question, answer, id"):
        DataSource(dataset_name=str(rows), rename_columns={"text": "prompt"}).load()
    with pytest.raises(DataError, match="a column 'id' already"):
        DataSource(dataset_name=str(rows), rename_columns={"question": "id"}).load()
    with pytest.raises(ConfigError, match="rename_columns='question' is not a mapping"):
        DataSource(dataset_name=str(rows), rename_columns="question")
