"""Rollouts of agents of which some are ten times slower, and what a turn costs beside the engine.

    python benchmarks/agents.py

`slow tools`, `long turns`: 4 groups of 8 episodes, of 4 turns of 16 tokens with a tool of 50 ms behind each; in every
group the tool of one episode takes 500 ms, or its turns have 160 tokens. Beside it the same in lock-step, where the
turns that wait are written to their end before others begin, and the bound: no rollout is done before the slow episodes
alone are, nor before all the others are. Each is the fastest of `ROUNDS` rounds, in which all follow one another.
`local`: the local engine with a model of 16 million parameters, one thread. A token that it writes beside others takes
a twentieth of what it takes alone, so that a rollout takes longer than the bound by what the others' tokens take.
`server`: a stand-in that takes 5 ms a token, however many it writes: what is above the bound is the scheduler's.
`environments`: the same as conversations of an environment with one async tool; in lock-step, all turns are written to
their end, then all tools run to theirs. Tokens trained a second count rollout, forward and backward passes.

`ahead of training`: steps of training on episodes of the stand-in that takes weights while it writes, of which one in
each group has slow tools or none has, with `max_staleness` of 0 and of 2. A step takes 1.6 s beside the processor, and
the slow episodes 2.3 s.

`carried`: steps of 0.4 s beside the processor, and one group in each second rollout whose tools take 4 s: seconds that
training waits for a rollout, and the mean age of what it learns from, with `max_staleness` and `sample_ahead`.

`overhead`: 256 episodes of 8 turns on a stand-in for a server that answers each turn after 50 ms, through Python
(`generate`) and through HTTP, with the agents in the trainer's process and in the rollout process: what a turn costs
beyond that, the processor time of the trainer's process in it, where agents and their HTTP clients may be too, and the
trainer's memory of an episode in flight.

`busy reward`: a reward function that computes in Python while the policy is trained (`max_staleness=2`), in a thread
and in the rollout process: how much longer a training step takes than with a reward function that costs nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import statistics
import tempfile
import time
import tracemalloc
from dataclasses import replace
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from grpo import VOCABULARY, tokenizer

from posttrain.core import TrainerCallback, testing
from posttrain.rl import Agent, GRPOConfig, GRPOTrainer
from posttrain.rl.agents.scheduler import TurnsTogether
from posttrain.rl.generation import Completions
from posttrain.rl.online.sampler import Sampler
from posttrain.rl.tools.formats import Call
from posttrain.rl.tools.protocol import ToolProtocol, Turn

GROUPS, GROUP, TURNS, TOKENS, TOOL, SLOWER = 4, 8, 4, 16, 0.05, 10
ROUNDS = 3
EPISODES, LATENCY, PER_TOKEN, LEARNS, STEP = 256, 0.05, 0.005, 0.4, 0.4
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def model(width: int, layers: int, vocabulary: int = VOCABULARY):
    from transformers import AutoModelForCausalLM, Qwen3Config

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        Qwen3Config(
            vocab_size=vocabulary, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
            num_attention_heads=6, num_key_value_heads=2, head_dim=64, pad_token_id=0, eos_token_id=None,
            max_position_embeddings=8192,
        )
    )  # fmt: skip


def arguments(folder: str, **others) -> GRPOConfig:
    usual = dict(
        max_steps=1, per_device_train_batch_size=GROUP, num_generations=GROUP, max_completion_length=4000,
        report_to="none", save_strategy="no", use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    return GRPOConfig(folder, **(usual | others))


def trainer(agent, folder: str, policy, engine=None, kind=GRPOTrainer, prompts=GROUPS, **others):
    words = tokenizer()
    words.chat_template = TEMPLATE
    args = arguments(folder, **others)
    rows = [{"number": i % (2 * GROUPS)} for i in range(prompts)]
    return kind(policy, None, args, rows, processing_class=words, generator=engine, agent=agent)


# ------------------------------------------------------------------------------------------------ the slow episodes


def agent(which: str):
    """Of `TURNS` turns, in which the first of each group is slower."""

    async def run(episode, row):
        slow = row["slow"]
        said = [{"role": "user", "content": f"{10 + row['number']} 3 5 7 9 11"}]
        for _ in range(TURNS):
            tokens = TOKENS * (SLOWER if slow and which == "long turns" else 1)
            said.append(await episode.generate(said, max_tokens=tokens))
            await asyncio.sleep(TOOL * (SLOWER if slow and which == "slow tools" else 1))
            said.append({"role": "user", "content": "2 4 6"})
        return 1.0

    return run


def seconds(run, rows) -> float:
    started = time.perf_counter()
    run.rollout_maker.sample(run.new_samples(rows))
    return time.perf_counter() - started


@contextlib.contextmanager
def in_lock_step():
    own = Sampler.open_turns
    Sampler.open_turns = contextlib.contextmanager(lambda self, wake: iter([TurnsTogether(self.generate_turn)]))
    try:
        yield
    finally:
        Sampler.open_turns = own


def together(run, rows) -> float:
    with in_lock_step():
        return seconds(run, rows)


def fastest(measured) -> list[float]:
    """The least that each of these functions returns in `ROUNDS` rounds, in which they are called one by one."""
    return [min(of_one) for of_one in zip(*([one() for one in measured] for _ in range(ROUNDS)), strict=True)]


def learning(run, samples) -> float:
    """Seconds of the forward and backward passes over a rollout."""
    maker = run.rollout_maker
    rollout = replace(maker.of(samples), advantages=torch.randn(len(samples)))
    started = time.perf_counter()
    for part in maker.parts_of(rollout):
        inputs = run.prepare_inputs(part)
        run.compute_loss(run.model, inputs, num_items_in_batch=run.count_items(inputs)).backward()
    return time.perf_counter() - started


def compare(what: str, run, samples, timed) -> None:
    """The fastest of `timed`: a rollout, its slow episodes, the others, and the rollout in lock-step."""
    ours, *parts, lock_step, learns = fastest([*timed, partial(learning, run, samples)])
    tokens, bound = sum(one.num_chosen for one in samples), max(parts)
    print(
        f"{what:24} {ours:6.2f} s; in lock-step {lock_step:6.2f} s ({lock_step / ours:.2f}x); bound {bound:6.2f} s, of "
        f"which this is {bound / ours:.2f}. With {learns:.2f} s of learning, tokens trained a second: "
        f"{tokens / (ours + learns):.0f}, {tokens / (lock_step + learns):.0f} in lock-step, "
        f"{tokens / (bound + learns):.0f} at the bound ({(bound + learns) / (ours + learns):.2f})",
        flush=True,
    )


def slow_episodes() -> None:
    rows = [{"number": i, "slow": place == 0} for i in range(GROUPS) for place in range(GROUP)]
    slow, others = ([row for row in rows if row["slow"] is which] for which in (True, False))
    with tempfile.TemporaryDirectory() as folder:
        for name, which in itertools.product(("local", "server"), ("slow tools", "long turns")):
            policy, engine = (model(384, 4), None) if name == "local" else (model(64, 1), Server(PER_TOKEN))
            run = trainer(agent(which), folder, policy, engine)
            seconds(run, rows[:2])  # tries the model
            samples = run.rollout_maker.sample(run.new_samples(rows))
            one_by_one = [partial(seconds, run, some) for some in (rows, slow, others)]
            compare(f"{name}, {which}", run, samples, [*one_by_one, partial(together, run, rows)])


class Room:
    """An environment whose one tool takes a while."""

    def reset(self, tool, **row):
        self.seconds = tool

    async def go_on(self):
        """Go on."""
        await asyncio.sleep(self.seconds)
        return "."

    def get_reward(self):
        return 1.0


class Called:
    """Turns of a policy that calls the tool when it has written the tokens that its row says."""

    def __init__(self, turns):
        self.turns, self.drop, self.quiet = turns, turns.drop, turns.quiet

    def __bool__(self) -> bool:
        return bool(self.turns)

    def begin(self, asked) -> None:
        self.turns.begin([(key, one, replace(how, max_new_tokens=one.row["tokens"])) for key, one, how in asked])

    def step(self):
        return [(key, replace(one, finished=True)) for key, one in self.turns.step()]


@contextlib.contextmanager
def calls_after_each_turn(together: bool):
    """The policy calls `Room.go_on` in each turn; where `together`, its turns are written to their ends."""
    own, read = Sampler.open_turns, ToolProtocol.read

    @contextlib.contextmanager
    def open_(self, wake):
        with contextlib.nullcontext(TurnsTogether(self.generate_turn)) if together else own(self, wake) as turns:
            yield Called(turns)

    Sampler.open_turns = open_
    ToolProtocol.read = lambda *_: Turn({"role": "assistant", "content": ""}, (Call("go_on", {}),))
    try:
        yield
    finally:
        Sampler.open_turns, ToolProtocol.read = own, read


def conversations(run, rows, together: bool = False):
    """(seconds, samples) of a rollout; `together`: all wait for the longest turn and tool."""
    tool = max(row["tool"] for row in rows)
    rows = [row | {"tool": tool} for row in rows] if together else rows
    with calls_after_each_turn(together):
        samples = run.new_samples(rows)
        started = time.perf_counter()
        done = run.rollout_maker.sample(samples)
        return time.perf_counter() - started, done


def talking(run, rows, together: bool = False) -> float:
    return conversations(run, rows, together)[0]


def slow_conversations() -> None:
    words = testing.tokenizer(chat_template=TOOLS)
    for which in ("slow tools", "long turns"):
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{10 + i} 3 5 7 9 11"}],
                "slow": place == 0,
                "tool": TOOL * (SLOWER if place == 0 and which == "slow tools" else 1),
                "tokens": TOKENS * (SLOWER if place == 0 and which == "long turns" else 1),
            }
            for i in range(GROUPS)
            for place in range(GROUP)
        ]
        with tempfile.TemporaryDirectory() as folder:
            args = arguments(folder, max_tool_calling_iterations=TURNS - 1)
            policy = model(384, 4, len(words))
            run = GRPOTrainer(policy, None, args, rows[:GROUPS], processing_class=words, environment_factory=Room)
            conversations(run, rows[:2])  # tries the model
            done = conversations(run, rows)[1]
            parts = [[row for row in rows if row["slow"] is slow] for slow in (True, False)]
            timed = [partial(talking, run, *some) for some in ([rows], *([part] for part in parts), [rows, True])]
            compare(f"environments, {which}", run, done, timed)


class Ends(GRPOTrainer):
    """Notes when each micro-batch has been learned from, as a device would, beside the processor."""

    def training_step(self, *given, **options):
        loss = super().training_step(*given, **options)
        time.sleep(LEARNS)
        self.ends.append(time.perf_counter())
        return loss


def slow_in_each_group(any_slow: bool):
    """An agent whose tools are slow in the first episode of each group that begins, where `any_slow`."""
    begun: dict[int, int] = {}

    async def run(episode, row):
        place = begun[row["number"]] = begun.get(row["number"], -1) + 1
        return await agent("slow tools")(episode, row | {"slow": any_slow and place % GROUP == 0})

    return run


def ahead_of_training(steps: int = 8) -> None:
    taken: dict[tuple[int, bool], list[float]] = {(bound, slow): [] for bound in (0, 2) for slow in (False, True)}
    for _, (bound, slow) in itertools.product(range(ROUNDS), taken):
        with tempfile.TemporaryDirectory() as folder:
            engine = Server(PER_TOKEN)
            engine.updates_in_flight = True
            run = trainer(slow_in_each_group(slow), folder, model(64, 1, 128), engine, Ends, max_staleness=bound,
                          max_steps=steps, steps_per_generation=GROUPS, gradient_accumulation_steps=GROUPS,
                          num_train_epochs=99)  # fmt: skip
            run.ends = []
            run.train()
            ends = run.ends[2 * GROUPS - 1 :: GROUPS]
            taken[bound, slow].append((ends[-1] - ends[0]) / (len(ends) - 1))
    each = {key: min(seconds) for key, seconds in taken.items()}
    for bound in (0, 2):
        print(f"ahead of training, max_staleness={bound}: {each[bound, True]:.2f} s a step, {each[bound, False]:.2f} s "
              f"without slow episodes ({each[bound, False] / each[bound, True]:.2f})", flush=True)  # fmt: skip


class Rests(TrainerCallback):
    """Lets each optimizer step take `STEP` seconds more, and notes when it has ended."""

    def __init__(self):
        self.ends = []

    def on_step_end(self, args, state, control, **kwargs):
        time.sleep(STEP)
        self.ends.append(time.perf_counter())


def carried(steps: int = 30) -> None:
    async def run(episode, row):
        await agent("")(episode, row | {"slow": False})
        await asyncio.sleep(10 * STEP if row["number"] == 0 else 0)
        return 1.0

    for bound, ahead in ((2, None), (8, None), (8, 2), (8, 4)):
        with tempfile.TemporaryDirectory() as folder:
            engine = Server(0.0)
            engine.updates_in_flight = True
            one = trainer(run, folder, model(64, 1, 128), engine, prompts=GROUPS * steps, max_staleness=bound,
                          sample_ahead=ahead, steps_per_generation=GROUPS, gradient_accumulation_steps=GROUPS,
                          max_steps=steps, shuffle_dataset=False, logging_steps=1)  # fmt: skip
            one.add_callback(rests := Rests())
            one.train()
            each = (rests.ends[-1] - rests.ends[9]) / (steps - 10)
            records = [json.loads(line) for line in (Path(folder) / "log.jsonl").read_text().splitlines()[10:]]
            waits, ages = (statistics.mean(record[name] for record in records if name in record)
                           for name in ("perf/wait_seconds", "staleness/mean"))  # fmt: skip
            print(f"carried, max_staleness={bound}, sample_ahead={ahead}: {each:.2f} s a step, {waits:.2f} s of them "
                  f"waiting, completions are {ages:.1f} steps old", flush=True)  # fmt: skip


# ------------------------------------------------------------------------------------------------ beside the engine


class Server:
    """A stand-in for a server that answers each of many turns after `LATENCY` seconds, or so many a token."""

    is_concurrent = has_own_weights = True

    def __init__(self, per_token: float | None = None) -> None:
        self.per_token = per_token

    def sync_weights(self, model) -> None:
        pass

    def generate(self, prompts, n, sampling, seeds=None) -> Completions:
        number = TOKENS if self.per_token is None else sampling.max_new_tokens
        time.sleep(LATENCY if self.per_token is None else self.per_token * number)
        ids = [[2 + (7 * i) % 100 for i in range(number)] for _ in range(len(prompts) * n)]
        return Completions(ids, [[-1.0] * number for _ in ids], [False] * len(ids))


def connection(episode):
    import httpx

    headers = {"authorization": f"Bearer {episode.api_key}"}
    return httpx.AsyncClient(base_url=episode.base_url, headers=headers, timeout=60, trust_env=False, verify=False)


def asks(through_http: bool, turns: int):
    async def run(episode, row):
        said = [{"role": "user", "content": f"{10 + row['number']} 3 5 7 9 11"}]
        async with connection(episode) if through_http else contextlib.nullcontext() as client:
            for _ in range(turns):
                if client is None:
                    said.append(await episode.generate(said, max_tokens=TOKENS))
                else:
                    answer = await client.post("chat/completions", json={"messages": said, "max_tokens": TOKENS})
                    said.append(answer.json()["choices"][0]["message"])
                said.append({"role": "user", "content": "2 4 6"})
        return 1.0

    return run


def overhead() -> None:
    turns = 8
    with tempfile.TemporaryDirectory() as folder:
        for through_http, apart in itertools.product((False, True), (False, True)):
            name = f"{'through HTTP' if through_http else 'in Python'}{', in the rollout process' if apart else ''}"
            if through_http and not _has("httpx", "uvicorn"):
                print(f"{name}: httpx and uvicorn are not installed")
                continue
            run = trainer(Agent(asks(through_http, turns)), folder, model(64, 1), Server(), rollout_process=apart)
            seconds(run, [{"number": 0}] * 8)
            began, many = time.process_time(), EPISODES * turns
            each = (seconds(run, [{"number": i} for i in range(EPISODES)]) - turns * LATENCY) / many * 1e3
            own = (time.process_time() - began) / many * 1e3
            held = []
            for number in (EPISODES // 4, EPISODES):
                tracemalloc.start()
                seconds(run, [{"number": i} for i in range(number)])
                held.append(f"{tracemalloc.get_traced_memory()[1] / number / 1024:.0f}")
                tracemalloc.stop()
            print(
                f"overhead {name}: {each:.2f} ms a turn, {own:.2f} ms of the processor; {held[0]} KiB an episode of "
                f"{EPISODES // 4}, {held[1]} KiB of {EPISODES}",
                flush=True,
            )


def spins(completions, **_):
    until = time.perf_counter() + 1.0
    while time.perf_counter() < until:
        pass
    return [float(len(text)) for text in completions]


def lengths(completions, **_):
    return [float(len(text)) for text in completions]


class Timed(GRPOTrainer):
    """Notes how long each training step takes."""

    def training_step(self, *given, **options):
        began = time.perf_counter()
        loss = super().training_step(*given, **options)
        self.taken.append(time.perf_counter() - began)
        return loss


def busy_reward(rounds: int = 3) -> None:
    taken: dict[str, list[float]] = {"no cost": [], "in a thread": [], "in the rollout process": []}
    for _ in range(rounds):
        for name, steps in taken.items():
            with tempfile.TemporaryDirectory() as folder:
                args = GRPOConfig(
                    folder, max_steps=8, per_device_train_batch_size=8, num_generations=8, max_completion_length=64,
                    max_staleness=2, rollout_process=name == "in the rollout process", report_to="none",
                    save_strategy="no", use_cpu=True, disable_tqdm=True,
                )  # fmt: skip
                reward, rows = lengths if name == "no cost" else spins, [{"prompt": "3 5 7"}] * 16
                run = Timed(model(384, 4), reward, args, rows, processing_class=tokenizer(), generator=Server())
                run.taken = []
                run.train()
                steps += run.taken[1:]
    base = statistics.median(taken["no cost"])
    for name, steps in taken.items():
        print(f"busy reward {name}: a training step of {statistics.median(steps):.3f} s", end="")
        print(f", {statistics.median(steps) / base - 1:+.0%}", flush=True)


def _has(*names: str) -> bool:
    from importlib.util import find_spec

    return all(find_spec(name) is not None for name in names)


if __name__ == "__main__":
    torch.set_num_threads(1)
    slow_episodes()
    slow_conversations()
    ahead_of_training()
    carried()
    overhead()
    busy_reward()
