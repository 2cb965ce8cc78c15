"""``posttrain sft`` trains for real: from files on the disk to a model on the disk."""

from __future__ import annotations

import json
import logging
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
import torch

from posttrain.cli import main
from posttrain.cli.tools import verify_resume
from posttrain.core import Trainer, trainer
from posttrain.core.callbacks import TrainerCallback
from posttrain.core.training.preemption import Interrupted
from tests import programs, tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    folder = str(tmp_path_factory.mktemp("model"))
    tiny.causal_lm().save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def run_file(tmp_path, monkeypatch, model):
    """A YAML file that trains on twelve rows and evaluates on four."""
    monkeypatch.chdir(tmp_path)
    for name, texts in (("train.jsonl", tiny.CORPUS[:4] * 3), ("eval.jsonl", tiny.CORPUS[:4])):
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "run.yaml").write_text(
        f"model_name_or_path: {model}\ndataset_name: train.jsonl\neval_dataset_name: eval.jsonl\noutput_dir: out\n"
        "max_length: 48\nmax_steps: 4\nper_device_train_batch_size: 2\nlearning_rate: 1e-2\nlogging_steps: 1\n"
        "eval_strategy: steps\neval_steps: 2\nsave_steps: 2\nuse_cpu: yes\nreport_to: none\ndisable_tqdm: true\n"
    )
    return tmp_path / "run.yaml"


def test_a_run_leaves_a_model_that_can_be_loaded_and_that_learned(run_file, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert main(["sft", "run.yaml", "--dtype", "float32"]) == 0
    AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "<|endoftext|>"
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    losses = [record["eval_loss"] for record in history if "eval_loss" in record]
    assert len(losses) == 2 and losses[1] < losses[0]
    assert next(record["learning_rate"] for record in history if "learning_rate" in record) == 1e-2


def test_a_run_goes_on_from_its_newest_checkpoint(run_file, tmp_path):
    assert main(["sft", "run.yaml", "--max_steps", "2", "--lr_scheduler_type", "constant"]) == 0
    words = ["sft", "run.yaml", "--resume_from_checkpoint", "true", "--lr_scheduler_type", "constant"]
    assert main(words) == 0
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    assert [record["step"] for record in history if "loss" in record] == [1, 2, 3, 4]


def test_adapters_are_trained_when_asked_for(run_file, tmp_path):
    assert main(["sft", "run.yaml", "--use_peft", "--lora_r", "4", "--lora_target_modules", "q_proj", "v_proj"]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["r"] == 4 and set(config["target_modules"]) == {"q_proj", "v_proj"}


def test_evaluations_without_rows_are_refused_before_the_model_is_loaded(run_file, tmp_path, capsys):
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text("{}")  # nothing that could be loaded
    words = ["sft", "run.yaml", "--eval_dataset_name", "null", "--model_name_or_path", str(tmp_path / "bare")]
    assert main(words) == 1
    assert "Set eval_dataset_name or eval_share" in capsys.readouterr().err


def test_layers_that_are_not_there_a_share_of_nothing_and_a_loss_that_is_not_finite_end_with_a_sentence(
    run_file, tmp_path, capsys
):
    assert main(["sft", "run.yaml", "--use_peft", "--lora_target_modules", "nope"]) == 2
    assert "Name some of them in target_modules" in capsys.readouterr().err
    (tmp_path / "one.jsonl").write_text('{"text": "a b c"}\n')
    words = ["--dataset_name", "one.jsonl", "--eval_dataset_name", "null", "--eval_share", "0.1"]
    assert main(["sft", "run.yaml", *words]) == 1
    assert "eval_share=0.1 leaves no row to train on" in capsys.readouterr().err
    model = tiny.causal_lm()
    torch.nn.init.constant_(model.lm_head.weight, float("nan"))
    model.save_pretrained(tmp_path / "nan")
    tiny.tokenizer().save_pretrained(tmp_path / "nan")
    assert main(["sft", "run.yaml", "--model_name_or_path", "nan"]) == 1
    said = capsys.readouterr().err
    assert "lm_head.weight holds NaN already" in said and "Nothing was saved" in said and "Traceback" not in said


def test_a_smoke_run_passes_and_keeps_nothing(run_file, tmp_path, capsys, caplog):
    before = sorted(path.name for path in tmp_path.iterdir())
    with caplog.at_level(logging.INFO):
        assert main(["sft", "run.yaml", "--smoke"]) == 0
    assert "resuming from it and reading the saved model back work" in capsys.readouterr().out
    assert sum("was read back by Qwen3ForCausalLM.from_pretrained: the same weights" in m for m in caplog.messages) == 2
    assert any(message.endswith("from step 2.") for message in caplog.messages)  # resumed
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_a_smoke_run_fails_where_the_saved_model_is_not_the_trained_one(run_file, monkeypatch, capsys):
    from posttrain.core.checkpoint import codec

    def spoilt(tensors, *where, write=codec.write_tensors):
        write({name: value + 1 if name == "model.norm.weight" else value for name, value in tensors.items()}, *where)

    monkeypatch.setattr(codec, "write_tensors", spoilt)
    assert main(["sft", "run.yaml", "--smoke", "--save_only_model", "true"]) == 1
    assert "read back, is not the one that was trained: different: ['model.norm.weight']" in capsys.readouterr().err


def test_bench_measures_some_steps_and_keeps_nothing(run_file, tmp_path, capsys, caplog, monkeypatch):
    monkeypatch.setattr(Trainer, "save_model", lambda *_, **__: pytest.fail("a model was written"))
    caplog.set_level(logging.INFO)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["bench", "sft", "run.yaml", "--bench_steps", "2", "--bench_warmup", "1"]) == 0
    out = capsys.readouterr().out
    assert "2 optimizer steps after 1: median" in out and "was read back" not in caplog.text
    number = r"([\d.,e+-]+)"
    numbers = {}  # median, least and most
    for title in ("seconds of an optimizer step", "tokens per second", "peak host memory, MiB", "seconds of forward",
                  "seconds of backward"):  # fmt: skip
        found = re.search(rf"  {title} +{number} \({number} to {number}\)", out)
        numbers[title] = [float(part.replace(",", "")) for part in found.groups()]
    both = numbers["seconds of forward"][0] + numbers["seconds of backward"][0]
    assert 0 < both <= numbers["seconds of an optimizer step"][0] * 1.001
    # A step has two rows of 48 tokens at most, and four digits are printed. Medians would not do: the shortest step,
    # and not the usual one, sets the greatest speed.
    assert numbers["tokens per second"][2] * numbers["seconds of an optimizer step"][1] <= 2 * 96 * 1.001
    assert sorted(path.name for path in tmp_path.iterdir()) == before
    assert main(["bench", "sft", "run.yaml", "--bench_steps", "few"]) == 2
    assert "--bench_steps few must be a number" in capsys.readouterr().err


@pytest.mark.long
def test_a_run_is_proved_to_go_on_to_the_same_bits(run_file, capfd, monkeypatch):
    start = SimpleNamespace(run=lambda command, **_: programs.run(command[1:], cwd=Path.cwd()))
    monkeypatch.setattr(verify_resume, "subprocess", start)
    assert main(["verify-resume", "sft", "run.yaml", "--steps", "2", "--save_steps", "1"]) == 0
    out = capfd.readouterr().out
    for part in ("weights", "optimizer", "scheduler", "random numbers", "data, metrics, own state", "log"):
        assert f"  {part:<24}  equal" in out, out
    assert "DIFFERENT" not in out and "bit by bit" in out


def test_a_rerun_of_a_run_without_logged_losses_says_that_there_was_nothing_to_compare(run_file, capsys):
    assert main(["sft", "run.yaml", "--logging_strategy", "no"]) == 0
    assert main(["rerun", "out"]) == 0
    out = capsys.readouterr().out
    assert "the losses cannot be compared" in out and "are equal" not in out


def test_a_run_is_started_again_from_its_record_and_compared(run_file, tmp_path, monkeypatch, capsys):
    assert main(["sft", "run.yaml", "--learning_rate", "2e-2"]) == 0
    run_file.unlink()  # the record holds what it said
    (elsewhere := tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(elsewhere)
    capsys.readouterr()
    assert main(["rerun", "../out"]) == 0
    out = capsys.readouterr().out
    assert "versions, hardware and processes are as they were" in out
    assert "the 4 losses that both logs hold are equal" in out
    again = json.loads((tmp_path / "out-rerun" / "run.json").read_text())["starts"][0]
    assert again["arguments"]["learning_rate"] == 0.02 and again["asked"]["method"] == "sft"

    monkeypatch.chdir(elsewhere)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in tiny.CORPUS[1:5] * 3))
    assert main(["rerun", "../out", "--output_dir", "third", "--seed", "1"]) == 0
    out = capsys.readouterr().out
    assert (elsewhere / "third" / "checkpoint-4").is_dir()
    assert "data: xxh128 was" in out and "the losses differ from optimizer step 1 on" in out

    record = json.loads((tmp_path / "out" / "run.json").read_text())
    record["starts"][0]["directory"] = str(tmp_path / "gone")
    (tmp_path / "out" / "run.json").write_text(json.dumps(record))
    assert main(["rerun", str(tmp_path / "out")]) == 2
    assert f"the working directory of the run, {tmp_path / 'gone'}, is not there" in capsys.readouterr().err


def test_a_run_of_a_program_is_not_started_again_but_shown(run_file, tmp_path, capsys):
    from posttrain.sft import SFTConfig, SFTTrainer

    args = SFTConfig(str(tmp_path / "own"), max_steps=1, use_cpu=True, report_to="none")
    model = str(run_file.read_text().split()[1])
    SFTTrainer(
        model, args, train_dataset=datasets.Dataset.from_list([{"text": text} for text in tiny.CORPUS[:4]])
    ).train()
    assert main(["rerun", str(tmp_path / "own")]) == 2
    assert "started by another program" in capsys.readouterr().err
    assert main(["rerun", str(tmp_path)]) == 1 and main(["rerun"]) == 0 and main(["rerun", "a", "b"]) == 2


@pytest.mark.long
def test_what_cannot_be_proved_says_why(run_file, capsys):
    assert main(["verify-resume", "--use_cpu"]) == 2
    assert "name the method first" in capsys.readouterr().err
    assert main(["verify-resume", "sft", "run.yaml", "--steps", "1"]) == 2
    assert main(["verify-resume", "sft", "run.yaml", "--model_name_or_path", "/nowhere"]) == 1
    assert "/nowhere" in capsys.readouterr().err


def test_a_script_of_trl_parses_its_arguments_and_trains(run_file, tmp_path):
    """The usual three configs and helpers, imported from here, by both parsers."""
    from transformers import HfArgumentParser

    from posttrain.sft import (
        ModelConfig,
        ScriptArguments,
        SFTConfig,
        SFTTrainer,
        TrlParser,
        get_kbit_device_map,
        get_peft_config,
        get_quantization_config,
    )

    words = ["--output_dir", str(tmp_path / "script"), "--model_name_or_path", str(run_file.read_text().split()[1]),
             "--dataset_name", "train.jsonl", "--use_peft", "--lora_target_modules", "q_proj", "--max_seq_length", "32",
             "--train_on", "assistant", "--dataset_weights", '{"a": 1}', "--max_steps", "1", "--use_cpu", "--report_to",
             "none", "--save_strategy", "no"]  # fmt: skip
    classes = (ScriptArguments, SFTConfig, ModelConfig)
    for parsed in (
        HfArgumentParser(classes).parse_args_into_dataclasses(words),
        TrlParser(classes).parse_args_and_config(words),
    ):
        script, args, model = parsed
        assert (args.max_length, args.train_on, args.dataset_weights) == (32, "assistant", {"a": 1})
        args.model_init_kwargs = {
            "revision": model.model_revision, "attn_implementation": model.attn_implementation, "dtype": model.dtype,
            "device_map": get_kbit_device_map() if get_quantization_config(model) is not None else None,
            "quantization_config": get_quantization_config(model),
        }  # fmt: skip
        args.train_on = args.dataset_weights = None
        trainer = SFTTrainer(
            model.model_name_or_path,
            args,
            train_dataset=[json.loads(line) for line in (tmp_path / script.dataset_name).read_text().splitlines()],
            peft_config=get_peft_config(model),
        )
        trainer.train()
        assert trainer.state.global_step == 1


def test_every_field_of_the_model_reaches_the_adapter_and_the_loader():
    import torch
    from peft import get_peft_model

    from posttrain.core import ModelConfig

    asked = ModelConfig(
        "model", model_revision="v2", dtype="bfloat16", attn_implementation="eager", use_peft=True, lora_alpha=7,
        lora_r=3, lora_target_modules=["q_proj"], lora_modules_to_save=["lm_head"],
        lora_target_parameters=["mlp.up_proj.weight"], lora_dropout=0.0, lora_task_type="SEQ_CLS", load_in_4bit=True,
        bnb_4bit_quant_storage="bfloat16",
    )  # fmt: skip
    assert asked.model_init_kwargs() == {"revision": "v2", "dtype": "bfloat16", "attn_implementation": "eager"}
    config = asked.peft_config()
    assert (config.r, config.lora_alpha, config.task_type) == (3, 7, "SEQ_CLS")
    assert asked.quantization_config().bnb_4bit_quant_storage == torch.bfloat16
    config.task_type = "CAUSAL_LM"
    names = {name for name, p in get_peft_model(tiny.causal_lm(), config).named_parameters() if p.requires_grad}
    for part in ("q_proj.lora_A", "up_proj.lora_A", "lm_head.modules_to_save"):
        assert any(part in name for name in names), part
    assert not any("v_proj" in name for name in names)


@pytest.fixture
def mixture_file(run_file, tmp_path):
    """The same run on two files of which the second has three times the weight."""
    rows = [{"prompt": f"{i} and {i}?", "completion": f" {2 * i}", "id": i} for i in range(8)]
    (tmp_path / "maths.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = run_file.read_text().replace("dataset_name: train.jsonl", "", 1)
    (tmp_path / "mixed.yaml").write_text(
        text + "dataset_mixture:\n  tales: {path: train.jsonl, weight: 1, fraction: 0.5}\n"
        "  maths: {path: maths.jsonl, columns: [prompt, completion], weight: 3}\n"
    )
    return tmp_path / "mixed.yaml"


def test_a_mixture_trains_with_a_loss_for_each_dataset(mixture_file, tmp_path):
    assert main(["sft", "mixed.yaml"]) == 0
    history = json.loads((tmp_path / "out" / "checkpoint-4" / "trainer_state.json").read_text())["log_history"]
    shares = [record["token_share/maths"] for record in history if "token_share/maths" in record]
    assert len(shares) == 4 and all("loss/maths" in r or "loss/tales" in r for r in history if "loss" in r)


def test_a_mixture_is_previewed_with_its_shares(mixture_file, capsys):
    assert main(["preview", "mixed.yaml", "--rows", "2"]) == 0
    shown = capsys.readouterr().out
    assert "train/tales: 6 rows read" in shown and "maths: 10 rows an epoch (71.4%)" in shown  # 3/4 of 14, to the row
    assert "row 0: maths, " in shown


def test_a_mixture_has_weights_that_change_and_budgets(mixture_file, capsys):
    text = mixture_file.read_text().replace("weight: 3", "weight: {0: 3, 0.5: 1}, max_tokens: 10")
    mixture_file.write_text(text)
    assert main(["preview", "mixed.yaml", "--rows", "1"]) == 0
    shown = capsys.readouterr().out
    stages = ["stage 1 of 2: 1 rows of tales, 3 rows of maths", "stage 2 of 2: 4 rows of tales, 0 rows of maths"]
    assert re.findall(r"stage . of 2: .*", shown) == stages
    words = ["preview", "mixed.yaml", "--rows", "1", "--dataset_max_tokens", '{"maths": 9}']
    assert main(words) == 2
    assert "dataset_max_tokens and the max_tokens in dataset_mixture are both set; keep one" in capsys.readouterr().err
    flags = ["--dataset_weights", '{"tales": 1, "maths": {"0": 3, "0.5": 1}}', "--dataset_max_tokens", '{"maths": 10}']
    bare = text.replace("weight: {0: 3, 0.5: 1}, max_tokens: 10", "").replace("weight: 1, ", "").replace(", }", "}")
    mixture_file.write_text(bare)
    assert main(["preview", "mixed.yaml", "--rows", "1", *flags]) == 0
    assert re.findall(r"stage . of 2: .*", capsys.readouterr().out) == stages


def test_a_list_of_datasets_is_named_after_its_files(run_file, tmp_path):
    from posttrain.cli.source import DataSource

    data = DataSource(dataset_mixture=[{"path": "train.jsonl"}, "eval.jsonl"], eval_share=0.25, max_rows=6)
    train, held_out = data.load()
    assert {name: len(rows) for name, rows in train.items()} == {"train": 6, "eval": 3}
    assert {name: len(rows) for name, rows in held_out.items()} == {"train": 3, "eval": 1} and data.weights() is None


@pytest.mark.parametrize(
    ("mixture", "message"),
    [
        ("{a: {pth: train.jsonl}}", "unknown key 'pth', did you mean 'path'"),
        ("{a: {weight: 2}}", "a has no path"),
        ("{a: {path: none.jsonl}}", "'none.jsonl' of a does not exist"),
        ("{a: {path: trian.jsonl}}", "did you mean 'train.jsonl'?"),
        ("{a: {path: train.jsonl, weight: 1}, b: eval.jsonl}", "a has a weight and b has none"),
        ("{a: {path: train.jsonl, weight: -1}}", "the weight -1 of a must be above 0"),
        ("{a: {path: train.jsonl, max_tokens: many}}", "the max_tokens 'many' of a must be above 0"),
        ("{a: {path: train.jsonl, fraction: 2}}", "the fraction 2 of a must be above 0 and at most 1"),
        ("[train.jsonl, {path: train.jsonl}]", "two datasets are called 'train'"),
    ],
)
def test_a_mixture_that_cannot_be_read_says_why(run_file, capsys, mixture, message):
    words = ["sft", "run.yaml", "--dataset_name", "null", "--dataset_mixture", mixture]
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert main(["sft", "run.yaml", "--dataset_mixture", mixture]) == 2
    assert "keep one" in capsys.readouterr().err
    assert main(["sft", "--model_name_or_path", "x"]) == 2
    assert "dataset_name is needed (or dataset_mixture" in capsys.readouterr().err


@pytest.fixture
def at_step(monkeypatch):
    """`at_step(number, function)`: call `function`, and no other, when that step of a run has ended."""
    builtin = trainer.DEFAULT_CALLBACKS

    def install(number, function):
        class AtStep(TrainerCallback):
            def on_step_end(self, args, state, control, **kwargs):
                if state.global_step == number:
                    function()

        monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*builtin, AtStep])

    return install


def interrupt():
    raise KeyboardInterrupt


def test_a_run_ends_with_its_folder_its_report_and_the_commands_that_fit(run_file, capsys):
    assert main(["sft", "run.yaml"]) == 0
    end = capsys.readouterr().out.splitlines()[-6:]
    assert end[0] == "The run finished after 4 of 4 steps. The model is in out." and end[1] == "Report: out/report.html"
    commands = [line.split("#")[0].strip() for line in end[2:]]
    assert commands == [
        "posttrain chat out",
        "posttrain evaluate out --data rows.jsonl",
        "posttrain export out out.gguf --llama_cpp llama.cpp",
        "posttrain sft run.yaml --resume_from_checkpoint true --max_steps 8",
    ]
    assert main(commands[-1].split()[1:]) == 0  # as printed
    again = capsys.readouterr().out.splitlines()
    assert again[-6].startswith("The run finished after 8 of 8 steps.") and "--max_steps 16" in again[-1]
    assert again[-1].count("--max_steps") == 1


def test_a_run_whose_time_is_up_says_how_it_goes_on(run_file, capsys):
    assert main(["sft", "run.yaml", "--max_time", "1e-6"]) == 0
    out = capsys.readouterr().out
    assert "The run ended by its time limit after 1 steps. The model is in out." in out
    command, purpose = out.splitlines()[-1].split("  # ")
    assert purpose == "go on, from checkpoint-1" and "--max_steps" not in command
    assert main([*command.split()[1:], "--max_time", "600"]) == 0
    assert "The run finished after 4 of 4 steps." in capsys.readouterr().out


def test_an_adapter_can_be_merged_and_tokens_are_not_shown(run_file, capsys):
    assert main(["sft", "run.yaml", "--use_peft", "--save_strategy", "no", "--hub_token", "hf_abcdefghijklmnop"]) == 0
    out = capsys.readouterr().out
    assert "The adapter (base: " in out and "posttrain merge out out-merged" in out
    assert "resume_from_checkpoint" not in out and "hf_abcdefgh" not in out


def test_what_was_saved_is_said_of_a_run_that_is_interrupted(run_file, at_step, capsys):
    at_step(3, interrupt)
    assert main(["sft", "run.yaml"]) == 130
    err = capsys.readouterr().err
    assert "out/checkpoint-2 is saved. To go on from it:\n  posttrain sft run.yaml --resume_from_checkpoint true" in err


def test_that_nothing_was_saved_is_said_too(run_file, at_step, capsys):
    at_step(3, interrupt)
    assert main(["sft", "run.yaml", "--save_strategy", "no"]) == 130
    err = capsys.readouterr().err
    assert "Nothing was saved: save_strategy is 'no'. Set save_strategy" in err
    assert err.count("save_steps=2 has no effect") == 1  # the config is checked again and again
    at_step(3, lambda: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as left:
        main(["sft", "run.yaml", "--save_strategy", "no", "--output_dir", "other"])
    assert left.value.code == 143 and "Nothing was saved" in capsys.readouterr().err
    assert "ended by SIGTERM after 3 steps" in (Path("other") / "report.html").read_text()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_after_ctrl_c_the_checkpoint_is_named_and_after_an_error_a_note_names_it(run_file, at_step, capsys):
    def fail():
        raise RuntimeError("no more")

    at_step(1, lambda: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # programs in the background ignore it
    try:
        with pytest.raises(Interrupted):
            main(["sft", "run.yaml"])
    finally:
        signal.signal(signal.SIGINT, before)
    assert "out/checkpoint-1 is saved" in capsys.readouterr().err
    at_step(3, fail)
    with pytest.raises(RuntimeError) as raised:
        main(["sft", "run.yaml", "--output_dir", "other"])
    assert any("other/checkpoint-2 is saved" in note for note in raised.value.__notes__)
    with pytest.raises(RuntimeError) as raised:
        main(["sft", "run.yaml", "--output_dir", "third", "--save_strategy", "no"])
    assert any("save_on_exception, which saves the last whole step" in note for note in raised.value.__notes__)


def test_a_disk_that_is_full_at_the_end_is_said_in_a_sentence(run_file, monkeypatch, capsys):
    def full(self, directory):
        raise Exception("No space left on device (os error 28)")  # as the library of tokenizers says it

    monkeypatch.setattr("posttrain.core.training.saving.Saving.beside", full)
    assert main(["sft", "run.yaml"]) == 1
    err = capsys.readouterr().err
    assert "The disk is full (No space left on device (os error 28)): the model in out is not whole." in err
    assert "Nothing was saved: no checkpoint was written." in err and "Traceback" not in err


def test_in_a_file_each_log_record_is_a_line_and_there_are_no_bars(run_file, capsys):
    assert main(["sft", "run.yaml", "--disable_tqdm", "false"]) == 0
    captured = capsys.readouterr()
    assert "\r" not in captured.out and "step/s" not in captured.err
    lines = [line for line in captured.out.splitlines() if line.startswith("step ")]
    records = [json.loads(line) for line in (run_file.parent / "out" / "log.jsonl").read_text().splitlines()]
    assert len(lines) == len(records) and lines[0].startswith("step 1/4  loss ")


def test_evaluation_rows_are_not_prepared_where_nothing_is_evaluated(run_file, caplog):
    caplog.set_level(logging.INFO)
    assert main(["sft", "run.yaml"]) == 0
    assert "eval: 4 rows read" in caplog.text
    caplog.clear()
    assert main(["sft", "run.yaml", "--eval_strategy", "no", "--overwrite_output_dir", "true"]) == 0
    assert "train: 12 rows read" in caplog.text and "eval: 4 rows read" not in caplog.text


def test_a_preview_says_once_how_rows_are_read(run_file, tmp_path, capsys, caplog):
    tiny.tokenizer(chat_template=tiny.CHATML).save_pretrained("words")
    tiny.causal_lm().save_pretrained("words")
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "1 + 1 =", "completion": " 2"}\n')
    assert main(["preview", "run.yaml", "--model_name_or_path", "words", "--dataset_name", "pairs.jsonl"]) == 0
    assert capsys.readouterr().out.count("the rows are plain texts") == 1 and "plain texts" not in caplog.text
