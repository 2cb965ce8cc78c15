"""Log-probabilities of completions: padded or behind one copy of their prompt, they are those of each text alone."""

from dataclasses import replace

import pytest
import torch

from posttrain.lm.attention.varlen_attention import enable_segments
from posttrain.rl.policy.logprobs import completion_logps
from posttrain.rl.samples.samples import Rollout, Sample
from tests import tiny


def rollout():
    prompts = [[5, 9, 14, 20], [7], [40, 41]]
    rows = [(0, [50, 51]), (0, [52]), (0, [53, 54, 55]), (1, [60, 61]), (1, [62, 63, 64]), (2, [70])]
    samples = [Sample({}, "", prompts[p], ids, finished=len(ids) > 1) for p, ids in rows]
    samples[2] = replace(samples[2], learn=[True, False, True])
    return Rollout.of(samples), samples


def alone(model, sample, temperature=1.0):
    row = torch.tensor([sample.prompt_ids + sample.ids])
    logps = (model(row).logits[0] / temperature).log_softmax(-1)
    first = len(sample.prompt_ids) - 1
    places = range(first, first + len(sample.ids))
    entropies = -(logps.exp() * logps).sum(-1)
    return torch.stack([logps[t, row[0, t + 1]] for t in places]), entropies[first : first + len(sample.ids)]


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("size", [6, 4, 1])
@pytest.mark.parametrize("arch", ["qwen3", "gpt2"])
def test_they_are_those_of_each_text_alone(arch, size, share):
    model, (made, samples) = tiny.causal_lm(arch), rollout()
    model.eval()
    expected = [alone(model, sample, 0.7) for sample in samples]
    if share:
        enable_segments(model)
    seen = 0
    for batch in made.micro_batches(size, share=share):
        found = completion_logps(model, batch, temperature=0.7, with_entropy=True)
        for logps, entropies, mask in zip(found.logps, found.entropies, batch["loss_mask"], strict=True):
            learn = torch.tensor(samples[seen].learn or [True] * len(samples[seen].ids))
            assert mask[: len(learn)].tolist() == learn.float().tolist() and not mask[len(learn) :].any()
            for values, ours in zip(expected[seen], (logps, entropies), strict=True):
                torch.testing.assert_close(ours[: len(learn)], values * learn, atol=1e-5, rtol=1e-5)
                assert not ours[len(learn) :].any()
            seen += 1
    assert seen == 6


@pytest.mark.parametrize("share", [False, True])
def test_the_gradient_is_that_of_each_text_alone(share):
    model, (made, samples) = tiny.causal_lm(), rollout()
    weights = torch.linspace(-1, 1, 6)
    sum(
        w * (alone(model, s)[0] * torch.tensor(s.learn or [1] * len(s.ids))).sum()
        for w, s in zip(weights, samples, strict=True)
    ).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    enable_segments(model)
    batch = made.micro_batches(6, share=share)[0]
    (completion_logps(model, batch).logps * weights.unsqueeze(1)).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], atol=1e-5, rtol=1e-4, msg=name)


def test_whole_logits_give_the_same_and_entropies_with_a_gradient():
    model, (made, _) = tiny.causal_lm(), rollout()
    batch = made.micro_batches(6)[0]
    usual = completion_logps(model, batch, 0.7, with_entropy=True)
    whole = completion_logps(model, batch, 0.7, with_entropy=True, entropy_gradient=True)
    torch.testing.assert_close(whole.logps, usual.logps, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(whole.entropies.detach(), usual.entropies, atol=1e-5, rtol=1e-5)
    assert not usual.entropies.requires_grad
    whole.entropies.sum().backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_a_shared_prompt_is_read_once():
    made, _ = rollout()
    padded, shared = (made.micro_batches(6, share=share)[0]["input_ids"].numel() for share in (False, True))
    # prompts of 4, 1 and 2 tokens but their last ones, and each of 6 completions with one in front of it instead of its
    # own
    assert (padded, shared) == (6 * 7, 3 + 0 + 1 + 12)


def test_truncated_completions_can_be_left_out():
    made = Rollout.of(rollout()[1], mask_truncated=True)
    assert made.loss_mask.sum(1).tolist() == [2, 0, 2, 2, 3, 0]


def test_a_micro_batch_holds_whole_trajectories():
    samples = rollout()[1]
    made = Rollout.of([samples[0], replace(samples[1], others=(samples[2], samples[3])), samples[4]])
    assert made.num_trajectories == 3 and made.trajectories.tolist() == [0, 1, 1, 1, 2]
    assert made.of_trajectories(torch.tensor([1.0, 2, 3, 4, 5])).tolist() == [1, 9, 5]
    made = replace(made, advantages=made.of_completions(torch.tensor([1.0, 2, 3])))
    first, second = made.micro_batches(2)
    assert first["trajectories"].tolist() == [0, 1, 1, 1] and first["first_sequences"].tolist() == [0, 1]
    assert first["advantages"].tolist() == [1, 2, 2, 2] and second["trajectories"].tolist() == [0]
    assert first["tokens_per_row"] == made.loss_mask.sum() / 3


def test_a_batch_without_a_loss_has_a_graph():
    model, made = tiny.causal_lm(), Rollout.of([Sample({}, "", [5], [6, 7])], mask_truncated=True)
    logps = completion_logps(model, made.micro_batches(1)[0]).logps
    assert logps.sum().item() == 0 and logps.requires_grad


def test_a_rollout_comes_back_from_its_state():
    made, _ = rollout()
    again = Rollout(**made.state_dict())
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in made.state_dict().items())
