"""The reference of the backward: it is the derivative of the forward, and its budget is felt."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from autoflash.accuracy import GradientBudget
from autoflash.check import sample_rows
from autoflash.gradients import (
    Gradients,
    eager_gradient_rows,
    eager_gradients,
    key_rows,
    reference_gradient_rows,
    reference_gradients,
    reference_modifier_gradients,
)
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.reference import reference


def problem(seqlen_q: int, seqlen_k: int, **changed: Any) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("backward", **(fields | changed))


class Attention(torch.autograd.Function):
    """The fp64 reference forward with the reference gradients as its backward."""

    @staticmethod
    def forward(ctx: Any, q: Any, k: Any, v: Any, bias: Any, sinks: Any, made: Inputs) -> Any:
        inputs = replace(made, q=q, k=k, v=v, bias=bias, sinks=sinks)
        out, lse = reference(inputs)
        ctx.inputs = replace(inputs, out=out, lse=lse)
        # a row without keys has no finite lse to differentiate
        return out, lse.masked_fill(lse.isinf(), 0.0)

    @staticmethod
    def backward(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> Any:  # pyright: ignore
        inputs = replace(ctx.inputs, dout=dout, dlse=dlse)
        dbias, dsinks = reference_modifier_gradients(inputs)[0]
        if dbias is not None:
            dbias = dbias.view(ctx.inputs.bias.shape)
        return *reference_gradients(inputs)[0], dbias, dsinks, None


def is_the_derivative(made: Inputs) -> bool:
    """Whether the reference gradients of these inputs pass torch's gradcheck."""
    given = (made.q, made.k, made.v, made.bias, made.sinks)
    tensors = [None if t is None else t.double().requires_grad_() for t in given]
    return torch.autograd.gradcheck(lambda *qkv: Attention.apply(*qkv, made), tensors)


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", [(4, 4), (2, 5), (5, 2)], ids=str)
def test_the_reference_gradients_are_the_derivative_of_the_reference(lengths, causal, layout):
    p = problem(*lengths, causal=causal, layout=layout, batch=1, dtype="fp32")
    assert is_the_derivative(make_inputs(p))


@pytest.mark.parametrize("widths", [(16, 24), (24, 16)], ids=str)
@pytest.mark.parametrize(
    "changed", [{}, {"layout": "thd", "sinks": True}, {"dropout": True, "bias": True}], ids=str
)
def test_they_are_where_values_have_other_channels_than_keys(changed, widths):
    sizes = {"head_dim": widths[0], "head_dim_v": widths[1], "num_heads": 2, "num_kv_heads": 1}
    lengths = [(3, 2), (0, 1)] if "layout" in changed else None
    p = problem(3, 5, dtype="fp32", batch=2 if lengths else 1, **sizes, **changed)
    made = make_inputs(p, lengths=lengths)
    assert is_the_derivative(made)
    gradients, _ = reference_gradients(made)
    assert [each.shape for each in gradients] == [t.shape for t in (made.q, made.k, made.v)]


EVERYTHING = {"window_left": 1, "window_right": 0, "softcap": True, "sinks": True}


@pytest.mark.parametrize(
    ("changed", "bias"),
    [
        ({"softcap": True, "sinks": True, "alibi": True, "causal": False}, None),
        ({**EVERYTHING, "bias": True, "layout": "bhsd"}, (1, 2, 3, 5)),
        ({"bias": True, "batch": 2, "causal": True}, (3, 1)),
        ({"bias": True, "batch": 2, "causal": False}, (2, 1, 1, 5)),
        ({**EVERYTHING, "alibi": True, "layout": "thd", "batch": 3}, None),
        ({**EVERYTHING, "bias": True, "dropout": True}, None),
        ({"mask": "(q_idx + kv_idx + h) % 3 != 1", "sinks": True, "causal": False}, None),
        ({"masked_by": "prefix", "density": 60, "bias": True}, None),
        ({"masked_by": "documents", "density": 50, "causal": False}, None),
        ({"masked_by": "blocks", "density": 70, "mask_block_q": 16, "mask_block_k": 16}, None),
    ],
    ids=[
        *("capped", "everything", "bias of queries", "bias of keys"),
        *("packed", "dropout", "rule", "prefix", "documents", "blocks"),
    ],
)
def test_modifiers_are_differentiated_and_their_own_gradients_are_derivatives(changed, bias):
    fields = {"dtype": "fp32", "batch": 1, "num_heads": 2, "num_kv_heads": 1, **changed}
    lengths = [(3, 2), (0, 1), (2, 3)] if changed.get("layout") == "thd" else None
    made = make_inputs(problem(3, 5, **fields), lengths=lengths)
    if bias:
        made = replace(made, bias=torch.randn(bias, generator=torch.Generator().manual_seed(1)))
    assert is_the_derivative(made)


def test_a_row_without_keys_has_no_gradient_and_a_key_that_nobody_sees_neither():
    inputs = make_inputs(problem(6, 3, layout="bhsd"))
    gradients, sizes = reference_gradients(inputs)
    assert (gradients.dq[:, :, :3] == 0).all() and (sizes.dq[:, :, :3] == 0).all()
    assert (sizes.dq[:, :, 3:] > 0).all() and (sizes.dk > 0).all() and (sizes.dv > 0).all()
    far = make_inputs(problem(3, 6, causal=False, window_left=0, layout="bhsd"))
    gradients, sizes = reference_gradients(far)
    assert (gradients.dk[:, :, :3] == 0).all() and (sizes.dv[:, :, :3] == 0).all()


def test_the_size_of_a_row_whose_terms_cancel_is_that_of_its_terms():
    """The first query sees one key: P is 1, and dP - delta cancels whatever dout is."""
    gradients, sizes = reference_gradients(make_inputs(problem(8, 8, layout="bhsd")))
    first, size = gradients.dq[:, :, 0].abs().amax(), sizes.dq[:, :, 0].pow(2).mean(-1).amin()
    assert first < 1e-12 and size > 0.01
    other = gradients.dq[:, :, 4:].pow(2).mean().sqrt() / sizes.dq[:, :, 4:].pow(2).mean().sqrt()
    assert 0.3 < other < 3


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_single_rows_are_those_of_the_whole(dtype, layout):
    p = problem(40, 70, dtype=dtype, layout=layout)
    inputs = make_inputs(p)
    out, lse = reference(inputs)
    inputs = replace(inputs, out=out, lse=lse)  # the rows take them as they are given
    rows = sample_rows(p, seed=0)
    assert rows[-1] == (1, 3, 39) and key_rows(p, rows)[-1] == (1, 1, 69)
    whole, picked = reference_gradients(inputs), reference_gradient_rows(inputs, rows)
    for of_whole, of_rows in zip(whole, picked, strict=True):
        for name, places in zip(Gradients._fields, (rows, key_rows(p, rows), key_rows(p, rows))):
            tensor, row = getattr(of_whole, name), getattr(of_rows, name)
            heads_first = tensor.transpose(1, 2) if layout == "bshd" else tensor
            b, h, i = torch.tensor(places).T
            assert torch.allclose(heads_first[b, h, i], row, rtol=1e-12, atol=1e-14), name


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_eager_gradients_are_within_a_budget_that_feels_a_lost_key(dtype):
    inputs = make_inputs(problem(40, 200, dtype=dtype, causal=False))
    budget, eager = GradientBudget(inputs), eager_gradients(inputs)
    verdict = budget.judge(eager)
    assert verdict.correct and verdict.max_ratio <= 1 and verdict.rms_ratio <= 1
    fewer = replace(inputs.problem, seqlen_k=199)
    shorter = replace(inputs, problem=fewer, k=inputs.k[:, :-1], v=inputs.v[:, :-1])
    lost = eager_gradients(shorter)
    for name in Gradients._fields:
        given = getattr(lost, name)
        if name != "dq":  # of the lost key nothing is written
            given = torch.cat([given, torch.zeros_like(given[:, :1])], dim=1)
        wrong = budget.judge(eager._replace(**{name: given}))
        assert not wrong.correct and wrong.reason.startswith(name), wrong


def test_gradients_of_rows_without_keys_must_be_zero_and_none_may_be_nan():
    inputs = make_inputs(problem(6, 3, batch=1))
    budget, eager = GradientBudget(inputs), eager_gradients(inputs)
    eager.dq[0, 1, 0, 0] = 1e-30
    assert budget.judge(eager).reason == "a row with no visible key is not zero"
    eager.dv[0, 0, 0, 0] = float("nan")
    eager.dq[0, 1, 0, 0] = 0.0
    assert budget.judge(eager).reason == "dv is not finite, first at [0, 0, 0, 0]"


def test_a_gradient_of_lse_is_part_of_the_budget():
    inputs = make_inputs(problem(20, 20), wide_rows=1)
    assert inputs.dlse is not None
    verdict = GradientBudget(inputs).judge(eager_gradients(replace(inputs, dlse=None)))
    assert not verdict.correct


def test_logits_far_from_zero_leave_a_budget_that_is_still_felt():
    """At 1e4 most of P underflows; that must not excuse the rows that count."""
    inputs = make_inputs(problem(20, 20, dtype="fp32", causal=False), scale=40.0)
    budget, eager = GradientBudget(inputs), eager_gradients(inputs)
    assert budget.judge(eager).correct
    wrong = eager._replace(dv=eager.dv * (1 + 2**-6))
    assert not budget.judge(wrong).correct


def test_no_keys_at_all_give_zeros():
    inputs = make_inputs(problem(5, 0))
    gradients, _ = reference_gradients(inputs)
    assert (gradients.dq == 0).all() and gradients.dk.shape == (2, 0, 2, 16)
    assert GradientBudget(inputs).judge(gradients).correct


def test_rows_of_the_eager_computation_are_rounded_to_the_input_type():
    inputs = make_inputs(problem(9, 9))
    rows = sample_rows(inputs.problem, seed=1)
    assert {each.dtype for each in eager_gradient_rows(inputs, rows)} == {torch.bfloat16}
