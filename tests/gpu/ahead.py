"""Kernels that a test on a GPU will launch, compiled side by side before the first of them runs."""

import atexit
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.kernel import precompile
from autoflash.pool import CompilePool, processes_wanted
from autoflash.problem import Problem
from autoflash.records import Resources


class EveryKernel:
    """Compiles a config's kernels for every problem, and not those of the checks."""

    def __init__(self, with_lse: Sequence[bool], wide_rows: int) -> None:
        self._with_lse, self._wide_rows = with_lse, wide_rows

    def compile(self, problems: Sequence[Problem], config: Config, gpu: Gpu) -> Resources:
        for problem in problems:
            for with_lse in self._with_lse:
                precompile(problem, config, gpu, with_lse, self._wide_rows)  # pyright: ignore[reportArgumentType]
        return Resources()


def compile_ahead(
    wanted: Mapping[Config, Sequence[Problem]],
    gpu: Gpu,
    with_lse: Sequence[bool] = (True,),
    wide_rows: int = 0,
) -> None:
    """Compile each config for its problems; raises the first failure."""
    pool = _pool(tuple(with_lse), wide_rows)
    futures = [pool.submit(problems, config, gpu) for config, problems in wanted.items()]
    for future in futures:
        future.result()


@cache
def _pool(with_lse: tuple[bool, ...], wide_rows: int) -> CompilePool:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # each has a pool of its own
    processes = max(2, processes_wanted() // workers)
    pool = CompilePool(partial(EveryKernel, with_lse, wide_rows), processes)
    atexit.register(pool.close)
    return pool
