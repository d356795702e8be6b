"""The decode family's bound of shared memory, and the spills of its best configs, as compiled."""

from dataclasses import replace
from typing import Any

import pytest

from autoflash import kernel
from autoflash.config import Config
from autoflash.families import decode_latent as latent
from autoflash.families.decode import FAMILY
from autoflash.gpu import KNOWN, Gpu, known
from autoflash.inputs import make_inputs
from autoflash.kernel import compile_candidate, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.runtime.latent_validity import decode_latent_smem_bytes
from autoflash.runtime.launch import compile_plan
from autoflash.runtime.validity import decode_refusal, decode_smem_bytes

TARGETS = {gpu.arch: gpu for gpu in KNOWN.values()} | {"sm_90": known("NVIDIA H200")}
NAMES = ("SCHEDULE", "SWAP", "BLOCK_N", "num_warps", "num_stages")


def problem(
    dtype: str, head_dim: int, num_heads: int = 8, seqlen_q: int = 1, **fields: Any
) -> Problem:
    shape = (8, num_heads, 1, head_dim, seqlen_q, 512)
    return Problem("decode", dtype, *shape, page_size=16, **fields)


def config(arch: str, *values: int | str) -> Config:
    rest = {"PROGRAMS_PER_SM": 1, "DEPENDENT_LAUNCH": int(TARGETS[arch].capability >= 90)}
    return Config.of("decode", dict(zip(NAMES, values, strict=True), **rest, COMBINE_WARPS=4))


# (arch, dtype, head_dim, num_heads of one KV head, knobs): every branch of the bound
BOUNDED = [
    ("sm_80", "bf16", 128, 8, "split", 0, 32, 2, 4),
    ("sm_86", "bf16", 64, 71, "group", 0, 64, 8, 2),
    ("sm_90", "bf16", 128, 8, "group", 1, 128, 4, 2),
    ("sm_90", "bf16", 64, 71, "split", 0, 64, 8, 3),
    ("sm_90", "bf16", 64, 71, "split", 0, 16, 8, 2),
    ("sm_90", "bf16", 64, 8, "group", 0, 64, 4, 1),
    ("sm_90", "fp32", 64, 71, "group", 0, 32, 8, 2),
    ("sm_100", "bf16", 128, 71, "split", 0, 64, 8, 2),
    ("gfx942", "bf16", 128, 8, "group", 0, 32, 4, 3),
    ("gfx942", "bf16", 16, 71, "split", 0, 128, 8, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BOUNDED, ids=str)
def test_the_bound_of_shared_memory_holds_and_is_near(case: tuple) -> None:
    arch, dtype, head_dim, num_heads, *values = case
    check_bound(TARGETS[arch], problem(dtype, head_dim, num_heads), config(arch, *values))


# the same with query tokens of eight heads each: 16 to 128 rows
SEVERAL_QUERIES = [
    ("sm_80", "bf16", 128, 2, "group", 0, 32, 2, 4),
    ("sm_90", "bf16", 128, 4, "split", 1, 64, 4, 3),
    ("sm_90", "fp16", 128, 8, "group", 1, 128, 4, 2),
    ("sm_90", "bf16", 64, 16, "split", 0, 64, 8, 3),
    ("sm_90", "bf16", 64, 16, "group", 1, 64, 4, 3),
    ("sm_120", "bf16", 128, 16, "group", 0, 64, 8, 2),
    ("gfx942", "bf16", 128, 4, "split", 0, 32, 4, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", SEVERAL_QUERIES, ids=str)
def test_the_bound_of_shared_memory_holds_for_several_query_tokens(case: tuple) -> None:
    arch, dtype, head_dim, seqlen_q, *values = case
    p = problem(dtype, head_dim, seqlen_q=seqlen_q)
    check_bound(TARGETS[arch], p, config(arch, *values))


# (arch, dtype, head_dim, seqlen_q of eight heads, kv_dtype, kv_scales, knobs): narrow and wide
QUANTISED = [
    ("sm_80", "bf16", 128, 1, "fp8_e4m3", "head", "group", 0, 32, 2, 4),
    ("sm_86", "fp16", 64, 9, "int8", "token", "group", 0, 64, 8, 2),
    ("sm_90", "bf16", 128, 1, "int8", "token", "split", 0, 128, 8, 3),
    ("sm_90", "bf16", 128, 8, "fp8_e4m3", "head", "split", 0, 64, 4, 3),
    ("sm_90", "fp16", 64, 16, "int8", "token", "group", 0, 64, 8, 3),
    ("sm_100", "bf16", 128, 9, "fp8_e4m3", "token", "split", 0, 64, 8, 2),
    ("sm_120", "bf16", 128, 16, "fp8_e4m3", "head", "group", 0, 64, 8, 2),
    ("gfx942", "bf16", 128, 1, "fp8_e4m3", "token", "group", 0, 32, 4, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", QUANTISED, ids=str)
def test_the_bound_of_shared_memory_holds_for_quantised_caches(case: tuple) -> None:
    arch, dtype, head_dim, seqlen_q, kv_dtype, kv_scales, *values = case
    scales = {"kv_dtype": kv_dtype, "kv_scales": kv_scales}
    p = problem(dtype, head_dim, seqlen_q=seqlen_q, **scales)
    check_bound(TARGETS[arch], p, config(arch, *values))


# (arch, heads, a bias or none, knobs of decode_latent): what warps multiply alone, and whole groups
LATENT = [
    ("sm_80", 128, False, "group", 32, 32, 8, 2),
    ("sm_86", 16, False, "split", 16, 32, 4, 2),
    ("sm_90", 16, False, "group", 16, 16, 4, 2),
    ("sm_90", 128, False, "split", 64, 64, 8, 2),
    ("sm_90", 128, True, "split", 64, 32, 8, 2),
    ("sm_90", 128, False, "split", 32, 64, 8, 2),
    ("gfx942", 16, False, "split", 16, 16, 4, 2),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", LATENT, ids=str)
def test_the_bound_of_shared_memory_holds_for_latent_attention(case: tuple) -> None:
    arch, num_heads, bias, schedule, *tile = case
    gpu, p = TARGETS[arch], problem("bf16", 576, num_heads, head_dim_v=512, bias=bias)
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    default = latent.FAMILY.default(p, gpu).as_dict()
    knobs = {**default, **dict(zip(names, tile, strict=True)), "SCHEDULE": schedule}
    compiled = compile_candidate(p, Config.of("decode_latent", knobs), gpu)
    bound = decode_latent_smem_bytes(p, knobs, gpu)
    assert compiled.smem_bytes <= bound < 2 * compiled.smem_bytes
    assert (compiled.spill_bytes or 0) <= latent.FAMILY.max_spills


# (arch, dtype, head_dim, seqlen_q of eight heads, knobs): tiles of a bias, and some fetched ahead
BIASED = [
    ("sm_80", "bf16", 128, 1, "group", 0, 32, 2, 4),
    ("sm_90", "bf16", 128, 1, "group", 1, 128, 4, 2),
    ("sm_90", "bf16", 16, 9, "split", 0, 128, 8, 2),
    ("sm_90", "fp32", 64, 9, "group", 0, 32, 8, 2),
    ("sm_80", "fp32", 128, 1, "group", 0, 32, 8, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", BIASED, ids=str)
def test_the_bound_of_shared_memory_holds_with_a_bias(case: tuple) -> None:
    arch, dtype, head_dim, seqlen_q, *values = case
    p = problem(dtype, head_dim, seqlen_q=seqlen_q, bias=True)
    check_bound(TARGETS[arch], p, config(arch, *values))


DOCUMENTS = {"masked_by": "documents", "density": 10}
BLOCKS = {"masked_by": "blocks", "density": 10, "mask_block_k": 64}
# (arch, dtype, head_dim, seqlen_q of eight heads, knobs)
MASKED = [
    ("sm_80", "bf16", 128, 1, "split", 0, 32, 2, 4),
    ("sm_90", "bf16", 128, 4, "split", 1, 64, 4, 3),
    ("sm_90", "fp32", 64, 9, "group", 0, 32, 8, 2),
    ("gfx942", "bf16", 128, 4, "split", 0, 32, 4, 3),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED, ids=str)
def test_the_bound_of_shared_memory_holds_with_documents(case: tuple) -> None:
    arch, dtype, head_dim, seqlen_q, *values = case
    p = problem(dtype, head_dim, seqlen_q=seqlen_q, **DOCUMENTS)
    check_bound(TARGETS[arch], p, config(arch, *values))


@pytest.mark.slow
@pytest.mark.parametrize("case", MASKED, ids=str)
@pytest.mark.parametrize("block_k", [48, 128])
def test_the_bound_of_shared_memory_holds_with_blocks_of_any_size(
    block_k: int, case: tuple
) -> None:
    arch, dtype, head_dim, seqlen_q, *values = case
    masked = {**BLOCKS, "mask_block_k": block_k}
    p = problem(dtype, head_dim, seqlen_q=seqlen_q, **masked)
    check_bound(TARGETS[arch], p, config(arch, *values))


@pytest.mark.slow
@pytest.mark.parametrize("masked", [DOCUMENTS, BLOCKS], ids=lambda fields: fields["masked_by"])
@pytest.mark.parametrize(("swap", "seqlen_q"), [(1, 1), (1, 4), (0, 4)])
def test_what_tells_which_keys_are_read_leaves_as_many_tiles_in_flight(
    swap: int, seqlen_q: int, masked: dict
) -> None:
    """It is there when a tile's keys are asked for: else one buffer less is compiled, or none."""
    chosen = config("sm_90", "split", swap, 64, 4, 3)
    p = Problem("decode", "bf16", 8, 32, 8, 128, seqlen_q, 512, page_size=16, **masked)
    masked = compile_candidate(p, chosen, TARGETS["sm_90"])
    p = replace(p, masked_by="", density=0, mask_block_q=0, mask_block_k=0)
    plain = compile_candidate(p, chosen, TARGETS["sm_90"])
    assert masked.smem_bytes == plain.smem_bytes and masked.spill_bytes == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "schedule", "swap"), [(64, "split", 1), (128, "group", 0), (256, "group", 1)]
)
def test_a_bias_does_not_spill_on_the_h200(head_dim: int, schedule: str, swap: int) -> None:
    gpu, chosen = TARGETS["sm_90"], config("sm_90", schedule, swap, 64, 4, 3)
    p = Problem("decode", "bf16", 8, 32, 8, head_dim, 1, 512, page_size=16, bias=True)
    assert decode_refusal(p, chosen.as_dict(), gpu) is None
    assert compile_candidate(p, chosen, gpu).spill_bytes == 0


def check_bound(gpu: Gpu, p: Problem, chosen: Config) -> None:
    compiled = compile_candidate(p, chosen, gpu).smem_bytes
    bound = decode_smem_bytes(p, chosen.as_dict(), gpu)
    assert compiled <= bound < 2 * compiled


each_kind_of_gpu = pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942"])
each_schedule = pytest.mark.parametrize("schedule", ["split", "group"])


def compiled_for_64_bits(schedule: str, arch: str) -> list[Any]:
    """The default's kernels for a table and lengths of int64."""
    gpu, p = TARGETS[arch], problem("bf16", 128, lengths="ragged")
    default = Config.of("decode", {**FAMILY.default(p, gpu).as_dict(), "SCHEDULE": schedule})
    kernel.compile_only(gpu)
    _, module = kernel._loaded(FAMILY.variant(p), arch)
    inputs = make_inputs(p, device="meta", poison=False)
    assert inputs.cache_seqlens is not None and inputs.block_table is not None
    inputs = replace(
        inputs, cache_seqlens=inputs.cache_seqlens.long(), block_table=inputs.block_table.long()
    )
    return compile_plan(plan_of(module, inputs, *new_outputs(inputs), gpu, default))


@each_kind_of_gpu
@each_schedule
def test_tables_and_lengths_of_64_bits_compile(schedule: str, arch: str) -> None:
    kernels = compiled_for_64_bits(schedule, arch)
    assert [kernel._resources(each, TARGETS[arch])[1] for each in kernels] == [0, 0]


@each_kind_of_gpu
@each_schedule
def test_one_thread_prefetches_first_reads_before_the_wait_where_there_is_one(
    schedule: str, arch: str
) -> None:
    code = compiled_for_64_bits(schedule, arch)[0].asm
    before, *after = (code.get("ptx") or code["amdgcn"]).split("griddepcontrol.wait")
    found = before.count("@first prefetch.global.L2"), *(part.count("prefetch") for part in after)
    assert found == ((2, 0) if arch == "sm_90" else (0,))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@each_schedule
def test_the_swapped_product_does_not_spill_on_the_h200(head_dim: int, schedule: str) -> None:
    gpu, chosen = TARGETS["sm_90"], config("sm_90", schedule, 1, 64, 4, 3)
    p = Problem("decode", "bf16", 8, 32, 8, head_dim, 1, 512, page_size=16)
    assert decode_refusal(p, chosen.as_dict(), gpu) is None
    assert compile_candidate(p, chosen, gpu).spill_bytes == 0


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "num_heads"),
    [
        ("sm_80", "bf16", 128, 64),
        ("sm_86", "fp32", 256, 4),
        ("sm_86", "bf16", 256, 71),
        ("sm_90", "fp32", 128, 32),
        ("sm_90", "bf16", 256, 32),
        ("sm_100", "fp32", 64, 71),
        ("sm_120", "bf16", 256, 4),
        ("gfx942", "fp32", 256, 4),
        ("gfx942", "bf16", 128, 71),
    ],
)
def test_the_default_of_wide_groups_and_types_fits_and_hardly_spills(
    arch: str, dtype: str, head_dim: int, num_heads: int
) -> None:
    gpu, p = TARGETS[arch], problem(dtype, head_dim, num_heads, lengths="ragged")
    resources = compile_candidate(p, FAMILY.default(p, gpu), gpu)
    assert resources.smem_bytes <= gpu.smem_per_block
    assert resources.spill_bytes <= FAMILY.max_spills
