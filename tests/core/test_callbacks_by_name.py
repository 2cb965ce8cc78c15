"""Callbacks that scripts pass by name: averaged weights, answers to prompts, bars of rich."""

import importlib.machinery
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from posttrain.core import (
    BEMACallback,
    LogCompletionsCallback,
    RichProgressCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    WeaveCallback,
    WinRateCallback,
)
from posttrain.core.errors import DataError
from tests import tiny


class Recorder(TrainerCallback):
    def __init__(self):
        self.weights = []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})

    def on_step_end(self, args, state, control, model, **kwargs):
        self.on_train_begin(args, state, control, model)


def rows_of(number):
    return tiny.token_rows(number, min_length=9, max_length=9)


def trainer(folder, callbacks, eval_dataset=None, **changes):
    args = TrainingArguments(**dict(
        output_dir=str(folder), max_steps=6, learning_rate=1.0, optim="sgd", per_device_train_batch_size=4,
        report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no", logging_steps=2,
    ) | changes)  # fmt: skip
    model, tokenizer = tiny.causal_lm(), tiny.tokenizer()
    return Trainer(model, args, None, rows_of(12), eval_dataset, tokenizer, callbacks=callbacks)


@pytest.mark.parametrize(
    "options", [{}, {"ema_power": 0.0}, {"bias_power": 0.0}, {"update_after": 1, "multiplier": 0.5}]
)
def test_the_averaged_model_is_that_of_the_formula_and_can_be_loaded(options, tmp_path):
    from transformers import AutoModelForCausalLM

    seen, bema = Recorder(), BEMACallback(update_freq=2, lag=3, **options)
    run = trainer(tmp_path, [seen, bema])
    run.train()
    begin = options.get("update_after", 0)
    steps = [step for step in range(begin + 1, 7) if (step - begin) % 2 == 0]
    name = "model.layers.1.mlp.up_proj.weight"
    first, mean = seen.weights[begin][name], seen.weights[begin][name].clone()
    for step in steps:
        now, scale = seen.weights[step][name], 3 + options.get("multiplier", 1.0) * step
        beta, alpha = scale ** -options.get("ema_power", 0.5), scale ** -options.get("bias_power", 0.2)
        mean = (1 - beta) * mean + beta * now
        expected = mean + alpha * (now - first)
    torch.testing.assert_close(bema.averaged()[name], expected, atol=1e-6, rtol=1e-5)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "bema").get_parameter(name)
    torch.testing.assert_close(saved.detach(), expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(run.model.get_parameter(name), seen.weights[-1][name])  # the trained model is as it was
    assert not torch.allclose(expected, seen.weights[-1][name], atol=1e-4)


def test_averages_go_on_where_a_resumed_run_stood(tmp_path):
    whole = BEMACallback(update_freq=2)
    trainer(tmp_path / "whole", [whole]).train()

    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = state.global_step == 3

    options = {"save_strategy": "steps", "save_steps": 3}
    trainer(tmp_path / "cut", [BEMACallback(update_freq=2), Stop()], **options).train()
    resumed = BEMACallback(update_freq=2)
    trainer(tmp_path / "cut", [resumed], **options).train(resume_from_checkpoint=True)
    for name, weight in whole.averaged().items():
        assert torch.equal(weight, resumed.averaged()[name]), name


def test_answers_to_prompts_are_shown_as_a_table(tmp_path, monkeypatch):
    from transformers import GenerationConfig

    shown = []
    wandb = types.ModuleType("wandb")
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # others ask whether it is installed
    wandb.run, wandb.Table = SimpleNamespace(entity="me", project="mine"), lambda columns, data: (columns, data)
    wandb.log, wandb.Image = shown.append, None
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    rows = [{"prompt": "the cat", **row} for row in rows_of(3)]
    run = trainer(tmp_path, [], rows, remove_unused_columns=True)
    run.args.report_to = ["wandb"]
    greedy = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)
    run.add_callback(LogCompletionsCallback(run, greedy, num_prompts=2, freq=3))
    run.train()
    assert len(shown) == 2
    columns, data = shown[1]["completions"]
    assert columns == ["step", "prompt", "completion"] and [row[0] for row in data] == [3, 3, 6, 6]
    ids = torch.tensor([tiny.tokenizer()("the cat")["input_ids"]])
    with torch.no_grad():
        written = run.model.eval().generate(ids, generation_config=greedy)
    assert data[-1][1:] == ["the cat", tiny.tokenizer().decode(written[0, ids.shape[1] :], skip_special_tokens=True)]
    with pytest.raises(DataError, match="no column 'prompt'"):
        LogCompletionsCallback(trainer(tmp_path, [], rows_of(2))).answer()


class Later:
    """A judge that prefers what comes later in the alphabet."""

    def judge(self, prompts, completions, return_scores=False):
        assert len(prompts) == len(completions)
        if return_scores:
            return [0.5 if a == b else 0.75 if a > b else 0.25 for a, b in completions]
        return [-1 if a == b else int(b > a) for a, b in completions]


@pytest.mark.parametrize("soft", [False, True])
def test_a_judge_compares_answers_with_those_before_training(soft, tmp_path):
    from transformers import GenerationConfig

    prompts = ["the cat", "a dog", "2 + 3", "wallet"]
    rows = [{"prompt": prompt, **row} for prompt, row in zip(prompts, rows_of(4), strict=True)]
    greedy = GenerationConfig(max_new_tokens=5, do_sample=False, pad_token_id=0)

    def begin(steps):
        run = trainer(
            tmp_path,
            [],
            rows,
            eval_strategy="steps",
            eval_steps=3,
            save_strategy="steps",
            save_steps=3,
            max_steps=steps,
        )
        callback = WinRateCallback(Later(), run, greedy, use_soft_judge=soft)
        run.add_callback(callback)
        return run, callback

    run, callback = begin(6)
    before = [text for _, text in callback.answer()]
    run.train()
    after = [text for _, text in callback.answer()]
    assert callback.reference == before != after
    wins = [0.5 if a == b else float(b > a) for a, b in zip(before, after, strict=True)]
    logged = [record for record in run.state.log_history if "eval_win_rate" in record]
    assert [record["step"] for record in logged] == [0, 3, 6]
    assert logged[0]["eval_win_rate"] == 0.5 and logged[2]["eval_win_rate"] == sum(wins) / 4
    if soft:
        assert logged[2]["eval_avg_win_prob"] == sum({0: 0.25, 0.5: 0.5, 1: 0.75}[win] for win in wins) / 4
    again, callback = begin(9)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-6"))
    assert callback.reference == before  # and not the answers of the model that is resumed from


def test_answers_are_scored_in_weave(tmp_path, monkeypatch):
    told = []

    class Shown:
        def log_score(self, scorer, score):
            told.append((scorer, score))

        def finish(self):
            pass

    class EvaluationLogger:
        def __init__(self, model, dataset):
            told.append((model, dataset))

        def log_prediction(self, inputs, output):
            told.append((inputs["prompt"], output))
            return Shown()

        def log_summary(self, summary):
            told.append(summary)

    weave = types.ModuleType("weave")
    weave.init, weave.EvaluationLogger = lambda project: told.append(project), EvaluationLogger
    monkeypatch.setitem(sys.modules, "weave", weave)
    run = trainer(tmp_path, [], [{"prompt": "a dog", **row} for row in rows_of(2)], max_steps=1)
    scorers = {"length": lambda prompt, completion: len(completion)}
    run.add_callback(WeaveCallback(run, "team/project", scorers, num_prompts=1, model_name="tiny"))
    run.train()
    run.evaluate()
    project, (model, dataset), (prompt, answer), score, summary = told
    assert (project, model, dataset, prompt) == ("team/project", "tiny_step_1", "eval_dataset", "a dog")
    assert score == ("length", len(answer)) and summary == {"length": len(answer), "step": 1}


def test_bars_of_rich_show_updates_and_the_last_record(tmp_path, capsys):
    run = trainer(tmp_path, [RichProgressCallback()], rows_of(3), eval_strategy="steps", eval_steps=3)
    run.train()
    said = capsys.readouterr().out
    assert "Training" in said and "6/6" in said and "loss" in said
