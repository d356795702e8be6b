"""prefill_hopper without a GPU: its text on numpy, right for every mask, schedule, ring and rise of
a row's maximum.

The emulator runs producer and consumers as threads that meet at the kernel's own barriers.
"""

from dataclasses import dataclass

import pytest
import torch
from gluon_emulator import Machine, Whole

from autoflash.accuracy import Budget
from autoflash.families.prefill_hopper import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import new_outputs
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.modifiers import modifiers_of, prefill_plan

NAN = float("nan")
SMS = 2  # so few that every program has several tiles


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    fill = NAN if dtype.is_floating_point else 2**30
    return torch.full(shape, fill, dtype=dtype)


@dataclass(frozen=True)
class Emulated:
    """What a plan gave: `reason` is why it is wrong, empty where it is right."""

    out: torch.Tensor
    reason: str
    kernels: list[str]
    jumps: set[bool]  # whether warps went past the rescaling of their sums


def emulate(
    inputs: Inputs,
    knobs: dict,
    with_lse: bool = True,
    break_text: tuple[str, str] | None = None,
    patience_s: float = 60.0,
) -> Emulated:
    problem = inputs.problem
    text = render(FAMILY.variant(problem)).text
    if break_text:
        broken = text.replace(*break_text)
        if broken == text:
            raise LookupError(f"the text does not hold {break_text[0]!r}")
        text = broken
    machine = Machine(patience_s)
    module = machine.module(text)
    out, lse = new_outputs(inputs)
    lse = lse if with_lse else None
    scale, layout = problem.head_dim**-0.5, problem.layout
    arguments = (inputs.q, inputs.k, inputs.v, out, lse, scale, layout, SMS, knobs, poisoned)
    modifiers = modifiers_of(problem, inputs.modifiers)
    plan = prefill_plan(module, problem, modifiers, *arguments)
    machine.launch(plan)
    reason = Budget(inputs).judge(out, lse).reason
    return Emulated(out, reason, [kernel.__name__ for kernel, *_ in plan], machine.jumps)


def knobs_of(**knobs) -> dict:
    usual = {
        "WARPGROUPS": 2,
        "BLOCK_N": 128,
        "num_stages": 2,
        "SCHEDULE": "static",
        "PAIR": 0,
        "Q_BUFFERS": 2,
        "EPILOGUE": "tma",
        "Q_IN_REGISTERS": 1,
        "PING_PONG": 0,
        "SPLIT_WAIT": 1,
        "HEAD_GROUP_MIB": 4,
    }
    assert set(knobs) <= set(usual) == {knob.name for knob in FAMILY.knobs}
    return {**usual, **knobs}


WIDE = {"WARPGROUPS": 3, "num_stages": 3, "Q_IN_REGISTERS": 0, "PING_PONG": 1}
NARROW = {"BLOCK_N": 64, "Q_IN_REGISTERS": 0, "Q_BUFFERS": 1}
WAYS = {
    "paired": knobs_of(PAIR=1, PING_PONG=1),
    "counter": knobs_of(SCHEDULE="late"),
    "direct": knobs_of(SCHEDULE="early", Q_BUFFERS=1, EPILOGUE="direct"),
    "wide": knobs_of(**WIDE, SCHEDULE="late", SPLIT_WAIT=0),
    "wide_split": knobs_of(**WIDE, SCHEDULE="early"),
    "narrow": knobs_of(**NARROW, EPILOGUE="direct", PAIR=1),
    "one_buffer": knobs_of(**NARROW),
    "one_warpgroup": knobs_of(WARPGROUPS=1, BLOCK_N=64, SCHEDULE="late"),
}


def of(seqlen_q: int, seqlen_k: int, causal: bool, **changes) -> Problem:
    fields = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "layout": "bshd"}
    fields |= changes
    return Problem(
        op="prefill",
        dtype="fp16",
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        causal=causal,
        **fields,
    )


def drawn(problem: Problem, factor: float) -> Inputs:
    """Random inputs, whose scores are `factor` times as large as usual."""
    inputs = make_inputs(problem)
    inputs.q.mul_(factor)
    return inputs


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "factor"), [(385, 385, 1.0), (200, 333, 4.0), (150, 90, 12.0)]
)
def test_every_way_is_right_at_lengths_that_fit_no_tile_for_scores_of_any_spread(
    way, seqlen_q, seqlen_k, factor, causal
):
    knobs = WAYS[way] if causal else {**WAYS[way], "PAIR": 0}
    assert emulate(drawn(of(seqlen_q, seqlen_k, causal), factor), knobs).reason == ""


# The diagonal at every place within a block, rows without a key, keys that end with a block.
@pytest.mark.parametrize("way", ["counter", "wide", "narrow"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (64, 65), (65, 64), (128, 192), (192, 128), (256, 256), (130, 3), (1, 300), (300, 1)],
)
def test_the_diagonal_is_right_wherever_it_meets_a_block(way, seqlen_q, seqlen_k):
    assert emulate(make_inputs(of(seqlen_q, seqlen_k, True)), WAYS[way]).reason == ""


def test_no_key_at_all_gives_zeros_and_minus_infinity():
    for with_lse in (True, False):
        done = emulate(make_inputs(of(100, 0, False)), WAYS["counter"], with_lse=with_lse)
        assert (done.reason, done.kernels) == ("", ["no_keys_kernel"])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("head_dim", [40, 96])
def test_channels_past_head_dim_and_heads_of_any_ratio(layout, head_dim):  # case B23, case B40
    problem = of(
        66, 100, True, batch=2, num_heads=7, num_kv_heads=1, head_dim=head_dim, layout=layout
    )
    for way in ("counter", "direct"):
        assert emulate(make_inputs(problem), WAYS[way]).reason == ""


# Rows wider by 8 elements are named by a descriptor as they are, NaN neighbours and all.
@pytest.mark.parametrize(("wide_rows", "copies"), [(8, 0), (1, 3)])
def test_strides_that_no_descriptor_can_name_are_copied(wide_rows, copies):  # case B49
    inputs = make_inputs(of(130, 200, False), wide_rows=wide_rows)
    done = emulate(inputs, WAYS["paired"] | {"PAIR": 0})
    assert done.reason == ""
    assert done.kernels == ["copy_rows_kernel"] * copies + ["prefill_hopper_kernel"]


def test_the_counter_is_zeroed_by_the_same_plan():
    done = emulate(make_inputs(of(64, 64, True)), WAYS["counter"])
    assert done.kernels == ["zero_counter_kernel", "prefill_hopper_kernel"]


@pytest.mark.parametrize(("causal", "pair"), [(True, 0), (True, 1), (False, 0)])
@pytest.mark.parametrize(("heads", "heads_per_group"), [(1, 1), (6, 2), (7, 3), (5, 8), (12, 4)])
def test_the_units_are_every_tile_of_every_head_once(heads, heads_per_group, pair, causal):
    module = Machine().module(render(FAMILY.variant(of(8, 8, causal))).text)
    grouped, tiles, warpgroups = min(heads, heads_per_group), 4, 2
    units_per_head = tiles // 2 if pair else tiles
    seqlen = tiles * 64 * warpgroups
    numbers = (seqlen, seqlen, 0, heads, 1, heads, grouped, tiles, units_per_head)
    work = module.Work(
        *map(Whole, (*numbers, grouped * units_per_head, heads * units_per_head)), 1, False, True
    )
    config = module.Config(64, 128, warpgroups, "static", pair, "tma", 1, 0, 1)
    walked = [
        module.tile_of_unit(work, config, Whole(unit), half)
        for unit in range(work.units)
        for half in range(1 + pair)
    ]
    every = [(head, 128 * tile) for head in range(heads) for tile in range(tiles)]
    assert sorted((head, start) for head, start, _ in walked) == every
    assert all(blocks == (start // 128 + 1 if causal else tiles) for _, start, blocks in walked)
    if pair:  # the long one and the short one of a pair are as long as any other two
        assert {walked[i][2] + walked[i + 1][2] for i in range(0, len(walked), 2)} == {tiles + 1}


def rising(problem: Problem, steps: list[float]) -> Inputs:
    """Every key of a block of 64 has one score, in base 2 `steps` above the block walked before."""
    inputs = make_inputs(problem)
    blocks = len(steps)
    heights = torch.tensor(steps).cumsum(0) / 1.4426950408889634 * problem.head_dim**0.5
    inputs.q.zero_()
    inputs.k.zero_()
    inputs.q[..., 0] = 1.0
    for j in range(blocks):  # the last block is walked first
        inputs.k[:, 64 * (blocks - 1 - j) : 64 * (blocks - j), :, 0] = heights[j].to(inputs.k.dtype)
    return inputs


@pytest.mark.parametrize(
    ("steps", "jumps"),
    [
        ([0.0, 7.0, -3.0, 3.0], {True}),
        ([0.0, 9.0, 20.0, 100.0], {False}),
        ([-900.0, 7.0, 7.0, 7.0], {True, False}),
        ([50.0, -300.0, 200.0, 90.0], {True}),
        ([0.0, -40.0, 49.0, 0.0], {True, False}),
    ],
    ids=str,
)
def test_sums_are_rescaled_where_a_maximum_is_exceeded_by_more_than_8_alone(steps, jumps):
    inputs = rising(of(64, 256, False), steps)
    done = emulate(inputs, WAYS["one_buffer"])
    assert (done.reason, done.jumps) == ("", jumps)


def test_a_row_is_rescaled_by_its_own_maximum_alone():
    """Neighbours whose maxima rise send a warp the long way, and leave no trace in a row's bits."""
    alone, beside = (make_inputs(of(64, 256, False, num_heads=1)) for _ in range(2))
    beside.q[:, 1::2].mul_(40.0)
    kept, raised = (emulate(inputs, WAYS["one_buffer"]) for inputs in (alone, beside))
    assert (kept.jumps, raised.jumps) == ({True}, {False})
    assert torch.equal(kept.out[:, ::2], raised.out[:, ::2])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logits_of_any_size_and_rows_without_a_key(sign):  # case B06, case B38
    inputs = make_inputs(of(200, 130, True))
    inputs.k.zero_()
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * 544.0
    for way in ("counter", "narrow"):
        assert emulate(inputs, WAYS[way]).reason == ""


# A check that cannot fail is none: each of these faults shows.
FAULTS = {
    "keys are released before they are multiplied": (
        "        acc_async = warpgroup_mma(left, v_tile, acc, is_async=True)\n"
        "        pass_turn(config, step, W)\n",
        "        acc_async = warpgroup_mma(left, v_tile, acc, is_async=True)\n"
        "        rings.k.release(step)\n"
        "        pass_turn(config, step, W)\n",
    ),
    "out is stored from a slot that was given back": (
        "        tma.store_wait(0)\n        mbarrier.arrive(rings.q.empty",
        "        mbarrier.arrive(rings.q.empty",
    ),
    "the second masked block is forgotten": ("if j == 1:", "if j == 0:"),
    "a row that sees no key of the first block has no maximum": (
        "row_max = gl.maximum(row_max, -3.0e38)",
        "row_max = row_max",
    ),
    "blocks past the diagonal are not skipped": (
        "step = skip_blocks(config, rings, step, blocks - own_blocks, W)",
        "step = step",
    ),
    "the counter is not zeroed": ("gl.store(counter, 0)", "counter"),
    "sums of channels are not rescaled": ("acc = rescaled(acc, alpha, raised)", "acc = acc"),
    "sums of exponentials are not rescaled": ("l_i * alpha + own_sum", "l_i + own_sum"),
    "a lane takes its own maximum for its row's": (
        "shfl.sync.bfly.b32 x, a, 1, 31",
        "shfl.sync.bfly.b32 x, a, 0, 31",
    ),
    "the second row keeps its maximum": ("selp.f32 b, b, $1, second", "selp.f32 b, $1, $1, second"),
    "a row that keeps its maximum has another factor than 1": (
        "mov.f32 $3, 1.0",
        "mov.f32 $3, 2.0",
    ),
    "the lanes' sums are not added up": ("gl.sum(l_i, 1)", "gl.max(l_i, 1)"),
    "the new maximum is not kept": ("mov.f32 $0, a;", ""),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_text_shows(fault):
    inputs, knobs = drawn(of(385, 333, True), 12.0), knobs_of(BLOCK_N=64, SCHEDULE="late")
    try:
        done = emulate(inputs, knobs, break_text=FAULTS[fault], patience_s=2.0)
    except (AssertionError, RuntimeError):
        return  # a deadlock, or a barrier that too many arrive at
    assert done.reason != ""
