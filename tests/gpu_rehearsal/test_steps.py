"""Micro-batches of one shape are the same operations, as a CUDA graph of one would hold them for the others."""

import pytest
import torch
from datasets import Dataset

from posttrain.core import Trainer, TrainingArguments
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import arguments
from tests.gpu_rehearsal.recorded import Recorded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there: tests/gpu")

OPTIONS = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "max_steps": 4, "logging_steps": 100,
    "eval_strategy": "no", "save_strategy": "no", "use_cpu": False, "bf16": False,
}  # fmt: skip


def collate(rows):
    ids = torch.tensor([row["input_ids"] for row in rows])
    return {"input_ids": ids, "labels": ids.clone(), "attention_mask": torch.ones_like(ids)}


def make(kind, folder, **options):
    ids = torch.randint(4, 384, (64, 16), generator=torch.Generator().manual_seed(0)).tolist()
    rows, options = Dataset.from_dict({"input_ids": ids}), OPTIONS | options
    if kind == "causal-lm":
        args = arguments(TrainingArguments, folder, **options)
        return Trainer(tiny.causal_lm(), args, train_dataset=rows, data_collator=collate)
    args = arguments(SFTConfig, folder, max_length=16, **options)
    return SFTTrainer(tiny.causal_lm(), args, train_dataset=rows, processing_class=tiny.tokenizer())


def renamed(tape):
    """Each address by the number of the operation that first has it."""
    names = {}

    def name(value):
        if isinstance(value, tuple) and value and value[0] == "at":
            return "at", names.setdefault(value[1], len(names))
        if isinstance(value, (list, tuple)):
            return type(value)(map(name, value)) if not hasattr(value, "_fields") else value
        return {key: name(one) for key, one in value.items()} if isinstance(value, dict) else value

    return [name(operation) for operation in tape]


@pytest.mark.parametrize("options", [{}, {"gradient_checkpointing": True}], ids=["kept", "recomputed"])
@pytest.mark.parametrize("kind", ["causal-lm", "sft"])
def test_micro_batches_of_one_shape_are_the_same_operations_without_a_look_or_a_new_stream(kind, options, tmp_path):
    tapes, weights = [], []
    with Recorded() as gpu:
        trainer = make(kind, tmp_path, **{"gradient_checkpointing": False} | options)
        step = trainer.training_step

        def training_step(*args):
            waits, streams = len(gpu.waits), len(gpu.order._streams)
            gpu.begin()
            loss = step(*args)
            tapes.append(renamed(gpu.tape))
            gpu.tape = None
            weights.append([parameter.data_ptr() for parameter in trainer.model.parameters()])
            if len(tapes) > 1:  # the first compares the loss with that of a part of its rows
                assert len(gpu.waits) == waits and len(gpu.order._streams) == streams
            return loss

        trainer.training_step = training_step
        trainer.train()
    assert len(tapes) == 8 and len(tapes[2]) > 100 and all(one == weights[0] for one in weights)
    for number, tape in enumerate(tapes[4:], start=4):  # the first of a window makes gradients, the second adds to them
        expected = tapes[2 + number % 2]
        assert len(tape) == len(expected)
        for place, (one, other) in enumerate(zip(expected, tape, strict=True)):
            assert one == other, f"operation {place} of micro-batch {number}"
