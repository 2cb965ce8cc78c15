"""Tools and environments: who wrote which token, and what a tool is asked."""

import asyncio
import json
import signal
import sqlite3
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from posttrain.core.errors import DataError
from posttrain.rl.agents.environments import Environments
from posttrain.rl.rewards import background
from posttrain.rl.samples.prompts import PromptCodec, context_length
from posttrain.rl.samples.samples import Sample, take_rollout
from posttrain.rl.tools.formats import Call
from tests import tiny
from tests.rl.agents.conversations import answered, converse
from tests.tiny_vision import image

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
CODEC = PromptCodec(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")


def ids(text):
    return TOKENIZER(text)["input_ids"]


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def slow(a: int):
    """Change the sign.

    Args:
        a: A number.
    """
    await asyncio.sleep(0)
    return -a


def call(name, /, **arguments):
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def sample(text, prompt=None):
    prompt = prompt or [{"role": "user", "content": "?"}]
    written = [*ids(text), END]
    return Sample({}, prompt, CODEC.encode(prompt), written, [-1.0] * len(written), finished=True,
                  completion=[{"role": "assistant", "content": text}], seed=3)  # fmt: skip


def writer(*texts):
    """Stands in for the policy: writes one text a turn, and records what it was shown."""
    shown = []

    def go_on(samples, turn, tokens):
        shown.extend(TOKENIZER.decode(one.prompt_ids) for one in samples)
        own = [*ids(texts[turn - 1]), END][:tokens]
        logps, finished = [-2.0] * len(own), own[-1] == END
        return [
            replace(one, ids=own, logps=logps, finished=finished, completion=CODEC.decode(one.prompt, own))
            for one in samples
        ]

    return go_on, shown


def test_a_tool_is_called_and_what_it_says_is_not_learned_from():
    one, (go_on, shown) = sample(call("add", a=2, b=3)), writer("so it is five")
    [one] = converse(Environments([add]), [one], CODEC, go_on, max_tokens=500)
    first = len(ids(call("add", a=2, b=3))) + 1
    told = ids("\n<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    last = [*ids("so it is five"), END]
    assert one.ids == [*one.ids[:first], *told, *last]
    assert one.learn == [True] * first + [False] * len(told) + [True] * len(last)
    assert one.logps == [-1.0] * first + [0.0] * len(told) + [-2.0] * len(last)
    assert [m["role"] for m in one.completion] == ["assistant", "tool", "assistant"] and one.completion[1][
        "content"
    ] == "5"
    assert shown[0].endswith("<tool_response>\n5\n</tool_response><|im_end|>\n<|im_start|>assistant\n") and one.finished


def test_each_turn_keeps_the_experts_it_was_sampled_with():
    """A later turn reads the text before it again, perhaps with others."""
    one, (go_on, _) = sample(call("add", a=2, b=3)), writer("so it is five")
    one = replace(one, routes=torch.zeros(one.num_read, 2, 1, dtype=torch.int16))

    def routed(samples, turn, tokens):
        done = go_on(samples, turn, tokens)
        return [replace(row, routes=torch.full((row.num_read, 2, 1), turn, dtype=torch.int16)) for row in done]

    [found] = converse(Environments([add]), [one], CODEC, routed, max_tokens=500)
    assert found.routes[:, 0, 0].tolist() == [0] * one.num_read + [1] * (found.num_read - one.num_read)


def test_several_turns_until_nothing_is_asked_for():
    one, (go_on, _) = sample(call("add", a=1, b=1)), writer(call("add", a=2, b=2) + call("slow", a=9), "done", "never")
    environments = Environments([add, slow])
    [one] = converse(environments, [one], CODEC, go_on, 500)
    assert [m["content"] for m in one.completion if m["role"] == "tool"] == ["2", "4", "-9"]
    assert environments.counts == {"calls": 3, "failures": 0, "turns": 0, "tokens": 0, "seconds": 0}


def test_turns_are_bounded():
    one, (go_on, _) = sample(call("add", a=1, b=1)), writer(call("add", a=2, b=2), "unreachable")
    [one] = converse(Environments([add], max_turns=1), [one], CODEC, go_on, 500)
    assert [m["role"] for m in one.completion] == ["assistant", "tool", "assistant"] and one.ending == "turns"


def test_a_conversation_that_takes_too_long_calls_no_more_tools(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("posttrain.rl.agents.environments.time", SimpleNamespace(monotonic=lambda: clock[0]))

    async def wait(a: int):
        """Wait.

        Args:
            a: A number.
        """
        clock[0] += 2
        return a

    others, found = sample("It is 2."), {}
    for seconds in (1, 60):
        environments = Environments([wait], seconds=seconds)
        (go_on, _), one = writer(call("wait", a=2), "done", "unreachable"), sample(call("wait", a=1))
        found[seconds] = converse(environments, [one, others], CODEC, go_on, 500)
        assert environments.counts["seconds"] == (seconds == 1)
    (cut, short), (whole, _) = found[1], found[60]
    assert cut.ending == "seconds" and [m["role"] for m in cut.completion] == ["assistant", "tool", "assistant"]
    assert not whole.ending and len(whole.completion) == 5 and short.completion == others.completion


def test_an_answer_that_does_not_fit_is_left_out():
    one, (go_on, shown) = sample(call("add", a=1, b=1)), writer("x")
    before = list(one.ids)
    [one] = converse(Environments([add]), [one], CODEC, go_on, max_tokens=len(before) + 5)
    assert one.ids == before and len(one.completion) == 1 and not shown and one.ending == "tokens"


def test_a_completion_is_cut_at_its_limit_after_a_tool():
    one, (go_on, _) = sample(call("add", a=1, b=1)), writer("a long answer that goes on and on and on and on and on")
    limit = (
        len(one.ids)
        + len(ids("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n"))
        + 3
    )
    [one] = converse(Environments([add]), [one], CODEC, go_on, limit)
    assert len(one.ids) == len(one.learn) == len(one.logps) == limit and not one.finished


TOLD = ids("\n<|im_start|>user\n<tool_response>\n2\n</tool_response><|im_end|>\n<|im_start|>assistant\n")


def test_a_completion_ends_where_the_context_of_the_model_does():
    fits, full, far = (sample(call("add", a=1, b=1)) for _ in range(3))
    full, far = (replace(one, prompt_ids=[5] * 100 + one.prompt_ids) for one in (full, far))
    far = replace(far, ids=[*ids("no call"), END], finished=True)
    said, (go_on, shown) = list(full.ids), writer("an answer")
    context = len(full.prompt_ids) + len(said) + len(TOLD)
    fits, full, far = converse(Environments([add]), [fits, full, far], CODEC, go_on, max_tokens=500, context=context)
    assert full.ids == said and len(full.completion) == 1 and full.learn == [True] * len(said)
    assert fits.ids == [*said, *TOLD, *ids("an answer"), END] and len(shown) == 1


def test_a_row_near_the_end_of_its_context_is_given_no_more_tokens_than_fit():
    wide, near = sample(call("add", a=1, b=1)), sample(call("add", a=1, b=1))
    near = replace(near, prompt_ids=[5] * 100 + near.prompt_ids)
    given, (write, _) = {}, writer("a long answer that goes on and on and on")

    def go_on(samples, turn, tokens):
        given.update({len(one.prompt_ids): tokens for one in samples})
        return write(samples, turn, tokens)

    so_far = [len(one.prompt_ids) + len(one.ids) + len(TOLD) for one in (wide, near)]
    wide, near = converse(Environments([add]), [wide, near], CODEC, go_on, max_tokens=200, context=so_far[1] + 3)
    assert given == {so_far[0]: 200 - so_far[0] + len(wide.prompt_ids), so_far[1]: 3}
    assert len(near.prompt_ids) + len(near.ids) == so_far[1] + 3 and not near.finished
    assert wide.finished and len(near.learn) == len(near.logps) == len(near.ids)


@pytest.mark.parametrize(
    ("positions", "engine", "limit"), [(64, None, 64), (64, 32, 32), (None, None, None), (-1, 9, 9)]
)
def test_the_context_is_that_of_the_model_or_of_its_engine(positions, engine, limit):
    assert context_length(SimpleNamespace(max_position_embeddings=positions), engine) == limit
    assert context_length(tiny.causal_lm(arch="gpt2", n_positions=77).config) == 77


@pytest.mark.parametrize(("text", "says"), [
    (call("ad", a=1, b=1), "no tool 'ad', did you mean 'add'"), (call("add", a=1), "TypeError"),
    ("<tool_call>add(1, 2)</tool_call>", 'a call is written <tool_call>\n{"name": "name"'),
    (call("add", a="x", b=1), "TypeError"),
])  # fmt: skip
def test_a_call_that_cannot_be_made_is_answered(text, says):
    one, (go_on, _) = sample(text), writer("oh")
    environments = Environments([add])
    [one] = converse(environments, [one], CODEC, go_on, 500)
    assert says in one.completion[1]["content"] and environments.counts == {
        "calls": 1,
        "failures": 1,
        "turns": 0,
        "tokens": 0,
        "seconds": 0,
    }


async def leave(code: int):
    """Leave.

    Args:
        code: Any.
    """
    raise SystemExit(code)


def quits(code: int):
    """Leave.

    Args:
        code: Any.
    """
    exec(f"raise SystemExit({code})")


async def is_cut_off(code: int):
    """Ask a server that hangs up.

    Args:
        code: Any.
    """
    raise asyncio.CancelledError


@pytest.mark.parametrize(
    ("tool", "why"),
    [
        (leave, "RuntimeError: it called sys.exit(3)"),
        (quits, "SystemExit: 3"),
        (is_cut_off, "RuntimeError: it cancelled itself, or what it awaited"),
    ],
)
def test_a_tool_that_exits_or_is_cut_off_has_failed(tool, why):
    one, (go_on, _) = sample(call(tool.__name__, code=3)), writer("oh")
    [one] = converse(Environments([tool]), [one], CODEC, go_on, 500)
    assert one.completion[1]["content"] == f"error: {why}"


@pytest.mark.parametrize(("result", "read"), [
    (7, "7"), ({"type": "image", "title": "a"}, "{'type': 'image', 'title': 'a'}"), ("<x at 0x7f>", "<x at 0x7f>"),
    ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"), ([], "[]"), (None, "None"),
    (image(0), None), ([{"type": "text", "text": "see"}, {"type": "image", "image": image(0)}], None), (object(), None),
    ([{"type": "image_url", "image_url": {"url": "x"}}], None), ({"seen": [image(0)]}, None),
])  # fmt: skip
@pytest.mark.parametrize("waits", [False, True])
def test_what_a_tool_returns_is_read_as_a_text_or_refused_by_its_name(result, read, waits):
    def look():
        """Look."""
        return result

    async def look_later():
        """Look."""
        return result

    tool = look_later if waits else look
    answer = partial(answered, Environments([tool]), [(Sample({}, None, []), [Call(tool.__name__, {})])])
    if read is None:
        with pytest.raises(TypeError, match=f"The tool '{tool.__name__}' returned .*, which is no text"):
            answer()
    else:
        assert answer()[0][0]["content"] == read


class Counter:
    made = 0

    def __init__(self):
        type(self).made += 1

    def reset(self, start=0, **row):
        self.count = start
        return f" from {start}"

    def step(self, by: int):
        """Go on counting.

        Args:
            by: How far.
        """
        self.count += by
        return self.count

    def get_reward(self):
        return float(self.count)


@pytest.mark.parametrize("waits", [False, True])
def test_a_tool_that_hangs_is_named_while_the_rollout_waits_for_it(waits, monkeypatch, caplog):
    monkeypatch.setattr(background, "SLOW", 0.01)

    def hangs(a: int):
        """Wait.

        Args:
            a: A number.
        """
        time.sleep(0.1)
        return a

    async def hangs_async(a: int):
        """Wait.

        Args:
            a: A number.
        """
        await asyncio.sleep(0.1)
        return a

    tool = hangs_async if waits else hangs
    converse(Environments([tool]), [sample(call(tool.__name__, a=1))], CODEC, writer("oh")[0], 500)
    (said,) = [record.getMessage() for record in caplog.records if "has been running" in record.getMessage()]
    assert f"{tool.__name__!r}, which trajectory 0/0 has called with {{'a': 1}}, has been running" in said
    assert "time limit of its own" in said


def test_each_completion_has_an_environment_of_its_own():
    environments = Environments(factory=Counter)
    samples = [Sample({"start": start}, [{"role": "user", "content": "count"}], []) for start in (0, 0, 5)]
    samples = environments.begin(samples)
    assert [s.prompt[-1]["content"] for s in samples] == ["count from 0", "count from 0", "count from 5"]
    assert set(environments.tools_of(samples[0])) == {"step"}
    for number, one in enumerate(samples):
        assert answered(environments, [(one, [Call("step", {"by": number})])])[0][0]["role"] == "tool"
    rewards = environments.reward_functions[0]
    assert rewards.__name__ == "Counter" and rewards([s.environment for s in samples]) == [0, 1, 7]
    assert list(environments) == [s.environment for s in samples]  # as trl's list of them
    made = Counter.made
    environments.begin(samples)
    assert Counter.made == made, "environments are reset, not made again"


def test_environments_can_be_chosen_by_the_row():
    class Other:
        def reset(self, **row):
            assert "environment" not in row

        def look(self):
            """Look."""
            return "nothing"

    environments = Environments(factory={"count": Counter, "other": Other})
    samples = [Sample({"environment": name}, None, []) for name in ("count", "other")]
    samples[1] = replace(samples[1], prompt=[{"role": "user", "content": "?"}])
    samples = environments.begin(samples)
    assert [set(environments.tools_of(s)) for s in samples] == [{"step"}, {"look"}]
    assert samples[0].prompt == [{"role": "user", "content": " from 0"}]
    assert environments.reward_functions[0]([s.environment for s in samples]) == [0, None]
    assert [tool.__name__ for tool in environments.all_tools()] == ["step", "look"]
    with pytest.raises(DataError, match=r"'cuont', which is not among .* \(count, other\), did you mean 'count'\?"):
        environments.begin([Sample({"environment": "cuont"}, None, [])])


def test_a_tool_without_a_description_is_refused():
    def bare(a):
        return a

    with pytest.raises(TypeError, match="'bare' cannot be described to the model.*type hint"):
        Environments([bare])


def test_an_environment_must_have_reset():
    with pytest.raises(TypeError, match=r"no reset\(\)"):
        Environments(factory=object)


def test_a_rollout_function_gives_tokens_masks_and_columns():
    samples = [Sample({}, "a", []), Sample({}, "b", [])]
    output = {"prompt_ids": [[5], [6]], "completion_ids": [[7, 1], [8, 9]], "logprobs": [[-1, None], [[-2], [-3]]],
              "env_mask": [[1, 0], [1, 1]], "won": [True, False]}  # fmt: skip
    samples = take_rollout(samples, output, CODEC)
    assert [s.ids for s in samples] == [[7, 1], [8, 9]] and samples[0].learn == [True, False]
    assert samples[0].logps[0] == -1 and samples[0].logps[1] != samples[0].logps[1] and samples[1].logps == [-2, -3]
    assert samples[0].finished and not samples[1].finished and samples[1].extra == {"won": False}
    with pytest.raises(ValueError, match="logprobs is missing"):
        take_rollout(samples, {"prompt_ids": [], "completion_ids": []}, CODEC)
    with pytest.raises(ValueError, match="1 of completion_ids for 2 prompts"):
        take_rollout(samples, output | {"completion_ids": [[7]]}, CODEC)


@pytest.mark.parametrize(("prompt", "told", "content"), [
    (None, None, ""), (None, "go", "go"), ([{"role": "user", "content": "play"}], None, "play"),
    ([{"role": "user", "content": "play "}], [{"type": "text", "text": "chess"}],
     [{"type": "text", "text": "play "}, {"type": "text", "text": "chess"}]),
])  # fmt: skip
def test_a_prompt_is_what_the_row_and_the_environment_say(prompt, told, content):
    class Says:
        def reset(self, **row):
            return told

    [one] = Environments(factory=Says).begin([Sample({}, prompt, [])])
    assert one.prompt[-1] == {"role": "user", "content": content}


def test_what_an_environment_says_is_a_text():
    class Says:
        def reset(self, **row):
            return {"observation": 1}

    with pytest.raises(TypeError, match=r"reset\(\) of Says returned a dict; return a text"):
        Environments(factory=Says).begin([Sample({}, None, [])])


class Database:
    """An environment of things that belong to the thread that made them."""

    def __init__(self):
        self.connection = sqlite3.connect(":memory:")

    def reset(self, **row):
        self.connection.execute("create table if not exists seen (word text)")

    def note(self, word: str):
        """Note a word.

        Args:
            word: It.
        """
        self.connection.execute("insert into seen values (?)", (word,))
        return self.connection.execute("select count(*) from seen").fetchone()[0]

    def wait(self):
        """Wait, but not for long."""

        def ring(*_):
            raise TimeoutError("it took too long")

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            time.sleep(5)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    async def remember(self):
        """Count the words."""
        return self.connection.execute("select count(*) from seen").fetchone()[0]


def asked(environments, samples, *calls):
    samples = environments.begin(samples)
    return [[m["content"] for m in told] for told in answered(environments, [(one, calls) for one in samples])]


def test_plain_tools_run_in_the_thread_that_trains():
    samples = [Sample({}, None, []) for _ in range(2)]
    calls = [Call("note", {"word": "a"}), Call("wait", {}), Call("note", {"word": "b"})]
    told = asked(Environments(factory=Database), samples, *calls)
    assert told == [["1", "error: TimeoutError: it took too long", "2"]] * 2


def test_a_failure_that_comes_of_our_threads_is_not_told_the_policy():
    with pytest.raises(RuntimeError, match="because of the thread that it runs in.*sqlite3|SQLite"):
        asked(Environments(factory=Database), [Sample({}, None, [])], Call("remember", {}))


class Clock:
    def __init__(self):
        self.seen = []

    def reset(self, **row):
        self.seen = []

    async def sleep(self, name: str):
        """Sleep.

        Args:
            name: Of the sleep.
        """
        await asyncio.sleep(0.2)
        self.seen.append(name)
        return list(self.seen)

    def look(self):
        """Look."""
        return list(self.seen)


def test_async_tools_of_all_completions_run_side_by_side_and_a_samples_calls_in_their_order():
    environments = Environments(factory=Clock)
    samples = environments.begin([sample(call("sleep", name="a") + call("look")) for _ in range(16)])
    began = time.perf_counter()
    told = converse(environments, samples, CODEC, writer(*["done"] * 16)[0], 900)  # a busy machine ends them apart
    assert time.perf_counter() - began < 1.5, "one after the other takes 3.2 seconds"
    assert [[m["content"] for m in one.completion if m["role"] == "tool"] for one in told] == [["['a']", "['a']"]] * 16


async def nap(seconds: float):
    """Sleep.

    Args:
        seconds: How long.
    """
    await asyncio.sleep(seconds)


def test_a_slow_tool_holds_up_no_other_conversation():
    slow, fast = sample(call("nap", seconds=1.0)), sample(call("nap", seconds=0.0))
    began, ended = time.perf_counter(), []

    def go_on(samples, turn, tokens):
        ended.extend((one.seed, turn, time.perf_counter() - began < 0.9) for one in samples)
        return writer(*[call("nap", seconds=0.0)] * 2, *["done"] * 5)[0](samples, turn, tokens)

    slow, fast = converse(Environments([nap]), [slow, fast], CODEC, go_on, 900)
    assert [in_time for *_, in_time in ended] == [True] * 3 + [False]
    assert [len(one.completion) for one in (slow, fast)] == [3, 7]


def test_the_tools_of_others_end_where_one_fails():
    """An error of our threads ends the rollout, and no tool goes on behind it."""
    reached = []

    async def lasts(a: int):
        """Wait.

        Args:
            a: A number.
        """
        await asyncio.sleep(0.5)
        reached.append(a)

    def breaks(a: int):
        """Break.

        Args:
            a: A number.
        """
        time.sleep(0.1)
        raise ValueError("signal only works in main thread")

    samples = [sample(call("lasts", a=1)), sample(call("breaks", a=1))]
    with pytest.raises(RuntimeError, match="because of the thread"):
        converse(Environments([lasts, breaks]), samples, CODEC, writer("no")[0], 900)
    time.sleep(0.7)
    assert not reached
