"""Capture: a call inside a CUDA graph's capture launches only what is on the device already."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from triton import knobs
from triton.runtime import driver, jit

from .launch import Launch


class CaptureError(RuntimeError):
    """A call during a graph's capture that would have to compile or load a kernel."""


def refuse_unloaded(plan: Sequence[Launch]) -> None:
    """Raises CaptureError where the current stream captures a graph and a kernel is not loaded.

    Compiling would stall the capture and loading ends it with an error of CUDA, so the call is
    refused before anything of it is launched.
    """
    if not torch.cuda.is_current_stream_capturing():
        return
    for launch in plan:
        if not is_loaded(launch):
            raise CaptureError(
                f"{launch[0].__name__} is not loaded yet for these shapes: call this once before "
                "the capture of a CUDA graph"
            )


def is_loaded(launch: Launch) -> bool:
    """Whether the launch finds its kernel compiled and on the device, as triton 3.6's `run` looks.

    True where another triton keeps its kernels elsewhere: then CUDA has the last word.
    """
    kernel, _, arguments, options = launch
    active: Any = driver.active
    try:
        device = active.get_current_device()
        kernels, keys, _, _, binder = kernel.device_caches[device]
        asked = {"enable_fp_fusion": True, **options}
        asked["debug"] = kernel.debug or knobs.runtime.debug
        asked["instrumentation_mode"] = knobs.compilation.instrumentation_mode
        _, specialization, found = binder(*arguments, **asked)
        compiled = kernels.get(jit.compute_cache_key(keys, specialization, found))
        return compiled is not None and compiled.module is not None
    except (AttributeError, TypeError, ValueError):
        return True
