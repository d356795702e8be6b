"""The compile pool: what it compiles first, and that its processes end when it is closed."""

import threading
import time
from concurrent.futures import CancelledError
from contextlib import closing
from functools import partial

import pytest
from idle_compiler import IdleCompiler, NotingCompiler, StuckCompiler, broken_compiler
from making import H200, candidates, prefill_of

from autoflash.child import ChildError
from autoflash.pool import CompilePool, Urgency

PROBLEM = prefill_of()
CONFIGS = candidates(PROBLEM)


@pytest.fixture
def pool():
    pool = CompilePool(IdleCompiler, processes=4)
    futures = [pool.submit([PROBLEM], CONFIGS[0], H200) for _ in range(8)]
    assert {future.result(60).registers for future in futures} == {1}
    return pool


def test_its_processes_are_started_before_anything_is_asked():
    with closing(CompilePool(IdleCompiler, processes=2)) as pool:
        end = time.monotonic() + 60
        while len(pool.pids) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        assert len(pool.pids) == 2


def test_what_is_more_urgent_is_compiled_first_and_the_rest_in_the_order_of_asking(tmp_path):
    go, notes = tmp_path / "go", tmp_path / "notes"
    first, *ahead, soon, hurried, now = CONFIGS[:7]
    with closing(CompilePool(partial(NotingCompiler, go, notes), processes=1)) as pool:
        futures = [pool.submit([PROBLEM], first, H200)]
        while not futures[0].running():
            time.sleep(0.01)
        asked = {config: pool.submit([PROBLEM], config, H200, Urgency.AHEAD) for config in ahead}
        later = pool.submit([PROBLEM], hurried, H200, Urgency.AHEAD)
        futures += [pool.submit([PROBLEM], soon, H200, Urgency.SOON), later, *asked.values()]
        futures.append(pool.submit([PROBLEM], now, H200, Urgency.NOW))
        pool.hurry(later, Urgency.NOW)
        pool.hurry(asked[ahead[0]], Urgency.AHEAD)  # as urgent as it was: keeps its place
        go.touch()
        for future in futures:
            future.result(60)
        pool.hurry(later, Urgency.NOW)  # of what is compiled nothing is asked again
    compiled = notes.read_text().splitlines()
    assert compiled == [str(config) for config in (first, now, hurried, soon, *ahead)]


def test_a_compiler_that_cannot_be_made_is_told_to_whoever_waits():
    with closing(CompilePool(broken_compiler, processes=1)) as pool:
        for _ in range(2):
            with pytest.raises(ChildError, match="ValueError: no compiler here"):
                pool.submit([PROBLEM], CONFIGS[0], H200).result(60)


def test_a_pool_with_nothing_to_do_closes(pool):
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert pool.pids == []


def test_who_waits_for_what_a_closed_pool_never_compiled_is_told():
    pool = CompilePool(StuckCompiler, processes=1)
    _, waiting = (pool.submit([PROBLEM], CONFIGS[0], H200) for _ in range(2))
    pool.close()
    for late in (waiting, pool.submit([PROBLEM], CONFIGS[0], H200)):
        with pytest.raises(CancelledError):
            late.result(10)
