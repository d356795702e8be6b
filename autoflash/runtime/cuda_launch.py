"""CUDA's launch call: what it is told lies in memory, laid out once and filled in for each call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

CUDA_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
CUDA_WARP = 32
# What a parameter of each of triton's types holds, in the low bytes of a word.
CUDA_INTEGERS = ("i1", "i8", "i16", "i32", "i64", "u1", "u8", "u16", "u32", "u64")
CUDA_TENSOR_MAP = "map"
MAP_OFFSET = 128  # of the map in the object that triton 3.6 encodes it in


class CudaLaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute, whose value is a union of 64 bytes."""

    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_int), ("value", ctypes.c_int * 16))


class CudaLaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(CudaLaunchAttribute)),
        ("num_attributes", ctypes.c_uint),
    )


class CudaLaunch:
    """One launch. `words` hold its parameters and `places` their addresses, to be filled in."""

    __slots__ = ("config", "config_at", "function", "places", "places_at", "words")

    def __init__(
        self,
        function: int,
        grid: Sequence[int],
        num_warps: int,
        shared_bytes: int,
        dependent: bool,
        parameters: Sequence[tuple[str, Any]],
    ) -> None:
        self.function = function
        self.config = CudaLaunchConfig((*grid, 1, 1)[:3], (num_warps * CUDA_WARP, 1, 1))
        self.config.shared_bytes = shared_bytes
        if dependent:
            attribute = CudaLaunchAttribute(id=CUDA_SERIALIZATION)
            attribute.value[0] = 1
            self.config.attributes = ctypes.pointer(attribute)
            self.config.num_attributes = 1
        self.words = (ctypes.c_uint64 * len(parameters))(*(_word(*each) for each in parameters))
        first, size = ctypes.addressof(self.words), ctypes.sizeof(ctypes.c_uint64)
        addresses = (first + size * number for number in range(len(parameters)))
        self.places = (ctypes.c_void_p * len(parameters))(*addresses)
        self.config_at = ctypes.addressof(self.config)
        self.places_at = ctypes.addressof(self.places)


@cache
def cuda_launcher() -> Callable[[int, int, int, None], int]:
    """cuLaunchKernelEx(config, function, parameters, None), which returns CUDA's error or 0."""
    launch = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    launch.argtypes = [ctypes.c_void_p] * 4
    launch.restype = ctypes.c_int
    return launch


@cache
def cuda_context() -> Callable[[Any], int]:
    """cuCtxGetCurrent(where to write it), which returns CUDA's error or 0."""
    current = ctypes.CDLL("libcuda.so.1").cuCtxGetCurrent
    current.argtypes = [ctypes.c_void_p]
    current.restype = ctypes.c_int
    return current


def function_address(function: Any) -> int:
    """Where a function of ctypes lies."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def cuda_parameter(kind: str) -> bool:
    """Whether a parameter of this type is known."""
    return kind[0] == "*" or kind in (*CUDA_INTEGERS, "fp32", CUDA_TENSOR_MAP)


def map_address(tensor_map: Any) -> int | None:
    """Where the tensor map lies that triton has encoded; None if not in such an object."""
    if getattr(type(tensor_map), "__basicsize__", 0) != 2 * MAP_OFFSET:
        return None
    address = id(tensor_map) + MAP_OFFSET
    return address if address % MAP_OFFSET == 0 else None


def _word(kind: str, value: Any) -> int:
    """The value as it lies in memory; of pointers and maps, which are filled in, 0."""
    if kind[0] == "*" or kind == CUDA_TENSOR_MAP:
        return 0
    if kind == "fp32":
        return struct.unpack("<I", struct.pack("<f", value))[0]
    return int(value) & (2**64 - 1)
