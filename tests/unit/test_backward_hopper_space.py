"""The Hopper backward's predicates and defaults: valid wherever they serve; refusals explain."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import gpu as gpus
from autoflash.config import Config, grid
from autoflash.families import backward_hopper, backward_hopper_single, serving
from autoflash.families.family import Family, space
from autoflash.problem import Problem
from autoflash.runtime.backward_hopper_validity import (
    backward_hopper_kv_smem_bytes,
    backward_hopper_q_smem_bytes,
)

H200 = gpus.known("NVIDIA_H200")
SPLIT, SINGLE = backward_hopper.FAMILY, backward_hopper_single.FAMILY
GRIDS = {family.name: set(grid(family.name, family.knobs)) for family in (SPLIT, SINGLE)}


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
    deterministic=st.booleans(),
    layout=st.sampled_from(["bshd", "bhsd"]),
)


@given(problems, st.sampled_from([SPLIT, SINGLE]))
@settings(deadline=None)
def test_the_default_is_a_candidate_for_every_problem_served(p: Problem, family: Family) -> None:
    if family.unsupported(p, H200) is None:
        default = family.default(p, H200)
        assert default in GRIDS[family.name] and family.refusal(p, default, H200) is None


@pytest.mark.parametrize("mask", [{"mask": "h > 0"}, {"masked_by": "documents", "density": 9}])
def test_masks_beyond_causal_are_the_portable_familys(mask: dict) -> None:
    for family in (SPLIT, SINGLE):
        reason = family.unsupported(problem(**mask), H200)
        assert reason is not None and "the portable family's" in reason


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_candidates_fit_and_are_few_enough_to_try_all(head_dim: int) -> None:
    p = problem(head_dim=head_dim)
    for family, most in ((SPLIT, 48), (SINGLE, 24)):
        if family.unsupported(p, H200):
            continue
        candidates = [config for config, reason in space(family, p, H200) if reason is None]
        assert 1 < len(candidates) <= most
        for config in candidates:
            knobs = config.as_dict()
            block_m, slots = int(knobs["KV_BLOCK_M"]), int(knobs.get("DS_SLOTS", 0))
            kv_slots = int(knobs.get("KV_SLOTS", 0))
            kv_bytes = backward_hopper_kv_smem_bytes(p, block_m, slots, kv_slots)
            assert kv_bytes <= H200.smem_per_block
            if family is SPLIT:
                assert backward_hopper_q_smem_bytes(p, knobs) <= H200.smem_per_block


def test_they_are_tried_beside_the_portable_families() -> None:
    names = [family.name for family in serving(problem(), H200)]
    assert names == ["backward", "backward_single", "backward_hopper", "backward_hopper_single"]
    same_bits = [family.name for family in serving(problem(deterministic=True), H200)]
    assert same_bits == ["backward", "backward_hopper"] and not SINGLE.repeats


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"dtype": "fp32"}, "round fp32"),
        ({"head_dim": 32}, "lies past head_dim 32"),
        ({"head_dim": 192, "head_dim_v": 128}, "head_dim_v 128 is not head_dim 192"),
        ({"window_left": 5}, "windows: the portable"),
        ({"softcap": True}, "softcap: the portable"),
        ({"op": "prefill"}, "serves backward"),
        ({"batch": 70_000, "seqlen_q": 2048}, "in 31 bits"),
    ],
)
def test_what_is_not_served_is_refused_by_name(changed: dict[str, Any], reason: str) -> None:
    for family in (SPLIT, SINGLE):
        refused = family.unsupported(problem(**changed), H200)
        assert refused and reason in refused
    assert SPLIT.unsupported(problem(), gpus.known("NVIDIA_A10"))


def test_a_single_pass_serves_no_wide_heads_and_no_endless_groups() -> None:
    assert "registers" in str(SINGLE.unsupported(problem(head_dim=136), H200))
    endless = problem(num_kv_heads=1, seqlen_q=2**20)
    assert "group" in str(SINGLE.unsupported(endless, H200))
    assert SPLIT.unsupported(endless, H200) is None


@pytest.mark.parametrize(
    ("family", "head_dim", "knobs", "reason"),
    [
        (SPLIT, 128, {"KV_BLOCK_M": 128}, "registers of sums and scores for dk and dv"),
        (SPLIT, 128, {"Q_BLOCK_N": 128, "Q_PREFETCH": 1}, "registers of sums and scores for dq"),
        (SPLIT, 256, {"Q_V_STAGES": 2}, "bytes of shared memory for dq"),
        (SPLIT, 256, {"KV_VOLATILE": 1}, "two roles"),
        (SPLIT, 128, {"KV_BIAS": 0}, "begin at -lse"),
        (SPLIT, 128, {"Q_V_STAGES": 1}, "overlaps no load"),
        (SINGLE, 128, {"KV_BLOCK_M": 128}, "registers of sums and scores for the pass"),
        (SINGLE, 64, {"KV_BLOCK_M": 128, "KV_BIAS": 0}, "begin at -lse"),
        (SINGLE, 128, {"DS_SLOTS": 4, "KV_SLOTS": 2}, "bytes of shared memory for the pass"),
        (SINGLE, 128, {"DS_SLOTS": 2, "KV_SLOTS": 1}, "a second slot fits"),
    ],
)
def test_a_knob_that_cannot_pay_is_refused_by_name(
    family: Family, head_dim: int, knobs: dict[str, int], reason: str
) -> None:
    p = problem(head_dim=head_dim, causal=True)
    config = Config.of(family.name, family.default(p, H200).as_dict() | knobs)
    assert reason in str(family.refusal(p, config, H200))


def test_programs_of_one_unit_are_refused_a_counter() -> None:
    few = problem(num_heads=4, num_kv_heads=4)
    knobs = SINGLE.default(few, H200).as_dict() | {"DS_SLOTS": 2, "KV_SLOTS": 2}
    counting = Config.of(SINGLE.name, knobs | {"DQ_FIRST": 0})
    assert "has one unit" in str(SINGLE.refusal(few, counting, H200))
    assert SINGLE.refusal(replace(few, batch=2), counting, H200) is None


def test_tiles_that_are_mostly_empty_are_refused() -> None:
    short = problem(head_dim=64, seqlen_q=60, seqlen_k=60)
    wide = Config.of(SINGLE.name, SINGLE.default(short, H200).as_dict() | {"KV_BLOCK_M": 128})
    other = replace(short, causal=True)
    assert "half of 128 query rows" in str(SINGLE.refusal(other, wide, H200))
