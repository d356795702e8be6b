"""The compile pool: its processes end when it is closed, whatever they were doing."""

import threading
from concurrent.futures import CancelledError

import pytest
from idle_compiler import IdleCompiler, StuckCompiler
from making import H200, candidates, prefill_of

from autoflash.pool import CompilePool

PROBLEM = prefill_of()


@pytest.fixture
def pool():
    pool = CompilePool(IdleCompiler, processes=4)
    config = candidates(PROBLEM)[0]
    futures = [pool.submit([PROBLEM], config, H200) for _ in range(8)]
    assert {future.result(60).registers for future in futures} == {1}
    return pool


def test_a_pool_with_nothing_to_do_closes(pool):
    closing = threading.Thread(target=pool.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    assert pool.pids == []


def test_who_waits_for_what_a_closed_pool_never_compiled_is_told():
    pool = CompilePool(StuckCompiler, processes=1)
    config = candidates(PROBLEM)[0]
    _, waiting = (pool.submit([PROBLEM], config, H200) for _ in range(2))
    pool.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
