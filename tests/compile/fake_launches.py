"""A driver that compiles for an H200 and launches into a list, by triton's own launching code."""

from collections import namedtuple
from types import SimpleNamespace

import torch
from triton.backends.nvidia.driver import CudaLauncher, wrap_handle_tensordesc

from autoflash.kernel import _CompileOnlyDriver

TensorMap = namedtuple("TensorMap", ["pointer", "encoding", "shape", "strides"])


class FakeLaunches(_CompileOnlyDriver):
    """`launched` are the arguments of every call of a C launcher, pointers as numbers."""

    stream = 77

    def __init__(self, gpu):
        super().__init__(gpu)
        self.launched = []
        self.encoded = 0
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": gpu.smem_per_block},
            load_binary=lambda name, *_: (object(), hash(name), 32, 0, 1024),
            fill_tma_descriptor=self._encode,
        )

    def get_current_device(self):
        return torch.cuda.current_device()  # which the test says

    def get_current_stream(self, device):
        return self.stream

    def _encode(self, pointer, *told):
        self.encoded += 1
        return TensorMap(pointer, told[:4], tuple(told[4]), tuple(told[5]))

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
        return launcher

    def _launch(self, *arguments):
        plain = [each.data_ptr() if isinstance(each, torch.Tensor) else each for each in arguments]
        plain[10:13] = [None, None, None]  # hooks, that nobody listens to, and what they are told
        self.launched.append(plain)
