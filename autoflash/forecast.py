"""Forecast: what a search would try, and how long about that takes. Nothing is started."""

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoflash.bench import SAMPLE_US, calls_in_graph, graph_cap_us, sets_needed
from autoflash.cards import chosen_cards
from autoflash.config import Config
from autoflash.effort import Effort
from autoflash.families import family_of
from autoflash.gpu import DEFAULT_TARGET, Gpu, detect
from autoflash.gpu import known as known_gpu
from autoflash.groups import Group, groups_of
from autoflash.journal import Journal
from autoflash.problem import Problem
from autoflash.roofline import floor
from autoflash.rounds import finalists_of, pace_of_final
from autoflash.search import strategy_for
from autoflash.search.exhaustive import exhaustive
from autoflash.store import Store, default_path
from autoflash.store.opening import nothing_yet, snapshot
from autoflash.toolchain import Toolchain
from autoflash.tune import Options
from autoflash.workload import Workload

# Mean time of a candidate over the roofline's, of the 2057 timed ones of the table recorded on the
# H200 (tests/data).
OVER_ROOFLINE = 1.7
UNKNOWN_US = 10.0  # of a call on a GPU whose rates are not known

PACE_SQL = """
SELECT sum(seconds) / sum(screened) FROM (
  SELECT
    (julianday(max(trials.recorded_at)) - julianday(runs.started_at)) * 86400 AS seconds,
    count(DISTINCT iif(trials.stage = 'screen', trials.problem_id || ':' || trials.config_id, NULL))
      AS screened
  FROM trials
  JOIN runs ON runs.id = trials.run_id
  JOIN gpus ON gpus.id = runs.gpu_id
  WHERE trials.source = 'measured' AND (gpus.name, gpus.arch, gpus.num_sms, gpus.memory_gib,
    gpus.mig_profile) = (?, ?, ?, ?, ?) AND runs.effort = ?
  GROUP BY runs.id
)
"""


@dataclass(frozen=True)
class Forecast:
    """Of one problem: `tried` of its valid `candidates`, of which `known` have trials already.

    `compiles` are the kernels that no problem before it compiles. `seconds` are by the pace of
    earlier runs of this effort on such a GPU, else (`from_roofline`) of the timing alone, to which
    compiling and checking are added. `why` no family serves the problem, where none does.
    """

    problem: Problem
    candidates: int = 0
    tried: int = 0
    known: int = 0
    compiles: int = 0
    seconds: float = 0.0
    from_roofline: bool = True
    why: str = ""


def gpu_types(chosen: str | None, index: int, target: str | None) -> list[tuple[Gpu, int]]:
    """The types of the GPUs that `tune` would use with these options, and how many of each.

    Reads their properties, which starts CUDA in this process; where there is no GPU the target.
    Raises DeviceError and AutoflashError as `tune` does.
    """
    import torch

    there = torch.cuda.device_count()
    if target or not there:
        return [(known_gpu(target or DEFAULT_TARGET), 1)]
    indices = chosen_cards(chosen, there) if chosen else (index,)
    types: dict[Any, list[Gpu]] = {}
    for gpu in map(detect, indices):
        types.setdefault(gpu.identity, []).append(gpu)
    return [(same[0], len(same)) for same in types.values()]


def forecasts(
    workload: Workload,
    gpu: Gpu,
    toolchain: Toolchain,
    options: Options,
    db: Path | None = None,
    gpus: int = 1,
) -> list[Forecast]:
    """What a search would do on so many GPUs of this type, problem by problem.

    The database is read where there is one, and not made where there is none. Where candidates
    are tried by what others came to, `known` and `compiles` are those of the likeliest.
    """
    path = default_path() if db is None else db
    with snapshot(path) if path.exists() else nothing_yet() as conn:
        journal = Journal(Store(path, conn), 0, gpu, toolchain)
        pace = _pace(conn, gpu, options.effort)
    groups, refused = groups_of([problem for problem, _ in workload.problems], gpu)
    found = [
        each for group in groups for each in _of_group(group, gpu, journal, options, pace, gpus)
    ]
    return found + [Forecast(problem, why=why) for problem, why in refused]


def _of_group(
    group: Group, gpu: Gpu, journal: Journal, options: Options, pace: float | None, gpus: int
) -> Sequence[Forecast]:
    binaries: set[Any] = set()
    found = []
    for at, problem in enumerate(group.problems):
        candidates = group.candidates(problem, gpu)
        effort = options.effort
        likely = _likely(candidates, options, effort.max_climbed if at else effort.max_candidates)
        new = [config for config in likely if journal.screened(problem, config) is None]
        # what was tried on one shape of the group is compiled and checked for all
        unseen = [config for config in new if not journal.of_group(group.problems, config)]
        compiled = {family_of(config.family).binary(config) for config in unseen} - binaries
        binaries |= compiled
        each_s = _timing_s(problem, gpu, options.effort) if pace is None else pace
        found.append(
            Forecast(
                problem,
                candidates=len(candidates),
                tried=len(likely),
                known=len(likely) - len(new),
                compiles=len(compiled),
                seconds=len(new) * each_s / gpus,
                from_roofline=pace is None,
            )
        )
    return found


def _likely(candidates: Sequence[Config], options: Options, most: int) -> list[Config]:
    """The candidates that are tried, where the strategy can say so before anything is."""
    strategy = strategy_for(options.strategy, len(candidates), most)
    first = next(strategy(candidates, most, options.seed, 1))
    tried = len(first) if strategy is exhaustive else min(most, len(candidates))
    return list(dict.fromkeys([*first, *candidates]))[:tried]


def _timing_s(problem: Problem, gpu: Gpu, effort: Effort) -> float:
    """GPU seconds that one candidate takes, its part in the finals among them."""
    least = floor(problem, gpu)
    call_us = least.floor_us * OVER_ROOFLINE or UNKNOWN_US
    sets = sets_needed(least.bytes_moved, gpu.l2_bytes, gpu.memory_gib * 2**30)
    graph_us = graph_cap_us(effort.first_cap_us, effort.rungs[0])
    of_graph_us = max(SAMPLE_US, call_us * calls_in_graph(call_us, sets, graph_us))
    screened_us = 2 * call_us + min(effort.first_cap_us, (effort.rungs[0] + 1) * of_graph_us)
    rounds, pace = pace_of_final(problem, call_us, gpu, effort)
    of_sample_us = max(SAMPLE_US, call_us * calls_in_graph(call_us, sets, pace.timed_us))
    turns = rounds * finalists_of(problem, call_us, gpu, effort)
    finals_us = turns * (pace.lead_us + pace.timed_us if pace.lead_us else of_sample_us)
    return (screened_us + finals_us / effort.max_candidates) / 1e6


def _pace(conn: sqlite3.Connection, gpu: Gpu, effort: Effort) -> float | None:
    """Seconds per candidate of earlier runs, finals, compiling and waiting among them."""
    return conn.execute(PACE_SQL, [*gpu.identity, effort.name]).fetchone()[0]
