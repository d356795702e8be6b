"""A CUDA device whose candidates may do harm: faults are planted by config, for tests."""

import os
import signal
import subprocess

import torch
import triton
import triton.language as tl

from autoflash.trial import CudaDevice

HELD_BYTES = 64 << 20


@triton.jit
def out_of_bounds_kernel(out, far):
    tl.store(out + tl.cast(far, tl.int64) * (1 << 30), 1.0)


@triton.jit
def write_kernel(out, at):
    tl.store(out + at, 1.0)


@triton.jit
def hang_kernel(flag):
    seen = tl.load(flag)
    while seen == 0:
        seen = tl.load(flag, volatile=True)
    tl.store(flag, seen)


@triton.jit
def add_kernel(out):
    tl.store(out, tl.load(out) + 1.0)


@triton.jit
def misshapen_kernel(out):
    tl.store(out, tl.sum(tl.arange(0, 32)[:, None] + tl.zeros([16, 16], tl.int32)))


class PlantedDevice(CudaDevice):
    """`faults` by config, or by (problem, config): see `plan`.

    A trespass is a write out of bounds that faults nowhere.
    """

    def __init__(self, faults, index=0):
        super().__init__(index)
        self._faults, self._plans, self._at = dict(faults), 0, None

    def check(self, problem, config, seed, stage=None):
        self._at = problem
        return super().check(problem, config, seed, stage)

    def prepare(self, problem, seed):
        self._at = problem
        super().prepare(problem, seed)

    def plan(self, inputs, config, out, lse, new_workspace=None):
        plan = super().plan(inputs, config, out, lse, new_workspace)
        fault = self._faults.get((self._at, config)) or self._faults.get(config, "")
        self._plans += 1
        if fault == "out_of_bounds":
            return [*plan, (out_of_bounds_kernel, (1,), (out, 1 << 14), {})]
        if fault == "hang":
            flag = torch.zeros(1, device="cuda", dtype=torch.int32)
            return [*plan, (hang_kernel, (1,), (flag,), {})]
        if fault == "abort":
            os.abort()
        if fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault == "gpu memory":
            torch.empty(1 << 50, device="cuda", dtype=torch.uint8)
        if fault == "trespass":
            return [*plan, (write_kernel, (1,), (out, out.numel()), {})]
        if fault == "raise":
            held = torch.empty(HELD_BYTES, device="cuda", dtype=torch.uint8)
            raise RuntimeError(f"planted, with {held.numel()} bytes held")
        if fault == "compile":
            return [*plan, (misshapen_kernel, (1,), (out,), {})]
        if fault == "wrong":
            return [*plan, (add_kernel, (1,), (out,), {})]
        if fault == "unrepeatable" and self._plans % 2:
            return [*plan, (add_kernel, (1,), (out,), {})]
        if fault == "slow":
            return plan * 4
        return plan

    def allocated_bytes(self):
        return torch.cuda.memory_allocated()


class CompilerlessDevice(PlantedDevice):
    """One that starts no other program: ptxas or a C compiler is a failure."""

    def __init__(self, faults, index=0):
        super().__init__(faults, index)
        assert triton.runtime.driver.active.utils  # what is compiled once for all kernels

        start = subprocess.Popen

        def refuse(command, *more, **options):
            if "--version" in command:  # triton asks once, to tell its caches apart
                return start(command, *more, **options)
            raise RuntimeError(f"a program was started: {command}")

        subprocess.Popen = refuse
