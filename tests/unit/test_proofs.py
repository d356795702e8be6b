"""Proofs: half of a candidate's kernels are compiled and checked once it comes to a final."""

from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from fake_device import GPU, FakeDevice, machine
from test_tune import LONGER, PROBLEM, search, stored, trials, tried

from autoflash.check import Stage
from autoflash.entrants import Entrants
from autoflash.groups import groups_of
from autoflash.tournament import hold


class Noting(FakeDevice):
    """Notes in a file what it checks."""

    def __init__(self, notes, *of_fake):
        super().__init__(*of_fake)
        self._notes = notes

    def check(self, problem, config, seed, stage=None):
        with self._notes.open("a") as notes:
            notes.write(f"{stage} {config}\n")
        return super().check(problem, config, seed, stage)


def checked(tmp_path, *problems, **options):
    """The result, and each check in the order they were made."""
    notes = tmp_path / "notes"
    fake = replace(machine(), device=partial(Noting, notes))
    result = search(tmp_path / "tune.db", fake, *problems, **options)
    return result, [line.split(" ", 1) for line in notes.read_text().splitlines()]


def test_a_candidate_that_is_wrong_where_finals_alone_are_checked_costs_its_trial(tmp_path):
    db = tmp_path / "tune.db"
    best = tried()[1]
    fake = machine({best: "wrong@proof"}, {best: 10.0})
    (decision,) = search(db, fake).decisions
    assert decision.winner != best
    (failed,) = (trial for trial in trials(db) if trial.status == "correctness")
    assert (failed.config, failed.stage) == (best, "final")
    assert any(trial.config == best and trial.stage == "screen" for trial in trials(db))


def test_only_who_comes_to_a_final_is_checked_on_the_rest_and_but_once(tmp_path):
    result, checks = checked(tmp_path, PROBLEM, LONGER)
    proven = [config for stage, config in checks if stage == Stage.FINAL]
    finalists = {str(config) for each in result.decisions for config, _ in each.times}
    assert len(proven) == len(set(proven)) and set(proven) == finalists
    screened = [config for stage, config in checks if stage == Stage.SCREEN]
    assert len(screened) == len(set(screened)) > len(proven)


def test_a_search_that_may_end_at_any_moment_checks_everything_at_first(tmp_path):
    _, checks = checked(tmp_path, budget_s=3600.0)
    assert {stage for stage, _ in checks} == {"None"}
    db, best = tmp_path / "other.db", tried()[1]
    search(db, machine({best: "wrong@proof"}, {best: 10.0}), budget_s=3600.0)
    (failed,) = (trial for trial in trials(db) if trial.status == "correctness")
    assert (failed.config, failed.stage) == (best, "screen")


@pytest.mark.parametrize(
    ("budget_s", "one_by_one"), [(None, False), (3600.0, True)], ids=["endless", "limited"]
)
def test_without_a_limit_a_group_is_screened_before_its_first_final(tmp_path, budget_s, one_by_one):
    db = tmp_path / "tune.db"
    search(db, machine(), PROBLEM, LONGER, budget_s=budget_s)
    made = stored(
        db,
        "SELECT t.stage, p.seqlen_k FROM trials t JOIN problems p ON p.id = t.problem_id "
        "ORDER BY t.id",
    )
    last = max(i for i, (stage, _) in enumerate(made) if stage == "screen")
    first_final = [stage for stage, _ in made].index("final")
    assert (first_final < last) == one_by_one
    finals = [length for stage, length in made if stage == "final"]
    assert set(finals) == {PROBLEM.seqlen_k, LONGER.seqlen_k}


def test_another_final_is_held_while_compilers_are_at_work_for_the_first(monkeypatch):
    held = []

    class Compiling:
        """A contest; the first problem's final waits until another one was held."""

        def __init__(self, lab, entrants, problem, limit):
            self._problem = problem

        def screen(self):
            pass

        @property
        def waits(self):
            return self._problem == PROBLEM and not held

        def decide(self):
            held.append(self._problem)
            return SimpleNamespace(problem=self._problem), ""

    monkeypatch.setattr("autoflash.tournament.Contest", Compiling)
    monkeypatch.setattr("autoflash.tournament.compiled_ahead", lambda *_: nullcontext())
    endless = SimpleNamespace(finite=False, share=lambda _: None)
    lab = SimpleNamespace(limit=endless, progress=Mock(), effort=SimpleNamespace(cross_rounds=0))
    entrants = SimpleNamespace(group=SimpleNamespace(problems=(PROBLEM, LONGER)))
    decisions, _ = hold(lab, [entrants])
    assert held == [LONGER, PROBLEM]
    assert [decision.problem for decision in decisions] == [PROBLEM, LONGER]


class Slow:
    """A pool that is done with nothing until it is told so."""

    def __init__(self):
        self.futures = []

    def submit(self, *asked):
        self.futures.append(Future())
        return self.futures[-1]

    def hurry(self, future, urgency):
        pass


@pytest.mark.parametrize("finite", [False, True], ids=["endless", "limited"])
def test_a_final_waits_for_what_its_finalists_are_timed_and_checked_with(finite):
    journal = SimpleNamespace(tried=lambda *_: False, of_group=lambda *_: ())
    limit, pool = SimpleNamespace(finite=finite), Slow()
    lab = SimpleNamespace(gpu=GPU, limit=limit, source="measured", journal=journal, pool=pool)
    (group,), _ = groups_of([PROBLEM], GPU)
    entrants, default = Entrants(lab, group), group.default(PROBLEM, GPU)
    assert entrants.must_wait([default])
    entrants.ask(PROBLEM, [default])
    kernels, *proofs = pool.futures
    assert len(proofs) == (0 if finite else 1) and entrants.must_wait([default])
    kernels.set_result(None)
    assert entrants.must_wait([default]) == (not finite)
    for proof in proofs:
        proof.set_result(None)
    assert not entrants.must_wait([default])
