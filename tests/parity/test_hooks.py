"""Every method that transformers and trl call on their trainers is called here with arguments in the same shape where
a script overrides it, or named with what to override instead.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import sys
import textwrap
from collections import defaultdict

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
transformers = pytest.importorskip("transformers")

import posttrain.core  # noqa: E402
from posttrain.compat.trainer_names import Settable  # noqa: E402
from posttrain.core.training import override_checks  # noqa: E402
from tests import tiny  # noqa: E402
from tests.contract.trainers import pad  # noqa: E402
from tests.parity.test_names import TRAINERS, ours  # noqa: E402

#: Names that scripts give methods of their own, and what cannot be asked to change anything.
LEFT_OUT = {
    "_forward": "a name of many methods", "_tokenize": "a name of many methods", "_shift_right": "a step of a step",
    "_reject_skip_prepare_without_labels": "a check", "_send_telemetry": "there is none",
}  # fmt: skip
#: Called in another way for a reason.
OTHERWISE = {
    "create_scheduler": "with as many arguments as it takes, as both had it",
    "_wrap_model": "an evaluation wraps nothing again",
}


def methods(kind):
    """The names of what `kind` and its bases define as functions."""
    found = {name for base in kind.__mro__ for name, value in vars(base).items()
             if inspect.isfunction(value) or isinstance(value, (staticmethod, classmethod))}  # fmt: skip
    return {name for name in found if not name.startswith("__")}


def calls(library, folder):
    """How the trainer's own code calls each method of transformers' in a run: positional arguments, names of others;
    those that are handed a `Path`; and whether the model is in training mode at each record but the last.
    """
    seen, paths, modes = defaultdict(set), set(), []
    names = [name for name in methods(transformers.Trainer) if inspect.isfunction(getattr(library.Trainer, name, None))]
    home = os.path.dirname(os.path.dirname(inspect.getfile(library.Trainer)))  # compat, too, calls them

    class Traced(library.Trainer):
        pass

    def traced(name):
        def method(self, *args, **kwargs):
            if sys._getframe(1).f_code.co_filename.startswith(home):
                seen[name].add((len(args), frozenset(kwargs)))
                paths.update({name} if any(isinstance(one, os.PathLike) for one in (*args, *kwargs.values())) else ())
                if name == "log" and "train_loss" not in args[0]:  # which comes after whatever was last
                    modes.append(self.model.training)
            return getattr(super(Traced, self), name)(*args, **kwargs)

        return method

    for name in names:
        setattr(Traced, name, traced(name))
    args = library.TrainingArguments(
        str(folder), per_device_train_batch_size=4, max_steps=2, eval_strategy="steps", eval_steps=1, use_cpu=True,
        save_strategy="steps", save_steps=1, load_best_model_at_end=True, metric_for_best_model="a_loss",
        report_to="none", disable_tqdm=True, logging_steps=1, include_num_input_tokens_seen="all",
    )  # fmt: skip
    for resume in (None, str(folder / "checkpoint-1")):
        trainer = Traced(None, args, pad, tiny.token_rows(8), {name: tiny.token_rows(4) for name in "ab"},
                         model_init=lambda: tiny.causal_lm())  # fmt: skip
        trainer.train(resume_from_checkpoint=resume)
    trainer.predict(tiny.token_rows(4))
    return seen, paths, modes


def test_what_transformers_calls_is_called_here_in_the_same_shape_or_named(tmp_path):
    there, of_theirs, their_modes = calls(transformers, tmp_path / "theirs")
    here, of_ours, modes = calls(posttrain.core, tmp_path / "ours")
    assert of_theirs == of_ours == set()
    assert modes == their_modes and {*modes} == {True, False}
    assert len(there) > 40 and len(here) > 25
    assert sorted(set(there) - set(here) - set(override_checks.INSTEAD)) == []
    assert sorted(set(here) & set(override_checks.INSTEAD)) == []
    for name in set(there) & set(here) - set(OTHERWISE):
        most, words = max(n for n, _ in there[name]), frozenset().union(*(names for _, names in there[name]))
        for positional, given in here[name]:
            more = given - words - {"eval_dataset", "metric_key_prefix"}  # as it evaluates one of several sets
            assert positional <= max(most, name == "evaluate") and not more, (name, there[name], here[name])


def test_every_method_of_transformers_is_there_or_named():
    known = methods(posttrain.core.Trainer) | set(override_checks.INSTEAD)
    assert sorted(methods(transformers.Trainer) - known) == []


@pytest.mark.parametrize("name", TRAINERS)
def test_every_method_of_trl_is_there_or_named(name):
    pytest.importorskip("trl")
    theirs = getattr(importlib.import_module(TRAINERS[name]), f"{name}Trainer")
    kind = ours(f"{name}Trainer")
    known = methods(kind) | set(override_checks.INSTEAD | getattr(kind, "INSTEAD", {})) | set(LEFT_OUT)
    assert sorted(methods(theirs) - known) == []


def assigned(kind):
    """The attributes that methods of `kind` and of its bases within transformers and trl set on a trainer."""
    own = [base for base in kind.__mro__ if base.__module__.split(".")[0] in ("transformers", "trl")]
    trees = (ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))) for base in own)
    is_set = (node for tree in trees for node in tree if isinstance(node, ast.Attribute))
    return {node.attr for node in is_set if isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"}


#: What is made of the arguments here: setting it would change nothing.
MADE_OF_ARGUMENTS = {"generation_config", "entropy_coef", "hub_model_id"}


@pytest.mark.parametrize("name", ["", *TRAINERS])
def test_what_a_subclass_sets_on_a_trainer_of_theirs_can_be_set_on_ours(name):
    pytest.importorskip("trl")
    theirs = getattr(importlib.import_module(TRAINERS[name]), f"{name}Trainer") if name else transformers.Trainer
    fixed = {
        attribute
        for attribute in assigned(theirs) - MADE_OF_ARGUMENTS
        if isinstance(found := inspect.getattr_static(ours(f"{name}Trainer"), attribute, None), property)
        and found.fset is None
        and not isinstance(found, Settable)
    }
    assert fixed == set()
