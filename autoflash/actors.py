"""Actors: what runs on the nodes of a Ray cluster, a card for each GPU and a site for each node.

They answer the calls that the processes of one host answer; neither decides or writes anything.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from typing import Any

from autoflash import __version__
from autoflash.check import Stage
from autoflash.child import Child, ChildError, Failure
from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.gpu import Gpu
from autoflash.pool import Urgency
from autoflash.problem import Problem
from autoflash.records import Resources
from autoflash.scratch import scratch_cache
from autoflash.tune import Machine, compiling

Answer = tuple[bool, Any]  # whether it is one, or an error; the value or the error


class Card:
    """A GPU of a node: a child process that serves it. An actor with a thread for `kill`."""

    def __init__(self, service: Callable[[], Any], environment: Mapping[str, str]) -> None:
        self._child = Child(service, environment)

    def call(self, method: str, arguments: Sequence[Any], deadline_s: float) -> tuple[Any, ...]:
        """The answer, the process's id, None when it has died of it, and how many there were."""
        answer = _answer(lambda: self._child.call(method, *arguments, deadline_s=deadline_s))
        return answer, self._child.pid, self._child.starts

    def kill(self) -> None:
        self._child.kill()

    def close(self) -> None:
        self._child.close()


class Site:
    """A node: its cache of kernels, and its compilers. An actor whose calls wait side by side."""

    def __init__(self, machine: Machine) -> None:
        self._stack, self._done = ExitStack(), False
        self._futures: dict[int, Future[Resources]] = {}
        self._environment = self._stack.enter_context(scratch_cache(lambda: self._done))
        self._pool = self._stack.enter_context(compiling(machine, self._environment))

    async def about(self) -> tuple[str, Mapping[str, str]]:
        """Its version of autoflash, and the environment of its processes."""
        return __version__, self._environment

    async def compile(
        self,
        job: int,
        urgency: Urgency,
        problems: Sequence[Problem],
        config: Config,
        gpu: Gpu,
        stage: Stage | None,
    ) -> Answer:
        self._futures[job] = self._pool.submit(problems, config, gpu, urgency, stage)
        try:
            return True, await asyncio.wrap_future(self._futures[job])
        except (Failure, ChildError, AutoflashError) as error:
            return False, error

    async def hurry(self, job: int, urgency: Urgency) -> None:
        if job in self._futures:
            self._pool.hurry(self._futures[job], urgency)

    async def close(self, done: bool) -> None:
        self._done = done
        self._stack.close()


def _answer(work: Callable[[], Any]) -> Answer:
    """Errors as values: Ray would wrap what an actor raises."""
    try:
        return True, work()
    except (Failure, ChildError, AutoflashError) as error:
        return False, error
