"""Device: the identity and limits of a GPU at run time, in plain integers."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from .launch import interpreted


class Device(NamedTuple):
    """A GPU type as the exported module knows it; the fields are those of autoflash's Gpu."""

    name: str
    arch: str
    num_sms: int
    memory_gib: int
    l2_bytes: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int
    threads_per_sm: int
    mig_profile: str

    @property
    def vendor(self) -> str:
        return "nvidia" if self.arch.startswith("sm_") else "amd"

    @property
    def capability(self) -> int:
        return int(self.arch[3:]) if self.vendor == "nvidia" else 0

    @property
    def identity(self) -> tuple[str, str, int, int, str]:
        """What must be equal for a measurement of one card to speak for another."""
        return (self.name, self.arch, self.num_sms, self.memory_gib, self.mig_profile)


@cache
def device_at(index: int) -> Device:
    """The GPU at `index` of this process."""
    found = torch.cuda.get_device_properties(index)
    arch = f"sm_{found.major}{found.minor}"
    # torch for CUDA fills gcnArchName too, with the GPU's name
    if (amd_arch := getattr(found, "gcnArchName", "")).startswith("gfx"):
        arch = amd_arch.split(":")[0]
    return Device(
        name=found.name.split(" MIG ")[0],
        arch=arch,
        num_sms=found.multi_processor_count,
        memory_gib=round(found.total_memory / 2**30),
        l2_bytes=found.L2_cache_size,
        smem_per_block=getattr(found, "shared_memory_per_block_optin", 65536),
        smem_per_sm=getattr(found, "shared_memory_per_multiprocessor", 65536),
        registers_per_sm=getattr(found, "regs_per_multiprocessor", 65536),
        threads_per_sm=found.max_threads_per_multi_processor,
        mig_profile=found.name.partition(" MIG ")[2],
    )


def device_of(tensor: torch.Tensor, interpreted_as: Device) -> Device:
    """The device a tensor lies on; in the interpreter, the one it stands in for."""
    if tensor.is_cuda:
        return device_at(tensor.device.index)
    if interpreted():
        return interpreted_as
    raise ValueError(
        f"q is on {tensor.device}, kernels run on a GPU"
        " (or on CPU tensors with TRITON_INTERPRET=1 set before triton is imported)"
    )
