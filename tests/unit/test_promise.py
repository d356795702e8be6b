"""Order by promise: transferred winners first, then by the model, which the table judges."""

from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest
from making import H200, candidates, prefill_of, winner_of
from recorded_tables import GPU, TABLE

from autoflash.aside import good_nearby
from autoflash.contest import proposals_for
from autoflash.effort import EFFORTS
from autoflash.families import serving
from autoflash.gpu import known
from autoflash.groups import Group
from autoflash.model import predicted_us
from autoflash.promise import by_promise, lost_nearby, transferred_to
from autoflash.records import Resources
from autoflash.search.replay import rank_correlation

A100 = known("NVIDIA_A100_SXM4_80GB")
PROBLEM = prefill_of()
GROUP = Group((PROBLEM,), tuple(serving(PROBLEM, H200)))
CANDIDATES = GROUP.candidates(PROBLEM, H200)
DEFAULT, *OTHERS = CANDIDATES


def rank_correlations(op, compiled):
    """Spearman's, of predicted with recorded times, for each problem of the table."""
    found = []
    for recorded in (each for each in TABLE if each.problem.op == op):
        predicted = [
            predicted_us(
                recorded.problem, config, timed.resources if compiled else Resources(), GPU
            )
            for config, timed in recorded.timed.items()
        ]
        measured = [timed.median_us for timed in recorded.timed.values()]
        found.append(rank_correlation(predicted, measured))
    return found


def test_a_rank_correlation_is_of_the_orders_and_equal_values_share_a_rank():
    assert rank_correlation([1, 2, 3], [10, 100, 101]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 2, 3], [1, 2, 2, 3]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 2, 1], [1, 1, 2, 2]) == pytest.approx(0.0)


@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "not compiled"])
def test_predictions_rank_as_measurements_do(compiled):
    """The README states these figures."""
    assert mean(rank_correlations("prefill", compiled)) >= 0.65
    assert mean(rank_correlations("decode", compiled)) >= (0.44 if compiled else 0.37)


def test_winners_of_the_nearest_shapes_come_first_and_other_gpus_last():
    near, nearer, foreign = OTHERS[3], OTHERS[1], OTHERS[2]
    winners = [
        winner_of(prefill_of(seqlen_q=2048), near),
        winner_of(prefill_of(seqlen_q=600), nearer),
        winner_of(PROBLEM, foreign, gpu=A100),
    ]
    assert transferred_to(PROBLEM, H200, winners, CANDIDATES) == [nearer, near, foreign]


def test_what_is_predicted_of_other_semantics_too_far_or_no_candidate_is_not_transferred():
    no_candidate = next(c for c in candidates(PROBLEM, A100) if c not in CANDIDATES)
    winners = [
        winner_of(prefill_of(seqlen_q=600), OTHERS[0], source="predicted"),
        winner_of(prefill_of(causal=False), OTHERS[0]),
        winner_of(prefill_of(seqlen_q=512 * 64), OTHERS[0]),
        winner_of(prefill_of(seqlen_q=600), no_candidate, gpu=A100),
        winner_of(prefill_of(seqlen_q=600), DEFAULT),
    ]
    assert transferred_to(PROBLEM, H200, winners, CANDIDATES) == []


def test_the_default_is_first_then_what_was_transferred_then_the_fastest_predicted():
    transferred = [OTHERS[-1], OTHERS[-2]]
    ordered = by_promise(CANDIDATES, PROBLEM, H200, transferred, {}, {})
    assert ordered[:3] == [DEFAULT, *transferred]
    assert sorted(ordered) == sorted(CANDIDATES)
    predicted = [predicted_us(PROBLEM, config, Resources(), H200) for config in ordered[3:]]
    assert predicted == sorted(predicted)


def test_what_a_compile_told_replaces_the_guess():
    unknown = by_promise(CANDIDATES, PROBLEM, H200, [], {}, {})
    spilling = {unknown[1]: Resources(registers=255, spill_bytes=10_000, smem_bytes=0)}
    assert by_promise(CANDIDATES, PROBLEM, H200, [], {}, spilling)[-1] == unknown[1]


FEW = replace(EFFORTS["quick"], max_candidates=len(CANDIDATES) // 2)


def proposals(
    winners=(), tried=(), strategy="auto", effort=EFFORTS["standard"], times=None, group=GROUP
):
    """The first batch of a contest on PROBLEM; `times` are those of other shapes' screenings."""
    journal = SimpleNamespace(
        winners=winners,
        tried=lambda problem, config: config in tried,
        times=lambda problem: (times or {}).get(problem, {}),
    )
    lab = SimpleNamespace(gpu=H200, effort=effort, strategy=strategy, seed=0, journal=journal)
    return next(proposals_for(lab, SimpleNamespace(group=group, resources={}), PROBLEM))


def test_a_contest_begins_with_what_nearest_shapes_won_and_tries_no_others_for_it():
    winners = [winner_of(prefill_of(seqlen_q=600), OTHERS[-1])]
    defaults = GROUP.defaults(PROBLEM, H200)
    assert proposals(winners)[: len(defaults) + 1] == [*defaults, OTHERS[-1]]
    assert sorted(proposals(winners)) == sorted(proposals()) == sorted(CANDIDATES)
    climb = proposals(winners, strategy="hill_climb", effort=FEW)
    assert climb[: len(defaults) + 1] == [*defaults, OTHERS[-1]] and len(climb) < len(CANDIDATES)


def test_what_a_quick_search_tries_is_known_before_anything_is_measured():
    """So the pool compiles ahead of the GPU; a climb would wait for compilers at every step."""
    winners = [winner_of(prefill_of(seqlen_q=600), OTHERS[-1])]
    for strategy in ("auto", "promising"):
        batch = proposals(winners, strategy=strategy, effort=FEW)
        assert len(batch) == FEW.max_candidates and OTHERS[-1] in batch
    assert len(proposals(winners, strategy="hill_climb", effort=FEW)) < FEW.max_candidates


def test_a_search_that_an_earlier_run_has_spent_its_effort_on_tries_nothing_new():
    earlier = CANDIDATES[: FEW.max_candidates]
    assert proposals(tried=earlier, effort=FEW) == earlier
    assert proposals(tried=earlier[1:], effort=FEW) != earlier


def test_a_groups_first_shape_is_searched_and_the_next_ones_climb_from_what_was_fast_there():
    other = prefill_of(seqlen_q=1024)
    group = Group((other, PROBLEM), GROUP.families)
    times = {other: {config: 100.0 + place for place, config in enumerate(OTHERS[::-1])}}
    effort = replace(EFFORTS["standard"], max_climbed=len(CANDIDATES) // 2)
    assert sorted(proposals(group=group, effort=effort)) == sorted(CANDIDATES)
    first = proposals(group=group, effort=effort, times=times)
    assert len(first) <= effort.max_climbed
    fastest = [c for c in OTHERS[::-1] if c not in GROUP.defaults(PROBLEM, H200)]
    told = good_nearby(effort.max_climbed) - 1  # the Hopper family's default is among those
    assert first[len(GROUP.families) :][:told] == fastest[:told]


def test_the_nearest_shape_that_timed_a_config_says_what_it_loses():
    near, far, beyond = (prefill_of(seqlen_q=n) for n in (600, 2048, 512 * 64))
    one, two, three = CANDIDATES[:3]
    times = {
        PROBLEM: {one: 1.0},
        far: {one: 10.0, two: 30.0},
        near: {one: 6.0, three: 3.0},
        beyond: {CANDIDATES[3]: 1.0},
    }
    assert lost_nearby(PROBLEM, times) == {one: 2.0, two: 3.0, three: 1.0}
    assert by_promise([DEFAULT, one, two, three], PROBLEM, H200, [], {three: 1.0}, {})[1] == three
