"""Pool: processes that compile candidates ahead of the timing, each compile under a deadline."""

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Protocol

from autoflash.check import cases_of
from autoflash.child import Child, Failure, twice
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.kernel import CompileError, compile_candidate, precompile
from autoflash.problem import Problem
from autoflash.records import Resources

MOST_PROCESSES = 32  # each holds torch and triton, about half a gigabyte


class Compiler(Protocol):
    """What a pool process serves."""

    def compile(self, problems: Sequence[Problem], config: Config, gpu: Gpu) -> Resources:
        """Compile for all problems of a group; the resources for the first."""
        ...


class TritonCompiler:
    """Compiles into triton's cache, where the worker's first launch finds what it needs."""

    def __init__(self, with_cases: bool = True) -> None:
        self._with_cases = with_cases

    def compile(self, problems: Sequence[Problem], config: Config, gpu: Gpu) -> Resources:
        try:
            resources = compile_candidate(problems[0], config, gpu)
            if not self._with_cases or refused(resources, config, gpu):
                return resources
            for problem in problems[1:]:  # the same binaries again unless a stride says otherwise
                precompile(problem, config, gpu, with_lse=False)
            for case in cases_of(problems[0]):
                for with_lse in (True, False) if case.as_timed else (True,):
                    precompile(case.problem, config, gpu, with_lse, case.wide_rows)
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
    """One for each core this process may use, one core left to the parent and its worker."""
    cores = len(os.sched_getaffinity(0))
    return max(1, min(MOST_PROCESSES, cores - 1 if cores > 2 else cores))


class CompilePool:
    """Compiles in the order of asking; a hanging or dying compiler costs its own candidate only."""

    def __init__(
        self,
        compiler: Callable[[], Compiler],
        processes: int | None = None,
        deadline_s: float = 60.0,
    ) -> None:
        self._compiler, self._deadline_s = compiler, deadline_s
        self._most = processes or processes_wanted()
        self._asked: queue.SimpleQueue[tuple[Future[Resources], tuple] | None] = queue.SimpleQueue()
        self._children: list[Child] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._closed = False

    @property
    def pids(self) -> list[int]:
        return [child.pid for child in self._children if child.pid is not None]

    def submit(self, problems: Sequence[Problem], config: Config, gpu: Gpu) -> Future[Resources]:
        """The resources to come; the future raises Failure (`compile`, `timeout`)."""
        future: Future[Resources] = Future()
        self._asked.put((future, (tuple(problems), config, gpu)))
        with self._lock:  # several searches may share a pool
            if len(self._threads) < self._most and not self._closed:
                child = Child(self._compiler)
                thread = threading.Thread(target=self._serve, args=(child,), daemon=True)
                self._children.append(child)
                self._threads.append(thread)
                thread.start()
        return future

    def close(self) -> None:
        """Kill every process; what was asked and not compiled is cancelled."""
        with self._lock:
            self._closed = True
        for _ in self._threads:  # all of them first: any thread may take any of these
            self._asked.put(None)
        for child, thread in zip(self._children, self._threads, strict=True):
            while thread.is_alive():
                child.kill()
                thread.join(0.05)
            child.close()
        while not self._asked.empty():  # whoever waits for one of these waits no longer
            asked = self._asked.get()
            if asked is not None and asked[0].cancel():
                asked[0].set_running_or_notify_cancel()

    def _serve(self, child: Child) -> None:
        while not self._closed:
            asked = self._asked.get()
            if asked is None or self._closed:
                return
            future, arguments = asked
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(twice(partial(self._compile, child, arguments)))
            except Failure as failure:
                status = "compile" if failure.status == "runtime" else failure.status
                future.set_exception(Failure(status, f"compiler: {failure.reason}"))
            except Exception as error:
                future.set_exception(error)

    def _compile(self, child: Child, arguments: tuple[Any, ...]) -> Resources:
        if self._closed:  # it was this that killed the process
            raise Failure("compile", "never compiled")
        return child.call("compile", *arguments, deadline_s=self._deadline_s)
