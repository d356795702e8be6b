"""Strategies: what they propose, and the same for the same seed."""

import pytest

from autoflash.config import Config
from autoflash.effort import EFFORTS, TimeLimit, effort_of
from autoflash.errors import AutoflashError
from autoflash.search import STRATEGIES, strategy_for
from autoflash.search.exhaustive import exhaustive
from autoflash.search.random import random

CONFIGS = [Config.of("prefill", {"BLOCK_M": i}) for i in range(300)]


def proposed(strategy, most, seed=0):
    proposals = strategy(CONFIGS, most, seed)
    found, batch = [], next(proposals)
    while batch:
        found += batch
        try:
            batch = proposals.send({})
        except StopIteration:
            break
    return found


def test_exhaustive_proposes_every_candidate_once():
    assert proposed(exhaustive, 10) == CONFIGS


def test_random_proposes_the_default_first_and_no_candidate_twice():
    found = proposed(random, 40)
    assert found[0] == CONFIGS[0]
    assert len(found) == len(set(found)) == 40


def test_random_depends_on_the_seed_alone():
    assert proposed(random, 40, seed=1) == proposed(random, 40, seed=1)
    assert proposed(random, 40, seed=1) != proposed(random, 40, seed=2)


def test_random_of_more_than_there_are_proposes_all():
    assert sorted(proposed(random, 1000)) == sorted(CONFIGS)


def test_auto_is_exhaustive_up_to_two_hundred_candidates():
    assert strategy_for("auto", 200, 1000) is exhaustive
    assert strategy_for("auto", 201, 1000) is random
    assert strategy_for("auto", 100, 24) is random  # more than the effort allows


def test_every_strategy_proposes_the_default_first():
    for strategy in STRATEGIES.values():
        assert proposed(strategy, 5)[0] == CONFIGS[0]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AutoflashError, match="known are auto, exhaustive, random"):
        strategy_for("anneal", 1, 1)
    with pytest.raises(AutoflashError, match="known are quick, standard, max"):
        effort_of("extreme")


def test_more_effort_never_measures_less():
    quick, standard, most = EFFORTS.values()
    for less, more in ((quick, standard), (standard, most)):
        assert less.max_candidates < more.max_candidates
        assert less.rounds < more.rounds and less.finalists < more.finalists
        assert sum(less.rungs) < sum(more.rungs)


def test_a_share_of_a_time_limit_ends_before_it():
    limit = TimeLimit(100)
    assert 24 < limit.share(4).left_s <= 25
    assert not limit.over and TimeLimit(0).over
    assert not TimeLimit(None).finite and not TimeLimit(None).share(4).finite
