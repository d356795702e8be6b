"""What benchmarks/pace.py says of samples that were taken in turn."""

import importlib
from pathlib import Path

import pytest

from autoflash.config import Config
from autoflash.families import why_refused
from autoflash.gpu import known
from autoflash.runtime.hopper_validity import prefill_hopper_default


@pytest.fixture
def pace(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    return importlib.import_module("pace")


def test_what_all_share_in_a_round_is_no_scatter(pace):
    found = pace.scatter({"a": [99.0, 198.0, 49.5], "b": [101.0, 202.0, 50.5]})
    assert found["a"] == pytest.approx((-1.0, 0.0), abs=1e-9)
    assert found["b"] == pytest.approx((1.0, 0.0), abs=1e-9)


def test_who_is_slow_in_one_round_of_two_scatters(pace):
    mean, deviation = pace.scatter({"a": [100.0, 106.0], "b": [100.0, 94.0]})["a"]
    assert mean == pytest.approx(3.0) and deviation == pytest.approx(6 / 2**0.5)


def test_its_configs_are_ones_that_a_search_may_try(pace):
    gpu = known("NVIDIA_H200")
    default = prefill_hopper_default(pace.PROBLEM, gpu)
    configs = [Config.of("prefill_hopper", {**default, **other}) for other in pace.CHANGES]
    assert len(set(configs)) == len(configs)
    assert [why_refused(pace.PROBLEM, config, gpu) for config in configs] == [None] * 4
