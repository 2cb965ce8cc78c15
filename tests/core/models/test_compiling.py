"""`torch_compile`: the layers run compiled, and nothing else changes: losses, checkpoints, generation, collectives."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed
from safetensors.torch import load_file
from torch import nn

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.distributed.strategies.ddp import DDP
from posttrain.core.models.compiling import compiled, compiled_parts, uncompiled
from tests import tiny
from tests.contract.trainers import TRAINERS, arguments, pad, weights


@pytest.fixture
def counters():
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    yield counters
    torch._dynamo.reset()


def losses(trainer):
    return [record["loss"] for record in trainer.state.log_history if "loss" in record]


def small(folder, **changes):
    options = {"per_device_train_batch_size": 4, "max_steps": 2, "save_strategy": "steps", "save_steps": 2} | changes
    model = tiny.causal_lm(num_hidden_layers=1)
    return Trainer(model, arguments(TrainingArguments, folder, **options), pad, tiny.token_rows(16, min_length=8))


@pytest.mark.slow
def test_the_default_backend_gives_the_losses_and_the_checkpoint_of_the_uncompiled_run(counters, tmp_path):
    plain, fast = small(tmp_path / "plain"), small(tmp_path / "fast", torch_compile=True)
    plain.train()
    assert not counters["stats"]
    fast.train()
    assert fast.args.torch_compile_backend == "inductor" and counters["inductor"]
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert losses(fast) == pytest.approx(losses(plain), rel=1e-5)
    one, other = (load_file(tmp_path / name / "checkpoint-2" / "model.safetensors") for name in ("plain", "fast"))
    assert one.keys() == other.keys() and not any("_orig_mod" in name for name in other)
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=0, atol=1e-5, msg=name)
    assert all(module._compiled_call_impl is None for module in fast.model.modules())


def test_all_layers_share_one_graph_for_all_lengths(counters):
    model = tiny.causal_lm(num_hidden_layers=6).train()
    with compiled(model, "eager") as parts:
        assert parts == list(model.model.layers)
        for rows, length in ((3, 9), (4, 17), (2, 30)):
            ids = torch.randint(4, 300, (rows, length))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


def test_what_changes_from_call_to_call_is_not_compiled(counters):
    model = tiny.causal_lm().eval()
    ids = torch.randint(4, 300, (1, 5))
    expected = model.generate(ids, max_new_tokens=4, do_sample=False)
    with compiled(model, "eager"):
        assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=True), expected)
        assert not counters["stats"]
        with uncompiled():
            model(input_ids=ids, use_cache=False)
        assert not counters["stats"]
        model(input_ids=ids, use_cache=False)
        assert counters["stats"]["unique_graphs"] == 1


def test_a_model_without_layers_is_compiled_whole_and_one_that_is_compiled_stays_as_it_is(counters, tmp_path):
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert compiled_parts(model) == [model]
    with compiled(model, "eager"):
        model(torch.ones(3, 2))
    assert counters["stats"]["unique_graphs"] == 1 and model._compiled_call_impl is None
    with compiled(torch.compile(model, backend="eager")) as parts:
        assert parts == []
    adapted = TRAINERS["sft-lora"](tmp_path).model
    assert len(compiled_parts(adapted)) == 2


@pytest.mark.long
@pytest.mark.parametrize("name", ["sft-lora", "dpo"])
def test_trainers_that_take_the_loss_in_the_head_train_compiled(name, counters, tmp_path):
    on = {"torch_compile": True, "torch_compile_backend": "eager"}
    runs = [TRAINERS[name](tmp_path / str(len(changes)), max_steps=2, **changes) for changes in ({}, on)]
    for trainer in runs:
        trainer.train()
    assert counters["stats"]["unique_graphs"] >= 1 and not counters["graph_break"]
    assert losses(runs[1]) == pytest.approx(losses(runs[0]), rel=1e-5)


@pytest.mark.slow
def test_dropout_draws_as_it_does_uncompiled_and_a_resumed_run_is_the_whole_one(counters, tmp_path):
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager", "max_steps": 3, "save_strategy": "steps"}
    options |= {"save_steps": 2, "activation_checkpointing": True}
    whole = TRAINERS["dropout"](tmp_path, **options)
    torch.manual_seed(3)
    whole.train()
    plain = TRAINERS["dropout"](tmp_path / "plain", max_steps=3)
    torch.manual_seed(3)
    plain.train()
    assert losses(whole) == pytest.approx(losses(plain), rel=1e-5)
    torch._dynamo.reset()
    again = TRAINERS["dropout"](tmp_path, **options)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for key, value in weights(whole).items():
        assert torch.equal(value, weights(again)[key]), key


@pytest.mark.parametrize("wrapper", ["layers in place", "a compiled DDP"])
def test_gradients_of_a_compiled_model_are_averaged_once_for_each_update(wrapper, tmp_path, counters):
    trainer, reduced = small(tmp_path), []
    strategy: Any = SimpleNamespace(args=trainer.args)  # that of several processes, of which this is one

    def count(state, bucket):
        reduced.append(bucket.index())
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        ddp = nn.parallel.DistributedDataParallel(trainer.model)
        ddp.register_comm_hook(None, count)
        model = torch.compile(ddp, backend="eager") if wrapper != "layers in place" else ddp
        batches = [pad(tiny.token_rows(2, seed=seed)) for seed in range(4)]
        inside = compiled(trainer.model, "eager") if wrapper == "layers in place" else uncompiled()
        with inside:
            for _ in range(2):
                reduced.clear()
                for number, batch in enumerate(batches, start=1):
                    with DDP.sync_gradients(strategy, model, when=number == len(batches)):
                        model(**batch, use_cache=False).loss.backward()
                assert len(reduced) == len(set(reduced)) >= 1
    finally:
        torch.distributed.destroy_process_group()
