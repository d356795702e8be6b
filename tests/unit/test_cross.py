"""Cross timing: a config of another shape that is clearly faster takes the winner's place."""

from types import SimpleNamespace

import pytest
from fake_device import CLOCKS, GPU
from making import candidates, prefill_of

from autoflash.bench import Timing
from autoflash.cross import crossed
from autoflash.effort import EFFORTS, TimeLimit
from autoflash.groups import digest_of
from autoflash.records import Decision, Trial

PROBLEM, LONGER = prefill_of(seqlen_q=512), prefill_of(seqlen_q=2048)
DEFAULT, WINNER, OTHER = candidates(PROBLEM)[:3]
EFFORT = EFFORTS["standard"]


class Worker:
    """Gives the times it is told, with noise that differs between rounds only."""

    def __init__(self, times, after_cross):
        self._times, self._after = times, after_cross
        self._calls = 0
        self._prepared = 0

    def prepare(self, problem, seed):
        self._prepared += 1  # once for cross timing, once more for a final

    def check_full(self, config, seed, cap_us=None):
        return None

    def arm(self, config, pace, after=None):
        pass

    def sample(self, rounds):
        return [([self._sample(config) for config in each], False) for each in rounds]

    def _sample(self, config):
        self._calls += 1
        times = self._times | (self._after if self._prepared > 1 else {})
        return times[config] * (1 + 0.0001 * (self._calls % 7))

    def disarm(self):
        return CLOCKS

    def eager(self, config, calls, cap_us):
        return Timing((500.0,), CLOCKS)


class Journal:
    def __init__(self):
        self.decisions, self.trials = [], []

    def decide(self, decision):
        self.decisions.append(decision)
        return decision

    def record(self, trial):
        self.trials.append(trial)
        return trial


def decision(problem, winner, times, default=DEFAULT):
    us = dict(times)
    margin = us[default] / us[winner] - 1
    digest = digest_of(problem, winner)
    fields = (winner, us[winner], default, us[default], margin, margin, margin)
    return Decision(problem, digest, *fields, times=tuple(times.items()))


def after_cross(other_us, later_us=None, default=DEFAULT, winner=WINNER):
    """The journal, and the decision on PROBLEM once LONGER's winner was timed on it."""
    times = {DEFAULT: 120.0, WINNER: 100.0}
    own = decision(PROBLEM, winner, times, default)
    longer = decision(LONGER, OTHER, {DEFAULT: 120.0, OTHER: 100.0})
    later = {OTHER: later_us} if later_us else {}
    worker, journal = Worker(times | {OTHER: other_us}, later), Journal()
    lab = SimpleNamespace(
        worker=worker, journal=journal, gpu=GPU, effort=EFFORT, limit=TimeLimit(None), seed=0
    )

    def trial(problem, config, stage, status, seconds, verdict=None):
        return Trial(problem, config, "d", status, stage, seconds=seconds)

    entrants = SimpleNamespace(
        is_out=lambda problem, config: False,
        wait_for=lambda configs, limit: None,
        prove=lambda problem, config, stage: True,
        resources={},
        trial=trial,
    )
    return journal, crossed(lab, entrants, own, [own, longer])


def test_a_clearly_faster_config_of_another_shape_becomes_the_winner():
    journal, after = after_cross(80.0)
    assert (after.winner, after.winner_us) == (OTHER, pytest.approx(80.0, rel=0.001))
    assert after.kernel_digest == digest_of(PROBLEM, OTHER)
    assert after.default_us == pytest.approx(120.0, rel=0.001)
    assert after.margin == pytest.approx(0.5, rel=0.01)
    assert 0.49 < after.margin_low <= after.margin <= after.margin_high < 0.51
    assert [config for config, _ in after.times] == [OTHER, WINNER, DEFAULT]
    assert after.regret == 0.0 and journal.decisions[-1] == after


def test_the_new_winner_met_the_default_in_as_many_rounds_as_a_final_has():
    journal, _ = after_cross(80.0)
    final = [t for t in journal.trials if t.stage == "final" and t.regime == "graph"]
    assert {trial.config for trial in final} == {DEFAULT, WINNER, OTHER}
    assert {trial.samples for trial in final} == {EFFORT.rounds}
    eager = [trial.config for trial in journal.trials if trial.regime == "eager"]
    assert eager == [OTHER]


@pytest.mark.parametrize("us", [99.7, 100.0, 130.0])
def test_a_config_that_ties_or_is_slower_only_adds_its_time(us):
    journal, after = after_cross(us)
    assert after.winner == WINNER and after.margin == pytest.approx(0.2)
    assert dict(after.times)[OTHER] == pytest.approx(us, rel=0.001)
    assert {trial.stage for trial in journal.trials} == {"cross"}


def test_a_config_that_was_faster_by_luck_does_not_become_the_winner():
    journal, after = after_cross(80.0, later_us=99.6)
    assert after.winner == WINNER
    assert "final" in {trial.stage for trial in journal.trials}


def test_a_default_that_won_its_final_can_lose_to_another_shapes_config():
    _, after = after_cross(80.0, default=WINNER)
    assert (after.winner, after.default) == (OTHER, WINNER)
    assert after.margin == pytest.approx(0.25, rel=0.01)
