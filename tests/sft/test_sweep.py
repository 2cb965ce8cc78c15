"""``posttrain sweep run.yaml`` compares runs, goes on where it stopped, and keeps the best model; and a trainer without
``model_init`` searches too.
"""

from __future__ import annotations

import json

import pytest
import torch

from posttrain.cli import main
from posttrain.core import trainer
from posttrain.core.callbacks import TrainerCallback
from posttrain.core.errors import NonFiniteError
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny

pytest.importorskip("optuna")


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.causal_lm().save_pretrained("model")
    tiny.tokenizer().save_pretrained("model")
    rows = "".join(json.dumps({"text": text}) + "\n" for text in tiny.CORPUS[:4] * 3)
    (tmp_path / "train.jsonl").write_text(rows)
    path = tmp_path / "run.yaml"
    path.write_text(
        "method: sft\nmodel_name_or_path: model\ndataset_name: train.jsonl\noutput_dir: out\nmax_length: 48\n"
        "max_steps: 2\neval_steps: 1\neval_share: 0.3\nuse_cpu: yes\nreport_to: none\nlearning_rate: 1e-6\n"
        "sweep:\n  n_trials: 2\n  space:\n    learning_rate: {low: 1e-7, high: 1e-1, log: true}\n    seed: [1, 42]\n"
    )
    return path


def test_a_sweep_tries_the_file_first_goes_on_and_keeps_the_model_of_the_best(run_file, tmp_path, capsys):
    assert main(["sweep", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "Trial 0: learning_rate 1e-06, seed 42" in out and "Trial 1:" in out and "Trial 2:" not in out
    assert main(["sweep", "run.yaml", "--n_trials", "4"]) == 0
    out = capsys.readouterr().out
    assert "Trial 1:" not in out and "Trial 3:" in out and "Best: --learning_rate " in out
    models = [path.parent.name for path in (tmp_path / "out").glob("trial-*/model.safetensors")]
    assert len(models) == 1 and f"in out/{models[0]}." in out
    page = (tmp_path / "out" / "sweep.html").read_text()
    assert "<h2>Trials</h2>" in page and "<svg" in page and "trial-3" in page
    lines = [line.split() for line in out.splitlines() if line[:1].isdigit()]
    assert len({tuple(line[3:]) for line in lines}) == 4, "a search that goes on draws no trial again"
    best = min(float(line[2]) for line in lines if line[1] in ("best", "complete"))
    assert [float(line[2]) for line in lines if line[1] == "best"] == [best]


def test_an_interrupted_trial_is_made_again_and_one_that_diverges_is_not(run_file, capsys, monkeypatch):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if errors:
                raise errors.pop()

    errors: list[BaseException] = [KeyboardInterrupt()]
    monkeypatch.setattr(trainer, "DEFAULT_CALLBACKS", [*trainer.DEFAULT_CALLBACKS, Fails()])
    assert main(["sweep", "run.yaml"]) == 130
    said = capsys.readouterr()
    assert "The same command goes on" in said.out and "Traceback" not in said.err
    errors.append(NonFiniteError("loss is NaN"))
    assert main(["sweep", "run.yaml"]) == 0
    out = capsys.readouterr().out
    assert "Trial 1: learning_rate 1e-06, seed 42" in out and "Trial 3:" not in out
    states = [line.split()[1] for line in out.splitlines() if line[:1].isdigit()]
    assert states == ["interrupted", "diverged", "best"]


def test_what_is_wrong_with_a_sweep_is_said_before_anything_is_trained(run_file, tmp_path, capsys):
    text = run_file.read_text().replace("n_trials: 2", "n_trails: 2").replace("[1, 42]", "several")
    run_file.write_text(text)
    assert main(["sweep", "run.yaml"]) == 2
    err = capsys.readouterr().err
    assert "unknown key 'n_trails'" in err and "space of seed must be a list of values, or low and high" in err
    assert not (tmp_path / "out").exists()


def test_a_first_trial_that_is_not_of_the_file_is_announced(run_file, capsys):
    assert main(["sweep", "run.yaml", "--n_trials", "1", "--learning_rate", "1"]) == 0
    out = capsys.readouterr().out
    assert "The space leaves out values of the file" in out and "Trial 0: learning_rate 1," not in out


def test_a_trainer_without_model_init_starts_each_trial_with_its_first_weights(tmp_path):
    rows = [{"text": text} for text in tiny.CORPUS[:4]]
    args = SFTConfig(
        str(tmp_path), max_steps=2, eval_strategy="steps", eval_steps=2, report_to="none", use_cpu=True,
        save_strategy="no", learning_rate=0.0,
    )  # fmt: skip
    trainer = SFTTrainer(
        tiny.causal_lm(), args, train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer()
    )
    before = {name: value.clone() for name, value in trainer.model.state_dict().items()}
    first = trainer.evaluate()["eval_loss"]
    rates = iter([1e-1, 0.0])
    best = trainer.hyperparameter_search(lambda trial: {"learning_rate": next(rates)}, n_trials=2)
    values = [trial.value for trial in best.run_summary.trials]
    assert values[0] != first and values[1] == first
    assert all(torch.equal(value, before[name]) for name, value in trainer.model.state_dict().items())
