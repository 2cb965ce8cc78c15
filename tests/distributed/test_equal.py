"""Two processes lead to the weights, metrics and predictions of one, with whole weights and with weights in pieces.

Rows are ragged, and the last batch of training and of evaluation is uneven.
"""

import numpy as np
import pytest
import torch

from posttrain.core.distributed import shard_settings
from posttrain.core.optim.by_name import OF_PYTORCH_OPTIMIZER
from tests import rotation, versions
from tests.contract.trainers import EXACT, causal_lm
from tests.distributed import jobs, worker

MODES = {"ddp": {}, "fsdp": {"fsdp": "full_shard"}}
SPLIT = {"parallelism_config": {"tp_size": 2}}
#: Trainers that are always trained with split matrices too; the others in a slow test.
SPLIT_ALWAYS = ["causal-lm", "sft-packed", "sft-lora", "dpo", "reward", "grpo"]
#: Architectures of which transformers has no plan for splitting matrices, and DoRA, which looks at whole ones.
NOT_SPLIT = {"classifier", "seq2seq", "sft-dora-head"}
#: Its quantile of entropies falls on tokens of equal entropy, between which rounding chooses: compared with nothing.
NOT_SPLIT |= {"grpo-adaptive"}
SLICED = {"parallelism_config": {"cp_size": 2}}
#: Trainers whose rows are always cut into slices too; the others in a slow test.
SLICED_ALWAYS = ["causal-lm", "sft-packed", "dpo", "reward", "grpo"]
#: No causal attention, or two texts.
NOT_SLICED = {"classifier", "seq2seq"}
#: Nor rows of text alone.
SEE = {name for name in EXACT if "-images" in name}
#: How the names of trainers begin that generate while they train or are evaluated.
SAMPLES = (
    "grpo",
    "rloo",
    "reinforce++",
    "online-dpo",
    "distillation",
    "gkd",
    "seq2seq",
    "iw-opd",
    "gold",
    "sdft",
    "sdpo",
    "a2po",
    "gmpo",
)
#: Each must change nothing but where numbers lie: on the trainer that has most in it.
OPTIONS = {
    "shard_grad_op": {"fsdp": "shard_grad_op auto_wrap"},
    "offload": {"fsdp": ["full_shard", "offload"]},
    "recomputed": {"fsdp": "full_shard", "fsdp_config": {"activation_checkpointing": True}},
    "by-size": {"fsdp": "full_shard", "fsdp_config": {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 2000}},
    "one-unit": {"fsdp": "full_shard", "fsdp_config": {"fsdp_auto_wrap_policy": "NO_WRAP"}},
    "by-class": {"fsdp": "full_shard", "fsdp_config": {"transformer_layer_cls_to_wrap": "Qwen3DecoderLayer"}},
    "adamw": {"fsdp": "full_shard", "optim": "adamw_torch_fused", "adam_epsilon": 1e-3, "learning_rate": 1e-3},
    "ddp-options": {"ddp_find_unused_parameters": False, "ddp_bucket_cap_mb": 1, "ddp_broadcast_buffers": False,
                    "ddp_backend": "gloo", "ddp_static_graph": True},
}  # fmt: skip
ALONE = {"adamw": {"optim": "adamw_torch_fused", "adam_epsilon": 1e-3, "learning_rate": 1e-3}}

MUON = {"optim": "muon", "adam_epsilon": 1e-3, "learning_rate": 1e-3, "weight_decay": 0.1}

#: Functions of `worker`.
KINDS = "tied given_optimizer low_precision best_of_all on_meta generation overflow order loaded_in_parts".split()
KINDS += ["steps_of_muon", "optimizers"]


def job(shared, name, work_in):
    return jobs.once(shared, name, lambda folder: jobs.do(2, work_in(folder), folder))


@pytest.fixture(scope="session")
def pair(request, shared):
    """Several trainings, and more, by two processes."""

    def work(folder):
        asked = rotation.wanted(request.session, "pair", OPTIONS)
        todo = [[o, "train", {"name": "causal-lm", "out": str(folder / o), **OPTIONS[o]}] for o in asked]
        cut = {"name": "causal-lm", "evaluate": False, "fsdp": "full_shard", **MUON}
        todo.append(["muon", "train", cut | {"out": str(folder / "muon")}])
        todo.append(["muon-cut", "train", cut | {"out": str(folder / "muon-cut"), "cut": 2}])
        todo.append(["muon-on", "train", cut | {"out": str(folder / "muon-on"), "resume": str(folder / "muon-cut")}])
        return todo + [[kind, kind, {"out": str(folder / kind)}] for kind in KINDS]

    return job(shared, "pair", work)


@pytest.fixture(scope="session", params=MODES)
def mode_and_runs(request, shared):
    """(mode, the folder of every trainer's run by two processes)."""

    def work(folder):
        names = rotation.wanted(request.session, "mode_and_runs", EXACT, request.param)
        return [[n, "train", {"name": n, "out": str(folder / n), **MODES[request.param]}] for n in names]

    return request.param, job(shared, request.param, work)


@pytest.fixture(scope="session")
def alone(request, shared):
    def make(folder):
        names = {"causal-lm", "sft-packed", *rotation.wanted(request.session, "alone", EXACT)}
        work = [[name, "train", {"name": name, "out": str(folder / name)}] for name in sorted(names)]
        work += [[k, "train", {"name": "causal-lm", "out": str(folder / k), **changes}] for k, changes in ALONE.items()]
        jobs.do(1, work, folder)

    return jobs.once(shared, "alone", make)


def assert_equal_runs(found, expected, padding=True):
    """
    Args:
        padding: compare logits of padding too, which mean nothing.
    """
    assert found["step"] == expected["step"]
    assert found["weights"].keys() == expected["weights"].keys()
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found["weights"][key], value, rtol=0, atol=1e-6, msg=key)
    for key in ("loss", "grad_norm"):
        values = [[record[key] for record in run["log"] if key in record] for run in (found, expected)]
        assert values[0] == pytest.approx(values[1], rel=1e-5, abs=1e-6)  # a policy's loss is often 0
    names = [n for n in expected["eval"] if not n.endswith(("_runtime", "_per_second"))]
    assert "eval_loss" in names
    for name in names:  # KTO's kl is a difference of log-probabilities of whole texts, of which a float32 has 4e-6
        rounding = 4e-6 if name == "eval_kl" else 1e-6
        assert found["eval"][name] == pytest.approx(expected["eval"][name], rel=1e-5, abs=rounding), name
    for key in ("predictions", "label_ids"):
        assert (found[key] is None) == (expected[key] is None)  # who samples predicts nothing
        if expected[key] is not None:
            if not padding and found[key].ndim == 3:
                text = expected["label_ids"] != -100
                assert text.any() and not text.all()
                found, expected = ({**run, key: run[key][text]} for run in (found, expected))
            np.testing.assert_allclose(found[key], expected[key], rtol=0, atol=1e-5)
    assert found["test"]["test_loss"] == pytest.approx(expected["test"]["test_loss"], rel=1e-5, abs=1e-6)


@pytest.mark.rotated
@pytest.mark.parametrize("name", EXACT)
def test_two_processes_do_what_one_does(name, mode_and_runs, alone):
    if name in SEE and not versions.IS_CURRENT:
        pytest.skip("an evaluation gathers features of images too, in several shapes, before transformers 5.23")
    mode, runs = mode_and_runs
    found = jobs.result(runs, name)
    assert found["is_fsdp"] == (mode == "fsdp") and found["class"].startswith("FSDP") == (mode == "fsdp")
    assert_equal_runs(found, jobs.result(alone, name))
    has_generated = found["predictions"] is None or "eval_generated" in found["eval"]
    assert has_generated == name.startswith(SAMPLES)


#: A mixture whose weights change over the run, with a budget.
STAGES = {
    "dataset_weights": {"a": {0: 3, 0.5: 1}, "b": {0.25: 1}},
    "dataset_max_tokens": {"a": 60},
    "num_train_epochs": 1,
}
STAGED = {"rows": STAGES, "packed": STAGES | {"packing": True, "dataset_weights_of": "tokens"}}
STAGED |= {"epochs": STAGES | {"num_train_epochs": 2}} | {
    f"streams {kind}": options | {"max_steps": 5, "streams": True} for kind, options in STAGED.items()
}


@pytest.mark.parametrize("kind", STAGED)
def test_two_processes_read_the_stages_of_a_mixture_as_one_does(kind, shared):
    def work(folder):
        return [[k, "train", {"name": "sft-mixture", "out": str(folder / k), **STAGED[k]}] for k in STAGED]

    alone = jobs.once(shared, "stages-alone", lambda folder: jobs.do(1, work(folder), folder))
    found = jobs.result(job(shared, "stages", work), kind)
    assert_equal_runs(found, jobs.result(alone, kind), padding=False)


#: How two processes are told, with which weights and with which families of vision-language models.
BESIDE = {"ddp": {"gradient_checkpointing": True}, "fsdp": {"fsdp": "full_shard"}, "vision": {"train_parts": "vision"}}
SEEING = ["qwen2_5_vl", "gemma3", "smolvlm", "llava"]


@pytest.fixture(scope="session")
def beside(request, shared):
    def work(folder):
        return [
            [f"{mode}-{family}", "text_beside_images", {"out": str(folder / mode / family), "family": family} | options]
            for mode, options in BESIDE.items()
            for family in rotation.wanted(request.session, "beside", SEEING, mode)
        ]

    alone = jobs.once(shared, "beside-alone", lambda folder: jobs.do(1, work(folder), folder))
    return alone, job(shared, "beside", work)


@pytest.mark.rotated
@pytest.mark.parametrize("family", SEEING)
@pytest.mark.parametrize("mode", BESIDE)
def test_a_process_without_images_waits_for_nobody_and_changes_no_gradient(mode, family, beside):
    expected, found = (jobs.result(folder, f"{mode}-{family}") for folder in beside)
    size = torch.stack([value.norm() for value in expected["weights"].values()]).norm()
    for name, value in expected["weights"].items():
        assert (found["weights"][name] - value).norm() < 1e-6 * size, name
    norms = [[record["grad_norm"] for record in run["log"] if "grad_norm" in record] for run in (found, expected)]
    assert len(norms[0]) == 4 and norms[0] == pytest.approx(norms[1], rel=1e-4)


def split_job(shared, label, names):
    def work(folder):
        return [[name, "train", {"name": name, "out": str(folder / name), **SPLIT}] for name in names]

    return job(shared, label, work)


@pytest.mark.parametrize("name", SPLIT_ALWAYS)
def test_two_processes_that_split_matrices_do_what_one_does(name, shared, alone):
    runs = split_job(shared, "tp", SPLIT_ALWAYS)
    assert_equal_runs(jobs.result(runs, name), jobs.result(alone, name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*EXACT} - {*SPLIT_ALWAYS} - NOT_SPLIT))
def test_every_trainer_splits_matrices(name, shared, alone):
    runs = split_job(shared, "tp-all", sorted({*EXACT} - {*SPLIT_ALWAYS} - NOT_SPLIT))
    assert_equal_runs(jobs.result(runs, name), jobs.result(alone, name))


#: Trainers whose processes also have the tokens of a row between them, outside the matrices.
BY_ROWS = {
    "causal-lm": {}, "sft-packed": {"gradient_checkpointing": True}, "dpo": {}, "reward": {}, "grpo": {},
}  # fmt: skip
SEQUENCE = {"parallelism_config": {"tp_size": 2, "sp_size": 2}}


@pytest.mark.parametrize("name", BY_ROWS)
def test_two_processes_with_the_tokens_between_matrices_do_what_one_does(name, shared, alone):
    def work(folder):
        return [
            [name, "train", {"name": name, "out": str(folder / name)} | SEQUENCE | options]
            for name, options in BY_ROWS.items()
        ]

    assert_equal_runs(jobs.result(job(shared, "sp", work), name), jobs.result(alone, name))


def test_two_by_two_processes_shard_weights_and_have_the_tokens_between_matrices(shared, alone):
    changes = SEQUENCE | {"fsdp": "full_shard", "gradient_checkpointing": True}

    def make(folder):
        jobs.do(4, [["packed", "train", {"name": "sft-packed", "out": str(folder / "packed")} | changes]], folder)

    found = jobs.result(jobs.once(shared, "sp-2x2", make), "packed")
    assert found["is_fsdp"]
    assert_equal_runs(found, jobs.result(alone, "sft-packed"))


def test_tokens_between_matrices_are_divided_whatever_ran_before_a_layer_is_recomputed(shared):
    archs = ["qwen3", "llama", "mistral", "gemma2"]
    found = jobs.result(
        job(shared, "between", lambda folder: [["all", "between_matrices", {"out": str(folder), "archs": archs}]]),
        "all",
    )
    for arch in archs:
        tokens, gap = found[arch]
        assert tokens == [[4, 2, 7], [3, 1, 7]] and gap < 1e-5, arch


#: Trainers whose models cannot be split, and what is said.
UNSPLIT = {
    "classifier": "has no plan for splitting its matrices",
    "seq2seq": "has no plan for splitting its matrices",
    "sft-dora-head": "looks at the whole matrix",
}


@pytest.mark.parametrize("name", UNSPLIT)
def test_what_is_split_says_what_cannot_be(name, shared):
    def work(folder):
        return [[name, "refused", {"name": name, "out": str(folder / name), **SPLIT}] for name in UNSPLIT]

    assert UNSPLIT[name] in jobs.result(job(shared, "tp-refused", work), name)


#: How a model was loaded by so many processes, what the arguments say, and the sentence that is said.
LOADED = {
    "size": (4, {"tp_size": 4}, {"tp_size": 2}, "tp_size=2, and from_pretrained(distributed_config=...) loaded the "),
    "rows": (2, {"tp_size": 2}, {"cp_size": 2}, "cp_size=2 and tp_size=2 do not work together"),
    "shards": (2, {"fsdp_size": 2}, {}, "sharded the model (fsdp_size); load it without distributed_config"),
}


@pytest.mark.parametrize("label", LOADED)
def test_a_model_that_was_loaded_otherwise_is_refused_with_one_sentence(label, shared):
    processes, loaded, sizes, sentence = LOADED[label]

    def make(folder):
        changes = {"out": str(folder), "loaded": loaded, "parallelism_config": sizes}
        jobs.do(processes, [["told", "loaded_in_parts", changes]], folder)

    assert sentence in jobs.result(jobs.once(shared, f"loaded-{label}", make), "told")


#: What a user may set wrong, and the sentence that is said.
MISSET = {
    "processes": ("causal-lm", {"parallelism_config": {"tp_size": 4}}, "tp_size=4 does not divide the 2 processes"),
    "rows": ("causal-lm", {"parallelism_config": {"cp_size": 3}}, "cp_size=3 does not divide the 2 processes"),
    "zero": ("causal-lm", {"parallelism_config": {"tp_size": 0}}, "tp_size=0 is no number of processes"),
    "tokens": ("sft-lora", SEQUENCE, "sp_size=2: Qwen3ForCausalLM has an adapter, which reads all tokens."),
    "tiles": (
        "causal-lm",
        SEQUENCE | {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"mlp_tile": 4}},
        "mlp_tile does not work with sp_size=2",
    ),
    "name": ("causal-lm", {"parallelism_config": {"tensor_size": 2}}, "parallelism_config holds 'tensor_size'"),
    "shards": (
        "causal-lm",
        {"parallelism_config": {"dp_shard_size": 3}},
        "dp_replicate_size=1 times dp_shard_size=3 does not divide the 2 parts",
    ),
    "groups": (
        "causal-lm",
        {"parallelism_config": {"tp_size": 2, "dp_shard_size": 2}},
        "dp_shard_size=2 does not divide the 1 parts into which rows are dealt (2 processes, 2 with the same rows)",
    ),
    "heads": (
        "causal-lm",
        {"parallelism_config": {"tp_size": 2}, "model": {"num_attention_heads": 3, "num_key_value_heads": 3}},
        "tp_size=2 does not divide the 3 num_attention_heads of Qwen3MoeConfig. Set a size that does.",
    ),
}


def test_sizes_that_do_not_fit_are_refused_with_one_sentence(shared):
    def work(folder):
        return [
            [label, "refused", {"name": name, "out": str(folder / label), **changes}]
            for label, (name, changes, _) in MISSET.items()
        ]

    runs = job(shared, "misset", work)
    for label, (*_, sentence) in MISSET.items():
        assert sentence in jobs.result(runs, label), label


STATS = ["correct", "entropy", "mean_logit", "log_collision"]
VOCABULARY = {
    "loss": ("loss", {}),
    "loss and statistics": ("loss", {"return_stats": True}),
    "smoothed": ("loss", {"label_smoothing": 0.1, "reduction": "mean"}),
    "capped": ("loss", {"softcap": 3.0, "scale": 0.5}),
    "by its own probability": ("loss", {"dft": True}),
    "log-probabilities": ("logps", {"stats": STATS, "temperature": 0.7}),
    "capped log-probabilities": ("logps", {"softcap": 3.0, "stats": ("entropy",)}),
}


def test_slices_of_a_vocabulary_make_up_the_loss_of_the_whole(shared):
    def work(folder):
        return [
            [label, "vocabulary", {"out": str(folder), "kind": kind, "options": options}]
            for label, (kind, options) in VOCABULARY.items()
        ]

    runs = job(shared, "vocabulary", work)
    for label, (_, options) in VOCABULARY.items():
        gaps = jobs.result(runs, label)
        assert len(gaps) >= 4 + len(options.get("stats", ())) and max(gaps) < 2e-6, (label, gaps)


def sliced_job(shared, label, names, processes=2, **changes):
    def work(folder):
        return [[name, "train", {"name": name, "out": str(folder / name), **SLICED, **changes}] for name in names]

    return jobs.once(shared, label, lambda folder: jobs.do(processes, work(folder), folder))


@pytest.mark.parametrize("name", SLICED_ALWAYS)
def test_two_processes_that_split_rows_do_what_one_does(name, shared, alone):
    runs = sliced_job(shared, "cp", SLICED_ALWAYS)
    assert_equal_runs(jobs.result(runs, name), jobs.result(alone, name), padding=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*EXACT} - {*SLICED_ALWAYS} - NOT_SLICED - SEE))
def test_every_trainer_splits_rows(name, shared, alone):
    runs = sliced_job(shared, "cp-all", sorted({*EXACT} - {*SLICED_ALWAYS} - NOT_SLICED - SEE))
    assert_equal_runs(jobs.result(runs, name), jobs.result(alone, name), padding=False)


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_weights_are_sharded_over_the_processes_that_split_rows(name, shared, alone):
    runs = sliced_job(shared, "cp-fsdp", ["sft", "dpo"], fsdp="full_shard", gradient_checkpointing=True)
    found = jobs.result(runs, name)
    assert found["is_fsdp"]
    assert_equal_runs(found, jobs.result(alone, name), padding=False)


@pytest.mark.parametrize("mode", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_two_by_two_processes_split_rows_and_deal_them_out(mode, shared, alone):
    runs = sliced_job(shared, f"cp-2x2-{mode}", ["sft-packed"], 4, **MODES[mode])
    found = jobs.result(runs, "sft-packed")
    assert found["is_fsdp"] == (mode == "fsdp")
    assert_equal_runs(found, jobs.result(alone, "sft-packed"), padding=False)


#: Grouped queries, sliding windows, capped scores, attention sinks, experts, learned positions.
SLICED_MODELS = ["qwen3", "mistral", "gemma2", "gpt-oss", "qwen3-moe", "gpt2"]


def test_slices_of_rows_make_up_whole_rows_and_their_gradients(shared):
    def work(folder):
        batches = ["plain", "left", "right", "packed"]
        return [["slices", "slices_of_all", {"out": str(folder), "archs": SLICED_MODELS, "batches": batches}]]

    found = jobs.result(job(shared, "cp-models", work), "slices")
    assert len(found) == 4 * len(SLICED_MODELS)
    for what, gaps in found.items():
        assert max(gaps) < 2e-5, (what, gaps)


@pytest.mark.parametrize("name", sorted(NOT_SLICED | SEE))
def test_rows_that_cannot_be_cut_are_refused_by_the_models_name(name, shared):
    def work(folder):
        names = sorted(NOT_SLICED | SEE)
        return [[name, "refused", {"name": name, "out": str(folder / name), **SLICED}] for name in names]

    told = jobs.result(job(shared, "cp-refused", work), name)
    model = {"classifier": "Bert", "seq2seq": "T5"}.get(name, "Qwen2_5_VL")
    assert told.startswith("cp_size=2: ") and model in told and told.endswith("Set cp_size=1.")


def test_matrices_that_transformers_split_while_loading_are_trained_and_saved_whole(pair, alone):
    from transformers import AutoModelForCausalLM

    found, expected = jobs.result(pair, "loaded_in_parts"), jobs.result(alone, "causal-lm")
    assert found["size"] == 2 and found["halves"] == (32, 32)
    model = AutoModelForCausalLM.from_pretrained(pair / "loaded_in_parts" / "final")
    for key, value in expected["weights"].items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=1e-6, msg=key)


@pytest.mark.rotated
@pytest.mark.parametrize("label", OPTIONS)
def test_how_weights_and_gradients_travel_changes_no_number(label, pair, alone):
    assert_equal_runs(jobs.result(pair, label), jobs.result(alone, label if label in ALONE else "causal-lm"))


@pytest.mark.rotated
@pytest.mark.parametrize("name", EXACT)
def test_what_is_saved_is_the_whole_model_and_of_adapters_these_alone(name, mode_and_runs, alone):
    import safetensors.torch

    _, runs = mode_and_runs
    (file,), (expected,) = (sorted((f / name / "final").glob("*.safetensors")) for f in (runs, alone))
    found, expected = safetensors.torch.load_file(file), safetensors.torch.load_file(expected)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)
    assert name.endswith("-lora") == all("lora" in key for key in found)


def test_tied_weights_stay_one_and_a_whole_model_comes_back(pair):
    from transformers import AutoModelForCausalLM

    found = jobs.result(pair, "tied")
    assert found["is_one"]
    model = AutoModelForCausalLM.from_pretrained(pair / "tied" / "final")
    assert type(model).__name__ == "Qwen3ForCausalLM" and model.lm_head.weight is model.model.embed_tokens.weight
    for key, value in found["weights"].items():
        torch.testing.assert_close(model.state_dict()[key], value, rtol=0, atol=0)


def test_an_optimizer_of_the_users_trains_the_pieces(pair, alone):
    found, expected = jobs.result(pair, "given_optimizer"), jobs.result(alone, "causal-lm")
    for key, value in expected["weights"].items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)


def test_every_optimizer_that_is_not_refused_under_fsdp_steps_as_in_one_process(pair):
    apart = jobs.result(pair, "optimizers")
    assert {"adamw_torch_fused", "adamw_bf16", "muon"} <= apart.keys()
    for name, distance in apart.items():  # these round in bfloat16: by other bits, and from other sums
        assert distance < (1e-3 if name in ("adamw_bf16", "muon") else 1e-6), name
    refused = {name for name in OF_PYTORCH_OPTIMIZER if [*shard_settings.optimizer_problems(name)]}
    assert not apart.keys() & {*OF_PYTORCH_OPTIMIZER} or apart.keys() >= {*OF_PYTORCH_OPTIMIZER} - refused


def test_muon_makes_whole_matrices_orthogonal_of_which_each_process_has_a_part(pair, tmp_path):
    for found, expected in zip(jobs.result(pair, "steps_of_muon"), worker.steps_of_muon(tmp_path), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_run_with_muon_under_fsdp_is_that_of_one_process_and_goes_on_to_the_bit(pair, tmp_path):
    """Its iteration in bfloat16 makes rounding errors of gradients larger: compared is the way of each weight."""
    begun = causal_lm()(tmp_path / "begun").model.state_dict()
    expected, found = (
        worker.train("causal-lm", str(tmp_path / "alone"), evaluate=False, **MUON),
        jobs.result(pair, "muon"),
    )
    for key, value in expected["weights"].items():
        assert (found["weights"][key] - value).norm() < 0.02 * (value - begun[key]).norm(), key
    resumed = jobs.result(pair, "muon-on")["weights"]
    assert all(torch.equal(value, found["weights"][key]) for key, value in resumed.items())


def test_bfloat16_is_what_is_gathered_and_float32_what_is_kept(pair, alone):
    found, expected = jobs.result(pair, "low_precision"), jobs.result(alone, "causal-lm")
    assert found["kept"] == {torch.float32} and found["gathered"] == {torch.bfloat16}
    assert found["loss"] == pytest.approx(expected["log"][0]["loss"], rel=1e-2)
    assert found["loss"] != expected["log"][0]["loss"]


def test_pieces_are_evaluated_before_and_while_they_are_trained_and_the_best_are_loaded(pair):
    found = jobs.result(pair, "best_of_all")
    assert found["after"] == pytest.approx(found["best"], rel=1e-6)
    assert found["again"] < found["after"] < found["before"]  # the second training begins where the first ended


def test_weights_that_one_process_has_reach_the_others(pair, alone):
    found = jobs.result(pair, "on_meta")
    trainer = causal_lm(tie_word_embeddings=True)(pair / "alone", max_steps=2)
    trainer.train()
    for key, value in trainer.model.state_dict().items():
        torch.testing.assert_close(found[key], value, rtol=0, atol=1e-6, msg=key)


def test_a_model_in_pieces_generates(pair):
    found = jobs.result(pair, "generation")
    assert found["pieces"].shape[1] == found["length"] and torch.equal(found["pieces"], found["gathered"])
    assert (64, 32) in found["shapes"]  # the whole of an MLP's weight
    assert found["told"] is None


def test_an_overflow_on_one_process_skips_the_step_on_all(pair):
    assert jobs.result(pair, "overflow") == {"same": True, "scale": [4.0, 4.0]}


def test_the_main_process_logs_and_goes_first(pair):
    import logging

    (zero, level, logs, at), (one, other_level, other_logs, other_at) = jobs.result(pair, "order")
    assert (zero, one, logs, other_logs) == (0, 1, True, False)
    assert (level, other_level) == (logging.INFO, logging.ERROR) and at < other_at
