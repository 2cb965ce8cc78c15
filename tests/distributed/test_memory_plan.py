"""The memory plan of a divided model: what it counts without processes is what each of several processes holds."""

import pytest

from posttrain.core.tools import memory_mesh, memory_plan
from tests import tiny
from tests.core.tools.test_memory_plan import WIDTH, a_run, workload
from tests.distributed import jobs

SHARDED = {"fsdp": "full_shard"}
CASES = {
    "2 copies": (2, {}),
    "2 shards": (2, SHARDED),
    "2 shards, kept gathered": (2, {"fsdp": "shard_grad_op", "activation_checkpointing": False}),
    "2 shards, accumulating": (2, SHARDED | {"gradient_accumulation_steps": 2}),
    "2 shards, bfloat16": (2, SHARDED | {"bf16": True}),
    "2 slices of a row": (2, SHARDED | {"parallelism_config": {"cp_size": 2}, "activation_checkpointing": False}),
    "4 shards": (4, SHARDED),
    "4: 2 x 2 slices": (4, SHARDED | {"parallelism_config": {"cp_size": 2}}),
}


@pytest.fixture(scope="session")
def held(shared):
    def make(folder):
        tiny.causal_lm(**WIDTH).save_pretrained(folder / "model")
        tiny.tokenizer().save_pretrained(folder / "model")
        for processes in (2, 4):
            work = [
                [name, "memory", {"out": str(folder / name), "folder": str(folder / "model")} | changes]
                for name, (number, changes) in CASES.items()
                if number == processes
            ]
            jobs.do(processes, work, folder)

    return jobs.once(shared, "memory", make)


@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_each_process_holds(name, held, tmp_path):
    processes, changes = CASES[name]
    with memory_mesh.imagined(processes):
        run = a_run(str(held / "model"), tmp_path, **changes)
        plan = memory_plan.measure(run, workload(run))
    real = jobs.result(held, name)
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(plan, kind) == pytest.approx(max(one[kind] for one in real), rel=0.02), kind
    assert plan.peak == pytest.approx(max(one["peak"] for one in real), rel=0.1)
