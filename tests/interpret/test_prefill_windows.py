"""Sliding windows of the portable prefill family in the interpreter: edges, skipping, no key."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from running import run

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

LOADS = ("pointer", "descriptor")
# Widths at both sides of a tile's edge, and wider than every sequence here.
WIDTHS = (0, 1, 31, 32, 63, 64, 65, 500)
# Windows that are bounded on one side, on both, alike or not.
WINDOWS = [(left, -1) for left in WIDTHS] + [(-1, right) for right in WIDTHS[1:]]
WINDOWS += [(0, 1), (1, 63), (63, 64), (64, 65), (65, 0), (31, 500), (500, 1)]

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def config(**changed: int | str) -> Config:
    knobs: dict[str, int | str] = {"BLOCK_M": 64, "BLOCK_N": 32, "LOAD": "pointer"}
    knobs |= {"HEAD_GROUP_MIB": 4, "num_warps": 4, "num_stages": 2}
    return Config.of("prefill", knobs | changed)


def problem(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], **changed: int | str | bool
) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 16, "causal": False, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    fields |= dict(zip(("window_left", "window_right"), window, strict=True))
    return Problem("prefill", **(fields | changed))


def assert_right(inputs: Inputs, chosen: Config) -> None:
    verdict = Budget(inputs).judge(*run(inputs, chosen))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


def window_of(p: Problem) -> tuple[torch.Tensor, torch.Tensor]:
    """The first key that each query sees and the first behind it that it does not."""
    position = torch.arange(p.seqlen_q) + p.seqlen_k - p.seqlen_q
    left, right = p.window
    first = position - left if left >= 0 else torch.zeros_like(position)
    end = position + right + 1 if right >= 0 else torch.full_like(position, p.seqlen_k)
    return first.clamp(0, p.seqlen_k), end.clamp(0, p.seqlen_k)


@pytest.mark.parametrize("lengths", [(70, 70), (40, 130), (130, 40), (1, 129), (64, 64)], ids=str)
@pytest.mark.parametrize("window", WINDOWS, ids=str)
def test_both_edges_of_a_window_are_inclusive_and_bottom_right_aligned(  # case B22, case B42
    window: tuple[int, int], lengths: tuple[int, int]
) -> None:
    """K = 0 gives every visible key the same weight: lse is the log of their number.

    With v = [1, j] the sum over visible j pins where they lie.
    """
    p = problem(*lengths, window, dtype="fp32")
    inputs = make_inputs(p)
    v = torch.zeros_like(inputs.v)
    v[..., 0], v[..., 1] = 1.0, torch.arange(p.seqlen_k)[None, :, None]
    out, lse = run(replace(inputs, k=torch.zeros_like(inputs.k), v=v), config())
    assert lse is not None
    first, end = window_of(p)
    visible = (end - first).float()
    assert torch.equal(lse.exp().round(), visible.expand_as(lse))
    assert torch.equal(out[..., 0].round(), (visible > 0).float()[None, :, None].expand(1, -1, 2))
    twice_the_mean = torch.where(visible > 0, first + end - 1, 0).float()[None, :, None]
    assert torch.equal((2 * out[..., 1]).round(), twice_the_mean.expand(1, -1, 2))


@pytest.mark.parametrize("window", [(0, 0), (1, -1), (63, 0), (64, 1), (65, 63), (-1, 64)], ids=str)
@pytest.mark.parametrize("lengths", [(129, 129), (65, 200), (200, 65)], ids=str)
def test_windows_are_right_however_tiles_are_loaded(
    window: tuple[int, int], lengths: tuple[int, int]
) -> None:
    inputs = make_inputs(problem(*lengths, window))
    for kind in LOADS:
        assert_right(inputs, config(LOAD=kind, BLOCK_M=32))


@pytest.mark.parametrize("tile", [(16, 16), (16, 64), (64, 16), (32, 32), (128, 64)], ids=str)
@pytest.mark.parametrize("window", [(15, 0), (16, 17), (100, 3)], ids=str)
def test_windows_narrower_and_wider_than_a_tile_are_right(  # case B22
    window: tuple[int, int], tile: tuple[int, int]
) -> None:
    block_m, block_n = tile
    assert_right(make_inputs(problem(130, 150, window)), config(BLOCK_M=block_m, BLOCK_N=block_n))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("heads", [(14, 2), (3, 1)], ids=str)
def test_windows_are_right_for_grouped_heads_in_either_layout(
    heads: tuple[int, int], layout: str
) -> None:
    num_heads, num_kv_heads = heads
    p = problem(70, 90, (20, 0), layout=layout, batch=2, num_heads=num_heads)
    assert_right(make_inputs(replace(p, num_kv_heads=num_kv_heads)), config())


@pytest.mark.parametrize("head_dim", [40, 96])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_windows_are_right_for_other_types_and_channels(dtype: str, head_dim: int) -> None:
    p = problem(70, 90, (33, 5), dtype=dtype, head_dim=head_dim)
    assert_right(make_inputs(p, wide_rows=8), config())


def test_a_causal_window_is_the_window_that_ends_at_the_query() -> None:  # case B42
    causal = problem(70, 100, (20, -1), causal=True)
    assert causal == problem(70, 100, (20, 0)) == problem(70, 100, (20, 7), causal=True)
    whole = make_inputs(problem(70, 100, (-1, -1), causal=True))
    wide = make_inputs(problem(70, 100, (500, 0)))
    verdict = Budget(whole).judge(*run(wide, config()))
    assert verdict.correct, verdict.reason


def test_rows_whose_window_has_no_key_are_zero_and_their_lse_minus_infinity() -> None:
    p = problem(130, 3, (1, 4), num_heads=4)
    inputs = make_inputs(p)
    for kind in LOADS:
        out, lse = run(inputs, config(LOAD=kind))
        first, end = window_of(p)
        empty = first >= end
        assert empty.sum() == 123
        assert lse is not None and torch.equal(lse[0, 0] == float("-inf"), empty)
        assert (out[:, empty] == 0).all() and out.isfinite().all()
        assert_right(inputs, config(LOAD=kind))


@pytest.mark.parametrize("window", [(5, 2), (-1, 3), (3, -1)], ids=str)
def test_no_keys_at_all_give_zero_and_minus_infinity(window: tuple[int, int]) -> None:
    out, lse = run(make_inputs(problem(17, 0, window)), config())
    assert lse is not None
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("lengths", [(64, 500), (20, 300)], ids=str)
@pytest.mark.parametrize("left", [0, 10, 63, 64, 200])
def test_keys_before_every_window_may_hold_anything(
    left: int, lengths: tuple[int, int], kind: str
) -> None:
    inputs = make_inputs(problem(*lengths, (left, 0)))
    first, _ = window_of(inputs.problem)
    k, v = inputs.k.clone(), inputs.v.clone()
    k[:, : int(first[0])] = v[:, : int(first[0])] = float("nan")
    out, lse = run(inputs, config(LOAD=kind))
    again, lse_again = run(replace(inputs, k=k, v=v), config(LOAD=kind))
    assert lse is not None and lse_again is not None
    assert torch.equal(out, again) and torch.equal(lse, lse_again)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("window", [(40, 0), (40, 70), (-1, 33), (70, -1)], ids=str)
def test_tiles_outside_a_window_are_skipped_and_not_masked(
    window: tuple[int, int], kind: str
) -> None:
    """A NaN in v reaches every row whose program multiplies it, seen or not."""
    block_m, block_n = 32, 32
    inputs = make_inputs(problem(200, 260, window))
    out, lse = run(inputs, config(LOAD=kind, BLOCK_M=block_m, BLOCK_N=block_n))
    first, end = window_of(inputs.problem)
    for start in range(0, 200, block_m):
        rows = slice(start, start + block_m)
        begin = int(first[rows].min())
        # the last step may reach past the window, over less than a tile
        last = begin + -(-(int(end[rows].max()) - begin) // block_n) * block_n
        k, v = inputs.k.clone(), inputs.v.clone()
        for poisoned in (k, v):
            poisoned[:, :begin] = poisoned[:, last:] = float("nan")
        spoilt = replace(inputs, k=k, v=v)
        again, lse_again = run(spoilt, config(LOAD=kind, BLOCK_M=block_m, BLOCK_N=block_n))
        assert lse is not None and lse_again is not None
        assert torch.equal(again[:, rows], out[:, rows])
        assert torch.equal(lse_again[..., rows], lse[..., rows])
