"""A program that samples and scores by itself: what it gives is learned from, and nothing that is too old."""

import os
import pickle
import queue
import signal
import threading
import time
from dataclasses import dataclass, field

import pytest
import torch

from posttrain.core.errors import DataError
from posttrain.rl import AsyncGRPOConfig, AsyncGRPOTrainer
from posttrain.rl.generation.weights import Weights
from posttrain.rl.losses.policy_losses import summed
from posttrain.rl.online import rollout_worker
from posttrain.rl.online.ledger import audit
from posttrain.rl.rewards import background
from tests import tiny


@dataclass
class Completion:
    input_ids: list
    completion_mask: list
    old_log_probs: list
    advantage: float
    model_version: int
    metrics: dict = field(default_factory=lambda: {"reward": 0.5})
    prompt: str = "a prompt"
    completion: str = "a completion"


class Worker:
    """Puts as many completions of the present weights in its queue as a step takes, and some of older ones."""

    def __init__(self, per_step=4, old=()):
        self.rollout_buffer, self.calls, self.per_step, self.old = queue.Queue(), [], per_step, dict(old)
        self.version, self.given = 0, []

    def start(self):
        self.calls.append("start")
        self.fill()

    def stop(self):
        self.calls.append("stop")

    def update_model_version(self, model_version):
        self.calls.append(model_version)
        self.version = model_version
        if "start" in self.calls:
            self.fill()

    def check_health(self, stale_after_s):
        raise RuntimeError(f"no sign of life for {stale_after_s} s")

    def fill(self):
        for number in range(self.old.get(self.version, 0)):
            self.put(Completion([3, 4, 5 + number], [0, 0, 1], [0.0, 0.0, -1.0], 1e6, self.version - 9))
        for number in range(self.per_step):
            ids = [10 + self.version, 20, 30 + number, 40, 50 + number]
            written = Completion(ids, [0, 0, 1, 0, 1], [0, 0, -0.5, 0, -0.7], number - 1.5, self.version)
            self.given.append(written)
            self.put(written)

    def put(self, one):
        self.rollout_buffer.put(one)


class Transfer:
    def __init__(self):
        self.calls, self.sent = [], []

    def send_weights(self, iterator):
        self.sent.append({name: tensor.clone() for name, tensor in iterator})

    def __getattr__(self, name):
        return lambda: self.calls.append(name)


def make(folder, worker, transfer=None, **options):
    given = dict(max_steps=3, per_device_train_batch_size=4, num_generations=2, max_completion_length=8)
    given |= dict(learning_rate=0.01, report_to="none", use_cpu=True, save_strategy="no", max_grad_norm=0.0)
    args = AsyncGRPOConfig(str(folder), **given | options)
    rows = [{"prompt": f"{number} and"} for number in range(16)]
    parts = dict(rollout_worker=worker, weight_transfer=transfer)
    return AsyncGRPOTrainer(tiny.causal_lm(), reward, args, rows, tiny.tokenizer(), **parts)


def reward(completions, **columns):
    raise AssertionError("the worker scores")


def test_what_a_worker_gives_is_learned_from_with_its_advantages(tmp_path):
    worker, transfer = Worker(), Transfer()
    trainer = make(tmp_path, worker, transfer, max_steps=1, optim="sgd", lr_scheduler_type="constant")
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    model = tiny.causal_lm()
    ids = torch.tensor([one.input_ids for one in worker.given[:4]])
    mask = torch.tensor([one.completion_mask for one in worker.given[:4]])[:, 1:].float()
    advantages = torch.tensor([one.advantage for one in worker.given[:4]])
    old = torch.tensor([one.old_log_probs for one in worker.given[:4]], dtype=torch.float32)[:, 1:]
    logps = model(ids).logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None]).squeeze(2)
    # The first step: the ratio to the policy is 1, and the weight that of the policy to what the worker has sampled
    # with, of each token, at most 3 (arXiv:2110.00641).
    weight = (logps.detach() - old).exp().clamp(max=3)
    ratio = (logps - logps.detach()).exp()
    loss = summed(-ratio * advantages[:, None] * weight, mask.bool(), "tokens") / mask.sum()
    loss.backward()
    for name, weight_after in trainer.model.named_parameters():
        expected = before[name] - 0.01 * model.get_parameter(name).grad
        torch.testing.assert_close(weight_after.detach(), expected, atol=1e-6, rtol=1e-4)
    record = next(one for one in trainer.state.log_history if "reward" in one)
    assert record["reward"] == 0.5 and record["staleness/max"] == 0


def test_the_worker_gets_the_weights_of_each_step_and_is_ended(tmp_path):
    worker, transfer = Worker(), Transfer()
    trainer = make(tmp_path, worker, transfer)
    began = {name: tensor.clone() for name, tensor in Weights(trainer.model)}
    trainer.train()
    assert worker.calls == [0, "start", 1, 2, "stop"]
    assert transfer.calls == ["init_weight_transfer", "pause", "resume", *["pause", "resume"] * 2, "destroy"]
    assert transfer.sent[0].keys() == began.keys() and all(transfer.sent[0][n].equal(began[n]) for n in began)
    assert not transfer.sent[2]["model.embed_tokens.weight"].equal(began["model.embed_tokens.weight"])


def test_completions_of_old_weights_are_left_out_and_counted(tmp_path, caplog):
    worker = Worker(old={1: 3, 2: 4})
    trainer = make(tmp_path, worker, max_staleness=4)
    trainer.train()
    told = [record.message for record in caplog.records if "old weights" in record.message]
    assert told == ["The rollout_worker has given 4 completions of old weights, the last of step -7 at step 2."]
    dropped = [one["staleness/dropped"] for one in trainer.state.log_history if "staleness/dropped" in one]
    assert dropped == [0, 3, 4] and trainer.state.global_step == 3
    assert max(one["grad_norm"] for one in trainer.state.log_history if "grad_norm" in one) < 1e4  # of 1e6: none


def test_a_worker_may_fall_behind_as_far_as_allowed(tmp_path):
    worker = Worker(per_step=2)  # half of what a step takes
    for _ in range(3):
        worker.fill()
    trainer = make(tmp_path, worker, max_staleness=2)
    trainer.train()
    ages = [one["staleness/max"] for one in trainer.state.log_history if "staleness/max" in one]
    assert len(ages) == 3 and ages[-1] > 0 and max(ages) <= 2


@pytest.mark.parametrize("accumulation", [1, 2, 3])
def test_no_completion_is_older_than_the_bound_in_any_step_that_learns_from_it(accumulation, tmp_path):
    """Four micro-batches of a rollout, which begins in the middle of a window of three."""
    changes = dict(steps_per_generation=2, num_iterations=2, gradient_accumulation_steps=accumulation, max_steps=8)
    bound, ages = 3, []

    class Late(Worker):
        """Its completions are of different weights."""

        def fill(self):
            for number in range(40):
                version = max(self.version - number % 4, 0)
                self.put(Completion([10 + version, 20, 30 + number], [0, 0, 1], [0, 0, -0.5], 1.0, version))

    trainer = make(tmp_path, Late(), max_staleness=bound, share_prompts=False, sample_ledger=True, **changes)
    step = trainer.training_step
    trainer.training_step = lambda model, inputs, *more: (
        ages.extend(trainer.state.global_step - inputs["input_ids"][:, 0] + 10),
        step(model, inputs, *more),
    )[1]
    trainer.train()
    assert max(ages) == bound and len(ages) >= 4 * 8
    assert sum(record.get("staleness/dropped", 0) for record in trainer.state.log_history) > 0
    found = audit(tmp_path)
    assert found.problems == [] and {line["versions"][0] for line in found.used} != {0}


def test_a_run_is_left_while_its_worker_gives_nothing_and_resumes_where_it_stood(tmp_path, monkeypatch):
    """Bit for bit as one that was not left. Steps take 3 micro-batches of rollouts of 2, and the last of an epoch 2."""
    monkeypatch.setattr(rollout_worker, "POLL", 0.05)
    given = dict(gradient_accumulation_steps=3, steps_per_generation=2, max_steps=4, save_on_signal=True)

    class Exact(Worker):
        """Gives the rollouts that begin in each step: 2, 1, 1, and 2 in the next epoch."""

        def fill(self):
            self.per_step = [16, 8, 8, 16, 0][self.version]
            super().fill()

    class Waits(Exact):
        """Gives nothing of the weights of step 2, before which SIGTERM comes."""

        def fill(self):
            if self.version < 2:
                super().fill()
            else:
                threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()

        def check_health(self, stale_after_s):
            pass

    whole = make(tmp_path / "whole", Exact(), **given)
    whole.train()
    left = make(tmp_path / "left", Waits(), **given)
    with pytest.raises(SystemExit) as ended:
        left.train()
    assert ended.value.code == 128 + signal.SIGTERM and left.state.global_step == 2
    assert (tmp_path / "left" / "checkpoint-2").is_dir() and left.worker.worker.calls[-1] == "stop"
    other = make(tmp_path / "left", Exact(), **given)
    other.train(resume_from_checkpoint=True)
    assert other.state.global_step == 4 and other.state.epoch == whole.state.epoch
    for one, same in zip(whole.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(one, same)


def test_what_other_processes_cannot_be_sent_is_named_with_its_field():
    class Local(Completion):
        pass

    worker = Worker()
    engine = rollout_worker.WorkerEngine(worker, None, 4, 300.0)
    engine.is_shared = True
    worker.put(Local([3, 4], [0, 1], [0.0, -1.0], 0.5, 0))
    (taken,) = pickle.loads(pickle.dumps(engine.take(1)))  # whose class only this test knows
    assert (taken.input_ids, taken.advantage, taken.metrics) == ([3, 4], 0.5, {"reward": 0.5})
    worker.put(Completion([3, 4], [0, 1], [0.0, -1.0], 0.5, 0, {"reward": 0.5, "by": [threading.Lock()]}, "a"))
    named = (
        r"cannot be sent to the other processes: \['metrics'\]\['by'\]\[0\] is of the class lock: .* The prompt is 'a'"
    )
    with pytest.raises(DataError, match=named):
        engine.take(1)


def test_a_completion_is_pickled_once_for_all_processes():
    pickled = []

    class Noted(list):
        def __reduce__(self):
            pickled.append(True)
            return list, (list(self),)

    sent = rollout_worker.portable(Completion([3, 4], [0, 1], [0.0, -1.0], 0.5, 0, prompt=Noted("ab")))
    assert pickle.loads(pickle.dumps([sent]))[0].prompt == sent.prompt == ["a", "b"] and pickled == [True]


def test_a_worker_that_gives_nothing_is_named_once_while_it_says_that_it_is_well(monkeypatch, caplog):
    monkeypatch.setattr(rollout_worker, "POLL", 0.01)
    monkeypatch.setattr(background, "SLOW", 0.1)
    worker = Worker(per_step=0)
    worker.check_health = lambda stale_after_s: None
    engine = rollout_worker.WorkerEngine(worker, None, 4, 300.0)
    engine.sync_weights(torch.nn.Linear(1, 1))
    began = time.monotonic()
    while time.monotonic() - began < 0.4:
        assert not engine.has(1)
    worker.put(Completion([3, 4], [0, 1], [0.0, -1.0], 0.5, 0))
    assert engine.has(1)
    (said,) = [record.getMessage() for record in caplog.records]
    assert said.startswith("The rollout_worker has given no completion for 0.1 seconds, and its check_health() finds")


def test_rewards_of_each_function_are_logged_under_its_name(tmp_path):
    worker = Worker()
    trainer = make(tmp_path, worker, max_steps=1)
    put = worker.put
    worker.put = lambda one: (one.metrics.update({"rewards/reward": one.advantage}), put(one))
    trainer.train()
    assert trainer.state.log_history[0]["rewards/reward/mean"] == 0 and trainer.state.log_history[0]["reward_std"] > 0


def test_what_cannot_go_together_is_refused_by_name(tmp_path, monkeypatch):
    class Half:
        start = stop = rollout_buffer = None

    with pytest.raises(ValueError, match="rollout_worker has no .*update_model_version.*check_health"):
        make(tmp_path, Half())
    with pytest.raises(ValueError, match="dynamic_sampling=True chooses among prompts"):
        make(tmp_path, Worker(), dynamic_sampling=True)
    several = dict(gradient_accumulation_steps=3, steps_per_generation=2, num_iterations=6, max_staleness=2)
    with pytest.raises(ValueError, match="Up to 4 optimizer steps learn from a rollout .*are 3 steps old, above max_"):
        make(tmp_path, Worker(), **several)
    with pytest.warns(FutureWarning, match="token_budget has no effect: micro-batches are completions"):
        make(tmp_path, Worker(), token_budget=256)
    monkeypatch.setattr(rollout_worker, "POLL", 0.01)
    worker = Worker(per_step=1)
    with pytest.raises(RuntimeError, match=r"no sign of life for 300.0 s"):
        make(tmp_path, worker).train()
    assert worker.calls[-1] == "stop"
    trainer = make(tmp_path, Worker())
    with pytest.raises(ValueError, match="A rollout_worker chooses its prompts, and completes no others"):
        trainer.evaluate([{"prompt": "1 and"}])
    worker = Worker(per_step=0)
    worker.rollout_buffer.put(Completion([1, 2], [0, 1], [0.0], 1.0, 0))
    with pytest.raises(DataError, match="2 input_ids, 2 completion_mask and 1 old_log_probs, of which 1 were written"):
        make(tmp_path, worker).train()
