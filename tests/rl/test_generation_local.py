"""Generation of our own: the tokens of `generate`, the model's log-probabilities, and rows that leave and are replaced."""

import pytest
import torch
import transformers

from posttrain.rl.generation import Sampling
from posttrain.rl.generation.local import LocalGenerator, problem
from tests import tiny

SIZE = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
SIZE |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
SIZE |= dict(bos_token_id=None, tie_word_embeddings=False, initializer_range=0.3)
SLIDING = dict(sliding_window=6, layer_types=["sliding_attention", "full_attention"])
GPT2 = dict(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, pad_token_id=0, eos_token_id=1)
GPT2 |= dict(bos_token_id=None, initializer_range=0.3)
MODELS = {
    "llama": ("LlamaConfig", SIZE),
    "qwen3": ("Qwen3Config", SIZE),
    "mistral": ("MistralConfig", SIZE | dict(sliding_window=6)),
    "gemma2": ("Gemma2Config", SIZE | SLIDING),
    "gemma3": ("Gemma3TextConfig", SIZE | SLIDING),
    "gpt2": ("GPT2Config", GPT2),
    "gpt-oss": ("GptOssConfig", SIZE | SLIDING | dict(num_local_experts=4, num_experts_per_tok=2)),
    "phi3": ("Phi3Config", SIZE | dict(sliding_window=6)),
}
PROMPTS = [
    [5, 9, 14],
    [40, 41, 42, 43, 44, 45, 46, 47, 48, 49],
    [7],
    [8, 9, 10, 11, 12, 13, 14, 15, 16],
    [60, 61, 62, 63],
]


def make(arch="qwen3", max_rows=256, **overrides):
    name, size = MODELS[arch]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, name)(**(size | overrides)))
    made = LocalGenerator(tiny.tokenizer(), max_rows)
    made.sync_weights(model.eval())
    return made, model


def teacher_forced(model, prompt, ids, temperature):
    logps = (model(torch.tensor([prompt + ids])).logits[0].float() / temperature).log_softmax(-1)
    return [logps[len(prompt) - 1 + place, token].item() for place, token in enumerate(ids)]


@pytest.mark.parametrize("max_rows", [256, 4])
@pytest.mark.parametrize("arch", MODELS)
def test_greedy_is_token_for_token_what_generate_gives(arch, max_rows):
    made, model = make(arch, max_rows)
    assert problem(model) is None
    done = made.generate(PROMPTS, 2, Sampling(14, temperature=0, eos_token_ids=(1,)))
    for number, prompt in enumerate(PROMPTS):
        expected = model.generate(
            torch.tensor([prompt]), max_new_tokens=14, do_sample=False, eos_token_id=1, pad_token_id=0
        )[0, len(prompt) :].tolist()
        assert done.ids[2 * number] == done.ids[2 * number + 1] == expected


@pytest.mark.parametrize("arch", MODELS)
def test_log_probabilities_are_those_of_the_whole_text(arch):
    made, model = make(arch)
    done = made.generate(PROMPTS, 3, Sampling(14, temperature=0.7, eos_token_ids=tuple(range(40))), seeds=range(15))
    assert done.is_exact and len({len(ids) for ids in done.ids}) > 3
    for i, (ids, logps) in enumerate(zip(done.ids, done.logps, strict=True)):
        assert logps == pytest.approx(teacher_forced(model, PROMPTS[i // 3], ids, 0.7), abs=1e-5)
