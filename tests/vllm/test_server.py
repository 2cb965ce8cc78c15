"""Server mode against vLLM itself."""

import pytest
import torch

from posttrain.rl.generation import Sampling
from posttrain.rl.generation.server import Server
from posttrain.rl.generation.transfer import NAME
from posttrain.rl.generation.vllm import VLLMServerGenerator
from tests.rl.generation.test_vllm import Direct
from tests.vllm import servers

PROMPTS = [[5, 9, 14], [7, 8], [30, 40, 50, 60]]
LARGEST = 1e-5
"""Gap between vLLM's log-probabilities and the trainer's, in float32."""


def client_of(server, transport="gloo", **options):
    url, folder = server
    where = {"folder": str(folder / "shared")} if transport == "folder" else {}
    return VLLMServerGenerator(url, timeout=30, group_port=0, **where, **options)


def trained(model, scale=1.02):
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.mul_(scale).add_(0.01 * torch.randn_like(parameter))
    return model


@torch.no_grad()
def gap(model, prompts, done, n, temperature):
    """The largest difference of a token's log-probability."""
    largest = 0.0
    for number, (ids, logps) in enumerate(zip(done.ids, done.logps, strict=True)):
        prompt = prompts[number // n]
        logits = model(torch.tensor([prompt + ids])).logits[0, len(prompt) - 1 : -1] / temperature
        mine = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).squeeze(1)
        largest = max(largest, (mine - torch.tensor(logps)).abs().max().item())
    return largest


@pytest.mark.parametrize("transport", ["gloo", "folder"])
def test_completions_are_those_of_the_weights_of_the_last_sync(server, transport):
    model, client, seen = servers.model(), client_of(server, transport), []
    sampling, seeds = Sampling(24, temperature=0.7), list(range(12))
    for _ in range(3):
        client.sync_weights(trained(model))
        done = client.generate(PROMPTS, 4, sampling, seeds)
        assert [len(ids) for ids in done.ids] == [24] * 12 and not any(done.finished) and not done.is_exact
        assert gap(model, PROMPTS, done, 4, 0.7) < LARGEST
        assert client.generate(PROMPTS, 4, sampling, seeds).ids == done.ids not in seen
        seen.append(done.ids)
    assert len(set(map(tuple, done.ids))) > 9  # each with a seed of its own


def test_weights_that_were_not_sent_are_refused(server):
    client = client_of(server)
    client._transport = Direct(lambda weights, target: None)
    client.sync_weights(servers.model())  # those that it was started with
    with pytest.raises(ValueError, match="differ from the trainer's.*it has other weights or another model"):
        client.sync_weights(trained(servers.model(), 1.2))


def test_completions_end_where_they_should(server):
    client = client_of(server)
    client.sync_weights(servers.model())
    done = client.generate(PROMPTS, 8, Sampling(16, eos_token_ids=tuple(range(60))), list(range(24)))
    for ids, logps, finished in zip(done.ids, done.logps, done.finished, strict=True):
        assert len(logps) == len(ids) and finished == (ids[-1] < 60) and (finished or len(ids) == 16)
        assert all(token >= 60 for token in ids[:-1])
    assert set(done.finished) == {True, False}
    assert client.generate(PROMPTS, 1, Sampling(4, top_k=3), [1, 2, 3]).logps is None


def test_a_server_that_was_restarted_is_noticed(server):
    client = client_of(server)
    client.sync_weights(servers.model())
    assert Server(server[0]).call("/weight_info") == {"weight_version": "posttrain-weights-1"}
    Server(server[0]).call("/update_weight_version", {"new_version": "default"})  # what a new server calls its weights
    with pytest.raises(ConnectionError, match="was started anew, and has lost the weights it was sent"):
        client.generate(PROMPTS, 1, Sampling(4), [1, 2, 3])
    client.sync_weights(servers.model())  # connects to it once more
    assert client.generate(PROMPTS, 1, Sampling(4), [1, 2, 3]).ids


def test_tools_are_called_and_answered(server, tmp_path):
    from tests.rl.generation.test_vllm import assert_called, completed, taught

    model = taught(servers.model(initializer_range=0.1))
    assert_called(completed(client_of(server), model, tmp_path))


def adapted(**options):
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options)
    torch.manual_seed(1)
    return trained(trained(get_peft_model(servers.model(), config)))


@pytest.mark.parametrize("transport", ["gloo", "folder"])
@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_adapters_are_served_as_adapters_or_merged_in_a_copy(server, transport, options):
    model, client = adapted(**options), client_of(server, transport)
    before = {name: tensor.clone() for name, tensor in model.named_parameters() if not tensor.requires_grad}
    as_adapter = transport == "folder" and not options
    for _ in range(3):
        client.sync_weights(trained(model))
        done = client.generate(PROMPTS, 2, Sampling(24, temperature=0.7), list(range(6)))
        assert gap(model, PROMPTS, done, 2, 0.7) < LARGEST
        with model.disable_adapter():
            assert gap(model, PROMPTS, done, 2, 0.7) > 0.01
    version = Server(server[0]).call("/weight_info")["weight_version"]
    assert version == ("posttrain-adapter-3" if as_adapter else "posttrain-weights-3")
    names = set(client._api.names.values())
    assert names == {NAME} if as_adapter else NAME not in names
    for name, tensor in model.named_parameters():
        assert name not in before or torch.equal(tensor, before[name]), name
    if not as_adapter:  # the model below has gone from the server
        with pytest.raises(ValueError, match="has whole weights of another run .posttrain-weights-3."):
            client_of(server, "folder").sync_weights(adapted())
