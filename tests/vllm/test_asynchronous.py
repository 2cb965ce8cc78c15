"""Asynchronous training against vLLM itself."""

import threading
import time
from concurrent.futures import Future

import pytest
import torch

from posttrain.rl import GRPOTrainer, RLOOTrainer
from posttrain.rl.generation import Sampling
from posttrain.rl.generation.vllm import VLLMServerGenerator
from posttrain.rl.online.asynchronous import Worker
from posttrain.rl.online.ledger import audit
from tests import tiny
from tests.contract.trainers import arguments, digit_sum, text_rows
from tests.vllm import servers

LARGEST = 1e-5
"""Gap between vLLM's log-probabilities and the trainer's, in float32."""


def client_of(server):
    url, folder = server
    shared = str(folder / "shared")
    return VLLMServerGenerator(url, timeout=30, group_port=0, folder=shared, in_flight=True)


def test_completions_go_on_under_new_weights_and_each_token_has_those_of_its_version(server):
    models = {10: servers.model(), 11: servers.model(seed=5)}
    client, worker = client_of(server), Worker("test-generate")
    prompts = [[5, 9, 14], [7, 8], [30, 40, 50, 60]]
    for wait in (0.2, 0.5, 1.0, 2.0, 4.0):  # some machines have not begun to write by then, others have done
        client.version = 10
        client.sync_weights(models[10])
        found = Future()
        worker.submit(found, lambda: client.generate(prompts, 4, Sampling(240), list(range(12))))
        time.sleep(wait)
        client.version = 11
        client.sync_weights(models[11])
        done = found.result(300)
        mixed = [row for row in done.versions if set(row) == {10, 11}]
        if mixed:
            break
    worker.end()
    assert mixed and all(row == sorted(row) for row in done.versions)
    for number, (ids, logps, versions) in enumerate(zip(done.ids, done.logps, done.versions, strict=True)):
        prompt = prompts[number // 4]
        for version, model in models.items():
            with torch.no_grad():
                logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            mine = logits.gather(1, torch.tensor(ids)[:, None]).squeeze(1)
            written = torch.tensor(versions) == version
            assert (mine - torch.tensor(logps))[written].abs().max().item() < LARGEST if written.any() else True


@pytest.mark.parametrize("kind", [GRPOTrainer, RLOOTrainer])
def test_a_trainer_learns_while_a_server_writes(kind, server, tmp_path):
    def reward(completion_ids):
        assert threading.current_thread() is not threading.main_thread()
        return digit_sum(completion_ids)

    trainer = kind(
        model=servers.model(), reward_funcs=reward, generator=client_of(server), processing_class=tiny.tokenizer(),
        args=arguments(kind.config_class, tmp_path, num_generations=4, max_completion_length=16, max_staleness=2,
                       gradient_checkpointing=False, max_steps=8, num_train_epochs=9),
        train_dataset=[{"prompt": row["prompt"]} for row in text_rows(16)],
    )  # fmt: skip
    trainer.train()
    found = audit(tmp_path)
    assert found.problems == [] and len(found.used) == 8 * 8
    ages = [line["step"] - 1 - line["versions"][0] for line in found.used]
    assert 1 <= max(ages) <= 2
    first = next(record for record in trainer.state.log_history if "staleness/max" in record)
    assert first["sampling/sampling_logp_difference/mean"] < LARGEST and first["staleness/max"] == 0
