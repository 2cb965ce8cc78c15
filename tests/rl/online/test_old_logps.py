"""The log-probabilities of the policy that sampled, without a trainer: taken from the engine, or computed again."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from posttrain.core.logging.metrics import Metrics
from posttrain.rl.online.arguments import RolloutConfig
from posttrain.rl.online.old_logps import OldLogps
from posttrain.rl.samples.samples import Rollout, Sample
from tests import tiny

ALONE = SimpleNamespace(precision="no", device=torch.device("cpu"), is_main=True, gather_object=lambda value: [value])
OLD = dict(needs_old_logps=True, needs_kl_of_samples=False, _corrects_engine=False, top_entropy_quantile=1.0)


@pytest.fixture
def old(tmp_path):
    owner = SimpleNamespace(dist=ALONE, model=tiny.causal_lm(), generator=SimpleNamespace(), metrics=Metrics())
    made = OldLogps(owner, RolloutConfig(str(tmp_path), use_cpu=True, report_to="none"))
    made.begin_run()
    return made


def samples_of(*logps, **changes):
    rows = (Sample({}, "", [1], [2] * len(row), logps=list(row), is_exact=True) for row in logps)
    return [replace(row, **changes) for row in rows]


def ask(old, samples, policys, step=0, **needs):
    """(what `old` makes of it, with a reference of zeros; how often it computed log-probabilities)."""
    calls = []

    def logps_of(model, rollout, with_entropy):
        calls.append(with_entropy)
        found = torch.tensor(policys)
        return [found, -found] if with_entropy else [found]

    vars(old.owner).update(
        OLD | needs, rollout_maker=SimpleNamespace(logps_of=logps_of), state=SimpleNamespace(global_step=step)
    )
    old.owner.complete_rollout = lambda rollout, _: replace(rollout, ref_logps=0.0 * rollout.loss_mask)
    return *old.of(Rollout.of(samples), samples), len(calls)


def test_an_engine_is_compared_once_in_a_run_and_believed_from_then_on(old):
    sampled = samples_of([-1.0, -2.0])
    made, kl, calls = ask(old, sampled, [[-1.0, -2.0]], needs_kl_of_samples=True)
    assert calls == 1 and torch.equal(made.old_logps, made.sampling_logps) and kl.tolist() == [-3.0]
    assert ask(old, sampled, [[9.0, 9.0]])[2] == 0 and not old.recomputes
    old.begin_run()
    assert ask(old, sampled, [[-1.0, -2.0]])[2] == 1


def test_an_engine_that_is_wrong_is_not_believed(old, caplog):
    made, _, calls = ask(old, samples_of([-1.0, -2.0]), [[-1.0, -2.5]])
    assert calls == 1 and made.old_logps.tolist() == [[-1.0, -2.5]] and old.recomputes
    assert "are not those of the policy: they differ by 0.5" in caplog.text
    made, _, calls = ask(old, samples_of([-1.0, -2.0]), [[-3.0, -3.0]])
    assert calls == 1 and made.old_logps.tolist() == [[-3.0, -3.0]]


def test_nothing_is_computed_that_the_loss_does_not_read(old):
    made, kl, calls = ask(old, samples_of([-1.0]), [[-1.0]], needs_old_logps=False)
    assert calls == 0 and made.old_logps is None and kl is None
    old.compared = True
    made, kl, calls = ask(old, samples_of([-1.0]), [[-1.0]], needs_old_logps=False, needs_kl_of_samples=True)
    assert calls == 0 and made.old_logps is None and kl.tolist() == [-1.0]


def test_uncertain_tokens_are_marked_by_the_entropies_of_the_policy(old):
    old.owner.get_high_entropy_mask = lambda entropies, mask, least: (entropies > 1 + least) & mask
    made, _, calls = ask(old, samples_of([-1.0, -2.0]), [[-1.0, -2.0]], top_entropy_quantile=0.5)
    assert calls == 1 and made.entropy_mask.tolist() == [[False, True]]


def test_completions_of_earlier_weights_are_weighted(old):
    needs = dict(_corrects_engine=True, step=2)
    made, _, _ = ask(old, samples_of([-1.0, -2.0], versions=[0, 0]), [[-1.0, -1.5]], **needs)
    assert made.correction.shape in ((1, 2), (1, 1)) and made.old_logps.tolist() == [[-1.0, -1.5]]
    with pytest.raises(ValueError, match="returned no log-probabilities, by which they are weighted"):
        unknown = [Sample({}, "", [1], [2], versions=[0], is_exact=True)]
        ask(old, unknown, [[-1.0]], **needs)
