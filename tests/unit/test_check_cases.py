"""Cases a candidate is checked on, and single rows of the reference."""

from dataclasses import replace

import pytest
import torch

from autoflash.check import Stage, cases_of, sample_rows, small_cases_of
from autoflash.families import serving
from autoflash.gpu import known
from autoflash.inputs import make_inputs
from autoflash.problem import Problem
from autoflash.reference import eager, eager_rows, reference, reference_rows
from autoflash.roofline import visible_pairs

GPU = known("NVIDIA_H200")
PREFILL = Problem("prefill", "bf16", 2, 4, 2, 32, 40, 70)
DECODE = Problem("decode", "bf16", 3, 8, 2, 64, 1, 100, page_size=16, lengths="ragged")
PROBLEMS = [
    PREFILL,
    replace(PREFILL, layout="bhsd", causal=False),
    replace(PREFILL, window_left=20, softcap=True, alibi=True, sinks=True),
    replace(PREFILL, layout="bhsd", causal=False, window_right=9, bias=True),
    replace(PREFILL, page_size=16, kv_layout="hnd", lengths="ragged"),
    DECODE,
]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_single_rows_are_those_of_the_whole_reference(problem):
    inputs, rows = make_inputs(problem), sample_rows(problem, 0)
    for whole, single in ((reference, reference_rows), (eager, eager_rows)):
        out, lse = whole(inputs)
        out_rows, lse_rows = single(inputs, rows)
        if problem.layout == "bhsd":
            out = out.transpose(1, 2)
        for at, (b, h, i) in enumerate(rows):
            torch.testing.assert_close(out_rows[at], out[b, i, h])
            torch.testing.assert_close(lse_rows[at], lse[b, h, i])


def test_fp32_is_judged_by_sums_in_order_whatever_the_library_does():
    keys = 301
    inputs = make_inputs(Problem("prefill", "fp32", 1, 1, 1, 16, 8, keys, causal=False))
    inputs.q.zero_()  # every key weighs the same
    inputs.v.fill_(1.0)
    inputs.v[:, 0] = 2.0**24  # ones added to it one by one are lost, added first they are not
    inputs.v[:, -1] = -(2.0**24)
    assert (eager(inputs)[0] == 0.0).all()
    assert reference(inputs)[0].unique().tolist() == [(keys - 2) / keys]


@pytest.mark.parametrize("problem", PROBLEMS)
def test_sampled_rows_hold_the_first_and_the_last(problem):
    rows = sample_rows(problem, 1)
    last = (problem.batch - 1, problem.num_heads - 1, problem.seqlen_q - 1)
    assert rows[0] == (0, 0, 0) and rows[-1] == last
    assert len(rows) == len(set(rows)) <= 64
    assert rows == sample_rows(problem, 1) != sample_rows(problem, 2)


@pytest.mark.parametrize("cases", [cases_of, small_cases_of])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_cases_have_the_problems_kernels(problem, cases):
    for case in cases(problem):
        for family in serving(problem, GPU):
            assert family.variant(case.problem) == family.variant(problem)
        for name in ("dtype", "head_dim", "group_size", "page_size", "layout", "kv_layout"):
            assert getattr(case.problem, name) == getattr(problem, name)


@pytest.mark.parametrize("cases", [cases_of, small_cases_of])
def test_cases_hold_what_has_broken_kernels_elsewhere(cases):
    prefill, decode = cases(PREFILL), cases(DECODE)
    assert any(case.wide_rows for case in prefill) and any(case.wide_rows for case in decode)
    assert any(case.problem.seqlen_k % 16 for case in prefill)
    assert any(case.problem.seqlen_q > case.problem.seqlen_k for case in prefill)
    assert {0, 1, 37} < {length for case in decode for length in case.lengths or ()}


# Of prefill and of decode: with and without lse, ends of tiles, rows that see nothing, wide rows.
def test_a_first_trial_comes_after_cases_with_every_edge_and_a_final_after_the_other_kernels():
    for problem in (PREFILL, DECODE):
        first, rest = (
            [case for case in cases_of(problem) if case.stage == stage] for stage in Stage
        )
        assert {case.with_lse for case in first} == {True, False}
        assert any(case.wide_rows for case in first)
        assert all(case.with_lse for case in rest)
        assert first[0].problem == rest[0].problem and first[0].lengths == rest[0].lengths
        assert all(case.stage == Stage.SCREEN for case in small_cases_of(problem))
    first = [case.problem for case in cases_of(PREFILL) if case.stage == Stage.SCREEN]
    assert any(p.seqlen_q > p.seqlen_k for p in first) and any(p.seqlen_k % 16 for p in first)


@pytest.mark.parametrize("cases", [cases_of, small_cases_of])
def test_a_wide_window_is_narrowed_until_cases_have_keys_outside(cases):
    wide = replace(PREFILL, seqlen_q=8192, seqlen_k=8192, causal=False, window_left=4096)
    for problem in (wide, replace(wide, window_right=4096), replace(PREFILL, window_left=3)):
        sides = {(case.problem.window_left, case.problem.window_right) for case in cases(problem)}
        assert len(sides) == 1
        ((left, right),) = sides
        assert (left < 0, right < 0) == (problem.window_left < 0, problem.window_right < 0)
        assert left <= problem.window_left and right <= problem.window_right
        assert any(visible_pairs(case.problem) < every_pair(case) for case in cases(problem))


def every_pair(case):
    open_sides = {"window_left": -1, "window_right": -1}
    return visible_pairs(replace(case.problem, **open_sides))


@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(512, 512), (16384, 16384), (1000, 1000), (77, 300), (1, 4096), (4096, 130), (769, 768)],
)
def test_the_case_run_as_timed_ends_in_a_tile_where_the_problem_does(seqlen_q, seqlen_k):
    problem = replace(PREFILL, seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    timed, with_lse = cases_of(problem)[:2]
    assert not timed.with_lse and with_lse.with_lse
    small = timed.problem
    assert small == with_lse.problem
    assert max(small.seqlen_q, small.seqlen_k) < 3 * 384
    for tile in (64, 128, 192):
        assert small.seqlen_q % tile == seqlen_q % tile
        assert small.seqlen_k % tile == seqlen_k % tile
    assert (small.seqlen_q > small.seqlen_k) == (seqlen_q > seqlen_k)
