"""A prompt read once for all its completions gives the numbers of each prompt and completion read alone."""

import pytest
import torch
from torch.nn import functional as F

from posttrain.lm.attention.varlen_attention import enable_segments
from posttrain.rl.policy.logprobs import padded_rows, reorder, score_completions, shared_rows
from tests import tiny

GROUPS = [
    ([5, 6, 7, 8], [[9, 10, 11], [12, 13], [14, 15, 16, 17]]),
    ([20], [[21, 22], [23]]),
    ([], [[30, 31, 32], [33, 34]]),
    ([40, 41], [[42]]),
]


def by_hand(model, temperature=1.0):
    """(log-probabilities, entropies) of the scored tokens of each completion, from whole logits of one row at a
    time.
    """
    found = []
    for prompt, completions in GROUPS:
        for completion in completions:
            ids = torch.tensor([prompt + completion])
            distribution = (model(input_ids=ids).logits[0] / temperature).log_softmax(-1)[:-1]
            predicted = slice(max(len(prompt) - 1, 0), None)
            logps = distribution.gather(1, ids[0, 1:, None])[predicted, 0]
            found.append((logps, -(distribution.exp() * distribution).sum(-1)[predicted]))
    return found


@pytest.mark.parametrize("layout", ["shared", "flat", "padded"])
@pytest.mark.parametrize(("arch", "temperature"), [("qwen3", 1.0), ("llama", 0.7), ("gpt2", 1.0)])
def test_every_layout_gives_the_numbers_of_each_completion_alone(layout, arch, temperature):
    model = tiny.causal_lm(arch, initializer_range=0.2)
    expected = by_hand(model, temperature)
    enable_segments(model)
    batch = padded_rows(GROUPS, pad_token_id=0) if layout == "padded" else shared_rows(GROUPS, layout == "shared")
    scores = score_completions(model, batch, temperature=temperature, stats=("entropy",))
    assert scores.lengths.tolist() == [len(logps) for logps, _ in expected] == [3, 2, 4, 2, 1, 2, 1, 1]
    for logps, entropy, mask, (wanted, wanted_entropy) in zip(
        scores.logps, scores.stats["entropy"], scores.mask, expected, strict=True
    ):
        torch.testing.assert_close(logps[mask], wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(entropy[mask], wanted_entropy, rtol=1e-5, atol=1e-5)
        assert not logps[~mask].any()


def test_gradients_are_those_of_each_completion_alone():
    gradients = []
    for layout in ("by hand", "shared"):
        model = tiny.causal_lm(initializer_range=0.2)
        if layout == "by hand":
            logps = torch.stack([logps.sum() for logps, _ in by_hand(model)])
        else:
            enable_segments(model)
            logps = score_completions(model, shared_rows(GROUPS)).logps.sum(1)
        F.logsigmoid(logps * torch.linspace(-0.1, 0.1, len(logps))).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected, rtol=1e-4, atol=1e-6, msg=name)


def test_a_prompt_is_there_once():
    batch = shared_rows([([5, 6, 7, 8], [[9, 10, 11], [12, 13]])])
    # The prompt but its last token; then twice its last token, and each completion but its last.
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 9, 10, 8, 12]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 4, 5, 3, 4]]
    assert batch["shift_labels"].tolist() == [[-100, -100, -100, 9, 10, 11, 12, 13]]
    assert batch["completion_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]


def test_completions_can_be_put_in_another_order():
    model = tiny.causal_lm()
    enable_segments(model)
    for batch in (shared_rows(GROUPS), padded_rows(GROUPS, 0)):
        order = [7, 0, 2, 1, 3, 6, 5, 4]
        straight = score_completions(model, batch).logps.sum(1)
        torch.testing.assert_close(score_completions(model, reorder(batch, order)).logps.sum(1), straight[order])


def test_a_single_token_behind_nothing_has_no_probability():
    batch = shared_rows([([], [[3], [4, 5]])])
    model = tiny.causal_lm()
    enable_segments(model)
    assert score_completions(model, batch).lengths.tolist() == [0, 1]
