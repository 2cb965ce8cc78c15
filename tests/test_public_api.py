"""The names, signatures, config fields and defaults that users see change only on purpose."""

import difflib

from transformers import HfArgumentParser

from posttrain.core import TrainingArguments
from tests import public_api


def test_the_public_names_are_those_on_record():
    recorded, found = public_api.RECORD.read_text(encoding="utf-8").splitlines(), public_api.lines()
    changes = list(difflib.unified_diff(recorded, found, "recorded", "found", lineterm="", n=0))
    assert changes == [], (
        "The public API has changed. If that is meant, record it with `python -m tests.public_api --write` and add a "
        "line to CHANGELOG.md."
    )


def test_reading_arguments_from_a_command_line_leaves_the_record_as_it_is():
    HfArgumentParser(TrainingArguments)  # evaluates the annotations of the fields in place
    assert "posttrain.core.TrainingArguments.learning_rate: float = 5e-05" in public_api.lines()


def test_the_record_covers_every_face():
    recorded = public_api.RECORD.read_text(encoding="utf-8").splitlines()
    assert [face for face in public_api.FACES if not any(line.startswith(face + ".") for line in recorded)] == []
    assert any(line.startswith("posttrain.core.TrainingArguments.learning_rate: ") for line in recorded)
    assert any(line.startswith("posttrain.rl.GRPOTrainer.__init__(") for line in recorded)
