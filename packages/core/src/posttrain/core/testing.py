"""For tests of your own trainers, losses and callbacks: tiny models and a tokenizer, without a network, and what a
trainer must promise.

    from posttrain.core import testing

    def test_my_trainer_resumes(tmp_path):
        def make(folder):
            args = MyConfig(folder, max_steps=6, use_cpu=True, report_to="none")
            return MyTrainer(testing.causal_lm(), args, train_dataset=ROWS, processing_class=testing.tokenizer())

        testing.assert_resumes(make, tmp_path)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from posttrain.cli.tools import verify_resume
from posttrain.core.callbacks import TrainerCallback
from posttrain.core.checkpoint import Store

#: The texts that the tokenizer is trained on.
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


@cache
def _bpe(vocab_size: int) -> Any:
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


def tokenizer(vocab_size: int = 384, chat_template: str | None = CHATML) -> Any:
    """A byte-level BPE tokenizer with pad and eos tokens and a ChatML template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_bpe(vocab_size),
        pad_token="<|pad|>",
        eos_token="<|endoftext|>",
        chat_template=chat_template,
        model_max_length=512,
    )


def causal_lm(arch: str = "qwen3", seed: int = 0, **overrides: Any) -> Any:
    """A causal language model of 2 layers and width 32, freshly initialised.

    Args:
        arch: a model type of transformers, such as llama, gemma2 or qwen3_moe.
        overrides: fields of its config.
    """
    import transformers

    size: dict[str, Any] = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    size |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512)
    size |= dict(pad_token_id=0, eos_token_id=1, bos_token_id=None, tie_word_embeddings=False)
    if arch == "gpt2":
        size = dict(vocab_size=384, n_embd=32, n_layer=2, n_head=4, n_positions=512, pad_token_id=0, eos_token_id=1)
        size |= dict(bos_token_id=None, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    config = transformers.AutoConfig.for_model(arch, **(size | overrides))
    torch.manual_seed(seed)
    return transformers.AutoModelForCausalLM.from_config(config)


def classifier(num_labels: int = 3, seed: int = 0, **overrides: Any) -> Any:
    """A BERT sequence classifier of 2 layers and width 32, without dropout."""
    from transformers import BertConfig, BertForSequenceClassification

    size: dict[str, Any] = dict(vocab_size=384, hidden_size=32, intermediate_size=64, num_hidden_layers=2)
    size |= dict(num_attention_heads=4, max_position_embeddings=64, hidden_dropout_prob=0.0, num_labels=num_labels)
    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**(size | dict(attention_probs_dropout_prob=0.0) | overrides)))


def seq2seq_lm(seed: int = 0, **overrides: Any) -> Any:
    """A T5 of 2+2 layers and width 32, without dropout."""
    from transformers import T5Config, T5ForConditionalGeneration

    size: dict[str, Any] = dict(vocab_size=384, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2)
    size |= dict(num_heads=4, dropout_rate=0.0, pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
    torch.manual_seed(seed)
    return T5ForConditionalGeneration(T5Config(**(size | overrides)))


def assert_resumes(make: Callable[[str], Any], folder: Path | str, step: int = 3) -> None:
    """Check that a run that is interrupted and resumed equals an uninterrupted one, bit by bit: weights, optimizer,
    schedule, random numbers, data and log. Raises an `AssertionError` where they differ; the message names the parts
    that do, and by how much.

    Args:
        make: ``output_dir -> trainer``, with the same numbers each time, for at least ``step + 1`` optimizer steps.
        folder: where both runs write.
        step: the optimizer step that is resumed from.
    """

    def saving(run: Path) -> Any:
        trainer = make(str(run))
        trainer.args.save_strategy, trainer.args.save_steps = "steps", step
        return trainer

    whole, cut = Path(folder) / "whole", Path(folder) / "cut"
    saving(whole).train()
    broken = saving(cut)
    broken.add_callback(_BreakOff(step))
    try:
        broken.train()
    except _BrokenOff:
        saving(cut).train(resume_from_checkpoint=True)
    else:
        raise AssertionError(f"The run has no optimizer step after step {step}; give it more, or a smaller step.")
    last = [Store(run).checkpoints()[-1] for run in (whole, cut)]
    if last[0].name != last[1].name:
        raise AssertionError(f"The runs end with {last[0].name} and {last[1].name}.")
    different = {part: found for part, found in verify_resume.compare(*last).items() if found}
    if different:
        listed = "; ".join(f"{part}: {found}" for part, found in different.items())
        raise AssertionError(
            f"The resumed run differs. {listed}. A value that your code keeps is not in its state_dict, or it draws "
            "random numbers from a generator of its own."
        )


class _BrokenOff(Exception):
    pass


class _BreakOff(TrainerCallback):
    """Ends a run, as a crash would, when the step after `step` begins."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise _BrokenOff
