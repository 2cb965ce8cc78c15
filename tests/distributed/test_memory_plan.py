"""The memory plan of a divided model: what it counts without processes is what each of several processes holds."""

import pytest

from posttrain.cli.tools import memory_mesh, memory_plan
from tests import rotation, tiny
from tests.core.cli.tools.test_memory_plan import MIXTURE, WIDTH, a_run, workload
from tests.distributed import jobs

SHARDED = {"fsdp": "full_shard"}
# What processes exchange is in one step or another still held by a thread of gloo: the lowest peak of five counts.
SPLIT = {"parallelism_config": {"tp_size": 2}, "max_steps": 6}
EXPERTS = {"parallelism_config": {"ep_size": 2}, "max_steps": 6}
BOTH = {"parallelism_config": {"ep_size": 2, "tp_size": 2}, "max_steps": 6}
ADAPTED = {
    "use_peft": True, "lora_r": 4, "lora_dropout": 0.0, "lora_target_modules": ["q_proj"],
    "lora_target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
}  # fmt: skip
CASES = {
    "2 copies": (2, {}),
    "2 shards": (2, SHARDED),
    "2 shards, kept gathered": (2, {"fsdp": "shard_grad_op", "activation_checkpointing": False}),
    "2 shards, accumulating": (2, SHARDED | {"gradient_accumulation_steps": 2}),
    "2 shards, bfloat16": (2, SHARDED | {"bf16": True}),
    "2 slices of a row": (2, SHARDED | {"parallelism_config": {"cp_size": 2}, "activation_checkpointing": False}),
    "2 halves of a matrix": (2, SPLIT | {"activation_checkpointing": False}),
    "2 halves, recomputed": (2, SPLIT),
    "2 halves, adapters": (2, SPLIT | {"use_peft": True, "lora_r": 4, "lora_target_modules": ["all-linear"]}),
    "mixture, 2 shards": (2, SHARDED),
    "mixture, 2 halves of the experts": (2, EXPERTS),
    "mixture, 2 halves of the experts and matrices": (2, BOTH | {"activation_checkpointing": False}),
    "mixture, 2 halves of the experts and matrices, adapters": (2, BOTH | ADAPTED),
    "4 shards": (4, SHARDED),
    "4: 2 x 2 halves": (4, {"parallelism_config": {"tp_size": 2, "dp_shard_size": 2}}),
    "mixture, 4: 2 x 2 halves of the experts": (4, EXPERTS | {"activation_checkpointing": False}),
    "mixture, 4: 2 x 2 halves of the experts and matrices": (4, BOTH),
    "4: 2 x 2 slices": (4, SHARDED | {"parallelism_config": {"cp_size": 2}}),
}


def kind_of(name):
    return "mixture" if name.startswith("mixture") else "dense"


@pytest.fixture(scope="session")
def held(request, shared):
    def make(folder):
        models = {"dense": tiny.causal_lm(**WIDTH), "mixture": tiny.mixture_of_experts(**MIXTURE)}
        for kind, model in models.items():
            model.save_pretrained(folder / kind)
            tiny.tokenizer().save_pretrained(folder / kind)
        names = rotation.wanted(request.session, "held", CASES)
        for processes in {CASES[name][0] for name in names}:
            work = [
                [name, "memory", {"out": str(folder / name), "folder": str(folder / kind_of(name))} | CASES[name][1]]
                for name in names
                if CASES[name][0] == processes
            ]
            jobs.do(processes, work, folder)

    return jobs.once(shared, "memory", make)


@pytest.mark.rotated
@pytest.mark.parametrize("name", CASES)
def test_a_plan_is_what_each_process_holds(name, held, tmp_path):
    processes, changes = CASES[name]
    with memory_mesh.imagined(processes):
        run = a_run(str(held / kind_of(name)), tmp_path, **changes)
        plan = memory_plan.measure(run, workload(run))
    real = jobs.result(held, name)
    for kind in ("weights", "gradients", "optimizer"):
        assert getattr(plan, kind) == pytest.approx(max(one[kind] for one in real), rel=0.02), kind
    # A process that waits for the other may hold a layer longer, and experts get unequally many tokens.
    least, most = (find(one["peak"] for one in real) for find in (min, max))
    assert 0.9 * least <= plan.peak <= 1.1 * most, (least, plan.peak, most)
