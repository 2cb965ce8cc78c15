"""The rows of a run come in the order in which transformers' Trainer reads them, for the same seed."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from posttrain.core.data import pipeline
from posttrain.core.data.pipeline import DataArguments, Loader, make_train_sampler
from posttrain.core.data.samplers import LengthGroupedSampler
from tests import tiny


class Recorder(nn.Module):
    """Keeps the rows it is shown in training."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.zeros(())), []

    def forward(self, x, labels=None):
        if self.training:
            self.seen.append(x.tolist())
        return {"loss": self.weight * x.sum()}


@pytest.mark.parametrize("settings", [
    {"seed": 7},
    {"seed": 7, "data_seed": 3},
    {"seed": 7, "dataloader_drop_last": True},
    {"seed": 7, "train_sampling_strategy": "sequential"},
], ids=str)  # fmt: skip
def test_every_epoch_has_the_order_of_transformers(tmp_path, settings):
    rows = [{"x": i} for i in range(23)]
    args = transformers.TrainingArguments(
        str(tmp_path), num_train_epochs=3, per_device_train_batch_size=4, report_to=[], use_cpu=True,
        save_strategy="no", disable_tqdm=True, **settings,
    )  # fmt: skip
    model = Recorder()
    transformers.Trainer(model, args, train_dataset=rows).train()

    seed = settings.get("data_seed", settings["seed"])
    sampler = make_train_sampler(rows, strategy=settings.get("train_sampling_strategy", "random"), seed=seed)
    ours = DataArguments(dataloader_drop_last=settings.get("dataloader_drop_last", False))
    vars(ours).update(per_device_train_batch_size=4, seed=seed)
    loader = tiny.build_loader(rows, True, ours, pipeline.default_collator(), sampler)
    seen = []
    for epoch in range(3):
        loader.set_epoch(epoch)
        seen += [batch["x"].tolist() for batch in loader]
    assert seen == model.seen


@pytest.mark.parametrize("num_rows", [1, 7, 40, 333])
def test_grouping_by_length_makes_the_order_of_transformers_from_the_same_random_numbers(num_rows):
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = torch.randperm(1000, generator=torch.Generator().manual_seed(1))[:num_rows].tolist()
    sampler = LengthGroupedSampler(lengths, batch_size=4, seed=5)
    sampler.set_epoch(2)
    assert list(sampler) == get_length_grouped_indices(lengths, 4, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("rank", [0, 1])
def test_two_processes_get_the_batches_that_accelerate_deals(rank):
    from accelerate.data_loader import prepare_data_loader
    from torch.utils.data import DataLoader

    theirs = prepare_data_loader(
        DataLoader(range(24), batch_size=3, collate_fn=list), num_processes=2, process_index=rank
    )
    assert list(Loader(range(24), batch_size=3, collate_fn=list, rank=rank, world_size=2)) == list(theirs)
