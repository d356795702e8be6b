"""Gpu: the identity and the limits of a GPU type, a table of known ones, and detection."""

import re
from dataclasses import dataclass, replace
from typing import Any

from autoflash.errors import DeviceError

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class Gpu:
    """One GPU type. Two cards are the same type only if every identity field is equal.

    `arch` is `sm_90` for NVIDIA and `gfx942` for AMD; `capability` is 90 for sm_90 and 0 for AMD.
    `dram_gbps` and `tflops_16bit` are the vendor's peak rates, 0 when not known.
    """

    name: str
    arch: str
    num_sms: int
    memory_gib: int
    l2_bytes: int
    smem_per_block: int
    smem_per_sm: int
    registers_per_sm: int = 65536
    threads_per_sm: int = 2048
    mig_profile: str = ""
    power_limit_w: int = 0
    dram_gbps: int = 0
    tflops_16bit: int = 0

    @property
    def slug(self) -> str:
        return slug(self.name)

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


def slug(name: str) -> str:
    """A GPU's name as a file name: `NVIDIA H200` is `NVIDIA_H200`."""
    return re.sub(r"[^0-9A-Za-z]+", "_", name).strip("_")


def _known(
    name: str,
    arch: str,
    num_sms: int,
    memory_gib: int,
    l2_mib: int,
    smem_block_kib: int,
    smem_sm_kib: int,
    dram_gbps: int,
    tflops_16bit: int,
    threads_per_sm: int = 2048,
) -> Gpu:
    return Gpu(
        name=name,
        arch=arch,
        num_sms=num_sms,
        memory_gib=memory_gib,
        l2_bytes=l2_mib * MIB,
        smem_per_block=smem_block_kib * KIB,
        smem_per_sm=smem_sm_kib * KIB,
        threads_per_sm=threads_per_sm,
        dram_gbps=dram_gbps,
        tflops_16bit=tflops_16bit,
    )


# Limits: CUDA C programming guide, table of compute capabilities; AMD CDNA3 ISA. Rates: vendors'
# data sheets, dense 16-bit.
KNOWN: dict[str, Gpu] = {
    gpu.slug: gpu
    for gpu in (
        _known("NVIDIA A100-SXM4-80GB", "sm_80", 108, 79, 40, 163, 164, 2039, 312),
        _known("NVIDIA A10", "sm_86", 72, 22, 6, 99, 100, 600, 125, threads_per_sm=1536),
        _known("NVIDIA L40S", "sm_89", 142, 44, 96, 99, 100, 864, 362, threads_per_sm=1536),
        _known("NVIDIA H100 80GB HBM3", "sm_90", 132, 79, 50, 227, 228, 3350, 989),
        _known("NVIDIA H200", "sm_90", 132, 140, 60, 227, 228, 4800, 989),
        _known("NVIDIA B200", "sm_100", 148, 178, 126, 227, 228, 8000, 2250),
        _known(
            "NVIDIA GeForce RTX 5090",
            "sm_120",
            170,
            31,
            96,
            99,
            100,
            1792,
            210,
            threads_per_sm=1536,
        ),
        _known("AMD Instinct MI300X", "gfx942", 304, 192, 256, 64, 64, 5300, 1307),
    )
}

DEFAULT_TARGET = "NVIDIA_H200"


def known(name: str) -> Gpu:
    """The known GPU of this name or slug. Raises DeviceError naming the known ones."""
    try:
        return KNOWN[slug(name)]
    except KeyError:
        listed = ", ".join(sorted(KNOWN))
        raise DeviceError(f"no GPU called {name!r} is known; known are {listed}") from None


def from_properties(properties: Any, power_limit_w: int = 0) -> Gpu:
    """The Gpu that torch's device properties describe; peak rates come from the table."""
    arch = f"sm_{properties.major}{properties.minor}"
    # torch for CUDA fills gcnArchName too, with the GPU's name
    if (amd_arch := getattr(properties, "gcnArchName", "")).startswith("gfx"):
        arch = amd_arch.split(":")[0]
    name, _, mig_profile = properties.name.partition(" MIG ")
    peer = KNOWN.get(slug(name))
    gpu = Gpu(
        name=name,
        arch=arch,
        num_sms=properties.multi_processor_count,
        memory_gib=round(properties.total_memory / 2**30),
        l2_bytes=properties.L2_cache_size,
        smem_per_block=getattr(properties, "shared_memory_per_block_optin", 64 * KIB),
        smem_per_sm=getattr(properties, "shared_memory_per_multiprocessor", 64 * KIB),
        registers_per_sm=getattr(properties, "regs_per_multiprocessor", 65536),
        threads_per_sm=properties.max_threads_per_multi_processor,
        mig_profile=mig_profile,
        power_limit_w=power_limit_w,
    )
    if peer is None or peer.arch != gpu.arch:
        return gpu
    return replace(gpu, dram_gbps=peer.dram_gbps, tflops_16bit=peer.tflops_16bit)


def cuda_available() -> bool:
    """Whether torch sees a GPU. Starts no context."""
    import torch

    return torch.cuda.is_available()


def detect(index: int = 0) -> Gpu:
    """The GPU at `index`. Starts CUDA in this process. Raises DeviceError without one."""
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("torch sees no GPU on this machine")
    if index >= torch.cuda.device_count():
        raise DeviceError(f"GPU {index} was asked for, {torch.cuda.device_count()} are there")
    properties = torch.cuda.get_device_properties(index)
    return from_properties(properties, _power_limit_w(properties))


def _power_limit_w(properties: Any) -> int:
    """The power limit NVML states, 0 where it is not known."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
        return pynvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000
    except (pynvml.NVMLError, AttributeError):
        return 0
