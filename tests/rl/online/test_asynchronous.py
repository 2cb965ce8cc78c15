"""Sampling that goes on while the trainer learns: bound on staleness, order of prompts, corrections, resuming."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from posttrain.core import TrainerCallback
from posttrain.core.data.samplers import mix
from posttrain.core.errors import ConfigError
from posttrain.core.training.run import Run
from posttrain.rl import (
    AsyncGRPOConfig,
    AsyncGRPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    ReinforcePlusPlusTrainer,
    RLOOTrainer,
)
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.engines import CopiedGenerator
from posttrain.rl.generation.local import LocalGenerator
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.online.asynchronous import Turns, Worker
from posttrain.rl.online.ledger import audit
from posttrain.rl.rewards import background
from posttrain.rl.rewards.scoring import GroupScores, RewardArguments, Rewards
from posttrain.rl.samples.samples import Sample
from tests import tiny
from tests.contract.trainers import arguments, digit_sum, text_rows
from tests.rl.generation.test_vllm import Direct, OpenAI, Server

WAIT = 60  # seconds after which a test that hangs fails


class PowerCut(Exception):
    pass


def recording(kind):
    """A trainer that notes each rollout it begins to learn from: step, prompts, and versions of the tokens."""

    class Recording(kind):
        def make_rollout(self, batches):
            rollout = super().make_rollout(batches)
            if rollout is not None:
                rows = rollout.prompt_ids.tolist()
                prompts = [tuple(row[:n]) for row, n in zip(rows, rollout.prompt_lengths, strict=True)]
                notes = self.__dict__.setdefault("notes", [])
                versions = None if rollout.versions is None else rollout.versions[rollout.loss_mask]
                notes.append((self.state.global_step, prompts, versions))
                self.__dict__.setdefault("rollouts", []).append(rollout)
            return rollout

    Recording.__name__ = kind.__name__
    return Recording


def make(out, kind=GRPOTrainer, rows=9, callbacks=None, reward=digit_sum, generator=None, environments=None, **changes):
    usual = {"num_generations": 2, "max_completion_length": 6, "gradient_checkpointing": False,
             "generation_kwargs": {"stop": ["e", "a", "o"]}}  # fmt: skip
    return recording(kind)(
        model=tiny.causal_lm(initializer_range=0.1),
        reward_funcs=reward,
        args=arguments(kind.config_class, out, **(usual | changes)),
        processing_class=tiny.tokenizer(),
        train_dataset=[{"prompt": row["prompt"]} for row in text_rows(rows)],
        eval_dataset=[{"prompt": row["prompt"]} for row in text_rows(3)],
        callbacks=callbacks,
        generator=generator,
        environment_factory=environments,
    )


def prompts_of(trainer):
    return [prompts for _, prompts, _ in vars(trainer).get("notes", ())]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (GRPOTrainer, {"max_staleness": 1}),
        (RLOOTrainer, {"max_staleness": 3}),
        # four optimizer steps a rollout
        (GRPOTrainer, {"max_staleness": 2, "steps_per_generation": 2, "num_iterations": 2}),
        (RLOOTrainer, {"max_staleness": 5, "steps_per_generation": 2, "num_iterations": 2}),
        # a window holds two rollouts and a half, and the epoch's last one fewer
        (ReinforcePlusPlusTrainer, {"max_staleness": 1, "per_device_train_batch_size": 2, "rows": 8,
                                    "gradient_accumulation_steps": 5, "steps_per_generation": 2}),
        (GRPOTrainer, {"max_staleness": 2, "rows": 4}),  # an epoch is one rollout
    ],
    ids=str,
)  # fmt: skip
def test_no_completion_is_older_than_the_bound_and_prompts_come_in_the_same_order(kind, changes, tmp_path):
    straight = make(tmp_path / "straight", kind, **{**changes, "max_staleness": 0})
    straight.train()
    ahead = make(tmp_path / "ahead", kind, **changes)
    ahead.train()
    assert ahead.state.global_step == straight.state.global_step
    assert prompts_of(ahead) == prompts_of(straight)
    ages = [step - int(versions.min()) for step, _, versions in ahead.notes]
    assert max(ages) <= changes["max_staleness"] and min(ages) >= 0
    logged = [record["staleness/max"] for record in ahead.state.log_history if "staleness/max" in record]
    assert logged and max(logged) == max(ages)
    assert all(versions is None for *_, versions in straight.notes)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("posttrain-s")]


def test_dynamic_sampling_takes_more_rollouts_from_the_queue(tmp_path):
    def mostly_equal(completion_ids):
        return [float(sum(ids) % 5 == 0) for ids in completion_ids]

    changes = {"reward": mostly_equal, "dynamic_sampling": True, "dynamic_sampling_rounds": 3, "rows": 40}
    trainer = make(tmp_path / "ahead", max_staleness=2, num_train_epochs=1, **changes)
    trainer.train()
    assert max(step - int(versions.min()) for step, _, versions in trainer.notes) <= 2
    assert any(record.get("dynamic_sampling/kept", 1) < 1 for record in trainer.state.log_history)


def test_the_reward_of_a_rollout_is_computed_while_an_earlier_one_is_learned_from(tmp_path):
    """In turn, the second call of the reward would wait for a step that begins after it."""
    stepping, calls = threading.Event(), []

    def reward(completion_ids):
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            assert stepping.wait(WAIT), "no optimizer step has begun"
        return digit_sum(completion_ids)

    class Begins(TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            stepping.set()

    trainer = make(tmp_path, reward=reward, max_staleness=1, callbacks=[Begins()])
    trainer.train()
    assert len(calls) == trainer.state.global_step and set(calls) == {"posttrain-call"}  # with a time limit


@pytest.mark.parametrize("at_once", [1, 2])
def test_as_many_rollouts_are_scored_at_a_time_as_rewards_may_run(at_once, tmp_path):
    running, most, lock, both = 0, 0, threading.Lock(), threading.Event()

    def reward(completion_ids):
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        if most == at_once == 2:
            both.set()
        if at_once == 2:
            both.wait(WAIT)  # the first call waits for the second one
        with lock:
            running -= 1
        return digit_sum(completion_ids)

    make(tmp_path, reward=reward, max_staleness=3, reward_concurrency=at_once, max_steps=4).train()
    assert most == at_once


def test_synchronous_training_uses_no_thread_and_completions_of_the_weights_that_learn(tmp_path):
    class Checking(LocalGenerator):
        def generate(self, *args, **kwargs):
            assert threading.current_thread() is threading.main_thread()
            before.append({name: value.clone() for name, value in self.model.state_dict().items()})
            return super().generate(*args, **kwargs)

    before, at_step = [], []

    class Begins(TrainerCallback):
        def on_step_begin(self, args, state, control, model=None, **kwargs):
            at_step.append({name: value.clone() for name, value in model.state_dict().items()})

    make(tmp_path, generator=Checking(tiny.tokenizer()), callbacks=[Begins()]).train()
    assert len(before) == len(at_step) > 2
    for old, new in zip(before, at_step, strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)


# ---- corrections


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
@pytest.mark.parametrize("mode", ["token_truncate", "sequence_mask"])
def test_completions_are_weighted_by_the_ratio_of_the_policy_to_the_weights_that_wrote_them(kind, mode, tmp_path):
    """The weights that wrote each rollout are kept, and the ratios computed from them in a plain way."""
    kept, found = {}, []

    class Keeping(CopiedGenerator):
        version = 0

        def sync_weights(self, model):
            kept[self.version] = {name: value.clone() for name, value in model.state_dict().items()}
            super().sync_weights(model)

    class Looks(kind):
        def make_rollout(self, batches):
            rollout = super().make_rollout(batches)
            if rollout is not None and self.state.global_step > 1:
                found.append((rollout, {name: value.clone() for name, value in self.model.state_dict().items()}))
            return rollout

    Looks.__name__ = kind.__name__
    trainer = make(
        tmp_path, Looks, generator=Keeping(LocalGenerator(tiny.tokenizer())), max_staleness=2,
        vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=3.0, learning_rate=0.5,
    )  # fmt: skip
    trainer.train()
    model, far = tiny.causal_lm(initializer_range=0.1).eval(), 0.0
    for rollout, now in found:
        for i in range(len(rollout)):
            prompt = rollout.prompt_ids[i, : rollout.prompt_lengths[i]].tolist()
            ids = rollout.completion_ids[i, : rollout.completion_lengths[i]].tolist()
            values = []
            for state in (now, kept[int(rollout.versions[i, 0])]):
                model.load_state_dict(state)
                with torch.no_grad():
                    logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
                values.append(logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1))
            ratio = (values[0] - values[1]).exp()
            far = max(far, float((ratio - 1).abs().max()))
            if mode == "token_truncate":
                expected, mine = ratio.clamp(max=3), rollout.correction[i, : len(ids)]
            else:
                expected, mine = ratio.prod()[None], rollout.correction[i]
                expected = expected.masked_fill(expected > 3, 0)
            torch.testing.assert_close(mine, expected, atol=1e-4, rtol=1e-4)
    assert far > 0.01  # else nothing was corrected


@pytest.mark.parametrize("kind", [RLOOTrainer, GRPOTrainer])
def test_the_loss_of_each_algorithm_is_weighted_once(kind, tmp_path):
    trainer = make(tmp_path, kind, max_staleness=1, beta=0.0, max_steps=1, vllm_importance_sampling_mode="token_mask")
    trainer.train()
    batch = {
        "input_ids": torch.tensor([[5, 6, 7, 8], [5, 6, 9, 10]]), "loss_mask": torch.ones(2, 2),
        "advantages": torch.tensor([1.0, -2.0]), "old_logps": torch.zeros(2, 2), "tokens_per_row": torch.tensor(2.0),
    }  # fmt: skip
    logps = torch.randn(2, 2).mul(0.01)

    class Logps:
        pass

    def loss(correction):
        policy = Logps()
        policy.logps, policy.entropies, policy.aux_loss, policy._asdict = logps, torch.zeros(2, 2), None, dict
        trainer.logps = lambda *args, **kwargs: policy
        inputs = batch if correction is None else batch | {"correction": correction}
        return trainer.compute_loss(trainer.model, inputs, num_items_in_batch=torch.tensor(4.0))

    assert loss(torch.full((2, 2), 0.5)).item() == pytest.approx(loss(None).item() / 2)
    assert loss(None).item() != 0


def test_stale_completions_without_log_probabilities_are_refused(tmp_path):
    class Silent(CopiedGenerator):
        def generate(self, *args, **kwargs):
            return replace(super().generate(*args, **kwargs), logps=None)

    silent = Silent(LocalGenerator(tiny.tokenizer()))
    with pytest.raises(ValueError, match="Silent returned no log-probabilities"):
        make(tmp_path, generator=silent, max_staleness=1).train()
    make(tmp_path, generator=silent, max_staleness=1, max_steps=2, vllm_importance_sampling_correction=False).train()


def test_engines_that_generate_with_the_weights_in_training_are_refused(tmp_path):
    with pytest.raises(ValueError, match="LocalGenerator generates with the weights that are being trained"):
        make(tmp_path, generator=LocalGenerator(tiny.tokenizer()), max_staleness=1)
    with pytest.raises(ValueError, match="vllm_mode='server', or max_staleness=0"):
        GRPOConfig(str(tmp_path), max_staleness=1, use_vllm=True, vllm_mode="colocate")
    assert isinstance(make(tmp_path, max_staleness=1).generator, CopiedGenerator)


# ---- weights that change while an engine writes


class InFlight(CopiedGenerator):
    """Writes the second half of its completions after the next weight sync, as a server that was paused does."""

    updates_in_flight = True

    def __init__(self):
        super().__init__(LocalGenerator(tiny.tokenizer()))
        self.version, self.synced, self.calls, self.begun = 0, threading.Condition(), 0, threading.Event()

    def sync_weights(self, model):
        with self.synced:
            super().sync_weights(model)
            self.has = self.version
            self.synced.notify_all()

    def generate(self, prompts, n, sampling, seeds=None):
        with self.synced:
            self.calls, first = self.calls + 1, self.has
            self.begun.set() if self.calls == 2 else None
            half = super().generate(prompts, n, replace(sampling, max_new_tokens=3, stop=()), seeds)
            if self.calls == 2:
                assert self.synced.wait_for(lambda: self.has != first, WAIT), "no weights came while it was writing"
            second = self.has
            asked = [prompt for prompt in prompts for _ in range(n)]
            rows = [[*prompt, *ids] for prompt, ids in zip(asked, half.ids, strict=True)]
            rest = super().generate(rows, 1, replace(sampling, max_new_tokens=3, stop=()), seeds)

        def joined(left, right):
            return [a + b for a, b in zip(left, right, strict=True)]

        versions = joined([[first] * len(ids) for ids in half.ids], [[second] * len(ids) for ids in rest.ids])
        return replace(rest, ids=joined(half.ids, rest.ids), logps=joined(half.logps, rest.logps), versions=versions)


class HoldsFirstStep(TrainerCallback):
    """Begins the first optimizer step when `ready` says so: the second rollout is being written by then."""

    def __init__(self, ready):
        self.ready = ready

    def on_step_begin(self, args, state, control, **kwargs):
        assert state.global_step > 0 or self.ready(), "no second rollout was begun"


def test_a_completion_goes_on_under_new_weights_and_knows_the_version_of_each_token(tmp_path):
    engine = InFlight()
    holds = HoldsFirstStep(lambda: engine.begun.wait(WAIT))
    trainer = make(tmp_path, generator=engine, max_staleness=2, callbacks=[holds])
    trainer.train()
    (mixed,) = [one for one in trainer.rollouts if len(one.versions[one.loss_mask].unique()) > 1]
    old, new = mixed.versions[:, :3][mixed.loss_mask[:, :3]], mixed.versions[:, 3:][mixed.loss_mask[:, 3:]]
    assert int(old.max()) < int(new.min()) and len(new) > len(mixed)
    assert max(step - int(versions.min()) for step, _, versions in trainer.notes) <= 2


class Pausing(OpenAI):
    """vLLM's interface that takes tokens: it writes one token after the other, and none while it is paused."""

    def do_POST(self):
        if self.path.startswith("/pause"):
            self.server.running.clear()
        if self.path == "/resume":
            self.server.resumed += 1
            self.server.running.set()
        if self.path != "/inference/v1/generate":
            return super().do_POST()
        asked = self.asked()
        if self.server.is_old:
            return self.answer("Scale-out endpoints are disabled.", 403)
        wanted = asked["sampling_params"]
        rows = [self.row(asked["token_ids"], wanted, wanted["seed"] + number) for number in range(wanted["n"])]
        return self.answer({"choices": [{"index": i} | row for i, row in enumerate(rows)][::-1]})

    def row(self, prompt, wanted, seed):
        ids, logps, versions, server = [], [], [], self.server
        server.rows += 1
        waits = server.holds(prompt)
        for place in range(wanted["max_tokens"]):
            if waits and place == 3:
                server.waits_for = server.resumed + 1
                assert server.wait_until(lambda: server.resumed >= server.waits_for), "no weights came meanwhile"
            server.running.wait(WAIT)
            with server.lock:
                sampling = Sampling(1, wanted["temperature"])
                done = server.engine.generate([[*prompt, *ids]], 1, sampling, [mix(seed, place)])
                ids, logps, versions = ids + done.ids[0], logps + done.logps[0], [*versions, server.version]
        spans = [{"version": v, "start": versions.index(v), "end": versions.index(v) + versions.count(v)}
                 for v in dict.fromkeys(versions)]  # fmt: skip
        content = [{"token_id": token, "logprob": logp} for token, logp in zip(ids, logps, strict=True)]
        return {"token_ids": ids, "logprobs": {"content": content}, "finish_reason": "length", "weight_versions": spans}


@pytest.fixture
def server():
    one = Server(tiny.causal_lm(initializer_range=0.1).eval(), Pausing, mode="processed_logprobs")
    one.running, one.resumed, one.rows, one.waits_for = threading.Event(), 0, 0, 0
    one.running.set()
    one.is_old, one.holds = False, lambda prompt: False

    def wait_until(true):
        until = time.monotonic() + WAIT
        while not true() and time.monotonic() < until:
            time.sleep(0.01)
        return true()

    one.wait_until = wait_until
    yield one
    one.shutdown()


def client_of(server, in_flight=True):
    def send(weights, target):
        with server.lock:
            server.model.load_state_dict(dict(weights), strict=False)

    url = f"http://127.0.0.1:{server.server_port}/"
    return VLLMServerGenerator(url, timeout=WAIT, transport=Direct(send), in_flight=in_flight)


def test_a_server_goes_on_with_what_it_has_begun_and_says_which_weights_wrote_a_token(server):
    models = [tiny.causal_lm(initializer_range=0.3, seed=seed).eval() for seed in (1, 2)]
    client = client_of(server)
    client.version = 40
    client.sync_weights(models[0])
    second = server.rows + 2  # the second completion of the next request
    server.holds = lambda prompt: server.rows == second
    found = Future()
    Worker("test-generate").submit(found, lambda: client.generate([[5, 9, 14]], 3, Sampling(6), [1, 2, 3]))
    assert server.wait_until(lambda: server.waits_for)
    client.version = 41
    client.sync_weights(models[1])
    done = found.result(WAIT)
    assert done.versions == [[40] * 6, [40] * 3 + [41] * 3, [41] * 6]
    paths = [path for path in server.paths if path.startswith(("/pause", "/reset", "/resume"))]
    assert paths[-3:] == ["/pause?mode=keep", "/reset_prefix_cache?reset_running_requests=true", "/resume"]
    for ids, logps, versions in zip(done.ids, done.logps, done.versions, strict=True):
        with torch.no_grad():
            both = [model(torch.tensor([[5, 9, 14, *ids]])).logits[0, 2:-1].log_softmax(-1) for model in models]
        expected = [both[version - 40][place, ids[place]].item() for place, version in enumerate(versions)]
        assert logps == pytest.approx(expected, abs=1e-5)


def test_the_trainer_does_not_wait_for_what_a_server_writes(server):
    """The check after a sync would be answered after all of it; weights that arrived twice count as arriving."""
    model, client = tiny.causal_lm(initializer_range=0.3).eval(), client_of(server)

    def asked():
        return server.paths.count("/inference/v1/generate")

    found, checks = [], []
    for writes in (False, True, True, False):
        before = asked()
        if writes:
            server.waits_for, held = 0, server.rows + 1
            server.holds = lambda prompt, held=held: server.rows == held
            found.append(Future())
            Worker("test-generate").submit(found[-1], lambda: client.generate([[5, 9, 14]], 1, Sampling(6), [1]))
            assert server.wait_until(lambda: server.waits_for)
        client.version += 1
        client.sync_weights(model)
        [one.result(WAIT) for one in found]
        checks.append(asked() - before - writes)
    assert checks == [1, 1, 0, 1]
    assert found[1].result().versions == [[2] * 3 + [3] * 3]


def test_without_that_interface_the_weights_count_as_those_at_the_beginning(server, caplog):
    server.is_old, client = True, client_of(server)
    client.sync_weights(tiny.causal_lm(initializer_range=0.3).eval())
    done = client.generate([[5, 9, 14]], 2, Sampling(4), [1, 2])
    assert done.versions is None and len(done.logps) == 2 and "--enable-scale-out" in caplog.text
    assert sum(path == "/inference/v1/generate" for path in server.paths) == 1  # it is not asked for again


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_trainer_updates_a_server_in_flight(kind, server, tmp_path):
    client = client_of(server)
    of_second = tiny.tokenizer()(text_rows(9)[5]["prompt"])["input_ids"]  # a rollout has four prompts
    server.holds = lambda prompt: prompt == of_second and not server.waits_for
    holds = HoldsFirstStep(lambda: server.wait_until(lambda: server.waits_for))
    trainer = make(tmp_path, kind, generator=client, max_staleness=2, callbacks=[holds], shuffle_dataset=False)
    trainer.train()
    versions = [versions for _, _, versions in trainer.notes]
    assert any(len(one.unique()) > 1 for one in versions)
    assert max(step - int(one.min()) for one, (step, *_) in zip(versions, trainer.notes, strict=True)) <= 2
    ratios = [r["sampling/sampling_logp_difference/mean"] for r in trainer.state.log_history if "staleness/mean" in r]
    assert ratios[0] < 1e-5 and max(ratios) > 1e-4  # the first rollout is of the present weights


def test_the_asynchronous_trainer_of_trl_is_grpo_with_its_defaults(server, tmp_path):
    url = f"http://127.0.0.1:{server.server_port}"
    args = arguments(AsyncGRPOConfig, tmp_path, num_generations=2, max_completion_length=6, request_timeout=30,
                     max_inflight_tasks=-1, queue_maxsize=64, vllm_server_base_url=url)  # fmt: skip
    assert (args.max_staleness, args.vllm_request_timeout, args.vllm_mode, args.loss_type) == (4, 30, "server", "bnpo")
    rows = [{"prompt": row["prompt"]} for row in text_rows(9)]
    model = tiny.causal_lm(initializer_range=0.1)
    with pytest.raises(
        ValueError, match="rollout_worker has no start, stop, update_model_version, check_health, rollo"
    ):
        AsyncGRPOTrainer(model, digit_sum, args, rows, tiny.tokenizer(), rollout_worker=object())
    with pytest.raises(ValueError, match="weight_transfer is an object of trl's own loop. Pass an engine as generator"):
        AsyncGRPOTrainer(model, digit_sum, args, rows, tiny.tokenizer(), weight_transfer=object())
    trainer = AsyncGRPOTrainer(model, digit_sum, args, rows, tiny.tokenizer(), generator=client_of(server))
    trainer.train()
    logged = [record["staleness/max"] for record in trainer.state.log_history if "staleness/max" in record]
    assert trainer.state.global_step > 2 and logged and 0 < max(logged) <= 4
    with pytest.raises(ConfigError, match="weight_sync_steps=3 has no effect: weights are sent after each"):
        AsyncGRPOConfig(str(tmp_path), weight_sync_steps=3)


@pytest.mark.parametrize("bound", [0, 2])
def test_a_server_that_is_started_anew_gets_the_weights_again(bound, tmp_path, monkeypatch):
    """It has lost them during the third rollout, which is sampled again with the weights of the trainer."""
    server = Server(tiny.causal_lm(initializer_range=0.1).eval(), OpenAI, mode="processed_logprobs")
    fresh = tiny.causal_lm(seed=7, initializer_range=0.3).state_dict()
    write, calls = server.write, []

    def lose(*asked):
        calls.append(asked)
        if len(calls) == 12:
            with server.lock:
                server.version = "default"
                server.model.load_state_dict(fresh)
        return write(*asked)

    monkeypatch.setattr(server, "write", lose)
    trainer = make(tmp_path, generator=client_of(server, in_flight=False), max_staleness=bound, sample_ledger=True)
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and len(found.used) == 8 * trainer.state.global_step
    gaps = [r["sampling/sampling_logp_difference/max"] for r in trainer.state.log_history if "reward" in r]
    assert max(gaps) < (1e-4 if bound == 0 else 0.5)  # those of the lost weights are above 1
    server.shutdown()


@pytest.mark.rotated
@pytest.mark.parametrize("bound", [0, 2])
@pytest.mark.parametrize("path", ["/pause", "/collective_rpc", "/resume"])
def test_a_server_that_is_lost_while_it_gets_weights_is_sent_them_again(path, bound, tmp_path, monkeypatch):
    """It is started anew before the request of that path in the third sync, or right after the last one."""
    server = Server(tiny.causal_lm(initializer_range=0.1).eval(), OpenAI, mode="processed_logprobs")
    fresh, asked, post = tiny.causal_lm(seed=7, initializer_range=0.3).state_dict(), [], OpenAI.do_POST

    def do_post(handler):
        is_it = handler.path.startswith(path)
        asked.extend([path] * is_it)
        if is_it and len(asked) == 3:
            with server.lock:
                server.version = "default"
                server.model.load_state_dict(fresh)
            if path != "/resume":
                handler.asked()
                return handler.answer("not started", 400)
        return post(handler)

    monkeypatch.setattr(OpenAI, "do_POST", do_post)
    url, shared = f"http://127.0.0.1:{server.server_port}/", str(tmp_path / "shared")
    client = VLLMServerGenerator(url, timeout=5, folder=shared)
    trainer = make(tmp_path, generator=client, max_staleness=bound, sample_ledger=True, num_train_epochs=3)
    trainer.train()
    found, steps = audit(tmp_path), trainer.state.global_step
    assert found.problems == [] and len(found.used) == 8 * steps
    assert client._syncs == steps - bound + 1  # one was repeated, and the last steps' weights write nothing
    server.shutdown()


def test_what_a_server_wrote_with_the_weights_it_was_started_with_is_not_used(server, monkeypatch):
    """Even if it has got the trainer's weights by the time that it is asked for them."""
    client, row = client_of(server), server.RequestHandlerClass.row
    client.sync_weights(tiny.causal_lm(initializer_range=0.3).eval())

    def before_the_sync(handler, *args):
        version, handler.server.version = handler.server.version, "default"
        done = row(handler, *args)
        handler.server.version = version
        return done

    monkeypatch.setattr(server.RequestHandlerClass, "row", before_the_sync)
    with pytest.raises(ConnectionError, match="was started anew, and has lost the weights"):
        client.generate([[5, 9, 14]], 2, Sampling(4), [1, 2])


@pytest.mark.parametrize("bound", [0, 1])
def test_an_environment_that_cannot_be_reached_is_no_lost_engine(bound, tmp_path):
    resets = []

    class Room:
        def reset(self, **row):
            resets.append(row)
            if len(resets) == 17:  # in the third rollout
                raise ConnectionRefusedError("nobody listens")

        def get_reward(self):
            return 0.5

    trainer = make(tmp_path, max_staleness=bound, environments=Room)
    with pytest.raises(RuntimeError, match=r"Room.reset\(\) has failed: ConnectionRefusedError: nobody listens"):
        trainer.train()
    assert len(resets) < 26  # the rollout is not sampled again


@pytest.mark.parametrize("bound", [0, 1])
def test_a_server_that_stays_away_ends_the_run_with_one_sentence(bound, tmp_path, monkeypatch):
    monkeypatch.setattr("posttrain.rl.generation.server.RETRIES", 0)
    monkeypatch.setattr("posttrain.rl.generation.vllm.RETRIES", 0)
    server = Server(tiny.causal_lm(initializer_range=0.1).eval(), OpenAI, mode="processed_logprobs")
    client = client_of(server, in_flight=False)
    client.timeout = 1.0

    class Leaves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 2:
                server.failures = 10**9
                monkeypatch.setattr(OpenAI, "do_GET", lambda handler: handler.answer("gone", 503))

    trainer = make(tmp_path, generator=client, max_staleness=bound, callbacks=[Leaves()])
    with pytest.raises(ConnectionError, match="503") as error:
        trainer.train()
    assert str(error.value).count("\n") == 0 and trainer.state.global_step in (2, 3)
    server.shutdown()


# ---- stopping and resuming


class Cut(TrainerCallback):
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            raise PowerCut


@pytest.mark.long
@pytest.mark.rotated
@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("changes", [{}, {"steps_per_generation": 2, "per_device_train_batch_size": 2}], ids=str)
def test_a_run_that_stopped_with_a_full_queue_uses_each_prompt_once(step, changes, tmp_path):
    """The rollouts on their way are sampled again from the same prompts, with the weights of the checkpoint."""
    changes = {"max_staleness": 3, "save_strategy": "steps", "save_steps": 1, "rows": 13} | changes
    straight = make(tmp_path / "straight", **changes)
    straight.train()
    cut = make(tmp_path / "cut", callbacks=[Cut(step)], **changes)
    with pytest.raises(PowerCut):
        cut.train()
    resumed = make(tmp_path / "cut", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == straight.state.global_step
    learned = sum(note[0] < step for note in cut.notes)  # a rollout of the last step was begun and never learned from
    assert [*prompts_of(cut)[:learned], *prompts_of(resumed)] == prompts_of(straight)
    assert resumed.rollout_maker.num_rollouts == straight.rollout_maker.num_rollouts
    assert all(int(versions.min()) >= step for _, _, versions in resumed.notes)  # nothing older than the checkpoint


@pytest.mark.parametrize("ahead", [2, 1])
def test_a_run_is_left_while_it_waits_for_a_rollout(ahead, tmp_path):
    """A signal is not heard at the end of the step alone, and each prompt is learned from once."""
    ended, signals = threading.Event(), []

    def reward(completion_ids):
        if len(left.state.log_history) > 1:  # what step 3 or a later one takes
            if not signals:
                signals.append(threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)))
                signals[0].start()
            assert ended.wait(WAIT), "the signal was not heard"
        return digit_sum(completion_ids)

    class Ends(TrainerCallback):
        def on_save(self, args, state, control, **kwargs):
            ended.set()

    changes = dict(
        max_staleness=2, sample_ahead=ahead, save_on_signal=True, rows=13, sample_ledger=True, logging_steps=1
    )
    straight = make(tmp_path / "straight", **changes)
    straight.train()
    left = make(tmp_path / "left", reward=reward, callbacks=[Ends()], **changes)
    with pytest.raises(SystemExit):
        left.train()
    step = left.state.global_step
    assert 1 < step < straight.state.global_step
    resumed = make(tmp_path / "left", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert [*prompts_of(left)[:step], *prompts_of(resumed)] == prompts_of(straight)
    assert audit(tmp_path / "left").problems == []


class Signals:
    """Sends this process SIGTERM where it is called for the time `at`, and then waits to be left."""

    def __init__(self, at):
        self.at, self.calls = at, 0

    def __call__(self):
        self.calls += 1
        if self.calls == self.at:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(WAIT)
            raise AssertionError("the signal was not heard")


@pytest.mark.parametrize("where", ["sampling", "scoring"])
@pytest.mark.parametrize(
    ("at", "step", "changes"),
    [
        (1, 0, {}),
        (3, 2, {}),
        (2, 1, {"steps_per_generation": 2, "gradient_accumulation_steps": 3, "num_train_epochs": 9, "max_steps": 4}),
        (4, 3, {"curriculum": True, "curriculum_explore": 0.0, "num_train_epochs": 3}),
    ],
    ids=["first", "third", "within a window", "curriculum"],
)
def test_a_run_is_left_within_a_rollout_and_resumes_before_it(where, at, step, changes, tmp_path):
    signals = Signals(at)

    class Engine(LocalGenerator):
        def generate(self, *given, **options):
            if where == "sampling":
                signals()
            return super().generate(*given, **options)

    def reward(completion_ids):
        if where == "scoring":
            signals()
        return digit_sum(completion_ids)

    changes = {"save_on_signal": True, "rows": 13, "sample_ledger": True, "max_steps": 5} | changes
    straight = make(tmp_path / "straight", **changes)
    straight.train()
    left = make(tmp_path / "left", reward=reward, generator=Engine(tiny.tokenizer()), **changes)
    with pytest.raises(SystemExit) as ended:
        left.train()
    assert ended.value.code == 128 + signal.SIGTERM and left.state.global_step == step
    resumed = make(tmp_path / "left", **changes)
    resumed.train(resume_from_checkpoint=True)
    assert [*prompts_of(left), *prompts_of(resumed)] == prompts_of(straight)
    assert all(map(torch.equal, resumed.model.parameters(), straight.model.parameters()))
    assert resumed.state.log_history[-2] == straight.state.log_history[-2]
    assert audit(tmp_path / "left").problems == []


def test_an_epoch_that_a_callback_ends_drops_what_was_read_ahead_of_it(tmp_path):
    class Ends(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            control.should_epoch_stop = state.global_step in (1, 3)

    changes = {"rows": 16, "num_train_epochs": 3, "callbacks": [Ends()]}
    straight = make(tmp_path / "straight", **changes)
    straight.train()
    ahead = make(tmp_path / "ahead", max_staleness=2, **changes)
    ahead.train()
    assert prompts_of(ahead) == prompts_of(straight)


# ---- groups that are carried on


class Beside(CopiedGenerator):
    """Takes several calls at a time, and weights meanwhile."""

    is_concurrent = updates_in_flight = True

    def __init__(self):
        super().__init__(LocalGenerator(tiny.tokenizer()))
        self.lock = threading.Lock()

    def generate(self, *asked):
        with self.lock:
            return super().generate(*asked)

    def sync_weights(self, model):
        with self.lock:
            super().sync_weights(model)


def carrying(out, is_slow, callbacks=(), **changes):
    """A run of four groups a step, whose agent waits as long as `is_slow(prompt, trainer)`."""

    async def agent(episode, row):
        answer = await episode.generate([{"role": "user", "content": row["prompt"]}])
        until = time.monotonic() + WAIT
        while is_slow(row["prompt"], trainer):
            assert time.monotonic() < until, "no step was made without this group"
            await asyncio.sleep(0.01)
        return float(len(answer["content"]) % 5)

    usual = {"num_generations": 2, "max_completion_length": 6, "gradient_checkpointing": False, "max_staleness": 3,
             "sample_ahead": 1, "shuffle_dataset": False, "num_train_epochs": 1}  # fmt: skip
    trainer = recording(GRPOTrainer)(
        tiny.causal_lm(initializer_range=0.1), None, arguments(GRPOConfig, out, **(usual | changes)),
        [{"prompt": row["prompt"]} for row in text_rows(24)], agent=agent, generator=Beside(), callbacks=[*callbacks],
        processing_class=tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS),
    )  # fmt: skip
    return trainer


class Apart(Beside):
    """Each call takes as long as its prompts need, whatever the others do."""

    def __init__(self, is_slow):
        super().__init__()
        self.is_slow = is_slow

    def generate(self, prompts, *asked):
        until = time.monotonic() + WAIT
        while self.is_slow(prompts):
            assert time.monotonic() < until, "nothing went on without these prompts"
            time.sleep(0.01)
        return super().generate(prompts, *asked)


def test_plain_prompts_of_servers_are_sampled_beside_each_other_and_carried_on(tmp_path):
    """Two steps are made before the first prompt is answered, of groups that were asked for later."""
    first = tiny.tokenizer()(FIRST)["input_ids"]
    engine = Apart(lambda prompts: first in prompts and trainer.state.global_step < 2)
    trainer = make(tmp_path, rows=24, generator=engine, max_staleness=3, sample_ahead=1, shuffle_dataset=False,
                   num_train_epochs=1)  # fmt: skip
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and trainer.state.global_step == 6 and len(found.used) == 8 * 6
    assert steps_of_first(found) in ({3}, {4}) and max(step - int(v.min()) for step, _, v in trainer.notes) <= 3


FIRST = text_rows(24)[0]["prompt"]


def steps_of_first(found):
    """The steps that learned from the first group."""
    return {line["step"] for line in found.used if line["rollout"] == 0 and line["sample"] < 2}


def test_a_group_that_takes_longer_is_carried_into_later_steps(tmp_path):
    """It ends after two steps were made, which learn from those of the next batch instead."""
    trainer = carrying(tmp_path, lambda prompt, run: prompt == FIRST and run.state.global_step < 2)
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and trainer.state.global_step == 6 and len(found.used) == 8 * 6
    assert steps_of_first(found) in ({3}, {4})
    assert {line["rollout"] for line in found.used if line["step"] == 1} == {0, 1}


def test_sampling_is_not_further_ahead_than_completions_may_be_old(tmp_path):
    with pytest.raises(ConfigError, match="sample_ahead=3 samples further ahead than max_staleness=2"):
        GRPOConfig(str(tmp_path), max_staleness=2, sample_ahead=3)


def test_a_group_is_waited_for_before_it_is_too_old(tmp_path):
    due = []

    def is_slow(prompt, run):
        due.extend([time.monotonic()] * (run.state.global_step == 3))
        return prompt == FIRST and (not due or time.monotonic() < due[0] + 1)

    trainer = carrying(tmp_path, is_slow)
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and len(found.used) == 8 * 6
    assert steps_of_first(found) == {4}  # by when it is three steps old


def test_a_run_is_left_while_it_waits_for_a_group_that_must_not_get_older(tmp_path):
    """Others have ended, and would make a rollout if they alone were asked for."""
    ended = threading.Event()

    class Leaves(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def on_save(self, args, state, control, **kwargs):
            ended.set()

    left = carrying(tmp_path, lambda prompt, _: prompt == FIRST and not ended.is_set(), [Leaves()], save_on_signal=True)
    with pytest.raises(SystemExit):
        left.train()
    assert left.state.global_step == 3
    resumed = carrying(tmp_path, lambda *_: False, save_on_signal=True)
    resumed.train(resume_from_checkpoint=True)
    found = audit(tmp_path)
    assert found.problems == [] and resumed.state.global_step == 6 and len(found.used) == 8 * 6


def test_a_run_that_resumes_samples_again_what_was_carried_and_nothing_else(tmp_path):
    changes = {"save_strategy": "steps", "save_steps": 1}

    def is_slow(prompt, run):
        return prompt == FIRST and run.state.global_step < 2

    with pytest.raises(PowerCut):
        carrying(tmp_path, is_slow, [Cut(2)], **changes).train()
    resumed = carrying(tmp_path, lambda *_: False, **changes)
    resumed.train(resume_from_checkpoint=True)
    found = audit(tmp_path)
    assert found.problems == [] and resumed.state.global_step == 6 and len(found.used) == 8 * 6
    assert len({line["prompt"] for line in found.used}) == 24 and min(steps_of_first(found)) > 2


# ---- user code in the background


class Counter:
    """An environment that knows whether it is used for two completions at a time."""

    lock, made = threading.Lock(), []

    def __init__(self):
        self.busy, self.clashes = False, 0
        self.made.append(self)

    def reset(self, **row):
        with self.lock:
            self.clashes += self.busy
            self.busy = True
        return "count"

    def add(self, number: int):
        """Adds.

        Args:
            number: what to add.
        """
        return str(number)

    def get_reward(self):
        with self.lock:
            self.busy = False
        return float(len(self.made) % 3)


def test_no_environment_serves_two_rollouts_at_a_time(tmp_path):
    Counter.made.clear()
    release, seen, begun = threading.Event(), [], []

    def reward(completions, environments):
        seen.append({id(one) for one in environments})
        assert len(seen) > 1 or release.wait(WAIT)
        return [float(i) for i in range(len(completions))]

    class Begins(Counter):
        def reset(self, **row):
            begun.append(self)
            if len(begun) == 16:
                release.set()  # a second rollout has its environments, while the first is not scored
            return super().reset(**row)

    trainer = GRPOTrainer(
        model=tiny.causal_lm(initializer_range=0.1), reward_funcs=reward, environment_factory=Begins,
        args=arguments(GRPOConfig, tmp_path, num_generations=2, max_completion_length=4, max_staleness=2, max_steps=4,
                       gradient_checkpointing=False),
        processing_class=tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS),
        generator=CopiedGenerator(LocalGenerator(tiny.tokenizer())),
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 4 and len(seen) == 4 and not seen[0] & seen[1]
    assert sum(one.clashes for one in Counter.made) == 0


def test_metrics_of_background_code_belong_to_training_and_not_to_an_evaluation_at_the_time(tmp_path):
    def reward(completion_ids, log_metric):
        log_metric("mine", 1.0 if threading.current_thread() is threading.main_thread() else 2.0)
        return digit_sum(completion_ids)

    trainer = make(tmp_path, reward=reward, max_staleness=2, eval_strategy="steps", eval_steps=1, max_steps=4)
    trainer.train()
    training = [record["mine"] for record in trainer.state.log_history if "mine" in record]
    evaluations = [record["eval_mine"] for record in trainer.state.log_history if "eval_mine" in record]
    assert training == [2.0] * 4 and evaluations == [1.0] * 4


def test_an_error_of_a_reward_in_the_background_ends_the_run(tmp_path):
    def reward(completion_ids):
        raise KeyError("no such answer")

    with pytest.raises(Exception, match="no such answer"):
        make(tmp_path, reward=reward, max_staleness=2).train()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("posttrain-s")]


# ---- parts


def test_a_thread_that_asks_again_and_again_lets_others_have_their_turn():
    turns, rounds, done = Turns(), [], threading.Event()

    def greedy():
        while not done.is_set():
            with turns:
                rounds.append(None)

    thread = threading.Thread(target=greedy, daemon=True)
    thread.start()
    for _ in range(50):
        with turns:
            pass
    done.set()
    thread.join(WAIT)
    assert rounds and not thread.is_alive()


def test_a_worker_gives_results_and_errors_in_order():
    worker, began = Worker("test-worker"), []

    def call(value):
        began.append(value)
        if value == 1:
            raise LookupError("one")
        return value

    futures = [Future() for _ in range(3)]
    for value, future in enumerate(futures):
        worker.submit(future, lambda value=value: call(value))
    with contextlib.suppress(LookupError):
        futures[1].result(WAIT)
    assert futures[0].result(WAIT) == 0 and futures[2].result(WAIT) == 2 and began == [0, 1, 2]
    assert isinstance(futures[1].exception(), LookupError)
    worker.end()
    assert not any(thread.is_alive() for thread in worker._threads)


def test_a_copy_generates_with_the_weights_of_its_last_sync():
    model = tiny.causal_lm(initializer_range=0.3)
    copied, local = CopiedGenerator(LocalGenerator(tiny.tokenizer())), LocalGenerator(tiny.tokenizer())
    copied.sync_weights(model)
    local.sync_weights(tiny.causal_lm(initializer_range=0.3))
    ask = ([[5, 9, 14], [7, 8]], 2, Sampling(9, eos_token_ids=(3,)), [mix(1, i) for i in range(4)])
    first = local.generate(*ask)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    assert copied.generate(*ask).ids == first.ids
    copied.sync_weights(model)
    local.sync_weights(model)
    assert copied.generate(*ask).ids == local.generate(*ask).ids != first.ids


def test_every_background_thread_computes_on_the_device_of_the_thread_that_began_it(monkeypatch):
    of_thread = threading.local()  # an identifier is given to another thread when its own has ended
    of_thread.device = 3
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: getattr(of_thread, "device", 0))
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda device: setattr(of_thread, "device", device))

    def device(*args, **columns):
        return [float(getattr(of_thread, "device", 0))]

    found: Future = Future()
    worker = Worker("test-device")
    worker.submit(found, device)
    assert found.result() == [3.0] == background.in_thread(device).result()
    worker.end()
    rewards = Rewards([device, device], RewardArguments(reward_concurrency=2))
    sample = Sample({}, "a", [1], [1])
    assert rewards.of([sample]).rewards.tolist() == [[3.0, 3.0]]
    groups = GroupScores(device, [0], 1)
    groups.ended(0, sample)
    assert groups._scores[0].result() == [3.0]
    groups.close()


@pytest.mark.parametrize("saves", [True, False])
def test_what_a_signal_undoes_is_remembered_where_one_is_heard(saves, tmp_path, monkeypatch):
    remembered, undo_point = [], Run.undo_point
    monkeypatch.setattr(Run, "undo_point", lambda run: remembered.append(run) or undo_point(run))
    make(tmp_path, save_on_signal=saves, max_steps=3).train()
    assert len(remembered) == (4 if saves else 0)  # three steps, and the end of the first epoch
