"""Trains with vLLM in this process, and prints what was found as JSON; for test_colocated.py.

A process of its own, since vLLM sets up torch.distributed, and stays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from peft import LoraConfig
from transformers import AutoModelForCausalLM

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation.vllm_colocated import VLLMColocatedGenerator
from tests import tiny
from tests.vllm import servers

ENGINE = {"enforce_eager": True, "max_model_len": 128}


def spread(completion_ids, **others):
    return [sum(ids) % 11 / 11 for ids in completion_ids]


def trainer_of(out: Path, generator, **options):
    args = GRPOConfig(
        output_dir=str(out / "run"), per_device_train_batch_size=4, num_generations=4, max_completion_length=12,
        max_steps=3, learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True,
        disable_tqdm=True, temperature=0.9, num_generations_eval=2, use_vllm=True,
    )  # fmt: skip
    rows = [{"prompt": "the cat sold"}, {"prompt": "a dog"}]
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    evaluated = [*rows, {"prompt": "who"}]
    return GRPOTrainer(model, spread, args, rows * 6, evaluated, tiny.tokenizer(), generator=generator, **options)


def run(trainer) -> dict:
    trainer.train()
    records = [record for record in trainer.state.log_history if "grad_norm" in record]
    return {
        "gaps": [record["sampling/sampling_logp_difference/max"] for record in records],
        "grad_norms": [record["grad_norm"] for record in records],
        "eval_reward": trainer.evaluate()["eval_reward"],
    }


def not_sent(trainer) -> str:
    """What is said when weights do not arrive."""
    llm = trainer.generator._llm
    call, llm.collective_rpc = llm.collective_rpc, lambda name, **options: None
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.mul_(1.2)
    try:
        trainer.generator.sync_weights(trainer.model)
        return "nothing"
    except ValueError as error:
        return str(error)
    finally:
        llm.collective_rpc = call


def main(out: Path) -> None:
    servers.save(out / "model", servers.model(tie_word_embeddings=True))
    generator = VLLMColocatedGenerator(ENGINE, sleeps="sleep" in sys.argv)
    adapter = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], use_dora=True)
    found = {"full": run(trainer_of(out, generator)), "adapter": run(trainer_of(out, generator, peft_config=adapter))}
    found["not sent"] = not_sent(trainer_of(out, generator))
    (out / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
