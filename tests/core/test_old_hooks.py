"""Old names of overridable methods: only trainers of scripts that replace one go through it."""

import inspect

import pytest

from posttrain.compat.trainer_names import HOOKS
from posttrain.core import Trainer, TrainingArguments
from tests import tiny
from tests.contract.trainers import pad


@pytest.fixture(autouse=True)
def as_imported(monkeypatch):
    """The methods of `Trainer` as they are before a script replaces an old name."""
    for method in HOOKS.values():
        hook = vars(Trainer)[method.__name__]
        monkeypatch.setattr(Trainer, method.__name__, getattr(hook, "__wrapped__", hook))


def trainer_of(kind, folder):
    args = TrainingArguments(str(folder), max_steps=1, report_to="none", use_cpu=True, save_strategy="no")
    return kind(tiny.causal_lm(), args, pad, tiny.token_rows(4), tiny.token_rows(2))


def direct():
    return {name for name, method in HOOKS.items() if not hasattr(vars(Trainer)[method.__name__], "__wrapped__")}


def test_a_trainer_without_old_names_goes_through_none_of_them(tmp_path):
    trainer = trainer_of(Trainer, tmp_path)
    trainer.train()
    assert direct() == set(HOOKS)


def test_a_replaced_name_alone_is_called(tmp_path):
    class Script(Trainer):
        def _prepare_inputs(self, inputs):
            self.calls = getattr(self, "calls", 0) + 1
            return super()._prepare_inputs(inputs)

    trainer = trainer_of(Script, tmp_path)
    trainer.train()
    assert trainer.calls == 1 and direct() == set(HOOKS) - {"_prepare_inputs"}


@pytest.mark.parametrize("where", ["instance", "class", "Trainer"])
def test_what_replaces_a_method_of_a_trainer_already_made_is_called_by_the_next_run(where, tmp_path, monkeypatch):
    class Script(Trainer):
        pass

    trainer, found = trainer_of(Script, tmp_path), []
    owner = {"instance": trainer, "class": Script, "Trainer": Trainer}[where]
    monkeypatch.setattr(owner, "_get_train_sampler", lambda *args: found.append("train"), raising=False)
    monkeypatch.setattr(owner, "_get_eval_sampler", lambda *args: found.append("eval"), raising=False)
    trainer.train()
    trainer.evaluate()
    assert found == ["train", "eval"]


def test_a_public_method_still_comes_before_the_old_name(tmp_path):
    order = []

    class Library(Trainer):
        def prepare_inputs(self, inputs):
            order.append("public")
            return super().prepare_inputs(inputs)

    class Script(Library):
        def _prepare_inputs(self, inputs):
            order.append("old")
            return super()._prepare_inputs(inputs)

    trainer_of(Script, tmp_path).train()
    assert order == ["public", "old"]


def test_signatures_stay(tmp_path):
    before = {method.__name__: inspect.signature(vars(Trainer)[method.__name__]) for method in HOOKS.values()}
    for name, method in HOOKS.items():
        old = getattr(Trainer, name)
        trainer_of(
            type("Script", (Trainer,), {name: lambda self, *args, old=old, **more: old(self, *args, **more)}), tmp_path
        )
        assert inspect.signature(vars(Trainer)[method.__name__]) == before[method.__name__]
    assert direct() == set()
