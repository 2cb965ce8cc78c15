"""What the tests of images against vLLM share; as a program, training with vLLM in the process, for test_images.py."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
from tests import tiny_vision
from tests.vllm import servers

ENGINE = {"enforce_eager": True, "max_model_len": 256, "limit_mm_per_prompt": {"image": 2}}


def prompts():
    image = tiny_vision.image
    asked = [{"type": "text", "text": "look"}, {"type": "image"}, {"type": "text", "text": "now"}]
    found = [("Is it red ?", [image(0)]), ("Which ?", [image(5), image(6, 24, 16)]), ("none", []), (asked, [image(3)])]
    return [{"images": images, "prompt": [{"role": "user", "content": prompt}]} for prompt, images in found]


def spread(completion_ids, **columns):
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def trained(model):
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.02).add_(0.01 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def gap(trainer) -> float:
    """The largest difference of a token's log-probability, of every kind of prompt."""
    samples = trainer.new_samples([row for row in prompts() for _ in range(2)])
    samples = [replace(sample, seed=seed) for seed, sample in enumerate(samples)]
    samples = trainer.generate(samples, trainer.sampling())
    never, largest = list(trainer.sampling().never), 0.0
    for sample in samples:
        ids, start = torch.tensor([[*sample.prompt_ids, *sample.ids]]), len(sample.prompt_ids) - 1
        logits = trainer.model(input_ids=ids, **sample.shown.tensors).logits[0, start:-1] / trainer.temperature
        logits[:, never] = -torch.inf  # as the engine was told
        mine = logits.log_softmax(-1).gather(1, torch.tensor(sample.ids)[:, None]).squeeze(1)
        assert not set(sample.ids) & set(never) and len(sample.ids) > 1
        largest = max(largest, (mine - torch.tensor(sample.logps)).abs().max().item())
    return largest


def assert_trained(trainer) -> None:
    """Three steps, each on completions of the weights of the step before; both parts of the model have moved."""
    before = {name: weight.detach().clone() for name, weight in trainer.model.named_parameters()}
    trainer.train()
    records = [record for record in trainer.state.log_history if "grad_norm" in record]
    assert len(records) == 3 and min(record["grad_norm"] for record in records) > 0
    # The engine's probabilities are those among tokens that do not stand for images: a few hundredths higher here.
    assert max(record["sampling/sampling_logp_difference/max"] for record in records) < 0.1
    moved = {name for name, weight in trainer.model.named_parameters() if not torch.equal(weight, before[name])}
    assert any("vision_tower" in name for name in moved) and any("language_model" in name for name in moved)
    assert 0 < trainer.evaluate()["eval_reward"] < 1


def main(out: Path, implementation: str) -> None:
    folder = servers.save_seeing(out / "model")
    from transformers import LlavaForConditionalGeneration

    args = GRPOConfig(
        output_dir=str(out / "run"), per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
        max_steps=3, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, temperature=0.9, num_generations_eval=2, use_vllm=True, gradient_checkpointing=False,
    )  # fmt: skip
    model, processor = LlavaForConditionalGeneration.from_pretrained(folder), servers.seeing()[1]
    engine = VLLMColocatedGenerator(ENGINE | {"model_impl": implementation})
    trainer = GRPOTrainer(model, spread, args, prompts() * 3, prompts(), processor, generator=engine)
    assert_trained(trainer)
    engine.sync_weights(trained(trainer.model))
    (out / "found.json").write_text(json.dumps({"gap": gap(trainer)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
