"""What is compiled ahead of the GPU: every problem's first trials, and a climb's likely next."""

import sqlite3
import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Event, Timer
from types import SimpleNamespace

import pytest
from fake_device import GPU, TOOLCHAIN, FakeCompiler, FakeDevice, machine
from fake_fleet import HereWorker
from test_tune import DECODE, LONGER, PROBLEM, QUICK, binary, search

from autoflash.ahead import compiled_ahead
from autoflash.contest import first_batch
from autoflash.effort import TimeLimit
from autoflash.groups import groups_of
from autoflash.pool import Urgency
from autoflash.search.hill_climb import neighbours
from autoflash.store import Store


class Asked:
    """A pool that compiles a binary when it is urgent, and notes what was asked how urgently."""

    def __init__(self, *_):
        self.urgencies, self._jobs = {}, {}

    def submit(self, problems, config, gpu, urgency, stage):
        future = Future()
        self._jobs[future] = (problems, config, gpu, stage)
        self.hurry(future, urgency)
        return future

    def hurry(self, future, urgency):
        _, config, *_ = asked = self._jobs[future]
        self.urgencies.setdefault(config, []).append(urgency)
        if urgency == Urgency.NOW and not future.done():
            future.set_result(FakeCompiler().compile(*asked))

    def close(self):
        pass


@pytest.fixture
def pool(monkeypatch):
    pool = Asked()
    monkeypatch.setattr("autoflash.tune.CompilePool", lambda *_: pool)
    monkeypatch.setattr("autoflash.tune.Worker", HereWorker)
    return pool


def fake(times):
    return replace(machine(), device=partial(FakeDevice, {}, times))


def test_the_last_problems_trials_are_asked_for_while_the_first_candidate_is_checked(
    pool, tmp_path
):
    seen = []

    class Busy(FakeDevice):
        def check(self, problem, config, seed, stage=None):
            end = time.monotonic() + 10
            while not seen and time.monotonic() < end:
                time.sleep(0.01)
                asked = [config for config in list(pool.urgencies) if config.family == "decode"]
                seen.extend(asked if len(asked) > QUICK // 2 else [])  # some share a binary
            return super().check(problem, config, seed, stage)

    busy = replace(machine(), device=Busy)
    search(tmp_path / "tune.db", busy, PROBLEM, LONGER, DECODE, strategy="promising")
    assert seen


def test_a_climb_asks_for_the_neighbours_of_every_new_best_before_its_step_ends(
    pool, tmp_path, monkeypatch
):
    start = []  # the first step is asked for by the contest or ahead of it, whichever is earlier

    def noted(*asked):
        start.extend(first_batch(*asked))
        return start

    monkeypatch.setattr("autoflash.ahead.first_batch", noted)
    (group,), _ = groups_of([DECODE], GPU)
    candidates = group.candidates(DECODE, GPU)
    best = candidates[0]
    times = dict.fromkeys(candidates, 100.0) | {best: 50.0}
    search(tmp_path / "tune.db", fake(times), DECODE, strategy="hill_climb")
    near = set(neighbours(best, candidates)).difference(start)
    asked = {c: u for c, u in pool.urgencies.items() if c in near}
    assert asked and all(Urgency.SOON in urgencies for urgencies in asked.values())
    first = [urgencies[0] for urgencies in asked.values()]
    assert Urgency.NOW not in first


def test_a_run_that_goes_on_compiles_what_it_will_launch_and_nothing_else(pool, tmp_path):
    db, device = tmp_path / "tune.db", fake({})
    (decision,) = search(db, device, PROBLEM).decisions

    def asked_again(*problems):
        pool.urgencies.clear()
        search(db, device, *problems)
        return set(pool.urgencies)

    assert asked_again(PROBLEM) == set()
    with sqlite3.connect(db) as connection:  # as if it had been stopped before its final
        connection.execute("DELETE FROM decisions")
    finalists = {config for config, _ in decision.times}
    assert {binary(config) for config in asked_again(PROBLEM)} == set(map(binary, finalists))
    both = {binary(config) for config in asked_again(PROBLEM, LONGER)}
    (group,), _ = groups_of([LONGER], GPU)
    with Store.open(db, readonly=True) as store:
        screened = {binary(t.config) for t in store.trials(GPU, TOOLCHAIN, LONGER)}
    assert both == screened and binary(group.default(LONGER, GPU)) in both


def lab_and_entrants(ask, budget_s=None):
    journal = SimpleNamespace(
        winners=[], earlier_winners=[], tried=lambda *_: False, times=lambda _: {}
    )
    lab = SimpleNamespace(
        gpu=GPU,
        effort=SimpleNamespace(max_candidates=8),
        limit=TimeLimit(budget_s),
        strategy="promising",
        seed=0,
        journal=journal,
    )
    (group,), _ = groups_of([PROBLEM], GPU)
    return lab, SimpleNamespace(group=group, resources={}, ask=ask)


def test_every_default_is_asked_for_before_any_problems_other_candidates():
    batches = []
    lab, entrants = lab_and_entrants(lambda problem, configs: batches.append(configs))
    with compiled_ahead(lab, [(entrants, PROBLEM), (entrants, LONGER)]):
        wait_until(lambda: len(batches) == 4)
    assert [len(batch) for batch in batches] == [1, 1, 8, 8]


def test_within_a_budget_what_may_serve_untuned_is_asked_for_before_what_a_search_tries():
    batches = []
    lab, entrants = lab_and_entrants(lambda problem, configs: batches.append(configs), 60.0)
    with compiled_ahead(lab, [(entrants, PROBLEM), (entrants, LONGER)]):
        wait_until(lambda: len(batches) == 6)
    defaults = [entrants.group.defaults(problem, GPU) for problem in (PROBLEM, LONGER)]
    assert batches[2:4] == defaults and len(defaults[0]) > 1
    assert [len(batch) for batch in (*batches[:2], *batches[4:])] == [1, 1, 8, 8]


def wait_until(true):
    end = time.monotonic() + 30
    while not true() and time.monotonic() < end:
        time.sleep(0.01)


def test_nothing_more_is_asked_once_the_search_is_over():
    reached, go_on, batches = Event(), Event(), []

    def ask(problem, configs):
        batches.append(configs)
        if len(configs) > 1:
            reached.set()
            go_on.wait(60)

    lab, entrants = lab_and_entrants(ask)
    timer = Timer(0.5, go_on.set)
    with compiled_ahead(lab, [(entrants, PROBLEM)] * 3):
        reached.wait(60)
        timer.start()
    assert [len(batch) for batch in batches] == [1, 1, 1, 8]


def test_what_goes_wrong_ahead_is_raised_in_the_end_and_hides_no_other_error():
    def ask(problem, configs):
        if len(configs) > 1:
            raise ZeroDivisionError

    lab, entrants = lab_and_entrants(ask)
    pairs = [(entrants, PROBLEM)]
    with pytest.raises(ZeroDivisionError), compiled_ahead(lab, pairs):
        pass
    with pytest.raises(KeyError), compiled_ahead(lab, pairs):
        raise KeyError
