"""Processes that have the experts of a mixture between them lead to the weights, metrics and predictions of one."""

import pytest
import safetensors.torch
import torch

from posttrain.core.distributed import expert_parallel
from posttrain.rl.generation.weights import Weights
from tests import rotation, tiny, versions
from tests.distributed import jobs
from tests.distributed.test_equal import assert_equal_runs

pytestmark = pytest.mark.skipif(not versions.IS_CURRENT, reason="needs transformers 5.23")

EXPERTS = {"parallelism_config": {"ep_size": 2}}
BOTH = {"parallelism_config": {"ep_size": 2, "tp_size": 2}}
#: The router's loss is one of the rows of a micro-batch: one process reads the same micro-batches as two, and the last
#: window of an epoch, which is short and cut otherwise, is left out.
SMALL = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
SAME = {"max_grad_norm": 0.3, "max_steps": 2, "per_device_eval_batch_size": 1}
BALANCED = SAME | {"router_aux_loss_coef": 0.1}
FREE = {"router_aux_loss_coef": 0.0}
#: What is trained, by label: the trainer, and what is set.
RUNS = {
    "causal-lm": SAME | {"model": {"output_router_logits": True, "router_aux_loss_coef": 0.1}},
    "sft": BALANCED,
    "sft-packed": FREE,
    "sft-lora": FREE,
    "dpo": BALANCED,
    "reward": {},
    "grpo": FREE,
    "grpo replay": FREE | {"router_replay": True},
    "grpo replay deepseek": FREE | {"router_replay": True, "arch": "deepseek_v3"},
    "sft mixtral": BALANCED | {"arch": "mixtral"},
    "sft gpt_oss": FREE | {"arch": "gpt_oss"},
    "sft adapters": BALANCED | {"model": {"adapters": True}},
    "sft-packed adapters": FREE | {"model": {"adapters": True}, "gradient_checkpointing": True},
    "sft gpt_oss adapters": FREE | {"arch": "gpt_oss", "model": {"adapters": True}},
    "dpo adapters": BALANCED | {"model": {"adapters": True}},
    "grpo adapters": FREE | {"model": {"adapters": True}},
}
TOGETHER = ["causal-lm", "sft-packed", "dpo", "grpo", "sft gpt_oss"]
TOGETHER += ["sft-packed adapters", "sft gpt_oss adapters", "dpo adapters", "grpo adapters"]


def runs(shared, name, processes, labels, changes):
    def make(folder):
        work = [
            [label, "mixture", {"name": label.split()[0], "out": str(folder / label), **RUNS[label], **changes}]
            for label in labels
        ]
        jobs.do(processes, work, folder)

    return jobs.once(shared, name, make)


def result(folder, label):
    """A run as `assert_equal_runs` compares it: without the scores of routers beside the predictions, and without the
    epoch; see `test_an_epoch_is_the_share_of_its_micro_batches`.
    """
    found = jobs.result(folder, label)
    if isinstance(found["predictions"], tuple):
        found["predictions"] = found["predictions"][0]
    found["eval"].pop("epoch", None)
    return found


@pytest.fixture(scope="session")
def alone(request, shared):
    labels = {"causal-lm", "sft-packed", "sft-packed adapters", *rotation.wanted(request.session, "alone", RUNS)}
    return runs(shared, "experts-alone", 1, sorted(labels), SMALL)


@pytest.fixture(scope="session")
def divided(request, shared):
    """Runs of two processes that divide the experts."""
    labels = {"causal-lm", *rotation.wanted(request.session, "divided", RUNS)}
    return runs(shared, "experts", 2, sorted(labels), EXPERTS)


@pytest.fixture(scope="session")
def split_and_divided(request, shared):
    changes = BOTH | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    return runs(shared, "experts-tp", 2, rotation.wanted(request.session, "split_and_divided", TOGETHER), changes)


@pytest.mark.rotated
@pytest.mark.parametrize("label", RUNS)
def test_two_processes_that_divide_the_experts_do_what_one_does(label, divided, alone):
    found = result(divided, label)
    assert found["is_fsdp"]
    assert_equal_runs(found, result(alone, label))


def test_an_epoch_is_the_share_of_its_micro_batches(divided, alone):
    """As in transformers. Of 22 rows 16 were read: micro-batches of 2 in one process, and of 2 x 2 in two."""
    assert jobs.result(alone, "causal-lm")["log"][-1]["epoch"] == pytest.approx(8 / 11)
    assert jobs.result(divided, "causal-lm")["log"][-1]["epoch"] == pytest.approx(4 / 6)


@pytest.mark.rotated
@pytest.mark.parametrize("label", TOGETHER)
def test_two_processes_that_split_matrices_and_divide_the_experts_do_what_one_does(label, split_and_divided, alone):
    """They read the same rows, and one process makes micro-batches as large."""
    found = result(split_and_divided, label)
    assert not found["is_fsdp"]
    assert_equal_runs(found, result(alone, label))


def test_an_engine_is_sent_the_experts_with_their_adapters_merged(shared):
    def work(folder, **changes):
        return [
            ["sent", "merged_experts", {"out": str(folder / "sent"), "max_steps": 1, "max_grad_norm": 0.3, **changes}]
        ]

    alone = jobs.once(shared, "merged-alone", lambda folder: jobs.do(1, work(folder, **SMALL), folder))
    small = SMALL | {"gradient_accumulation_steps": 2}
    two = jobs.once(shared, "merged", lambda folder: jobs.do(2, work(folder, **small, **EXPERTS), folder))
    one, other = (jobs.result(folder, "sent") for folder in (alone, two))
    model = tiny.mixture_of_experts(initializer_range=0.1).eval()
    expected, found, base = one["weights"], other["weights"], dict(Weights(model))
    for logits in (one["without"], other["without"]):
        torch.testing.assert_close(logits, model(input_ids=torch.arange(4, 20)[None]).logits, rtol=0, atol=1e-5)
    assert list(found) == list(expected) == list(base)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)
        assert ("mlp.experts" in name) <= bool((value - base[name]).abs().max() > 1e-3)


@pytest.mark.rotated("four processes")
@pytest.mark.parametrize("label", ["sft-packed", "sft-packed adapters"])
@pytest.mark.parametrize("how", ["ep", "tp"])
def test_four_processes_hold_each_expert_twice_in_shards(how, label, shared, alone):
    changes = (EXPERTS if how == "ep" else BOTH) | {"fsdp": "full_shard", "gradient_checkpointing": True}
    if how == "ep":
        changes |= {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
    labels = ["sft-packed", "sft-packed adapters"]
    found = result(runs(shared, f"experts-4-{how}", 4, labels, changes), label)
    assert_equal_runs(found, result(alone, label), padding=False)


def test_each_process_keeps_its_experts_alone(divided):
    found = jobs.result(divided, "causal-lm")
    (gate_up,) = {shape for name, shape in found["held"].items() if name.endswith("experts.gate_up_proj")}
    assert gate_up == (2, 32, 32)


@pytest.mark.rotated
@pytest.mark.parametrize("label", ["causal-lm", "sft mixtral", "sft gpt_oss", "sft adapters"])
def test_the_saved_model_is_that_of_one_process(label, divided, alone):
    files = [next((folder / label / "final").glob("*.safetensors")) for folder in (divided, alone)]
    found, expected = map(safetensors.torch.load_file, files)
    assert found.keys() == expected.keys() and any("experts" in name for name in found)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6, msg=name)


# ---- resuming elsewhere ----

USUAL = FREE | {"name": "sft", "optim": "adamw_torch", "adam_epsilon": 1e-3, "learning_rate": 1e-2, "logging_steps": 3}
PARTS = {"fsdp": "full_shard", "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}
BOTH_DEALT = BOTH | {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}

CUT, ADAPTED = {"cut": 4}, {"model": {"adapters": True}}
#: The processes of each job, and its work: a label, what it goes on from, and what is set.
JOBS = [
    (1, [("straight", None, SMALL), ("1", None, SMALL | {"cut": 2}), ("adapters", None, SMALL | ADAPTED)]),
    (
        2,
        [
            ("1-e", "1", EXPERTS | CUT),
            ("1-ep", "1", EXPERTS | PARTS | CUT),
            ("1-f", "1", PARTS | CUT),
            ("a-ep", None, EXPERTS | PARTS | ADAPTED | {"cut": 2}),
            ("a-e", "a-ep", EXPERTS | ADAPTED | CUT),
            ("1-f-e", "1-f", EXPERTS),
            ("1-ep-f", "1-ep", PARTS),
            ("1-ep-t", "1-ep", BOTH_DEALT),
        ],
    ),
    (1, [("a-e-1", "a-e", SMALL | ADAPTED), ("1-e-1", "1-e", SMALL), ("1-ep-1", "1-ep", SMALL)]),
]
PATHS = ["1-e-1", "1-ep-1", "1-f-e", "1-ep-f", "1-ep-t"]


@pytest.fixture(scope="session")
def ways(request, shared):
    """Those runs that tests ask for, broken off after updates 2 and 4 of 6."""
    asked = {"straight", "adapters", "a-e-1", *rotation.wanted(request.session, "ways", PATHS)}
    for label, before, _ in reversed([one for _, work in JOBS for one in work]):
        asked |= {before} if before and label in asked else set()

    def make(folder):
        for processes, work in JOBS:
            todo = []
            for label, before, changes in work:
                resume = {"resume": str(folder / before)} if before else {}
                usual = USUAL | {"out": str(folder / label), "evaluate": False}
                todo += [[label, "mixture", usual | resume | changes]] if label in asked else []
            jobs.do(processes, todo, folder)

    return jobs.once(shared, "experts-elsewhere", make)


@pytest.mark.rotated
@pytest.mark.parametrize("path", PATHS)
def test_a_run_goes_on_with_experts_divided_otherwise(path, ways):
    expected, found = jobs.result(ways, "straight"), jobs.result(ways, path)
    assert found["step"] == expected["step"] == 6
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)


def test_adapters_of_divided_experts_go_on_with_experts_divided_otherwise(ways):
    expected, found = jobs.result(ways, "adapters"), jobs.result(ways, "a-e-1")
    assert found["step"] == expected["step"] == 6 and any("experts.lora_A" in name for name in found["weights"])
    for name, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, rtol=0, atol=1e-6, msg=name)


# ---- refusals ----


def test_what_cannot_be_divided_is_refused_with_one_sentence(shared):
    asked = {
        "dense": {"name": "causal-lm", "parallelism_config": {"ep_size": 2}},
        "three": {"name": "causal-lm", "parallelism_config": {"ep_size": 3}},
        "odd": {"name": "sft", "parallelism_config": {"ep_size": 2}, "model": {"num_experts": 3}},
        "both": {"name": "sft", "parallelism_config": {"ep_size": 4, "tp_size": 2}, "model": {}},
        "rows": {"name": "sft", "parallelism_config": {"ep_size": 2, "cp_size": 2}, "model": {}},
        "word": {"name": "sft", "parallelism_config": {"ep_size": "two"}, "model": {}},
    }

    def make(folder):
        jobs.do(2, [[name, "refused", one | {"out": str(folder / name)}] for name, one in asked.items()], folder)

    folder = jobs.once(shared, "experts-refused", make)
    told = {name: jobs.result(folder, name) for name in asked}
    assert "ep_size=2: a model of Qwen3Config has no experts. Set ep_size=1." in told["dense"]
    assert "ep_size=3 does not divide the 2 processes of this run" in told["three"]
    assert "ep_size=2 does not divide the 3 experts of Qwen3MoeConfig. Set a size that does." in told["odd"]
    assert "ep_size=4 and tp_size=2 do not work together" in told["both"]
    assert "ep_size=2 and cp_size=2 do not work together; set one of them to 1" in told["rows"]
    assert "ep_size='two' is no number of processes; set it to 1 or more" in told["word"]


@pytest.mark.parametrize("name", ["classifier", "seq2seq"])
def test_a_model_without_experts_is_refused(name, shared):
    def make(folder):
        work = [[n, "refused", {"name": n, "out": str(folder / n), **EXPERTS}] for n in ("classifier", "seq2seq")]
        jobs.do(2, work, folder)

    told = jobs.result(jobs.once(shared, "no-experts", make), name)
    model = {"classifier": "BertConfig", "seq2seq": "T5Config"}[name]
    assert told.endswith(f"ep_size=2: a model of {model} has no experts. Set ep_size=1.")


def test_experts_without_a_plan_with_adapters_and_quantized_are_refused_with_one_sentence():
    from peft import LoraConfig, get_peft_model

    def with_adapters(**targets):
        return get_peft_model(tiny.mixture_of_experts(), LoraConfig(r=2, **targets)).get_base_model()

    told = expert_parallel.problem_of(tiny.causal_lm(), 2)
    assert told.startswith("ep_size=2: Qwen3ForCausalLM has no experts, or transformers no plan for dividing them.")
    on_experts = with_adapters(target_parameters=["mlp.experts.gate_up_proj"])
    assert expert_parallel.problem_of(on_experts, 2) is None
    assert expert_parallel.problem_of(on_experts, 3).startswith("ep_size=3 does not divide the 4 experts")
    assert expert_parallel.problem_of(with_adapters(target_modules=["q_proj"]), 2) is None
    quantized = tiny.mixture_of_experts()
    quantized.is_quantized = True  # as from_pretrained marks what it has loaded with a quantization_config
    told = expert_parallel.problem_of(quantized, 2)
    assert told == (
        "ep_size=2: Qwen3MoeForCausalLM is quantized, and its experts cannot be divided here. Load it in bfloat16."
    )
