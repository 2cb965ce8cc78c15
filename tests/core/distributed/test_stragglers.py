"""Which process the others wait for, from the seconds of each."""

import pytest

from posttrain.core.distributed import stragglers
from posttrain.core.distributed.stragglers import Pace


class Hours:
    """A clock that is set by hand, and the seconds waited until now."""

    def __init__(self, monkeypatch):
        self.now = self.waited = 0.0
        monkeypatch.setattr(stragglers.time, "monotonic", lambda: self.now)

    def work(self, seconds):
        self.now += seconds

    def wait(self, seconds):
        self.now, self.waited = self.now + seconds, self.waited + seconds


def of_ranks(monkeypatch, seconds, step=1.0, data=None):
    """The records of rank 0 of a run whose ranks spend so many seconds of a step on their own, after two steps."""
    paces, said = [], []
    for rank, own in enumerate(seconds):
        hours = Hours(monkeypatch)
        pace = Pace(lambda hours=hours: hours.waited, rank)
        for _ in range(2):
            pace.resume()
            hours.work(own)
            hours.wait(step - own)
            pace.pause()
            hours.work(100)  # a save
        paces.append(pace)
        phases = {"data": 2 * (data or seconds)[rank] - 0.02}
        pace.gathering(lambda value: said.append(value) or [value], phases, 2)("metrics")
    values = paces[0].gathering(lambda mine: said[-len(seconds) :], {}, 2)("metrics")
    assert values == ["metrics"] * len(seconds)
    return paces[0]


def test_the_process_that_the_others_wait_for_is_named_once_with_what_it_does(monkeypatch, caplog):
    pace = of_ranks(monkeypatch, [0.1, 0.1, 0.9, 0.2])
    assert pace.logged(1.0) == {"perf/straggler": pytest.approx(9)}
    [record] = caplog.records
    assert "wait for rank 2 (" in record.message and "0.9 s of a step (1 s)" in record.message
    assert "goes into data: 0.89 s, and the median is 0.09 s" in record.message
    assert pace.logged(1.0) and len(caplog.records) == 1


def test_a_phase_that_does_not_explain_it_is_not_blamed(monkeypatch, caplog):
    assert of_ranks(monkeypatch, [0.1, 0.9], data=[0.05, 0.06]).logged(1.0)
    assert "not the data" in caplog.records[0].message


@pytest.mark.parametrize(
    ("seconds", "step"),
    [([0.5, 0.6, 0.7], 1.0), ([0.01, 0.05], 1.0), ([0.9], 1.0)],
    ids=["as fast", "of no weight", "alone"],
)
def test_ordinary_differences_are_not_logged(seconds, step, monkeypatch, caplog):
    assert of_ranks(monkeypatch, seconds, step).logged(step) == {}
    assert caplog.records == []
