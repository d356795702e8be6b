"""Several GPUs of a host: dealt problems, shared findings, types apart, GPUs lost, Ctrl-C."""

import os
import signal
import sqlite3
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from threading import Thread

import pytest
from fake_device import GPU, SHORT, TOOLCHAIN, machine, time_us
from fake_fleet import LOST, FleetDevice, in_this_process, other_type
from test_tune import DECODE, PROBLEM, children, stored, tried, wait_for_end, workload

from autoflash.cards import chosen_cards
from autoflash.desk import Desk, Stopped
from autoflash.errors import AutoflashError, BudgetError, DeviceError, StoreError
from autoflash.fleet import tune_on_all
from autoflash.store import Store
from autoflash.tune import options_for

SHAPES = [replace(PROBLEM, seqlen_q=512 * n, seqlen_k=512 * n) for n in range(1, 7)]


@pytest.fixture
def db(tmp_path):
    return tmp_path / "tune.db"


@pytest.fixture
def calls(monkeypatch):
    return in_this_process(monkeypatch)


def search(db, devices, *problems, deadlines=SHORT, **options):
    asked = options_for(**{"effort": "quick", **options})
    return tune_on_all(workload(*problems), devices, machine(deadlines=deadlines), asked, db)


def two(calls, **of_second):
    """Two GPUs of one type, unless the second is said to be otherwise."""
    return {
        0: partial(FleetDevice, calls, 0),
        1: partial(FleetDevice, calls, 1, **of_second),
    }


def winners_of(result):
    return {decision.problem: decision.winner for decision in result.decisions}


def test_gpus_of_one_type_share_a_run_and_check_no_candidate_twice(db, calls, tmp_path):
    problems = [*SHAPES[:3], DECODE]
    everything = {"strategy": "exhaustive"}  # what a sample holds depends on what is decided first
    (result,) = search(db, two(calls), *problems, **everything)
    assert [decision.problem for decision in result.decisions] == problems
    assert stored(db, "SELECT outcome FROM runs") == [("finished",)]
    checked = [(problem.op, config) for _, problem, config in calls.checks]
    assert len(checked) == len(set(checked))
    assert calls.by(0) and calls.by(1)
    asked = [(gpu, problems[0].op, config) for gpu, problems, config in calls.compiled]
    assert len(asked) == len(set(asked))
    (alone,) = search(tmp_path / "alone.db", {0: two(calls)[0]}, *problems, **everything)
    best = winners_of(alone)
    for problem, config in winners_of(result).items():  # as good: the fakes' samples are noisy
        assert time_us(problem, config) == pytest.approx(time_us(problem, best[problem]), rel=0.005)
    assert result.trials == stored(db, "SELECT count(*) FROM trials")[0][0]


def test_gpus_of_two_types_have_a_run_and_winners_each(db, calls):
    other = other_type()
    first, second = search(db, two(calls, gpu=other), PROBLEM, DECODE)
    assert (first.gpu, second.gpu) == (GPU, other) and first.run_id != second.run_id
    for result in (first, second):
        assert [decision.problem for decision in result.decisions] == [PROBLEM, DECODE]
    checked = [{(p.op, config) for _, p, config in calls.by(index)} for index in (0, 1)]
    assert checked[0] == checked[1]
    with Store.open(db, readonly=True) as store:
        assert len(store.winners(GPU)) == len(store.winners(other)) == 2
        assert len(store.trials(other, TOOLCHAIN)) == second.trials


def test_finalists_meet_the_groups_other_shapes_on_whichever_gpu_is_free(db, calls):
    (result,) = search(db, two(calls), *SHAPES[:3], effort="standard")
    winners = set(winners_of(result).values())
    for decision in result.decisions:
        assert winners <= {config for config, _ in decision.times}
    with Store.open(db, readonly=True) as store:
        assert {w.decision for w in store.winners(GPU)} == set(result.decisions)


def test_a_gpu_lost_for_good_gives_its_problem_to_the_others(db, calls, capsys):
    (result,) = search(db, two(calls, lives=5), *SHAPES)
    assert [decision.problem for decision in result.decisions] == SHAPES
    assert not result.undecided and len(calls.by(1)) == 6
    assert f"{LOST}; the others go on without it" in capsys.readouterr().err
    failures = stored(db, "SELECT error FROM trials WHERE status <> 'correct'")
    assert failures == [("CUDA error: device lost",)]
    assert stored(db, "SELECT outcome FROM runs") == [("finished",)]


def test_a_lost_type_does_not_take_the_other_types_results(db, calls, capsys):
    (result,) = search(db, two(calls, gpu=other_type(), lives=0), *SHAPES[:2])
    assert result.gpu == GPU and len(result.decisions) == 2
    assert f"a GPU type came to nothing: {LOST}" in capsys.readouterr().err
    assert stored(db, "SELECT outcome FROM runs ORDER BY id") == [("finished",), ("failed",)]


def test_where_every_gpu_is_lost_the_search_fails_and_can_go_on(db, calls):
    dying = {1: partial(FleetDevice, calls, 1, lives=8)}
    with pytest.raises(DeviceError, match="fell off the bus"):
        search(db, dying, *SHAPES)
    assert stored(db, "SELECT outcome FROM runs") == [("failed",)]
    (result,) = search(db, {0: two(calls)[0]}, *SHAPES)
    assert len(result.decisions) == len(SHAPES) and result.reused == 9
    checked = [config for _, _, config in calls.checks]
    assert len(checked) == len(set(checked))


def test_a_gpu_that_cannot_be_started_is_left_out(db, calls, capsys):
    calls.dead.add(1)
    (result,) = search(db, two(calls), PROBLEM)
    assert result.decisions and not calls.by(1)
    assert f"{LOST}; it is left out" in capsys.readouterr().err
    with pytest.raises(DeviceError, match="fell off the bus"):
        search(db, {1: two(calls)[1]}, PROBLEM)


def test_within_a_budget_the_defaults_come_first(db, calls):
    search(db, {0: two(calls)[0]}, PROBLEM, DECODE, budget_s=60)
    first = {(problem, config) for _, problem, config in calls.checks[:2]}
    assert first == {(PROBLEM, tried()[0]), (DECODE, tried(DECODE)[0])}


def test_a_budget_ends_every_gpus_work_and_defaults_are_an_answer(db, calls):
    slow = {i: partial(FleetDevice, calls, i, check_s=0.1) for i in (0, 1)}
    started = time.monotonic()
    (result,) = search(db, slow, *SHAPES, budget_s=1.5)
    assert time.monotonic() - started < 2.5
    assert len(result.decisions) + len(result.undecided) == len(SHAPES) and result.decisions
    assert stored(db, "SELECT outcome FROM runs") == [("budget",)]
    with pytest.raises(BudgetError):
        search(db.with_name("other.db"), slow, *SHAPES, budget_s=0.01)


@pytest.mark.parametrize("error", [StoreError("disk is full"), KeyboardInterrupt()])
def test_what_ends_the_writing_process_ends_every_gpus_work(db, calls, monkeypatch, error):
    record, made = Store.record_trial, []

    def full(self, run_id, trial):
        made.append(trial)
        if len(made) > 10:
            raise error
        return record(self, run_id, trial)

    monkeypatch.setattr(Store, "record_trial", full)
    with pytest.raises(type(error)):
        search(db, two(calls), *SHAPES)
    checked = len(calls.checks)
    time.sleep(0.1)
    assert len(calls.checks) == checked
    outcome = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
    assert stored(db, "SELECT outcome, count(*) FROM runs, trials") == [(outcome, 10)]
    monkeypatch.setattr(Store, "record_trial", record)
    (result,) = search(db, two(calls), *SHAPES)
    assert len(result.decisions) == len(SHAPES)


SCRIPT = """
import signal
from functools import partial
from pathlib import Path
from fake_device import FakeDevice
from test_fleet import search
from test_tune import PROBLEM, DECODE, tried
from autoflash.worker import DEADLINES

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
    slow = dict.fromkeys([tried()[0], tried(DECODE)[0]], "hang@check_full")
    devices = {{i: partial(FakeDevice, slow) for i in (0, 1)}}
    search(Path({db!r}), devices, PROBLEM, DECODE, deadlines=DEADLINES)
"""


def test_ctrl_c_while_gpus_are_at_work_leaves_no_process_and_keeps_the_trials(db):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(db=str(db))],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    end = time.monotonic() + 60
    while time.monotonic() < end:
        try:
            if stored(db, "SELECT count(*) FROM trials")[0][0] > 5:
                break
        except sqlite3.OperationalError:  # not there yet
            pass
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.05)
    workers = children(process.pid)
    assert len(workers) >= 2
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=30)
    assert process.returncode != 0 and wait_for_end(workers)
    assert "the same command goes on" in said
    assert stored(db, "SELECT outcome FROM runs") == [("interrupted",)]


@pytest.mark.parametrize(("text", "indices"), [("all", (0, 1, 2, 3)), ("2", (2,)), ("3,0", (3, 0))])
def test_gpus_are_all_or_a_list(text, indices):
    assert chosen_cards(text, 4) == indices


@pytest.mark.parametrize("text", ["", "one", "1,", "-1", "1,1", "4", "0,9", "²"])
def test_a_list_of_gpus_that_are_not_there_is_refused_in_a_line(text):
    with pytest.raises(AutoflashError, match=r"^--gpus .*[^.]$"):
        chosen_cards(text, 4)


def test_nobody_waits_at_a_closed_desk_for_an_answer_that_was_lost():
    desk, ends = Desk(), []

    def ask() -> None:
        try:
            ends.append(desk.do(lambda: "answered"))
        except Stopped as stopped:
            ends.append(stopped)

    thread = Thread(target=ask, daemon=True)
    thread.start()
    desk._asked.get()  # taken, as by a thread that Ctrl-C ends before it answers
    desk.closed = True
    thread.join(10)
    assert [type(end) for end in ends] == [Stopped]
