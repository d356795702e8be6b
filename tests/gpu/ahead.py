"""Which candidates a test on a GPU launches; their kernels, compiled side by side before that.

All candidates with AUTOFLASH_EVERY_CANDIDATE set, else few: see `varied`.
"""

import atexit
import os
from collections.abc import Mapping, Sequence
from functools import cache, partial
from itertools import combinations

from autoflash.check import Stage
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.families.family import Family, space
from autoflash.gpu import Gpu
from autoflash.kernel import precompile
from autoflash.pool import CompilePool, processes_wanted
from autoflash.problem import Problem
from autoflash.records import Resources


def varied(family: Family, problem: Problem, gpu: Gpu) -> list[Config]:
    """The default, and candidates in which any two knobs' values occur that one candidate has.

    Of candidates that differ in their launch alone there is one.
    """
    candidates = [config for config, reason in space(family, problem, gpu) if reason is None]
    candidates = list({family.binary(config): config for config in candidates}.values())
    default = family.default(problem, gpu)
    if os.environ.get("AUTOFLASH_EVERY_CANDIDATE"):
        return list(dict.fromkeys([default, *candidates]))
    pairs = {each: _pairs(family, each) for each in candidates}
    chosen, missing = [default], set().union(*pairs.values()) - _pairs(family, default)
    while missing:
        chosen.append(max(candidates, key=lambda each: len(missing & pairs[each])))
        missing -= pairs[chosen[-1]]
    return chosen


def _pairs(family: Family, config: Config) -> set[tuple[object, ...]]:
    return set(combinations(family.binary(config).knobs, 2))


class EveryKernel:
    """Compiles a config's kernels for every problem, and not those of the checks."""

    def __init__(self, with_lse: Sequence[bool], wide_rows: int) -> None:
        self._with_lse, self._wide_rows = with_lse, wide_rows

    def compile(
        self, problems: Sequence[Problem], config: Config, gpu: Gpu, stage: Stage | None
    ) -> Resources:
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
    for failure in _failures(wanted, gpu, with_lse, wide_rows).values():
        raise failure


def compiling(
    configs: Sequence[Config], problem: Problem, gpu: Gpu, with_lse: Sequence[bool] = (True,)
) -> list[Config]:
    """Those that compile for the problem, compiled: the greater part of them."""
    failed = _failures({config: [problem] for config in configs}, gpu, with_lse)
    assert len(failed) < len(configs) / 2, failed
    return [config for config in configs if config not in failed]


def _failures(
    wanted: Mapping[Config, Sequence[Problem]],
    gpu: Gpu,
    with_lse: Sequence[bool],
    wide_rows: int = 0,
) -> dict[Config, Failure]:
    pool = _pool(tuple(with_lse), wide_rows)
    futures = {config: pool.submit(problems, config, gpu) for config, problems in wanted.items()}
    failures = {config: future.exception() for config, future in futures.items()}
    return {config: error for config, error in failures.items() if isinstance(error, Failure)}


@cache
def _pool(with_lse: tuple[bool, ...], wide_rows: int) -> CompilePool:
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))  # each has a pool of its own
    processes = max(2, processes_wanted() // workers)
    pool = CompilePool(partial(EveryKernel, with_lse, wide_rows), processes)
    atexit.register(pool.close)
    return pool
