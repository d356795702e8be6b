"""Launcher: triton's C function that launches a kernel, built before the first launch needs it."""

import contextlib
from functools import cache
from typing import Any


def build_launcher(kernel: Any) -> None:
    """Leave the compiled kernel's launcher in triton's cache; its first launch runs a C compiler.

    That takes a third of a second for each signature. Only where the driver's library is, with
    which it is linked.
    """
    if kernel.metadata.target.backend != "cuda" or not _driver_is_installed():
        return
    from triton.backends.nvidia.driver import CudaLauncher

    with contextlib.suppress(Exception):  # whatever is wrong, the launch meets it again and tells
        CudaLauncher(kernel.src, kernel.metadata)


@cache
def _driver_is_installed() -> bool:
    try:
        from triton.backends.nvidia.driver import CudaLauncher, libcuda_dirs

        return bool(CudaLauncher and libcuda_dirs())
    except Exception:  # an assertion of triton's, no ldconfig, or a triton of another vendor
        return False
