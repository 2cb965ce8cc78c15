"""The training API over HTTP: what is computed, in which order, what is saved, sampled and refused."""

import json
import math

import pytest
import torch

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
peft = pytest.importorskip("peft")

from posttrain.core.checkpoint import codec  # noqa: E402
from posttrain.core.checkpoint.store import Store  # noqa: E402
from posttrain.rl.training_server import policies, samplers, server  # noqa: E402
from tests import tiny  # noqa: E402
from tests.rl.training_server.client import PROTOBUF, ROWS, Client, fields, floats, logps_of, message, sized  # noqa: E402

GREEDY = {"temperature": 0.0, "max_tokens": 6, "stop": []}
RL = [([5, 6, 7], [6, 7, 8], [-1.0, -6.0, -6.5], [1.0, 2.0, -1.0])]
RL_NAMES = ("target_tokens", "logprobs", "advantages")


@pytest.fixture
def client(tmp_path):
    made = Client(tmp_path)
    yield made
    made.close()


def folder_of(client, path):
    """Where the checkpoint of a path of the API lies."""
    run, kind, name = path.removeprefix("tinker://").split("/")
    (found,) = (client.training.output / run.replace(":", "-") / kind / name).glob("checkpoint-*")
    return found


def twin(client, folder):
    """The same base model with a saved adapter, as peft loads it."""
    return peft.PeftModel.from_pretrained(tiny.causal_lm(), folder, is_trainable=True).eval()


def trained(model):
    return {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# ----------------------------------------------------------------------------------------------------------- training


def test_two_requests_and_a_step_equal_a_loop_of_peft_and_torch(client):
    model = client.create()["model_id"]
    start = client.do("save_weights", model_id=model, path="start")["path"]
    hand = twin(client, folder_of(client, start))
    adam = torch.optim.AdamW(
        [p for p in hand.parameters() if p.requires_grad], lr=1e-2, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1
    )
    for _ in range(3):
        for row in ROWS:  # two requests for one step
            loss, (found,) = client.forward_backward(model, [row])
            logps = logps_of(hand, row[0], row[1])
            expected = -(logps * torch.tensor(row[2])).sum()
            expected.backward()
            assert loss == pytest.approx(float(expected.detach()), abs=1e-5)
            torch.testing.assert_close(torch.tensor(found), logps.detach(), atol=1e-5, rtol=0)
        norm = torch.nn.utils.clip_grad_norm_([p for p in hand.parameters() if p.requires_grad], 0.5)
        adam.step()
        adam.zero_grad()
        took = client.step(model, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5)
        assert took["metrics"]["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
    end = client.do("save_weights_for_sampler", model_id=model, path="end")["path"]
    weights, hands = trained(twin(client, folder_of(client, end))), trained(hand)
    assert weights.keys() == hands.keys() and any("lm_head" in name for name in weights)
    for name in weights:
        torch.testing.assert_close(weights[name], hands[name], atol=1e-5, rtol=0)


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo", "cispo"])
def test_losses_of_a_policy_and_a_step_with_them_equal_those_by_hand(client, loss):
    model = client.create(train_unembed=False)["model_id"]
    hand = twin(client, folder_of(client, client.do("save_weights", model_id=model, path="a")["path"]))
    found, _ = client.forward_backward(model, RL, loss, names=RL_NAMES)
    logps = logps_of(hand, RL[0][0], RL[0][1])
    ratio, advantages = (logps - torch.tensor(RL[0][2])).exp(), torch.tensor(RL[0][3])
    expected = {
        "importance_sampling": -(ratio * advantages),
        "ppo": -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages),
        "cispo": -ratio.detach().clamp(max=4.0) * advantages * logps,
    }[loss].sum()
    assert found == pytest.approx(float(expected.detach()), abs=1e-5)
    expected.backward()
    learned = [p for p in hand.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in learned]
    torch.optim.AdamW(learned, lr=1e-2, betas=(0.9, 0.95), eps=1e-4, weight_decay=0.0).step()
    client.step(model, eps=1e-4)
    end = client.do("save_weights_for_sampler", model_id=model, path="b")["path"]
    weights = trained(twin(client, folder_of(client, end)))
    assert max(float((p.detach() - old).abs().max()) for p, old in zip(learned, before, strict=True)) > 5e-3
    for name, parameter in trained(hand).items():
        torch.testing.assert_close(weights[name], parameter, atol=1e-5, rtol=0)


def test_rows_in_several_forwards_are_as_in_one(tmp_path):
    rows = [(list(range(4, 4 + n)), list(range(5, 5 + n)), [1.0] * n) for n in (3, 9, 5, 7, 2)]
    found = []
    for most in (4096, 10):
        client = Client(tmp_path / str(most), most=most)
        model = client.create()["model_id"]
        loss, logps = client.forward_backward(model, rows)
        norm = client.step(model)["metrics"]["grad_norm"]
        found.append((loss, norm, *[value for row in logps for value in row]))
        assert [len(row) for row in logps] == [3, 9, 5, 7, 2]
        client.close()
    assert found[0] == pytest.approx(found[1], abs=1e-4)


def test_the_forward_alone_leaves_no_gradient_and_weights_are_one_where_not_sent(client):
    model = client.create()["model_id"]
    unweighted = [row[:2] for row in ROWS]
    loss, logps = client.forward_backward(model, unweighted, names=("target_tokens",), only=True)
    assert loss == pytest.approx(-sum(map(sum, logps)), abs=1e-4)
    refused = client.step(model)
    assert "there are no gradients" in refused["error"] and refused["category"] == "user"


def test_models_are_apart_and_the_base_stays(client):
    before = {name: tensor.clone() for name, tensor in client.model.state_dict().items()}
    first, second = (client.create(rank=rank)["model_id"] for rank in (2, 4))
    alone = client.forward_backward(second, ROWS, only=True)
    client.forward_backward(first, ROWS)
    client.step(first)
    assert client.forward_backward(second, ROWS, only=True) == alone
    assert client.forward_backward(first, ROWS, only=True) != alone
    assert client.json("get_info", {"model_id": first})["lora_rank"] == 2
    for name, tensor in client.model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_parts_of_the_model_are_those_that_were_asked_for(client):
    model = client.create(train_mlp=False, train_unembed=False)["model_id"]
    folder = folder_of(client, client.do("save_weights_for_sampler", model_id=model, path="a")["path"])
    names = codec.read_tensors(folder / "adapter_model.safetensors")
    assert names and all("self_attn" in name for name in names)
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 32, "tiny")
    refused = client.create(train_mlp=False, train_unembed=False, train_attn=False)
    assert "one of train_attn, train_mlp and train_unembed" in refused["error"]


def test_of_tied_embeddings_the_adapter_alone_is_saved(tmp_path):
    client = Client(tmp_path, tiny.causal_lm(tie_word_embeddings=True))
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        model = client.create()["model_id"]
    folder = folder_of(client, client.do("save_weights_for_sampler", model_id=model, path="a")["path"])
    names = codec.read_tensors(folder / "adapter_model.safetensors")
    assert any("lm_head" in name for name in names) and all("lora_" in name for name in names)
    client.close()


@pytest.mark.parametrize("arch", ["llama", "gpt2", "gemma2", "qwen3_moe"])
def test_models_of_other_kinds_are_trained_and_sampled_from_as_they_are_trained(tmp_path, arch):
    client = Client(tmp_path, tiny.causal_lm(arch))
    if arch == "qwen3_moe":
        assert "The experts of tiny are no linear layers" in client.create()["error"]
    model = client.create(train_mlp=arch != "qwen3_moe")["model_id"]
    before, _ = client.forward_backward(model, ROWS)
    client.step(model)
    assert client.forward_backward(model, ROWS, only=True)[0] < before
    [(tokens, logps, _)], _ = client.sample(client.sampler(model), [5, 6, 7], 0, max_tokens=5, seed=1, stop=[])
    text = [5, 6, 7, *tokens]
    _, (found,) = client.forward_backward(model, [(text[:-1], text[1:], [1.0] * (len(text) - 1))], only=True)
    assert found[2:] == pytest.approx(logps, abs=1e-5)
    client.close()


# -------------------------------------------------------------------------------------------------------------- order


def test_requests_are_done_by_their_numbers(client):
    model, other = client.create()["model_id"], client.create()["model_id"]
    step = client.json("optim_step", {"model_id": model, "seq_id": 3, "adam_params": {}})
    second = client.submit(model, ROWS[1:], seq=2)
    first = client.submit(model, ROWS[:1], seq=1)
    assert client.result(step)["metrics"]["grad_norm"] > 0
    assert client.result(first) and client.result(second)
    for row in ROWS:
        client.forward_backward(other, [row])
    assert client.step(other, learning_rate=1e-4) == client.result(step)


def test_a_request_that_comes_again_is_done_once(client):
    model = client.create()["model_id"]
    answers = [client.submit(model, ROWS, seq=1) for _ in range(2)]
    assert answers[0] == answers[1] and client.result(answers[0]) == client.result(answers[1])
    norm = client.step(model)["metrics"]["grad_norm"]
    other = client.create()["model_id"]
    client.forward_backward(other, ROWS)
    assert client.step(other)["metrics"]["grad_norm"] == pytest.approx(norm)


def test_requests_behind_one_that_does_not_come_fail(client, monkeypatch):
    monkeypatch.setattr(server, "GAP", 0.0)
    model = client.create()["model_id"]
    refused = client.result(client.submit(model, ROWS, seq=2))
    assert "Request 1 of this model did not come within 0 seconds" in refused["error"]
    assert client.forward_backward(model, ROWS, seq=3)


def test_a_step_is_made_of_all_its_gradients_or_not_made(client):
    model = client.create()["model_id"]
    before = client.forward_backward(model, ROWS, only=True)
    client.forward_backward(model, ROWS)
    assert "token that is none of 0 to 383" in client.result(client.submit(model, [([5], [999], [1.0])]))["error"]
    assert "a forward_backward for it failed: ValueError: data[0] has a token" in client.step(model)["error"]
    assert "there are no gradients" in client.step(model)["error"]
    client.forward_backward(model, [(*ROWS[0][:2], [math.nan] * 5)])
    assert "the norm of the gradients is nan" in client.step(model)["error"]
    assert client.forward_backward(model, ROWS, only=True) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("learning_rate", value) for value in (math.nan, -1.0, math.inf)],
        *[("beta1", 1.0), ("beta2", 1.5), ("eps", -1e-3), ("weight_decay", math.nan), ("grad_clip_norm", -1.0)],
    ],
)
def test_a_step_with_numbers_out_of_range_is_refused_and_the_model_stays(client, name, value):
    model = client.create()["model_id"]
    before = client.forward_backward(model, ROWS)
    assert f"{name}={value} must be at least 0 and below" in client.step(model, **{name: value})["error"]
    assert client.forward_backward(model, ROWS, only=True) == before
    assert "metrics" in client.step(model)


def test_what_is_cut_off_is_the_clients_mistake(client, caplog):
    model = client.create()["model_id"]
    whole = message(model, ROWS, "ppo")
    tokens = sized(1, sized(1, sized(1, b"\1\2\3")))
    option = sized(7, sized(1, "clip_low_threshold") + sized(2, sized(1, "")))
    for body in (whole + sized(3, tokens), whole + option):
        code, _, found = client.send("forward_backward", body, {"Content-Type": PROTOBUF})
        found = json.loads(found) if code == 400 else client.result(json.loads(found))
        assert found["category"] == "user" and "cut off" in found["error"]
    refused = client.do("optim_step", model_id=model, adam_params=[1e-2])
    assert refused["category"] == "user" and "adam_params must be an object" in refused["error"]
    code, _, found = client.send("optim_step", b"[" * 100_000)
    assert code == 400 and json.loads(found)["category"] == "user"
    assert "failed." not in caplog.text


# -------------------------------------------------------------------------------------------------------- checkpoints


def test_a_saved_state_goes_on_bit_for_bit(client):
    model = client.create()["model_id"]
    client.forward_backward(model, ROWS)
    client.step(model)
    path = client.do("save_weights", model_id=model, path="a")["path"]
    client.begin()  # another program
    body = {"session_id": client.session, "model_seq_id": 0, "path": path, "optimizer": True}
    assert client.do("load_weights", **body)["model_id"] == f"{client.session}:train:0"
    ends = []
    for name in (model, f"{client.session}:train:0"):
        client.forward_backward(name, RL, "ppo", names=RL_NAMES)
        client.step(name)
        end = folder_of(client, client.do("save_weights", model_id=name, path="end")["path"])
        ends.append([codec.read_tensors(end / f"{file}.safetensors") for file in ("adapter_model", "training")])
    for mine, theirs in zip(*ends, strict=True):
        assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_a_state_is_loaded_into_a_model_with_and_without_its_optimizer(client):
    model = client.create()["model_id"]
    client.forward_backward(model, ROWS)
    client.step(model)
    path = client.do("save_weights", model_id=model, path="a")["path"]
    saved = client.forward_backward(model, ROWS)
    for with_optimizer, steps in ((True, 1), (False, 0)):
        client.forward_backward(model, ROWS)  # gradients of before, which are dropped
        assert client.do("load_weights", model_id=model, path=path, optimizer=with_optimizer)["path"] == path
        assert client.forward_backward(model, ROWS, only=True) == saved
        assert client.training._runs[model].policy.steps == steps
        assert "there are no gradients" in client.step(model)["error"]


def test_a_killed_save_leaves_the_old_one(client, monkeypatch):
    model = client.create()["model_id"]
    path = client.do("save_weights", model_id=model, path="a")["path"]
    old = client.forward_backward(model, ROWS)
    client.step(model)
    with (
        monkeypatch.context() as patched
    ):  # as a killed process leaves it: half of the files, and no one to remove them
        patched.setattr(codec, "save_tree", lambda *_: (_ for _ in ()).throw(MemoryError("killed")))
        patched.setattr(Store, "abort", lambda *_: None)
        died = client.do("save_weights", model_id=model, path="a", overwrite=True)
        assert died["category"] == "server" and "killed" in died["error"]
    assert client.do("load_weights", model_id=model, path=path, optimizer=True)["path"] == path
    assert client.forward_backward(model, ROWS) == old
    client.step(model)
    new = client.forward_backward(model, ROWS, only=True)
    with monkeypatch.context() as patched:  # killed behind the commit, where the old one is there too
        patched.setattr(policies, "remove", lambda *_: None)
        client.do("save_weights", model_id=model, path="a", overwrite=True)
    client.do("load_weights", model_id=model, path=path, optimizer=True)
    assert client.forward_backward(model, ROWS, only=True) == new
    client.do("save_weights", model_id=model, path="a", overwrite=True)
    place = folder_of(client, path)  # killed between the two renames by which one takes the place of another
    hidden = Store(place.parent)._hidden("old", 2).name.rpartition(".")[0]
    place.rename(place.with_name(f"{hidden}.0dead"))
    assert client.do("load_weights", model_id=model, path=path, optimizer=True)["path"] == path
    assert client.forward_backward(model, ROWS, only=True) == new


def test_what_cannot_be_saved_or_loaded_is_named(client):
    model = client.create()["model_id"]
    path = client.do("save_weights", model_id=model, path="a")["path"]
    assert "is there already" in client.do("save_weights", model_id=model, path="a")["error"]
    assert client.do("save_weights", model_id=model, path="a", overwrite=True)["path"] == path
    assert "is no path of a checkpoint" in client.do("save_weights", model_id=model, path="../b")["error"]
    missing = client.do("load_weights", model_id=model, path=path + "2", optimizer=False)
    assert "There is no checkpoint in" in missing["error"] and missing["category"] == "user"
    other = client.create(rank=2)["model_id"]
    assert "of another shape" in client.do("load_weights", model_id=other, path=path, optimizer=False)["error"]
    file = folder_of(client, path) / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\0\0\0\1")
    assert "adapter_model.safetensors" in client.do("load_weights", model_id=model, path=path, optimizer=False)["error"]
    for outside in ("/etc/passwd", "tinker://../weights/a", path + "/../a"):
        refused = client.do("load_weights", model_id=model, path=outside, optimizer=False)
        assert "is no path of a checkpoint" in refused["error"]
    body = {"session_id": client.session, "model_seq_id": 8, "path": path, "optimizer": True}
    assert "adapter_model.safetensors" in client.do("load_weights", **body)["error"]
    refused = client.json("get_info", {"model_id": f"{client.session}:train:8"}, 400)
    assert "This model could not be made" in refused["error"]


# ----------------------------------------------------------------------------------------------------------- sampling


def test_a_sampler_has_exactly_the_weights_of_its_step(client):
    model = client.create()["model_id"]
    for _ in range(2):
        client.forward_backward(model, ROWS)
        client.step(model)
    early = client.sampler(model)
    path = client.do("save_weights_for_sampler", model_id=model, path="early")["path"]
    for _ in range(3):
        client.forward_backward(model, ROWS)
        client.step(model)
    late, saved, base = client.sampler(model), client.sampler(path=path), client.sampler()
    hand = twin(client, folder_of(client, path))
    for sampler, policy in ((early, hand), (late, None), (base, tiny.causal_lm()), (saved, hand), (early, hand)):
        [(tokens, logps, stopped)], prompt = client.sample(
            sampler, [5, 6, 7], client.samplers, more={"prompt_logprobs": True}, **GREEDY
        )
        client.samplers += 1
        if policy is None:
            assert logps != expected  # noqa: F821  # of the round before
            continue
        text = [5, 6, 7, *tokens]
        with torch.no_grad():
            expected = logps_of(policy, text[:-1], text[1:]).tolist()
            logits = policy(input_ids=torch.tensor([text[:-1]])).logits[0, 2:]
        assert tokens == logits.argmax(-1).tolist() and not stopped
        assert logps == pytest.approx(expected[2:], abs=1e-5)
        assert math.isnan(prompt[0]) and prompt[1:] == pytest.approx(expected[:2], abs=1e-5)


def test_a_seed_gives_the_same_whoever_else_asks(client):
    sampler = client.sampler()
    alone, _ = client.sample(sampler, [5, 6, 7], 0, 3, seed=7, max_tokens=5, stop=[])
    answers = [client.ask(sampler, [5, 6, 7], seq, 3, seed=seq, max_tokens=5, stop=[]) for seq in range(5, 9)]
    answers += [client.ask(sampler, [8] * 20, 9, 1, max_tokens=9, top_k=3, temperature=0.5)]
    together = [client.result(answer) for answer in answers]
    again, _ = client.sample(sampler, [5, 6, 7], 10, 3, seed=7, max_tokens=5, stop=[])
    rows = [dict(fields(value)) for field, value in fields(together[2]) if field == 1]
    assert [floats(row[3]) for row in rows] == [pytest.approx(logps, abs=1e-5) for _, logps, _ in alone]
    assert [row[0] for row in again] == [row[0] for row in alone] and len({tuple(row[0]) for row in alone}) == 3
    assert [len(answer["sample_sequence_ids"]) for answer in answers] == [3, 3, 3, 3, 1]


def test_completions_end_where_they_are_told(client):
    sampler, tokenizer = client.sampler(), client.base.tokenizer
    [(free, _, _)], _ = client.sample(sampler, [5, 6, 7], 0, **GREEDY)
    place = next(i for i in range(1, 6) if free[i] not in free[:i])
    [(tokens, logps, stopped)], _ = client.sample(sampler, [5, 6, 7], 1, **GREEDY | {"stop": [free[place]]})
    assert tokens == free[: place + 1] and stopped and len(logps) == len(tokens)
    text = tokenizer.decode([free[place]])
    [(tokens, _, stopped)], _ = client.sample(sampler, [5, 6, 7], 2, **GREEDY | {"stop": text})
    assert stopped and text in tokenizer.decode(tokens) and text not in tokenizer.decode(tokens[:-1])
    bias = client.model.get_output_embeddings().weight
    with torch.no_grad():  # now the end of a text is the most probable token
        bias[1] = 100 * bias.abs().max() * torch.sign(bias[free[0]])
    [(ends, _, stopped)], _ = client.sample(sampler, [5, 6, 7], 3, **GREEDY | {"stop": None})
    [(goes_on, _, _)], _ = client.sample(sampler, [5, 6, 7], 4, **GREEDY)
    assert (ends[-1] == 1) == stopped and len(goes_on) == 6


def test_the_last_tokens_of_a_prompt_are_scored(client):
    prompt, more = [5, 6, 7, 8], {"prompt_logprobs": True, "prompt_logprobs_last_n": 2}
    _, found = client.sample(client.sampler(), prompt, 0, max_tokens=1, more=more)
    assert [math.isnan(value) for value in found] == [True, True, False, False]
    with torch.no_grad():
        assert found[2:] == pytest.approx(logps_of(tiny.causal_lm(), prompt[:-1], prompt[1:])[1:].tolist(), abs=1e-5)
    _, found = client.sample(client.sampler(), [5], 1, max_tokens=1, more={"prompt_logprobs": True})
    assert math.isnan(found[0])


def test_only_the_samplers_that_were_used_last_are_held(client, monkeypatch):
    monkeypatch.setattr(samplers, "HELD", 2)
    model = client.create()["model_id"]
    names = [client.sampler(model) for _ in range(3)]
    refused = client.result(client.ask(names[0], [5], 0, max_tokens=1))
    assert "are not held any more: 2 others were used since" in refused["error"]
    assert client.sample(names[2], [5], 0, max_tokens=1)
    assert client.send(f"samplers/{names[1]}", None, method="GET")[0] == 200


# ------------------------------------------------------------------------------------------------- what is not answered


@pytest.mark.parametrize(
    ("changes", "params", "said"),
    [
        ({"topk_sample_logprobs": 3}, {}, "topk_sample_logprobs is not done"),
        ({"prompt_alt_tokens_k": 3}, {}, "prompt_alt_tokens_k is not done"),
        ({"prompt": {"chunks": [{"type": "image", "data": ""}]}}, {}, "an image or sound"),
        ({"prompt": {"chunks": [{"tokens": [5, 400]}]}}, {}, "each of 0 to 383"),
        ({"prompt": {"chunks": []}}, {}, "a token at least"),
        ({}, {"max_tokens": 600}, "max_tokens=600 must be 1 to 509"),
        ({}, {"max_tokens": 0}, "max_tokens=0 must be 1 to 509"),
        ({}, {"temperature": -1}, "temperature=-1.0 must be at least 0"),
        ({}, {"temperature": math.nan}, "temperature=nan must be at least 0"),
        ({"num_samples": 0}, {}, "count=0 1 to 4096"),
    ],
)
def test_samples_that_are_not_done_are_named(client, changes, params, said):
    assert said in client.ask(client.sampler(), [5, 6, 7], 0, status=400, more=changes, **params)["error"]


def test_other_models_losses_and_optimizers_are_refused_by_name(client):
    assert "base_model='other' is not served here; this server has 'tiny'" in client.create(base="other")["error"]
    body = {"session_id": client.session, "model_seq_id": 9, "base_model": "tiny", "lora_config": {"rank": 2}}
    assert "'dimuon'" in client.do("create_model", **body, optimizer_config={"type": "dimuon"})["error"]
    model = client.create()["model_id"]
    assert "loss_fn='gspo' is not done here" in client.result(client.submit(model, ROWS, "gspo"))["error"]
    rows = [(*RL[0], [1.0] * 3)]
    more = client.result(client.submit(model, rows, "ppo", names=(*RL_NAMES, "mask")))
    assert "'mask' is what ppo does not read; leave it out" in more["error"]
    rows = [(*RL[0][:2], RL[0][2][:2], RL[0][3])]
    assert "data[0].logprobs must have 3" in client.result(client.submit(model, rows, "ppo", names=RL_NAMES))["error"]
    lacks = client.result(client.submit(model, [RL[0][:3]], "ppo", names=RL_NAMES[:2]))
    assert "'advantages' is what ppo needs; send it" in lacks["error"]
    assert "got no data" in client.result(client.submit(model, []))["error"]
    long = [([5] * 600, [5] * 600, [1.0] * 600)]
    assert "data[0] has 600 tokens; tiny reads 1 to 512" in client.result(client.submit(model, long))["error"]
    client.step(model)
    refused = client.do("optim_step", model_id=model, optimizer_params={"type": "dimuon"})
    assert "lacks 'adam_params'" in refused["error"]
    assert "optim_step has no 'momentum'" in client.step(model, momentum=0.9)["error"]


def test_strangers_and_what_is_too_long_are_turned_away(client, tmp_path, monkeypatch):
    def said(status, path, body=b"{}", **more):
        code, _, found = client.send(path, body, **more)
        assert code == status, found
        return json.loads(found)["error"]

    assert "X-API-Key is missing" in said(401, "create_session", headers={"X-API-Key": ""})
    assert "not at 'evil.example'" in said(403, "create_session", headers={"Host": "evil.example:80"})
    assert "POST training_runs is not done by this server" in said(404, "training_runs")
    assert "There is no session 'x'" in said(410, "session_heartbeat", b'{"session_id": "x"}')
    assert "There is no model 'x'" in said(404, "optim_step", b'{"model_id": "x", "adam_params": {}}')
    assert "There is no answer 'x'" in said(404, "retrieve_future", b'{"request_id": "x"}')
    assert "lacks 'session_id'" in said(400, "create_model", b'{"lora_config": {"rank": 1}}')
    assert "no object of JSON" in said(400, "create_session", b"[]")
    assert "cut off" in said(400, "forward_backward", b"\x0a\x7f", headers={"Content-Type": PROTOBUF})
    monkeypatch.setattr(server, "LONGEST", 100)
    assert "more than 100 bytes" in said(413, "create_session", b" " * 101)
    monkeypatch.undo()
    other = Client.__new__(Client)
    other.address, other.training = client.address, client.training
    client.training.key = "tml-secret"
    assert "X-API-Key is missing or wrong" in said(401, "create_session")
    assert client.send("create_session", b"{}", {"X-API-Key": "tml-secret"})[0] == 200


def test_a_session_that_ends_takes_its_models_along(client):
    model = client.create()["model_id"]
    client.json("session_heartbeat", {"session_id": client.session})
    client.json(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    assert "There is no model" in client.json("get_info", {"model_id": model}, 404)["error"]
    client.json("session_heartbeat", {"session_id": client.session}, 410)


def test_what_is_fixed_is_answered(client):
    assert client.json("client/config", {"sdk_version": "0.38.0"}) == {}
    assert client.json("telemetry", {"events": []}) == {"status": "accepted"}
    code, _, found = client.send("get_server_capabilities", None, method="GET")
    (one,) = json.loads(found)["supported_models"]
    assert code == 200 and (one["model_name"], one["max_context_length"]) == ("tiny", 512)
