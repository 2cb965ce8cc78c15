"""vLLM in the trainer's process, against a stand-in with the interface of vLLM's LLM that forgets its weights
asleep.
"""

import copy
import sys
import types
from types import SimpleNamespace

import pytest
import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
from tests import tiny


class SamplingParams(SimpleNamespace):
    pass


class LLM:
    """Writes with a tiny model.

    Whoever asks it while it sleeps, or leaves it without weights, gets what vLLM would give.
    """

    made: list = []

    def __init__(self, **settings):
        self.settings, self.events = settings, []
        self.policy = copy.deepcopy(LLM.architecture)
        self.engine = LocalGenerator(tiny.tokenizer())
        self.engine.sync_weights(self.policy)
        self.awake = {"weights", "kv_cache"}
        self.forget()
        LLM.made.append(self)

    def forget(self):
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.normal_()

    def collective_rpc(self, method, kwargs):
        """As vLLM 0.32: its weights lie as its kernels want them, and `load_weights` works while it starts only."""
        assert method == "reload_weights" and list(kwargs) == ["weights_iterator"]
        self.reload_weights(kwargs["weights_iterator"])

    def reload_weights(self, weights):
        assert "weights" in self.awake, "written into memory that was given back"
        own = dict(self.policy.named_parameters())
        for name, weight in weights:
            own.pop(name).data.copy_(weight)
        assert not own

    def apply_model(self, function):
        """As vLLM's; it holds a model of transformers, and no head of vLLM."""
        function(self.policy)

    def reset_prefix_cache(self):
        self.events.append("reset")

    def sleep(self, level):
        assert self.settings["enable_sleep_mode"]
        self.events.append(f"sleep {level}")
        self.awake.clear()
        self.forget()

    def wake_up(self, tags):
        self.awake.update(tags)

    def generate(self, prompts, sampling_params, use_tqdm):
        assert self.awake == {"weights", "kv_cache"}
        if (size := self.settings["tensor_parallel_size"]) > 1:  # they write each token together, so all must ask alike
            asked: list = [None] * size
            torch.distributed.all_gather_object(asked, (prompts, [vars(how) for how in sampling_params]))
            assert all(one == asked[0] for one in asked), asked
            self.events.append("together")
        made = []
        for prompt, how in zip(prompts, sampling_params, strict=True):
            sampling = Sampling(
                how.max_tokens, how.temperature, how.top_p, how.top_k, eos_token_ids=tuple(how.stop_token_ids)
            )
            done = self.engine.generate([prompt["prompt_token_ids"]], how.n, sampling, [how.seed])
            logprobs = [
                {token: SimpleNamespace(logprob=logp)} for token, logp in zip(done.ids[0], done.logps[0], strict=True)
            ]
            reason = "stop" if done.finished[0] else "length"
            output = SimpleNamespace(token_ids=tuple(done.ids[0]), logprobs=logprobs, finish_reason=reason)
            made.append(SimpleNamespace(outputs=[output]))
        return made


@pytest.fixture
def model(monkeypatch):
    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, SamplingParams
    monkeypatch.setitem(sys.modules, "vllm", module)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "VLLM_ENABLE_V1_MULTIPROCESSING")
    for name in names:
        monkeypatch.setenv(name, "0")  # so that what is set in a test is taken back after it
        monkeypatch.delenv(name)
    made = tiny.causal_lm(initializer_range=0.3).eval()
    monkeypatch.setattr(LLM, "architecture", made, raising=False)
    monkeypatch.setattr(LLM, "made", [])
    return made


@pytest.mark.parametrize("sleeps", [False, True])
def test_completions_are_those_of_the_weights_of_the_last_sync(model, sleeps):
    colocated = VLLMColocatedGenerator({"max_model_len": 64}, sleeps=sleeps)
    local = LocalGenerator(tiny.tokenizer())
    prompts, seeds, sampling = [[5, 9, 14], [7, 8]], [1, 2, 3, 4], Sampling(9, 0.7, eos_token_ids=tuple(range(40)))
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.1)
        colocated.sync_weights(model)
        local.sync_weights(model)
        for _ in range(2):  # as turns with tools: the weights have slept away in between
            found, expected = (engine.generate(prompts, 2, sampling, seeds) for engine in (colocated, local))
            assert found.ids == expected.ids and found.finished == expected.finished and not found.is_exact
            for mine, theirs in zip(found.logps, expected.logps, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)
    (llm,) = LLM.made
    assert llm.settings["max_model_len"] == 64 and llm.settings["dtype"] == "float32"
    assert llm.events.count("sleep 2") == (4 if sleeps else 0)
    assert colocated.generate(prompts, 1, Sampling(3, top_k=2), [1, 2]).logps is None


def test_weights_that_did_not_arrive_are_noticed(model, monkeypatch):
    monkeypatch.setattr(LLM, "reload_weights", lambda self, weights: None)
    with pytest.raises(ValueError, match="the vLLM in this process differ from the trainer's"):
        VLLMColocatedGenerator().sync_weights(model)


def test_without_vllm_it_is_said_what_to_install():
    with pytest.raises(ImportError, match="pip install 'vllm'"):
        VLLMColocatedGenerator().sync_weights(tiny.causal_lm())


def test_processes_that_split_the_model_must_divide_all():
    with pytest.raises(ValueError, match="vllm_tensor_parallel_size=2 does not divide the 1 processes"):
        VLLMColocatedGenerator(group_size=2)


def test_a_trainer_samples_from_it(model, tmp_path):
    args = GRPOConfig(
        output_dir=str(tmp_path), per_device_train_batch_size=4, num_generations=4, max_completion_length=5,
        max_steps=3, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, use_vllm=True, vllm_enable_sleep_mode=True, vllm_gpu_memory_utilization=0.4, temperature=0.8,
    )  # fmt: skip

    def spread(completion_ids):
        return [sum(ids) % 11 / 11 for ids in completion_ids]

    trainer = GRPOTrainer(model, spread, args, [{"prompt": "the cat"}] * 3, None, tiny.tokenizer())
    trainer.train()
    assert LLM.made[0].settings["gpu_memory_utilization"] == 0.4 and LLM.made[0].events.count("sleep 2") == 3
    for record in trainer.state.log_history[:3]:
        assert record["sampling/sampling_logp_difference/max"] < 1e-4 and record["grad_norm"] > 0
