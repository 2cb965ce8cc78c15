"""With the same words of the policy, a tool loop shows it the same tokens, and learns from the same, as that of trl."""

import copy
import os
import re
from pathlib import Path

import pytest

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
trl = pytest.importorskip("trl")

from datasets import Dataset  # noqa: E402

import posttrain.rl  # noqa: E402
from posttrain.rl.generation import Completions  # noqa: E402
from tests import tiny  # noqa: E402

FOLDER = Path(trl.__file__).parent / "chat_templates"
XML = (
    "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n<parameter=b>\n{}\n</parameter>\n</function>\n"
    "</tool_call>"
)
JSON = '<tool_call>\n{{"name": "add", "arguments": {{"a": 2, "b": {}}}}}\n</tool_call>'
#: Template -> (a call, the token that ends a turn). That of GLM is left out: trl repeats the policy's <|observation|>.
POLICIES = {
    "qwen2_5": (JSON, "<|im_end|>"),
    "qwen3_instruct_2507": (JSON, "<|im_end|>"),
    "qwen3": (JSON, "<|im_end|>"),
    "qwen3_5_nothink": (XML, "<|im_end|>"),
    "llama3_1": ('{{"name": "add", "parameters": {{"a": 2, "b": {}}}}}', "<|eot_id|>"),
    "gptoss": (' to=functions.add<|channel|>commentary json<|message|>{{"a": 2, "b": {}}}', "<|call|>"),
    "gemma4": ("<|tool_call>call:add{{a:2,b:{}}}<tool_call|>", "<|tool_response>"),
}


def add(a: int, b: int):
    """Add two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


def tokenizer(name):
    source = (FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
    tok = copy.deepcopy(tiny.tokenizer(chat_template=source))
    tok.bos_token = "<s>"
    tok.add_special_tokens({"additional_special_tokens": sorted(set(re.findall(r"<\|[\w\"]+\|?>|<\w+\|>", source)))})
    tok.eos_token = {"gptoss": "<|return|>", "gemma4": "<|endoftext|>"}.get(name, POLICIES[name][1])
    return tok


def script(name, tok):
    """What the policy writes in its turns: two calls, one after the other; then words."""
    call, end = POLICIES[name]
    texts = [
        call.format(3) + end,
        call.format(40) + end,
        ("<|channel|>final<|message|>" if name == "gptoss" else "") + "It is 42." + tok.eos_token,
    ]
    return [tok(text, add_special_tokens=False)["input_ids"] for text in texts]


def made(package, name, path, **options):
    tok = tokenizer(name)
    args = package.GRPOConfig(
        output_dir=str(path), per_device_train_batch_size=2, num_generations=2, max_completion_length=2000,
        use_cpu=True, bf16=False, report_to="none", max_steps=1,
    )  # fmt: skip
    rows = Dataset.from_list([{"prompt": [{"role": "user", "content": "2 and 3, 2 and 40?"}]}] * 2)
    model = tiny.causal_lm(max_position_embeddings=8192, vocab_size=512)  # marks of the template too
    judge = lambda completions, **others: [0.0] * len(completions)  # noqa: E731
    return package.GRPOTrainer(model, judge, args, rows, processing_class=tok, tools=[add], **options), rows


def theirs(name, path):
    trainer, rows = made(trl, name, path)
    turns, shown = script(name, trainer.processing_class), []

    def single_turn(prompt_ids, *others, **more):
        shown.append([list(ids) for ids in prompt_ids])
        return [list(turns[len(shown) - 1]) for _ in prompt_ids], None

    trainer._generate_single_turn = single_turn
    tool_dicts = {"add": add}
    trainer._sync_tool_dicts, trainer._async_tool_dicts = [tool_dicts] * 2, [{}] * 2
    trainer.environments = None
    result = trainer._generate(list(rows["prompt"]))
    _prompt_ids, completion_ids, tool_mask, completions = result[:4]
    return shown, completion_ids, tool_mask, completions


class Engine:
    def __init__(self):
        self.shown, self.turns = [], None

    def sync_weights(self, model):
        pass

    def generate(self, prompts, n, sampling, seeds=None):
        self.shown.append([list(prompt) for prompt in prompts for _ in range(n)])
        ids = [list(self.turns[len(self.shown) - 1]) for _ in self.shown[-1]]
        return Completions(ids, None, [True] * len(ids))


def ours(name, path):
    engine = Engine()
    trainer, rows = made(posttrain.rl, name, path, generator=engine)
    engine.turns = script(name, trainer.processing_class)
    samples = trainer.new_samples(list(rows))
    samples = trainer.generate(samples, trainer.sampling())
    return (
        engine.shown,
        [s.ids for s in samples],
        [list(map(int, s.learn)) for s in samples],
        [s.completion for s in samples],
    )


def plain(message):
    """What reward functions read of a message."""
    calls = [call["function"] for call in message.get("tool_calls") or []]
    return message["role"], (message["content"] or "").strip(), message.get("reasoning_content") or None, calls


@pytest.mark.parametrize("name", POLICIES)
def test_a_tool_loop_is_that_of_trl(name, tmp_path):
    shown, ids, masks, messages = theirs(name, tmp_path / "theirs")
    our_shown, our_ids, our_masks, our_messages = ours(name, tmp_path / "ours")
    assert our_ids == ids and our_masks == masks
    assert our_shown == shown
    assert [[plain(m) for m in one] for one in our_messages] == [[plain(m) for m in one] for one in messages]
    assert [m["content"] for m in our_messages[0] if m["role"] == "tool"] == ["5", "42"]
