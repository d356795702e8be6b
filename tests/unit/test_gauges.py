"""Gauges without a GPU: how many calls a contender makes, and in which order."""

from functools import partial

import numpy as np
import pytest

from autoflash import gauges
from autoflash.gauges import Gauged

COSTS = Gauged(9.0, 20.0, None, 2, 4096)


def test_launches_are_counted_once_no_host_is_timed_any_more(monkeypatch):
    order = []
    stubs = {"_waited_us": [20.0], "_host_us": 9.0, "_launches": 2, "_temporary_bytes": 4096}
    for name, result in stubs.items():
        noted = partial(lambda name, result, *_: order.append(name) or result, name, result)
        monkeypatch.setattr(f"autoflash.gauges.{name}", noted)
    found = gauges.gauged({"autoflash": [None], "one": [None]})
    assert found == {"autoflash": COSTS, "one": COSTS}
    assert order.index("_launches") > max(i for i, name in enumerate(order) if name == "_host_us")


@pytest.fixture
def clocked(monkeypatch):
    """A clock that goes on by so many seconds with each call of the function it gives."""
    now = [0.0]
    monkeypatch.setattr("autoflash.gauges.time.perf_counter", lambda: now[0])
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)

    def calls_of(seconds):
        made = []

        def call():
            now[0] += seconds
            made.append(seconds)

        return [call], made

    return calls_of


@pytest.mark.parametrize(
    ("seconds", "waited", "of_host"), [(1e-5, 1000, 200), (1e-2, 20, 50), (0.25, 5, 5)]
)
def test_a_slow_call_is_gauged_by_fewer_calls(clocked, seconds, waited, of_host):
    calls, made = clocked(seconds)
    samples = gauges._waited_us(calls, 0.5)
    assert len(samples) == len(made) == waited
    assert np.allclose(samples, 1e6 * seconds)
    made.clear()
    affordable = gauges._affordable(samples[0], 0.5)
    assert gauges._host_us(calls, affordable) == pytest.approx(1e6 * seconds)
    assert len(made) == of_host
