"""The prefill family's predicate and default: valid everywhere it serves, and refusals explain."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import gpu as gpus
from autoflash.config import grid
from autoflash.families.family import space
from autoflash.families.prefill import FAMILY
from autoflash.gpu import KIB, Gpu
from autoflash.problem import Problem
from autoflash.runtime.validity import prefill_refusal

H200 = gpus.known("NVIDIA_H200")
A10 = gpus.known("NVIDIA_A10")


def problem(**changed: int | str | bool) -> Problem:
    fields = {"op": "prefill", "dtype": "bf16", "batch": 1, "num_heads": 32, "num_kv_heads": 8}
    fields |= {"head_dim": 128, "seqlen_q": 4096, "seqlen_k": 4096}
    return Problem(**(fields | changed))  # pyright: ignore[reportArgumentType]


problems = st.builds(
    lambda dropout, page_size, **fields: problem(
        **fields,
        page_size=page_size,
        dropout=dropout and not page_size,
    ),
    dtype=st.sampled_from(["bf16", "fp16", "fp32"]),
    batch=st.integers(1, 100_000),
    num_heads=st.integers(1, 8).map(lambda n: 8 * n),
    num_kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.integers(2, 32).map(lambda n: 8 * n),
    seqlen_q=st.integers(1, 2**20),
    seqlen_k=st.integers(0, 2**20),
    causal=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd"]),
    window_left=st.sampled_from([-1, 0, 4096]),
    window_right=st.sampled_from([-1, 1, 4096]),
    softcap=st.booleans(),
    bias=st.booleans(),
    page_size=st.sampled_from([0, 0, 1, 16, 64, 480]),
    sinks=st.booleans(),
    dropout=st.booleans(),
)
any_gpu = st.builds(
    lambda gpu, smem_kib: replace(gpu, smem_per_block=smem_kib * KIB),
    st.sampled_from(sorted(gpus.KNOWN.values(), key=lambda gpu: gpu.name)),
    st.integers(64, 227),
)


@given(problems, any_gpu)
def test_the_default_is_valid_for_every_problem_on_every_gpu_of_64_kb_and_more(
    any_problem: Problem, gpu: Gpu
) -> None:
    assert FAMILY.unsupported(any_problem, gpu) is None
    assert FAMILY.refusal(any_problem, FAMILY.default(any_problem, gpu), gpu) is None


@given(problems, any_gpu)
@settings(max_examples=10)
def test_every_refusal_says_why_and_what_is_wrong_at_run_time_is_no_candidate(
    any_problem: Problem, gpu: Gpu
) -> None:
    for config, reason in space(FAMILY, any_problem, gpu):
        assert reason is None or len(reason.split()) >= 4
        if prefill_refusal(any_problem, config.as_dict(), gpu):
            assert reason


@given(problems, any_gpu)
def test_the_default_is_one_of_the_configs_that_the_search_may_try(
    any_problem: Problem, gpu: Gpu
) -> None:
    assert FAMILY.default(any_problem, gpu) in set(grid(FAMILY.name, FAMILY.knobs))


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_long_prompt_on_the_h200_has_a_few_dozen_candidates(head_dim: int) -> None:
    reasons = [reason for _, reason in space(FAMILY, problem(head_dim=head_dim), H200)]
    assert 30 <= reasons.count(None) <= 100


def test_the_best_known_tiles_of_the_h200_are_candidates() -> None:
    for head_dim, tile in (
        (64, {"BLOCK_M": 64, "BLOCK_N": 128, "num_stages": 2, "num_warps": 4}),
        (128, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 3, "num_warps": 8}),
        (128, {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 3, "num_warps": 4}),
        (256, {"BLOCK_M": 128, "BLOCK_N": 64, "num_stages": 2, "num_warps": 8}),
    ):
        candidates = [c for c, no in space(FAMILY, problem(head_dim=head_dim), H200) if no is None]
        kinds = {c["LOAD"] for c in candidates if tile.items() <= c.as_dict().items()}
        assert kinds == {"pointer", "descriptor"}


@pytest.mark.parametrize(
    ("changed", "gpu", "expected"),
    [
        ({"LOAD": "descriptor"}, A10, "tensor descriptors need sm_90, this is sm_86"),
        ({"BLOCK_N": 128, "num_stages": 4}, A10, "bytes of shared memory, a block of sm_86 has"),
        ({"BLOCK_M": 16}, H200, "BLOCK_M 16 starves the tensor cores"),
        ({"BLOCK_M": 64, "num_warps": 8}, H200, "8 warps have no 16 rows each in BLOCK_M 64"),
        ({"BLOCK_M": 128}, H200, "a thread holds 192 values of acc and qk, more than 160"),
        ({"BLOCK_N": 32}, H200, "BLOCK_N 32 is too narrow for the products of sm_90"),
        ({"num_stages": 1}, H200, "one stage overlaps no load, and two fit"),
    ],
)
def test_a_refusal_names_the_knob_and_the_limit(
    changed: dict[str, int | str], gpu: Gpu, expected: str
) -> None:
    tile: dict[str, int | str] = {"BLOCK_M": 64, "BLOCK_N": 64, "LOAD": "pointer"}
    tile |= {"HEAD_GROUP_MIB": 4, "num_warps": 4, "num_stages": 2}
    (config,) = (c for c in grid(FAMILY.name, FAMILY.knobs) if c.as_dict() == {**tile, **changed})
    assert expected in str(FAMILY.refusal(problem(), config, gpu))


def test_a_tile_that_is_half_empty_is_refused_where_a_smaller_one_holds_the_tokens() -> None:
    short = problem(seqlen_q=64, seqlen_k=64)
    for config, reason in space(FAMILY, short, H200):
        if config["BLOCK_M"] == 128 or config["BLOCK_N"] == 128:
            assert reason


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"op": "decode", "seqlen_q": 1}, "serves prefill, not decode"),
        (
            {"page_size": 16, "kv_dtype": "int8"},
            "kv_dtype int8 and out_dtype bf16 are not both dtype bf16",
        ),
        ({"lengths": "ragged"}, "sequences of different lengths must be packed, in layout thd"),
        ({"head_dim_v": 20}, "head_dim_v 20 is not a multiple of 8 from 16 to 256"),
        ({"kv_dtype": "fp16"}, "kv_dtype fp16 and out_dtype bf16 are not both dtype bf16"),
    ],
)
def test_what_the_family_does_not_serve_is_said(
    changed: dict[str, int | str], expected: str
) -> None:
    assert FAMILY.unsupported(problem(**changed), H200) == expected


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_a_chunk_over_pages_has_a_few_dozen_candidates(head_dim: int) -> None:
    chunk = problem(head_dim=head_dim, seqlen_q=2048, seqlen_k=16384)
    for changed in ({"page_size": 16}, {"page_size": 128}, {"page_size": 16, "layout": "thd"}):
        reasons = [no for _, no in space(FAMILY, replace(chunk, **changed), H200)]
        assert 10 <= reasons.count(None) <= 100


def test_a_descriptor_names_keys_only_where_a_tile_of_them_lies_in_one_page() -> None:
    expected = "a descriptor names keys of one page, and a tile of keys may lie in several"
    for page_size, window_left, in_one in ((16, -1, False), (64, -1, True), (64, 100, False)):
        chunk = problem(page_size=page_size, window_left=window_left)
        default = FAMILY.default(chunk, H200)
        assert default["LOAD"] == ("descriptor" if in_one else "pointer")
        plain = FAMILY.default(problem(), H200).as_dict()
        assert plain | {"LOAD": default["LOAD"]} == default.as_dict()
        described = default.as_dict() | {"LOAD": "descriptor"}
        assert prefill_refusal(chunk, described, H200) == (None if in_one else expected)


def test_a_gpu_older_than_sm_80_is_not_served() -> None:
    turing = replace(A10, arch="sm_75")
    assert FAMILY.unsupported(problem(), turing) == "sm_75 is older than sm_80"
