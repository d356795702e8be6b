"""A driver that compiles for an H200 and launches into a list, by triton's own way or past it."""

import ctypes
import itertools
import struct
from collections import namedtuple
from types import SimpleNamespace

import torch
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

from autoflash.kernel import _CompileOnlyDriver
from autoflash.runtime.cuda_launch import CUDA_SERIALIZATION, CudaLaunchConfig

TensorMap = namedtuple("TensorMap", ["pointer", "encoding", "shape", "strides"])
Launched = namedtuple("Launched", ["grid", "warps", "shared", "dependent", "stream", "parameters"])
WIDTHS = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8}


class FakeLaunches(_CompileOnlyDriver):
    """`launched` are the launches, with the parameters of kernels in order, places as numbers."""

    stream = 77
    current_context = 5
    error = 0  # of CUDA, at every launch

    def __init__(self, gpu):
        super().__init__(gpu)
        self.launched, self.maps = [], {}
        self.before_launch = lambda: None
        self._functions, self._kinds, self._next = itertools.count(1), {}, []
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.smem_per_block},
            load_binary=self._load,
            fill_tma_descriptor=lambda pointer, *told: TensorMap(
                pointer, told[:4], tuple(told[4]), tuple(told[5])
            ),
        )

    def get_current_device(self):
        return torch.cuda.current_device()  # which the test says

    def get_current_stream(self, device):
        return self.stream

    def map_address(self, tensor_map):
        """Where the map is said to lie: its number."""
        self.maps[len(self.maps) + 1] = tensor_map
        return len(self.maps)

    def launcher_cls(self, source, metadata):
        """Triton's launcher whose C function, which would need CUDA to be built, is the list."""
        launcher = object.__new__(CudaLauncher)
        for name in (
            "global_scratch_size",
            "global_scratch_align",
            "profile_scratch_size",
            "profile_scratch_align",
            "launch_cooperative_grid",
            "launch_pdl",
        ):
            setattr(launcher, name, getattr(metadata, name))
        launcher.num_ctas = metadata.num_ctas
        tensordesc_meta = getattr(metadata, "tensordesc_meta", None)
        launcher.launch = wrap_handle_tensordesc(self._launch, source.signature, tensordesc_meta)
        self._next = []
        for kind in source.signature.values():
            if kind.startswith("tensordesc"):
                rank = kind.split("]")[0].count(",") + 1
                self._next += ["map", *["i32"] * rank, *["i64"] * rank]
            else:
                self._next.append(kind)
        return launcher

    def _load(self, *_):
        function = next(self._functions)
        self._kinds[function] = self._next
        return object(), function, 32, 0, 1024

    def _launch(self, *arguments):
        """What the C function of triton 3.6 is called with."""
        grid, stream, function, cooperative, dependent = arguments[:3], *arguments[3:7]
        warps, _, shared = arguments[9]
        assert not cooperative
        kinds = self._kinds[function]
        given = zip(kinds, arguments[13:], strict=True)
        parameters = [self._passed(*each) for each in given if each[0] != "constexpr"]
        self.launched.append(Launched(grid, warps, shared, dependent, stream, parameters))

    @staticmethod
    def _passed(kind, value):
        if isinstance(value, torch.Tensor):
            return value.data_ptr()
        return struct.unpack("f", struct.pack("f", value))[0] if kind == "fp32" else value

    def cuda_launch(self, config_at, function, places_at, extra):
        """What cuLaunchKernelEx is called with."""
        assert extra is None
        self.before_launch()
        config = CudaLaunchConfig.from_address(config_at)
        attributes = [config.attributes[n] for n in range(config.num_attributes)]
        dependent = [(each.id, each.value[0]) for each in attributes] == [(CUDA_SERIALIZATION, 1)]
        kinds = [kind for kind in self._kinds[function] if kind != "constexpr"]
        places = (ctypes.c_uint64 * (len(kinds) + 2)).from_address(places_at)
        parameters = [self._held(*each) for each in zip(kinds, places, strict=False)]
        assert [self._held("i64", place) for place in places[-2:]] == [0, 0]  # no scratch
        shape = (tuple(config.grid), config.block[0] // 32, config.shared_bytes)
        self.launched.append(Launched(*shape, dependent, config.stream, parameters))
        return self.error

    def context(self, where):
        """cuCtxGetCurrent, which writes the context that the test says."""
        where[0] = self.current_context
        return 0

    def _held(self, kind, place):
        if kind == "map":
            return self.maps[place]
        held = ctypes.string_at(place, 8)
        if kind == "fp32":
            return struct.unpack("f", held[:4])[0]
        if kind[0] == "*":
            return int.from_bytes(held, "little")
        return int.from_bytes(held[: WIDTHS[kind]], "little", signed=True)
