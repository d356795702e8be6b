"""Worker: the process that holds a GPU, seen from the parent, which never touches CUDA."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from autoflash.accuracy import Verdict
from autoflash.bench import Pace, Timing
from autoflash.busy import Busy
from autoflash.check import Stage
from autoflash.child import Call, Child, Failure, twice
from autoflash.config import Config
from autoflash.errors import DeviceError
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import Clocks
from autoflash.toolchain import Toolchain

# the config, samples, cap_us, give_up_us, and who is made ready meanwhile
Screening = tuple[Config, int, float, float, Config | None]


class LimitReached(Exception):
    """The time of the whole search is over; nothing is wrong with the candidate at hand."""


class CheckingDevice(Protocol):
    """What a worker process serves. Every method may raise Failure, for that candidate alone."""

    def hello(self) -> tuple[Gpu, Toolchain]:
        """Which GPU it is, and with what it works."""
        ...

    def check(self, problem: Problem, config: Config, seed: int, stage: Stage | None) -> Verdict:
        """Errors on small problems of the same kernels; a wrong result is a Failure.

        On those of the stage, or on all.
        """
        ...


class Device(CheckingDevice, Protocol):
    """One that can time as well."""

    def gpu_s(self) -> float:
        """For how many seconds the GPU was at work on the calls so far, checks counted whole."""
        ...

    def uuid(self) -> str:
        """By which NVML knows the card."""
        ...

    def prepare(self, problem: Problem, seed: int) -> None:
        """Make the rotating buffers of this problem, in place of the last one's."""
        ...

    def screen(
        self, config: Config, samples: int, cap_us: float, give_up_us: float, ahead: Config | None
    ) -> Timing:
        """Up to `samples` samples; one, and `dropped`, if a first call exceeds `give_up_us`.

        While the GPU works the host may make `ahead` ready, which will be screened next.
        """
        ...

    def check_full(self, config: Config, seed: int) -> Verdict:
        """Errors of sampled rows of the prepared problem, after bit-equal repeats."""
        ...

    def arm(self, config: Config, pace: Pace) -> None:
        """Make the config ready to be sampled at this pace."""
        ...

    def sample(self, rounds: Sequence[Sequence[Config]]) -> list[tuple[list[float], bool]]:
        """Of each round, microseconds per call; and whether heat or power slowed the card."""
        ...

    def disarm(self) -> Clocks:
        """Forget what was armed; the card's readings."""
        ...

    def eager(self, config: Config, calls: int, cap_us: float) -> Timing:
        """Samples with the host's launches in them."""
        ...


class Process(Protocol):
    """A child of this process, or what stands for one: see `Child`."""

    starts: int

    @property
    def pid(self) -> int | None: ...

    def call(
        self, method: str, *arguments: Any, deadline_s: float, then: Call | None = None
    ) -> Any: ...

    def kill(self) -> None: ...

    def close(self) -> None: ...


class Serving:
    """A device in its process, which tells with every answer how long its GPU worked for it."""

    def __init__(self, device: Callable[[], CheckingDevice]) -> None:
        self._device: Any = device()
        # one without a GPU is at work for as long as a call takes
        self._gpu_s: Callable[[], float] = getattr(self._device, "gpu_s", time.monotonic)

    def answer(self, method: str, *arguments: Any) -> tuple[Any, float, float]:
        """The method's answer, and for how many seconds the process and the GPU worked for it."""
        began = time.monotonic()
        gpu_began_s = self._gpu_s()
        value = getattr(self._device, method)(*arguments)
        gpu_s = self._gpu_s() - gpu_began_s
        return value, time.monotonic() - began, gpu_s


@dataclass(frozen=True)
class Deadlines:
    """Seconds after which a process that does not answer is killed."""

    compile_s: float = 60.0
    check_s: float = 30.0
    time_s: float = 30.0
    prepare_s: float = 120.0


DEADLINES = Deadlines()


class Worker:
    """Calls of a device in a process of its own, which is started again whenever it dies.

    The new process gets the prepared problem and the armed configs of the old one, and a call
    whose process was killed from outside is made once more. `limit_s` says how many seconds are
    left to the whole search: no call waits longer, but raises LimitReached. `child` makes the
    process, here unless said otherwise.
    """

    def __init__(
        self,
        device: Callable[[], CheckingDevice],
        deadlines: Deadlines = DEADLINES,
        limit_s: Callable[[], float] = lambda: float("inf"),
        environment: Mapping[str, str] | None = None,
        child: Callable[..., Process] = Child,
    ) -> None:
        self._child = child(partial(Serving, device), environment)
        self._deadlines, self._limit_s = deadlines, limit_s
        self._prepared: tuple[Problem, int] | None = None
        self._promised: Screening | None = None  # the process has gone on with it
        self._armed: dict[Config, Pace] = {}
        self.busy = Busy()

    @property
    def pid(self) -> int | None:
        return self._child.pid

    @property
    def starts(self) -> int:
        """How many processes there have been."""
        return self._child.starts

    @property
    def prepared(self) -> Problem | None:
        """Whose buffers are there, or will be again in a new process."""
        return self._prepared[0] if self._prepared else None

    def hello(self) -> tuple[Gpu, Toolchain]:
        """Raises DeviceError when the process cannot be started."""
        deadline_s = self._deadlines.prepare_s
        try:
            return twice(lambda: self._child.call("answer", "hello", deadline_s=deadline_s))[0]
        except Failure as failure:
            raise DeviceError(f"the GPU's worker cannot be started: {failure.reason}") from None

    def uuid(self) -> str:
        return self._attempt("uuid", deadline_s=self._deadlines.prepare_s)

    def prepare(self, problem: Problem, seed: int) -> None:
        self._armed.clear()
        self._prepared = self._promised = None  # what was promised is of other buffers
        self._attempt("prepare", problem, seed, deadline_s=self._deadlines.prepare_s)
        self._prepared = (problem, seed)

    def check(
        self, problem: Problem, config: Config, seed: int, stage: Stage | None = None
    ) -> Verdict:
        asked = (problem, config, seed, stage)
        return self._attempt("check", *asked, deadline_s=self._deadlines.check_s)

    def screen(
        self,
        config: Config,
        samples: int,
        cap_us: float,
        give_up_us: float,
        ahead: Sequence[Config] = (),
        go_on: bool = False,
    ) -> Timing:
        """As a device does; `ahead` are those that will be screened next, it seems.

        With `go_on` the process screens the first of them at once, while this answer is read.
        """
        first, second = (*ahead, None, None)[:2]
        asked = (config, samples, cap_us, give_up_us, first)
        if self._promised is not None and self._promised[:3] == asked[:3]:
            asked = self._promised  # under way
        self._promised = then = None
        if go_on and first is not None:
            self._promised = (first, samples, cap_us, give_up_us, second)
            then = ("answer", ("screen", *self._promised))
        deadline_s = self._deadlines.time_s
        try:
            return self._attempt("screen", *asked, deadline_s=deadline_s, then=then)
        except Failure:
            if self._child.pid is not None or asked[4] is None:
                raise
        # whose fault the process died of shows without the other
        return self._attempt("screen", *asked[:4], None, deadline_s=deadline_s)

    def check_full(self, config: Config, seed: int, pace: Pace | None = None) -> Verdict:
        """As a device does. With a `pace` the process goes on to arm the config."""
        then = ("answer", ("arm", config, pace)) if pace is not None else None
        deadline_s = self._deadlines.check_s
        return self._attempt("check_full", config, seed, deadline_s=deadline_s, then=then)

    def arm(self, config: Config, pace: Pace, after: tuple[Config, int] | None = None) -> None:
        """As a device does. The process goes on with `check_full` of what comes `after`."""
        then = ("answer", ("check_full", *after)) if after is not None else None
        self._attempt("arm", config, pace, deadline_s=self._deadlines.time_s, then=then)
        self._armed[config] = pace

    def sample(self, rounds: Sequence[Sequence[Config]]) -> list[tuple[list[float], bool]]:
        """As a device does. Where one of them fails, all of them are to be armed again."""
        armed = {config: self._armed.pop(config) for config in set().union(*rounds)}
        deadline_s = self._deadlines.time_s
        answer = self._attempt("sample", rounds, deadline_s=deadline_s, arm=armed)
        self._armed |= armed
        return answer

    def disarm(self) -> Clocks:
        self._armed.clear()
        return self._attempt("disarm", deadline_s=self._deadlines.time_s)

    def eager(self, config: Config, calls: int, cap_us: float) -> Timing:
        return self._attempt("eager", config, calls, cap_us, deadline_s=self._deadlines.time_s)

    def kill(self) -> None:
        """End the process; a call that another thread waits for sees it die."""
        self._child.kill()

    def close(self) -> None:
        self._child.close()

    def _attempt(
        self,
        method: str,
        *arguments: Any,
        deadline_s: float,
        arm: Mapping[Config, Pace] = {},
        then: Call | None = None,
    ) -> Any:
        def once() -> Any:
            if self._child.pid is None:
                self._restore()
                for config, pace in arm.items():
                    self._call("arm", config, pace, deadline_s=deadline_s)
            return self._call(method, *arguments, deadline_s=deadline_s, then=then)

        return twice(once)

    def _call(
        self, method: str, *arguments: Any, deadline_s: float, then: Call | None = None
    ) -> Any:
        left_s = self._limit_s()
        if left_s <= 0:
            raise LimitReached
        began, gpu_s = time.monotonic(), 0.0  # of a call that fails nobody knows
        seconds: float | None = None
        try:
            answer, seconds, gpu_s = self._child.call(
                "answer", method, *arguments, deadline_s=min(deadline_s, left_s), then=then
            )
            return answer
        except Failure as failure:
            if failure.status == "timeout" and left_s < deadline_s:
                raise LimitReached from None
            raise
        finally:
            self.busy.add(began, time.monotonic(), gpu_s, seconds)

    def _restore(self) -> None:
        """Bring a new process to where the dead one was."""
        self.hello()
        if self._prepared is not None:
            self._call("prepare", *self._prepared, deadline_s=self._deadlines.prepare_s)
        for config, pace in list(self._armed.items()):
            self._call("arm", config, pace, deadline_s=self._deadlines.time_s)
