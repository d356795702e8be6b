"""Many processes and one database: nobody is turned away, nothing is lost."""

import signal
import time

import pytest
from store_samples import H200, TOOLCHAIN
from store_writer import Writer, problems

from autoflash.store import Store
from autoflash.store.checking import check

WRITERS = 16


@pytest.fixture(scope="module")
def writers():
    started = [Writer() for _ in range(WRITERS)]
    yield started
    for writer in started:
        writer.end()


def test_sixteen_processes_open_a_new_database_at_once_and_write(writers, tmp_path):
    for number in range(10):
        path = tmp_path / f"{number}.db"
        for own, writer in enumerate(writers):
            writer.tell("write", path, own=own, count=1)
        assert [writer.heard() for writer in writers] == ["done"] * WRITERS
        with Store.open(path, readonly=True) as store:
            assert len(store.trials(H200, TOOLCHAIN)) == WRITERS


def test_nothing_is_lost_when_sixteen_write_and_one_is_killed_in_its_transaction(  # case B17
    writers, tmp_path
):
    path, count = tmp_path / "autoflash.db", 100
    victim = Writer()
    victim.tell("hold", path)
    assert victim.heard() == "inside"
    for own, writer in enumerate(writers):
        writer.tell("write", path, own=own, count=count)
    time.sleep(0.2)  # all of them wait for the victim by now
    victim.process.send_signal(signal.SIGKILL)
    victim.end()

    seen, until = [0], time.monotonic() + 60
    while seen[-1] < WRITERS * count and time.monotonic() < until:
        with Store.open(path, readonly=True) as reader:
            seen.append(reader.conn.execute("SELECT count(*) FROM trials").fetchone()[0])
        time.sleep(0.05)
    assert [writer.heard() for writer in writers] == ["done"] * WRITERS

    assert seen == sorted(seen)
    with Store.open(path) as store:
        trials = store.trials(H200, TOOLCHAIN)
        assert len(trials) == WRITERS * count
        best = dict(
            store.conn.execute("SELECT batch, best_us FROM leaderboard WHERE seqlen_k = 1024")
        )
        assert best == {problem.batch: 10.0 for problem in problems(0, count)[: count // 2]}
        assert not [finding for finding in check(store) if finding.bad]
