"""Tune: the main job. A workload's problems searched on this machine's GPU, or predicted."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from pathlib import Path

from autoflash import gpu as gpus
from autoflash.busy import Busy, Shares, shares_of
from autoflash.cards import open_card
from autoflash.clocks import clock_locked
from autoflash.effort import Effort, TimeLimit, effort_of
from autoflash.entrants import Entrants, Lab
from autoflash.errors import AutoflashError, BudgetError, SearchError
from autoflash.gpu import Gpu
from autoflash.groups import groups_of
from autoflash.journal import Journal
from autoflash.pool import CompilePool, Compiler, TritonCompiler
from autoflash.predict import INTERPRET, INTERPRETER_DEADLINES, InterpretedDevice, predict
from autoflash.problem import Problem
from autoflash.progress import progress_for
from autoflash.records import Decision
from autoflash.runtime.launch import interpreted
from autoflash.scratch import scratch_cache
from autoflash.search import strategy_for
from autoflash.store import Store
from autoflash.toolchain import Toolchain, detect_toolchain
from autoflash.tournament import hold
from autoflash.worker import DEADLINES, Deadlines, Device, Worker
from autoflash.workload import Workload

PROTOCOL = "5: as 3, in finals of long products samples of 50 ms after 35 of their own config"
NO_GPU = "No GPU here: kernels are compiled for {}, checked in an interpreter and only predicted"


@dataclass(frozen=True)
class Machine:
    """What a search runs on. `device` None is a machine without a GPU: choices are predicted, and
    small cases need not be compiled, for the interpreter checks them.

    The services are made in processes of their own, so they are pickled: functions or partials.
    """

    device: Callable[[], Device] | None
    compiler: Callable[[], Compiler] = TritonCompiler
    deadlines: Deadlines = DEADLINES
    compile_processes: int | None = None


@dataclass(frozen=True)
class Options:
    """What the user asks of one search."""

    effort: Effort
    limit: TimeLimit
    budget_s: float | None
    seed: int
    strategy: str
    argv: tuple[str, ...]
    lock_clocks: bool = False
    keep_kernels: bool = False

    def done(self) -> bool:
        """Whether the search was not cut short by its budget."""
        return not (self.limit.over or self.limit.cut)

    def forgets_kernels(self) -> bool:
        """Whether what was compiled is of no more use once the search has ended."""
        return self.done() and not self.keep_kernels


@dataclass(frozen=True)
class TuneResult:
    """What a run came to. `undecided` are problems without a decision, each with the reason.

    `trials` were made in this run, `reused` were taken from earlier ones. `busy` says for which
    share of the time from the first trial to the last the GPUs and their processes were at work,
    None where nothing was tried. `anytime` has for each problem the seconds since the run's start
    and the best time from then on.
    """

    gpu: Gpu
    toolchain: Toolchain
    db: Path
    run_id: int
    decisions: tuple[Decision, ...]
    undecided: tuple[tuple[Problem, str], ...]
    trials: int
    reused: int
    seconds: float
    busy: Shares | None = None
    anytime: tuple[tuple[Problem, tuple[tuple[float, float], ...]], ...] = ()


def this_machine(gpu_index: int = 0) -> Machine:
    """The GPU at this index, or none where torch sees none. Starts no CUDA in this process."""
    if not gpus.cuda_available():
        return Machine(device=None, compiler=partial(TritonCompiler, with_cases=False))
    return Machine(device=partial(open_card, gpu_index))


def options_for(
    *,
    effort: str = "standard",
    budget_s: float | None = None,
    seed: int = 0,
    strategy: str = "auto",
    argv: Sequence[str] = (),
    lock_clocks: bool = False,
) -> Options:
    """What a user asked, and the clock of its budget started. Raises AutoflashError."""
    if interpreted():
        raise AutoflashError("TRITON_INTERPRET is set: interpreted kernels cannot be tuned")
    if budget_s is not None and not (isfinite(budget_s) and budget_s > 0):
        raise AutoflashError(f"budget {budget_s} is not a positive number of seconds")
    strategy_for(strategy, 1, 1)  # a wrong name is told before anything is started
    limit = TimeLimit(budget_s)
    return Options(effort_of(effort), limit, budget_s, seed, strategy, tuple(argv), lock_clocks)


def tune(
    workload: Workload,
    *,
    db: Path | None = None,
    gpu_index: int = 0,
    target: str | None = None,
    effort: str = "standard",
    budget_s: float | None = None,
    seed: int = 0,
    strategy: str = "auto",
    argv: Sequence[str] = (),
    lock_clocks: bool = False,
    machine: Machine | None = None,
    keep_kernels: bool = False,
) -> TuneResult:
    """Search every problem of the workload; each trial is in the database once it is made.

    `db` None is the user's own database. `target` names a known GPU to predict for, whatever is
    in this machine. `budget_s` is a hard limit in seconds. `lock_clocks` holds the GPU's clock
    where the driver allows it. `keep_kernels` leaves what is compiled to the next search on this
    machine. Run again, it goes on where it was stopped. Raises SearchError
    when every candidate of every problem failed, and BudgetError when the budget ended before any
    was checked and timed; neither stores a winner.
    """
    options = options_for(
        effort=effort,
        budget_s=budget_s,
        seed=seed,
        strategy=strategy,
        argv=argv,
        lock_clocks=lock_clocks,
    )
    options = replace(options, keep_kernels=keep_kernels)
    predicted_for = gpus.known(target) if target else None
    machine = machine or this_machine(gpu_index)
    if machine.device is None or predicted_for:
        gpu = predicted_for or gpus.known(gpus.DEFAULT_TARGET)
        print(NO_GPU.format(gpu.name), file=sys.stderr, flush=True)
        return _predict(workload, replace(machine, device=None), options, gpu, db)
    limit, device, deadlines = options.limit, machine.device, machine.deadlines
    with (
        Store.open(db) as store,
        scratch_cache(options.forgets_kernels) as scratch,
        compiling(machine, scratch) as pool,
        closing(Worker(device, deadlines, lambda: limit.left_s, scratch)) as worker,
    ):
        return _measure(workload, options, worker, pool, store)


def compiling(machine: Machine, environment: Mapping[str, str]) -> closing[CompilePool]:
    """The machine's pool. Made before its GPUs are greeted: either takes seconds to start."""
    compile_s = machine.deadlines.compile_s
    return closing(CompilePool(machine.compiler, machine.compile_processes, compile_s, environment))


def _measure(
    workload: Workload, options: Options, worker: Worker, pool: CompilePool, store: Store
) -> TuneResult:
    gpu, toolchain = worker.hello()
    with (
        clocks_held(options, [worker]) as mhz,
        _lab(workload, options, worker, pool, store, gpu, toolchain, mhz) as (lab, run_id),
    ):
        lab.progress.notice(
            f"{gpu.name}, problems: {len(workload.problems)}, database: {store.path}"
        )
        if lab.journal.known:
            lab.progress.notice(f"{lab.journal.known} candidates are known from earlier runs")
        groups, undecided = groups_of([problem for problem, _ in workload.problems], gpu)
        decisions, failed = hold(lab, [Entrants(lab, group) for group in groups])
        undecided += failed
        found = (decisions, undecided)
        return result_of(lab, store, run_id, toolchain, workload, *found, [worker.busy])


@contextmanager
def clocks_held(options: Options, workers: Sequence[Worker]) -> Iterator[int]:
    """The clock that all the workers' cards are locked to, 0 where none or not all are."""
    with ExitStack() as stack:
        locks = []
        for worker in workers if options.lock_clocks else ():
            lock = stack.enter_context(clock_locked(worker.uuid()))
            locks.append(lock)
            if not lock.mhz:
                print(f"clocks are not locked: {lock.why}", file=sys.stderr, flush=True)
        yield min((lock.mhz for lock in locks), default=0)


def _predict(
    workload: Workload, machine: Machine, options: Options, gpu: Gpu, db: Path | None
) -> TuneResult:
    toolchain = detect_toolchain()
    interpreter = partial(InterpretedDevice, gpu)
    limit = options.limit
    with (
        Store.open(db) as store,
        scratch_cache(options.done) as scratch,
        compiling(machine, scratch) as pool,
        closing(
            Worker(interpreter, INTERPRETER_DEADLINES, lambda: limit.left_s, INTERPRET)
        ) as worker,
        _lab(workload, options, worker, pool, store, gpu, toolchain, predicted=True) as (
            lab,
            run_id,
        ),
    ):
        lab.progress.notice(f"problems: {len(workload.problems)}, database: {store.path}")
        groups, undecided = groups_of([problem for problem, _ in workload.problems], gpu)
        decisions, failed = predict(lab, [Entrants(lab, group) for group in groups])
        found = (decisions, undecided + failed)
        return result_of(lab, store, run_id, toolchain, workload, *found, [])


@contextmanager
def _lab(
    workload: Workload,
    options: Options,
    worker: Worker,
    pool: CompilePool,
    store: Store,
    gpu: Gpu,
    toolchain: Toolchain,
    locked_mhz: int = 0,
    predicted: bool = False,
) -> Iterator[tuple[Lab, int]]:
    """What the search works with, and its run in the database, ended with its outcome."""
    with closing(progress_for(gpu, options.budget_s)) as progress:
        run_id = start_run(store, gpu, toolchain, workload, options, locked_mhz)
        lab = Lab(
            worker=worker,
            pool=pool,
            journal=Journal(store, run_id, gpu, toolchain),
            gpu=gpu,
            effort=options.effort,
            limit=options.limit,
            seed=options.seed,
            strategy=options.strategy,
            progress=progress,
            source="predicted" if predicted else "measured",
        )
        outcome = "failed"
        try:
            yield lab, run_id
            outcome = "finished" if options.done() else "budget"
        except KeyboardInterrupt:
            outcome = "interrupted"
            progress.notice(
                f"interrupted: the {lab.journal.trials} trials of this run are kept in "
                f"{store.path}; the same command goes on from there"
            )
            raise
        except BudgetError:
            outcome = "budget"
            raise
        finally:
            store.end_run(run_id, outcome)


def start_run(
    store: Store,
    gpu: Gpu,
    toolchain: Toolchain,
    workload: Workload,
    options: Options,
    locked_mhz: int = 0,
) -> int:
    """The id of a new run of these problems."""
    run_id = store.start_run(
        gpu,
        toolchain,
        seed=options.seed,
        effort=options.effort.name,
        budget_s=options.budget_s,
        argv=list(options.argv),
        protocol=PROTOCOL,
        locked_clock_mhz=locked_mhz,
    )
    for problem, weight in workload.problems:
        store.add_problem(run_id, problem, weight)
    return run_id


def result_of(
    lab: Lab,
    store: Store,
    run_id: int,
    toolchain: Toolchain,
    workload: Workload,
    decisions: Sequence[Decision],
    undecided: Sequence[tuple[Problem, str]],
    of_gpus: Sequence[Busy],
) -> TuneResult:
    """What a run came to, in the order of the workload.

    Raises SearchError or BudgetError where nothing at all was decided.
    """
    if not decisions and undecided:
        if lab.limit.over or lab.limit.cut:
            raise BudgetError(
                "the budget ended before any problem was decided; no winner was stored"
            )
        raise SearchError(f"no winner was stored: {undecided[0][1]}")
    places = {problem: place for place, (problem, _) in enumerate(workload.problems)}
    curves = store.anytime(run_id)
    return TuneResult(
        gpu=lab.gpu,
        toolchain=toolchain,
        db=store.path,
        run_id=run_id,
        decisions=tuple(sorted(decisions, key=lambda each: places[each.problem])),
        undecided=tuple(undecided),
        trials=lab.journal.trials,
        reused=lab.journal.reused,
        seconds=lab.limit.elapsed_s,
        busy=shares_of(of_gpus),
        anytime=tuple((p, tuple(curves[p])) for p in sorted(curves, key=places.__getitem__)),
    )
