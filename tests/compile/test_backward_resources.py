"""The backward's bound of shared memory and its defaults, against what is compiled."""

from dataclasses import replace

import pytest

from autoflash.check import plan_for
from autoflash.config import Config
from autoflash.families import backward_single
from autoflash.families.backward import FAMILY
from autoflash.gpu import KNOWN, known
from autoflash.inputs import make_inputs
from autoflash.kernel import _compiled, _resources, compile_only, new_results
from autoflash.problem import Problem
from autoflash.runtime.backward_validity import backward_single_smem_bytes, backward_smem_bytes
from autoflash.runtime.launch import compile_plan
from autoflash.runtime.masks import query_lists

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values()} | {"sm_90": known("NVIDIA H200")}

# Every branch of the bound and of the defaults; full attention in whole tiles compiles fastest.
CASES = [
    ("sm_86", "bf16", 64),
    ("sm_86", "bf16", 256),
    ("sm_86", "fp32", 128),
    ("sm_90", "bf16", 64),
    ("sm_90", "bf16", 256),
    ("gfx942", "bf16", 64),
    ("gfx942", "fp32", 256),
]


@pytest.mark.parametrize(("arch", "dtype", "head_dim"), CASES)
def test_each_kernel_of_the_default_fits_its_bound_and_hardly_spills(arch, dtype, head_dim):
    gpu, p = TARGETS[arch], Problem("backward", dtype, 2, 8, 2, head_dim, 512, 512, causal=False)
    config = FAMILY.default(p, gpu)
    (_, kv, q), workspace_bytes = _compiled(p, config, gpu, with_lse=False, wide_rows=False)
    bounds = backward_smem_bytes(p, config.as_dict(), gpu)
    for kernel, bound in ((kv, bounds["dk and dv"]), (q, bounds["dq"])):
        assert kernel.metadata.shared <= bound <= gpu.smem_per_block
        if gpu.vendor == "nvidia":  # near enough to refuse nothing that would fit
            assert bound <= 1.5 * kernel.metadata.shared
        assert _resources(kernel, gpu)[1] <= FAMILY.max_spills
    assert workspace_bytes == 2 * 4 * 2 * 8 * 512  # lse and delta in fp32, no more


@pytest.mark.parametrize(
    ("arch", "head_dim"), [("sm_86", 256), ("sm_90", 64), ("sm_90", 256), ("gfx942", 128)]
)
def test_a_single_pass_fits_its_bound_and_hardly_spills(arch, head_dim):
    gpu, p = TARGETS[arch], Problem("backward", "bf16", 2, 8, 2, head_dim, 512, 512, causal=False)
    family = backward_single.FAMILY
    config = family.default(p, gpu)
    (_, kernel, _), workspace_bytes = _compiled(p, config, gpu, with_lse=False, wide_rows=False)
    bound = backward_single_smem_bytes(p, config.as_dict(), gpu)
    assert kernel.metadata.shared <= bound <= gpu.smem_per_block
    if gpu.vendor == "nvidia":
        assert bound <= 1.5 * kernel.metadata.shared
    assert _resources(kernel, gpu)[1] <= family.max_spills
    assert workspace_bytes == 4 * 2 * 8 * 512 * (2 + head_dim)  # and dq in fp32


@pytest.mark.parametrize(
    ("arch", "causal", "widths"),
    [("sm_80", False, (192, 128)), ("sm_90", True, (192, 128)), ("sm_90", False, (40, 256))],
    ids=str,
)
@pytest.mark.parametrize("family", [FAMILY, backward_single.FAMILY], ids=lambda each: each.name)
def test_values_of_another_width_fit_the_bound_and_hardly_spill(family, arch, causal, widths):
    gpu, (head_dim, head_dim_v) = TARGETS[arch], widths
    sizes = (2, 8, 2, head_dim, 512, 512, causal)
    p = Problem("backward", "bf16", *sizes, head_dim_v=head_dim_v)
    config = family.default(p, gpu)
    kernels, workspace_bytes = _compiled(p, config, gpu, with_lse=False, wide_rows=False)
    bound = backward_smem_bytes if family is FAMILY else backward_single_smem_bytes
    bounds = bound(p, config.as_dict(), gpu)
    allowed = list(bounds.values()) if isinstance(bounds, dict) else [bounds]
    for kernel, most in zip(kernels[1:], allowed, strict=False):
        assert kernel.metadata.shared <= most <= gpu.smem_per_block
        assert most <= 1.5 * kernel.metadata.shared
        assert _resources(kernel, gpu)[1] <= family.max_spills
    sums = 0 if family is FAMILY else 1 << (head_dim - 1).bit_length()  # of dq, as wide as keys
    assert workspace_bytes == 4 * 2 * 8 * 512 * (2 + sums)


@pytest.mark.parametrize(("head_dim", "block_n"), [(256, 64), (128, 128)])
def test_a_single_pass_of_few_queries_has_room_for_another_tile_of_keys(head_dim, block_n):
    gpu = TARGETS["sm_90"]
    p = Problem("backward", "bf16", 2, 8, 2, head_dim, 512, 512)
    knobs = {"KV_BLOCK_M": 32, "KV_BLOCK_N": block_n, "KV_WARPS": 8, "KV_STAGES": 2}
    config = Config.of("backward_single", {**knobs, "LOAD": "pointer"})
    _, kernel, _ = _compiled(p, config, gpu, with_lse=False, wide_rows=False)[0]
    bound = backward_single_smem_bytes(p, config.as_dict(), gpu)
    assert kernel.metadata.shared <= bound <= 1.2 * kernel.metadata.shared


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("family", [FAMILY, backward_single.FAMILY], ids=lambda each: each.name)
def test_dropout_fits_the_bound_and_hardly_spills_at_any_width(family, causal):
    gpu = TARGETS["sm_90"]
    bound = backward_smem_bytes if family is FAMILY else backward_single_smem_bytes
    for head_dim in (64, 128, 256):
        sizes = (2, 8, 2, head_dim, 512, 512, causal)
        p = Problem("backward", "bf16", *sizes, dropout=True)
        config = family.default(p, gpu)
        kernels, _ = _compiled(p, config, gpu, with_lse=False, wide_rows=False)
        bounds = bound(p, config.as_dict(), gpu)
        allowed = list(bounds.values()) if isinstance(bounds, dict) else [bounds]
        for kernel, most in zip(kernels[1:], allowed, strict=False):
            assert kernel.metadata.shared <= most <= gpu.smem_per_block
            assert _resources(kernel, gpu)[1] <= family.max_spills


def test_lengths_and_head_counts_do_not_compile_another_kernel():
    gpu = known("NVIDIA H200")
    usual = Problem("backward", "bf16", 1, 8, 2, 64, 512, 512)
    odd = Problem("backward", "bf16", 2, 7, 7, 64, 17, 1000)
    config = FAMILY.default(usual, gpu)
    one, other = (
        _compiled(p, config, gpu, with_lse=False, wide_rows=False)[0] for p in (usual, odd)
    )
    assert [kernel.hash for kernel in one] == [kernel.hash for kernel in other]


@pytest.mark.slow
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_lists_without_whole_blocks_compile(bias):
    """As a BlockMask has them that is made of partial blocks alone."""
    gpu, sizes = known("NVIDIA H200"), (1, 4, 2, 64, 512, 512)
    blocks = {"masked_by": "blocks", "density": 10, "mask_block_q": 128, "mask_block_k": 128}
    p = Problem("backward", "bf16", *sizes, causal=False, bias=bias, **blocks)
    compile_only(gpu)
    inputs = make_inputs(p, device="meta", poison=False)
    queries = query_lists(inputs.block_mask)
    partial = inputs.block_mask._replace(
        full_kv_num_blocks=None,
        full_kv_indices=None,
        queries=queries._replace(full_q_num_blocks=None, full_q_indices=None),
    )
    inputs, config = replace(inputs, block_mask=partial), FAMILY.default(p, gpu)
    out, beside = new_results(inputs)
    compiled = compile_plan(plan_for(inputs, config, gpu, out, beside))
    assert len(compiled) == 3 + bias
