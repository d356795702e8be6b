"""Several fake GPUs in this process: as workers without processes, and a pool without compilers."""

import time
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Lock

from fake_device import GPU, TOOLCHAIN, FakeCompiler, FakeDevice

from autoflash.check import Stage
from autoflash.child import Failure
from autoflash.errors import DeviceError
from autoflash.gpu import known
from autoflash.worker import Serving, Worker

A10 = known("NVIDIA_A10")
LOST = "GPU 1: fell off the bus"


class Calls:
    """What all fakes of a test were asked for first trials, and by which GPU."""

    def __init__(self):
        self._lock = Lock()
        self.checks, self.compiled, self.dead = [], [], set()

    def note(self, of, *what):
        with self._lock:
            of.append(what)

    def by(self, index):
        return [check for check in self.checks if check[0] == index]


class FleetDevice(FakeDevice):
    """GPU `index`; `lives` is how many checks it answers before it is lost for good."""

    def __init__(self, calls, index, gpu=GPU, lives=None, check_s=0.002, **of_fake):
        if index in calls.dead:
            raise DeviceError(LOST)
        super().__init__(**of_fake)
        self._calls_of_all, self._index, self._gpu = calls, index, gpu
        self._lives, self._check_s = lives, check_s

    def hello(self):
        return self._gpu, TOOLCHAIN

    def uuid(self):
        return f"card {self._index}"

    def check(self, problem, config, seed, stage=None):
        if stage != Stage.FINAL:
            self._calls_of_all.note(self._calls_of_all.checks, self._index, problem, config)
        time.sleep(self._check_s)
        if self._lives is not None and len(self._calls_of_all.by(self._index)) > self._lives:
            self._calls_of_all.dead.add(self._index)
            raise Failure("runtime", "CUDA error: device lost", fatal=True)
        return super().check(problem, config, seed, stage)


class Here:
    """A `Child` without a process."""

    def __init__(self, service):
        self._make, self._service = service, None
        self.starts = 0

    @property
    def pid(self):
        return None if self._service is None else self.starts

    def call(self, method, *arguments, deadline_s, then=None):
        if self._service is None:
            self._service = self._make()
            self.starts += 1
        try:
            return getattr(self._service, method)(*arguments)
        except Failure as failure:
            if failure.fatal:
                self._service = None
            raise

    def kill(self):
        pass

    def close(self):
        pass


class HereWorker(Worker):
    def __init__(self, device, deadlines, limit_s, environment):
        super().__init__(device, deadlines, limit_s, environment)
        self._child = Here(partial(Serving, device))


class HerePool:
    """Compiles at once, and notes what."""

    def __init__(self, calls, compiler, processes, deadline_s, environment):
        self._calls, self._compiler = calls, FakeCompiler()

    def submit(self, problems, config, gpu, urgency, stage):
        if stage != Stage.FINAL:
            self._calls.note(self._calls.compiled, gpu, tuple(problems), config)
        future = Future()
        future.set_result(self._compiler.compile(problems, config, gpu, stage))
        return future

    def hurry(self, future, urgency):
        pass

    def close(self):
        pass


def in_this_process(monkeypatch):
    """The calls to come of a search whose workers and compilers are objects."""
    calls = Calls()
    monkeypatch.setattr("autoflash.fleet.Worker", HereWorker)
    monkeypatch.setattr("autoflash.tune.CompilePool", partial(HerePool, calls))
    return calls


def other_type(gpu=GPU):
    """A GPU of another type on which all the same configs are valid."""
    return replace(gpu, name="NVIDIA H200 NVL")
