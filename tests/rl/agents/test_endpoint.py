"""The endpoint: what each API answers, whose key opens what, and what a request may not be."""

import asyncio
import http.client
import itertools
import json
import math
import select
import socket
import time
from collections import Counter
from dataclasses import replace

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from posttrain.rl.agents.agent import Agent  # noqa: E402
from posttrain.rl.agents.endpoint import Endpoint, allow_connections  # noqa: E402
from posttrain.rl.agents.recorder import Recorder, Written  # noqa: E402
from posttrain.rl.generation.protocol import Sampling  # noqa: E402
from posttrain.rl.rewards import background  # noqa: E402
from posttrain.rl.samples.prompts import PromptCodec  # noqa: E402
from posttrain.rl.samples.samples import Sample  # noqa: E402
from tests import tiny  # noqa: E402
from tests.rl.agents.scripted import call  # noqa: E402

TOKENIZER = tiny.tokenizer(chat_template=tiny.CHATML_WITH_TOOLS)
CODEC = PromptCodec(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|im_end|>")
FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {"a": {}, "b": {}}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
ASKED = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 and 3?"}]


class Agents:
    """An endpoint with recorders whose policy writes what `answer` makes of the prompt."""

    def __init__(self, answer, **options):
        self.endpoint, self.answer = Endpoint(**options), answer
        self.recorders = []

    def open(self, **options):
        recorder = Recorder(CODEC, self.generate, Sampling(400), **options)
        self.recorders.append(recorder)
        return self.endpoint.open(recorder.reply)

    async def generate(self, ids, sampling, seed):
        text = self.answer(TOKENIZER.decode(ids))
        text = await text if asyncio.iscoroutine(text) else text
        own = [*TOKENIZER(text, add_special_tokens=False)["input_ids"], END]
        own = own[: sampling.max_new_tokens]
        ended = own[-1] == END
        return Sample({}, "", ids, own, [-1.0] * len(own), finished=ended, versions=[0] * len(own))

    def post(self, access, path, body, key=None, header="authorization"):
        value = key or access.key
        headers = {header: f"Bearer {value}" if header == "authorization" else value}
        return httpx.post(f"{access.url}/v1/{path}", json=body, headers=headers, timeout=20)


@pytest.fixture
def agents():
    made = []

    def make(answer, **options):
        made.append(Agents(answer, **options))
        return made[-1]

    yield make
    for one in made:
        one.endpoint.close()


def sums(prompt):
    return call("add", a=2, b=3) if "<tool_response>" not in prompt else "It is 5."


def data_of(response):
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def goes_on(recorder):
    """One sequence, in which every later turn follows the tokens of the earlier ones."""
    (turns,) = recorder.sequences()
    assert turns == recorder.turns
    return turns


def test_chat_completions_with_tools(agents):
    made = agents(sums)
    access = made.open()
    first = made.post(access, "chat/completions", {"model": "m", "messages": ASKED, "tools": TOOLS}).json()
    (choice,) = first["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
    (asked,) = choice["message"]["tool_calls"]
    assert json.loads(asked["function"]["arguments"]) == {"a": 2, "b": 3}
    said = [*ASKED, choice["message"], {"role": "tool", "tool_call_id": asked["id"], "content": "5"}]
    body = {"model": "m", "messages": said, "tools": TOOLS, "logprobs": True, "stop": "5"}
    second = made.post(access, "chat/completions", body).json()
    (choice,) = second["choices"]
    assert choice["message"]["content"] == "It is " and choice["finish_reason"] == "stop"
    assert {each["logprob"] for each in choice["logprobs"]["content"]} == {-1.0}
    turns = goes_on(made.recorders[0])
    assert second["usage"]["prompt_tokens"] == len(turns[0].tokens) + len(turns[1].asked)
    assert TOKENIZER.decode(turns[1].asked).startswith("\n<|im_start|>user\n<tool_response>\n5\n")


def test_chat_completions_as_a_stream(agents):
    made = agents(sums)
    access = made.open()
    body = {"messages": ASKED, "tools": TOOLS, "stream": True, "stream_options": {"include_usage": True}}
    response = made.post(access, "chat/completions", body)
    assert response.headers["content-type"].startswith("text/event-stream") and response.text.endswith("[DONE]\n\n")
    chunks = data_of(response)
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert deltas[0]["role"] == "assistant" and deltas[1]["tool_calls"][0]["function"]["name"] == "add"
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls" and chunks[-1]["usage"]["completion_tokens"] > 1


def test_completions_of_a_text_go_on_with_their_tokens(agents):
    made = agents(lambda prompt: " more")
    access = made.open()
    first = made.post(access, "completions", {"prompt": "Once", "max_tokens": 9}).json()["choices"][0]["text"]
    assert first == " more"
    made.post(access, "completions", {"prompt": f"Once{first} and", "logprobs": 1})
    made.post(access, "completions", {"prompt": [5, 6, 7]})
    turns = made.recorders[0].turns
    assert turns[1].before is turns[0] and TOKENIZER.decode(turns[1].asked) == " and"
    assert turns[2].before is None and turns[2].asked == [5, 6, 7]


@pytest.mark.parametrize("by_id", [False, True])
def test_responses_with_tools(agents, by_id):
    made = agents(sums)
    access = made.open()
    tools = [{"type": "function", **FUNCTION}]
    body = {"model": "m", "instructions": "Be short.", "input": "2 and 3?", "tools": tools}
    first = made.post(access, "responses", body).json()
    (asked,) = first["output"]
    assert asked["type"] == "function_call" and json.loads(asked["arguments"]) == {"a": 2, "b": 3}
    answer = {"type": "function_call_output", "call_id": asked["call_id"], "output": "5"}
    if by_id:
        body = {"input": [answer], "previous_response_id": first["id"], "tools": tools, "stream": True}
    else:
        body |= {"input": [{"role": "user", "content": "2 and 3?"}, asked, answer], "stream": True}
    events = data_of(made.post(access, "responses", body))
    assert [event["sequence_number"] for event in events] == [*range(len(events))]
    assert [e["delta"] for e in events if e["type"] == "response.output_text.delta"] == ["It is 5."]
    assert events[-1]["type"] == "response.completed" and events[-1]["response"]["status"] == "completed"
    assert len(goes_on(made.recorders[0])) == 2


@pytest.mark.parametrize("stream", [False, True])
def test_anthropics_messages_with_tools(agents, stream):
    made = agents(sums)
    access = made.open()
    tool = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
    body = {"model": "m", "max_tokens": 300, "system": "Be short.", "tools": [tool]}
    body["messages"] = [{"role": "user", "content": "2 and 3?"}]
    first = made.post(access, "messages", body, header="x-api-key").json()
    (asked,) = first["content"]
    assert first["stop_reason"] == "tool_use" and asked["input"] == {"a": 2, "b": 3}
    result = {"type": "tool_result", "tool_use_id": asked["id"], "content": [{"type": "text", "text": "5"}]}
    body["messages"] += [{"role": "assistant", "content": [asked]}, {"role": "user", "content": [result]}]
    second = made.post(access, "messages", body | {"stream": stream}, header="x-api-key")
    if stream:
        texts = [e["delta"]["text"] for e in data_of(second) if e["type"] == "content_block_delta"]
        assert texts == ["It is 5."] and second.text.rstrip().endswith('"message_stop"}')
    else:
        assert second.json()["content"] == [{"type": "text", "text": "It is 5."}]
    assert len(goes_on(made.recorders[0])) == 2


@pytest.mark.parametrize("path", ["responses", "messages"])
@pytest.mark.parametrize(("told", "follows"), [("Be short.", 0), ("Be long.", None)])
def test_instructions_stand_once_before_a_conversation_that_is_named_by_its_last_answer(agents, path, told, follows):
    """Clients send them with each request: openai-agents, and the tool runner of Anthropic's SDK with its threads."""
    made = agents(lambda prompt: "Yes")
    access = made.open()
    message = [{"role": "user", "content": "more"}]

    def body(instructions, before):
        if path == "responses":
            return {"instructions": instructions, "input": message, "previous_response_id": before}
        thread = {"type": "continue", "previous_message_id": before} if before else {"type": "create"}
        return {"system": instructions, "messages": message, "max_tokens": 9, "thread": thread}

    first = made.post(access, path, body("Be short.", None)).json()
    assert made.post(access, path, body(told, first["id"])).status_code == 200
    one, other = made.recorders[0].turns
    assert other.before is (one if follows == 0 else None)
    read = TOKENIZER.decode(other.tokens)
    assert read.count("<|im_start|>system") == 1 and told in read and read.count("more") == 2
    assert made.post(access, path, body(told, "msg_0")).status_code == 404


def test_a_thread_of_anthropics_keeps_what_is_not_sent_again(agents):
    made = agents(sums)
    access = made.open()
    body = {"max_tokens": 300, "system": "Be short.", "messages": ASKED[1:], "thread": {"type": "create"}}
    tool = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
    first = made.post(access, "messages", body | {"tools": [tool]}).json()
    result = {"type": "tool_result", "tool_use_id": first["content"][0]["id"], "content": "5"}
    thread = {"type": "continue", "previous_message_id": first["id"]}
    more = {"max_tokens": 300, "messages": [{"role": "user", "content": [result]}], "thread": thread}
    assert made.post(access, "messages", more).json()["content"][0]["text"] == "It is 5."
    assert len(goes_on(made.recorders[0])) == 2


def test_the_tokens_of_a_conversation_are_counted_before_it_is_sent(agents):
    """Claude Code asks so, to know when to shorten its context. It is no turn."""
    made = agents(sums)
    access = made.open(max_turns=2)
    tool = {"name": "add", "description": "Add.", "input_schema": FUNCTION["parameters"]}
    body = {"model": "m", "system": "Be short.", "tools": [tool], "messages": ASKED[1:]}
    for number in range(2):
        counted = made.post(access, "messages/count_tokens", body).json()
        sent = made.post(access, "messages", body | {"max_tokens": 90}).json()
        assert counted == {"input_tokens": sent["usage"]["input_tokens"]}
        assert len(made.recorders[0].turns) == number + 1
        body["messages"] = [*body["messages"], {"role": "assistant", "content": sent["content"]}, *ASKED[1:]]
    assert made.post(access, "messages/count_tokens", body).json()["input_tokens"] > counted["input_tokens"]
    assert made.recorders[0].cut is None
    assert (
        made.post(access, "messages/count_tokens", {"messages": []}).json()["error"]["type"] == "invalid_request_error"
    )


@pytest.mark.parametrize(
    "text", ['<tool_call>\n{"name": "add", "arguments": {"a": 2,\n</tool_call>', "<tool_call>\nadd 2"]
)
def test_a_call_that_cannot_be_read_reaches_the_agent_as_it_was_written(agents, text):
    """As vLLM answers. Other calls of the same turn are made."""
    made = agents(lambda prompt: text if "again" in prompt else f"Hm. {text} {call('add', a=2, b=3)}")
    access = made.open()
    body = {"messages": ASKED, "tools": TOOLS}
    (choice,) = made.post(access, "chat/completions", body).json()["choices"]
    if text.endswith(">"):
        assert choice["message"]["content"] == f"Hm. {text}" and choice["finish_reason"] == "tool_calls"
    said = [*ASKED, choice["message"], {"role": "user", "content": "again"}]
    (choice,) = made.post(access, "chat/completions", {"messages": said, "tools": TOOLS}).json()["choices"]
    assert choice["message"] == {"role": "assistant", "content": text, "refusal": None}
    assert choice["finish_reason"] == "stop"
    said += [choice["message"], {"role": "user", "content": "again"}]
    made.post(access, "chat/completions", {"messages": said, "tools": TOOLS})
    assert len(goes_on(made.recorders[0])) == 3


def test_anthropics_answer_names_the_text_that_ended_it(agents):
    made = agents(lambda prompt: "<a>1</a> and more")
    body = {"max_tokens": 90, "messages": ASKED[1:], "stop_sequences": ["more", "</a>"]}
    found = made.post(made.open(), "messages", body).json()
    assert found["content"][0]["text"] == "<a>1"
    assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", "</a>")


def test_a_changed_history_begins_a_branch(agents):
    made = agents(lambda prompt: f"answer {len(prompt)}")
    access = made.open()
    said = [{"role": "user", "content": "one"}]
    for word in ("two", "three"):
        answer = made.post(access, "chat/completions", {"messages": said}).json()["choices"][0]["message"]
        said += [answer, {"role": "user", "content": word}]
    last = made.post(access, "chat/completions", {"messages": said}).json()
    changed = [*said[:-1], {"role": "user", "content": "other"}]
    made.post(access, "chat/completions", {"messages": changed})
    made.post(access, "chat/completions", {"messages": [{"role": "user", "content": "summary"}]})
    rewritten = [said[0], {"role": "assistant", "content": "shorter"}, *said[2:]]
    made.post(access, "chat/completions", {"messages": rewritten})
    assert last["choices"][0]["message"]["content"].startswith("answer")
    one, two, three, branch, alone, other = made.recorders[0].turns
    assert (two.before, three.before, branch.before, alone.before, other.before) == (one, two, two, None, None)
    assert made.recorders[0].sequences() == [[other], [one, two, three], [one, two, branch], [alone]]
    assert "shorter" in TOKENIZER.decode(other.asked)


def test_other_tools_begin_a_sequence(agents):
    """They are described before the conversation, whose tokens would be others."""
    made = agents(lambda prompt: "Yes.")
    access, said = made.open(), list(ASKED)
    for tools in (TOOLS, TOOLS, []):
        answer = made.post(access, "chat/completions", {"messages": said, "tools": tools}).json()
        said += [answer["choices"][0]["message"], {"role": "user", "content": "Sure?"}]
    first, second, third = made.recorders[0].turns
    assert second.before is first and third.before is None
    assert third.asked == CODEC.encode(said[:-2]) and "add" not in TOKENIZER.decode(third.asked)


def test_no_two_calls_of_a_trajectory_have_one_id(agents):
    """Also where the agent keeps the end of its history alone, and where it asks twice beside each other."""
    made = agents(lambda prompt: call("add", a=2, b=3) + call("add", a=4, b=5))
    access, said, ids = made.open(), [*ASKED], []
    for _ in range(4):
        for _ in range(2):
            answer = made.post(access, "chat/completions", {"messages": said, "tools": TOOLS}).json()
            message = answer["choices"][0]["message"]
            ids += [one["id"] for one in message["tool_calls"]]
        answers = [{"role": "tool", "tool_call_id": one["id"], "content": "5"} for one in message["tool_calls"]]
        said = [*ASKED, message, *answers]
    assert len(ids) == len({*ids}) == 16


def test_a_trajectory_may_have_any_number_of_turns():
    turn = None
    for _ in range(3000):
        turn = Written(turn, [5], [6], [-1.0], None, True, True, [], 0, (), ())
    assert len(turn.path) == 3000 and turn.tokens == [5, 6] * 3000


def test_whose_key_opens_what(agents):
    made = agents(sums)
    one, other = made.open(), made.open()
    body = {"messages": ASKED}
    assert made.post(one, "chat/completions", body, key="sk-none").status_code == 401
    refused = made.post(one, "chat/completions", body, key=other.key)
    assert refused.status_code == 403 and "another trajectory" in refused.json()["error"]["message"]
    assert made.post(one, "messages", body, key="no").json()["error"]["type"] == "authentication_error"
    models = httpx.get(f"{one.url}/v1/models", headers={"authorization": f"Bearer {one.key}"}).json()
    assert models["data"][0]["id"] == "policy"
    root = one.url.partition("/t/")[0]  # of clients that take host and port alone
    assert httpx.get(f"{root}/v1/models", headers={"x-api-key": one.key}).json() == models
    assert httpx.get(f"{root}/v1/models", headers={"x-api-key": "sk-none"}).status_code == 401
    asked = httpx.get(f"{one.url}/v1/models/openai/any", headers={"authorization": f"bearer {one.key}"}).json()
    assert asked["id"] == "openai/any" and asked["object"] == "model"
    made.endpoint.shut(one)
    assert made.post(one, "chat/completions", body).status_code == 401
    assert not any(recorder.turns for recorder in made.recorders)


@pytest.mark.parametrize("options", [{}, {"host": Agent(sums).host}], ids=["endpoint", "agent"])
def test_programs_of_this_machine_alone_are_answered_unless_asked_otherwise(agents, options):
    made = agents(sums, **options)
    url = httpx.URL(made.open().url)
    assert url.host == "127.0.0.1"
    socket.create_connection((url.host, url.port), timeout=5).close()
    with pytest.raises((ConnectionRefusedError, TimeoutError)):  # another address of this machine
        socket.create_connection(("127.0.0.2", url.port), timeout=5)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "::1"])
def test_agents_are_given_an_address_that_they_can_call_at(agents, host):
    made = agents(sums, host=host)
    try:
        access = made.open()
    except OSError:
        pytest.skip(f"nothing can listen at {host} here")
    assert httpx.URL(access.url).host not in ("0.0.0.0", "::")
    assert made.post(access, "messages", {"max_tokens": 9, "messages": ASKED}).status_code == 200


def test_what_a_request_may_not_be(agents):
    made = agents(sums, max_bytes=2000)
    access = made.open(max_turns=1)

    def refused(body, path="chat/completions"):
        response = made.post(access, path, body)
        return response.status_code, response.json()["error"]["message"]

    assert refused({"messages": []}) == (400, "messages is missing or empty: send the conversation.")
    assert refused({"messages": [{"role": "user", "content": "x" * 3000}]})[0] == 413
    assert "n=2" in refused({"messages": ASKED, "n": 2})[1]
    assert refused({}, "embeddings")[0] == 404
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]
    assert "text alone" in refused({"messages": image})[1]
    assert "at most 0 tokens" in refused({"messages": ASKED, "max_completion_tokens": 0})[1]
    assert refused({"input": [], "previous_response_id": "resp_7"}, "responses")[0] == 400
    assert refused({"input": "2 and 3?", "previous_response_id": "resp_7"}, "responses")[0] == 404
    assert "previous_response_id" in refused({"input": "2 and 3?", "conversation": "conv_1"}, "responses")[1]
    assert made.post(access, "chat/completions", {"messages": ASKED}).status_code == 200
    assert refused({"messages": ASKED}) == (400, "This trajectory has had its 1 turns.")
    assert made.recorders[0].cut == "turns"


def test_a_body_that_is_nested_too_deeply_is_the_agents_mistake(agents):
    access = agents(sums).open()
    body = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    response = httpx.post(
        f"{access.url}/v1/chat/completions", content=body, headers={"x-api-key": access.key}, timeout=20
    )
    assert response.status_code == 400 and "RecursionError" in response.json()["error"]["message"]


def test_log_probabilities_are_numbers_that_json_has(agents):
    class Unknown(Agents):
        async def generate(self, *asked):
            done = await super().generate(*asked)
            return replace(done, logps=[-math.inf, math.nan, *done.logps[2:]])

    made = Unknown(sums)
    access = made.open()
    chat = made.post(access, "chat/completions", {"messages": ASKED, "logprobs": True}).json()["choices"][0]
    told = made.post(access, "completions", {"prompt": "2 and 3?", "logprobs": 0}).json()["choices"][0]
    assert [one["logprob"] for one in chat["logprobs"]["content"][:3]] == [-9999, -9999, -1]
    assert told["logprobs"]["token_logprobs"][:3] == [-9999, -9999, -1]
    assert made.recorders[0].turns[0].logps[0] == -math.inf
    made.endpoint.close()


BODIES = {
    "chat/completions": {
        "model": "policy", "messages": [
            {"role": "user", "content": "2 and 3?"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": {
                "name": "add", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "1", "content": "5"},
        ], "tools": TOOLS, "max_tokens": 3, "stop": ["q"], "stream_options": {"include_usage": True}, "n": 1,
    },
    "completions": {"model": "policy", "prompt": [5, 6, 7], "max_tokens": 3, "stop": "q"},
    "responses": {
        "model": "policy", "instructions": "Be short.", "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "2 and 3?"}]},
            {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "5"},
        ], "tools": [{"type": "function"} | FUNCTION], "max_output_tokens": 3, "previous_response_id": None,
    },
    "messages": {
        "model": "policy", "system": "Be short.", "max_tokens": 3, "messages": [
            {"role": "user", "content": [{"type": "text", "text": "2 and 3?"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "5"}]},
        ], "tools": [{"name": "add", "input_schema": FUNCTION["parameters"]}], "stop_sequences": ["q"],
    },
}  # fmt: skip
WRONG = (None, True, 0, -1, 1.5, "", [], {}, [1], ["a"], {"a": 1}, [None], [[1]], 10**6, [10**6], [5, True], "\ud800",
         float("inf"))  # fmt: skip


def changed(value, wrong):
    """`value` with one part of it wrong, for each part."""
    yield next(wrong)
    if isinstance(value, dict):
        yield from (value | {name: part} for name in value for part in changed(value[name], wrong))
    elif isinstance(value, list):
        yield from ([*value[:i], part, *value[i + 1 :]] for i in range(len(value)) for part in changed(value[i], wrong))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("first", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, len(WRONG)))])
def test_no_request_reaches_the_engine_that_it_cannot_write(path, first, agents):
    """An error of the engine ends the run; what an agent sends wrongly is the agent's."""
    made = agents(lambda prompt: "Yes")
    access, statuses = made.open(), Counter()
    with httpx.Client(headers={"authorization": f"Bearer {access.key}"}, timeout=20) as client:
        for body in changed(BODIES[path], itertools.cycle([*WRONG[first:], *WRONG[:first]])):
            answer = client.post(f"{access.url}/v1/{path}", content=json.dumps(body))
            statuses[answer.status_code] += 1
            assert answer.status_code < 500, (body, answer.text)
    assert statuses[400]
    assert made.recorders[0].error is None and len(made.recorders[0].turns) == statuses[200]
    for turn in made.recorders[0].turns:
        assert turn.ids and all(type(token) is int and 0 <= token < len(TOKENIZER) for token in turn.asked)


def test_a_conversation_that_has_no_room_left_is_refused_with_the_code_of_length(agents):
    made = agents(lambda prompt: "x" * 500)
    access = made.open(context=120)
    whole = made.post(access, "chat/completions", {"messages": ASKED}).json()
    assert whole["choices"][0]["finish_reason"] == "length" and whole["usage"]["total_tokens"] == 120
    said = [*ASKED, whole["choices"][0]["message"], {"role": "user", "content": "More."}]
    refused = made.post(access, "chat/completions", {"messages": said})
    assert refused.status_code == 400 and refused.json()["error"]["code"] == "context_length_exceeded"
    assert made.recorders[0].cut == "tokens"


def test_more_requests_than_are_taken_may_come_again(agents):
    begun = asyncio.Event()

    async def waits():
        await begun.wait()
        return "late"

    made = agents(lambda prompt: waits(), max_requests=1)
    access, other = made.open(), made.open()
    headers = {"authorization": f"Bearer {access.key}"}

    async def all_three():
        async with httpx.AsyncClient(headers=headers, timeout=20) as client:
            url, body = f"{access.url}/v1/chat/completions", {"messages": ASKED}
            first = asyncio.ensure_future(client.post(url, json=body))
            await asyncio.sleep(0.3)
            second = await client.post(url, json=body)
            head = {"authorization": f"Bearer {other.key}"}
            third = asyncio.ensure_future(client.post(f"{other.url}/v1/chat/completions", json=body, headers=head))
            await asyncio.sleep(0.3)
            begun.set()
            return await first, second, await third

    first, second, third = background.wait_for(all_three())
    assert first.status_code == third.status_code == 200  # the limit is of each trajectory, however many there are
    assert second.status_code == 429 and second.headers["retry-after"] == "1"


def test_who_hangs_up_frees_the_place(agents):
    ended = []

    async def never():
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    made = agents(lambda prompt: never(), max_requests=1)
    access = made.open()
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(
            f"{access.url}/v1/chat/completions",
            json={"messages": ASKED},
            headers={"authorization": f"Bearer {access.key}"},
            timeout=0.5,
        )
    for _ in range(50):
        if ended:
            break
        background.wait_for(asyncio.sleep(0.05))
    assert ended and access.running == 0 and not made.recorders[0].turns


@pytest.mark.long
def test_a_connection_is_kept_while_a_tool_runs(agents):
    """Where it was closed just before the next request came, agents that do not send it again failed."""
    access = agents(sums).open()
    url = httpx.URL(access.url)
    connection = http.client.HTTPConnection(url.host, url.port, timeout=20)
    headers = {"x-api-key": access.key, "content-type": "application/json"}
    for wait in (5.5, 0):
        connection.request("POST", f"{url.path}/v1/chat/completions", json.dumps({"messages": ASKED}), headers)
        assert json.load(connection.getresponse())["choices"] and connection.sock is not None
        time.sleep(wait)
        assert not select.select([connection.sock], [], [], 0)[0]  # it is open


def test_a_request_that_is_sent_again_has_the_answer_that_it_had(agents):
    """SDKs do so where an answer did not reach them; it is sampled and learned from once."""
    made = agents(lambda prompt: "Yes")
    access = made.open()
    url, ids = f"{access.url}/v1/chat/completions", []
    with httpx.Client(headers={"authorization": f"Bearer {access.key}"}, timeout=20) as client:
        for model, before in [
            ("one", 0),
            ("one", 1),
            ("one", 0),
            ("two", 1),
            *((str(i), 0) for i in range(9)),
            ("one", 2),
        ]:
            head = {"x-stainless-retry-count": str(before)}
            ids.append(client.post(url, json={"messages": ASKED, "model": model}, headers=head).json()["id"])
    assert ids[0] == ids[1] != ids[2] and len(set(ids)) == 13 == len(made.recorders[0].turns)
    assert len(access.given) == 8  # and no more are kept


def test_an_error_of_the_engine_is_one_of_the_server(agents):
    def fails(prompt):
        raise ConnectionError("the engine is gone")

    made = agents(fails)
    access = made.open()
    response = made.post(access, "chat/completions", {"messages": ASKED})
    assert response.status_code == 500 and "the engine is gone" in response.json()["error"]["message"]
    assert isinstance(made.recorders[0].error, ConnectionError)


def test_more_episodes_connect_than_files_may_usually_be_open():
    """1,024 is the usual limit of a process, and the connection of an agent in this one takes two."""
    resource = pytest.importorskip("resource")
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard <= 1024:
        pytest.skip("the administrator allows no more")
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        allow_connections()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(hard, 65536)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
