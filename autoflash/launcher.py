"""Launcher: triton's C function that launches a kernel, built before the first launch needs it."""

import contextlib
from functools import cache
from typing import Any

from triton.backends.nvidia import driver as nvidia


def build_launcher(kernel: Any) -> None:
    """Leave the compiled kernel's launcher in triton's cache; its first launch runs a C compiler.

    That takes a third of a second for each signature. Only where the driver's library is, with
    which it is linked.
    """
    if kernel.metadata.target.backend != "cuda" or not _driver_is_installed():
        return
    with contextlib.suppress(Exception):  # whatever is wrong, the launch meets it again and tells
        nvidia.CudaLauncher(kernel.src, kernel.metadata)


@cache
def _driver_is_installed() -> bool:
    try:
        return bool(nvidia.libcuda_dirs())
    except Exception:  # an assertion of triton's, or no ldconfig, or another triton
        return False
