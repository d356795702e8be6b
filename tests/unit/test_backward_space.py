"""The backward family's predicate and default: valid everywhere it serves, and refusals explain."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import gpu as gpus
from autoflash.config import Config, grid
from autoflash.families import backward_single
from autoflash.families.backward import FAMILY
from autoflash.families.family import space
from autoflash.gpu import KIB, Gpu
from autoflash.problem import Problem, title
from autoflash.runtime.backward_validity import backward_smem_bytes

H200 = gpus.known("NVIDIA_H200")
A10 = gpus.known("NVIDIA_A10")
MI300X = gpus.known("AMD_Instinct_MI300X")


def problem(**changed: Any) -> Problem:
    fields = {"op": "backward", "dtype": "bf16", "batch": 1, "num_heads": 32, "num_kv_heads": 8}
    fields |= {"head_dim": 128, "seqlen_q": 4096, "seqlen_k": 4096}
    return Problem(**(fields | changed))


problems = st.builds(
    problem,
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    batch=st.integers(1, 100_000),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.integers(2, 32).map(lambda n: 8 * n),
    seqlen_q=st.integers(1, 2**20),
    seqlen_k=st.integers(0, 2**20),
    causal=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd"]),
    head_dim_v=st.just(0) | st.integers(2, 32).map(lambda n: 8 * n),
    softcap=st.booleans(),
    bias=st.booleans(),
)
# A block of every GPU of NVIDIA since sm_80 has 99 KB of shared memory or more, one of AMD 64 KB.
any_gpu = st.builds(
    lambda gpu, smem_kib: replace(gpu, smem_per_block=smem_kib * KIB),
    st.sampled_from([gpu for gpu in gpus.KNOWN.values() if gpu.vendor == "nvidia"]),
    st.integers(99, 227),
) | st.just(MI300X)
GRID = set(grid(FAMILY.name, FAMILY.knobs))
SINGLE = backward_single.FAMILY
SINGLE_GRID = set(grid(SINGLE.name, SINGLE.knobs))


@given(problems, any_gpu)
@settings(deadline=None)
def test_the_default_is_a_candidate_for_every_problem_on_every_gpu(
    any_problem: Problem, gpu: Gpu
) -> None:
    assert FAMILY.unsupported(any_problem, gpu) is None
    default = FAMILY.default(any_problem, gpu)
    assert default in GRID and FAMILY.refusal(any_problem, default, gpu) is None
    assert SINGLE.unsupported(any_problem, gpu) is None
    default = SINGLE.default(any_problem, gpu)
    assert default in SINGLE_GRID and SINGLE.refusal(any_problem, default, gpu) is None


@pytest.mark.parametrize("sizes", [(16, 16), (32, 48), (64, 64), (128, 128), (192, 96)])
@pytest.mark.parametrize("gpu", gpus.KNOWN.values(), ids=lambda gpu: gpu.arch)
def test_tiles_divide_the_blocks_of_a_mask_and_the_default_is_one_of_them(gpu, sizes) -> None:
    blocks = {"masked_by": "blocks", "mask_block_q": sizes[0], "mask_block_k": sizes[1]}
    p = problem(density=10, **blocks)
    for family in (FAMILY, SINGLE):
        assert family.refusal(p, family.default(p, gpu), gpu) is None
        tried = [config for config, reason in space(family, p, H200) if reason is None]
        assert tried
        for config in tried:
            for name, tile in config.as_dict().items():
                if name.endswith(("BLOCK_M", "BLOCK_N")):
                    assert sizes[name.endswith("N")] % int(tile) == 0


def test_packed_sequences_have_all_masks_but_blocks_and_blocks_a_bias() -> None:
    blocks = {"masked_by": "blocks", "mask_block_q": 64, "mask_block_k": 64}
    for masks in (
        {"layout": "thd", "mask": "h > 0"},
        {"layout": "thd", "masked_by": "prefix", "density": 9, "bias": True},
        {"layout": "thd", "masked_by": "documents", "density": 9, "dropout": True},
        {"bias": True, "density": 9, **blocks},
    ):
        p = problem(**masks)
        for family in (FAMILY, SINGLE):
            assert family.refusal(p, family.default(p, H200), H200) is None


def test_the_default_of_16_bits_fits_64_kb_on_every_gpu() -> None:
    for gpu in gpus.KNOWN.values():
        small = replace(gpu, smem_per_block=64 * KIB)
        for head_dim in range(16, 257, 8):
            p = problem(head_dim=head_dim)
            for family in (FAMILY, SINGLE):
                assert family.refusal(p, family.default(p, small), small) is None


@pytest.mark.parametrize("gpu", [H200, A10], ids=lambda gpu: gpu.arch)
def test_every_refusal_says_why_and_what_is_wrong_at_run_time_is_no_candidate(gpu: Gpu) -> None:
    p = problem(head_dim=256, seqlen_q=100)
    for config, reason in space(FAMILY, p, gpu):
        assert reason is None or len(reason.split()) >= 4
        assert reason or FAMILY.misfit(p, config.as_dict(), gpu) is None


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_long_sequence_on_the_h200_has_a_few_dozen_candidates(head_dim: int) -> None:
    reasons = [reason for _, reason in space(FAMILY, problem(head_dim=head_dim), H200)]
    assert 30 <= reasons.count(None) <= 200


def test_the_best_known_tiles_of_the_h200_are_candidates() -> None:
    parts = {
        64: [(128, 128, 8, 2, 64, 64, 4, 3), (64, 64, 4, 2, 64, 64, 4, 3)],
        128: [(64, 64, 4, 2, 64, 64, 4, 2)],
        256: [(64, 64, 8, 2, 128, 64, 8, 1)],
    }
    names = [knob.name for knob in FAMILY.knobs]
    for head_dim, tiles in parts.items():
        for load in ("pointer", "descriptor"):
            for tile in tiles:
                knobs = dict(zip(names, (*tile, load), strict=True))
                (config,) = (each for each in GRID if each.as_dict() == knobs)
                assert FAMILY.refusal(problem(head_dim=head_dim), config, H200) is None


@pytest.mark.parametrize(
    ("changed", "gpu", "expected"),
    [
        ({"LOAD": "descriptor"}, A10, "tensor descriptors need sm_90, this is sm_86"),
        ({"KV_BLOCK_N": 128}, A10, "bytes of shared memory for dk and dv, a block of sm_86 has"),
        ({"Q_BLOCK_M": 128, "Q_STAGES": 3}, A10, "bytes of shared memory for dq, a block of sm_86"),
        ({"KV_BLOCK_N": 32}, H200, "KV_BLOCK_N 32 is too narrow for the products of sm_90"),
        ({"Q_BLOCK_N": 16}, H200, "Q_BLOCK_N 16 is too narrow for the products of sm_90"),
        ({"KV_BLOCK_N": 128}, H200, "a thread of KV holds 384 values of sums and scores"),
        ({"KV_STAGES": 1}, H200, "one stage of KV overlaps no load, and two fit"),
    ],
)
def test_a_refusal_names_the_knob_and_the_limit(
    changed: dict[str, int | str], gpu: Gpu, expected: str
) -> None:
    tile: dict[str, int | str] = {"KV_BLOCK_M": 64, "KV_BLOCK_N": 64, "KV_WARPS": 4}
    tile |= {"KV_STAGES": 2, "Q_BLOCK_M": 64, "Q_BLOCK_N": 64, "Q_WARPS": 4, "Q_STAGES": 2}
    knobs = {**tile, "LOAD": "pointer", **changed}
    (config,) = (each for each in GRID if each.as_dict() == knobs)
    assert expected in str(FAMILY.refusal(problem(), config, gpu))


def test_a_tile_that_is_half_empty_is_refused_where_a_smaller_one_holds_the_tokens() -> None:
    short = problem(seqlen_q=64, seqlen_k=64, head_dim=64)
    tiles = ("KV_BLOCK_M", "KV_BLOCK_N", "Q_BLOCK_M", "Q_BLOCK_N")
    for config, reason in space(FAMILY, short, H200):
        if any(config[name] == 128 for name in tiles) and config != FAMILY.default(short, H200):
            assert reason


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"op": "prefill"}, "serves backward, not prefill"),
        ({"page_size": 16}, "keys in pages are not served"),
        ({"lengths": "ragged"}, "sequences of different lengths must be packed, in layout thd"),
        ({"head_dim_v": 20}, "head_dim_v 20 is not a multiple of 8 from 16 to 256"),
        ({"head_dim_v": 264}, "head_dim_v 264 is not a multiple of 8 from 16 to 256"),
        ({"out_dtype": "fp32"}, "kv_dtype bf16 and out_dtype fp32 are not both dtype bf16"),
    ],
)
def test_what_the_family_does_not_serve_is_said(changed: dict[str, Any], expected: str) -> None:
    assert FAMILY.unsupported(problem(**changed), H200) == expected


@pytest.mark.parametrize("family", [FAMILY, SINGLE], ids=lambda family: family.name)
def test_every_modifier_and_packed_sequences_have_candidates_beside_the_default(family) -> None:
    for changed in (
        {"window_left": 99, "softcap": True, "bias": True, "sinks": True},
        {"layout": "thd", "lengths": "ragged", "batch": 8, "alibi": True},
        {"dropout": True},
    ):
        p = problem(**changed)
        assert family.unsupported(p, H200) is None
        assert sum(reason is None for _, reason in space(family, p, H200)) > 2


@pytest.mark.parametrize("widths", [(192, 128), (64, 96), (40, 256)], ids=str)
@pytest.mark.parametrize("family", [FAMILY, SINGLE], ids=lambda family: family.name)
def test_values_of_another_width_have_candidates_beside_the_default(family, widths) -> None:
    p = problem(head_dim=widths[0], head_dim_v=widths[1])
    for gpu in (H200, A10, MI300X):
        assert family.refusal(p, family.default(p, gpu), gpu) is None
    candidates = [config for config, reason in space(family, p, H200) if reason is None]
    assert 3 <= len(candidates) <= 200
    assert {config["LOAD"] for config in candidates} == {"pointer", "descriptor"}


def test_shared_memory_and_registers_are_those_of_both_widths() -> None:
    """Between those of keys as narrow as the values and of values as wide as the keys."""
    knobs = FAMILY.default(problem(head_dim=256), H200).as_dict()
    narrow, both, other, wide = (
        problem(head_dim=head_dim, head_dim_v=head_dim_v)
        for head_dim, head_dim_v in ((128, 128), (256, 128), (128, 256), (256, 256))
    )
    for part in ("dk and dv", "dq"):
        least, mean, swapped, most = (
            backward_smem_bytes(p, knobs, H200)[part] for p in (narrow, both, other, wide)
        )
        assert least < mean == swapped < most and 2 * mean == least + most
    # 64 rows of 256 and of 128 channels are a third more than those of 128 and 128
    told = "a thread of KV holds {} values of sums and scores, more than 192"
    four = {**knobs, "KV_WARPS": 4, "KV_STAGES": 1}
    refused = {p: str(FAMILY.refusal(p, Config.of("backward", four), H200)) for p in (both, other)}
    assert refused == dict.fromkeys((both, other), told.format(64 * (256 + 128 + 2 * 64) // 128))


def test_a_single_pass_does_not_serve_where_bits_must_repeat() -> None:
    same_bits = problem(deterministic=True)
    assert FAMILY.unsupported(same_bits, H200) is None and FAMILY.repeats and not SINGLE.repeats
    told = SINGLE.unsupported(same_bits, H200)
    assert told == "dq is added up in an order that no two runs share"


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_single_pass_has_candidates_of_both_loads_on_the_h200(head_dim: int) -> None:
    judged = list(space(SINGLE, problem(head_dim=head_dim), H200))
    candidates = [config for config, reason in judged if reason is None]
    assert 3 <= len(candidates) <= 30
    assert {config["LOAD"] for config in candidates} == {"pointer", "descriptor"}
    assert all(reason is None or len(reason.split()) >= 4 for _, reason in judged)


def test_a_backward_is_told_as_its_prefill_is() -> None:
    told = title(problem(layout="bhsd"))
    assert told == "backward bf16 causal, batch 1, heads 32/8, head_dim 128, 4096 keys, bhsd"
    assert title(problem(layout="bhsd", deterministic=True)) == f"{told}, deterministic"
