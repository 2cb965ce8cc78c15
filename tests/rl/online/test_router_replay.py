"""Online training with the experts that a mixture chose in sampling."""

import base64
import copy
import io
from dataclasses import replace

import numpy as np
import pytest
import torch

from posttrain.lm.attention import router_replay
from posttrain.rl import DistillationConfig, GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.policy.logprobs import completion_logps
from posttrain.rl.samples.samples import Rollout, Sample, sequences
from tests import tiny
from tests.rl.generation.test_vllm import Direct, OpenAI, Server

PROMPTS = [[5, 9, 14, 7], [8, 30], [11, 12, 13, 14, 15]]


def mixture(arch="qwen3_moe", **overrides):
    return tiny.mixture_of_experts(arch=arch, initializer_range=0.3, **overrides).eval()


def written(model, n=2, tokens=9):
    generator = LocalGenerator(tiny.tokenizer(), with_routes=True)
    generator.sync_weights(model)
    done = generator.generate(PROMPTS, n, Sampling(tokens, eos_token_ids=tuple(range(60))), list(range(3 * n)))
    return [
        Sample({}, "", PROMPTS[i // n], done.ids[i], done.logps[i], routes=done.routes[i], finished=done.finished[i])
        for i in range(3 * n)
    ]


@pytest.mark.parametrize("arch", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "deepseek_v3"])
def test_the_routes_of_sampling_are_those_of_the_whole_text(arch):
    model = mixture(arch)
    samples = written(model)
    assert len({len(sample.ids) for sample in samples}) > 1
    for sample in samples:
        row = torch.tensor([[*sample.prompt_ids, *sample.ids]])
        with router_replay.Recorder(model) as recorder:
            model(input_ids=row[:, :-1])
            assert torch.equal(sample.routes, recorder.take())


@pytest.mark.parametrize("share", [False, True])
def test_each_token_gets_its_own_routes_in_either_layout(share):
    """Routes of nobody, so that a token with those of another one would have other log-probabilities."""
    from posttrain.lm.attention.varlen_attention import enable_segments

    model = mixture()
    samples = written(model)
    router_replay.enable(model)
    generator = torch.Generator().manual_seed(0)
    by_prompt = [torch.rand(40, 2, 4, generator=generator).argsort(-1)[..., :2].short() for _ in PROMPTS]
    expected = []
    for i, sample in enumerate(samples):
        size = len(sample.prompt_ids)
        own = torch.rand(40, 2, 4, generator=generator).argsort(-1)[..., :2].short()
        sample = replace(sample, routes=torch.cat([by_prompt[i // 2][:size], own[: len(sample.ids) - 1]]))
        samples[i] = sample
        row = torch.tensor([[*sample.prompt_ids, *sample.ids]])
        logps = model(input_ids=row[:, :-1], routes=sample.routes[None]).logits.log_softmax(-1)[0, size - 1 :]
        expected.append(logps.gather(1, torch.tensor(sample.ids)[:, None]).squeeze(1))
    if share:
        enable_segments(model)
    (part,) = Rollout.of(samples).micro_batches(6, share)
    assert part["routes"].shape[:2] == part["input_ids"].shape
    found = completion_logps(model, part).logps
    for row, logps in zip(found, expected, strict=True):
        torch.testing.assert_close(row[: len(logps)], logps, atol=1e-5, rtol=0)


def test_rollouts_keep_routes_over_a_checkpoint():
    rollout = Rollout.of(written(mixture()))
    again = Rollout.from_state(rollout.state_dict())
    assert torch.equal(again.routes, rollout.routes) and rollout.routes.dtype == torch.int16


def grpo(path, model=None, agent=None, generator=None, **changes):
    usual = dict(
        output_dir=str(path), num_generations=2, max_completion_length=6, max_steps=2, per_device_train_batch_size=4,
        report_to="none", use_cpu=True, save_strategy="no", learning_rate=1e-2, optim="sgd", disable_tqdm=True,
        logging_steps=1,
    )  # fmt: skip
    prompts = [{"prompt": f"question {i}"} for i in range(8)]

    def reward(completion_ids, **columns):
        return [sum(ids) % 7 / 7 for ids in completion_ids]

    model, args = mixture() if model is None else model, GRPOConfig(**(usual | changes))
    given = {"processing_class": tiny.tokenizer(chat_template=tiny.CHATML), "agent": agent, "generator": generator}
    return GRPOTrainer(model, None if agent else reward, args, prompts, **given)


@pytest.mark.parametrize("changes", [{}, {"router_aux_loss_coef": 0.0, "num_iterations": 2, "beta": 0.1}])
def test_where_rounding_moves_no_route_training_stays_what_it_was(changes, tmp_path):
    """The second one puts completions behind a shared prompt, and learns twice from each rollout."""
    weights = []
    for replay in (False, True):
        trainer = grpo(tmp_path / str(replay), router_replay=replay, num_train_epochs=1, **changes)
        trainer.train()
        weights.append(trainer.model.state_dict())
    steps = changes.get("num_iterations", 1)
    assert any(not torch.equal(value, mixture().state_dict()[name]) for name, value in weights[0].items()) and steps
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, atol=1e-6, rtol=0, msg=name)


def test_the_policy_is_trained_with_the_experts_of_sampling(tmp_path):
    """The engine claims others than the policy would choose: training follows."""
    trainer, seen = grpo(tmp_path, router_replay=True, max_steps=1), []
    generate = trainer.generator.generate

    def others(*args):
        done = generate(*args)
        return type(done)(**vars(done) | {"routes": [torch.full_like(routes, 3) for routes in done.routes]})

    trainer.generator.generate = others
    router = trainer.model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, args, output: seen.append((module.training, output[2])))
    trainer.train()
    trained = torch.cat([experts.flatten() for training, experts in seen if training])
    assert (trained == 3).float().mean() > 0.7  # the rest are last tokens, which predict nothing, and padding


async def asks_twice(episode, row):
    """The second conversation goes on from the first, and the third has another beginning."""
    messages = [{"role": "user", "content": row["prompt"]}]
    messages.append(await episode.generate(messages, max_tokens=5))
    await episode.generate([*messages, {"role": "user", "content": "and then?"}], max_tokens=5)
    await episode.generate([{"role": "user", "content": "another"}], max_tokens=5)
    return float(len(messages[-1]["content"]))


@pytest.mark.parametrize("changes", [{}, {"rollout_process": True}], ids=["", "in a process of its own"])
def test_an_agents_turns_are_replayed_in_each_of_its_sequences(changes, tmp_path):
    trainer = grpo(tmp_path, router_replay=True, max_steps=1, agent=asks_twice, max_completion_length=60, **changes)
    make, seen = trainer.rollout_maker.of, []
    trainer.rollout_maker.of = lambda samples: seen.extend(samples) or make(samples)
    trainer.train()
    assert [len(sample.sequences) for sample in seen] == [2] * 4
    model = mixture()  # that which sampled
    for sample in sequences(seen):
        row = torch.tensor([[*sample.prompt_ids, *sample.ids]])
        with router_replay.Recorder(model) as recorder:
            model(input_ids=row[:, :-1])
            assert torch.equal(sample.routes, recorder.take())


def test_what_cannot_be_replayed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="router_replay=True: Qwen3ForCausalLM has no routers"):
        grpo(tmp_path, tiny.causal_lm(), router_replay=True)
    with pytest.raises(ValueError, match="and distillation does not; leave it out"):
        DistillationConfig(output_dir=str(tmp_path), router_replay=True, use_cpu=True)
    with pytest.raises(ValueError, match="TransformersGenerator returned none"):
        grpo(tmp_path, router_replay=True, generation_kwargs={"min_length": 1}).train()


class Routing(OpenAI):
    """What ``vllm serve --enable-scale-out --enable-return-routed-experts`` answers: the experts of every layer."""

    def do_POST(self):
        if self.path != "/inference/v1/generate":
            return super().do_POST()
        asked, said = self.asked(), self.server.settings.get("says", "routes")
        if said == "unknown":
            return self.answer("not started for it", 404)
        options = asked["sampling_params"]
        sampling = Sampling(options["max_tokens"], options["temperature"], eos_token_ids=(*options["stop_token_ids"],))
        seeds = [options["seed"] + number for number in range(options["n"])]
        with self.server.lock:
            done = self.server.engine.generate([asked["token_ids"]], options["n"], sampling, seeds)
        choices = []
        for number, (ids, logps, routes) in enumerate(zip(done.ids, done.logps, done.routes, strict=True)):
            file = io.BytesIO()  # of a layer without a router, nothing of interest
            np.save(file, torch.cat([torch.zeros_like(routes[:, :1]), routes], 1).numpy().astype(np.uint8))
            choices.append({
                "index": number, "token_ids": ids, "logprobs": {"content": [{"logprob": logp} for logp in logps]},
                "finish_reason": ("length", "stop")[done.finished[number]],
                "routed_experts": base64.b64encode(file.getvalue()).decode() if said == "routes" else None,
            })  # fmt: skip
        self.answer({"choices": choices[::-1]})


@pytest.mark.parametrize("says", ["routes", "nothing", "unknown"])
def test_the_routes_of_a_vllm_server_are_replayed(says, tmp_path):
    model = mixture(num_hidden_layers=3, mlp_only_layers=[0])
    server = Server(copy.deepcopy(model), Routing, says=says, mode="processed_logprobs")
    server.engine = LocalGenerator(tiny.tokenizer(), with_routes=True)
    server.engine.sync_weights(server.model)
    url = f"http://127.0.0.1:{server.server_port}"

    def send(weights, target):
        server.model.load_state_dict(dict(weights), strict=False)

    engine = VLLMServerGenerator(url, timeout=5, transport=Direct(send), with_routes=True)
    server.version = "posttrain-weights-1"  # as if it had got weights
    trainer = grpo(tmp_path, model, router_replay=True, max_steps=1, generator=engine)
    try:
        if says != "routes":
            with pytest.raises(ValueError, match="Start it with --enable-scale-out and --enable-return-routed-experts"):
                trainer.train()
            return
        make, seen = trainer.rollout_maker.of, []
        trainer.rollout_maker.of = lambda samples: seen.extend(samples) or make(samples)
        trainer.train()
    finally:
        server.shutdown()
    assert len(seen) == 4
    sampled = mixture(num_hidden_layers=3, mlp_only_layers=[0])
    for sample in seen:
        with router_replay.Recorder(sampled) as recorder:
            sampled(input_ids=torch.tensor([[*sample.prompt_ids, *sample.ids[:-1]]]))
            assert torch.equal(sample.routes, recorder.take())


def test_the_routes_of_a_colocated_vllm_are_asked_for_and_read(tmp_path):
    from types import SimpleNamespace

    from posttrain.rl.generation.engines import make_generator
    from posttrain.rl.generation.vllm_colocated import _written
    from posttrain.rl.generation.weights import completions

    args = GRPOConfig(output_dir=str(tmp_path), use_vllm=True, vllm_mode="colocate", router_replay=True, use_cpu=True)
    assert make_generator(tiny.tokenizer(), args).engine["enable_return_routed_experts"] is True
    routes = np.arange(3 * 3 * 2, dtype=np.uint8).reshape(3, 3, 2)  # two tokens of a prompt, and the first one written
    logprobs = [{token: SimpleNamespace(logprob=-1.0)} for token in (7, 8)]
    outputs = [
        SimpleNamespace(token_ids=(7, 8), logprobs=logprobs, finish_reason="stop", routed_experts=found)
        for found in (routes, None)
    ]
    model = mixture(num_hidden_layers=3, mlp_only_layers=[0])
    (known,) = completions([_written(outputs[0], router_replay.layers_of(model))], with_logps=True).routes
    assert known.dtype == torch.int16 and known.tolist() == routes[:, 1:].tolist()
    assert completions([_written(output) for output in outputs], with_logps=True).routes is None
