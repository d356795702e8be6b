"""Appending to a cache compiles for every target, bytes of fp8 on GPUs without fp8 too."""

import pytest
import torch

from autoflash import kernel
from autoflash.families import append_kv
from autoflash.gpu import KNOWN
from autoflash.runtime.launch import compile_plan

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values()}
ARCHES = ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942"]


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("variant", append_kv.variants().values(), ids=lambda each: each.name)
def test_it_compiles_and_does_not_spill(variant, arch):
    gpu = TARGETS[arch]
    kernel.compile_only(gpu)
    _, module = kernel._loaded(variant, arch)
    kinds = (torch.int8, torch.float8_e4m3fn) if variant.quantised else (torch.bfloat16,)
    for dtype in kinds:
        k, cache = empty(64, 8, 128), empty(100, 16, 8, 128, dtype=dtype)
        scales = [empty(8, dtype=torch.float32), 0.5] if variant.head_scales else []
        if variant.token_scales:
            scales = [empty(100, 16, 8, dtype=torch.float32)] * 2
        slots = empty(64, dtype=torch.int64)
        compiled = compile_plan(module.plan(k, k, cache, cache, *scales, slots, "nhd"))
        assert [kernel._resources(each, gpu)[1] for each in compiled] == [0]
