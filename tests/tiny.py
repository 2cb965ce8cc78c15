"""Models and tokenizers small enough to train in a test. Nothing is downloaded."""

from __future__ import annotations

from functools import cache

import torch

CORPUS = [
    "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May.",
    "Weng earns $12 an hour for babysitting. Yesterday, she just did 50 minutes of babysitting.",
    "Betty is saving money for a new wallet which costs $100. She has only half of the money she needs.",
    "James writes a 3-page letter to 2 different friends twice a week. How many pages does he write a year?",
    "user assistant system tool question answer 0 1 2 3 4 5 6 7 8 9 + - * / = ( ) < > #### . , ? !",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen2.5's: tools are described in JSON, calls are JSON in <tool_call>, answers stand in a turn of the user.
CHATML_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif "
    "%}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or "
    "[] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% "
    "if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@cache
def _bpe(vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(CORPUS * 4, trainer)
    return tokenizer


def tokenizer(vocab_size: int = 384, chat_template: str | None = CHATML):
    """A byte-level BPE tokenizer with pad and eos tokens and a ChatML template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(vocab_size),
        pad_token="<|pad|>",
        eos_token="<|endoftext|>",
        chat_template=chat_template,
        model_max_length=512,
    )


def causal_lm(arch: str = "qwen3", seed: int = 0, **overrides):
    """A causal language model of 2 layers and width 32, freshly initialised: qwen2, qwen3, llama, mistral, gemma,
    gemma2, gpt2.
    """
    import transformers

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
    size |= dict(bos_token_id=None, tie_word_embeddings=False)
    if arch == "gpt2":
        size = dict(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, pad_token_id=0, eos_token_id=1)
        size |= dict(bos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    name = {
        "qwen3": "Qwen3",
        "llama": "Llama",
        "mistral": "Mistral",
        "gemma": "Gemma",
        "gpt2": "GPT2",
        "qwen2": "Qwen2",
        "gemma2": "Gemma2",
        "qwen3_moe": "Qwen3Moe",
    }[arch]
    config = getattr(transformers, f"{name}Config")(**(size | overrides))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


def mixture_of_experts(seed: int = 0, **overrides):
    """A Qwen3 language model of 2 layers and width 32, with 2 of 4 experts for each token."""
    import transformers

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
    size |= dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, tie_word_embeddings=False)
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(transformers.Qwen3MoeConfig(**(size | overrides)))


def classifier(num_labels: int = 3, seed: int = 0, **overrides):
    """A BERT sequence classifier of 2 layers and width 32, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(max_position_embeddings=64, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(num_labels=num_labels, **(size | overrides)))


def reward_model(seed: int = 0, **overrides):
    """A Qwen3 sequence classifier of 2 layers and width 32 with one output."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_labels=1)
    torch.manual_seed(seed)
    return Qwen3ForSequenceClassification(Qwen3Config(**(size | overrides)))


def seq2seq_lm(seed: int = 0, **overrides):
    """A T5 of 2+2 layers and width 32, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    size = dict(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2, num_heads=4)
    size |= dict(dropout_rate=0.0, decoder_start_token_id=0, pad_token_id=0, eos_token_id=1)
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(T5Config(**(size | overrides)))


def token_rows(num_rows: int, seed: int = 0, min_length: int = 5, max_length: int = 16, vocab_size: int = 384):
    """``num_rows`` dicts of random `input_ids`, `attention_mask` and `labels` of ragged length."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(min_length, max_length + 1, (), generator=generator))
        ids = torch.randint(4, vocab_size, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": list(ids)})
    return rows
