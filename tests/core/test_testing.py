"""What users get to test their own trainers with."""

import pytest
import torch
from datasets import Dataset

from posttrain.core import Trainer, TrainingArguments, testing
from tests import tiny
from tests.contract.trainers import pad


def maker(trainer_class, max_steps=6, rows=None):
    def make(folder):
        args = TrainingArguments(
            folder, max_steps=max_steps, per_device_train_batch_size=2, use_cpu=True, report_to="none",
            disable_tqdm=True, logging_steps=1,
        )  # fmt: skip
        given = tiny.token_rows(9) if rows is None else rows()
        return trainer_class(testing.causal_lm(), args, data_collator=pad, train_dataset=given)

    return make


class Forgetful(Trainer):
    """Weighs each loss by how often it was called, and saves that nowhere."""

    calls = 0

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        self.calls += 1
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch) * (1 + 0.1 * self.calls)


def test_a_trainer_that_keeps_all_its_state_resumes_and_one_that_does_not_is_told_where(tmp_path):
    testing.assert_resumes(maker(Trainer), tmp_path / "whole")
    with pytest.raises(AssertionError, match=r"The resumed run differs\. weights: .* by up to .*state_dict"):
        testing.assert_resumes(maker(Forgetful), tmp_path / "forgetful")


def test_a_stream_of_several_shards_resumes(tmp_path):
    def shards():
        return Dataset.from_list(tiny.token_rows(24)).to_iterable_dataset(num_shards=4)

    testing.assert_resumes(maker(Trainer, rows=shards), tmp_path)


def test_a_run_without_a_step_to_resume_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="no optimizer step after step 3"):
        testing.assert_resumes(maker(Trainer, max_steps=3), tmp_path)


def test_models_are_the_same_each_time():
    for make in (testing.causal_lm, testing.classifier, testing.seq2seq_lm):
        for one, other in zip(make().parameters(), make().parameters(), strict=True):
            assert torch.equal(one, other)
