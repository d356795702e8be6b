"""Strategies: what they propose, and the same for the same seed."""

import pytest

from autoflash.config import Config
from autoflash.effort import EFFORTS, TimeLimit, effort_of
from autoflash.errors import AutoflashError
from autoflash.search import CLIMB_FROM, STRATEGIES, likely_next, strategy_for
from autoflash.search.exhaustive import exhaustive
from autoflash.search.hill_climb import hill_climb, neighbours
from autoflash.search.promising import promising
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


def test_random_draws_the_same_configs_in_whatever_order_they_are_given():
    default, *others = CONFIGS
    drawn = next(random([default, *others[::-1]], 40, 1))
    assert drawn[0] == default and drawn[1] > drawn[2]  # in the order given
    assert set(drawn) == set(proposed(random, 40, seed=1))


def test_random_of_more_than_there_are_proposes_all():
    assert sorted(proposed(random, 1000)) == sorted(CONFIGS)


def test_auto_is_exhaustive_up_to_two_hundred_candidates():
    assert strategy_for("auto", 200, 1000) is exhaustive
    assert strategy_for("auto", 201, 1000) is hill_climb
    assert strategy_for("auto", 24, 24) is exhaustive


def test_auto_climbs_only_where_the_effort_has_trials_enough_for_many_steps():
    assert strategy_for("auto", 150, CLIMB_FROM) is hill_climb
    assert strategy_for("auto", 150, CLIMB_FROM - 1) is promising


def test_promising_proposes_in_one_batch_the_first_and_a_sample_of_the_rest():
    (batch,) = list(promising(CONFIGS, 24, 0))
    assert batch[:16] == CONFIGS[:16]
    assert len(batch) == len(set(batch)) == 24
    assert batch[16:] == [config for config in CONFIGS if config in set(batch[16:])]


def test_promising_draws_its_sample_by_the_seed_alone():
    default, *others = CONFIGS
    (one,), (same,) = promising(CONFIGS, 24, 1), promising(CONFIGS, 24, 1)
    (other,) = promising(CONFIGS, 24, 2)
    assert one == same != other and one[:16] == other[:16]
    turned = [default, *others[:15], *others[:14:-1]]  # the unpromising in another order
    (drawn,) = promising(turned, 24, 1)
    assert set(drawn) == set(one)


def test_promising_of_more_than_there_are_proposes_all():
    assert list(promising(CONFIGS[:10], 24, 0)) == [CONFIGS[:10]]


def test_only_a_climb_has_candidates_that_are_likely_to_be_next():
    best = grid_config(64, 16)
    likely = set(likely_next("hill_climb", 24, best, GRID))
    assert likely == set(neighbours(best, GRID))
    for name in ("exhaustive", "promising", "random", "auto"):
        assert not likely_next(name, 24, best, GRID)


def grid_config(block_m, block_n, load="pointer"):
    knobs = {"BLOCK_M": block_m, "BLOCK_N": block_n, "LOAD": load}
    return Config.of("prefill", knobs)


SIZES = (16, 32, 64, 128, 256, 512)
GRID = [grid_config(m, n, load) for m in SIZES for n in SIZES for load in ("pointer", "descriptor")]


def climbed(us_of, most, seed=0, starts=1, candidates=GRID):
    """The batches of a hill climb over made-up times; None is a failure."""
    times, batches = {}, []
    proposals = hill_climb(candidates, most, seed, starts)
    batch = next(proposals)
    while batch:
        batches.append(batch)
        times |= {config: us for config in batch if (us := us_of(config)) is not None}
        try:
            batch = proposals.send(times)
        except StopIteration:
            break
    return batches


def valley(config):
    """One optimum, which single steps lead to: BLOCK_M 512, BLOCK_N 512, descriptors."""
    load = 5 if config["LOAD"] == "pointer" else 0
    return 100 + 10 * (10 - SIZES.index(config["BLOCK_M"]) - SIZES.index(config["BLOCK_N"])) + load


def test_a_neighbour_is_one_step_of_one_knob_away():
    found = set(neighbours(grid_config(64, 16), GRID))
    assert found == {
        grid_config(32, 16),
        grid_config(128, 16),
        grid_config(64, 32),
        grid_config(64, 16, "descriptor"),
    }


def test_a_step_goes_over_values_that_are_no_candidates():
    holed = [config for config in GRID if config["BLOCK_M"] != 128]
    assert grid_config(256, 16) in neighbours(grid_config(64, 16), holed)


def test_a_hill_climb_reaches_the_optimum_of_a_valley_in_half_the_candidates():
    best = min(GRID, key=valley)
    for seed in range(10):
        tried = [c for batch in climbed(valley, len(GRID) // 2, seed) for c in batch]
        assert best in tried, seed


def test_a_hill_climb_begins_with_its_starts_and_climbs_from_the_best():
    starts = [GRID[0], grid_config(256, 512)]
    candidates = [*starts, *(config for config in GRID if config not in starts)]
    first, second, *_ = climbed(valley, 30, starts=2, candidates=candidates)
    assert first[:2] == starts and len(first) > 2
    assert set(neighbours(starts[1], GRID)) - set(first) <= set(second)


def test_a_hill_climb_tries_so_many_and_none_twice():
    for most in (1, 2, 5, 30, len(GRID), 1000):
        tried = [config for batch in climbed(valley, most) for config in batch]
        assert len(tried) == len(set(tried)) == min(most, len(GRID))


def test_a_hill_climb_goes_on_where_most_fail():
    best = min(GRID, key=valley)
    tried = climbed(lambda c: valley(c) if c == best else None, len(GRID))
    assert {config for batch in tried for config in batch} == set(GRID)


def test_a_hill_climb_depends_on_the_seed_alone():
    assert climbed(valley, 30, seed=1) == climbed(valley, 30, seed=1)
    assert climbed(valley, 30, seed=1) != climbed(valley, 30, seed=2)


def test_every_strategy_proposes_the_default_first():
    for strategy in STRATEGIES.values():
        assert proposed(strategy, 5)[0] == CONFIGS[0]


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(AutoflashError, match="known are auto, exhaustive, promising, hill_climb"):
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
