"""prefill_hopper_lazy without a GPU: its text on numpy, inline assembly too, right wherever a
row's maximum rises, by whatever it does.
"""

import pytest
import torch
from gluon_emulator import Machine
from test_prefill_hopper_emulated import SMS, WAYS, of, poisoned

from autoflash.accuracy import Budget
from autoflash.families.prefill_hopper_lazy import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import new_outputs
from autoflash.problem import Problem
from autoflash.render import render


def emulate(
    inputs: Inputs, knobs: dict, break_text: tuple[str, str] = ("", "")
) -> tuple[torch.Tensor, torch.Tensor, set[bool]]:
    """`out`, `lse`, and whether warps went past the rescaling of their sums: {True, False}."""
    problem = inputs.problem
    text = render(FAMILY.variant(problem)).text
    assert break_text[0] in text
    machine = Machine(patience_s=20.0)
    module = machine.module(text.replace(*break_text) if break_text[0] else text)
    out, lse = new_outputs(inputs)
    scale, layout = problem.head_dim**-0.5, problem.layout
    q, k, v = inputs.q, inputs.k, inputs.v
    for kernel, grid, arguments, _ in module.plan(
        q, k, v, out, lse, scale, layout, SMS, knobs, poisoned
    ):
        machine.launch(kernel, grid, arguments)
    return out, lse, machine.jumps


def judged(inputs: Inputs, *given) -> str:
    """Why the result is wrong; empty where it is right."""
    out, lse, _ = emulate(inputs, *given)
    return Budget(inputs).judge(out, lse).reason


def drawn(problem: Problem, factor: float) -> Inputs:
    """Random inputs, whose scores are `factor` times as large as usual."""
    inputs = make_inputs(problem)
    inputs.q.mul_(factor)
    return inputs


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("way", ["paired", "direct", "wide", "narrow", "one_warpgroup"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "factor"), [(200, 333, 4.0), (150, 90, 12.0)])
def test_scores_of_any_spread_are_right(way, seqlen_q, seqlen_k, factor, causal):
    knobs = WAYS[way] if causal else {**WAYS[way], "PAIR": 0}
    assert judged(drawn(of(seqlen_q, seqlen_k, causal), factor), knobs) == ""


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
    out, lse, jumped = emulate(inputs, WAYS["one_buffer"])
    assert (Budget(inputs).judge(out, lse).reason, jumped) == ("", jumps)


def test_a_row_is_rescaled_by_its_own_maximum_alone():
    """Neighbours whose maxima rise send a warp the long way, and leave no trace in a row's bits."""
    alone, beside = (make_inputs(of(64, 256, False, num_heads=1)) for _ in range(2))
    beside.q[:, 1::2].mul_(40.0)
    (out, _, kept), (other, _, raised) = (emulate(i, WAYS["one_buffer"]) for i in (alone, beside))
    assert (kept, raised) == ({True}, {False})
    assert torch.equal(out[:, ::2], other[:, ::2])


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logits_of_any_size_and_rows_without_a_key(sign):
    problem = of(200, 130, True)
    inputs = make_inputs(problem)
    inputs.k.zero_()
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * 544.0
    for way in ("counter", "narrow"):
        assert judged(inputs, WAYS[way]) == ""


# A check that cannot fail is none: each of these faults shows.
FAULTS = {
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
    assert judged(drawn(of(100, 333, True), 12.0), WAYS["one_buffer"], FAULTS[fault]) != ""
