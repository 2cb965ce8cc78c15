"""One field is written once: default, help and bounds; everything wrong is reported together."""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import yaml

from posttrain.core import TrainingArguments
from posttrain.core.config import ConfigMeta, JSONObject, bounds_of, element_type, opt, other_default, validate
from posttrain.core.errors import ConfigError, did_you_mean
from posttrain.core.fields.choices import Choice
from posttrain.core.fields.old_names import Removed, Renamed, aliases


class Colour(enum.StrEnum):
    RED = "red"


@dataclass
class Size:
    """A group of fields."""

    size: int = opt(4, "How big it is.", min=1, max=10)
    share: float | None = opt(0.5, "How much of it.", above=0, below=1)
    order: list[str] = opt([], "In which order.")

    def _normalize(self) -> None:
        if self.size == 2:
            self.share = 0.25

    def _problems(self) -> Iterator[str]:
        if self.size > 5 and self.share is None:
            yield "size above 5 needs a share"


@dataclass
class Box(Size, metaclass=ConfigMeta):
    """Size and more."""

    OLD_NAMES = {
        "magnitude": Renamed("size", lambda text: int(text)),
        "lid": Removed("boxes are open", (None, False)),
        "label": Removed("nobody reads it", None),
        "wheels": Removed("not yet", (None, 0), says_nothing=(None, 0)),
    }

    colour: str = opt("red", "What it looks like.", choices=("red", "blue"), aliases=("color",))
    options: dict | str | None = opt(None, "More.")
    weights: list[float] | None = opt(None, "One for each side.")
    mode: Literal["a", 1] = opt("a", "Which.")
    anything: Any = opt(None, "Whatever.")

    def __post_init__(self) -> None:
        validate(self)


def problems_of(**kwargs: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        Box(**kwargs)
    return caught.value.problems


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"size": 0}, "size=0 must be >= 1"),
        ({"size": 11}, "size=11 must be <= 10"),
        ({"size": 2.5}, "size=2.5 must be of type int"),
        ({"size": True}, "size=True must be of type int"),
        ({"size": None}, "size=None must be of type int"),
        ({"share": 0}, "share=0 must be > 0"),
        ({"share": 1}, "share=1 must be < 1"),
        ({"share": float("nan")}, "share is NaN; give a number"),
        ({"share": "x"}, "share='x' must be of type float"),
        ({"order": "ab"}, "order='ab' must be of type list"),
        ({"colour": "rad"}, "colour='rad' is not one of red, blue, did you mean 'red'?"),
        ({"colour": 3}, "colour=3 must be of type str"),
        ({"size": 6, "share": None}, "size above 5 needs a share"),
        ({"siize": 3}, "unknown argument 'siize', did you mean 'size'?"),
        ({"zzz": 3}, "unknown argument 'zzz'"),
        ({"lid": True}, "lid=True has no effect: boxes are open"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_is_allowed(kwargs, message):
    assert problems_of(**kwargs) == [message]


def test_everything_wrong_is_reported_at_once():
    found = problems_of(size="x", share=2.0, colour="rad", siize=1, lid=True, options="{broken")
    assert len(found) == 6
    assert {text.split("=")[0].split()[0] for text in found} == {"size", "share", "colour", "unknown", "lid", "options"}


def test_a_config_error_is_caught_as_value_error_and_as_type_error_and_survives_pickling():
    for kind in (ValueError, TypeError):
        with pytest.raises(kind):
            Box(size=0)
    error = ConfigError("Box", ["one", "two"])
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == "Box: \n  - one\n  - two"


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("size", np.int64(3), 3),
        ("share", np.float32(0.25), 0.25),
        ("colour", Colour.RED, "red"),
        ("order", ("a", "b"), ["a", "b"]),
        ("options", '{"a": 1e-5}', {"a": 1e-5}),
        ("options", "folder/file.json", "folder/file.json"),
        ("options", Path("folder/file.json"), "folder/file.json"),
        ("anything", 7, 7),
    ],
)
def test_values_are_kept_in_their_plain_form(name, given, kept):
    value = getattr(Box(**{name: given}), name)
    assert value == kept
    assert isinstance(value, type(kept)) and type(value).__module__ != "numpy"


def test_a_choice_is_a_string_that_also_answers_as_an_enum():
    colour = Box(colour="blue").colour
    assert colour == "blue" and colour.value == "blue" and f"{colour}" == "blue"
    assert {"blue": 1}[colour] == 1 and type(colour.value) is str
    assert pickle.loads(pickle.dumps(colour)) == Choice("blue")


def test_what_follows_from_other_fields_is_filled_in():
    assert Box(size=2).share == 0.25


def test_defaults_that_can_change_are_not_shared():
    Box().order.append("x")
    assert Box().order == []


def test_an_alias_is_another_name_for_its_field():
    assert aliases(Box) == {"color": "colour"}
    with pytest.warns(FutureWarning, match="color='blue' is now colour='blue'"):
        assert Box(color="blue").colour == "blue"


def test_old_names_are_translated_with_a_warning():
    with pytest.warns(FutureWarning, match="magnitude='3' is now size=3"):
        assert Box(magnitude="3").size == 3
    with pytest.warns(FutureWarning, match="magnitude is now size"):
        assert Box(magnitude=None, size=7).size == 7
    with pytest.warns(FutureWarning, match="lid has no effect: boxes are open"):
        Box(lid=False)
    with pytest.warns(FutureWarning, match="label has no effect"):
        Box(label="any")


def test_a_name_that_is_still_to_come_is_accepted_silently_when_it_asks_for_nothing(recwarn):
    Box(wheels=0)
    assert not recwarn
    assert problems_of(wheels=4) == ["wheels=4 has no effect: not yet"]


def test_an_old_name_and_its_new_one_may_not_disagree():
    assert problems_of(magnitude="3", size=4) == [
        "magnitude='3' and size=4 are both given, and magnitude is the old name of size; keep size"
    ]
    with pytest.warns(FutureWarning):
        assert Box(magnitude="3", size=3).size == 3


def test_the_warning_points_at_the_caller():
    with pytest.warns(FutureWarning) as caught:
        Box(color="blue")
    assert caught[0].filename == __file__


def test_a_subclass_inherits_checks_and_old_names():
    @dataclass
    class Crate(Box):
        handles: int = opt(2, "To hold it.", min=0)

        def _problems(self) -> Iterator[str]:
            if self.handles == 1:
                yield "one handle is not enough"

    with pytest.raises(ConfigError) as caught:
        Crate(size=99, handles=1, lid=True)
    assert caught.value.problems == [
        "lid=True has no effect: boxes are open",
        "size=99 must be <= 10",
        "one handle is not enough",
    ]


def test_annotations_that_only_a_function_can_see_do_not_hide_the_others():
    class Local:
        pass

    @dataclass
    class Inner(Box):
        local: Local | None = None
        depth: int = opt(1, "How deep.", min=1)

    assert Inner(local=Local()).depth == 1
    with pytest.raises(ConfigError, match="depth='x' must be of type int"):
        Inner(depth="x")
    with pytest.raises(ConfigError, match="size='x' must be of type int"):
        Inner(size="x")


def test_an_error_in_a_groups_own_code_is_not_swallowed():
    @dataclass
    class Broken(Box):
        def _normalize(self) -> None:
            self.size.append(1)

    with pytest.raises(AttributeError):
        Broken()


def test_elements_of_a_list_have_a_type():
    assert element_type(Box, "weights") is float
    assert element_type(Box, "order") is str
    assert element_type(Box, "size") is str


def test_an_old_name_of_a_field_is_read_as_it_was_set():
    with pytest.warns(FutureWarning):
        args = TrainingArguments("out", evaluation_strategy="epoch")
    assert args.evaluation_strategy == args.eval_strategy == "epoch"
    args.eval_strategy = "no"
    assert args.evaluation_strategy == "no"
    with pytest.raises(AttributeError, match="'TrainingArguments' object has no attribute 'evaluation_strategies'"):
        args.evaluation_strategies  # noqa: B018
    assert copy.deepcopy(args) == args and not hasattr(args, "no_such_argument")


def test_a_config_with_an_init_of_its_own_takes_its_arguments_and_ours():
    class Distilling(TrainingArguments):
        def __init__(self, *args, alpha=0.5, **kwargs):
            super().__init__(*args, **kwargs)
            self.alpha = alpha

    class Popping(TrainingArguments):
        def __init__(self, *args, **kwargs):
            self.alpha = kwargs.pop("alpha")
            super().__init__(*args, **kwargs)

    for kind in (Distilling, Popping):
        with pytest.warns(FutureWarning, match="evaluation_strategy"):
            args = kind("out", alpha=0.3, evaluation_strategy="epoch", learning_rate=1e-3)
        assert (args.alpha, args.eval_strategy, args.learning_rate) == (0.3, "epoch", 1e-3)
        assert copy.deepcopy(args).alpha == 0.3
        with pytest.raises(ConfigError, match="'lerning_rate', did you mean 'learning_rate'"):
            kind("out", alpha=0.3, lerning_rate=1e-3)
        with pytest.raises(ConfigError, match="learning_rate=-1"):
            kind("out", alpha=0.3, learning_rate=-1)


@dataclass
class Crate(Box):
    """A box of another size."""

    size: int = other_default(Box, "size", 7)
    more: JSONObject = opt(None, "More of it.")


def test_a_field_with_another_default_has_the_help_and_the_bounds_of_the_first():
    mine, first = Crate.__dataclass_fields__["size"], Box.__dataclass_fields__["size"]
    assert Crate().size == 7 and mine.metadata["help"] == "How big it is." and bounds_of(mine) == bounds_of(first)
    with pytest.raises(ConfigError, match="size=11 must be <= 10"):
        Crate(size=11)


def test_text_where_a_json_object_is_wanted_is_refused_by_name():
    assert Crate(more='{"a": 1}').more == {"a": 1}
    with pytest.raises(ConfigError, match="more='a' is not a JSON object"):
        Crate(more="a")


def test_the_usual_short_names_of_the_command_line_lead_to_the_long_ones():
    known = ["check_saved_model", "model_init_kwargs", "model_name_or_path", "dataset_name", "shuffle_dataset"]
    assert did_you_mean("model", known) == ", did you mean 'model_name_or_path'?"
    assert did_you_mean("dataset", known) == ", did you mean 'dataset_name'?"


def test_a_number_that_yaml_reads_as_a_text_is_explained():
    read = yaml.safe_load("learning_rate: 2e-5")
    with pytest.raises(ConfigError, match=r"learning_rate='2e-5' must be of type float; YAML reads 2\.0e-5"):
        TrainingArguments("out", **read)
    with pytest.raises(ConfigError, match="must be of type float$"):
        TrainingArguments("out", learning_rate="fast")
    assert TrainingArguments("out", **yaml.safe_load("learning_rate: 2.0e-5")).learning_rate == 2e-5


def test_the_arguments_of_a_class_show_in_its_signature():
    """Scripts pick by it what they hand on, and editors show it."""

    @dataclasses.dataclass
    class Mine(TrainingArguments):
        own: int = 0

    for cls in (TrainingArguments, Mine):
        shown = inspect.signature(cls).parameters
        assert list(shown) == [field.name for field in dataclasses.fields(cls) if field.init]
        assert shown["learning_rate"].default == 5e-5 and shown["output_dir"].default is None
    given = {"output_dir": "out", "learning_rate": 1e-3, "own": 3, "of_another_program": 1}
    made = Mine(**{name: value for name, value in given.items() if name in inspect.signature(Mine).parameters})
    assert (made.output_dir, made.learning_rate, made.own) == ("out", 1e-3, 3)
