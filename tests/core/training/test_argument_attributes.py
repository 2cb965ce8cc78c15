"""Attributes of a trainer that are fields of its arguments."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from posttrain.compat.trainer_names import reads_from_arguments
from posttrain.rl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from tests import tiny


@reads_from_arguments("beta", epsilon_low="epsilon")
class Small:
    def __init__(self, **args):
        self.args = SimpleNamespace(**args)


def test_an_attribute_and_its_argument_never_disagree():
    trainer = Small(beta=0.1, epsilon=0.2)
    assert (trainer.beta, trainer.epsilon_low) == (0.1, 0.2)
    trainer.args.beta = 0.3
    trainer.epsilon_low = 0.4
    assert (trainer.beta, trainer.args.epsilon) == (0.3, 0.4)
    with pytest.raises(AttributeError, match="missing"):
        reads_from_arguments("missing")(Small)().missing  # noqa: B018


@pytest.mark.parametrize(("high", "expected"), [(None, 0.2), (0.28, 0.28)])
@pytest.mark.parametrize(("trainer_class", "config"), [(GRPOTrainer, GRPOConfig), (RLOOTrainer, RLOOConfig)])
def test_a_subclass_reads_both_ends_of_the_clip(trainer_class, config, high, expected, tmp_path):
    args = config(
        str(tmp_path), report_to="none", use_cpu=True, num_generations=2, per_device_train_batch_size=2, epsilon=0.2,
        epsilon_high=high, max_completion_length=3,
    )  # fmt: skip
    trainer = trainer_class(
        tiny.causal_lm(), lambda completions, **_: [0.0] * len(completions), args, [{"prompt": "a"}] * 2,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    assert (trainer.epsilon_low, trainer.epsilon_high, trainer.max_completion_length) == (0.2, expected, 3)


def test_the_end_tokens_of_the_model_come_first_and_in_its_order(tmp_path):
    model = tiny.causal_lm()
    model.generation_config.eos_token_id = [3, 2]
    args = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, num_generations=2, per_device_train_batch_size=2)
    trainer = GRPOTrainer(
        model, lambda completions, **_: [0.0] * len(completions), args, [{"prompt": "a"}] * 2,
        processing_class=tiny.tokenizer(),
    )  # fmt: skip
    assert trainer.generation_config.eos_token_id == [3, 2, tiny.tokenizer().eos_token_id]
    assert torch.tensor(trainer.sampling().eos_token_ids).unique().numel() == 3


def test_options_of_sampling_can_be_read_where_nothing_is_drawn(tmp_path):
    options = {"num_generations": 2, "per_device_train_batch_size": 2, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    greedy = {"generation_kwargs": {"do_sample": False, "repetition_penalty": 1.2}}
    args = GRPOConfig(str(tmp_path), report_to="none", use_cpu=True, **options, **greedy)
    reward = lambda completions, **_: [0.0] * len(completions)  # noqa: E731
    trainer = GRPOTrainer(tiny.causal_lm(), reward, args, [{"prompt": "a"}] * 2, processing_class=tiny.tokenizer())
    config = trainer.generation_config
    assert (config.do_sample, config.temperature, config.top_p, config.top_k) == (False, 0.8, 0.9, 40)
    assert config.repetition_penalty == 1.2 and trainer.sampling().temperature == 0


def test_a_stand_in_can_be_made_of_a_trainer_class():
    stand_in = Mock(spec=GRPOTrainer)
    assert not hasattr(stand_in, "no_such_name")
    assert hasattr(stand_in, "compute_loss") and isinstance(stand_in, GRPOTrainer)
