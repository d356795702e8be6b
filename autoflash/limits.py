"""Limits: what a measured call could not be faster than, each alone, and which of them binds.

A kernel moves bytes, multiplies on tensor cores and takes exponentials at the same time, so the
largest of the three is its roof. To it come launching its kernels, and what the last wave of
programs leaves idle. What then remains of the time is latency and everything else.
"""

import math
from dataclasses import dataclass

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.model import LAUNCH_US, launched, padding
from autoflash.occupancy import Occupancy, occupancy
from autoflash.problem import Problem
from autoflash.records import Resources
from autoflash.roofline import floor, visible_pairs

# Of a multiprocessor in a clock: CUDA programming guide, throughput of special functions, the same
# for every capability from 8.0 on; CDNA3's transcendental rate is a quarter of its 64 lanes.
EXPONENTIALS_PER_CLOCK = 16
# Of products of 16 bits that are not sparse, by the vendors' tables: their peak rate is this times
# the clock that they promise.
FLOPS_PER_CLOCK = {"sm_80": 2048, "sm_86": 1024, "sm_89": 1024, "sm_90": 4096}
FLOPS_PER_CLOCK |= {"sm_100": 8192, "sm_120": 1024, "gfx942": 2048}


@dataclass(frozen=True)
class Limits:
    """Microseconds that each part of a call takes at the GPU's peak; 0 where a rate is not known.

    `idle_us` is what multiprocessors without a program in the last wave add to the roof, `rest_us`
    what nothing here explains. `limiter` is the largest part of the time: `bytes`, `tensor cores`,
    `exponentials`, `launch`, `occupancy` (the idle ones) or `latency` (the rest); empty for a GPU
    whose rates are not known.
    """

    us: float
    bytes_us: float
    tensor_us: float
    exponentials_us: float
    launch_us: float
    idle_us: float
    occupancy: Occupancy
    programs: int
    launches: int

    @property
    def roof(self) -> tuple[str, float]:
        """Which of what overlaps takes longest, and how long."""
        overlapping = {
            "bytes": self.bytes_us,
            "tensor cores": self.tensor_us,
            "exponentials": self.exponentials_us,
        }
        name = max(overlapping, key=overlapping.__getitem__)
        return name, overlapping[name]

    @property
    def rest_us(self) -> float:
        return max(0.0, self.us - self.roof[1] - self.launch_us - self.idle_us)

    @property
    def limiter(self) -> str:
        name, roof_us = self.roof
        parts = {name: roof_us, "launch": self.launch_us, "occupancy": self.idle_us}
        parts["latency"] = self.rest_us
        return max(parts, key=parts.__getitem__) if roof_us else ""


def limits(
    problem: Problem,
    config: Config,
    gpu: Gpu,
    us: float,
    resources: Resources,
    sm_clock_mhz: int | None = None,
) -> Limits:
    """The limits of a call that took `us`, exponentials at the clock given or else the vendor's.

    Products and exponentials are those of the config's tiles, which reach past the problem.
    """
    least, work = floor(problem, gpu), launched(problem, config, gpu)
    padded = padding(problem, config)
    rate = gpu.tflops_16bit if problem.dtype != "fp32" else gpu.tflops_16bit / 16
    tensor_us = least.flops * padded / rate / 1e6 if rate else 0.0
    bytes_us = least.bytes_moved / gpu.dram_gbps / 1e3 if gpu.dram_gbps else 0.0
    exponentials = problem.num_heads * visible_pairs(problem) * padded
    per_us = gpu.num_sms * EXPONENTIALS_PER_CLOCK * (sm_clock_mhz or promised_clock_mhz(gpu))
    exponentials_us = exponentials / per_us if per_us else 0.0
    waves = math.ceil(work.programs / gpu.num_sms)
    stretch = waves * gpu.num_sms / work.programs - 1
    return Limits(
        us=us,
        bytes_us=bytes_us,
        tensor_us=tensor_us,
        exponentials_us=exponentials_us,
        launch_us=LAUNCH_US * work.launches,
        idle_us=stretch * max(bytes_us, tensor_us, exponentials_us),
        occupancy=occupancy(resources, work.warps, gpu),
        programs=work.programs,
        launches=work.launches,
    )


def promised_clock_mhz(gpu: Gpu) -> float:
    """The clock that the vendor's rate of products is for; 0 where that is not known."""
    per_clock = FLOPS_PER_CLOCK.get(gpu.arch)
    return gpu.tflops_16bit * 1e6 / gpu.num_sms / per_clock if per_clock else 0.0
