"""Aside: what a GPU tries on a group's later shapes while compilers hold up the one at hand."""

import threading
from dataclasses import replace
from json import loads
from types import SimpleNamespace

import pytest
from fake_device import GPU, FakeCompiler, FakeDevice, machine
from fake_fleet import HereWorker
from test_ahead import Asked
from test_tune import LONGER, PROBLEM, search, stored

from autoflash.aside import wanted_elsewhere
from autoflash.child import OUT_OF_GPU_MEMORY, Failure
from autoflash.config import Config
from autoflash.effort import EFFORTS, TimeLimit
from autoflash.entrants import Entrants
from autoflash.groups import groups_of
from autoflash.pool import Urgency

PROMPT, LATE_S = 10, 1.0  # so many are compiled at once, the others after so long


class Slow(Asked):
    """A pool whose compilers give the first few at once and keep a GPU waiting for the others."""

    def hurry(self, future, urgency):
        _, config, *_ = asked = self._jobs[future]
        self.urgencies.setdefault(config, []).append(urgency)
        if urgency == Urgency.NOW and not future.done():
            if len(self.urgencies) <= PROMPT:
                future.set_result(FakeCompiler().compile(*asked))
            else:
                threading.Timer(LATE_S, self._end, (future, asked)).start()

    def _end(self, future, asked):
        if not future.done():
            future.set_result(FakeCompiler().compile(*asked))


@pytest.fixture
def slow(monkeypatch):
    pool = Slow()
    monkeypatch.setattr("autoflash.tune.CompilePool", lambda *_: pool)
    monkeypatch.setattr("autoflash.tune.Worker", HereWorker)
    monkeypatch.setattr("autoflash.ahead.first_batch", lambda *_: [])
    return pool


TRIALS = """
SELECT p.seqlen_k, t.config_id, t.median_us FROM trials t
JOIN problems p ON p.id = t.problem_id WHERE t.stage = 'screen' ORDER BY t.id
"""


def test_while_compilers_are_awaited_the_fastest_so_far_are_tried_on_the_next_shape(slow, tmp_path):
    db = tmp_path / "tune.db"
    result = search(db, machine(), PROBLEM, LONGER)
    assert len(result.decisions) == 2
    trials = stored(db, TRIALS)
    last = max(i for i, (length, *_) in enumerate(trials) if length == PROBLEM.seqlen_k)
    asides = [i for i, (length, *_) in enumerate(trials[:last]) if length == LONGER.seqlen_k]
    assert asides
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    configs = stored(db, "SELECT id, family, knobs_json FROM configs")
    known = {Config.of(family, loads(knobs)): number for number, family, knobs in configs}
    default = known[group.default(LONGER, GPU)]
    for place in asides:  # one in six of those timed so far, and one more
        so_far = [row for row in trials[:place] if row[0] == PROBLEM.seqlen_k]
        so_far.sort(key=lambda row: row[2])
        fastest = [config for _, config, _ in so_far[: 1 + len(so_far) // 6]]
        assert trials[place][1] in (default, *fastest)
    assert {trials[place][1] for place in asides} != {default}
    once = [row[:2] for row in trials]
    assert len(once) == len(set(once))  # what was tried aside is not tried again


def test_a_shape_that_does_not_fit_the_memory_is_left_to_its_own_contest(slow, tmp_path):
    class Small(FakeDevice):
        def prepare(self, problem, seed):
            if problem == LONGER:
                raise Failure("runtime", f"{OUT_OF_GPU_MEMORY}: tried to allocate 200 GiB")
            super().prepare(problem, seed)

    small = replace(machine(), device=Small)
    result = search(tmp_path / "tune.db", small, PROBLEM, LONGER)
    assert [decision.problem for decision in result.decisions] == [PROBLEM]
    ((problem, why),) = result.undecided
    assert problem == LONGER and OUT_OF_GPU_MEMORY in why


class Known:
    """A journal of what was tried, and of the problems decided."""

    def __init__(self, tried=(), decided=()):
        self._tried, self._decided = set(tried), set(decided)

    def tried(self, problem, config):
        return (problem, config) in self._tried

    def decided(self, problem):
        return problem if problem in self._decided else None


def wanted(times, problem=PROBLEM, strategy="random", **known):
    lab = SimpleNamespace(
        journal=Known(**known),
        gpu=GPU,
        effort=EFFORTS["quick"],
        strategy=strategy,
        limit=TimeLimit(None),
        source="measured",
    )
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    return list(wanted_elsewhere(lab, Entrants(lab, group), problem, times))


def test_wanted_is_who_was_fast_and_is_neither_tried_there_nor_that_shape_decided():
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    one, two, *others = group.candidates(PROBLEM, GPU)[:14]
    times = {two: 50.0, one: 40.0} | dict.fromkeys(others, 90.0)  # 14: three of them are wanted
    first = sorted(others)[0]
    assert wanted(times) == [(LONGER, one), (LONGER, two), (LONGER, first)]
    assert wanted(times, tried=[(LONGER, one)]) == [(LONGER, two), (LONGER, first)]
    assert wanted(times, decided=[LONGER]) == []
    assert wanted(times, problem=LONGER) == []
    assert wanted({}) == []


def test_another_shapes_default_is_wanted_once_it_is_known_to_be_right(monkeypatch):
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    default = group.default(LONGER, GPU)
    one, *_ = (config for config in group.candidates(PROBLEM, GPU) if config != default)
    assert wanted({one: 40.0}) == [(LONGER, one)]
    monkeypatch.setattr(Entrants, "admitted", lambda _, config: config == default)
    assert wanted({one: 40.0}) == [(LONGER, default), (LONGER, one)]


def test_where_every_candidate_will_be_tried_every_one_is_wanted():
    (group,), _ = groups_of([PROBLEM, LONGER], GPU)
    timed = sorted(group.candidates(PROBLEM, GPU)[:14])
    assert wanted(dict.fromkeys(timed, 50.0), strategy="exhaustive") == [
        (LONGER, config) for config in timed
    ]
