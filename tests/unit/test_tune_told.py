"""What a run tells and records of itself: the GPU's idle time, the anytime curve, its clock."""

import pytest
from fake_device import machine
from test_clocks import notes  # noqa: F401 - a fixture
from test_tune import DECODE, PROBLEM, search, stored, tried

from autoflash.tune import clocks_held, options_for


@pytest.fixture
def db(tmp_path):
    return tmp_path / "tune.db"


def test_a_run_records_its_curves_and_its_clock_and_gives_the_clock_back(
    db,
    notes,  # noqa: F811
    capsys,
):
    times = {config: 200.0 - i for i, config in enumerate(tried())}
    result = search(db, machine(times=times), PROBLEM, DECODE, lock_clocks=True)
    assert [problem for problem, _ in result.anytime] == [PROBLEM, DECODE]
    seconds, best = zip(*result.anytime[0][1], strict=True)
    assert len(best) > 3 and list(best) == sorted(best, reverse=True)
    assert best[-1] == pytest.approx(min(times.values()), rel=0.001)
    assert list(seconds) == sorted(seconds) and seconds[-1] <= result.seconds
    assert 0 < result.busy.gpus <= result.busy.processes <= 1
    assert stored(db, "SELECT locked_clock_mhz FROM runs") == [(1500,)]
    assert notes.read_text() == "locked 1500 1500\nreset\n"
    assert "not locked" not in capsys.readouterr().err

    again = search(db, machine(), PROBLEM, DECODE)  # nothing is tried, no clock is asked for
    assert (again.trials, again.busy, again.anytime) == (0, None, ())
    assert notes.read_text() == "locked 1500 1500\nreset\n"


class Card:
    """A worker as far as its card's name is asked for."""

    def __init__(self, uuid):
        self._uuid = uuid

    def uuid(self):
        return self._uuid


def test_a_refused_lock_is_told_in_a_line_and_the_run_is_not_recorded_as_locked(
    notes,  # noqa: F811
    capsys,
):
    cards = [Card("one"), Card("refusing")]
    with clocks_held(options_for(lock_clocks=True), cards) as mhz:
        assert mhz == 0
    (told,) = capsys.readouterr().err.splitlines()
    assert told == "clocks are not locked: Insufficient Permissions"
    assert notes.read_text() == "locked 1500 1500\nreset\n"
