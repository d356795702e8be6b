"""A few configs serve a group of problems; what each loses is said."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoflash.config import Config
from autoflash.portfolio import Measured, Unseen, choose_portfolio, reach_of, unseen
from autoflash.problem import Problem

CONFIGS = [Config.of("prefill", {"BLOCK_M": size}) for size in (16, 32, 64, 128, 256)]


def measured(seqlen: int, times: dict[int, float], weight: float = 1.0) -> Measured:
    """A problem whose config number i took times[i]."""
    problem = Problem("prefill", "bf16", 1, 8, 8, 64, seqlen, seqlen)
    by_config = {CONFIGS[i]: us for i, us in times.items()}
    winner = min(by_config, key=lambda config: by_config[config])
    return Measured(problem, winner, by_config, weight)


def test_one_config_that_is_best_everywhere_serves_alone():
    group = [measured(n, {0: 10.0, 1: 9.0, 2: 12.0}) for n in (64, 128, 256)]
    served = choose_portfolio(group, most=4)
    assert {one.config for one in served} == {CONFIGS[1]}
    assert all(one.regret == 0 for one in served)


def test_a_second_config_is_taken_only_where_it_pays():
    far_apart = [measured(64, {0: 10.0, 1: 20.0}), measured(128, {0: 20.0, 1: 10.0})]
    assert {one.config for one in choose_portfolio(far_apart, most=4)} == set(CONFIGS[:2])
    close = [measured(64, {0: 10.0, 1: 10.001}), measured(128, {0: 10.001, 1: 10.0})]
    assert len({one.config for one in choose_portfolio(close, most=4)}) == 1


def test_the_regret_is_the_loss_against_the_problems_own_winner():
    group = [measured(64, {0: 10.0, 1: 10.5}), measured(128, {0: 30.0, 1: 10.0}, weight=10.0)]
    served = choose_portfolio(group, most=1)
    assert [one.config for one in served] == [CONFIGS[1], CONFIGS[1]]
    assert served[0].regret == pytest.approx(0.05)


def test_a_problem_no_chosen_config_was_measured_on_keeps_its_winner():
    group = [measured(64, {0: 10.0}), measured(128, {1: 10.0}), measured(256, {0: 10.0})]
    served = choose_portfolio(group, most=1)
    assert [one.config for one in served] == [CONFIGS[0], CONFIGS[1], CONFIGS[0]]


def test_weight_decides_between_equal_losses():
    times = ({0: 10.0, 1: 12.0}, {0: 12.0, 1: 10.0})
    for heavy in (0, 1):
        group = [measured(64, times[0], 1 + 9 * (heavy == 0))]
        group.append(measured(128, times[1], 1 + 9 * (heavy == 1)))
        assert choose_portfolio(group, most=1)[0].config == CONFIGS[heavy]


@given(
    st.lists(
        st.lists(st.floats(1, 100), min_size=5, max_size=5),
        min_size=1,
        max_size=4,
    ),
    st.integers(1, 4),
)
def test_at_most_so_many_configs_are_served_and_more_never_hurt_the_worst_choice(rows, most):
    group = [measured(64 + i, dict(enumerate(row))) for i, row in enumerate(rows)]
    served = choose_portfolio(group, most)
    assert len({one.config for one in served}) <= most
    for one, row in zip(served, group, strict=True):
        assert one.regret == min(row.regret(other.config) for other in served)


def test_greedy_choice_of_one_is_the_best_of_all():
    group = [measured(64 + i, {j: 10.0 + (i * j) % 7 for j in range(5)}) for i in range(4)]

    def total(config: Config) -> float:
        product = 1.0
        for row in group:
            product *= 1 + row.regret(config)
        return product

    best = min(itertools.chain(CONFIGS), key=total)
    assert total(choose_portfolio(group, most=1)[0].config) == pytest.approx(total(best))


def test_a_config_that_was_good_for_all_makes_way_for_two_that_are_best():
    # 2 is the best one for all, but beside 0 or 1, each best for half of them, it is worth nothing
    halves = ({0: 10.0, 1: 20.0, 2: 12.0}, {0: 20.0, 1: 10.0, 2: 12.0})
    group = [measured(64 + i, halves[i % 2]) for i in range(4)]
    assert {one.config for one in choose_portfolio(group, most=1)} == {CONFIGS[2]}
    assert {one.config for one in choose_portfolio(group, most=2)} == set(CONFIGS[:2])


@pytest.mark.parametrize(("slower", "configs"), [(1.009, 1), (1.02, 2)])
def test_one_problem_among_many_that_loses_more_than_a_percent_gets_its_own(slower, configs):
    group = [measured(64 + i, {0: 10.0}) for i in range(40)]
    group.append(measured(256, {0: 10.0 * slower, 1: 10.0}))
    assert len({one.config for one in choose_portfolio(group, most=4)}) == configs


def test_a_portfolio_of_nothing_is_refused():
    with pytest.raises(ValueError, match="0 configs"):
        choose_portfolio([measured(64, {0: 1.0})], most=0)


def anything(problem: Problem, config: Config) -> bool:
    return True


def unseen_regrets(group, most, valid, reach=float("inf")):
    return [one.regret(reach) for one in unseen(group, most, valid)]


def test_a_problem_left_out_is_served_by_the_nearest_of_the_others():
    group = [
        measured(512, {0: 10.0, 1: 10.5, 2: 30.0}),
        measured(1024, {0: 12.0, 1: 10.0, 2: 30.0}),
        measured(4096, {0: 30.0, 1: 20.0, 2: 10.0}),
    ]
    near, middle, far = unseen_regrets(group, 3, anything)
    assert near == pytest.approx(0.05)  # by 1024's winner
    assert middle == pytest.approx(0.2)  # by 512's
    assert far == pytest.approx(1.0)  # by 1024's, nearer than 512's


def test_what_would_serve_a_problem_left_out_is_not_chosen_by_its_own_times():
    group = [measured(512, {0: 50.0, 1: 10.0}), measured(1024, {0: 10.0, 1: 11.0})]
    assert unseen_regrets(group, 1, anything)[0] == pytest.approx(4.0)


def test_a_config_that_is_not_valid_for_the_problem_left_out_does_not_serve_it():
    group = [measured(512, {0: 10.0, 1: 10.5, 2: 13.0}), measured(1024, {1: 10.0})]
    group.append(measured(2048, {2: 10.0}))
    assert unseen_regrets(group, 2, lambda problem, config: config != CONFIGS[1])[0] == (
        pytest.approx(0.3)
    )


def test_a_problem_left_out_with_nothing_near_is_served_by_the_default():
    alone = replace(measured(512, {0: 12.0, 1: 10.0}), default=CONFIGS[0])
    assert unseen_regrets([alone], 4, anything) == [pytest.approx(0.2)]
    far_off = measured(512 * 16, {1: 10.0})
    assert unseen_regrets([alone, far_off], 4, anything)[0] == pytest.approx(0.2)


def test_what_was_not_measured_on_a_problem_left_out_is_not_guessed():
    group = [measured(512, {0: 10.0}), measured(1024, {1: 10.0})]
    assert unseen_regrets(group, 4, anything) == [None, None]


def test_beyond_its_reach_the_nearest_makes_way_for_the_default():
    near, far = Unseen(1.0, 0.01, 0.05), Unseen(3.0, 0.2, 0.1)
    assert reach_of([near, far]) == 3.0
    assert [one.regret(3.0) for one in (near, far)] == [0.01, 0.1]
    assert reach_of([near]) == reach_of([]) == float("inf")
    assert reach_of([near, Unseen(3.0, 0.2, 0.1999)]) == float("inf")  # not worth it
    assert reach_of([near, Unseen(3.0, None, 0.1), Unseen(3.0, 0.2, None)]) == float("inf")
    assert reach_of([Unseen(1.0, 0.2, 0.0), far]) == 1.0
    assert reach_of([Unseen(0.0, 0.2, 0.0)]) == float(
        "inf"
    )  # what has the size of a row is its own
