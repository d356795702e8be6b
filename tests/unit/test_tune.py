"""Tune, end to end on a fake device: faults, budgets, resuming, interrupting, deciding."""

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from fake_device import GPU, SHORT, TOOLCHAIN, FakeDevice, machine

from autoflash.config import Config
from autoflash.effort import EFFORTS
from autoflash.errors import AutoflashError, BudgetError, SearchError
from autoflash.families import family_of, why_refused
from autoflash.groups import groups_of
from autoflash.problem import Problem
from autoflash.search.random import random
from autoflash.store import Store
from autoflash.tune import tune
from autoflash.workload import Workload

PROBLEM = Problem("prefill", "bf16", 1, 4, 4, 128, 512, 512)
LONGER = Problem("prefill", "bf16", 1, 4, 4, 128, 2048, 2048)
LONGEST = Problem("prefill", "bf16", 1, 4, 4, 128, 4096, 4096)
DECODE = Problem("decode", "bf16", 8, 8, 2, 64, 1, 1024)
QUICK = EFFORTS["quick"].max_candidates


def workload(*problems):
    return Workload("test", tuple((problem, 1.0) for problem in problems or (PROBLEM,)))


def tried(problem=PROBLEM, seed=0, most=QUICK):
    """The candidates a quick search tries, the default first."""
    (group,), _ = groups_of([problem], GPU)
    return next(random(group.candidates(problem, GPU), most, seed))


def binary(config):
    return family_of(config.family).binary(config)


def distinct(configs):
    """The first config of each binary."""
    return list({binary(config): config for config in reversed(configs)}.values())[::-1]


def search(db, fake, *problems, **options):
    usual = {"effort": "quick", "strategy": "random"}
    return tune(workload(*problems), db=db, machine=fake, **usual | options)


def stored(db, sql):
    with sqlite3.connect(db) as connection:
        return connection.execute(sql).fetchall()


def trials(db, problem=PROBLEM):
    with Store.open(db, readonly=True) as store:
        return store.trials(GPU, TOOLCHAIN, problem)


@pytest.fixture
def db(tmp_path):
    return tmp_path / "tune.db"


FAULTS = {
    "killed": "runtime",
    "gpu memory": "runtime",
    "out_of_bounds": "runtime",
    "hang": "timeout",
    "abort": "runtime",
    "wrong": "correctness",
    "raise": "runtime",
    "hang@screen": "timeout",
    "wrong@check_full": "correctness",
    "abort@sample": "runtime",
}
COMPILE_FAULTS = {
    "memory": "compile",
    "error": "compile",
    "abort": "compile",
    "hang": "timeout",
    "spills": "constraints",
    "big": "constraints",
}


def test_planted_faults_cost_one_trial_each_and_the_good_one_wins(db):  # case B01
    default, best, *others = distinct(tried())
    planted = dict(zip(others, FAULTS, strict=False))
    broken = dict(zip(others[len(FAULTS) :], COMPILE_FAULTS, strict=False))
    assert len(broken) == len(COMPILE_FAULTS)
    alike = {c: binary(c) for c in tried()}  # configs that share a binary share its fault
    expected = {c: FAULTS[fault] for c, fault in planted.items()} | {
        c: COMPILE_FAULTS[fault]
        for b, fault in broken.items()
        for c in alike
        if binary(b) == alike[c]
    }
    # those that fail late must reach the final
    late = {config: 60.0 for config, fault in planted.items() if "@" in fault}
    times = dict.fromkeys(tried(), 100.0) | late | {default: 90.0, best: 50.0}
    compile_faults = {binary(config): fault for config, fault in broken.items()}
    result = search(db, machine(planted, times, compile_faults))
    (decision,) = result.decisions
    assert decision.winner == best and decision.winner_us == pytest.approx(50, rel=0.01)
    failures = [trial for trial in trials(db) if trial.status != "correct"]
    statuses = {trial.config: trial.status for trial in failures}
    assert statuses == expected
    assert len(failures) == len(statuses) and all(trial.error for trial in failures)
    assert stored(db, "SELECT outcome FROM runs") == [("finished",)]


def test_where_every_candidate_fails_no_winner_is_stored(db):  # case B01
    faults = dict.fromkeys(tried(), "wrong")
    with pytest.raises(SearchError, match=r"every candidate failed.*off by 3 row RMS") as error:
        search(db, machine(faults))
    assert error.value.exit_code == 1
    assert stored(db, "SELECT count(*) FROM decisions") == [(0,)]
    assert stored(db, "SELECT outcome FROM runs") == [("failed",)]
    assert len(trials(db)) == len(tried())


def test_a_wrong_default_is_rejected_and_the_others_are_judged_on_their_own(db):  # case B28
    default, *others = tried()
    times = dict.fromkeys(others, 100.0) | {others[3]: 80.0}
    (decision,) = search(db, machine({default: "wrong"}, times)).decisions
    assert decision.winner == others[3]
    assert (decision.default, decision.default_us) == (default, 0.0)


def test_a_problem_whose_candidates_all_fail_leaves_the_others_decided(db):
    faults = dict.fromkeys(tried(DECODE), "raise")
    result = search(db, machine(faults), PROBLEM, DECODE)
    assert [decision.problem for decision in result.decisions] == [PROBLEM]
    ((problem, why),) = result.undecided
    assert problem == DECODE and "planted" in why


def test_the_default_stays_unless_it_is_clearly_beaten(db):
    times = dict.fromkeys(tried(), 100.0)
    (decision,) = search(db, machine(times=times)).decisions
    assert decision.winner == decision.default == tried()[0]
    assert decision.margin == 0 and decision.tied


def test_one_seed_gives_one_winner(tmp_path):
    first, second = (search(tmp_path / f"{i}.db", machine(), seed=3).decisions for i in range(2))
    assert [d.winner for d in first] == [d.winner for d in second]


def test_finalists_are_stored_in_both_regimes_with_the_cards_clock(db):
    times = {config: 100.0 + i for i, config in enumerate(tried()[1:])} | {tried()[0]: 180.0}
    (decision,) = search(db, machine(times=times)).decisions
    final = [trial for trial in trials(db) if trial.stage == "final"]
    regimes = {(trial.config, trial.regime) for trial in final}
    assert regimes == {(c, regime) for c, _ in decision.times for regime in ("graph", "eager")}
    assert decision.default in {trial.config for trial in final}
    assert all(trial.clocks.sm_clock_mhz == 1980 and trial.median_us for trial in final)


@pytest.mark.parametrize(("us", "rungs"), [(100.0, {5, 8}), (60_000.0, {1})])
def test_a_higher_rung_is_for_those_who_get_more_samples_of_it(db, us, rungs):
    (group,), _ = groups_of([PROBLEM], GPU)
    times = dict.fromkeys(group.candidates(PROBLEM, GPU), us)
    search(db, machine(times=times), effort="standard")
    assert {trial.samples for trial in trials(db) if trial.stage == "screen"} == rungs


class Warming(FakeDevice):
    """A card on which configs tried alone look as fast as `alone` says, for it was cool or hot."""

    def __init__(self, alone, times):
        super().__init__({}, times)
        self._times_in_turn, self._alone = times, alone

    def screen(self, *asked):
        self._times = self._alone
        try:
            return super().screen(*asked)
        finally:
            self._times = self._times_in_turn


def test_who_looked_slow_alone_meets_the_others_in_turn_before_finalists_are_chosen(db):
    (group,), _ = groups_of([PROBLEM], GPU)
    candidates = group.candidates(PROBLEM, GPU)
    best, *lucky = candidates[10:][: 2 * EFFORTS["standard"].finalists]
    times = dict.fromkeys(candidates, 100.0) | {best: 80.0}
    alone = times | dict.fromkeys(lucky, 70.0)
    device = partial(Warming, alone, times)
    (decision,) = search(db, replace(machine(), device=device), effort="standard").decisions
    assert len(lucky) > EFFORTS["standard"].finalists and decision.winner == best


# At the power limit who is fast alone, or in turn with others, need not be so where it is led.
@pytest.mark.parametrize(("us", "times_as_many"), [(100.0, 1), (1000.0, 2)])
def test_all_who_met_in_turn_are_finalists_where_the_final_is_led(db, us, times_as_many):
    (group,), _ = groups_of([LONGER], GPU)
    candidates = group.candidates(LONGER, GPU)
    times = {config: us + place for place, config in enumerate(candidates)}
    times[group.default(LONGER, GPU)] = 2 * us
    (decision,) = search(db, machine(times=times), LONGER, effort="standard").decisions
    wanted = times_as_many * EFFORTS["standard"].finalists
    assert len(decision.times) == wanted + 1  # and the default
    final = [trial for trial in trials(db, LONGER) if trial.stage == "final"]
    eager = {trial.config for trial in final if trial.regime == "eager"}
    assert len(eager) == EFFORTS["standard"].finalists + 1


# Two samples of the fastest are affordable in turn, one of any other.
def test_the_fastest_is_a_finalist_where_others_are_too_slow_for_another_sample(db):
    (group,), _ = groups_of([PROBLEM], GPU)
    candidates = group.candidates(PROBLEM, GPU)
    best = candidates[20]
    times = dict.fromkeys(candidates, 60_000.0) | {best: 49_000.0}
    (decision,) = search(db, machine(times=times), effort="standard").decisions
    assert decision.winner == best


def test_rounds_in_which_the_card_was_braked_count_for_nobody(db):
    default, best, *_ = tried()
    times = dict.fromkeys(tried(), 100.0) | {best: 50.0}
    (decision,) = search(db, machine({best: "brake"}, times)).decisions
    assert decision.winner == best and decision.winner_us == pytest.approx(50, rel=0.01)
    final = [t for t in trials(db) if t.stage == "final" and t.regime == "graph"]
    assert {trial.samples for trial in final} == {EFFORTS["quick"].rounds}
    slowest = max(trial.p80_us for trial in final if trial.config == best)
    assert slowest < 60 and decision.default == default


def test_the_same_command_again_measures_nothing_twice(db, capsys):
    first = search(db, machine(), PROBLEM, DECODE)
    again = search(db, machine(dict.fromkeys(tried(), "raise")), PROBLEM, DECODE)
    candidates = len(tried()) + len(tried(DECODE))
    assert again.decisions == first.decisions
    assert (again.trials, again.reused) == (0, candidates)
    assert f"{candidates} candidates are known from earlier runs" in capsys.readouterr().err


def test_trials_say_when_their_binary_was_asked_for_and_was_there(db):
    search(db, machine())
    told = stored(db, "SELECT asked_s, compiled_s, began_s, ended_s FROM timeline")
    assert len(told) > len(tried())
    for asked_s, compiled_s, began_s, ended_s in told:
        assert 0 <= asked_s <= compiled_s <= ended_s and 0 < began_s <= ended_s


@pytest.mark.parametrize(("us", "stays"), [(49.95, True), (45.0, False)])
def test_another_search_replaces_a_winner_only_by_what_is_clearly_faster(db, us, stays):  # case S09
    def simplicity(config):
        return [config.as_dict().get(knob, 0) for knob in ("num_warps", "num_stages")], config

    *simpler, best = sorted(tried()[1:], key=simplicity)  # of those tied the simplest wins
    times = dict.fromkeys(tried(), 100.0) | {best: 50.0}
    (first,) = search(db, machine(times=times)).decisions
    assert first.winner == best
    with sqlite3.connect(db) as connection:  # then they are screened anew, by other times
        connection.execute("DELETE FROM trials")
    faster = simpler[: EFFORTS["standard"].finalists]  # all of them before the winner
    later = machine(times=times | dict.fromkeys(faster, us))
    (again,) = search(db, later, effort="standard").decisions
    assert (again.winner == best) == stays and again.winner in (best, *faster)
    assert best in dict(again.times)


def test_a_search_cut_short_leaves_an_earlier_final_its_word(db):
    _, best, other, *_ = tried()
    times = dict.fromkeys(tried(), 100.0) | {best: 50.0}
    (first,) = search(db, machine(times=times)).decisions
    with sqlite3.connect(db) as connection:
        connection.execute("DELETE FROM trials")
    hanging = dict.fromkeys(tried(), "hang@check_full")
    fake = machine(hanging, times | {other: 20.0}, deadlines=replace(SHORT, check_s=100.0))
    cut = search(db, fake, budget_s=8.0)
    assert cut.decisions == (first,)
    assert stored(db, "SELECT count(*) FROM decisions") == [(1,)]


def test_a_failed_candidate_is_not_tried_again(db):
    bad = tried()[1]
    search(db, machine({bad: "hang"}))
    failures = [trial for trial in trials(db) if trial.config == bad]
    assert search(db, machine(), seed=0).trials == 0
    assert [trial for trial in trials(db) if trial.config == bad] == failures


def test_a_candidate_too_large_for_one_shape_is_tried_on_the_others(db):
    _, *others = tried()
    on_longer = tried(LONGER, most=EFFORTS["quick"].max_climbed)
    large = next(config for config in others if config in on_longer)
    times = dict.fromkeys({*tried(), *on_longer}, 100.0) | {large: 50.0}
    fake = machine({(PROBLEM, large): "gpu memory@screen"}, times)
    one, other = search(db, fake, PROBLEM, LONGER).decisions
    assert one.winner != large and other.winner == large
    (failure,) = (trial for trial in trials(db) if trial.status != "correct")
    assert (failure.config, failure.status) == (large, "runtime")
    assert failure.error.startswith("out of GPU memory")
    again = search(db, machine(times=times), PROBLEM, LONGER)
    assert again.trials == 0 and again.decisions == (one, other)


def test_kills_from_outside_cost_no_candidate(db, tmp_path):
    default, best, *_ = distinct(tried())
    faults = {
        best: f"killed once {tmp_path / 'check'}",
        default: f"killed once {tmp_path}/s@sample",
    }
    compile_faults = {binary(best): f"killed once {tmp_path / 'compile'}"}
    times = dict.fromkeys(tried(), 100.0) | {best: 50.0}
    (decision,) = search(db, machine(faults, times, compile_faults)).decisions
    assert decision.winner == best and decision.default_us == pytest.approx(100, rel=0.01)
    assert all(trial.status == "correct" for trial in trials(db))
    assert {path.name for path in tmp_path.iterdir()} >= {"check", "s", "compile"}


def test_finalists_of_every_shape_are_timed_on_the_groups_other_shapes(db):
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    every = {config for problem in group.problems for config in group.candidates(problem, GPU)}
    # winners that are valid on either shape: the other family's schedules are of one
    slow = {config: 400.0 for config in every if config.family != "prefill"}
    result = search(db, machine(times=slow), PROBLEM, LONGER, effort="standard")
    one, other = result.decisions
    crossed = {trial.config for trial in trials(db) if trial.stage == "cross"}
    for here, there in ((one, other), (other, one)):
        valid = why_refused(here.problem, there.winner, GPU) is None
        assert (there.winner in {config for config, _ in here.times}) == valid
    assert crossed <= {config for each in (one, other) for config, _ in each.times} and crossed
    assert list(one.times) == sorted(one.times, key=lambda timed: (timed[1], timed[0]))
    with Store.open(db, readonly=True) as store:
        kept = {winner.decision.problem: winner.decision for winner in store.winners(GPU)}
    assert kept == {PROBLEM: one, LONGER: other}


def test_a_budget_is_kept_though_candidates_hang_and_what_was_timed_decides(db):
    default, *others = tried()
    all_hanging_s = len(others) * SHORT.check_s
    assert all_hanging_s > 30
    started = time.monotonic()
    result = search(db, machine(dict.fromkeys(others, "hang")), budget_s=12.0)
    assert time.monotonic() - started < all_hanging_s / 2  # other processes may hold the cores
    assert [decision.winner for decision in result.decisions] == [default]
    assert stored(db, "SELECT outcome FROM runs") == [("budget",)]


def test_a_budget_that_ends_before_anything_was_checked_stores_no_winner(db):
    with pytest.raises(BudgetError, match="no winner was stored") as error:
        search(db, machine(), budget_s=0.01)
    assert error.value.exit_code == 3
    assert stored(db, "SELECT count(*) FROM decisions") == [(0,)]
    assert stored(db, "SELECT count(*) FROM trials") == [(0,)]


def test_within_a_budget_what_serves_untuned_is_tried_on_every_shape_before_any_search(db):
    (nearest,) = search(db, machine(), PROBLEM).decisions
    search(db, machine(), LONGER, LONGEST, budget_s=60.0, strategy="auto")
    screened = stored(
        db,
        "SELECT seqlen_q, family, knobs_json FROM trials JOIN problems ON problem_id = problems.id"
        " JOIN configs ON config_id = configs.id WHERE stage = 'screen' AND run_id = 2"
        " ORDER BY trials.id",
    )
    (group,), _ = groups_of([LONGER, LONGEST], GPU)
    wanted = {
        (problem.seqlen_q, config.family, config.knobs)
        for problem in group.problems
        for config in (*group.defaults(problem, GPU), nearest.winner)
    }
    assert len(wanted) == 6
    tried_first = screened[: len(wanted)]
    assert {(n, f, Config.of(f, json.loads(knobs)).knobs) for n, f, knobs in tried_first} == wanted
    assert len(screened) > len(wanted)


def test_a_search_cut_short_before_a_default_was_tried_stores_no_winner(db):
    (group,), _ = groups_of([PROBLEM], GPU)
    _, other, *_ = group.defaults(PROBLEM, GPU)
    fake = machine(
        compile_faults={binary(other): "hang"}, deadlines=replace(SHORT, compile_s=100.0)
    )
    with pytest.raises(BudgetError, match="no winner was stored"):
        search(db, fake, budget_s=6.0, strategy="auto")
    assert stored(db, "SELECT count(*) FROM decisions") == [(0,)]
    assert stored(db, "SELECT count(*) FROM trials WHERE status = 'correct'") > [(0,)]
    (decision,) = search(db, machine(times={other: 10.0}), strategy="auto").decisions
    assert decision.winner == other


@pytest.mark.parametrize("budget_s", [0, -1, float("nan"), float("inf")])
def test_a_budget_that_is_no_positive_number_is_refused(db, budget_s):  # case S12
    with pytest.raises(AutoflashError, match="not a positive number"):
        search(db, machine(), budget_s=budget_s)
    assert not db.exists()


def test_tuning_interpreted_kernels_is_refused(db, monkeypatch):  # case S11
    monkeypatch.setattr("autoflash.tune.interpreted", lambda: True)
    with pytest.raises(AutoflashError, match="TRITON_INTERPRET"):
        search(db, machine())


SCRIPT = """
import signal
from pathlib import Path
from fake_device import machine
from test_tune import search, tried

from autoflash.worker import DEADLINES

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    search(Path({db!r}), machine({{tried()[0]: "hang@check_full"}}, deadlines=DEADLINES))
"""


def start(db):
    """A search in a process of its own that hangs once everything is screened."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(db=str(db))],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        time.sleep(0.1)
        with contextlib.suppress(sqlite3.OperationalError):  # not there yet
            if stored(db, "SELECT count(*) FROM trials") == [(len(tried()),)]:
                return process
    raise AssertionError("the search did not come to its hanging candidate")


def children(pid):
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def wait_for_end(pids):
    end = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < end:
        time.sleep(0.05)
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_what_is_slow_to_compile_is_tried_last_and_told_in_the_order_of_the_workload(db):
    result = search(db, machine(), PROBLEM, DECODE)
    sql = "SELECT op FROM trials JOIN problems ON problems.id = problem_id ORDER BY trials.id"
    tried_ops = [op for (op,) in stored(db, sql)]
    assert tried_ops[0] == "decode" and tried_ops[-1] == "prefill"
    assert [decision.problem for decision in result.decisions] == [PROBLEM, DECODE]


def test_ctrl_c_keeps_every_trial_and_says_how_to_go_on(db):
    process = start(db)
    workers = children(process.pid)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0 and wait_for_end(workers)
    assert "the same command goes on" in said and str(db) in said
    assert stored(db, "SELECT outcome FROM runs") == [("interrupted",)]
    assert search(db, machine()).reused == len(tried())


def test_a_killed_search_leaves_no_process_and_goes_on(db):
    process = start(db)
    workers = children(process.pid)
    assert workers
    process.kill()
    process.communicate()
    assert wait_for_end(workers)
    result = search(db, machine())
    assert result.reused == len(tried()) and len(result.decisions) == 1
