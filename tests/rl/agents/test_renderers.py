"""Turns with tools as Prime Intellect's `renderers` has them, which knows each model by hand: token for token.

It is in the environment of `make test-agents`. Its tokenizers are stand-ins with the marks of the real ones; the chat
templates are those that trl ships.
"""

import copy
import random
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

PACKAGES = [str(path) for path in Path(__file__).parents[3].glob(".venv-agents/lib/python3.*/site-packages")]
with pytest.MonkeyPatch.context() as patch:  # other tests find no packages of the agents
    patch.setattr(sys, "path", [*sys.path, *PACKAGES])
    renderers = pytest.importorskip("renderers", reason="renderers is not installed: run make test-agents")
    from renderers import base, configs

    base._populate_registry()
trl = pytest.importorskip("trl", reason="trl, which has the official templates, is not installed")

from datasets import Dataset  # noqa: E402

from posttrain.core.errors import DataError  # noqa: E402
from posttrain.rl import GRPOConfig, GRPOTrainer  # noqa: E402
from posttrain.rl.samples.prompts import PromptCodec  # noqa: E402
from posttrain.rl.samples.rendered import RenderedPrompts, codec_of  # noqa: E402
from posttrain.rl.tools.protocol import ToolProtocol  # noqa: E402
from tests import tiny  # noqa: E402
from tests.rl.agents.scripted import ScriptedEngine, call  # noqa: E402

pytestmark = pytest.mark.long

TEMPLATES = Path(trl.__file__).parent / "chat_templates"
#: Renderer -> (the template, the token that ends a turn).
MODELS = {
    "qwen3": ("qwen3", "<|im_end|>"),
    "qwen3.5": ("qwen3_5_think", "<|im_end|>"),
    "qwen3.6": ("qwen3_6", "<|im_end|>"),
    "qwen3.8": ("qwen3_8", "<|im_end|>"),
    "glm-4.5": ("glm4moe", "<|observation|>"),
    "gemma4": ("gemma4_v5", "<|tool_response>"),
    "llama-3": ("llama3_1", "<|eot_id|>"),
    "nemotron-3": ("nemotron_3_nano", "<|im_end|>"),
    "nemotron-3-ultra": ("nemotron_3_ultra", "<|im_end|>"),
    "nemotron-3.5": ("nemotron_3_5_lightning", "<|im_end|>"),
}
WORDS = [
    "here",
    'x "y" z',
    "two\nlines",
    "a\\b",
    "é→😀",
    '{"k": 1}',
    "<b>bold</b>",
    "1",
    "true",
    "null",
    "it's",
    "[1, 2]",
]
ASKED = [{"role": "user", "content": "Please look."}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look somewhere.",
            "parameters": {
                "type": "object",
                "properties": {
                    "where": {"type": "string", "description": "A place."},
                    "far": {"type": "integer", "description": "How far."},
                    "tags": {"type": "array", "items": {"type": "string"}, "description": "Which."},
                    "more": {"type": "object", "description": "More."},
                    "rate": {"type": "number", "description": "How fast."},
                },
                "required": ["where"],
            },
        },
    }
]


def pair(name):
    """(a tokenizer, the renderer `name` of it): with each token that the two ask for."""
    template, end = MODELS[name]
    source = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    tokenizer = copy.deepcopy(tiny.tokenizer(chat_template=source))
    tokenizer.bos_token = "<s>"
    tokenizer.add_tokens(re.findall(r"</?(?:think|tool_\w+|arg_\w+)>", source))
    tokenizer.add_tokens(sorted({end, *re.findall(r"<\|[\w\"]+\|?>|<\w+\|>", source)}), special_tokens=True)
    tokenizer.eos_token = end
    config = next(
        found for found in map(vars(configs).get, configs.__dict__)
        if isinstance(found, type) and "name" in getattr(found, "model_fields", ())
        and found.model_fields["name"].default == name
    )  # fmt: skip
    while True:
        try:
            return tokenizer, renderers.create_renderer(tokenizer, config())
        except Exception as error:  # it names the token that it lacks
            tokenizer.add_tokens([re.search(r"[Tt]oken '([^']+)'", str(error))[1]], special_tokens=True)


def drawn(seed, several):
    """A turn of the assistant with one call or two, of random arguments."""
    rng = random.Random(seed)

    def call(number):
        given = {
            "where": rng.choice(WORDS), "far": rng.randint(-3, 99), "tags": rng.sample(WORDS, 2),
            "more": {"a": rng.choice([1, True, None, 'x "y"', [1, {"b": 2}]])}, "rate": rng.choice([0.5, 1.0, 2]),
        }  # fmt: skip
        given = {key: value for key, value in given.items() if key == "where" or rng.random() < 0.5}
        return {"id": f"call{number:05}", "type": "function", "function": {"name": "look", "arguments": given}}

    calls = [call(number) for number in range(rng.choice([1, 2]) if several else 1)]
    thoughts = {"reasoning_content": rng.choice(["hm", "I think\nso.", 'call {"name": "look"}?'])}
    return {"role": "assistant", "content": rng.choice(["", "I will look.", "a < b"]), "tool_calls": calls} | thoughts


def written(rendered, prompt, renderer):
    """What the policy writes of a rendered conversation, up to the token that ends its turn."""
    ids, stops = rendered[len(prompt) :], renderer.get_stop_token_ids()
    ends = [place for place, token in enumerate(ids) if token in stops]
    return ids[: ends[-1] + 1] if ends else ids


@pytest.mark.parametrize("name", MODELS)
def test_calls_are_read_and_answered_alike(name):
    tokenizer, renderer = pair(name)
    protocol = ToolProtocol(tokenizer, None, TOOLS)
    prompt = list(renderer.render_ids(ASKED, tools=TOOLS, add_generation_prompt=True))
    compared = 0
    for seed in range(40):
        turn = drawn(seed, several=name != "llama-3")
        rendered = list(renderer.render_ids([*ASKED, turn], tools=TOOLS))
        if rendered[: len(prompt)] != prompt:
            continue  # its template renders a past turn without the thoughts that the prompt begins
        ids = written(rendered, prompt, renderer)
        theirs, ours = renderer.parse_response(ids, tools=TOOLS, prompt_ids=prompt), protocol.read(ids, TOOLS, prompt)
        given = [call["function"]["arguments"] for call in turn["tool_calls"]]
        assert [call.arguments for call in ours.calls] == given
        if all(call.status == "ok" for call in theirs.tool_calls):  # it refuses True and None, which templates write
            assert [call.arguments for call in theirs.tool_calls] == given
        assert ours.message["content"] == (theirs.content or "").strip()
        assert ours.message.get("reasoning_content") == ((theirs.reasoning_content or "").strip() or None)
        if ids[-1] not in renderer.get_stop_token_ids():
            ids.append(tokenizer.eos_token_id)
        answers = [
            {"role": "tool", "name": "look", "tool_call_id": call["id"], "content": random.Random(seed).choice(WORDS)}
            for call in turn["tool_calls"]
        ]
        following = renderer.bridge_to_next_turn(prompt, ids, answers, tools=TOOLS)
        bridged = list(getattr(following, "token_ids", following))
        assert protocol.answer_ids(ids, answers, TOOLS) == bridged[len(prompt) + len(ids) :]
        compared += 1
    assert compared >= 10


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5", "llama-3", "nemotron-3"])
def test_a_renderer_of_a_run_writes_and_reads_what_the_chat_template_does(name):
    tokenizer, renderer = pair(name)
    template, rendered = PromptCodec(tokenizer), RenderedPrompts(tokenizer, name)
    prompt = rendered.encode(ASKED, TOOLS)
    assert prompt == list(renderer.render_ids(ASKED, tools=TOOLS, add_generation_prompt=True))
    turn = drawn(3, several=False)
    ids = written(list(renderer.render_ids([*ASKED, turn], tools=TOOLS)), prompt, renderer)
    (message,), (expected,) = rendered.decode(ASKED, ids, prompt, TOOLS), template.decode(ASKED, ids, prompt, TOOLS)
    calls = [[one["function"] for one in said["tool_calls"]] for said in (message, expected, turn)]
    assert calls[0] == calls[1] == calls[2] and message["content"].strip() == expected["content"]
    asked = rendered.protocol(TOOLS)
    assert asked.describes and ids[-1] in asked.end_ids
    answers = [
        {"role": "tool", "name": "look", "tool_call_id": call["id"], "content": "1"} for call in turn["tool_calls"]
    ]
    assert rendered.next_ids(ids, answers, TOOLS) == template.next_ids(ids, answers, TOOLS)
    broken = rendered.protocol(TOOLS).read(tokenizer('<tool_call>\n{"name": "look",\n</tool_call>')["input_ids"], TOOLS)
    assert name != "qwen3" or [call.arguments for call in broken.calls] == [None]
    assert rendered.encode("A text.") == template.encode("A text.")
    assert rendered.decode("A text.", ids) == template.decode("A text.", ids)
    begun = [*ASKED, {"role": "assistant", "content": "It is"}]  # a turn that the policy goes on with
    assert rendered.encode(begun) == template.encode(begun) != template.encode(ASKED)


def test_a_renderer_that_shows_no_tools_does_not_describe_them():
    tokenizer, _ = pair("qwen3")
    tokenizer.chat_template = tiny.CHATML
    for name, describes in (("default", False), ("qwen3", True)):
        assert RenderedPrompts(tokenizer, name).protocol(TOOLS).describes == describes


def test_what_is_no_object_is_no_arguments_of_a_call():
    tokenizer, _ = pair("qwen3")
    protocol = RenderedPrompts(tokenizer, "qwen3").protocol(TOOLS)
    calls = ['{"name": "look", "arguments": [1]}', '{"name": "look", "arguments": {"where": "here"}}']
    text = "<think>\nhm\n</think>\n\nSo. " + "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in calls)
    turn = protocol.read(tokenizer(text)["input_ids"], TOOLS)
    assert [(one.name, one.arguments) for one in turn.calls] == [("look", None), ("look", {"where": "here"})]
    assert [one["function"]["arguments"] for one in turn.message["tool_calls"]] == [{"where": "here"}]
    assert (turn.message["content"], turn.message["reasoning_content"]) == ("So.", "hm")
    plain = protocol.read(tokenizer("It is.")["input_ids"], TOOLS)
    assert plain.message == {"role": "assistant", "content": "It is."} and plain.calls == ()


def test_a_renderer_gets_the_arguments_of_the_chat_template_and_the_models_limit():
    tokenizer, _ = pair("qwen3")
    off, on = {"enable_thinking": False}, {"enable_thinking": True}
    expected = [PromptCodec(tokenizer, kwargs).encode(ASKED) for kwargs in (off, on)]
    assert expected[0] != expected[1]
    config = SimpleNamespace(renderer="qwen3", chat_template_kwargs=off)
    for given, ids in ((None, expected[0]), (on, expected[1])):  # those of a processor of images come before
        codec = codec_of(tokenizer, config, given, limit=len(tokenizer))
        assert codec.encode(ASKED) == ids and isinstance(codec, RenderedPrompts)
    with pytest.raises(DataError, match="input_ids"):
        codec_of(tokenizer, config, None, limit=max(expected[0])).encode(ASKED)


def test_a_run_with_a_renderer_trains_on_what_it_sampled(tmp_path):
    tokenizer, _ = pair("qwen3")
    model = tiny.causal_lm("qwen3", vocab_size=len(tokenizer))

    def look(where: str):
        """Look somewhere.

        Args:
            where: A place.
        """
        return where.upper()

    def learned(folder, **arguments):
        engine = ScriptedEngine(tokenizer, lambda prompt: "It is." if "HERE" in prompt else call("look", where="here"))
        config = GRPOConfig(
            str(tmp_path / folder), max_steps=1, num_generations=2, per_device_train_batch_size=2, report_to="none",
            max_completion_length=200, use_cpu=True, **arguments,
        )  # fmt: skip
        trainer = GRPOTrainer(
            copy.deepcopy(model), lambda completions, **_: [float(len(c)) for c in completions], config,
            Dataset.from_list([{"prompt": ASKED}] * 2), processing_class=tokenizer, tools=[look], generator=engine,
        )  # fmt: skip
        trainer.train()
        assert not trainer.old_logps.recomputes
        return engine.written

    assert learned("renderer", renderer="qwen3") == learned("template")


@pytest.mark.parametrize(("name", "why"), [("auto", "has none for the model"), ("qwen9", "No renderer config")])
def test_a_renderer_that_there_is_not_is_named(name, why):
    with pytest.raises(ValueError, match=f"renderer='{name}' cannot be used: .*{why}"):
        RenderedPrompts(pair("qwen3")[0], name)


def test_where_a_renderer_would_write_a_conversation_again_the_chat_template_goes_on():
    tokenizer, _ = pair("qwen3")
    template, rendered = PromptCodec(tokenizer), RenderedPrompts(tokenizer, "default")
    answers = [{"role": "tool", "name": "look", "tool_call_id": "call00000", "content": "1"}]
    written_ids = tokenizer(call("look", where="here"))["input_ids"] + [tokenizer.eos_token_id]
    for messages in (answers, ASKED, [*answers, *ASKED]):
        assert rendered.next_ids(written_ids, messages, TOOLS) == template.next_ids(written_ids, messages, TOOLS)
    assert rendered.protocol(TOOLS) is rendered.protocol(TOOLS)  # read once, not at each turn
