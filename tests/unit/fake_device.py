"""A device and a compiler without a GPU: times are a function of the config, faults are planted."""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from zlib import crc32

from autoflash.accuracy import Verdict
from autoflash.bench import Timing
from autoflash.check import Stage
from autoflash.child import OUT_OF_GPU_MEMORY, Failure
from autoflash.families import family_of
from autoflash.gpu import known
from autoflash.records import Clocks, Resources
from autoflash.toolchain import Toolchain
from autoflash.worker import Deadlines

GPU = known("NVIDIA_H200")
TOOLCHAIN = Toolchain(driver="fake", cuda="13.0", torch="2.11", triton="3.6")
CLOCKS = Clocks(sm_clock_mhz=1980, power_w=650.0)
SHORT = Deadlines(compile_s=2.0, check_s=2.0, time_s=2.0, prepare_s=10.0)


def time_us(problem, config):
    """A fixed time between 100 and 200 microseconds."""
    return 100 + crc32(f"{problem}{config}".encode()) % 10_000 / 100


class FakeDevice:
    """`faults` says what each config does wrong: see `_meet`.

    A fault shows in `check`, or where it says after an @, and for a key (problem, config) on that
    problem alone. With `brake` the card is slowed by heat
    in every other sample.
    """

    def __init__(self, faults: Mapping = {}, times: Mapping = {}) -> None:
        self._faults, self._times = dict(faults), dict(times)
        self._problem = None
        self._broken = False
        self._armed = set()
        self._calls = 0
        self._braked = False

    def hello(self):
        return GPU, TOOLCHAIN

    def uuid(self):
        return "card"

    def check(self, problem, config, seed, stage=None):
        if stage != Stage.FINAL:
            self._meet(config, "check", problem)
        if stage != Stage.SCREEN:
            self._meet(config, "proof", problem)
        return Verdict("", 0.5, 0.5, 1e-7)

    def prepare(self, problem, seed):
        self._problem = problem
        self._armed.clear()

    def screen(self, config, samples, cap_us, give_up_us, ahead=None):
        self._meet(config, "screen")
        if ahead is not None:
            self._meet(ahead, "ahead")
        us = self._us(config)
        if us > give_up_us:
            return Timing((us,), CLOCKS, dropped=True)
        taken = max(1, min(samples, int(cap_us / us)))
        return Timing(tuple(us + 0.01 * i for i in range(taken)), CLOCKS)

    def check_full(self, config, seed):
        assert self._problem is not None
        self._meet(config, "check_full")
        return Verdict("", 0.6, 0.6, 1e-7)

    def arm(self, config, pace):
        self._armed.add(config)

    def sample(self, rounds):
        return [self._round(configs) for configs in rounds]

    def _round(self, configs):
        taken = [self._sample(config) for config in configs]
        return [us for us, _ in taken], any(slowed for _, slowed in taken)

    def _sample(self, config):
        assert config in self._armed
        self._meet(config, "sample")
        self._calls += 1
        if self._faults.get(config) == "brake":
            self._braked = not self._braked
            if self._braked:
                return 10 * self._us(config), True
        # of the call alone, but in no step with the rounds
        noise = 1 + 0.0005 * (crc32(str(self._calls).encode()) % 5)
        return self._us(config) * noise, False

    def disarm(self):
        self._armed.clear()
        return CLOCKS

    def eager(self, config, calls, cap_us):
        return Timing((self._us(config) + 20.0,), CLOCKS)

    def _us(self, config):
        return self._times.get(config) or time_us(self._problem, config)

    def _meet(self, config, where, problem=None):
        if self._broken:
            raise Failure("runtime", "an illegal memory access was encountered", fatal=True)
        planted = self._faults.get((problem or self._problem, config)) or self._faults.get(
            config, ""
        )
        fault, _, only = planted.partition("@")
        if not fault or fault == "brake" or where != (only or "check"):
            return
        if fault == "wrong":
            raise Failure("correctness", "out is off by 3 row RMS")
        if fault == "unrepeatable":
            raise Failure("correctness", "two runs differ")
        if fault == "trespass":
            raise Failure("correctness", "writes past the end of out")
        if fault == "raise":
            raise Failure("runtime", "RuntimeError: planted")
        if fault == "out_of_bounds":
            self._broken = True  # as CUDA: the context is lost, and says so
            raise Failure("runtime", "an illegal memory access was encountered", fatal=True)
        if fault == "hang":
            time.sleep(1000)
        if fault == "abort":
            os.abort()
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.startswith("killed once "):
            killed_once(fault)
            return
        if fault == "gpu memory":
            raise Failure("runtime", f"{OUT_OF_GPU_MEMORY}: tried to allocate 2 GiB")
        raise AssertionError(f"no such fault: {fault}")


def killed_once(fault):
    """`killed once FILE`: by what made the file, so that another try goes well."""
    with contextlib.suppress(FileExistsError):
        Path(fault.removeprefix("killed once ")).touch(exist_ok=False)
        os.kill(os.getpid(), signal.SIGKILL)


class FakeCompiler:
    """`faults` by what is compiled: error, hang, abort, ptxas, memory, spills, `killed once FILE`.

    Or big: too much shared memory.
    """

    def __init__(self, faults: Mapping = {}) -> None:
        self._faults = dict(faults)

    def compile(self, problems, config, gpu, stage=None):
        fault = self.meet(problems[0], config)
        spills = 4096 if fault == "spills" else 0
        smem = 10**6 if fault == "big" else 49152
        return Resources(96, spills, smem, 1, 0)

    def meet(self, problem, config):
        """The fault of the config's binary, for this problem or for all, if it can be survived."""
        binary = family_of(config.family).binary(config)
        fault = self._faults.get((problem, binary)) or self._faults.get(binary, "")
        if fault == "error":
            raise Failure("compile", "attend.py.jinja: cannot take 16 rows")
        if fault == "hang":
            time.sleep(1000)
        if fault == "abort":
            os.abort()
        if fault == "ptxas":
            subprocess.run(["sleep", "1000"])
        if fault == "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            bytearray(8 << 30)
        if fault.startswith("killed once "):
            killed_once(fault)
        return fault


def machine(faults=None, times=None, compile_faults=None, deadlines=SHORT):
    """A machine whose one GPU is a fake."""
    from autoflash.tune import Machine  # not needed, and slow to import, in the fake's processes

    return Machine(
        device=partial(FakeDevice, faults or {}, times or {}),
        compiler=partial(FakeCompiler, compile_faults or {}),
        deadlines=deadlines,
        compile_processes=1,
    )
