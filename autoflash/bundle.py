"""Bundle: an exported module's kernels compiled for the GPUs it was tuned for, without a GPU."""

import contextlib
import importlib.util
import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.runtime.build import compile_module_from_src

from autoflash.errors import ExportError
from autoflash.kernel import compile_only
from autoflash.runtime.bundle import BUNDLE_BUILT, BUNDLE_KERNELS, BUNDLE_MANIFEST

LIBCUDA = "libcuda.so.1"


def write_bundle(module: Path, folder: Path, jobs: int | None = None) -> int:
    """Compile what the exported module's rows need into the folder; the number of kernels.

    An earlier bundle there is replaced, whole or not at all. `jobs` processes compile, as many as
    there are cores without it. Raises ExportError where the folder is something else, or cannot be
    written.
    """
    if folder.exists() and not (folder / BUNDLE_MANIFEST).is_file():
        raise ExportError(f"{folder}: exists and is no bundle")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as made:
            count = _compile_all(module.absolute(), Path(made), jobs or os.cpu_count() or 1)
            new = Path(made) / "bundle"
            new.chmod(0o755)
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)
    except OSError as error:
        raise ExportError(f"cannot write {folder}: {error.strerror or error}") from None
    return count


def _compile_all(module: Path, made: Path, jobs: int) -> int:
    new, stub, cache = made / "bundle", made / "stub", made / "cache"
    _make_libcuda(stub)
    tasks = [(module, made, gpu, share, jobs) for gpu in _targets(module) for share in range(jobs)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=context) as pool:
        shares = list(pool.map(_compile_share, tasks))
    for library in sorted(cache.glob("*/*.so")):
        kept = new / BUNDLE_BUILT / library.parent.name / library.name
        kept.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(library, kept)
    told = {
        "triton": triton.__version__,
        "targets": sorted({share.target for share in shares}),
        "gluon": any(share.gluon for share in shares),
    }
    (new / BUNDLE_MANIFEST).write_text(json.dumps(told, sort_keys=True) + "\n")
    return len(list((new / BUNDLE_KERNELS).iterdir()))


def _targets(module: Path) -> list[int]:
    """The places of the GPUs in the module's tables, one of those that differ in triton alone."""
    devices = [table.device for table in _loaded(module).installed().tables.gpus]
    return [place for place, device in enumerate(devices) if device not in devices[:place]]


class Share(NamedTuple):
    """What a process tells of the kernels that it compiled."""

    target: str
    gluon: bool  # whether kernels are written in it


def _compile_share(task: tuple[Path, Path, int, int, int]) -> Share:
    """Compile every `jobs`-th plan of a GPU from number `share` on."""
    path, made, gpu, share, jobs = task
    os.environ["TRITON_CACHE_DIR"] = str(made / "cache")
    knobs.nvidia.libcuda_path = str(made / "stub")
    # what was built before is found, and cannot be loaded
    logging.getLogger("triton.runtime.build").setLevel(logging.ERROR)
    module = _loaded(path)
    device = module.installed().tables.gpus[gpu].device
    target = compile_only(device)
    module.keep_compiled(made / "bundle")
    gluon = False
    for plan in islice(module.warm_plans(device), share, None, jobs):
        for kernel in module.compile_plan(plan):
            gluon |= type(kernel.src.fn).__module__.startswith(module.GLUON)
            with _unloadable():
                _build_launcher(kernel)
    if share == 0 and target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaUtils

        for build in (CudaUtils, lambda: compile_module_from_src(*module.RECALL_SOURCE)):
            with _unloadable():
                build()
    return Share(module.bundle_target(target), gluon)


def _build_launcher(kernel: Any) -> None:
    if kernel.metadata.target.backend == "cuda":
        from triton.backends.nvidia.driver import CudaLauncher

        CudaLauncher(kernel.src, kernel.metadata)


@contextlib.contextmanager
def _unloadable() -> Iterator[None]:
    """What is built here lies in triton's cache though it cannot be loaded without a driver."""
    with contextlib.suppress(ImportError):
        yield


def _make_libcuda(folder: Path) -> None:
    """A library to link with in place of what a GPU's driver brings."""
    folder.mkdir()
    # a linker may leave out a library of which nothing is needed; this all of triton's C does
    (folder / "driver.c").write_text("void cuGetErrorString(void) {}\n")
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise ExportError("a bundle needs a C compiler, for what launches its kernels")
    command = [compiler, "-shared", "-fPIC", f"-Wl,-soname,{LIBCUDA}", "driver.c"]
    subprocess.run([*command, "-o", LIBCUDA], cwd=folder, check=True)


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("autoflash_bundled", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
