"""What an engine says of its own completions is what the policy says of them: the ratio at step 1 is 1, the KL 0.

Each row is a real trainer. Its old log-probabilities at the first rollout are compared with a forward of the initial
weights. A row says by `misses` that the engine's numbers are not the policy's; there one warning must name the cause,
and the trainer's own numbers take their place.
"""

from __future__ import annotations

import copy
import logging
import sys
import types
from dataclasses import replace

import pytest
import torch
import transformers

from posttrain.rl import (
    DistillationConfig,
    DistillationTrainer,
    GRPOConfig,
    GRPOTrainer,
    OnlineDPOConfig,
    OnlineDPOTrainer,
    ReinforcePlusPlusConfig,
    ReinforcePlusPlusTrainer,
    RLOOConfig,
    RLOOTrainer,
)
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.engines import FOLDED, REFUSED
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.transformers import TransformersGenerator
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.generation.weights import Weights
from tests import tiny
from tests.rl.generation import test_vllm_colocated as colocated
from tests.rl.generation.test_vllm import Direct, OpenAI, Server

WORDS = " ".join(tiny.CORPUS).split()
RAGGED = [{"prompt": " ".join(WORDS[i : i + 1 + 2 * (i % 3)])} for i in range(6)]
EVEN = [{"prompt": "the cat"}] * 6
STALE = {"max_staleness": 1, "steps_per_generation": 2}
SIZE = dict(
    vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0, eos_token_id=1, bos_token_id=None,
)  # fmt: skip


def spread(completion_ids, **columns):
    return [sum(ids) % 7 / 7 for ids in completion_ids]


def family(name, **changes):
    """A model of transformers with this name, of 2 layers and width 32, whose logits differ between texts."""

    def make():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(
            getattr(transformers, f"{name}Config")(**(SIZE | changes))
        )
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.2)
        return model

    return make


def rope(**parameters):
    """A Llama whose rotary embeddings are of a kind, first trained on texts of 16 tokens."""
    given = {"rope_theta": 10_000.0, "original_max_position_embeddings": 16} | parameters
    if given["rope_type"] in ("dynamic", "proportional", "linear"):
        del given["original_max_position_embeddings"]
    longest = 16 if given["rope_type"] == "dynamic" else 512
    return lambda: tiny.causal_lm(
        "llama", initializer_range=0.3, rope_parameters=given, max_position_embeddings=longest
    )


ROPES = {
    "linear": dict(rope_type="linear", factor=4.0),
    "dynamic": dict(rope_type="dynamic", factor=4.0),
    "yarn": dict(rope_type="yarn", factor=4.0),
    "longrope": dict(rope_type="longrope", short_factor=[1.0] * 4, long_factor=[3.0, 5.0, 7.0, 9.0], factor=32.0),
    "llama3": dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0),
    "proportional": dict(rope_type="proportional", partial_rotary_factor=0.5),
}


def tuned(kind, perturbed=True, **settings):
    """A model with a peft adapter of this kind, whose weights are not those that it begins with."""

    def make():
        import peft

        model = tiny.causal_lm(initializer_range=0.2)
        config = getattr(peft, f"{kind}Config")(**({"task_type": "CAUSAL_LM"} | settings))
        torch.manual_seed(1)
        model = peft.get_peft_model(model, config)
        with torch.no_grad():
            for parameter in model.parameters() if perturbed else ():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn_like(parameter)
        return model

    return make


ON = {"target_modules": ["q_proj", "v_proj", "down_proj"]}
TUNERS = {
    "lora": tuned("Lora", **ON),
    "dora": tuned("Lora", use_dora=True, **ON),
    "rslora": tuned("Lora", use_rslora=True, **ON),
    "adalora": tuned("AdaLora", total_step=10, **ON),
    "ia3": tuned("IA3", feedforward_modules=["down_proj"], **ON),
    "oft": tuned("OFT", oft_block_size=8, **ON),
    "vera": tuned("Vera", r=4, **(ON | {"target_modules": ["q_proj", "o_proj"]})),
    "lokr": tuned("LoKr", r=4, **ON),
    "loha": tuned("LoHa", r=4, **ON),
    "hra": tuned("HRA", r=4, **ON),
    "boft": tuned("BOFT", boft_block_size=4, **ON),
    "fourierft": tuned("FourierFT", n_frequency=20, **ON),
    "randlora": tuned("RandLora", r=4, **(ON | {"target_modules": ["q_proj", "o_proj"]})),
    "alora": tuned("Lora", alora_invocation_tokens=[265, 90, 82], **ON),  # the tokens of " two"
    "ln": tuned("LNTuning"),
    "prompt": tuned("PromptTuning", num_virtual_tokens=3),
    "p-tuning": tuned("PromptEncoder", num_virtual_tokens=3, encoder_hidden_size=32),
    "prefix": tuned("PrefixTuning", num_virtual_tokens=3),
}


def two_adapters():
    import peft

    model = tuned("Lora", **ON)()
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **ON))
    model.base_model.set_adapter(["default", "second"])
    return model


#: Each changes the logits before a token is drawn, or how it is drawn.
WARPS = {
    "suppress": {"suppress_tokens": list(range(40, 300))},
    "bad words": {"bad_words_ids": [[token] for token in range(40, 200)]},
    "n-grams": {"no_repeat_ngram_size": 1},
    "at least": {"min_new_tokens": 6},
    "bias": {"sequence_bias": [[[token], 5.0] for token in range(1, 20)]},
    "repetition": {"repetition_penalty": 1.8},
    "temperature": {"temperature": 0.5},
    "filters": {"top_k": 20, "top_p": 0.8, "min_p": 0.01},
    "greedy": {"do_sample": False},
}

ENGINES = {
    "local": {},
    "transformers": {"cache_implementation": "dynamic"},
    "continuous": {"use_transformers_continuous_batching": True},
}
TRAINERS = {
    "grpo": (GRPOTrainer, GRPOConfig, {"steps_per_generation": 2, "beta": 0.1}),
    "rloo": (RLOOTrainer, RLOOConfig, {"beta": 0.1}),
    "reinforce++": (ReinforcePlusPlusTrainer, ReinforcePlusPlusConfig, {"steps_per_generation": 2, "beta": 0.1}),
    "online-dpo": (OnlineDPOTrainer, OnlineDPOConfig, {"per_device_train_batch_size": 3}),
    "distillation": (DistillationTrainer, DistillationConfig, {
        "loss_type": "policy_gradient", "steps_per_generation": 2, "num_generations": 2,
    }),
}  # fmt: skip


def make(folder, trainer="grpo", model=None, rows=RAGGED, warp=None, **changes):
    kind, config, own = TRAINERS[trainer]
    usual = dict(
        output_dir=str(folder), per_device_train_batch_size=6, num_generations=2, max_completion_length=10, max_steps=1,
        logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True, learning_rate=1e-3,
        gradient_checkpointing=False, generation_kwargs=warp,
    )  # fmt: skip
    given = {"reward_funcs": spread, "processing_class": tiny.tokenizer(), "train_dataset": rows}
    if kind is DistillationTrainer:
        given = given | {"teacher_model": tiny.causal_lm(seed=3)}
        del given["reward_funcs"]
    if "peft_config" in changes:
        given = given | {"peft_config": changes.pop("peft_config")}
    model = tiny.causal_lm(initializer_range=0.3) if model is None else model()
    return kind(model=model, args=config(**(usual | own | changes)), **given)


def check(folder, caplog, misses=None, **row):
    """Train one step; see above."""
    run = make(folder, **row)
    begun, seen, before = copy.deepcopy(run.model), [], run.old_logps.of

    def of(rollout, samples):
        done = before(rollout, samples)
        seen.append((rollout, done[0], done[1], run.rollout_maker.logps_of(begun, done[0])[0]))
        return done

    run.old_logps.of = of
    with caplog.at_level(logging.WARNING):
        run.train()
    (rollout, done, kl, policys), *_ = seen
    mask = rollout.loss_mask
    limit = 1e-4 * max(1.0, float((policys * mask).abs().max()))
    told = [record.message for record in caplog.records if "are not those of the policy" in record.message]
    assert [bool(misses) and misses in one for one in told] == ([True] if misses else []), told
    if run.needs_old_logps or run._corrects_engine:
        if done.old_logps is not None:
            torch.testing.assert_close(done.old_logps[mask], policys[mask], atol=limit, rtol=0)
        else:
            assert not run.needs_old_logps
    assert run.old_logps.recomputes == bool(misses)
    log = run.state.log_history[0]
    if kl is not None:
        assert kl.abs().max() < 10 * limit
    if "kl" in log and run.uses_reference and not isinstance(run, DistillationTrainer):
        assert abs(log["kl"]) < limit
    if "objective/kl" in log:
        assert abs(log["objective/kl"]) < 10 * limit


FAST = {
    "local": dict(),
    "suppress": dict(trainer="rloo", warp=WARPS["suppress"]),
    "n-grams, REINFORCE++": dict(trainer="reinforce++", warp=WARPS["n-grams"]),
    "bias": dict(warp=WARPS["bias"]),
    "temperature": dict(trainer="rloo", warp=WARPS["temperature"]),
    "filters, continuous": dict(warp={"top_k": 20}, **ENGINES["continuous"]),
    "transformers": dict(trainer="rloo", **ENGINES["transformers"]),
    "distilled": dict(trainer="distillation", warp=WARPS["repetition"]),
    "preferred": dict(trainer="online-dpo", warp=WARPS["suppress"]),
    "copied": dict(warp=WARPS["suppress"], **STALE),
    "linear attention": dict(
        trainer="rloo",
        model=family("MiniMax", head_dim=8, num_local_experts=4, num_experts_per_tok=2, block_size=4,
                     layer_types=["linear_attention", "full_attention"]),
    ),
    # Its generate in transformers mixes the rows of a batch.
    "RWKV": dict(model=family("Rwkv", attention_hidden_size=32, context_length=512), misses="cause is the engine"),
    "router jitter": dict(
        trainer="rloo",
        model=family("Phimoe", num_local_experts=4, num_experts_per_tok=2, router_jitter_noise=0.2,
                     input_jitter_noise=0.2),
    ),
    "longrope": dict(trainer="rloo", model=rope(**ROPES["longrope"]), rows=EVEN, max_completion_length=20),
    "dynamic": dict(model=rope(**ROPES["dynamic"]), rows=EVEN, max_completion_length=20),
    "yarn": dict(model=rope(**ROPES["yarn"]), max_completion_length=20),
    "oft": dict(model=TUNERS["oft"]),
    "lokr": dict(trainer="rloo", model=TUNERS["lokr"]),
    "prompt": dict(model=TUNERS["prompt"], beta=0.0),
    "alora": dict(trainer="rloo", model=TUNERS["alora"], rows=[{"prompt": "the cat two"}] * 6),
    "p-tuning": dict(model=TUNERS["p-tuning"], beta=0.0),
    "two adapters": dict(trainer="rloo", model=two_adapters),
}  # fmt: skip


@pytest.mark.parametrize("row", FAST)
def test_the_ratio_of_the_first_step_is_1(tmp_path, caplog, row):
    check(tmp_path, caplog, **FAST[row])


def product():
    for trainer in TRAINERS:
        for engine, settings in ENGINES.items():
            for warp, kwargs in WARPS.items():
                if engine != "continuous" or warp == "temperature":
                    yield pytest.param({"trainer": trainer, "warp": kwargs} | settings, id=f"{trainer} {engine} {warp}")
    for trainer in ("grpo", "rloo"):
        for engine, settings in ENGINES.items():
            for name, parameters in ROPES.items():
                row = {"trainer": trainer, "model": rope(**parameters), "max_completion_length": 20, "rows": EVEN}
                yield pytest.param(row | settings, id=f"{trainer} {engine} {name}")
        for name, model in TUNERS.items():
            beta = {} if name not in ("prompt", "p-tuning", "prefix") else {"beta": 0.0}
            yield pytest.param({"trainer": trainer, "model": model} | beta, id=f"{trainer} {name}")


@pytest.mark.slow
@pytest.mark.parametrize("row", list(product()))
def test_the_ratio_of_the_first_step_is_1_everywhere(tmp_path, caplog, row):
    check(tmp_path, caplog, **row)


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ({"warp": WARPS["bias"]}, "generation_kwargs, which change logits: sequence_bias"),
        ({"model": rope(**ROPES["longrope"])}, "angles depend on the length"),
        ({"trainer": "rloo", "only_short": True}, "padding: completions of the longest prompts are right"),
        ({"model": TUNERS["lora"]}, "the adapter (LORA)"),
        ({"model": tiny.mixture_of_experts}, "the routers"),
        ({"trainer": "distillation"}, "the engine: report it"),
        (STALE, "the engine: report it"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_engine_that_declares_other_numbers_exact_is_found_out(tmp_path, caplog, monkeypatch, row, cause):
    row = dict(row)
    only_short = row.pop("only_short", False)

    def lying(tell):
        def generate(self, prompts, n, *args, **options):
            done = tell(self, prompts, n, *args, **options)
            longest = max(map(len, prompts)) if only_short else None
            gaps = [0.0 if len(prompts[number // n]) == longest else 0.05 for number in range(len(done.ids))]
            logps = [[logp - gap for logp in own] for own, gap in zip(done.logps, gaps, strict=True)]
            return replace(done, logps=logps, is_exact=True)

        return generate

    for kind in (LocalGenerator, TransformersGenerator):
        monkeypatch.setattr(kind, "generate", lying(kind.generate))
    check(tmp_path, caplog, misses=cause, **row)


def test_a_run_that_recomputes_goes_on_so_after_a_resume(tmp_path):
    row = FAST["RWKV"] | {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    del row["misses"]
    make(tmp_path, **row).train()
    run = make(tmp_path, **row)
    run.old_logps.misses = None  # so that it cannot be called
    run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert run.old_logps.recomputes


@pytest.mark.parametrize("engine", ENGINES)
def test_generation_kwargs_that_are_arguments_too_are_followed_by_every_engine(tmp_path, engine):
    def written(**kwargs):
        run = make(tmp_path, rows=EVEN, warp=kwargs, **ENGINES[engine])
        run.old_logps.compared = True
        return run, run.rollout_maker.of(sampled(run))

    run, rollout = written(max_new_tokens=3, temperature=0.5, top_k=7, top_p=0.9)
    assert rollout.completion_lengths.max() == 3
    own = run.sampling()
    assert (own.max_new_tokens, own.temperature, own.top_k, own.top_p) == (3, 0.5, 7, 0.9)
    config = run.generation_config
    assert (config.max_new_tokens, config.temperature, config.top_k, config.top_p) == (3, 0.5, 7, 0.9)
    run, rollout = written(do_sample=False)
    assert len({tuple(row) for row in rollout.completion_ids.tolist()}) == 1 and not run.generation_config.do_sample
    first = int(rollout.completion_ids[0, 0])
    run, rollout = written(do_sample=False, eos_token_id=first)
    assert run.sampling().eos_token_ids == (first,) and rollout.completion_lengths.tolist() == [1] * len(rollout)


def sampled(run):
    return run.rollout_maker.sample(run.rollout_maker.begin(next(iter(run.get_train_dataloader())), 0))


@pytest.mark.parametrize("engine", [{}, {"use_vllm": True}, ENGINES["continuous"]], ids=["local", "vllm", "continuous"])
def test_generation_kwargs_that_no_engine_follows_are_refused_by_name(tmp_path, engine):
    for name in REFUSED:
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, generation_kwargs={name: 1}, **engine)
        assert any(f"generation_kwargs: {name}=1 is not taken" in one for one in map(str, config._engine_problems()))
    for name, value in {"temperature": 0, "top_p": 2, "top_k": -3, "max_new_tokens": "x"}.items():
        config = GRPOConfig(output_dir=str(tmp_path), use_cpu=True, generation_kwargs={name: value}, **engine)
        assert any(f"generation_kwargs: {FOLDED[name]}={value!r} must" in one for one in config._engine_problems())
    if engine == ENGINES["continuous"]:
        for kwargs in ({"num_beams": 2}, {"suppress_tokens": [5]}, {"min_p": 0.1}, {"repetition_penalty": 1.2}):
            with pytest.raises(ValueError, match=f"generation_kwargs: .*{next(iter(kwargs))}"):
                make(tmp_path, warp=kwargs, **engine)


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
@pytest.mark.parametrize("kind", ["prompt", "p-tuning", "prefix"])
def test_a_reference_that_is_not_the_policy_at_the_start_is_refused(tmp_path, trainer, kind):
    import peft

    configs = {
        "prompt": peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        "p-tuning": peft.PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=32),
        "prefix": peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    }
    with pytest.raises(ValueError, match="policy and reference already differ by up to"):
        make(tmp_path, trainer=trainer, peft_config=configs[kind]).train()


def test_virtual_tokens_are_refused_where_an_engine_has_the_weights_alone(tmp_path):
    with pytest.raises(ValueError, match="without the virtual tokens of PromptTuningConfig"):
        make(tmp_path, model=TUNERS["prompt"], beta=0.0, **ENGINES["continuous"]).train()
    with pytest.raises(ValueError, match="vLLM generates with the model's weights alone"):
        Weights(TUNERS["p-tuning"]())
    with pytest.raises(ValueError, match="vLLM generates .* alora_invocation_tokens cannot begin"):
        Weights(TUNERS["alora"]())


@pytest.mark.parametrize("trainer", ["grpo", "rloo"])
def test_two_adapters_that_are_active_stay_so(tmp_path, trainer):
    run = make(tmp_path, trainer=trainer, model=two_adapters)
    run.train()
    assert run.model.active_adapters == ["default", "second"]


def test_log_probabilities_of_a_constrained_distribution_are_not_the_policys(tmp_path, caplog, monkeypatch):
    """vLLM returns those of the distribution that it draws from, and is asked without the constraint whether it has
    the weights.
    """
    plain, asked = colocated.LLM.generate, []

    def constrained(self, prompts, sampling_params, use_tqdm):
        done = plain(self, prompts, sampling_params, use_tqdm)
        asked.extend(vars(how).get("structured_outputs") for how in sampling_params)
        for output, how in zip(done, sampling_params, strict=True):
            if hasattr(how, "structured_outputs"):
                for found in output.outputs[0].logprobs:
                    for token in found.values():
                        token.logprob = 0.0
        return done

    module, sampling = types.ModuleType("vllm"), types.ModuleType("vllm.sampling_params")
    module.LLM, module.SamplingParams, sampling.StructuredOutputsParams = colocated.LLM, colocated.SamplingParams, dict
    for name, value in (("vllm", module), ("vllm.sampling_params", sampling)):
        monkeypatch.setitem(sys.modules, name, value)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")  # so that what is set in a test is taken back after it
        monkeypatch.delenv(name)
    monkeypatch.setattr(colocated.LLM, "generate", constrained)
    monkeypatch.setattr(colocated.LLM, "architecture", tiny.causal_lm(initializer_range=0.3).eval(), raising=False)
    row = {"use_vllm": True, "vllm_structured_outputs_regex": "[ab]+"}
    check(tmp_path, caplog, **row)
    assert asked[0] is None and asked[-1] == {"regex": "[ab]+"}


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_servers_log_probabilities_are_read_where_nothing_changes_them(mode):
    model = tiny.causal_lm(initializer_range=0.3).eval()
    server = Server(copy.deepcopy(model), OpenAI, mode=mode)
    try:
        url, nothing = f"http://127.0.0.1:{server.server_port}", Direct(lambda weights, server: None)
        engine = VLLMServerGenerator(url, options={"bad_words": ["x"]}, transport=nothing)
        engine.sync_weights(model)
        assert "bad_words" not in server.last
        done = engine.generate([[5, 6, 7]], 2, Sampling(4), [1, 2])
        assert server.last["bad_words"] == ["x"] and (done.logps is None) == (mode == "processed_logprobs")
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", ROPES)
def test_the_local_engine_writes_what_generate_writes_beyond_the_length_of_pretraining(kind):
    for prompt in ([5, 9, 14], list(range(40, 60))):
        # Each its own: angles of the kind dynamic hang on the texts that were read before.
        (model, other), engine = (rope(**ROPES[kind])().eval() for _ in range(2)), LocalGenerator(tiny.tokenizer())
        engine.sync_weights(other)
        done = engine.generate([prompt], 1, Sampling(24, temperature=0))
        whole = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False, eos_token_id=None)
        assert done.ids[0] == whole[0, len(prompt) :].tolist()
        assert done.is_exact == (kind not in ("dynamic", "longrope"))
