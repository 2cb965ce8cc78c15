"""Reward functions: how they are called, what they may return, and what happens when they fail."""

import asyncio
import logging
import math
import pickle
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch

from posttrain.core.errors import DataError, MissingModelError
from posttrain.rl import rewards
from posttrain.rl.rewards import background, scorers
from posttrain.rl.rewards import scoring as rw
from posttrain.rl.rewards.scorers import RewardModel
from posttrain.rl.rewards.scoring import RewardArguments, RewardError, Rewards
from posttrain.rl.samples.samples import Sample
from tests import tiny

PROMPTS, COMPLETIONS, IDS = ["a", "b"], ["x", "yy"], [[1], [2, 2]]


def options(**changes):
    return RewardArguments(**changes)


def score(*functions, columns=None, extra=None, **changes):
    return Rewards(functions, options(**changes)).of(samples(columns), **(extra or {}))


def samples(columns=None):
    rows = [{name: values[place] for name, values in (columns or {}).items()} for place in range(len(PROMPTS))]
    made = zip(rows, PROMPTS, IDS, COMPLETIONS, strict=True)
    return [Sample(row, prompt, [1], ids, completion=completion) for row, prompt, ids, completion in made]


def length(completions):
    return [len(text) for text in completions]


def test_a_function_gets_what_its_signature_asks_for():
    seen = {}

    def judge(completions, answer, *, prompts, trainer_state=None, missing=3):
        seen.update(completions=completions, answer=answer, prompts=prompts, state=trainer_state, missing=missing)
        return [1, 2]

    score(judge, columns={"answer": [5, 6], "other": [7, 8]}, extra={"trainer_state": "s"})
    assert seen == {"completions": COMPLETIONS, "answer": [5, 6], "prompts": PROMPTS, "state": "s", "missing": 3}


def test_a_function_that_takes_anything_gets_everything():
    seen = {}

    def judge(**kwargs):
        seen.update(kwargs)
        return [0, 0]

    score(judge, columns={"answer": [5, 6]})
    assert {"prompts", "completions", "completion_ids", "answer", "log_metric", "log_extra"} <= set(seen)


def test_a_missing_column_is_named():
    def judge(completions, anwser):
        return [0, 0]

    with pytest.raises(DataError, match=r"'judge' has the parameter 'anwser'.*did you mean 'answer'"):
        score(judge, columns={"answer": [5, 6]})


@pytest.mark.parametrize(
    "returned",
    [[1, 2.0], (True, 2), torch.tensor([1.0, 2.0]), np.array([1, 2]), [torch.tensor(1.0), np.float32(2)]],
    ids=str,
)
def test_numbers_of_any_kind_are_rewards(returned):
    assert score(lambda completions: returned).rewards.tolist() == [[1.0], [2.0]]


def test_none_is_not_zero():
    scores = score(lambda completions: [None, 1.0], length)
    assert math.isnan(scores.rewards[0, 0]) and scores.rewards[0, 1] == 1 and not scores.failed.any()


@pytest.mark.parametrize(("returned", "says"), [
    ([1.0], "1 rewards for 2 completions"), ([1, "good"], "'good'.*no number"), (3.0, "returned 3.0, not a list"),
    ([math.nan, 1.0], "returned nan for 1 of 2"), ([1.0, math.inf], "returned inf for 1 of 2"),
])  # fmt: skip
def test_what_is_no_reward_is_refused_with_the_function_and_the_completion(returned, says):
    def judge(completions):
        return returned

    with pytest.raises(RewardError, match=f"(?s)'judge'.*{says}.*prompt: '.'.*completion:"):
        score(judge)


def broken(completions):
    raise KeyError("answer")


def test_a_failure_stops_the_run_and_shows_the_text():
    says = "(?s)'broken' failed on 2 completions: KeyError: 'answer'.*completion: 'x'.*reward_on_error='mask'"
    with pytest.raises(RewardError, match=says):
        score(broken)


def test_a_failure_can_be_masked_or_given_a_value(caplog):
    caplog.set_level(logging.WARNING, "posttrain")
    masked = Rewards([broken, length], options(reward_on_error="mask"))
    for _ in range(3):
        scores = masked.of(samples())
    assert scores.rewards[:, 0].isnan().all() and scores.rewards[:, 1].tolist() == [1, 2]
    assert scores.failed.tolist() == [[True, False]] * 2
    assert len([r for r in caplog.records if "KeyError" in r.message]) == 1
    assert score(broken, reward_on_error="value", reward_error_value=-1.0).rewards.tolist() == [[-1.0], [-1.0]]


def test_nan_can_be_masked_alone():
    scores = score(lambda completions: [math.nan, 4.0], reward_on_error="mask")
    assert (
        math.isnan(scores.rewards[0, 0]) and scores.rewards[1, 0] == 4 and scores.failed.tolist() == [[True], [False]]
    )


def test_completions_that_no_function_applies_to_teach_nothing_and_are_told_of(caplog):
    assert score(lambda completions: [None, 1.0]).rewards.isnan().tolist() == [[True], [False]]
    assert "All reward functions returned None" in caplog.text and "for 1 of 2 completions" in caplog.text


@pytest.mark.parametrize("first", [None, math.nan])
def test_nothing_left_to_learn_from_is_said_or_an_error_as_asked_for(first, caplog):
    assert score(lambda completions: [first, None], reward_on_error="mask").rewards.isnan().all()
    assert "All reward functions returned None" in caplog.text and "for 2 of 2 completions" in caplog.text
    with pytest.raises(RewardError, match="No reward function gave a reward for any of 2 completions"):
        score(lambda completions: [first, None], reward_on_error="mask", reward_on_none="raise")


def test_weights_may_leave_the_rewards_of_environments_out():
    functions = [lambda completions: [1.0, 1.0], lambda completions: [2.0, 2.0]]
    given = rw.Rewards(functions, rw.RewardArguments(reward_weights=[0.5]), from_environments=1)
    assert given.weights.tolist() == [0.5, 1.0]
    both = rw.Rewards(functions, rw.RewardArguments(reward_weights=[0.5, 3.0]), from_environments=1)
    assert both.weights.tolist() == [0.5, 3.0]
    with pytest.raises(ValueError, match="reward_weights has 3 numbers and there are 2"):
        rw.Rewards(functions, rw.RewardArguments(reward_weights=[1, 1, 1]), from_environments=1)


def test_one_tokenizer_is_that_of_one_reward_model():
    with pytest.raises(ValueError, match=r"processing classes \(1\) must match the number of reward functions \(2\)"):
        scorers.reward_functions([tiny.reward_model(), tiny.reward_model()], tiny.tokenizer(), False)


def test_a_function_that_hangs_is_left_behind():
    def hangs(completions):
        time.sleep(30)

    started = time.perf_counter()
    with pytest.raises(RewardError, match="'hangs'.*TimeoutError: no answer after 0.05 seconds.*set reward_timeout to"):
        score(hangs, reward_timeout=0.05)
    with pytest.raises(RewardError, match="'hangs'.*TimeoutError: no answer after 0.05 seconds"):
        score(hangs, length, reward_timeout=0.05, reward_concurrency=2)  # in other threads
    assert time.perf_counter() - started < 5


def test_a_function_has_a_limit_of_minutes_and_may_set_alarms_of_its_own():
    before = signal.getsignal(signal.SIGURG)

    def alarms(completions):
        signal.setitimer(signal.ITIMER_REAL, 0)  # which only the main thread may
        return [1.0] * len(completions)

    assert 60 < rw.RewardArguments().reward_timeout <= 1800
    assert score(alarms, reward_timeout=rw.RewardArguments().reward_timeout).rewards.sum() == 2
    assert signal.getsignal(signal.SIGURG) == before


def test_async_functions_run_side_by_side():
    together = []

    async def slow(completions):
        together.append(None)
        for _ in range(400):
            if len(together) == 3:
                return [1, 1]
            await asyncio.sleep(0.01)
        return [0, 0]

    assert score(slow, slow, slow, length).rewards.sum().item() == 6 + 3


def test_an_async_function_that_hangs_is_cancelled():
    async def hangs(completions):
        await asyncio.sleep(30)

    async def gives_up(completions):
        raise TimeoutError("the judge is busy")

    with pytest.raises(RewardError, match="'hangs'.*TimeoutError: no answer after 0.05 seconds. Mend it"):
        score(hangs, reward_timeout=0.05)
    with pytest.raises(RewardError, match="'gives_up'.*TimeoutError: the judge is busy"):
        score(gives_up, reward_timeout=30.0)


@pytest.mark.parametrize("timeout", [None, 9.0])
def test_an_async_function_that_exits_has_failed_and_a_plain_one_ends_the_program(timeout):
    def exits(completions):
        sys.exit(3)

    async def exits_later(completions):
        sys.exit(3)

    with pytest.raises(RewardError, match=r"RuntimeError: it called sys.exit\(3\)"):
        score(exits_later, reward_timeout=timeout)
    with pytest.raises(SystemExit):  # which may be that of a handler of signals
        score(exits, reward_timeout=timeout, reward_on_error="mask")


def test_what_holds_the_event_loop_is_named_with_its_place(monkeypatch):
    told, has_begun, is_told = [], threading.Event(), threading.Event()

    async def holds():
        has_begun.set()
        is_told.wait(60)  # which awaits nothing

    def warn(text, seconds, place):
        told.append(text % (seconds, place))
        is_told.set()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    monkeypatch.setattr(background.logger, "warning", warn)
    background.name_holder(loop, thread)
    assert not told
    monkeypatch.setattr(background, "SLOW", 0.05)
    asyncio.run_coroutine_threadsafe(holds(), loop)
    has_begun.wait()
    background.name_holder(loop, thread)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
    assert "not awaited anything for 0.05 seconds" in told[0] and "is_told.wait(60)" in told[0]


def test_functions_can_run_in_threads():
    together = []

    def slow(completions):
        together.append(None)
        for _ in range(400):
            if len(together) == 2:
                return [1, 1]
            time.sleep(0.01)
        return [0, 0]

    assert score(slow, slow, reward_concurrency=2).rewards.tolist() == [[1, 1], [1, 1]]


def test_functions_log_metrics_and_columns_of_their_own():
    def judge(completions, log_metric, log_extra):
        log_metric("length", 1.5)
        log_extra("answer", ["p", "q"])
        return [0, 1]

    scores = score(judge)
    assert scores.metrics == {"length": [1.5]} and scores.columns == {"answer": ["p", "q"]}


def test_weights_must_fit_the_functions():
    with pytest.raises(ValueError, match=r"3 numbers and there are 1 reward functions \(length\)"):
        Rewards([length], options(reward_weights=[1.0, 2.0, 3.0]))


def test_functions_are_named_by_their_module_also_in_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "own_scores_of_this_test.py").write_text(
        "def three(completions):\n    return [3.0] * len(completions)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path not in ("", str(tmp_path))])
    for name in ("own_scores_of_this_test:three", "own_scores_of_this_test.three"):
        (function,) = scorers.reward_functions([name], None, False)
        assert function(["a", "b"]) == [3.0, 3.0]
    assert [str(error) for error in scorers.reward_problems(["own_scores_of_this_test.four"], None)] == [
        "reward_funcs: 'own_scores_of_this_test.four' cannot be imported: module 'own_scores_of_this_test' has no "
        "attribute 'four'. Give module:function, of a module in this folder or one that is installed."
    ]
    (tmp_path / "model-1.5").mkdir()
    names = ["org/model-1.5", "model-1.5", "./model", "model", "math.sqrt", "a:b", "accuracy_reward"]
    assert [scorers.is_function_name(name) for name in names] == [False] * 4 + [True] * 3
    with pytest.raises(MissingModelError, match="no built-in function, did you mean 'accuracy_reward'?"):
        scorers.reward_functions(["accuracy"], None, False)
    (punishment,) = scorers.reward_functions(["get_soft_overlong_punishment"], None, False)
    assert punishment([[0] * 1024, [0] * 1152, [0] * 1280, [0] * 1281]) == [0.0, -0.5, -1.0, -1.0]


def test_functions_of_one_name_have_metrics_of_their_own():
    by_length = lambda completions, **_: [float(len(text)) for text in completions]  # noqa: E731
    assert Rewards([by_length, rewards.accuracy_reward, by_length]).names == [
        "<lambda>_0",
        "accuracy_reward",
        "<lambda>_2",
    ]


def test_a_reward_model_scores_each_text_by_itself():
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    torch.manual_seed(0)
    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4)
    model = Qwen3ForSequenceClassification(
        Qwen3Config(**size, num_key_value_heads=2, head_dim=8, num_labels=1, pad_token_id=0)
    )
    judge, tokenizer = RewardModel(model, tiny.tokenizer(), batch_size=2), tiny.tokenizer()
    prompts, completions = ["Natalia sold", "Weng", "Betty is"], [" clips", " earns $12 an hour", " saving"]
    expected = [
        model(torch.tensor([tokenizer(p + c)["input_ids"]])).logits.item()
        for p, c in zip(prompts, completions, strict=True)
    ]
    assert judge(prompts, completions) == pytest.approx(expected, abs=1e-5)
    chats = (
        [[{"role": "user", "content": p}] for p in prompts],
        [[{"role": "assistant", "content": c}] for c in completions],
    )
    assert len(set(judge(*chats))) == 3
    for pad, number in (("<extra>", 384), ("<unknown>", None), (None, None)):
        other = tiny.tokenizer()
        if number is not None:
            other.add_tokens([pad])
        other.pad_token, other.eos_token = pad, None
        with pytest.raises(
            ValueError, match=f"ids below 384, and its tokenizer pads with {pad!r}, whose id is {number}"
        ):
            RewardModel(model, other)
    model.config.num_labels = 2
    with pytest.raises(ValueError, match="num_labels=1"):
        RewardModel(model, tokenizer)


@pytest.mark.parametrize(("completion", "solution", "reward"), [
    ("so it is 72.", "Half is 24.\n#### 72", 1), ("it is 1,000", "#### 1000", 1), ("#### 3\nor 4", "3", 1),
    ("5", "#### 6", 0), (r"\boxed{\frac{1}{2}}", "0.5", 1), (r"\boxed{x+1}", r"\boxed{ x + 1 }", 1),
    ("none", "#### 6", 0), (r"\boxed{\frac{\sqrt{2}}{2}}", r"$\boxed{\frac{\sqrt{2}}{2}}$", 1), ("-4", "4", 0),
    ("4", "", None), ("none", None, None), ("$12.50", "12.5", 1),
    # A solution that is a formula, of which the last number is no answer.
    (r"\boxed{\frac{1}{3}}", r"\frac{1}{3}", 1), (r"\boxed{3}", r"\frac{1}{3}", 0), ("0.5", r"$\frac12$", 1),
    ("2", r"$\frac{1}{2}$", 0), (r"it is $-\frac{3}{4}$.", r"\(-0.75\)", 1), (r"\boxed{\sqrt{2}}", r"\sqrt{2}", 1),
    ("2", r"\sqrt{2}", 0), (r"\boxed{(2, 3)}", "(2,3)", 1), ("23", "(2,3)", 0), ("1", "$x+1$", 0),
    (r"\boxed{x=4}", "$4$", 1), ("4", "x = 4", 1), (r"\boxed{5.5}", r"1\frac{1}{2}", 0),
    (r"\boxed{\text{Bob}}", r"\text{Eve}", 0), (r"\boxed{\text{(B)}}", "(B)", 1), (r"5\text{ cm}", "5", 1),
    ("it costs $5", "5", 1), ("from 3$ to 5$", "5", 1), ("$5 and 2\nis 7$", "7", 1), ("so\n$$\n\\pi\n$$", "\\pi", 1),
    ("2", "x=1, x=2", 0), ("18km", "18", 1), ("so 2 + 3 = 5 clips", "5", 1),
])  # fmt: skip
def test_accuracy(completion, solution, reward):
    assert rewards.accuracy_reward([completion], [solution]) == [reward]
    assert rewards.accuracy_reward([[{"role": "assistant", "content": completion}]], [solution]) == [reward]


def test_an_answer_inside_the_thoughts_does_not_count():
    solution = ["7", "7", "7"]
    assert rewards.reasoning_accuracy_reward(["<think>7</think> 8", "<think>8</think> 7", "<think> 7"], solution) == [
        0,
        1,
        0,
    ]


@pytest.mark.parametrize(("text", "reward"), [
    ("<think>a\nb</think>c", 1), ("<think>a</think>", 1), ("x<think>a</think>", 0), ("<think>a", 0),
    ("<think><think>a</think>", 0),
])  # fmt: skip
def test_think_format(text, reward):
    assert rewards.think_format_reward([text]) == [reward]


def test_repetition_length_and_cosine():
    assert rewards.get_repetition_penalty_reward(2)([[1, 2, 3, 4], [5] * 5, [1]]) == [0, -0.75, 0]
    overlong = rewards.get_soft_overlong_punishment(100, 20)
    assert overlong([[1] * 80, [1] * 90, [1] * 100, [1] * 101]) == [0, -0.5, -1, -1]
    cosine = rewards.get_cosine_scaled_reward(max_len=10)
    found = cosine(["7", "7", "8", "8"], ["7"] * 4, [[1] * 0, [1] * 10, [1] * 0, [1] * 10])
    assert found == pytest.approx([1.0, 0.5, -1.0, -0.5])


def test_the_own_functions_can_be_pickled_and_ignore_what_they_do_not_read():
    given = {
        "prompts": PROMPTS,
        "completions": ["3", "4"],
        "solution": ["3", "3"],
        "completion_ids": IDS,
        "level": [1, 2],
    }
    made = [rewards.get_cosine_scaled_reward(9), rewards.get_repetition_penalty_reward(1)]
    made += [rewards.get_soft_overlong_punishment(2, 1), rewards.accuracy_reward, rewards.reasoning_accuracy_reward]
    for function in (*made, rewards.think_format_reward):
        copy = pickle.loads(pickle.dumps(function))
        assert copy.__name__ == function.__name__ and copy(**given) == function(**given)
    assert [one.__name__ for one in made[:2]] == ["cosine_scaled_reward", "repetition_penalty_reward"]
    assert [background.name_of(one) for one in made[:2]] == [one.__name__ for one in made[:2]]  # as it is logged


def test_a_column_that_is_missing_is_named_for_functions_of_any_columns_too():
    def right(completions, solution, **others):
        raise AssertionError

    with pytest.raises(DataError, match="'solution', which is no column of the dataset.*answer.*rename_columns"):
        score(right, columns={"answer": ["x", "y"]})


def test_a_function_that_changes_its_lists_changes_them_for_nobody():
    def careless(completions, prompts):
        completions.clear()
        prompts[0] = None
        return [1.0, 2.0]

    scores = score(careless, length)
    assert scores.rewards.tolist() == [[1.0, len(COMPLETIONS[0])], [2.0, len(COMPLETIONS[1])]]

    def fails(completions):
        completions.clear()
        return []

    with pytest.raises(RewardError, match="returned 0 rewards for 2 completions"):
        score(fails)
