"""Scripts written for trl parse their arguments as before."""

import dataclasses
import os

import pytest
from transformers import HfArgumentParser

from posttrain.cli import parse
from posttrain.cli.scripts import get_kbit_device_map, get_peft_config, get_quantization_config
from posttrain.core import ModelConfig, ScriptArguments, ScriptParser, TrainingArguments
from posttrain.core.errors import ConfigError

WORDS = [
    "--dataset_name", "imdb", "--dataset_config", "plain", "--dataset_streaming", "--output_dir", "out",
    "--learning_rate", "1e-3", "--model_name_or_path", "some/model", "--torch_dtype", "bfloat16", "--use_peft",
    "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj", "--ignore_bias_buffers",
]  # fmt: skip


def check(script, args, model):
    assert (script.dataset_name, script.dataset_config, script.dataset_streaming) == ("imdb", "plain", True)
    assert script.ignore_bias_buffers and script.dataset_train_split == "train" and script.dataset_test_split == "test"
    assert args.learning_rate == 1e-3 and model.dtype == model.torch_dtype == "bfloat16"
    lora = get_peft_config(model)
    assert (lora.r, lora.lora_alpha, set(lora.target_modules)) == (4, 32, {"q_proj", "v_proj"})


def test_hf_argument_parser_reads_the_classes_together():
    check(*HfArgumentParser((ScriptArguments, TrainingArguments, ModelConfig)).parse_args_into_dataclasses(WORDS))


def test_the_script_parser_reads_flags():
    check(*ScriptParser((ScriptArguments, TrainingArguments, ModelConfig)).parse_args_and_config(WORDS))


def test_each_class_prints_its_values_and_no_secret():
    @dataclasses.dataclass
    class Own(ModelConfig):
        a_token: str = "none"

    own = Own(lora_r=4, use_peft=True, a_token="abc")
    assert "lora_r=4, " in repr(own) and "use_peft=True" in f"{own}" and "abc" not in repr(own)
    assert "dataset_name='imdb'" in repr(ScriptArguments(dataset_name="imdb"))


def test_flags_go_before_a_file_and_a_file_may_set_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("A_SETTING", "old")
    file = tmp_path / "run.yaml"
    file.write_text("output_dir: out\nlearning_rate: 1e-4\nseed: 7\nenv:\n  A_SETTING: 12\n")
    monkeypatch.setattr("sys.argv", ["train.py", "--config", str(file), "--learning_rate", "2e-4"])
    (args,) = ScriptParser(TrainingArguments).parse_args_and_config()
    assert (args.learning_rate, args.seed, os.environ["A_SETTING"]) == (2e-4, 7, "12")


def test_a_scripts_own_dataclass_and_unknown_words():
    @dataclasses.dataclass
    class Own:
        depth: int = 2
        shout: bool = False

    words = ["--depth", "3", "--shout", "--colour", "red", "blue"]
    own, rest = ScriptParser((Own,)).parse_args_and_config(words, return_remaining_strings=True)
    assert own == Own(3, True) and rest == ["--colour", "red", "blue"]
    assert ScriptParser(Own).parse_args_and_config(words, fail_with_unknown_args=False) == (Own(3, True),)
    with pytest.raises(ConfigError, match="unknown argument 'dept', did you mean 'depth'"):
        ScriptParser(Own).parse_args_and_config(["--dept", "3"])


def test_of_a_flag_that_is_given_twice_the_last_counts():
    words = ["--seed", "1", "--output_dir", "a", "--bf16", "--seed", "2", "--output-dir=b", "--no_bf16"]
    (args,) = ScriptParser(TrainingArguments).parse_args_and_config(words)
    assert (args.seed, args.output_dir, args.bf16) == (2, "b", False)
    (theirs,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(words[:2] + words[5:7])
    assert theirs.seed == 2  # as argparse has it
    settings, problems = parse.read_words(words)
    assert problems == [] and settings["seed"].value == "2"  # and the command line


def test_the_parser_is_made_as_argparse_makes_one(capsys):
    parser = ScriptParser(TrainingArguments, prog="trl sft", description="Fine-tunes.", allow_abbrev=False)
    with pytest.raises(ConfigError, match="trl sft: --sed: unknown argument 'sed', did you mean 'seed'"):
        parser.parse_args_and_config(["--sed", "3"])
    with pytest.raises(SystemExit) as left:
        parser.parse_args_and_config(["--help"])
    said = capsys.readouterr().out
    assert left.value.code == 0 and said.startswith("usage: trl sft") and "Fine-tunes." in said and "--seed INT" in said
    with pytest.raises(TypeError, match="no argument progam"):
        ScriptParser(TrainingArguments, progam="x")
    assert ScriptParser().parse_args_and_config([]) == ()
    assert parser.parse_args_into_dataclasses(["--seed", "5"])[0].seed == 5


def test_a_first_word_chooses_among_commands_with_their_own_classes(tmp_path, capsys):
    @dataclasses.dataclass
    class Own:
        depth: int = 2

    parser = ScriptParser(ScriptArguments, prog="tool")
    commands = parser.add_subparsers(dest="command", parser_class=ScriptParser, help="what to do")
    commands.add_parser("train", help="Trains.", dataclass_types=(TrainingArguments,))
    commands.add_parser("look", dataclass_types=Own)
    (tmp_path / "run.yaml").write_text("dataset_name: d\nseed: 7\n")
    script, rest = parser.parse_args_and_config(["train", "--config", str(tmp_path / "run.yaml"), "--max_steps", "5"])
    assert (script.dataset_name, rest.command, rest.seed, rest.max_steps) == ("d", "train", 7, 5)
    _, rest, unknown = parser.parse_args_and_config(["look", "--depth", "3", "--far"], return_remaining_strings=True)
    assert (rest.command, rest.depth, unknown) == ("look", 3, ["--far", "true"])
    with pytest.raises(ConfigError, match="tool look: --dept: unknown argument 'dept'"):
        parser.parse_args_and_config(["look", "--dept", "3"])
    for words in ([], ["--depth", "3"], ["lok"]):
        with pytest.raises(ConfigError, match="tool: the first word must be one of train, look"):
            parser.parse_args_and_config(words)
    with pytest.raises(SystemExit):
        parser.parse_args_and_config(["--help"])
    assert "usage: tool {train,look} [--config" in capsys.readouterr().out


def test_a_field_named_config_is_refused():
    @dataclasses.dataclass
    class Own:
        config: str = ""

    with pytest.raises(ValueError, match="Own has a field named 'config'"):
        ScriptParser((Own,))


def test_unknown_words_of_files_and_of_flags_come_apart_if_asked(tmp_path):
    (tmp_path / "run.yaml").write_text("seed: 3\ncolour: red\n")
    words = ["--config", str(tmp_path / "run.yaml"), "--size", "2"]
    parse_it = ScriptParser(TrainingArguments).parse_args_and_config
    args, of_file, of_flags = parse_it(words, return_remaining_strings=True, separate_remaining_strings=True)
    assert (args.seed, of_file, of_flags) == (3, ["--colour", "red"], ["--size", "2"])
    assert parse_it(words, return_remaining_strings=True)[1] == ["--colour", "red", "--size", "2"]


def test_fields_without_a_default_are_asked_for_by_name():
    @dataclasses.dataclass
    class Own:
        depth: int
        name: str
        names: list[str] = dataclasses.field(default_factory=list)

    parser = ScriptParser(Own, prog="tool")
    with pytest.raises(ConfigError) as problem:
        parser.parse_args_and_config(["--depth", "x"])
    assert problem.value.problems == [
        "--depth: depth='x' must be of type int",
        "name is needed; write `name: ...` in the YAML file or --name on the command line",
    ]
    words = ["--depth", "3", "a", "--name", "n", "b", "c", "--names", "d", "e"]
    own, rest = parser.parse_args_and_config(words, return_remaining_strings=True)
    assert own == Own(3, "n", ["d", "e"]) and rest == ["a", "b", "c"]
    with pytest.raises(ConfigError, match="depth=.* holds 2 values and takes one"):
        parser.parse_args_and_config(words)


def test_defaults_of_a_parser_can_be_set(tmp_path):
    @dataclasses.dataclass
    class Own:
        depth: int
        names: list[str] | None = None

    parser = ScriptParser(Own)
    assert parser.set_defaults_with_config(depth=3, names=["a"], colour="red") == ["--colour", "red"]
    assert parser.parse_args_and_config([]) == (Own(3, ["a"]),)
    (tmp_path / "run.yaml").write_text("depth: 4\n")
    assert parser.parse_args_and_config(["--config", str(tmp_path / "run.yaml"), "--names", "b"]) == (Own(4, ["b"]),)
    commands = (tool := ScriptParser(prog="tool")).add_subparsers()
    commands.add_parser("look", dataclass_types=Own)
    assert tool.set_defaults_with_config(depth=5) == [] and tool.parse_args_and_config(["look"])[0].depth == 5


def test_no_quantization_and_no_adapter_unless_asked_for():
    assert get_peft_config(ModelConfig()) is None and get_quantization_config(ModelConfig()) is None
    with pytest.raises(ConfigError, match="set use_peft=True"):
        ModelConfig(load_in_4bit=True)


def test_a_quantised_model_goes_whole_to_the_gpu_of_its_process(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert get_kbit_device_map() is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert get_kbit_device_map() == {"": 3}


def test_the_names_are_where_scripts_look_for_them():
    import posttrain.sft as sft

    for name in ("ModelConfig", "ScriptArguments", "TrlParser", "get_peft_config", "get_quantization_config"):
        assert getattr(sft, name).__module__.startswith(("posttrain.lm.", "posttrain.cli."))
    with pytest.raises(AttributeError, match=r"SFTConfig\(packing=True\)"):
        sft.ConstantLengthDataset  # noqa: B018
