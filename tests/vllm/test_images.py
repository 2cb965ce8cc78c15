"""Prompts with images against vLLM itself, which reads them with a processor of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from posttrain.rl import GRPOConfig, GRPOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.protocol import Pictured
from posttrain.rl.generation.vllm import VLLMServerGenerator
from tests import tiny_vision
from tests.vllm import servers
from tests.vllm.images import assert_trained, gap, prompts, spread, trained

LARGEST = 1e-5
"""Gap between vLLM's log-probabilities and the trainer's, in float32."""


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    if there := os.environ.get("POSTTRAIN_VLLM_SEEING"):  # the port of one that runs
        yield f"http://127.0.0.1:{there}"
        return
    folder = tmp_path_factory.mktemp("seeing")
    with servers.server(servers.save_seeing(folder), servers.FLAGS + servers.SEEING) as address:
        yield address


def trainer_of(url, out, **options):
    args = GRPOConfig(
        output_dir=str(out), per_device_train_batch_size=4, num_generations=4, max_completion_length=12, max_steps=3,
        learning_rate=1e-3, logging_steps=1, save_strategy="no", report_to="none", use_cpu=True, disable_tqdm=True,
        temperature=0.9, num_generations_eval=2, use_vllm=True, vllm_mode="server", vllm_server_base_url=url,
        vllm_group_port=0, gradient_checkpointing=False,
    )  # fmt: skip
    model, processor = servers.seeing()
    return GRPOTrainer(model, spread, args, prompts() * 3, prompts(), processor, **options)


def test_log_probabilities_of_prompts_with_images_are_the_trainers(url, tmp_path):
    trainer = trainer_of(url, tmp_path)
    for _ in range(2):  # of the language part and of the vision part
        trainer.generator.sync_weights(trained(trainer.model))
        assert gap(trainer) < LARGEST


def test_grpo_with_images_learns_from_a_servers_completions(url, tmp_path):
    trainer = trainer_of(url, tmp_path)
    assert_trained(trainer)


def test_a_server_that_reads_images_otherwise_is_refused(url, tmp_path):
    client = VLLMServerGenerator(url, timeout=30, group_port=0)
    client.sync_weights(servers.seeing()[0])
    token = tiny_vision.number("<image>")
    prompt = Pictured([5, token, 6], [tiny_vision.image(0)], [5, *[token] * 9, 6])
    with pytest.raises(ValueError, match="reads a prompt with 1 images as 6 tokens, and the trainer as 11"):
        client.generate([prompt], 1, Sampling(4, never=(token,)), [0])


def test_vllm_that_would_change_the_trainers_classes_is_refused(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.vllm.images", str(tmp_path), "transformers"]
    done = subprocess.run(command, cwd=root, env=os.environ | servers.ENVIRONMENT, capture_output=True, text=True)
    assert done.returncode != 0
    assert "has replaced how Qwen3Model is called, which is the trainer's model's too" in done.stderr
