"""prefill() of an exported module that carries a backward: gradients by autograd."""

from dataclasses import replace

import pytest
import torch
from exported_calls import load_module
from making import H200, backward_of, prefill_of, winner_of

from autoflash.accuracy import GradientBudget
from autoflash.export import export
from autoflash.families import backward_single
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

CAUSAL = Problem("backward", "bf16", 1, 2, 1, 64, 20, 33)

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of()), winner_of(backward_of())]).text)
    return load_module(path)


def leaves(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return tuple(t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))


def gradients_of(module, inputs: Inputs, **call) -> Gradients:
    p, tensors = inputs.problem, leaves(inputs)
    call = {"causal": p.causal, "layout": p.layout, "return_lse": True, **call}
    out, lse = module.prefill(*tensors, **call)
    if inputs.dlse is None:
        return Gradients(*torch.autograd.grad(out, tensors, inputs.dout))
    return Gradients(*torch.autograd.grad((out, lse), tensors, (inputs.dout, inputs.dlse)))


@pytest.mark.parametrize(
    "problem",
    [
        CAUSAL,
        replace(CAUSAL, causal=False, layout="bhsd", dtype="fp16", num_kv_heads=2),
        replace(CAUSAL, seqlen_q=33, seqlen_k=20, dtype="fp32"),  # rows without keys
    ],
    ids=["causal", "full", "rows without keys"],
)
@pytest.mark.parametrize("wide_rows", [0, 1], ids=["out", "out and lse"])
def test_gradients_are_those_of_the_reference(module, problem, wide_rows):
    inputs = make_inputs(problem, wide_rows=wide_rows)  # wide rows come with a gradient of lse
    verdict = GradientBudget(inputs).judge(gradients_of(module, inputs))
    assert verdict.correct, verdict.reason


def test_a_single_pass_serves_where_it_won(tmp_path):
    problem = replace(CAUSAL, seqlen_q=33, seqlen_k=33)
    config = backward_single.FAMILY.default(problem, H200)
    winners = [winner_of(replace(problem, op="prefill")), winner_of(problem, config)]
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(winners).text)
    module, inputs = load_module(path), make_inputs(problem)
    verdict = GradientBudget(inputs).judge(gradients_of(module, inputs))
    assert verdict.correct, verdict.reason
    assert module.coverage()["exact"] == 2
    served = {tally.choice.family for tally in module._tallies.values()}
    assert served == {"prefill", "backward_single"}


def test_the_forward_is_the_one_without_gradients(module):
    inputs = make_inputs(CAUSAL)
    plain = module.prefill(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    trained = module.prefill(*leaves(inputs), causal=True, return_lse=True)
    assert all(torch.equal(a, b.detach()) for a, b in zip(plain, trained, strict=True))
    assert trained[0].requires_grad and trained[1].requires_grad
    with torch.no_grad():
        assert not module.prefill(*leaves(inputs), causal=True).requires_grad


def test_a_window_that_ends_at_the_query_is_causal_and_a_scale_is_felt(module):
    inputs = make_inputs(CAUSAL)
    expected = gradients_of(module, inputs)
    window = gradients_of(module, inputs, causal=False, window=(-1, 0))
    assert all(torch.equal(a, b) for a, b in zip(expected, window, strict=True))
    scaled = gradients_of(module, inputs, softmax_scale=0.3)
    verdict = GradientBudget(inputs, softmax_scale=0.3).judge(scaled)
    assert verdict.correct, verdict.reason
    assert not GradientBudget(inputs).judge(scaled).correct


def test_gradients_of_a_sum_and_of_another_layout_are_made_contiguous(module):
    """The gradient of a sum is one number everywhere, all its strides 0."""
    inputs = make_inputs(replace(CAUSAL, seqlen_q=20, seqlen_k=20))
    ones = replace(inputs, dout=torch.ones_like(inputs.q))
    tensors = leaves(inputs)
    module.prefill(*tensors, causal=True).sum().backward()
    expected = gradients_of(module, ones)
    assert all(torch.equal(t.grad, d) for t, d in zip(tensors, expected, strict=True))
    strided = inputs.dout.transpose(2, 3).contiguous().transpose(2, 3)
    again = gradients_of(module, replace(inputs, dout=strided))
    assert all(torch.equal(a, b) for a, b in zip(again, gradients_of(module, inputs), strict=True))


def test_lse_alone_has_a_gradient(module):
    inputs = make_inputs(replace(CAUSAL, layout="bhsd"), wide_rows=1)
    tensors = leaves(inputs)
    _, lse = module.prefill(*tensors, causal=True, layout="bhsd", return_lse=True)
    gradients = Gradients(*torch.autograd.grad(lse, tensors, inputs.dlse))
    silent = replace(inputs, dout=torch.zeros_like(inputs.dout))
    verdict = GradientBudget(silent).judge(gradients)
    assert verdict.correct and (gradients.dv == 0).all(), verdict.reason


def test_a_tensor_that_asks_for_no_gradient_gets_none(module):
    inputs = make_inputs(replace(CAUSAL, seqlen_q=9, seqlen_k=9))
    q, k, v = leaves(inputs)
    module.prefill(q, inputs.k, v, causal=True).backward(inputs.dout)
    expected = gradients_of(module, inputs)
    assert torch.equal(q.grad, expected.dq) and torch.equal(v.grad, expected.dv)
    assert inputs.k.grad is None and k.grad is None


def test_what_changed_between_forward_and_backward_is_told(module):
    inputs = make_inputs(replace(CAUSAL, seqlen_q=9, seqlen_k=9))
    q, k, v = leaves(inputs)
    out = module.prefill(q, k, v, causal=True)
    with torch.no_grad():
        k.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward(inputs.dout)


def test_a_second_derivative_is_refused(module):
    inputs = make_inputs(replace(CAUSAL, seqlen_q=9, seqlen_k=9))
    q, k, v = leaves(inputs)
    out = module.prefill(q, k, v, causal=True)
    (dq,) = torch.autograd.grad(out.float().pow(2).sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dq.sum().backward()


@pytest.mark.parametrize(
    ("call", "told"),
    [
        ({"softcap": 1.0}, "no gradient: softcap: not served by the backward yet"),
        ({"window": (3, -1)}, "no gradient: windows: not served"),
        ({"out": torch.empty(1, 20, 2, 64, dtype=torch.bfloat16)}, "with gradients: out is not"),
    ],
    ids=["softcap", "window", "out"],
)
def test_what_has_no_gradient_is_refused_by_name(module, call, told):
    with pytest.raises(ValueError, match=told):
        module.prefill(*leaves(make_inputs(CAUSAL)), **call)


def test_a_bias_that_asks_for_a_gradient_is_refused(module):
    inputs = make_inputs(CAUSAL)
    bias = torch.zeros(20, 33, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(ValueError, match="bias requires grad and there is no backward"):
        module.prefill(inputs.q, inputs.k, inputs.v, bias=bias)
    with pytest.raises(ValueError, match="no gradient: bias"):
        module.prefill(*leaves(inputs), bias=bias)
