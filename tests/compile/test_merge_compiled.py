"""Merging compiles for the targets and does not spill."""

import pytest
import torch

from autoflash import kernel
from autoflash.families import merge
from autoflash.gpu import KNOWN
from autoflash.runtime.launch import compile_plan

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values()}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_it_compiles_and_does_not_spill(head_dim, arch):
    gpu = TARGETS[arch]
    kernel.compile_only(gpu)
    _, module = kernel._loaded(merge.variants()["merge"], arch)
    out = torch.empty(4, 16, 8, head_dim, dtype=torch.bfloat16, device="meta")
    lse = torch.empty(4, 8, 16, device="meta")
    (compiled,) = compile_plan(module.plan(out, lse, out, lse, out, lse))
    assert kernel._resources(compiled, gpu)[1] == 0
