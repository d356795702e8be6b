"""Model: what a call may cost, from the roofline and what its kernel takes; never a time.

A call takes at least its flops and its bytes. Flops are stretched by tiles that reach past the
problem, by the last wave of programs, which leaves multiprocessors idle, and where too few warps
and stages are resident to hide latency; bytes where too few are in flight. Only the order it gives
matters.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

from autoflash.check import plan_for
from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.inputs import make_inputs
from autoflash.kernel import new_results
from autoflash.occupancy import occupancy
from autoflash.problem import Problem
from autoflash.records import Resources
from autoflash.roofline import floor

# Guesses; the order is little moved by half or twice as much.
HALF_HIDING = 16.0  # resident warps times stages in flight that reach half the products' peak
HALF_IN_FLIGHT = 24 * 1024  # bytes in flight on a multiprocessor that reach half the memory's rate
POINTER_COST = 1.1  # of loads through pointers, whose addresses are computed by every thread
LAUNCH_US = 1.0  # of one more kernel in a CUDA graph
SPILL_COST = 1 / 256  # of the time, per spilled byte
# The heavy kernels of a backward, by the prefix of their knobs: the share of the roofline's five
# products that each computes. Of two kernels both compute two of them.
BACKWARD_KERNELS = {
    "backward": {"KV": 4 / 5, "Q": 3 / 5},
    "backward_single": {"KV": 1.0},
    "backward_hopper": {"KV": 4 / 5, "Q": 3 / 5},
    "backward_hopper_single": {"KV": 1.0},
}
HOPPER_BACKWARDS = ("backward_hopper", "backward_hopper_single")
PART_KNOBS = {
    "BLOCK_M": "BLOCK_M",
    "BLOCK_N": "BLOCK_N",
    "num_warps": "WARPS",
    "num_stages": "STAGES",
}


def predicted_us(problem: Problem, config: Config, resources: Resources, gpu: Gpu) -> float:
    """The model's figure for one call. Its order means something, its size little.

    What `resources` leaves open is guessed from the tiles.
    """
    parts = _parts(config)
    heavy_us = sum(
        share * _kernel_us(problem, tiles, launched(problem, config, gpu, kernel), resources, gpu)
        for kernel, tiles, share in parts
    )
    return heavy_us + LAUNCH_US * launched(problem, config, gpu, parts[0][0]).launches


def _parts(config: Config) -> tuple[tuple[str, Config, float], ...]:
    """The heavy kernels: how their names begin, the knobs of each, and its share of the flops."""
    shares = BACKWARD_KERNELS.get(config.family)
    if shares is None:
        return ((config.family, config, 1.0),)
    return tuple(
        (f"backward_{part.lower()}", _part_of(config, part), share)
        for part, share in shares.items()
    )


def _part_of(config: Config, part: str) -> Config:
    """The knobs of one kernel of a backward, by the names that those of other families have."""
    knobs = config.as_dict()
    if config.family in HOPPER_BACKWARDS:  # two warpgroups share what a program has for its own
        step = knobs["KV_BLOCK_M"] if part == "KV" else knobs["Q_BLOCK_N"]
        tile = {"BLOCK_M": step, "BLOCK_N": 128} if part == "KV" else {"BLOCK_M": 128}
        return Config.of(config.family, {"BLOCK_N": step, **tile})
    own = {name: knobs[f"{part}_{of_part}"] for name, of_part in PART_KNOBS.items()}
    return Config.of(config.family, {**own, "LOAD": knobs["LOAD"]})


def _kernel_us(
    problem: Problem, config: Config, work: "Launched", resources: Resources, gpu: Gpu
) -> float:
    """The figure of one kernel, were the whole work its own."""
    programs, warps = work.programs, work.warps
    busiest = math.ceil(programs / gpu.num_sms)  # programs of the multiprocessor that ends last
    fits = occupancy(_completed(resources, problem, config), warps, gpu).blocks
    resident = min(fits, busiest)
    least = floor(problem, gpu)
    flop_rate = (gpu.tflops_16bit or 1) * (1e6 if problem.dtype != "fp32" else 1e6 / 16)
    compute_us = least.flops / flop_rate * padding(problem, config) / _reuse(config)
    compute_us *= busiest * gpu.num_sms / programs
    compute_us *= 1 + HALF_HIDING / (resident * warps * work.stages)
    if config.as_dict().get("LOAD") == "pointer":
        compute_us *= POINTER_COST
    memory_us = least.bytes_moved / (gpu.dram_gbps or 1) / 1e3
    memory_us /= min(1.0, programs / gpu.num_sms)
    # of the stages one is worked on; a single one is loaded half of the time
    in_flight = resident * max(work.stages - 1, 0.5) * _tile_bytes(problem, config)
    memory_us *= 1 + HALF_IN_FLIGHT / in_flight
    spilled = 1 + SPILL_COST * (resources.spill_bytes or 0)
    return max(compute_us, memory_us) * spilled


@dataclass(frozen=True)
class Launched:
    """What a call launches: of the kernel that does the work, and kernels in all."""

    programs: int
    warps: int  # of a program
    stages: int
    launches: int


@lru_cache(maxsize=100_000)
def launched(problem: Problem, config: Config, gpu: Gpu, kernel: str = "") -> Launched:
    """What the config's plan launches for the problem; asked on tensors without memory.

    `kernel` is how the name of the one asked about begins, else the first heavy one is.
    """
    kernel = kernel or _parts(config)[0][0]
    inputs = make_inputs(problem, device="meta", poison=False)
    out, _ = new_results(inputs)
    launches = plan_for(inputs, config, gpu, out, None)
    # others reduce, copy or zero; families that share templates share the kernel's name
    _, grid, _, options = next(
        launch
        for launch in launches
        if launch[0].__name__.startswith(kernel) or kernel.startswith(launch[0].__name__)
    )
    consumers = int(config.as_dict().get("WARPGROUPS", 2 * (config.family in HOPPER_BACKWARDS)))
    return Launched(
        programs=math.prod(grid),
        warps=options.get("num_warps", 4) + 4 * consumers,
        stages=int({"num_stages": 2, **options, **config.as_dict()}["num_stages"]),
        launches=len(launches),
    )


def padding(problem: Problem, config: Config) -> float:
    """Score elements computed over those that are visible."""
    rows = problem.seqlen_q if problem.op != "decode" else problem.group_size * problem.seqlen_q
    block_m, block_n = _tile(config)
    keys, sides = max(problem.seqlen_k, 1), problem.window
    if min(sides) >= 0:
        keys = min(keys, sum(sides) + 1)
    padded = math.ceil(rows / block_m) * block_m / rows * math.ceil(keys / block_n) * block_n / keys
    edges = sum(side >= 0 for side in sides) * (block_m + block_n) / 2 / keys
    return padded * (1 + edges)


def _completed(resources: Resources, problem: Problem, config: Config) -> Resources:
    """The resources, or where nothing was compiled a guess: acc and qk in registers, the ring."""
    if resources.registers is not None:
        return resources
    knobs = config.as_dict()
    warps, stages = (int(knobs.get(name, 4)) for name in ("num_warps", "num_stages"))
    warps *= 1 + int(knobs.get("WARPGROUPS", 0))
    block_m, block_n = _tile(config)
    live = block_m * (problem.head_dim + block_n) // (32 * warps)
    q_bytes = block_m * problem.head_dim * problem.dtype_bytes
    smem_bytes = q_bytes + stages * _tile_bytes(problem, config)
    return Resources(min(255, 48 + live), 0, smem_bytes)


def _tile(config: Config) -> tuple[int, int]:
    """Query rows and keys of a tile; the packed heads of decode fill the fewest rows."""
    knobs = config.as_dict()
    rows = knobs.get("BLOCK_M") or knobs.get("KV_BLOCK_M", 16)  # of two kernels the larger one's
    rows = 64 * int(knobs["WARPGROUPS"]) if "WARPGROUPS" in knobs else rows
    return int(rows), int(knobs.get("BLOCK_N") or knobs.get("KV_BLOCK_N", 64))


def _tile_bytes(problem: Problem, config: Config) -> int:
    """Bytes of one tile of K and V."""
    width = problem.head_dim + (0 if problem.latent else problem.head_dim_v)
    return int(config.as_dict().get("BLOCK_N", 64)) * width * problem.kv_dtype_bytes


def _reuse(config: Config) -> float:
    """Share of the peak that a tile's shape allows: products per element loaded, softened."""
    block_m, block_n = _tile(config)
    products = block_m * block_n / (block_m + block_n)
    return products / (products + 16)
