"""The schema of a config says what the config takes."""

from __future__ import annotations

import json

from posttrain.core import TrainingArguments, cli
from posttrain.core.tools.schema import schema_of


def test_types_bounds_choices_and_defaults_are_those_of_the_fields():
    found = schema_of(TrainingArguments)
    assert found["type"] == "object" and found["title"] == "TrainingArguments"
    fields = found["properties"]
    assert fields["learning_rate"]["type"] == "number" and fields["learning_rate"]["minimum"] == 0
    assert fields["per_device_train_batch_size"]["default"] == 8
    assert "integer" in fields["per_device_train_batch_size"]["type"]
    assert "null" in fields["output_dir"]["type"] and fields["learning_rate"]["description"].endswith(".")
    json.dumps(found)


def test_the_command_prints_it_and_names_the_methods(capsys):
    assert cli.main(["schema", "sft"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["title"] == "SFTConfig" and "packing" in printed["properties"]
    assert cli.main(["schema", "sfd"]) == 2
    assert "sft" in capsys.readouterr().err
