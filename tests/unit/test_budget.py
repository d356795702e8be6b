"""The error budget where fp32 itself ends: exponentials below its numbers, scores far from zero."""

from dataclasses import replace

import pytest
import torch

from autoflash.accuracy import LEAST_NORMAL, Budget, GradientBudget
from autoflash.gradients import eager_gradients, eager_modifier_gradients, reference_gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

FAR_BELOW_SINKS = Problem(
    "prefill", "bf16", 2, 8, 2, 16, 145, 15, causal=False, alibi=True, sinks=True
)


def test_exponentials_below_the_normal_numbers_of_fp32_may_be_zero():
    inputs = make_inputs(FAR_BELOW_SINKS)
    budget = Budget(replace(inputs, k=inputs.k * 0))
    out = budget.out.bfloat16()
    sizes = budget.out.abs().amax(dim=-1)
    below = sizes < LEAST_NORMAL
    assert below.any() and (sizes[below] > 0).all()
    out[below] = 0.0
    assert budget.judge(out, None).correct


def test_small_rows_that_fp32_can_hold_must_be_right():
    inputs = make_inputs(FAR_BELOW_SINKS)
    budget = Budget(replace(inputs, k=inputs.k * 0))
    out, sizes = budget.out.bfloat16(), budget.out.abs().amax(dim=-1)
    small = (sizes > 2**20 * LEAST_NORMAL) & (sizes < 2.0**-40)
    assert small.any()
    out[small] = 0.0
    assert not budget.judge(out, None).correct


def gradient_inputs(first_channel: float) -> Inputs:
    inputs = make_inputs(Problem("backward", "fp32", 1, 2, 1, 16, 37, 37))
    inputs.q[..., 0], inputs.k[..., 0] = first_channel, first_channel
    return inputs


def scaled(inputs: Inputs, by: float) -> bool:
    """Whether gradients of that many times their size are within budget."""
    gradients = eager_gradients(inputs)
    wrong = gradients._replace(dv=gradients.dv * by)
    return GradientBudget(inputs).judge(wrong).correct


def test_gradients_are_as_exact_as_fp32_holds_the_scores_they_come_from():
    far = gradient_inputs(512.0)  # scores near 65536, whose unit of the last place is 2**-7
    assert scaled(far, 1 + 2**-7)
    assert not scaled(far, 1 + 2**-3)


@pytest.mark.parametrize(("channel", "right"), [(0, True), (1, False)])
def test_the_channel_that_takes_scores_far_is_as_uncertain_as_its_own_terms(channel, right):
    """As dq is where k is large: its terms are, and so is what the rounding of P makes of them."""
    inputs = gradient_inputs(512.0)
    _, sizes = reference_gradients(inputs)
    dq = eager_gradients(inputs).dq.clone()
    dq[..., channel] += 2.0**-6 * sizes.dq[..., 0].float()
    wrong = eager_gradients(inputs)._replace(dq=dq)
    assert GradientBudget(inputs).judge(wrong).correct == right


def test_scores_near_zero_excuse_nothing():
    assert not scaled(gradient_inputs(1.0), 1 + 2**-14)


@pytest.mark.parametrize(("by", "right"), [(1 + 2**-21, True), (1 + 2**-14, False)])
def test_a_sinks_gradient_is_as_exact_as_fp32_holds_the_lse_it_comes_from(by, right):
    inputs = make_inputs(Problem("backward", "bf16", 2, 2, 1, 16, 64, 64, sinks=True))
    # of the lse alone, whose terms do not cancel
    inputs = replace(inputs, dout=inputs.q * 0, dlse=torch.ones(inputs.lse_shape))
    given = eager_modifier_gradients(inputs)
    assert given.dsinks is not None
    given = given._replace(dsinks=given.dsinks * by)
    assert GradientBudget(inputs).judge(eager_gradients(inputs), given).correct == right
