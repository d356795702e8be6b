"""Windows, softcap and sinks of prefill_hopper without a GPU: its text on numpy, its ranges of key
blocks against every key that a window shows, its tanh against that of fp64.
"""

from dataclasses import replace
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from gluon_emulator import Machine, Whole, array
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefill_hopper_emulated import WAYS, drawn, emulate, of

from autoflash.families.prefill_hopper import FAMILY
from autoflash.inputs import make_inputs
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.hopper_validity import HOPPER_TILE_OVERHEAD, hopper_tile_costs

# Of one and of two warpgroups: three have no registers for the edges of a window.
WINDOW_WAYS = {
    "taking_turns": {**WAYS["paired"], "PAIR": 0},
    "one_wait": {**WAYS["counter"], "PING_PONG": 1, "SPLIT_WAIT": 0},
    **{name: WAYS[name] for name in ("direct", "one_buffer", "one_warpgroup")},
}
ROWS_OF_A_WARPGROUP = 64


def windowed(seqlen_q: int, seqlen_k: int, sides: tuple[int, int], **changes) -> Problem:
    left, right = sides
    return of(seqlen_q, seqlen_k, right == 0, window_left=left, window_right=right, **changes)


# Where an edge lies in a block, rows without a key, blocks that one warpgroup sees and not another.
@pytest.mark.parametrize("way", WINDOW_WAYS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "sides"),
    [
        (385, 385, (0, 0)),
        (385, 385, (64, 0)),
        (385, 385, (127, 0)),
        (300, 333, (65, 0)),
        (200, 333, (128, 63)),
        (129, 200, (-1, 1)),
        (129, 385, (1, -1)),
        (300, 77, (70, 5)),
        (130, 3, (-1, 64)),
        (1, 300, (129, 0)),
    ],
)
def test_windows_are_right_in_every_way_wherever_their_edges_lie(  # case B22, case B42
    way, seqlen_q, seqlen_k, sides
):
    inputs = drawn(windowed(seqlen_q, seqlen_k, sides), 4.0)
    assert emulate(inputs, WINDOW_WAYS[way]).reason == ""


@pytest.mark.parametrize(
    ("way", "sides"),
    [("wide", (-1, 0)), ("direct", (-1, 0)), ("wide_split", (-1, -1)), ("one_buffer", (70, 0))],
)
def test_softcap_and_sinks_are_right_beside_every_mask(way, sides):  # case B29, case B44
    for seqlen_q, seqlen_k in ((150, 260), (200, 77)):
        problem = windowed(seqlen_q, seqlen_k, sides, num_heads=1, softcap=True, sinks=True)
        assert emulate(drawn(problem, 4.0), WAYS[way]).reason == ""


def test_rows_and_calls_without_a_key_have_the_sink_as_lse():
    for seqlen_k in (3, 0):
        problem = of(100, seqlen_k, True, sinks=True)
        done = emulate(make_inputs(problem), WAYS["counter"])
        assert done.reason == ""
    assert done.kernels == ["no_keys_kernel"]


@pytest.mark.parametrize("sink", [-90.0, 0.0, 90.0])
def test_sinks_of_any_size_change_the_denominator_alone(sink):  # case B29
    for problem in (of(100, 130, True, sinks=True), windowed(100, 40, (9, 0), sinks=True)):
        inputs = make_inputs(problem)
        inputs.sinks.fill_(sink)
        assert emulate(inputs, WAYS["counter"]).reason == ""


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("factor", [1.0, 12.0, 300.0])
def test_scores_near_a_softcap_and_far_beyond_are_right(softcap, factor):  # case B44
    inputs = replace(drawn(of(100, 130, True, softcap=True), factor), softcap=softcap)
    assert emulate(inputs, WAYS["one_buffer"]).reason == ""


def test_a_rows_bits_do_not_depend_on_whether_its_neighbours_are_near_their_softcap():
    alone, beside = (make_inputs(of(64, 256, False, num_heads=1, softcap=True)) for _ in range(2))
    for inputs in (alone, beside):
        inputs.q.mul_(0.1)
    beside.q[:, 1::2].mul_(400.0)
    near, far = (emulate(inputs, WAYS["one_buffer"]) for inputs in (alone, beside))
    assert torch.equal(near.out[:, ::2], far.out[:, ::2])
    assert not torch.equal(near.out[:, 1::2], far.out[:, 1::2])


def test_blocks_that_no_row_of_a_tile_sees_are_not_read():
    problem = windowed(128, 512, (127, 0))  # its queries are the last, and see 255 keys
    inputs = make_inputs(problem)
    for way in (WAYS["counter"], WAYS["one_warpgroup"]):
        before = emulate(inputs, way).out
        k, v = inputs.k.clone(), inputs.v.clone()
        k[:, :256] = v[:, :256] = float("nan")
        assert torch.equal(before, emulate(replace(inputs, k=k, v=v), way).out)


@pytest.fixture(scope="module")
def window_text() -> ModuleType:
    """The rendered text of windows, for its functions of numbers."""
    return Machine().module(render(FAMILY.variant(windowed(8, 8, (1, 1)))).text)


def ranges(text: ModuleType, problem: Problem, start_m: int, block_n: int, rows: int):
    """What key_blocks and seen_by_all say of the rows from `start_m` on."""
    q = torch.empty(1, problem.seqlen_q, 1, 64, device="meta")
    k = torch.empty(1, problem.seqlen_k, 1, 64, device="meta")
    low, high = text.bounded(problem.window, q, k, "bshd")
    numbers = {"seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "low": low, "high": high}
    work = SimpleNamespace(**{name: Whole(number) for name, number in numbers.items()})
    config = SimpleNamespace(BLOCK_N=block_n)
    first, blocks = text.key_blocks(work, config, Whole(start_m), rows)
    return first, blocks, *text.seen_by_all(work, Whole(start_m))


def seen_keys(problem: Problem, rows: range) -> np.ndarray:
    """(rows, keys): what each row sees, by the definition."""
    left, right = (side if side >= 0 else 10**6 for side in problem.window)
    after = np.arange(problem.seqlen_k) - (
        np.array(rows)[:, None] + problem.seqlen_k - problem.seqlen_q
    )
    return (-left <= after) & (after <= right)


@given(
    seqlen_q=st.integers(1, 400),
    seqlen_k=st.integers(1, 400),
    left=st.integers(-1, 300),
    right=st.integers(-1, 300),
    block_n=st.sampled_from([64, 128]),
    warpgroups=st.integers(1, 2),
    draw=st.data(),
)
@settings(max_examples=300, deadline=None)
def test_the_blocks_walked_are_those_with_a_visible_key_and_those_not_masked_are_seen_whole(
    window_text, seqlen_q, seqlen_k, left, right, block_n, warpgroups, draw
):
    problem = windowed(seqlen_q, seqlen_k, (left, right))
    block_m = ROWS_OF_A_WARPGROUP * warpgroups
    tile = draw.draw(st.integers(0, (seqlen_q - 1) // block_m))
    tile_first, tile_blocks, *_ = ranges(
        window_text, problem, tile * block_m, block_n, ROWS_OF_A_WARPGROUP * warpgroups
    )
    cost = hopper_tile_costs(seqlen_q, seqlen_k, problem.window, block_m, block_n)[tile]
    assert cost == tile_blocks + HOPPER_TILE_OVERHEAD
    for w in range(warpgroups):
        start = tile * block_m + w * ROWS_OF_A_WARPGROUP
        if start >= seqlen_q:
            continue  # it skips all of the tile's blocks
        first, blocks, seen_from, seen_to = ranges(
            window_text, problem, start, block_n, ROWS_OF_A_WARPGROUP
        )
        # what it skips before and after its own makes up the tile's
        assert tile_first <= first and first + blocks <= tile_first + tile_blocks and blocks >= 1
        seen = seen_keys(problem, range(start, min(start + ROWS_OF_A_WARPGROUP, seqlen_q)))
        some = {key // block_n for key in np.flatnonzero(seen.any(0)).tolist()}
        walked = set(range(first, first + blocks))
        assert walked == some or (not some and blocks == 1)
        for block in walked:
            start_n, end_n = block * block_n, (block + 1) * block_n
            masked = start_n < seen_from or end_n > seen_to
            whole = end_n <= seqlen_k and bool(seen[:, start_n:end_n].all())
            assert masked == (not whole)


@pytest.fixture(scope="module")
def softcap_text() -> ModuleType:
    return Machine().module(render(FAMILY.variant(of(8, 8, False, softcap=True))).text)


@pytest.mark.parametrize(
    ("least", "most", "units"),
    [(2.0**-40, 0.8, 3), (0.81, 7.9, 8), (7.9, 1e3, 8)],
    ids=["near", "far", "beyond"],
)
def test_tanh_is_within_a_few_units_in_the_last_place(softcap_text, least, most, units):
    x = np.geomspace(least, most, 64 * 128 // 2, dtype=np.float32)
    x = np.concatenate([x, -x]).reshape(64, 128)
    given = softcap_text.soft_capped(array(x * np.float32(8)), 0.125)
    error = np.abs(given.astype(np.float64) / np.tanh(x.astype(np.float64)) - 1)
    assert error.max() <= units * 2.0**-23


def test_a_score_that_is_no_number_stays_none(softcap_text):
    for other in (0.1, 5.0):
        x = np.full((64, 128), other, np.float32)
        x[3, 5] = np.nan
        given = softcap_text.soft_capped(array(x), 1.0)
        assert np.isnan(given[3, 5]) and np.isfinite(given).sum() == x.size - 1


# A check that cannot fail is none: each of these faults shows.
FAULTS = {
    "the first blocks of a tile are not skipped": (
        "blocks - before - own_blocks, W)",
        "0, W)",
    ),
    "the last blocks of a tile are not skipped": ("rings, step, before, W)", "rings, step, 0, W)"),
    "the left edge is not masked": ("(start_n < seen_from) | ", ""),
    "the right edge is not masked": (" | (start_n + BLOCK_N > seen_to)", ""),
    "a window begins a key late": ("first[:, None] <= offs_n", "first[:, None] < offs_n"),
    "a window ends a key early": ("offs_n[None, :] <= last", "offs_n[None, :] < last"),
    "the first block of keys is left out": ("return first, (end", "return first + 1, (end"),
    "sums are not those of the sink's maximum": ("l_i * kept + gl", "l_i + gl"),
    "the sink is scaled": ("sink.to(gl.float32)", "0.125 * sink.to(gl.float32)"),
    "scores are not capped after the first block": (
        "        qk = soft_capped(qk, work.to_share)\n",
        "        qk = qk * work.to_share\n",
    ),
    "a tanh that is far takes the polynomial": (
        "own, x, 0.8",
        "own, x, 9.0",
    ),
    "a warp does not look whether a score is far": (
        "vote.sync.any.pred far, own",
        "setp.gt.f32 far, a, 99.0; not.pred own, far; mov.b32 x",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_text_shows(fault):
    problem = windowed(385, 333, (40, 90), softcap=True, sinks=True)
    inputs, knobs = drawn(problem, 4.0), {**WAYS["counter"], "BLOCK_N": 64}
    try:
        done = emulate(inputs, knobs, break_text=FAULTS[fault], patience_s=2.0)
    except (AssertionError, RuntimeError):
        return  # a deadlock, or a barrier that too many arrive at
    assert done.reason != ""
