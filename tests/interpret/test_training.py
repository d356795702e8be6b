"""prefill() of an exported module that carries a backward: gradients by autograd."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from exported_calls import load_module
from making import H200, backward_of, prefill_of, winner_of
from torch.utils._python_dispatch import TorchDispatchMode

from autoflash.accuracy import GradientBudget
from autoflash.export import export
from autoflash.families import backward_single
from autoflash.forward import forward
from autoflash.gradients import Gradients, ModifierGradients
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
        replace(CAUSAL, head_dim=40, head_dim_v=24),
        replace(CAUSAL, head_dim=24, head_dim_v=40, causal=False, layout="bhsd"),
    ],
    ids=["causal", "full", "rows without keys", "narrow values", "wide values"],
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


def test_an_out_to_be_written_has_no_gradient(module):
    out = torch.empty(1, 20, 2, 64, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="with gradients: out is not"):
        module.prefill(*leaves(make_inputs(CAUSAL)), out=out)


def with_modifiers(module, inputs: Inputs, **call):
    """The gradients of q, k and v, and those of bias and sinks, None where there are none."""
    p, tensors, given = inputs.problem, leaves(inputs), (inputs.bias, inputs.sinks)
    asked = [None if t is None else t.detach().requires_grad_() for t in given]
    modifiers = inputs.modifiers._replace(bias=asked[0], sinks=asked[1]).of_prefill
    call = {**modifiers, "causal": p.causal, "layout": p.layout, "return_lse": True, **call}
    results, incoming = module.prefill(*tensors, **call), (inputs.dout, inputs.dlse)
    if inputs.dlse is None:
        results, incoming = results[:1], incoming[:1]
    wanted = [*tensors, *(t for t in asked if t is not None)]
    found = list(torch.autograd.grad(results, wanted, incoming))
    beside = [None if t is None else found.pop(3) for t in asked]
    return Gradients(*found), ModifierGradients(*beside)


@pytest.mark.parametrize(
    ("changed", "bias"),
    [
        ({"window_left": 9, "softcap": True, "sinks": True}, None),
        ({"alibi": True, "causal": False}, None),
        ({"bias": True}, (20, 33)),
        ({"bias": True, "softcap": True, "layout": "bhsd"}, (2, 1, 33)),
    ],
    ids=["window, softcap, sinks", "alibi", "bias", "bias that queries share"],
)
def test_modifiers_are_differentiated_and_biases_and_sinks_have_gradients(module, changed, bias):
    """Twice: the second call is launched by the recipe of the first, of other tensors."""
    for seed in (0, 1):
        inputs = make_inputs(replace(CAUSAL, **changed), seed, wide_rows=1)
        if bias:
            inputs = with_bias(inputs, torch.randn(bias).to(torch.bfloat16))
        gradients, beside = with_modifiers(module, inputs)
        if beside.dbias is not None:
            assert beside.dbias.shape == bias
            beside = beside._replace(dbias=beside.dbias.view((1,) * (4 - len(bias)) + bias))
        verdict = GradientBudget(inputs).judge(gradients, beside)
        assert verdict.correct, verdict.reason


def with_bias(inputs: Inputs, bias: torch.Tensor) -> Inputs:
    """The inputs with another bias, and what its forward leaves."""
    changed = replace(inputs, bias=bias)
    out, lse = forward(changed.problem, changed.q, changed.k, changed.v, changed.modifiers)
    return replace(changed, out=out, lse=lse)


def test_packed_sequences_have_gradients_and_tokens_past_the_last_none(module):
    p = replace(CAUSAL, layout="thd", batch=3, lengths="ragged", sinks=True)
    inputs = make_inputs(p, lengths=[(9, 20), (0, 3), (20, 5)], wide_rows=1)
    verdict = GradientBudget(inputs).judge(*with_modifiers(module, inputs))
    assert verdict.correct, verdict.reason
    more = {name: torch.cat([t, t[:4]]) for name, t in vars(inputs).items() if name in "qkv"}
    more["dout"] = torch.cat([inputs.dout, inputs.dout[:4]])
    longer, _ = with_modifiers(module, replace(inputs, **more, dlse=None))
    expected, _ = with_modifiers(module, replace(inputs, dlse=None))
    for one, same in zip(longer, expected, strict=True):
        assert torch.equal(one[:-4], same) and (one[-4:] == 0).all()


@pytest.mark.parametrize(
    "lengths", [[(0, 5), (0, 3)], [(5, 0), (3, 0)], [(0, 0), (0, 0)], []], ids=str
)
def test_packed_sequences_that_see_nothing_at_all_have_gradients_of_zero(  # case B18
    module, lengths
):
    """No queries, no keys, neither, and no sequences."""
    ends = torch.tensor([(0, 0), *lengths]).cumsum(0).int().T.contiguous()
    starts = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True))
    rows, keys = ends[:, -1].tolist()
    shapes = ((rows, 2, 64), (keys, 1, 64), (keys, 1, 64))
    tensors = [torch.ones(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    sizes = {"max_seqlen_q": 5, "max_seqlen_k": 5}
    out, lse = module.prefill(*tensors, **starts, **sizes, causal=True, return_lse=True)
    assert out.shape == shapes[0] and (out == 0).all() and (lse == -torch.inf).all()
    gradients = torch.autograd.grad(out, tensors, torch.ones_like(out))
    assert all((gradient == 0).all() for gradient in gradients)
    assert [gradient.shape for gradient in gradients] == [tensor.shape for tensor in tensors]


@pytest.mark.parametrize("call", [{"softcap": 2.0}, {"window": (4, 0)}], ids=str)
def test_values_of_another_width_under_what_was_not_tuned_are_refused_by_the_forward(
    tmp_path, call
):
    """The forward was tuned, its backward was not: nobody trains a step to be told."""
    p = replace(CAUSAL, head_dim=40, head_dim_v=24, op="prefill")
    on = replace(p, softcap=True) if "softcap" in call else replace(p, window_left=4)
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export([winner_of(on), winner_of(backward_of())]).text)
    module, inputs = load_module(path), make_inputs(replace(p, op="backward"))
    with torch.no_grad():
        assert module.prefill(*leaves(inputs), causal=True, **call).shape[-1] == 24
    with pytest.raises(ValueError, match=r"backward: no kernels for .* with head_dim_v"):
        module.prefill(*leaves(inputs), causal=True, **call)


def test_packed_sequences_with_values_of_another_width_train_where_they_were_tuned(tmp_path):
    p = replace(CAUSAL, head_dim=40, head_dim_v=24, layout="thd", lengths="ragged", batch=2)
    winners = [winner_of(p), winner_of(replace(p, op="prefill"))]
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(winners).text)
    inputs = make_inputs(p, lengths=[(9, 20), (5, 3)], wide_rows=1)
    verdict = GradientBudget(inputs).judge(*with_modifiers(load_module(path), inputs))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("shape", [(3, 2, 20, 33), (20, 1)], ids=str)
def test_a_bias_of_packed_sequences_has_gradients_where_they_were_tuned(module, tmp_path, shape):
    p = replace(CAUSAL, layout="thd", batch=3, lengths="ragged", bias=True)
    config = backward_single.FAMILY.default(p, H200)  # beside which the repeating one is carried
    winners = [winner_of(replace(p, op="prefill")), winner_of(p, config)]
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(winners).text)
    made = make_inputs(p, lengths=[(9, 20), (0, 3), (20, 5)], wide_rows=1)
    inputs, tuned = with_bias(made, torch.randn(shape).to(torch.bfloat16)), load_module(path)
    for options in ({}, {"deterministic": True}):
        gradients, beside = with_modifiers(tuned, inputs, **options)
        assert beside.dbias.shape == shape
        beside = beside._replace(dbias=beside.dbias.view((1,) * (4 - len(shape)) + shape))
        verdict = GradientBudget(inputs).judge(gradients, beside)
        assert verdict.correct, verdict.reason
    served = {tally.choice.family for tally in tuned._tallies.values()}
    assert served == {"prefill", "backward_single", "backward"}
    with pytest.raises(ValueError, match="no kernels for causal with bias with varlen: none were"):
        with_modifiers(module, inputs)


def test_a_bias_alone_may_ask_for_a_gradient_and_slopes_have_none(module):
    inputs = make_inputs(replace(CAUSAL, bias=True))
    bias = inputs.bias.requires_grad_()
    out = module.prefill(inputs.q, inputs.k, inputs.v, causal=True, bias=bias)
    (dbias,) = torch.autograd.grad(out, bias, inputs.dout)
    assert torch.equal(dbias, with_modifiers(module, inputs)[1].dbias)
    slopes = torch.ones(2, requires_grad=True)
    with pytest.raises(ValueError, match="alibi_slopes requires grad and has no gradient"):
        module.prefill(inputs.q, inputs.k, inputs.v, alibi_slopes=slopes)


def test_deterministic_is_served_by_a_family_whose_bits_repeat(tmp_path):  # case B47
    problem = replace(CAUSAL, seqlen_q=33, seqlen_k=33)
    config = backward_single.FAMILY.default(problem, H200)
    winners = [winner_of(replace(problem, op="prefill")), winner_of(problem, config)]
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(winners).text)
    module, inputs = load_module(path), make_inputs(problem)
    verdict = GradientBudget(inputs).judge(gradients_of(module, inputs, deterministic=True))
    assert verdict.correct, verdict.reason
    served = {tally.choice.family for tally in module._tallies.values()}
    assert served == {"prefill", "backward"}
    path.write_text(export([*winners[:1], winner_of(problem)]).text)
    module = load_module(path)
    gradients_of(module, inputs, deterministic=True)
    (tally,) = (t for t in module._tallies.values() if t.choice.family == "backward")
    assert tally.problem.deterministic and tally.choice.how == "exact"


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"bias": True, "window_left": 9},
        {"layout": "thd", "sinks": True, "softcap": True},
        {"bias": True, "dropout": True},
        {"head_dim": 40, "head_dim_v": 24},
    ],
    ids=[
        *("plain", "bias and window", "packed, sinks and softcap", "bias and dropout"),
        "narrow values",
    ],
)
def test_a_compiled_graph_has_the_gradients_of_the_eager_call(module, changed):
    torch._dynamo.reset()
    p = replace(CAUSAL, **changed)
    lengths = [(9, 20)] if p.varlen else None
    inputs = make_inputs(p, lengths=lengths, wide_rows=1)
    prefill = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    for options in ({}, {"deterministic": True}):
        found = with_modifiers(SimpleNamespace(prefill=prefill), inputs, **options)
        expected = with_modifiers(module, inputs, **options)
        for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert one is other or torch.equal(one, other)


def test_a_compiled_graph_refuses_gradients_of_slopes_and_of_what_is_to_be_written(module):
    torch._dynamo.reset()
    q, k, v = leaves(make_inputs(CAUSAL))
    prefill = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="alibi_slopes requires grad and has no gradient"):
        prefill(q, k, v, alibi_slopes=torch.ones(2, requires_grad=True))
    with pytest.raises(Exception, match="no backward yet"):
        prefill(q, k, v, out=torch.empty_like(q))


def test_the_operator_of_masks_refuses_gradients_that_were_not_tuned(module):
    documents = torch.zeros(CAUSAL.batch, CAUSAL.seqlen_k, dtype=torch.int32)
    operator = getattr(torch.ops, module.operator_namespace()).prefill_masked.default
    with pytest.raises(ValueError, match="backward: no kernels for causal with documents: none"):
        operator(*leaves(make_inputs(CAUSAL)), causal=True, document_ids=documents)


def test_torchs_own_check_of_the_operator_with_gradients_passes(module):
    inputs = make_inputs(replace(CAUSAL, bias=True, sinks=True))
    more = {"bias": inputs.bias.requires_grad_(), "sinks": inputs.sinks.requires_grad_()}
    operator = getattr(torch.ops, module.operator_namespace()).prefill.default
    for options in ({"causal": True}, {"causal": True, **more}):
        checks = torch.library.opcheck(operator, leaves(inputs), options)
        assert set(checks.values()) == {"SUCCESS"}


def test_the_operator_called_by_itself_has_the_gradients_of_the_function(module):
    inputs = make_inputs(CAUSAL, wide_rows=1)
    operator = getattr(torch.ops, module.operator_namespace()).prefill.default

    def prefill(*tensors, return_lse, **options):
        return operator(*tensors, **options)

    found = gradients_of(SimpleNamespace(prefill=prefill), inputs)
    assert all(map(torch.equal, found, gradients_of(module, inputs)))


def test_the_operator_is_dispatched_twice_only_where_a_mode_has_a_say(module, monkeypatch):
    operator = getattr(torch.ops, module.operator_namespace()).prefill.default
    inputs, again = make_inputs(CAUSAL), []
    redispatch = type(operator).redispatch

    def watched(self, *given):
        again.append(self)
        return redispatch(self, *given)

    monkeypatch.setattr(type(operator), "redispatch", watched)
    for tensors in ((inputs.q, inputs.k, inputs.v), leaves(inputs)):
        again.clear()
        expected = operator(*tensors, True)
        assert again == []
        with SeenOperators() as seen:
            found = operator(*tensors, True)
        assert seen.operators[0] is operator and again == [operator]
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other) and one.requires_grad == other.requires_grad


class SeenOperators(TorchDispatchMode):
    """A mode that notes what is called."""

    def __init__(self):
        super().__init__()
        self.operators = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        self.operators.append(operator)
        return operator(*args, **(kwargs or {}))
