"""Timing winners again: what an upgrade turned round, what is stale, who is no longer right."""

import json
from dataclasses import replace
from functools import partial

import pytest
import typer
from fake_device import GPU, TOOLCHAIN, FakeDevice, time_us
from making import candidates, prefill_of, winner_of

from autoflash.cli.retime import report
from autoflash.families import serving
from autoflash.retime import RUNNERS_UP, entrants_of, retime, state_of
from autoflash.worker import Worker

PROBLEM = prefill_of()
DEFAULT = serving(PROBLEM, GPU)[0].default(PROBLEM, GPU)
FIRST, SECOND, *OTHERS = [config for config in candidates(PROBLEM) if config != DEFAULT]


def won(config, *others, **changes):
    """A winner that was the fastest of these."""
    times = tuple((c, 10.0 + i) for i, c in enumerate((config, *others)))
    return winner_of(PROBLEM, config, GPU, TOOLCHAIN, times=times, **changes)


@pytest.fixture
def retimed():
    """What came of timing one winner again on a fake with these faults and times."""
    workers = []

    def once(winner, faults=None, times=None):
        workers.append(Worker(partial(FakeDevice, faults or {}, times or {})))
        told = []
        (found,) = retime([winner], GPU, TOOLCHAIN, workers[-1], told=told.append)
        assert told == [found]
        return found

    yield once
    for worker in workers:
        worker.close()


def test_winner_runners_up_and_defaults_are_timed_and_nobody_else():
    entrants = entrants_of(won(FIRST, SECOND, *OTHERS[:9]), GPU)
    assert entrants == [FIRST, SECOND, *OTHERS[: RUNNERS_UP - 1], DEFAULT]


def test_a_winner_that_is_still_the_fastest_stays(retimed):
    found = retimed(won(FIRST, SECOND), times={FIRST: 50.0, SECOND: 60.0, DEFAULT: 70.0})
    assert (found.best, found.inverted, found.state) == (FIRST, False, "current")
    assert [config for config, _ in found.times] == [FIRST, SECOND, DEFAULT]
    assert found.now_us == pytest.approx(50.0, rel=0.01)


def test_a_winner_that_another_now_beats_is_an_inversion(retimed):
    found = retimed(won(FIRST, SECOND), times={FIRST: 60.0, SECOND: 50.0, DEFAULT: 70.0})
    assert found.inverted and found.best == SECOND


def test_a_winner_tied_with_the_fastest_stays(retimed):
    found = retimed(won(FIRST, SECOND), times={FIRST: 50.05, SECOND: 50.0, DEFAULT: 70.0})
    assert not found.inverted


def test_a_winner_that_is_no_longer_right_is_out_and_the_next_wins(retimed):
    found = retimed(won(FIRST, SECOND), {FIRST: "wrong"}, {SECOND: 60.0, DEFAULT: 70.0})
    assert found.inverted and found.best == SECOND and found.now_us is None
    assert dict(found.failed) == {FIRST: "correctness: out is off by 3 row RMS"}


def test_where_nobody_is_right_nobody_wins(retimed):
    faults = dict.fromkeys([FIRST, DEFAULT], "raise")
    found = retimed(won(FIRST), faults)
    assert found.best is None and found.times == () and len(found.failed) == 2


def test_another_toolchain_is_unverified_and_another_text_stale():
    winner = won(FIRST)
    assert state_of(winner, GPU, TOOLCHAIN) == "current"
    assert state_of(winner, GPU, replace(TOOLCHAIN, triton="3.7")) == "unverified"
    other_text = won(FIRST, kernel_digest="0" * 12)
    assert state_of(other_text, GPU, replace(TOOLCHAIN, triton="3.7")) == "stale"
    misfit = won(type(FIRST)(FIRST.family, (("BLOCK_M", 64),)))
    assert state_of(misfit, GPU, TOOLCHAIN) == "stale"


def test_times_are_those_of_the_device(retimed):
    found = retimed(won(FIRST))
    for config, microseconds in found.times:
        assert microseconds == pytest.approx(time_us(PROBLEM, config), rel=0.01)


def test_the_command_lists_what_changed_and_ends_with_1_where_a_winner_is_out(retimed, capsys):
    kept = retimed(won(FIRST, SECOND), times={FIRST: 50.0, SECOND: 60.0, DEFAULT: 70.0})
    turned = retimed(won(FIRST, SECOND), times={FIRST: 60.0, SECOND: 50.0, DEFAULT: 70.0})
    report([kept, turned], as_json=True)
    told = capsys.readouterr()
    rows = json.loads(told.out)
    assert [row["inverted"] for row in rows] == [False, True]
    assert (rows[0]["best"], rows[1]["best"]) == ("", str(SECOND))
    assert "2 winners: 1 inverted, 0 stale, 0 unverified" in told.err
    out = retimed(won(FIRST, SECOND), {FIRST: "wrong"})
    with pytest.raises(typer.Exit) as end:
        report([kept, out], as_json=False)
    assert end.value.exit_code == 1
