"""Strategies replayed on the recorded table: what they find, against the trials they take."""

from functools import cache

import pytest
from recorded_tables import GPU, TABLE

from autoflash.effort import EFFORTS
from autoflash.promise import by_promise
from autoflash.search import STRATEGIES
from autoflash.search.replay import compared, default_first, replay, slowest_first

SEEDS = range(10)
TRIALS = (8, 16, 24, 32)


@cache
def promise(recorded_problem):
    """The problem's configs as the model has them before anything is compiled."""
    (recorded,) = (each for each in TABLE if each.problem == recorded_problem)
    return by_promise(default_first(recorded), recorded.problem, GPU, [], {}, {})


@cache
def found(name, order=default_first):
    """By the number of trials: how often the search came within 1 % and 5 % of the best."""
    return {row.trials: row for row in compared(TABLE, name, TRIALS, SEEDS, order)}


def test_a_replay_tries_no_more_than_asked_and_the_default_first():
    for name, strategy in STRATEGIES.items():
        tried = replay(TABLE[0], strategy, 12, 0)
        most = len(TABLE[0].timed) if name == "exhaustive" else 12
        assert len(set(tried)) == len(tried) == most
        assert tried[0] == TABLE[0].default


def test_a_hill_climb_finds_the_best_in_a_quarter_to_a_third_of_the_candidates():
    climbing = found("hill_climb")
    assert all(climbing[most].within_5_percent == 1.0 for most in TRIALS)
    assert climbing[8].within_1_percent >= 0.88
    assert climbing[16].within_1_percent >= 0.95
    assert climbing[24].within_1_percent >= 0.96
    assert climbing[16].worst <= 0.02


def test_a_quick_search_comes_as_near_as_a_climb_of_fewer_trials_that_waits_for_compilers():
    most = EFFORTS["quick"].max_candidates
    promising = found("promising", lambda recorded: promise(recorded.problem))[most]
    assert promising.within_1_percent >= found("hill_climb")[24].within_1_percent - 0.005
    assert promising.within_5_percent == 1.0 and promising.worst <= 0.02


def test_the_order_of_promise_finds_more_than_one_that_tells_nothing():
    ordered = found("promising", lambda recorded: promise(recorded.problem))
    blind = found("promising", slowest_first)
    for most in TRIALS:
        assert ordered[most].within_1_percent > blind[most].within_1_percent


@pytest.mark.parametrize("order", [default_first, slowest_first])
@pytest.mark.parametrize("most", TRIALS)
def test_a_hill_climb_is_more_often_within_a_percent_than_a_random_sample(order, most):
    climbing, sampling = found("hill_climb", order)[most], found("random", order)[most]
    assert climbing.within_1_percent > sampling.within_1_percent


def test_a_start_that_is_known_to_be_good_saves_trials():
    """Told the best as a second start, ten trials are enough everywhere."""
    for recorded in TABLE:
        best = min(recorded.timed, key=lambda config: recorded.timed[config].median_us)
        order = list(dict.fromkeys([recorded.default, best, *recorded.timed]))
        tried = replay(recorded, STRATEGIES["hill_climb"], 10, 0, order, starts=2)
        assert best in tried[:2]
