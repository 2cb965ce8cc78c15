"""Which strategy a run has, and what a process says of its machine."""

from types import SimpleNamespace

import pytest
import torch

from posttrain.core import Trainer, TrainingArguments
from posttrain.core.distributed import strategies
from posttrain.core.distributed.strategies import DDP, FSDP, DeepSpeed, Distributed, ModelParallel, base, make_strategy
from posttrain.core.errors import ConfigError
from tests import tiny, versions
from tests.contract.trainers import pad


@pytest.mark.parametrize(
    ("bf16", "dtype", "warns"),
    [
        (True, torch.float32, True),
        (False, torch.bfloat16, True),
        (False, torch.float32, False),
    ],
)
def test_bfloat16_on_a_processor_without_its_instructions_is_warned_of(
    bf16, dtype, warns, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(base, "has_bfloat16_instructions", lambda: False)
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, bf16=bf16, max_steps=1, save_strategy="no", report_to="none", disable_tqdm=True
    )
    with caplog.at_level("WARNING", "posttrain"):
        Trainer(tiny.causal_lm().to(dtype), args, pad, tiny.token_rows(8)).train()
    assert caplog.text.count("Set bf16=False") == warns


SHARDED, SPLIT, SLICED = {"fsdp": "full_shard"}, {"tp_size": 2}, {"cp_size": 2}


@pytest.fixture
def chosen(monkeypatch):
    """Names the strategy of a run with some number of processes and these arguments, which is not started."""

    def of(processes, **arguments):
        monkeypatch.setattr(strategies, "start_processes", lambda *args: SimpleNamespace(num_processes=processes))
        for kind in (Distributed, DDP, FSDP, ModelParallel, DeepSpeed):
            monkeypatch.setattr(strategies, kind.__name__, lambda *args, kind=kind: kind.__name__)
        return make_strategy(TrainingArguments("out", use_cpu=True, **arguments))

    return of


needs_plans = pytest.mark.skipif(not versions.IS_CURRENT, reason="needs transformers 5.23")


@pytest.mark.parametrize(
    ("processes", "arguments", "strategy"),
    [
        (1, {}, "Distributed"),
        (1, SHARDED, "Distributed"),
        (2, {}, "DDP"),
        (2, {"parallelism_config": SLICED}, "DDP"),
        (2, SHARDED, "FSDP"),
        (4, SHARDED | {"parallelism_config": SLICED}, "FSDP"),
        pytest.param(2, {"parallelism_config": SPLIT}, "ModelParallel", marks=needs_plans),
        pytest.param(4, {"parallelism_config": SPLIT}, "ModelParallel", marks=needs_plans),
        pytest.param(2, {"parallelism_config": {"ep_size": 2}}, "ModelParallel", marks=needs_plans),
        (2, {"deepspeed": {"zero_optimization": {"stage": 3}}}, "DeepSpeed"),
    ],
)
def test_the_arguments_choose_the_strategy(processes, arguments, strategy, chosen):
    assert chosen(processes, **arguments) == strategy


def test_deepspeed_of_a_launcher_beside_fsdp_is_refused(chosen, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    assert chosen(2) == "DeepSpeed"
    with pytest.raises(ConfigError, match="starts DeepSpeed, and fsdp or parallelism_config divides the model too"):
        chosen(2, **SHARDED)


@pytest.mark.parametrize("strategy", [DDP, FSDP, ModelParallel, DeepSpeed])
def test_a_strategy_adds_no_method_to_the_interface(strategy):
    public = {name for name, value in vars(strategy).items() if callable(value) and not name.startswith("_")}
    assert public and public <= set(dir(Distributed))
