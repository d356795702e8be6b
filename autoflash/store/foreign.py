"""Foreign rows: made on another GPU, or with another triton or driver, than are here."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from autoflash.gpu import KNOWN, Gpu, slug

# Compared in this order; the columns are those of the views.
COMPARED = ("gpu", "arch", "num_sms", "memory_gib", "mig_profile", "triton", "driver")


def foreign_reason(row: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """What of `here` the row differs from first, or "". What `here` lacks is not compared."""
    for column in COMPARED:
        if column in here and row[column] != here[column]:
            return f"{column} is {here[column]} here"
    return ""


def here(gpu_name: str | None = None) -> dict[str, Any]:
    """What can be told of this machine at once: without torch and without starting CUDA.

    `gpu_name`, where it names one known GPU, stands for the GPU that is here.
    """
    told: dict[str, Any] = {}
    with suppress(PackageNotFoundError):
        told["triton"] = version("triton")
    told |= _from_nvml()
    named = [gpu for gpu in KNOWN.values() if gpu_name and names(gpu_name, gpu.name)]
    if len(named) == 1:
        told |= _identity(named[0])
    return told


def names(asked: str, gpu_name: str) -> bool:
    """Whether `asked` is the GPU's name or whole words of it: `H200` is, `A10` of A100 is not."""
    return f"_{slug(asked)}_".lower() in f"_{slug(gpu_name)}_".lower()


def _identity(gpu: Gpu) -> dict[str, Any]:
    return dict(zip(COMPARED, gpu.identity, strict=False))


def _from_nvml() -> dict[str, Any]:
    """The driver, and the first GPU as far as its name tells; nothing where there is none."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        told: dict[str, Any] = {"driver": str(pynvml.nvmlSystemGetDriverVersion())}
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name = str(pynvml.nvmlDeviceGetName(handle))
    except pynvml.NVMLError:
        return {}
    try:
        sliced = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # a GPU that cannot be sliced says so by an error
        sliced = False
    if sliced or slug(name) not in KNOWN:
        return told if sliced else told | {"gpu": name}
    return told | _identity(KNOWN[slug(name)])
