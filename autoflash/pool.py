"""Pool: processes that compile candidates ahead of the timing, each compile under a deadline."""

import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Any, Protocol

from autoflash.check import Stage, cases_of
from autoflash.child import Child, ChildError, Failure, twice
from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.kernel import CompileError, compile_candidate, precompile
from autoflash.problem import Problem
from autoflash.records import Resources

FEW_CORES = 4
MOST_PROCESSES = 32  # each holds torch and triton, about half a gigabyte


class Urgency(IntEnum):
    """Whether a GPU waits for a binary, is about to, will come to it some time, or perhaps."""

    NOW = 0
    SOON = 1
    AHEAD = 2
    PERHAPS = 3


class Compiler(Protocol):
    """What a pool process serves."""

    def compile(
        self, problems: Sequence[Problem], config: Config, gpu: Gpu, stage: Stage | None
    ) -> Resources:
        """Compile what the stage, or both, need for all problems of a group.

        The resources are those for the first problem.
        """
        ...


class Pool(Protocol):
    """What compiles ahead of the GPUs."""

    def submit(
        self,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        urgency: Urgency,
        stage: Stage | None,
    ) -> Future[Resources]:
        """The resources to come; the future raises Failure (`compile`, `timeout`)."""
        ...

    def hurry(self, future: Future[Resources], urgency: Urgency) -> None:
        """It is this urgent now; nothing changes for what was as urgent or is being compiled."""
        ...

    def close(self) -> None:
        """End all compilers; what was asked and not compiled is cancelled."""
        ...


class TritonCompiler:
    """Compiles into triton's cache, where the worker's first launch finds what it needs."""

    def __init__(self, with_cases: bool = True) -> None:
        self._with_cases = with_cases

    def compile(
        self,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        stage: Stage | None = None,
    ) -> Resources:
        try:
            resources = compile_candidate(problems[0], config, gpu)
            if refused(resources, config, gpu):
                return resources
            for wanted in Stage if stage is None else (stage,):
                with_lse = wanted == Stage.FINAL  # at the real size: timed without, checked with
                for problem in problems:  # the same binaries unless a number says otherwise
                    precompile(problem, config, gpu, with_lse)
                cases = cases_of(problems[0]) if self._with_cases else ()
                for case in cases:
                    if case.stage == wanted:
                        precompile(case.problem, config, gpu, case.with_lse, case.wide_rows)
        except CompileError as error:
            raise Failure("compile", str(error)) from None
        return resources


def refused(resources: Resources, config: Config, gpu: Gpu) -> str | None:
    """Why compiled kernels are not worth running, or cannot run: spills, shared memory."""
    allowed = family_of(config.family).max_spills
    if (resources.spill_bytes or 0) > allowed:
        return f"spills {resources.spill_bytes} bytes a thread, its family allows {allowed}"
    if (resources.smem_bytes or 0) > gpu.smem_per_block:
        return f"takes {resources.smem_bytes} bytes of shared memory of {gpu.smem_per_block}"
    return None


def processes_wanted() -> int:
    """One for each core this process may use but two, where there are more than a few.

    Those are left to the parent and its worker: where no core is idle, the system wakes the parent
    on the worker's own, and a GPU has nothing to do until it has read an answer.
    """
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_PROCESSES, cores - 2 if cores > FEW_CORES else cores))


@dataclass
class _Job:
    """What was asked and nobody compiles yet."""

    arguments: tuple[Any, ...]
    urgency: Urgency


class CompilePool:
    """Compiles the most urgent first, and of those in the order of asking.

    Its processes start at once, so that they are ready when the first GPU is. A hanging or dying
    compiler costs its own candidate only.
    """

    def __init__(
        self,
        compiler: Callable[[], Compiler],
        processes: int | None = None,
        deadline_s: float = 60.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._deadline_s = deadline_s
        self._waiting: dict[Future[Resources], _Job] = {}
        self._changed = threading.Condition()  # several searches may share a pool
        self._closed = False
        self._children = [
            Child(compiler, environment) for _ in range(processes or processes_wanted())
        ]
        self._threads = [
            threading.Thread(target=self._serve, args=(child,), daemon=True)
            for child in self._children
        ]
        for thread in self._threads:
            thread.start()

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children if child.pid is not None]

    def submit(
        self,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        urgency: Urgency = Urgency.NOW,
        stage: Stage | None = None,
    ) -> Future[Resources]:
        future: Future[Resources] = Future()
        with self._changed:
            if self._closed:
                cancel(future)
                return future
            self._waiting[future] = _Job((tuple(problems), config, gpu, stage), urgency)
            self._changed.notify()
        return future

    def hurry(self, future: Future[Resources], urgency: Urgency) -> None:
        with self._changed:
            job = self._waiting.get(future)
            if job is not None and urgency < job.urgency:
                del self._waiting[future]
                self._waiting[future] = _Job(job.arguments, urgency)

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for child, thread in zip(self._children, self._threads, strict=True):
            while thread.is_alive():
                child.kill()
                thread.join(0.05)
            child.close()
        for future in self._waiting:
            cancel(future)
        self._waiting.clear()

    def _serve(self, child: Child) -> None:
        # what a start fails of, the first call tells, for it starts the process again
        with contextlib.suppress(Failure, ChildError, AutoflashError):
            child.start()
        while (taken := self._take()) is not None:
            future, arguments = taken
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(twice(partial(self._compile, child, arguments)))
            except Failure as failure:
                status = "compile" if failure.status == "runtime" else failure.status
                future.set_exception(Failure(status, f"compiler: {failure.reason}"))
            except Exception as error:
                future.set_exception(error)

    def _take(self) -> tuple[Future[Resources], tuple[Any, ...]] | None:
        """The next to compile, once there is one; None when the pool is closed."""
        with self._changed:
            while not self._waiting and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            future = min(self._waiting, key=lambda future: self._waiting[future].urgency)
            return future, self._waiting.pop(future).arguments

    def _compile(self, child: Child, arguments: tuple[Any, ...]) -> Resources:
        if self._closed:  # it was this that killed the process
            raise Failure("compile", "never compiled")
        return child.call("compile", *arguments, deadline_s=self._deadline_s)


def cancel(future: Future[Resources]) -> None:
    """Whoever waits for it waits no longer."""
    if future.cancel():
        future.set_running_or_notify_cancel()
