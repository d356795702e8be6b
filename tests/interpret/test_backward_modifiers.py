"""The portable backwards in the interpreter: windows, softcap, ALiBi, biases, sinks and packing."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_backward import H200, WAYS, config, every_way, problem, single

from autoflash.accuracy import LEAST_SIZE, GradientBudget
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.forward import forward
from autoflash.gradients import Gradients, ModifierGradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.predict import InterpretedDevice
from autoflash.render import render
from autoflash.runtime.launch import run_plan

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]

Both = tuple[Gradients, ModifierGradients]
SOME = ((70, 70), (0, 9), (20, 100), (5, 0), (1, 1), (40, 3))  # queries and keys of sequences


def run(inputs: Inputs, chosen: Config) -> Both:
    """The gradients, of the modifiers too; NaN before, as are the workspaces."""
    module = load(render(family_of(chosen.family).variant(inputs.problem)))
    gradients, beside = new_results(inputs)
    run_plan(plan_of(module, inputs, gradients, beside, H200, chosen, poison=True))
    assert isinstance(gradients, Gradients)
    return gradients, beside if isinstance(beside, ModifierGradients) else ModifierGradients()


def assert_right(inputs: Inputs, chosen: Config) -> Both:
    found = run(inputs, chosen)
    verdict = GradientBudget(inputs).judge(*found)
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"
    return found


def same_bits(one: Both, other: Both) -> bool:
    pairs = zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


def changed(inputs: Inputs, **fields: Any) -> Inputs:
    """The inputs with other tensors, and what their forward leaves."""
    other = replace(inputs, **fields)
    out, lse = forward(other.problem, other.q, other.k, other.v, other.modifiers)
    return replace(other, out=out, lse=lse)


def packed(*lengths: tuple[int, int], **fields: Any) -> Inputs:
    rows, keys = (max(each) for each in zip(*lengths, strict=True))
    p = problem(rows, keys, layout="thd", batch=len(lengths), lengths="ragged", **fields)
    return make_inputs(p, lengths=lengths, wide_rows=8)


@every_way
@pytest.mark.parametrize(
    "fields",
    [
        {"window_left": 33, "causal": False, "window_right": 20, "bias": True},
        {"window_left": 33, "softcap": True, "alibi": True, "sinks": True, "layout": "bhsd"},
        {"softcap": True, "bias": True, "seqlen_q": 30, "dtype": "bf16"},
        {"causal": False, "alibi": True, "sinks": True, "dtype": "fp32"},
    ],
    ids=["window, bias", "all but bias", "softcap, bias", "full, alibi, sinks"],
)
def test_modifiers_that_meet_are_right(fields: dict[str, Any], way: Config) -> None:  # case B44
    """Rows without a visible key, whole tiles and parts of tiles, several sequences."""
    p = replace(problem(70, 40, batch=2), **fields)
    assert_right(make_inputs(p, wide_rows=1), way)


@pytest.mark.parametrize("window", [(0, 0), (31, 1), (5, 64)], ids=str)
def test_windows_whose_edges_lie_around_those_of_tiles_are_right(window: tuple[int, int]) -> None:
    left, right = window
    for lengths, way in (((65, 97), config()), ((97, 65), single())):
        p = problem(*lengths, causal=False, window_left=left, window_right=right, num_heads=1)
        assert_right(make_inputs(p), way)


@pytest.mark.parametrize("modifier", ["window_left", "softcap", "alibi", "bias", "sinks"])
def test_a_modifier_changes_the_gradients(modifier: str) -> None:
    """What the other tests find right are not the plain gradients."""
    plain = make_inputs(problem(40, 70))
    other = make_inputs(replace(plain.problem, **{modifier: 9 if "window" in modifier else True}))
    assert not GradientBudget(plain).judge(run(other, config())[0]).correct


def test_scores_far_beyond_a_softcap_have_no_slope() -> None:  # case B44
    inputs = changed(make_inputs(problem(40, 70, softcap=True, dtype="bf16"), scale=40.0))
    for way in WAYS:
        gradients, _ = assert_right(inputs, way)
        assert gradients.dq.abs().median() < LEAST_SIZE * gradients.dv.abs().median()


SHARED = [(2, 2, 40, 70), (1, 2, 40, 70), (2, 1, 40, 1), (1, 1, 1, 70), (1, 2, 1, 1), (40, 70)]


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_the_gradient_of_a_bias_is_summed_over_all_that_shares_it(shape: tuple[int, ...]) -> None:
    made = make_inputs(problem(40, 70, bias=True, batch=2))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(made.q.dtype)
    inputs = changed(made, bias=bias)
    for way in WAYS if shape == SHARED[1] else WAYS[:1]:
        _, beside = assert_right(inputs, way)
        assert beside.dbias is not None
        assert beside.dbias.shape == (1,) * (4 - len(shape)) + shape


def test_a_bias_may_be_a_view_and_what_it_holds_where_the_mask_hides_plays_no_part() -> None:
    made = make_inputs(problem(37, 64, bias=True))
    assert made.bias is not None
    turned = made.bias.transpose(2, 3).contiguous().transpose(2, 3)
    assert turned.stride() != made.bias.stride()
    hidden = torch.ones(37, 64, dtype=torch.bool).triu(64 - 37 + 1)
    noise = made.bias.masked_fill(hidden, float("nan"))
    for way in WAYS:
        expected = run(made, way)
        assert same_bits(run(replace(made, bias=turned), way), expected)
        found = run(replace(made, bias=noise), way)
        assert same_bits(found, expected)
        assert found[1].dbias is not None and (found[1].dbias[:, :, hidden] == 0).all()


def test_a_bias_of_minus_infinity_hides_as_the_mask_does() -> None:
    made = make_inputs(problem(40, 70, bias=True, causal=False))
    assert made.bias is not None
    bias = made.bias.clone()
    bias[..., 60:], bias[:, :, 5] = float("-inf"), float("-inf")
    inputs = changed(made, bias=bias)
    for way in WAYS:
        gradients, beside = assert_right(inputs, way)
        assert beside.dbias is not None and (beside.dbias[..., 60:] == 0).all()
        assert (gradients.dq[:, 5] == 0).all() and (gradients.dk[:, 60:] == 0).all()


@every_way
def test_a_sink_has_the_gradient_of_a_key_that_all_rows_see(way: Config) -> None:
    """A key whose q k is the sink and whose v is 0, of a softmax without one, beside the others."""
    made = make_inputs(problem(40, 30, sinks=True, num_heads=1, dtype="fp32"), wide_rows=1)
    _, beside = assert_right(made, way)  # ten rows see no key but the sink
    assert beside.dsinks is not None and beside.dsinks.abs().min() > 0
    silent = changed(made, sinks=torch.full((1,), float("-inf")))
    _, beside = run(replace(silent, dlse=None), way)
    assert (beside.dsinks == 0).all()


def test_gradients_that_nobody_asks_for_are_not_computed() -> None:
    inputs = make_inputs(problem(40, 70, bias=True, sinks=True))
    module = load(render(family_of("backward").variant(inputs.problem)))
    gradients, beside = new_results(inputs)
    asked = plan_of(module, inputs, gradients, beside, H200, config())
    silent = plan_of(module, inputs, gradients, None, H200, config())
    assert len(asked) == len(silent) + 2 == 5


@every_way
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"causal": False, "dtype": "bf16"},
        {"window_left": 20, "softcap": True, "alibi": True, "sinks": True, "num_heads": 4},
    ],
    ids=["causal", "full", "everything"],
)
def test_packed_sequences_are_right(fields: dict[str, Any], way: Config) -> None:  # case B18
    inputs = packed(*SOME, **fields)
    assert_right(inputs, way)
    if not fields:  # the load of the other way
        load_by = {"pointer": "descriptor", "descriptor": "pointer"}[str(way["LOAD"])]
        assert_right(inputs, Config.of(way.family, way.as_dict() | {"LOAD": load_by}))


@every_way
def test_what_one_packed_sequence_holds_changes_no_bit_of_another(way: Config) -> None:
    inputs = packed((37, 37), (20, 70), (9, 33))
    expected = run(inputs, way)
    spans = ((inputs.cu_seqlens_q, ("q", "out", "dout")), (inputs.cu_seqlens_k, ("k", "v")))
    noise = {}
    for ends, names in spans:
        assert ends is not None
        for name in names:
            noise[name] = getattr(inputs, name).clone()
            noise[name][ends[0] : ends[1]] = noise[name][ends[2] : ends[3]] = float("nan")
    found = run(replace(inputs, **noise), way)
    for name, one, other in zip(Gradients._fields, found[0], expected[0], strict=True):
        ends = spans[0 if name == "dq" else 1][0]
        assert ends is not None
        assert torch.equal(one[ends[1] : ends[2]], other[ends[1] : ends[2]]), name


def test_a_packed_sequence_has_the_gradients_that_it_has_alone() -> None:
    inputs = packed((37, 37), (20, 70))
    gradients, _ = run(inputs, config())
    alone = problem(20, 70)
    rows, keys = slice(37, 57), slice(37, 107)
    whole = {n: getattr(inputs, n)[keys if n in "kv" else rows][None] for n in ("q", "k", "v")}
    whole |= {n: getattr(inputs, n)[rows][None] for n in ("out", "dout")}
    whole |= {n: getattr(inputs, n)[:, rows][None].contiguous() for n in ("lse", "dlse")}
    expected, _ = run(Inputs(alone, **whole), config())
    assert torch.equal(gradients.dq[rows], expected.dq[0])
    assert torch.equal(gradients.dk[keys], expected.dk[0])
    assert torch.equal(gradients.dv[keys], expected.dv[0])


@pytest.mark.parametrize(
    "checked",
    [
        problem(40, 40, bias=True, sinks=True, num_heads=1),
        problem(40, 40, layout="thd", lengths="ragged", batch=3, num_heads=1),
    ],
    ids=["modified", "packed"],
)
def test_a_candidate_passes_its_check_and_one_that_loses_a_dout_does_not(checked: Any) -> None:
    class Forgetful(InterpretedDevice):
        def plan(self, inputs, config, out, lse, new_workspace=None):
            inputs = replace(inputs, dout=inputs.dout.clone().index_fill_(0, torch.tensor(0), 0.0))
            return super().plan(inputs, config, out, lse, new_workspace)

    assert InterpretedDevice(H200).check(checked, config(), 0).correct
    with pytest.raises(Exception, match=r"correctness: d[qkv] is off by"):
        Forgetful(H200).check(checked, config(), 0)
