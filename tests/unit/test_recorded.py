"""The recorded table: what it holds, and that it comes back as it was written."""

import json
from dataclasses import replace
from random import Random
from statistics import median

import pytest
from recorded_tables import GPU, PATH, TABLE

from autoflash.config import Config
from autoflash.families import family_of, why_refused
from autoflash.problem import Problem
from autoflash.records import Decision, Trial
from autoflash.search.recorded import (
    FEWEST_CONFIGS,
    FEWEST_SAMPLES,
    read_table,
    recorded_from,
    write_table,
)

PROBLEM = Problem("prefill", "bf16", 1, 4, 4, 64, 128, 128)
CONFIGS = [Config.of("prefill", {"BLOCK_M": i}) for i in range(FEWEST_CONFIGS)]


def trial(config, us, stage="screen", samples=5, **changes):
    timed = {"median_us": us, "p20_us": us, "p80_us": us, "samples": samples, "regime": "graph"}
    return Trial(PROBLEM, config, "d", "correct", stage, **timed | changes)


def decision(default):
    return Decision(PROBLEM, "d", default, 1.0, default, 1.0, 0.0, 0.0, 0.0)


def recorded(trials, default=CONFIGS[3]):
    return recorded_from(trials, {PROBLEM: decision(default)})


def test_the_table_says_where_it_is_from_and_is_small():
    provenance = json.loads(PATH.read_text().splitlines()[0])
    assert provenance["gpu"] == GPU.name
    assert {"driver", "torch", "triton", "date", "commands", "protocol"} <= set(provenance)
    assert PATH.stat().st_size < 1_000_000
    assert "/tmp" not in PATH.read_text()


def test_the_table_holds_enough_valid_configs_of_both_ops_with_spread_times():
    assert {each.problem.op for each in TABLE} == {"prefill", "decode"}
    assert len({each.problem for each in TABLE}) == len(TABLE) >= 30
    for each in TABLE:
        assert len(each.timed) >= FEWEST_CONFIGS
        for config, timed in each.timed.items():
            assert why_refused(each.problem, config, GPU) is None
            assert 0 < timed.p20_us <= timed.median_us <= timed.p80_us
            assert timed.samples >= FEWEST_SAMPLES
        default = family_of(each.default.family).default(each.problem, GPU)
        assert each.default == default, each.problem


def test_a_table_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "table.jsonl"
    write_table(path, TABLE, {"gpu": "x"})
    again = read_table(path)
    assert again == TABLE
    assert [list(each.timed) for each in again] == [list(each.timed) for each in TABLE]


def test_lone_launches_other_regimes_and_failures_are_left_out():
    good = [trial(config, 10.0 + i) for i, config in enumerate(CONFIGS)]
    more = [Config.of("prefill", {"BLOCK_M": 100 + i}) for i in range(3)]
    bad = [trial(more[0], 900.0, samples=1), trial(more[1], 5.0, regime="eager")]
    bad.append(trial(more[2], None, samples=0, regime="none"))
    (each,) = recorded(good + bad)
    assert set(each.timed) == set(CONFIGS) and each.default == CONFIGS[3]
    assert each.best_us == 10.0 and each.loss(CONFIGS[10]) == pytest.approx(1.0)
    assert recorded(good[1:]) == []  # too few to be told apart
    assert recorded(good, default=more[0]) == []  # the default has no good time


def test_an_interleaved_time_counts_before_others_and_more_samples_before_fewer():
    rest = [trial(config, 50.0) for config in CONFIGS[2:]]
    first = [trial(CONFIGS[0], 20.0, "final", 11), trial(CONFIGS[0], 30.0, samples=16)]
    second = [trial(CONFIGS[1], 21.0, samples=16), trial(CONFIGS[1], 31.0, samples=5)]
    for trials in (first + second, first[::-1] + second[::-1]):
        (each,) = recorded([*trials, *rest])
        assert each.timed[CONFIGS[0]].median_us == 20.0
        assert each.timed[CONFIGS[1]].median_us == 21.0


def test_drawn_samples_have_the_recorded_median_and_spread():
    timed = replace(next(iter(TABLE[0].timed.values())), median_us=100.0, p20_us=99.0, p80_us=101.0)
    drawn = sorted(timed.draw(Random(0), 4000))
    assert median(drawn) == pytest.approx(100.0, abs=0.1)
    assert drawn[800] == pytest.approx(99.0, abs=0.1)
    assert drawn[3200] == pytest.approx(101.0, abs=0.1)
