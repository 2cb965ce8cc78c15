"""`predict_with_generate` of the SFT trainer: completions are generated from prompts, beside the loss."""

from __future__ import annotations

import pytest
import torch

from posttrain.core.errors import ConfigError
from posttrain.sft import SFTConfig, SFTTrainer
from tests import tiny
from tests.contract.trainers import arguments, text_rows


def trainer(out, seen, **changes):
    options = {
        "max_length": 48,
        "predict_with_generate": True,
        "generation_max_length": 24,
        "per_device_eval_batch_size": 3,
    }
    return SFTTrainer(
        tiny.causal_lm(),
        arguments(SFTConfig, out, **(options | changes)),
        train_dataset=text_rows(8),
        eval_dataset=text_rows(5),
        processing_class=tiny.tokenizer(),
        compute_metrics=lambda evaluated: seen.append(evaluated) or {"rows": len(evaluated.predictions)},
    )


@pytest.mark.parametrize("packing", [False, True])
def test_completions_are_generated_from_prompts_in_the_order_of_the_dataset(packing, tmp_path):
    seen = []
    it = trainer(tmp_path, seen, packing=packing)
    it.train()
    metrics = it.evaluate()
    assert metrics["eval_rows"] == 5 and {"eval_loss", "eval_mean_token_accuracy"} <= set(metrics)
    it.model.eval()
    tokenizer = it.processing_class
    for row, found, target in zip(text_rows(5), seen[-1].predictions, seen[-1].label_ids, strict=True):
        prompt = torch.tensor([tokenizer(row["prompt"])["input_ids"]])
        options = {"max_new_tokens": 24, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
        alone = it.model.generate(input_ids=prompt, **options)[0, prompt.shape[1] :].tolist()
        assert found.tolist()[: len(alone)] == alone
        assert target[target >= 0].tolist() == tokenizer(row["completion"])["input_ids"] + [tokenizer.eos_token_id]
    assert it.generated_samples[0]["input"] == text_rows(1)[0]["prompt"]


def test_the_loss_is_that_of_an_evaluation_without_generation(tmp_path):
    with_it, without = trainer(tmp_path, []), trainer(tmp_path, [], predict_with_generate=False)
    assert with_it.evaluate()["eval_loss"] == pytest.approx(without.evaluate()["eval_loss"], rel=1e-5)


@pytest.mark.parametrize("name", ["eval_packing", "padding_free"])
def test_rows_that_share_a_row_are_refused(name):
    with pytest.raises(ConfigError, match=f"predict_with_generate.*{name}=False"):
        SFTConfig("x", predict_with_generate=True, **{name: True})


@pytest.mark.parametrize("chat", [False, True])
def test_callbacks_answer_the_prompts_of_rows_that_were_prepared(chat, tmp_path):
    from transformers import GenerationConfig

    from posttrain.core import LogCompletionsCallback

    def row(prompt, completion):
        if not chat:
            return {"prompt": prompt, "completion": completion}
        turns = ("user", prompt), ("assistant", completion)
        return dict(zip(("prompt", "completion"), ([{"role": r, "content": c}] for r, c in turns), strict=True))

    rows, greedy = [row(one["prompt"], one["completion"]) for one in text_rows(3)], {"max_new_tokens": 5}
    options = dict(train_dataset=rows, eval_dataset=rows, processing_class=tiny.tokenizer())
    it = SFTTrainer(
        tiny.causal_lm(initializer_range=0.2), arguments(SFTConfig, tmp_path, per_device_eval_batch_size=2), **options
    )
    answers = LogCompletionsCallback(it, GenerationConfig(**greedy, do_sample=False), num_prompts=3).answer()
    tokenizer = it.processing_class
    for given, (prompt, completion) in zip(rows, answers, strict=True):
        text = given["prompt"]
        if chat:
            text = tokenizer.apply_chat_template(text, tokenize=False, add_generation_prompt=True)
        assert prompt == text
        ids = torch.tensor([tokenizer(text)["input_ids"]])
        alone = it.model.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, do_sample=False, **greedy)
        assert completion == tokenizer.decode(alone[0, ids.shape[1] :], skip_special_tokens=True)
