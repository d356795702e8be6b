"""Proofs: half of a candidate's kernels are compiled and checked once it comes to a final."""

from dataclasses import replace
from functools import partial

import pytest
from fake_device import FakeDevice, machine
from test_tune import LONGER, PROBLEM, search, stored, trials, tried

from autoflash.check import Stage


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
