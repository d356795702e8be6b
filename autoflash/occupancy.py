"""Occupancy: how many blocks of a kernel fit on a multiprocessor at once, and what binds them."""

import math
from dataclasses import dataclass

from autoflash.gpu import Gpu
from autoflash.records import Resources

RESERVED_SMEM = 1024  # of each block, by the driver
MOST_BLOCKS_PER_SM = 32
WARP_THREADS = 32
REGISTER_UNIT = 8  # registers of a thread are dealt by eights
UNKNOWN_REGISTERS = 128


@dataclass(frozen=True)
class Occupancy:
    """What fits on one multiprocessor. `binds` says what there is too little of for one more."""

    blocks: int
    warps: int
    most_warps: int
    binds: str  # "registers", "shared memory", "threads" or "blocks"

    @property
    def percent(self) -> float:
        """Resident warps in percent of those that a multiprocessor can hold."""
        return 100 * self.warps / self.most_warps


def occupancy(resources: Resources, warps: int, gpu: Gpu) -> Occupancy:
    """The theoretical occupancy of blocks of so many warps; at least one block.

    Registers that are not known are taken for 128 a thread.
    """
    threads = WARP_THREADS * warps
    registers = resources.registers or UNKNOWN_REGISTERS
    registers = math.ceil(registers / REGISTER_UNIT) * REGISTER_UNIT
    fits = {
        "registers": gpu.registers_per_sm // (registers * threads),
        "shared memory": gpu.smem_per_sm // ((resources.smem_bytes or 0) + RESERVED_SMEM),
        "threads": gpu.threads_per_sm // threads,
        "blocks": MOST_BLOCKS_PER_SM,
    }
    binds = min(fits, key=fits.__getitem__)
    blocks = max(1, fits[binds])
    return Occupancy(blocks, blocks * warps, gpu.threads_per_sm // WARP_THREADS, binds)
