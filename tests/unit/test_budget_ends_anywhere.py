"""A budget may be over at whichever line asks for it: every search of such an end is whole."""

import sys

import pytest
from fake_device import machine
from test_tune import LONGER, PROBLEM, search, stored, tried

from autoflash.effort import TimeLimit
from autoflash.errors import BudgetError

LOOKS = ("over", "left_s")

pytestmark = pytest.mark.slow


class Clock:
    """Limits of which all are over from the first look at the `last` place on.

    `places` are the lines outside of TimeLimit that looked, with how often.
    """

    def __init__(self, monkeypatch, last=None):
        self.places, self.over, self._last = {}, False, last
        for name in LOOKS:
            asked = getattr(TimeLimit, name).fget
            monkeypatch.setattr(TimeLimit, name, property(self._looked(name, asked)))

    def _looked(self, name, asked):
        def look(limit):
            frame = sys._getframe(1)
            place = f"{frame.f_globals['__name__']}:{frame.f_lineno}"
            if frame.f_globals["__name__"] != TimeLimit.__module__:
                self.places[place] = self.places.get(place, 0) + 1
                self.over |= place == self._last
            if self.over:
                return True if name == "over" else -1.0
            return asked(limit)

        return look


def long_calls():
    """A machine on which calls last so long that finals are led."""
    return machine(times=dict.fromkeys({*tried(), *tried(LONGER)}, 1000.0))


def test_wherever_the_time_is_over_the_search_ends_with_what_it_has(tmp_path):
    with pytest.MonkeyPatch.context() as patched:
        clock = Clock(patched)
        search(tmp_path / "whole.db", long_calls(), PROBLEM, LONGER, budget_s=600.0)
    assert any(place.startswith("autoflash.rounds:") for place in clock.places)
    ended: list[str] = []
    for number, place in enumerate(clock.places):
        db = tmp_path / f"{number}.db"
        with pytest.MonkeyPatch.context() as patched:
            clock = Clock(patched, place)
            try:
                result = search(db, long_calls(), PROBLEM, LONGER, budget_s=600.0)
            except BudgetError:
                assert stored(db, "SELECT count(*) FROM decisions") == [(0,)], place
            else:
                assert stored(db, "SELECT count(*) FROM decisions") >= [(1,)], place
                assert result.decisions, place
        ended += [place] if clock.over else []  # who waits for a compiler may not ask again
        assert stored(db, "SELECT count(*) FROM runs WHERE outcome = ''") == [(0,)], place
    assert {place.split(":")[0] for place in ended} >= {"autoflash.rounds", "autoflash.contest"}
