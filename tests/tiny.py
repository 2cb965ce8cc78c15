"""Models and tokenizers small enough to train in a test. Nothing is downloaded."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from posttrain.core.data.loaders import Loaders
from posttrain.core.testing import CHATML, CORPUS, causal_lm, classifier, seq2seq_lm, tokenizer

__all__ = ["CHATML", "CORPUS", "causal_lm", "classifier", "seq2seq_lm", "tokenizer"]

# As Qwen2.5's: tools are described in JSON, calls are JSON in <tool_call>, answers stand in a turn of the user.
CHATML_WITH_TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif "
    "%}{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or "
    "[] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}{% "
    "if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def mixture_of_experts(seed: int = 0, arch: str = "qwen3_moe", kind: str = "ForCausalLM", **overrides):
    """A mixture of 2 layers and width 32, with 2 of 4 experts for each token: one of `own`."""
    import transformers

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=512, pad_token_id=0, eos_token_id=1)
    size |= dict(num_experts_per_tok=2, tie_word_embeddings=False)
    latent = dict(first_k_dense_replace=0, n_group=2, topk_group=1, num_key_value_heads=4, bos_token_id=None)
    latent |= dict(q_lora_rank=16, kv_lora_rank=8, head_dim=4, qk_rope_head_dim=4, v_head_dim=8, qk_nope_head_dim=8)
    own = {
        "qwen3_moe": ("Qwen3Moe", dict(num_experts=4, moe_intermediate_size=16)),
        "mixtral": ("Mixtral", dict(num_local_experts=4, intermediate_size=16, bos_token_id=None)),
        "gpt_oss": ("GptOss", dict(num_local_experts=4, intermediate_size=16, sliding_window=8)),
        "deepseek_v3": ("DeepseekV3", dict(n_routed_experts=4, moe_intermediate_size=16, **latent)),
        "glm4_moe": ("Glm4Moe", dict(n_routed_experts=4, moe_intermediate_size=16, first_k_dense_replace=0)),
    }
    name, special = own[arch]
    config = getattr(transformers, f"{name}Config")(**(size | special | overrides))
    torch.manual_seed(seed)
    if kind != "ForCausalLM":
        return getattr(transformers, name + kind)(config)
    return transformers.AutoModelForCausalLM.from_config(config)


def adapted_experts(make):
    """The mixture that `make` makes, with an adapter on its experts and attention that has been trained a little."""
    from peft import LoraConfig, get_peft_model

    experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = LoraConfig(r=3, lora_alpha=6, target_modules=["q_proj"], target_parameters=experts, task_type="CAUSAL_LM")
    model = get_peft_model(make(), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def reward_model(seed: int = 0, **overrides):
    """A Qwen3 sequence classifier of 2 layers and width 32 with one output."""
    from transformers import Qwen3Config, Qwen3ForSequenceClassification

    size = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    size |= dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, num_labels=1)
    torch.manual_seed(seed)
    return Qwen3ForSequenceClassification(Qwen3Config(**(size | overrides)))


def token_rows(num_rows: int, seed: int = 0, min_length: int = 5, max_length: int = 16, vocab_size: int = 384):
    """``num_rows`` dicts of random `input_ids`, `attention_mask` and `labels` of ragged length."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for _ in range(num_rows):
        length = int(torch.randint(min_length, max_length + 1, (), generator=generator))
        ids = torch.randint(4, vocab_size, (length,), generator=generator).tolist()
        rows.append({"input_ids": ids, "attention_mask": [1] * length, "labels": list(ids)})
    return rows


def build_loader(rows, is_training, args, collate_fn, sampler=None, device="cpu", limits=None, rank=0, world_size=1):
    """The loader that a trainer makes of `rows`, two a batch or as `args` say, with seed 0 or ``args.seed``."""
    owner = SimpleNamespace(
        args=args,
        data_collator=collate_fn,
        data_seed=vars(args).get("seed", 0),
        dist=SimpleNamespace(rank=rank, world_size=world_size, device=torch.device(device)),
        scaling=SimpleNamespace(read_by_loss=set),
        id_limits=lambda: limits or {},
        without_unused_columns=lambda dataset, collator, description: (dataset, collator),
    )
    size = vars(args).get("per_device_train_batch_size", 2)
    return Loaders(owner).make(rows, "rows", size, None if sampler is None else lambda rows: sampler, is_training, None)
