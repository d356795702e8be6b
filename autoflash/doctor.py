"""Doctor: what this machine has for tuning, what is missing, and what that means."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from autoflash import __version__, gpu
from autoflash.errors import AutoflashError
from autoflash.kernel import cache_dir
from autoflash.records import Clocks
from autoflash.render import templates_dir
from autoflash.store import default_path, tunedb_dir
from autoflash.telemetry import Telemetry
from autoflash.toolchain import detect_toolchain

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


@dataclass(frozen=True)
class Finding:
    """One thing looked for: what was found, and what its lack or its state means, else ""."""

    name: str
    found: str
    missing: str = ""


def examine() -> list[Finding]:
    """Everything that decides what autoflash can do here. Starts CUDA where there is a GPU."""
    return [*_software(), *_gpus(), *_places()]


def _software() -> Iterator[Finding]:
    toolchain = detect_toolchain()
    yield Finding("autoflash", __version__)
    yield Finding("python", f"{platform.python_version()} on {platform.system()}")
    build = f"CUDA or HIP {toolchain.cuda}" if toolchain.cuda else "CPU build"
    yield Finding("torch", f"{toolchain.torch}, {build}", _too_old("torch", toolchain.torch))
    yield Finding("triton", toolchain.triton, _too_old("triton", toolchain.triton))
    yield Finding("driver", toolchain.driver or "none")
    without = "kernels cannot be compiled for NVIDIA GPUs; it comes with triton's own package"
    yield Finding("ptxas", toolchain.ptxas or "none", "" if toolchain.ptxas else without)
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CC", ""), "gcc", "clang"))), "")
    without = "triton builds its launcher with one, so no kernel can be launched on a GPU"
    yield Finding("C compiler", compiler or "none", "" if compiler else without)


def _gpus() -> Iterator[Finding]:
    if not gpu.cuda_available():
        hidden = Path("/dev/nvidia0").exists() or Path("/dev/kfd").exists()
        yield Finding(
            "gpu",
            "torch sees none" + (", though this machine has one" if hidden else ""),
            f"nothing can be measured: tune compiles for {gpu.DEFAULT_TARGET}, checks numerics in "
            "triton's interpreter and predicts",
        )
        return
    import torch

    for index in range(torch.cuda.device_count()):
        found = gpu.detect(index)
        parts = [found.name, found.arch, f"{found.num_sms} SMs", f"{found.memory_gib} GiB"]
        parts.append(f"power limit {found.power_limit_w} W" if found.power_limit_w else "")
        unknown = "peak rates are not known: no roofline" if not found.dram_gbps else ""
        yield Finding(f"gpu {index}", ", ".join(filter(None, parts)), unknown)
        yield _clocks(index)


def _clocks(index: int) -> Finding:
    """What NVML says of the GPU now."""
    import torch

    clocks = Telemetry(str(torch.cuda.get_device_properties(index).uuid)).clocks()
    if clocks == Clocks():
        without = "trials record no clocks, temperature or power; pip install 'autoflash[gpu]'"
        return Finding(f"clocks {index}", "NVML does not say", without)
    state = (
        f"SM {clocks.sm_clock_mhz} MHz, memory {clocks.memory_clock_mhz} MHz, "
        f"{clocks.power_w} W, {clocks.temperature_c} C"
    )
    return Finding(f"clocks {index}", state)


def _places() -> Iterator[Finding]:
    try:
        yield _writable("cache", cache_dir(), "tune has nowhere to keep kernels: AUTOFLASH_CACHE")
    except AutoflashError as error:
        yield Finding("cache", "none", str(error))
    try:
        database = default_path()
        state = f"{database}" if database.is_file() else f"{database}, made by the first tune"
        folder = next(parent for parent in database.parents if parent.is_dir())
        place = database if database.is_file() else folder
        without = "" if os.access(place, os.W_OK) else "cannot be written: give tune a --db"
        yield Finding("database", state, without)
    except AutoflashError as error:
        yield Finding("database", "none", str(error))
    templates = templates_dir()
    without = "" if templates.is_dir() else "no kernel can be rendered: the installation is broken"
    yield Finding("templates", str(templates), without)
    winners = sorted(path.stem for path in (tunedb_dir() / "winners").glob("*.jsonl"))
    without = "" if winners else "export needs a database of your own"
    yield Finding("shipped winners", ", ".join(winners) or "none", without)


def _writable(name: str, folder: Path, without: str) -> Finding:
    return Finding(name, str(folder), "" if os.access(folder, os.W_OK) else without)


def _too_old(name: str, version: str) -> str:
    """What to say of a version older than the oldest that is supported."""
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    oldest = ".".join(map(str, OLDEST[name]))
    return f"{name} {oldest} or newer is needed" if numbers < OLDEST[name] else ""
