"""The prefill family's bound of shared memory and its defaults, against what is compiled."""

from dataclasses import replace

import pytest

from autoflash import kernel
from autoflash.config import Config
from autoflash.families.prefill import FAMILY
from autoflash.gpu import KNOWN, known
from autoflash.inputs import make_inputs
from autoflash.kernel import _compiled, compile_candidate, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.runtime.launch import compile_plan
from autoflash.runtime.validity import prefill_smem_bytes

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values()} | {"sm_90": known("NVIDIA H200")}


def problem(dtype: str, head_dim: int, causal: bool = True) -> Problem:
    return Problem("prefill", dtype, 2, 8, 2, head_dim, 512, 512, causal=causal)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim"),
    [
        ("sm_80", "bf16", 256),
        ("sm_86", "bf16", 64),
        ("sm_86", "bf16", 160),
        ("sm_90", "bf16", 64),
        ("sm_90", "bf16", 256),
        ("sm_90", "fp32", 128),
        ("sm_100", "bf16", 256),
        ("sm_120", "fp32", 256),
        ("gfx942", "bf16", 256),
        ("gfx942", "fp32", 256),
    ],
)
def test_the_default_fits_its_bound_and_hardly_spills(arch: str, dtype: str, head_dim: int) -> None:
    gpu, p = TARGETS[arch], problem(dtype, head_dim)
    config = FAMILY.default(p, gpu)
    resources = compile_candidate(p, config, gpu)
    bound = prefill_smem_bytes(p, config.as_dict(), gpu)
    assert resources.smem_bytes <= bound <= gpu.smem_per_block
    assert resources.spill_bytes <= FAMILY.max_spills


# (arch, dtype, head_dim, BLOCK_M, BLOCK_N, num_warps, num_stages, LOAD): every branch of the bound
BOUNDED = [
    ("sm_80", "bf16", 64, 128, 128, 8, 3, "pointer"),
    ("sm_80", "bf16", 128, 64, 64, 4, 1, "pointer"),
    ("sm_80", "bf16", 128, 64, 32, 4, 3, "pointer"),
    ("sm_86", "fp32", 64, 32, 32, 4, 2, "pointer"),
    ("sm_90", "bf16", 128, 128, 64, 8, 3, "pointer"),
    ("sm_90", "bf16", 128, 128, 128, 8, 2, "descriptor"),
    ("sm_90", "bf16", 64, 128, 128, 8, 1, "descriptor"),
    ("sm_100", "bf16", 128, 128, 64, 8, 1, "pointer"),
    ("sm_120", "bf16", 64, 64, 128, 4, 2, "descriptor"),
    ("gfx942", "bf16", 128, 64, 64, 4, 2, "pointer"),
    ("gfx942", "bf16", 64, 128, 128, 8, 1, "pointer"),
    ("gfx942", "fp32", 64, 32, 32, 4, 2, "pointer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BOUNDED, ids=str)
def test_the_bound_of_shared_memory_holds_and_is_near(case: tuple) -> None:
    arch, dtype, head_dim, *values = case
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    knobs = dict(zip(names, values, strict=True), HEAD_GROUP_MIB=4)
    gpu, p = TARGETS[arch], problem(dtype, head_dim, causal=False)
    compiled = compile_candidate(p, Config.of("prefill", knobs), gpu).smem_bytes
    bound = prefill_smem_bytes(p, knobs, gpu)
    # near enough that no config is refused which would leave a stage of keys free
    assert compiled <= bound <= 1.5 * compiled


MASKED = [
    ("sm_90", {"masked_by": "documents", "density": 10}, 64, 64, 128, 4, 2, "descriptor"),
    ("sm_90", {"masked_by": "documents", "density": 10}, 64, 128, 128, 8, 4, "pointer"),
    ("sm_80", {"head_dim_v": 128}, 64, 64, 64, 4, 2, "pointer"),
    ("sm_90", {"head_dim_v": 128}, 192, 64, 64, 4, 3, "descriptor"),
    ("gfx942", {"head_dim_v": 64}, 128, 64, 32, 4, 2, "pointer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_bound_counts_ids_of_documents_and_channels_of_values(case: tuple) -> None:
    arch, changes, head_dim, *values = case
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    knobs = dict(zip(names, values, strict=True), HEAD_GROUP_MIB=4)
    gpu, p = TARGETS[arch], replace(problem("bf16", head_dim), **changes)
    compiled = compile_candidate(p, Config.of("prefill", knobs), gpu).smem_bytes
    assert compiled <= prefill_smem_bytes(p, knobs, gpu) <= 1.5 * compiled


PAGED = [
    ("sm_80", "bf16", 128, 16, 64, 32, 4, 3, "pointer"),
    ("sm_90", "bf16", 128, 16, 64, 64, 4, 4, "pointer"),
    ("sm_90", "bf16", 128, 64, 128, 64, 8, 2, "descriptor"),
    ("gfx942", "bf16", 64, 3, 64, 64, 4, 2, "pointer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_the_bound_holds_over_pages_whose_ids_take_no_shared_memory(case: tuple) -> None:
    arch, dtype, head_dim, page_size, *values = case
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    knobs = dict(zip(names, values, strict=True), HEAD_GROUP_MIB=4)
    p = replace(problem(dtype, head_dim), page_size=page_size)
    compiled = compile_candidate(p, Config.of("prefill", knobs), TARGETS[arch]).smem_bytes
    assert compiled <= prefill_smem_bytes(p, knobs, TARGETS[arch]) <= 1.5 * compiled


BIASED = [
    ("sm_80", "bf16", 128, 64, 32, 4, 2, "pointer"),
    ("sm_86", "bf16", 64, 64, 32, 4, 3, "pointer"),
    ("sm_90", "bf16", 128, 64, 64, 8, 3, "descriptor"),
    ("sm_90", "bf16", 64, 64, 64, 4, 2, "pointer"),
    ("gfx942", "bf16", 128, 64, 32, 4, 2, "pointer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BIASED, ids=str)
def test_the_bound_holds_with_a_bias_under_a_window(case: tuple) -> None:
    arch, dtype, head_dim, *values = case
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    knobs = dict(zip(names, values, strict=True), HEAD_GROUP_MIB=4)
    p = replace(problem(dtype, head_dim), window_left=100, bias=True)
    compiled = compile_candidate(p, Config.of("prefill", knobs), TARGETS[arch]).smem_bytes
    assert compiled <= prefill_smem_bytes(p, knobs, TARGETS[arch]) <= 1.5 * compiled


DROPPED = [
    ("sm_80", "bf16", 128, 64, 64, 4, 2, "pointer"),
    ("sm_86", "bf16", 64, 128, 32, 4, 3, "pointer"),
    ("sm_90", "bf16", 64, 64, 128, 4, 2, "descriptor"),
    ("sm_90", "fp32", 64, 32, 32, 4, 2, "pointer"),
    ("gfx942", "bf16", 64, 64, 64, 4, 2, "pointer"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", DROPPED, ids=str)
def test_the_bound_holds_with_dropout_whose_mask_takes_a_byte_an_element(case: tuple) -> None:
    arch, dtype, head_dim, *values = case
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages", "LOAD")
    knobs = dict(zip(names, values, strict=True), HEAD_GROUP_MIB=4)
    p = replace(problem(dtype, head_dim), dropout=True)
    compiled = compile_candidate(p, Config.of("prefill", knobs), TARGETS[arch]).smem_bytes
    assert compiled <= prefill_smem_bytes(p, knobs, TARGETS[arch]) <= 1.3 * compiled


def test_the_probability_of_dropout_does_not_compile_another_kernel(monkeypatch) -> None:
    gpu, p = known("NVIDIA H200"), replace(problem("bf16", 64), dropout=True)
    hashes = set()
    for dropout_p in (0.3, 0.5, 2**-16):
        monkeypatch.setattr("autoflash.modifier_values.DROPOUT_P", dropout_p)
        (kernel,), _ = _compiled(p, FAMILY.default(p, gpu), gpu, with_lse=True, wide_rows=False)
        hashes.add(kernel.hash)
    assert len(hashes) == 1


@pytest.mark.parametrize("page_size", [0, 16])
def test_fp32_inputs_are_multiplied_as_fp32(page_size: int) -> None:
    gpu, p = known("NVIDIA H200"), replace(problem("fp32", 64), page_size=page_size)
    (kernel,), _ = _compiled(p, FAMILY.default(p, gpu), gpu, with_lse=True, wide_rows=False)
    assert "fma.rn.f32" in kernel.asm["ptx"]
    assert "tf32" not in kernel.asm["ptx"]


@pytest.mark.parametrize("modifier", ["window", "softcap", "alibi", "sinks"])
def test_a_window_or_a_modifier_of_each_row_spills_nothing_and_takes_no_shared_memory(
    modifier: str,
) -> None:
    gpu, plain = known("NVIDIA H200"), problem("bf16", 128)
    on = {"window_left": 100} if modifier == "window" else {modifier: True}
    p = replace(plain, **on)
    assert FAMILY.default(p, gpu) == FAMILY.default(plain, gpu)
    with_it, without = (compile_candidate(each, FAMILY.default(p, gpu), gpu) for each in (p, plain))
    assert with_it.spill_bytes == 0
    assert with_it.smem_bytes <= without.smem_bytes + 1024  # of a mask's or a reduction's scratch


def test_the_width_of_a_window_does_not_compile_another_kernel() -> None:
    gpu, p = known("NVIDIA H200"), problem("bf16", 64)
    windows = [(1, -1), (100, -1), (4096, -1), (16, 16)]
    kernels = [
        _compiled(
            replace(p, causal=False, window_left=left, window_right=right),
            FAMILY.default(p, gpu),
            gpu,
            with_lse=True,
            wide_rows=False,
        )[0][0]
        for left, right in windows
    ]
    assert len({kernel.hash for kernel in kernels}) == 1


@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_lengths_and_head_counts_do_not_compile_another_kernel(load: str) -> None:
    gpu, p = known("NVIDIA H200"), problem("bf16", 64)
    config = Config.of("prefill", FAMILY.default(p, gpu).as_dict() | {"LOAD": load})
    shapes = [
        {},
        {"seqlen_q": 1, "seqlen_k": 1},
        {"seqlen_q": 17, "seqlen_k": 1000},
        {"num_kv_heads": 1},
        {"batch": 1, "num_heads": 7, "num_kv_heads": 7},
    ]
    kernels = [
        _compiled(replace(p, **shape), config, gpu, with_lse=True, wide_rows=False)[0][0]
        for shape in shapes
    ]
    assert len({kernel.hash for kernel in kernels}) == 1


@pytest.mark.parametrize("page_size", [0, 64])
def test_lists_without_whole_blocks_compile(page_size: int) -> None:
    """As a BlockMask has them that is made of partial blocks alone."""
    gpu, p = known("NVIDIA H200"), problem("bf16", 64)
    blocks = {"masked_by": "blocks", "density": 10, "mask_block_q": 128, "mask_block_k": 128}
    p = replace(p, **blocks, page_size=page_size, lengths="ragged" if page_size else "equal")
    kernel.compile_only(gpu)
    _, module = kernel._loaded(FAMILY.variant(p), gpu.arch)
    inputs = make_inputs(p, device="meta", poison=False)
    assert inputs.block_mask is not None
    partial = inputs.block_mask._replace(full_kv_num_blocks=None, full_kv_indices=None)
    inputs, config = replace(inputs, block_mask=partial), FAMILY.default(p, gpu)
    (compiled,) = compile_plan(plan_of(module, inputs, *new_outputs(inputs), gpu, config))
    assert kernel._resources(compiled, gpu)[1] <= FAMILY.max_spills
