"""No token, key or password is written anywhere: not in a warning, an error, a log, a file or what a tracker is
given.
"""

import dataclasses
import importlib
import json
import logging
import pkgutil
import sys
import warnings
from dataclasses import dataclass, field

import pytest

import posttrain.core
import posttrain.rl
import posttrain.seq2seq
import posttrain.sft
from posttrain.cli import parse
from posttrain.cli.report import run_record
from posttrain.core import Trainer, TrainerCallback, TrainingArguments
from posttrain.core import config as fields
from posttrain.core.errors import ConfigError
from posttrain.core.fields.old_names import old_names
from posttrain.core.fields.redaction import is_secret, masked, masked_words, redact
from posttrain.core.hub.uploads import _reason
from tests import tiny
from tests.contract.trainers import pad

TOKEN, PASSWORD = "hf_QqWwEeRrTtYyUuIiOo", "correct-horse-battery"
SECRETS = (TOKEN, PASSWORD)
NESTED = {"token": PASSWORD, "headers": {"Authorization": f"Bearer {PASSWORD}"}, "hosts": [{"api_key": PASSWORD}]}
ADDRESS = f"https://somebody:{PASSWORD}@example.org/models?token={PASSWORD}"


def config_classes():
    """Every dataclass of the four packages whose fields a user sets."""
    for package in (posttrain.core, posttrain.sft, posttrain.rl, posttrain.seq2seq):
        for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    waiting, found = [TrainingArguments], []
    while waiting:
        config = waiting.pop()
        if config not in found and config.__module__.startswith("posttrain."):
            found.append(config)
        waiting += config.__subclasses__()
    return sorted(found, key=lambda config: config.__qualname__)


def plain_configs():
    """Config classes without the checks of `TrainingArguments`, which print themselves as any dataclass does."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("posttrain.")]
    classes = {value for module in modules for value in vars(module).values() if isinstance(value, type)}
    ours = {c for c in classes if dataclasses.is_dataclass(c) and not issubclass(c, TrainingArguments)}
    return [c for c in ours if any(isinstance(f.metadata.get("help"), fields.Help) for f in dataclasses.fields(c))]


def texts_of(config, **values):
    """Everything that a config says of itself, and of what is wrong with it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            made = config(**values)
        except ConfigError as error:
            yield str(error) + repr(error)
        except Exception:  # of a check that cannot bear the value: it names no argument of ours
            return
        else:
            yield from (repr(made), str(made), made.to_json_string(), json.dumps(made.to_dict(), default=str))
            yield json.dumps(made.to_sanitized_dict(), default=str)
            yield json.dumps(posttrain.core.hub.card.hyperparameters(made), default=str)
    yield from (str(warning.message) for warning in caught)


@pytest.mark.rotated
@pytest.mark.parametrize("config", config_classes(), ids=lambda config: config.__name__)
def test_no_config_writes_a_secret(config):
    names = [f.name for f in dataclasses.fields(config) if f.init]
    secret = [name for name in (*names, *old_names(config)) if is_secret(name)]
    assert "hub_token" in secret and "push_to_hub_token" in secret
    cases = [{name: TOKEN} for name in secret] + [{name: [PASSWORD]} for name in secret]
    cases += [{"hub_token": PASSWORD, "push_to_hub_token": TOKEN}]
    for name, allowed in fields.field_types(config).items():
        if dict in allowed:
            cases += [{name: NESTED}, {name: json.dumps(NESTED)}, {name: json.dumps(NESTED)[:-1]}]
        if str in allowed or list in allowed:
            cases += [{name: ADDRESS}, {name: [ADDRESS]}]
    assert len(cases) > 20
    for case in cases:
        for text in texts_of(config, **case):
            assert not any(word in text for word in SECRETS), (case, text)


def test_configs_that_are_plain_dataclasses_have_no_field_for_a_secret():
    assert len(plain_configs()) > 3
    for config in plain_configs():
        shown = [f.name for f in dataclasses.fields(config) if f.repr and is_secret(f.name)]
        assert shown == [], config


@dataclass
class Mine(TrainingArguments):
    """A config of a user's own."""

    wandb_api_key: str | None = None
    connection: dict = field(default_factory=dict)
    place: str | None = None


class Tracker(TrainerCallback):
    """What the trackers of transformers send home."""

    def on_train_begin(self, args, state, control, **kwargs):
        self.sent = json.dumps([args.to_dict(), args.to_sanitized_dict()], default=str) + args.to_json_string()


def test_a_run_writes_no_secret_anywhere(tmp_path, caplog, capfd, monkeypatch):
    words = [sys.executable, "train.py", "--hub_token", TOKEN, f"--wandb-api-key={PASSWORD}", f"--place={ADDRESS}"]
    monkeypatch.setattr(sys, "orig_argv", [*words, "--connection", json.dumps(NESTED)])
    secrets = dict(hub_token=TOKEN, wandb_api_key=PASSWORD, connection=NESTED, place=ADDRESS)
    asked = {**secrets, "connection": json.dumps(NESTED)}
    trackers = ["tensorboard"] if importlib.util.find_spec("tensorboard") else "none"
    args = Mine(
        str(tmp_path), max_steps=2, save_steps=1, per_device_train_batch_size=2, use_cpu=True, log_level="debug",
        report_to=trackers, **secrets,
    )  # fmt: skip
    tracker = Tracker()
    caplog.set_level(logging.DEBUG)
    with run_record.asked("sft", asked):
        trainer = Trainer(
            tiny.causal_lm(), args, pad, train_dataset=tiny.token_rows(4), callbacks=[tracker], processing_class=None
        )
        trainer.train()
        trainer.save_model()
        trainer.create_model_card()
        changed = dataclasses.replace(args, wandb_api_key=PASSWORD * 2, connection={"token": TOKEN}, weight_decay=0.1)
        trainer.args = changed
        trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    said = capfd.readouterr()
    texts = {"log": caplog.text, "tracker": tracker.sent, "output": said.out + said.err, "arguments": repr(args)}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    texts |= {str(path): path.read_bytes().decode("latin-1") for path in files}
    assert any(path.name == "run.json" for path in files) and any(path.name == "README.md" for path in files)
    for where, text in texts.items():
        assert not any(word in text for word in SECRETS), where
    start = run_record.read(tmp_path)["starts"][0]
    assert start["asked"]["settings"]["place"].endswith("example.org/models?token=***")
    assert "hub_token" not in start["asked"]["settings"]  # it can be run again: nothing false stands in its place
    assert json.loads(start["asked"]["settings"]["connection"]) == {"headers": {}, "hosts": [{}]}


def test_the_command_line_shows_no_secret_in_what_is_wrong():
    settings = {
        "hub_token": parse.Setting("--hub_token", [TOKEN, PASSWORD]),
        "push_to_hub_token": parse.Setting("run.yaml:3", [PASSWORD]),
        "learning_rate": parse.Setting("run.yaml:4", "much"),
        "lr_scheduler_kwargs": parse.Setting("run.yaml:5", json.dumps(NESTED)[:-1]),
    }
    with pytest.raises(ConfigError) as caught:
        parse.configs([TrainingArguments], settings, [])
    assert "hub_token" in str(caught.value) and "learning_rate='much'" in str(caught.value)
    assert not any(word in str(caught.value) for word in SECRETS)


def test_a_broken_file_is_named_without_its_text(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(f"learning_rate: 1e-3\nhub_token: {PASSWORD}: {TOKEN}\n")
    with pytest.raises(ConfigError, match="line 2") as caught:
        parse.read_file(path, [])
    assert not any(word in str(caught.value) for word in SECRETS)


def test_a_failed_upload_shows_no_secret():
    error = ValueError(f"Illegal header value b'Bearer {PASSWORD}', {TOKEN} and plain-secret")
    assert _reason(error, "plain-secret") == "Illegal header value b'Bearer ***', *** and ***"


@pytest.mark.parametrize(
    "name", ["hub_token", "token", "use_auth_token", "WANDB_API_KEY", "api-key", "aws_secret_access_key", "db_password"]
)
def test_names_of_secrets(name):
    assert is_secret(name) and masked({name: "x"}) == {name: f"<{name.upper()}>"}


@pytest.mark.parametrize(
    "name", ["eos_token", "pad_token", "image_token", "max_tokens", "keys", "include_tokens", "key"]
)
def test_names_that_are_no_secrets(name):
    assert not is_secret(name) and masked({name: "x"}) == {name: "x"}


@pytest.mark.parametrize(
    "text",
    [
        "out/hf_home",
        "s3://bucket/run",
        "git@github.com:a/b",
        "a token of 3 words",
        "sk-learn",
        "loss@step=3",
        "Basic things",
    ],
)
def test_what_is_no_secret_is_left_as_it_is(text):
    assert redact(text) == text


def test_words_of_a_command_line():
    words = ["train.py", "--hub_token", TOKEN, "--lr", "1", f"--api-key={PASSWORD}", ADDRESS, "--x", '{"token": "abc"}']
    assert masked_words(words) == [
        "train.py", "--hub_token", "***", "--lr", "1", "--api-key=***", "https://***@example.org/models?token=***",
        "--x", '{"token": "***"}',
    ]  # fmt: skip
