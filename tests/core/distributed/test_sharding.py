"""Settings of sharding as people write them, and what several processes saved put together: all without processes."""

import json

import pytest
import torch
from torch import nn

from posttrain.core import TrainingArguments
from posttrain.core.checkpoint import codec, elastic, sharded
from posttrain.core.distributed import shard_settings, sharding
from posttrain.core.errors import CheckpointError, ConfigError
from posttrain.core.training.plan import make_plan, resumed
from tests import tiny


def settings(fsdp="full_shard", config=None, parallelism=None):
    found, problems = shard_settings.read(fsdp, config, parallelism)
    assert problems == []
    return found


# ---- settings ----


@pytest.mark.parametrize("strategy", shard_settings.STRATEGIES)
@pytest.mark.parametrize(
    ("sizes", "hybrid", "full"),
    [
        ({}, (2, 4), (1, 8)),
        ({"dp_replicate_size": 4}, (4, 2), (4, 2)),
        ({"dp_replicate_size": 4, "dp_shard_size": 2}, (4, 2), (4, 2)),
        ({"dp_shard_size": 2}, (4, 2), None),
        ({"dp_shard_size": 8}, (1, 8), (1, 8)),
        ({"dp_replicate_size": 1}, None, (1, 8)),
    ],
)
def test_sizes_that_are_set_hold_with_every_strategy(strategy, sizes, hybrid, full, monkeypatch):
    """8 processes on 2 machines: (replicas, shards), or None where the two are refused."""
    made = lambda device, shape, mesh_dim_names: dict(zip(mesh_dim_names, shape, strict=True))  # noqa: E731
    monkeypatch.setattr("torch.distributed.device_mesh.init_device_mesh", made)
    expected = hybrid if "hybrid" in strategy else full
    for fsdp, config in ((strategy, None), ("full_shard", {"sharding_strategy": strategy})):
        found, problems = shard_settings.read(fsdp, config, sizes)
        if problems or expected is None:
            if not problems:
                with pytest.raises(ValueError, match="dp_shard_size=2"):
                    sharding.make_mesh(found, "cpu", 8, 4)
            else:
                assert expected is None and "dp_replicate_size=1" in problems[0]
            continue
        mesh = sharding.make_mesh(found, "cpu", 8, 4)
        assert (mesh.get("replicate", 1), mesh["shard"]) == expected


@pytest.mark.parametrize("nothing", [None, "", [], False])
def test_nothing_is_sharded_unless_asked_for(nothing):
    args = TrainingArguments("out", fsdp=nothing, fsdp_config={"min_num_params": 0})
    assert shard_settings.read(args.fsdp, args.fsdp_config)[0] is None


def test_every_way_to_say_what_is_sharded():
    assert settings() == settings(["full_shard"]) == settings("full_shard auto_wrap") == shard_settings.Sharding()
    assert TrainingArguments("out", fsdp=True).fsdp == "full_shard"
    assert not settings("shard_grad_op").reshard_after_forward
    assert not settings(config={"reshard_after_forward": "false"}).reshard_after_forward
    assert settings("full_shard offload").cpu_offload and settings(config={"fsdp_offload_params": "True"}).cpu_offload
    assert settings("hybrid_shard").replicas == 0 and settings(config={"sharding_strategy": 4}).replicas == 0
    assert settings(config={"state_dict_type": "StateDictType.SHARDED_STATE_DICT"}).state_dict_type == "sharded"
    assert settings(config={"transformer_layer_cls_to_wrap": "A, B"}).layer_classes == ("A", "B")
    half = settings(config={"mixed_precision_policy": {"param_dtype": "bf16", "reduce_dtype": "torch.float32"}})
    assert (half.param_dtype, half.reduce_dtype) == (torch.bfloat16, torch.float32)
    assert settings(None, None, {"dp_shard_size": 4, "dp_replicate_size": 2}).shards == 4


def test_accelerates_own_config_of_parallelism_is_read():
    from accelerate.parallelism_config import ParallelismConfig

    found = settings(None, None, ParallelismConfig(dp_replicate_size=2, dp_shard_size=2))
    assert (found.replicas, found.shards) == (2, 2)
    assert shard_settings.read(None, None, ParallelismConfig(dp_replicate_size=2)) == (None, [])


def test_a_file_of_options_is_read(tmp_path):
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps({"cpu_offload": True, "version": 2}))
    assert settings(config=str(path)).cpu_offload
    path.write_text("{")
    assert "not a JSON file" in shard_settings.read("full_shard", str(path))[1][0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"fsdp": "full_shart"}, "did you mean 'full_shard'"),
        ({"fsdp": "no_shard"}, "leave fsdp out"),
        ({"fsdp": True, "fsdp_config": {"cpu_ofload": True}}, "did you mean 'cpu_offload'"),
        ({"fsdp": True, "fsdp_config": {"state_dict_type": "LOCAL"}}, "SHARDED_STATE_DICT"),
        ({"fsdp": True, "fsdp_config": {"cpu_offload": "maybe"}}, "neither true nor false"),
        ({"fsdp": True, "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP"}}, "needs min_num_params"),
        ({"fsdp": True, "fsdp_config": {"xla": True}}, "TPUs"),
        ({"fsdp": True, "deepspeed": {}}, "both shard the model"),
        ({"fsdp": True, "optim": "adafactor"}, "uses whole matrices"),
        ({"fsdp": True, "optim": "soap"}, "uses whole matrices"),
        ({"fsdp": True, "optim": "dadaptadam"}, "uses whole matrices"),
        ({"fsdp": True, "optim": "paged_adamw_32bit"}, "has custom kernels"),
        ({"fsdp": True, "optim": "lion_32bit"}, "has custom kernels"),
        ({"fsdp": "full_shard offload", "optim": "muon"}, "uses whole matrices"),
        ({"fsdp": True, "bf16_full_eval": True}, "shards them"),
        ({"parallelism_config": {"tp_size": 2}, "torch_compile": True}, "does not work on split matrices"),
        ({"parallelism_config": {"tp_size": 2}, "deepspeed": {}}, "cannot both split the model"),
        ({"parallelism_config": {"tp_size": 2}, "optim": "adafactor"}, "with tp_size=2 each process has a part"),
        ({"parallelism_config": {"sp_size": 2}}, "sequence parallelism"),
        (
            {"parallelism_config": {"ep_size": 2}, "deepspeed": {}},
            "ep_size=2 and deepspeed cannot both divide the model",
        ),
        ({"parallelism_config": {"ep_size": 2}, "fp16": True}, "fp16=True does not work on divided experts; set it to"),
        (
            {"parallelism_config": {"ep_size": 2}, "bf16_full_eval": True},
            "bf16_full_eval=True does not work on divided",
        ),
        ({"parallelism_config": {"ep_size": 2}, "torch_compile": True}, "torch_compile=True does not work on divided"),
        ({"parallelism_config": {"ep_size": 2}, "optim": "adafactor"}, "with ep_size=2 each process has a part"),
        ({"parallelism_config": {"cp_size": 2, "tp_size": 2}}, "set one of them to 1"),
        ({"parallelism_config": {"cp_size": 2}, "torch_compile": True}, "does not work on rows that are cut"),
        ({"parallelism_config": {"cp_size": 2}, "deepspeed": {}}, "shard the model by fsdp"),
        ({"parallelism_config": {"cp_size": 2}, "neftune_noise_alpha": 5.0}, "depends on the length of a row"),
        ({"parallelism_config": {"dp_shards": 2}}, "'dp_shards', which is none of"),
    ],
)
def test_what_cannot_work_is_said_at_construction(changes, said):
    with pytest.raises(ConfigError) as caught:
        TrainingArguments("out", **changes)
    assert said in str(caught.value)


def test_activation_checkpointing_of_fsdp_is_ours():
    assert TrainingArguments("out", fsdp=True, fsdp_config={"activation_checkpointing": True}).gradient_checkpointing


def test_options_of_the_first_fsdp_are_accepted_with_a_note():
    found = settings(
        config={"version": 1, "use_orig_params": True, "sync_module_states": True, "backward_prefetch": "x"}
    )
    assert len(found.notes) == 4 and found == shard_settings.Sharding()


def test_what_accelerate_launch_leaves_in_the_environment():
    one = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "1",
        "FSDP_SHARDING_STRATEGY": "2",
        "FSDP_OFFLOAD_PARAMS": "true",
    }
    one |= {"FSDP_RESHARD_AFTER_FORWARD": "true", "FSDP_TRANSFORMER_CLS_TO_WRAP": "BertLayer"}
    one |= {
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_MIN_NUM_PARAMS": "0",
        "FSDP_BACKWARD_PREFETCH": "None",
    }
    found, problems = shard_settings.from_environment(one)
    assert problems == [] and found.layer_classes == ("BertLayer",) and found.cpu_offload
    assert not found.reshard_after_forward  # strategy 2 is shard_grad_op
    found, _ = shard_settings.from_environment(one | {"FSDP_VERSION": "2"})
    assert found.reshard_after_forward
    sizes = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_DP_SHARD_SIZE": "2"}
    assert shard_settings.from_environment(sizes)[0].shards == 2
    assert shard_settings.from_environment({"FSDP_VERSION": "2"}) == (None, [])


def test_scripts_take_it_from_the_command_line():
    from transformers import HfArgumentParser

    def parse(*words):
        return HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "out", *words])[0]

    assert parse("--fsdp").fsdp == "full_shard" and parse().fsdp is None
    args = parse("--fsdp", "full_shard auto_wrap", "--fsdp_config", '{"cpu_offload": true}')
    assert shard_settings.read(args.fsdp, args.fsdp_config)[0].cpu_offload


# ---- units ----


def names_of(units):
    return [type(unit).__name__ for unit in units]


def test_layers_are_units_by_the_models_own_word():
    assert names_of(sharding.units(tiny.causal_lm(tie_word_embeddings=True), settings())) == ["Qwen3DecoderLayer"] * 2
    assert sharding.units(tiny.causal_lm(), settings(config={"auto_wrap_policy": "NO_WRAP"})) == []


def test_the_embedding_and_the_head_are_units_unless_they_are_tied():
    model = tiny.causal_lm()
    layers = list(model.model.layers)
    assert sharding.units(model, settings()) == [model.model.embed_tokens, model.lm_head, *layers[::-1]]
    named = settings(config={"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer,Embedding"})
    assert names_of(sharding.units(model, named)) == ["Linear", "Qwen3DecoderLayer", "Qwen3DecoderLayer", "Embedding"]
    assert names_of(sharding.units(tiny.classifier(), settings()))[0] == "Embedding"


def test_a_wrong_name_of_a_layer_is_refused():
    with pytest.raises(ValueError, match="did you mean 'Qwen3DecoderLayer'"):
        sharding.units(tiny.causal_lm(), settings(config={"transformer_layer_cls_to_wrap": "Qwen2DecoderLayer"}))


def test_units_by_size_count_what_no_inner_unit_holds():
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10)), nn.Linear(2, 2))
    by_size = settings(config={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 110})
    assert sharding.units(model, by_size) == [model[0][0], model[0][1]]
    by_size = settings(config={"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 200})
    assert sharding.units(model, by_size) == [model[0]]


# ---- what several processes saved ----


def save_parts(folder, whole, cuts, axis=0):
    """`whole` as so many processes write it as hold the rows between `cuts`."""
    ends = [*cuts, whole.shape[axis]]
    for rank, (start, end) in enumerate(zip([0, *cuts], ends, strict=True)):
        offset = [0] * whole.ndim
        offset[axis] = start
        values = whole.narrow(axis, start, end - start).contiguous()
        tree = {"w": {sharded._MARK: list(whole.shape), "offset": offset, "values": values}, "step": 3}
        codec.save_tree(tree, folder / sharded.stem("state", rank, len(ends)))


@pytest.mark.parametrize(("axis", "cuts"), [(0, [2]), (0, [2, 4, 6]), (0, [7, 7]), (1, [1, 2])])
def test_pieces_make_the_whole_and_any_part_of_it(tmp_path, axis, cuts):
    whole = torch.arange(21.0).reshape(7, 3)
    save_parts(tmp_path, whole, cuts, axis)
    tree = sharded.load(tmp_path, "state")
    assert tree["step"] == 3 and torch.equal(tree["w"].whole(), whole)
    assert torch.equal(tree["w"].cut((1, 1), (4, 2)), whole[1:5, 1:3])
    assert tree["w"].cut((7, 0), (0, 3)).shape == (0, 3)


def test_a_missing_part_is_named(tmp_path):
    save_parts(tmp_path, torch.zeros(4, 2), [2])
    (tmp_path / "state-1-of-2.safetensors").unlink()
    with pytest.raises(CheckpointError, match="state-1-of-2"):
        sharded.load(tmp_path, "state")["w"].whole()
    (tmp_path / "state-1-of-2.json").unlink()
    with pytest.raises(CheckpointError, match="state-1-of-2"):
        sharded.load(tmp_path, "state")


def test_parts_of_two_savings_are_refused(tmp_path):
    save_parts(tmp_path, torch.zeros(4, 2), [2])
    save_parts(tmp_path, torch.zeros(4, 2), [1, 2])
    with pytest.raises(CheckpointError, match="by 2 and by 3 processes"):
        sharded.load(tmp_path, "state")


# ---- another number of processes ----


def rank_state(total, count, rank, loss_sum=8.0, **loader):
    progress = {"epoch": 0, "loss_sum": loss_sum, "loss_count": 4, "batches": 3}
    metrics = {"loss": (total, count), "tokens": (10.0 * (rank + 1), 20)}
    return {"progress": progress, "metrics": metrics, "loader": {"epoch": 0, "given": [24], **loader}}


def test_sums_are_dealt_so_that_means_stay():
    """Two processes, two steps: the mean loss is (1 + 3 + 2 + 4) / 4, also when four processes add one more step to
    it.
    """
    states = [rank_state(4.0, 2, 0), rank_state(6.0, 2, 1)]
    four = [elastic.dealt(states, rank, 4) for rank in range(4)]
    total, count = four[0]["metrics"]["loss"]
    assert total / count == 2.5 and count == 2 * 4  # two steps of four processes
    assert four[0]["metrics"]["tokens"] == (30.0, 40)  # sums over items are what they were
    assert [state["metrics"] for state in four[1:]] == [{}] * 3
    assert all(
        s["progress"]["loss_sum"] / s["progress"]["loss_count"] == 2.0 and s["progress"]["loss_count"] == 8
        for s in four
    )
    one = elastic.dealt(states, 0, 1)
    assert one["metrics"]["loss"] == (5.0, 2.0) and one["loader"] == states[0]["loader"]


def test_extremes_stay_those_of_all_processes():
    states = [rank_state(4.0, 2, 0), rank_state(6.0, 2, 1)]
    states[0]["metrics"]["low"], states[1]["metrics"]["low"] = (3.0, "min"), (-1.0, "min")
    states[1]["metrics"]["high"] = (9.0, "max")
    one = elastic.dealt(states, 0, 1)["metrics"]
    assert one["low"] == (-1.0, "min") and one["high"] == (9.0, "max")


def test_shards_of_a_stream_fit_no_other_number():
    states = [rank_state(1.0, 1, rank, dataset={"shard": rank}) for rank in (0, 1)]
    with pytest.raises(CheckpointError, match="Resume with 2 processes"):
        elastic.dealt(states, 0, 1)


def test_fresh_random_numbers_are_those_of_seed_step_and_rank():
    from posttrain.core.data.rng import rng_state, set_rng_state

    def drawn(state):
        set_rng_state(state)
        return torch.rand(3)

    before, fresh = rng_state(), elastic.fresh_random_numbers
    first, again, other = fresh(42, 4, 1), fresh(42, 4, 1), fresh(42, 4, 2)
    assert torch.equal(torch.get_rng_state(), before["torch"])
    assert torch.equal(drawn(first), drawn(again)) and not torch.equal(drawn(first), drawn(other))


@pytest.mark.parametrize(
    ("batches", "accumulation", "epochs", "place", "expected"),
    [
        (10, 1, 2, (7, 0, 5), 7 + 5 + 10),  # half of the first epoch is left, and all of the second
        (10, 2, 2, (7, 1, 10), 7 + 5),
        (10, 4, 1, (7, 0, 3), 7 + 1),  # a short window is a step too
        (10, 1, 1, (12, 1, 0), 12),
    ],
)
def test_a_plan_counts_what_is_left_in_its_own_updates(batches, accumulation, epochs, place, expected):
    plan = make_plan(batches, accumulation, epochs, -1)
    assert resumed(plan, *place, keeps_max_steps=False).max_steps == expected


def test_a_number_of_updates_stays_and_gets_the_epochs_it_needs():
    plan = make_plan(10, 1, 3, 30)
    assert (plan.max_steps, plan.num_epochs) == (30, 3)
    later = resumed(plan, 4, 1, 8, keeps_max_steps=True)
    assert later.max_steps == 30 and later.num_epochs == 4  # 8 batches of epoch 1 are left, and 26 updates
