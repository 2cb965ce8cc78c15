"""The schema of a config says what the config takes."""

from __future__ import annotations

import json

from posttrain import cli
from posttrain.cli import parse
from posttrain.cli.method import configs_of
from posttrain.cli.tools.schema import schema_of
from posttrain.core import TrainingArguments, registry


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
    assert {"model_name_or_path", "lora_r", "dataset_mixture", "max_rows"} < set(printed["properties"])
    assert printed["properties"]["max_seq_length"] == {"description": "Now max_length.", "deprecated": True}
    assert printed["additionalProperties"] is False  # an editor marks a misspelled name
    assert cli.main(["schema", "sfd"]) == 2
    assert "sft" in capsys.readouterr().err


def test_it_knows_every_name_that_a_file_may_hold():
    for method in registry.methods().values():
        classes = configs_of(method)
        assert not parse.unknown(classes, dict.fromkeys(schema_of(*classes)["properties"]))
        known = {name for config_class in classes for name in parse._names(config_class)}
        assert known == set(schema_of(*classes)["properties"])
