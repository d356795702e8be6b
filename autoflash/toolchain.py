"""Toolchain: the versions a measurement was made with."""

from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class Toolchain:
    """Versions as their packages spell them; "" where there is none (no driver without a GPU)."""

    driver: str
    cuda: str
    torch: str
    triton: str
    ptxas: str = ""
    fp_fusion: bool = True


def detect_toolchain() -> Toolchain:
    """The versions of this process. Imports torch and triton; starts no CUDA."""
    import torch
    import triton

    return Toolchain(
        driver=_driver_version(),
        cuda=torch.version.cuda or torch.version.hip or "",
        torch=str(torch.__version__),
        triton=triton.__version__,
        ptxas=_ptxas_version(),
    )


def _driver_version() -> str:
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError:
        return ""


def _ptxas_version() -> str:
    from triton import knobs

    try:
        return str(knobs.nvidia.ptxas.version or "")
    except (AttributeError, RuntimeError):
        return ""
