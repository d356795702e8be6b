"""Fleet: several GPUs on one workload, a worker each; this process alone writes."""

import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

from autoflash.ahead import compiled_ahead
from autoflash.cards import chosen_cards, open_card
from autoflash.desk import Desk, SharedJournal, Stopped
from autoflash.entrants import Lab
from autoflash.errors import AutoflashError, BudgetError, DeviceError, SearchError
from autoflash.gpu import Gpu
from autoflash.groups import groups_of
from autoflash.pool import Pool
from autoflash.problem import Problem
from autoflash.progress import Progress, progress_for_each
from autoflash.scratch import scratch_cache
from autoflash.store import Store
from autoflash.team import Team
from autoflash.toolchain import Toolchain
from autoflash.tune import (
    Machine,
    Options,
    TuneResult,
    clocks_held,
    compiling,
    options_for,
    result_of,
    start_run,
    this_machine,
    tune,
)
from autoflash.worker import Device, Worker
from autoflash.workload import Workload


@dataclass(frozen=True)
class Post:
    """One GPU, its process started."""

    name: str
    worker: Worker
    gpu: Gpu
    toolchain: Toolchain

    @property
    def type(self) -> tuple[object, ...]:
        """GPUs of one type speak for one another: what one measures, the others need not."""
        return (self.gpu.identity, self.toolchain)


@dataclass(frozen=True)
class Run:
    """A team at work, and the run of the database that it fills."""

    team: Team
    run_id: int
    posts: tuple[Post, ...]
    refused: list[tuple[Problem, str]]  # problems that no family serves on this type


# Starts the workers, which ask how many seconds are left, and the pool; the stack ends them.
Hire = Callable[[ExitStack, Callable[[], float]], tuple[list[Post], Pool]]


def tune_on_chosen(
    workload: Workload, chosen: str, *, db: Path | None = None, **asked: Any
) -> list[TuneResult]:
    """Search on the GPUs of this host that `chosen` names: `all`, or a list such as `0,2`.

    `asked` is as `options_for` takes it. One GPU alone is tuned as `tune` does, and none of `all`
    as it predicts. Raises as `tune_on_all` does, and for a list of what is not there.
    """
    import torch

    indices = chosen_cards(chosen, torch.cuda.device_count())
    if len(indices) < 2:
        return [tune(workload, db=db, gpu_index=indices[0] if indices else 0, **asked)]
    devices = {index: partial(open_card, index) for index in indices}
    return tune_on_all(workload, devices, this_machine(), options_for(**asked), db)


def tune_on_all(
    workload: Workload,
    devices: Mapping[int, Callable[[], Device]],
    machine: Machine,
    options: Options,
    db: Path | None = None,
) -> list[TuneResult]:
    """Search every problem of the workload on the GPUs that `devices` opens, by their number.

    A GPU that cannot be started, or not again, is left out with a notice. Raises as `tune_with`.
    """

    def hire(stack: ExitStack, left_s: Callable[[], float]) -> tuple[list[Post], Pool]:
        scratch = stack.enter_context(scratch_cache(options.done))
        pool = stack.enter_context(compiling(machine, scratch))
        workers = {
            f"GPU {index}": Worker(device, machine.deadlines, left_s, scratch)
            for index, device in devices.items()
        }
        return started(workers, stack), pool

    return tune_with(workload, hire, options, db)


def tune_with(
    workload: Workload, hire: Hire, options: Options, db: Path | None = None
) -> list[TuneResult]:
    """Search every problem of the workload on the GPUs that are hired.

    GPUs of one type share a run: problems are dealt to whichever is free. Each type has a run and
    a result of its own. Raises as `tune` does where no type came to any decision.
    """
    desk, limit = Desk(), options.limit

    def left_s() -> float:
        return float("-inf") if desk.closed else limit.left_s

    with ExitStack() as stack:
        store = stack.enter_context(Store.open(db))
        posts, pool = hire(stack, left_s)
        mhz = stack.enter_context(clocks_held(options, [post.worker for post in posts]))
        named = [(post.name, post.gpu) for post in posts]
        views = progress_for_each(named, options.budget_s)
        for view in views:
            stack.enter_context(closing(view))
        views[0].notice(
            f"{', '.join(f'{name}: {gpu.name}' for name, gpu in named)}, "
            f"problems: {len(workload.problems)}, database: {store.path}"
        )
        by_post = dict(zip(posts, views, strict=True))
        types: dict[tuple[object, ...], list[Post]] = {}
        for post in posts:
            types.setdefault(post.type, []).append(post)
        runs = [
            _run(workload, options, desk, store, pool, {post: by_post[post] for post in same}, mhz)
            for same in types.values()
        ]
        with _recorded(runs, store, options, views[0]):
            _search(runs, desk, pool)
        return _results(runs, store, workload, options)


def started(workers: Mapping[str, Worker], stack: ExitStack) -> list[Post]:
    """The GPUs that answer, closed with the stack. Raises DeviceError where none does."""
    for worker in workers.values():
        stack.enter_context(closing(worker))

    def hello(name: str) -> Post | DeviceError:
        try:
            return Post(name, workers[name], *workers[name].hello())
        except DeviceError as error:
            return error

    with ThreadPoolExecutor(len(workers)) as starting:
        try:
            answers = list(starting.map(hello, workers))
        except BaseException:
            for worker in workers.values():
                worker.kill()
            raise
    errors = [answer for answer in answers if isinstance(answer, DeviceError)]
    posts = [answer for answer in answers if isinstance(answer, Post)]
    if not posts:
        raise errors[0]
    for error in errors:
        print(f"{error}; it is left out", file=sys.stderr, flush=True)
    return posts


def _run(
    workload: Workload,
    options: Options,
    desk: Desk,
    store: Store,
    pool: Pool,
    posts: Mapping[Post, Progress],
    locked_mhz: int,
) -> Run:
    """A run of the GPUs of one type, its first candidates being compiled."""
    first = next(iter(posts))
    run_id = start_run(store, first.gpu, first.toolchain, workload, options, locked_mhz)
    journal = SharedJournal(desk, store, run_id, first.gpu, first.toolchain)
    if journal.known:
        posts[first].notice(f"{journal.known} candidates are known from earlier runs")
    labs = [
        Lab(
            worker=post.worker,
            pool=pool,
            journal=journal,
            gpu=first.gpu,
            effort=options.effort,
            limit=options.limit,
            seed=options.seed,
            strategy=options.strategy,
            progress=progress,
        )
        for post, progress in posts.items()
    ]
    groups, refused = groups_of([problem for problem, _ in workload.problems], first.gpu)
    return Run(Team(labs, groups, desk), run_id, tuple(posts), refused)


def _search(runs: list[Run], desk: Desk, pool: Pool) -> None:
    """Every team's work, each GPU in a thread, until it is done or this thread is interrupted."""
    with ExitStack() as stack:
        for run in runs:
            stack.enter_context(compiled_ahead(run.team.labs[0], run.team.pairs))
        _work_all(runs, desk, pool)


def _work_all(runs: list[Run], desk: Desk, pool: Pool) -> None:
    threads = [
        Thread(target=_work, args=(run.team, lab, desk), daemon=True)
        for run in runs
        for lab in run.team.labs
    ]
    try:
        for thread in threads:
            thread.start()
        desk.serve(len(threads))
    finally:
        desk.closed = True
        if any(thread.is_alive() for thread in threads):
            pool.close()
        while any(thread.is_alive() for thread in threads):
            for run in runs:
                for post in run.posts:
                    post.worker.kill()
            for thread in threads:
                thread.join(0.01)


def _work(team: Team, lab: Lab, desk: Desk) -> None:
    """The thread of one GPU."""
    error: BaseException | None = None
    try:
        team.work(lab)
    except (Stopped, CancelledError):
        pass
    except BaseException as raised:
        error = raised
    desk.leave(error)


@contextmanager
def _recorded(
    runs: list[Run], store: Store, options: Options, progress: Progress
) -> Iterator[None]:
    """The runs ended in the database with what came of them."""
    outcome = "failed"
    try:
        yield
        outcome = "finished" if options.done() else "budget"
    except KeyboardInterrupt:
        outcome = "interrupted"
        trials = sum(run.team.labs[0].journal.trials for run in runs)
        progress.notice(
            f"interrupted: the {trials} trials of this run are kept in {store.path}; "
            "the same command goes on from there"
        )
        raise
    finally:
        for run in runs:
            run.team.end()
            failed = outcome == "finished" and not run.team.decided
            store.end_run(run.run_id, "failed" if failed else outcome)


def _results(
    runs: list[Run], store: Store, workload: Workload, options: Options
) -> list[TuneResult]:
    """The result of each type; those that came to nothing raise only where all did."""
    results: list[TuneResult] = []
    errors: list[AutoflashError] = []
    for run in runs:
        decisions, failed = run.team.in_order()
        lab, post = run.team.labs[0], run.posts[0]
        busies = [each.worker.busy for each in run.posts]
        if run.team.lost and not decisions and not options.limit.over:
            errors.append(DeviceError(run.team.lost[0]))
            continue
        try:
            found = (decisions, run.refused + failed)
            results.append(
                result_of(lab, store, run.run_id, post.toolchain, workload, *found, busies)
            )
        except (BudgetError, SearchError) as error:
            errors.append(error)
    if not results:
        raise errors[0]
    for error in errors:
        print(f"a GPU type came to nothing: {error}", file=sys.stderr, flush=True)
    return results
