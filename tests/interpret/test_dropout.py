"""Dropout in the interpreter: every kernel draws the mask of the host, and what is made of it."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from drawn_masks import masks_differ
from exported_calls import load_module
from making import backward_of, prefill_of, winner_of

from autoflash import gpu as gpus
from autoflash.accuracy import Budget, GradientBudget
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import FAMILIES
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.subjects import Candidate

H200 = gpus.known("NVIDIA_H200")

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]


def problem(**changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp32", "batch": 2, "num_heads": 2, "num_kv_heads": 2}
    fields |= {"head_dim": 64, "seqlen_q": 40, "seqlen_k": 64, "causal": False}
    return Problem("prefill", **{**fields, "dropout": True, **changed})


def config(family: str, **knobs: int | str) -> Config:
    """The smallest tiles, but for those that are told."""
    least = {knob.name: min(knob.values) for knob in FAMILIES[family].knobs}
    return Config.of(family, least | {"LOAD": "pointer"} | knobs)


TILES = (
    config("prefill"),
    config("prefill", BLOCK_M=64, BLOCK_N=32),
    config("backward"),
    config("backward", KV_BLOCK_M=64, KV_BLOCK_N=32, Q_BLOCK_M=32, Q_BLOCK_N=64),
    config("backward_single", KV_BLOCK_M=32, KV_BLOCK_N=64),
)


@pytest.mark.parametrize("chosen", TILES, ids=lambda c: f"{c.family} {c.knobs[0][1]}")
def test_every_kernel_keeps_what_the_host_does_whatever_its_tiles(chosen: Config) -> None:
    assert masks_differ(make_inputs(problem()), chosen, H200) == ""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", TILES, ids=lambda c: f"{c.family} {c.knobs[0][1]}")
@pytest.mark.parametrize(
    "changed",
    [
        {"window_left": 21, "seqlen_q": 50},
        {"layout": "thd"},
        {"layout": "thd", "window_left": 21, "density": 50, "masked_by": "documents"},
    ],
    ids=["window", "packed", "packed documents in windows"],
)
def test_windows_and_packing_count_from_a_sequences_first_tokens(changed, chosen: Config) -> None:
    """Windows begin anywhere, and sequences of other lengths stand before."""
    p = problem(**changed)
    lengths = [(7, 13), (37, 50), (20, 3)] if p.varlen else None
    p = replace(p, batch=3, lengths="ragged") if lengths else p
    assert masks_differ(make_inputs(p, lengths=lengths), chosen, H200) == ""


@pytest.mark.slow
@pytest.mark.parametrize("chosen", TILES, ids=lambda c: f"{c.family} {c.knobs[0][1]}")
@pytest.mark.parametrize(
    "changed",
    [
        {"masked_by": "documents", "causal": True},
        {"masked_by": "documents", "window_left": 21},
        {"masked_by": "prefix", "causal": True},
        {"masked_by": "blocks", "mask_block_q": 64, "mask_block_k": 64},
    ],
    ids=["documents", "documents in windows", "prefix", "blocks"],
)
def test_what_other_masks_leave_has_the_numbers_that_it_has_without(
    changed, chosen: Config
) -> None:
    p = problem(density=50, seqlen_q=64, num_heads=3, num_kv_heads=3, **changed)
    assert masks_differ(make_inputs(p), chosen, H200) == ""


def test_lse_has_the_bits_that_it_has_without_dropout() -> None:
    inputs = make_inputs(problem(dtype="bf16", causal=True, sinks=True))
    plain = replace(inputs, problem=replace(inputs.problem, dropout=False), rng=None)
    chosen = config("prefill", BLOCK_M=32)
    out, lse = Candidate(chosen, H200).run(inputs)
    other, expected = Candidate(chosen, H200).run(plain)
    assert torch.equal(lse, expected) and not torch.equal(out, other)


@pytest.mark.parametrize("p", [2**-16, 0.9999], ids=["hardly any", "nearly all"])
def test_a_probability_at_either_end_is_right(p: float) -> None:
    fields = {"dtype": "fp16", "seqlen_q": 33, "num_heads": 4, "num_kv_heads": 1, "batch": 1}
    inputs = replace(make_inputs(problem(**fields)), dropout_p=p)
    verdict = Budget(inputs).judge(*Candidate(config("prefill"), H200).run(inputs))
    assert verdict.correct, verdict.reason


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        {"window_left": 33, "bias": True, "dtype": "bf16"},
        {"causal": True, "softcap": True, "sinks": True, "layout": "bhsd", "dtype": "fp16"},
        {"causal": True, "alibi": True, "layout": "thd", "dtype": "bf16"},
    ],
    ids=["window, bias", "softcap, sinks", "packed, alibi"],
)
@pytest.mark.parametrize("chosen", TILES[2:], ids=lambda c: f"{c.family} {c.knobs[0][1]}")
def test_gradients_with_dropout_and_other_modifiers_are_right(changed, chosen: Config) -> None:
    fields = {"op": "backward", "num_kv_heads": 1, "head_dim": 32, "head_dim_v": 32}
    fields |= dict.fromkeys(("kv_dtype", "out_dtype"), changed["dtype"])
    p = replace(problem(**changed), **fields)
    lengths = [(7, 13), (37, 50), (20, 3)] if p.varlen else None
    p = replace(p, batch=3, lengths="ragged") if lengths else p
    inputs = make_inputs(p, lengths=lengths, wide_rows=8)
    verdict = GradientBudget(inputs).judge(*Candidate(chosen, H200).run(inputs))
    assert verdict.correct, verdict.reason


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of()), winner_of(backward_of())]).text)
    return load_module(path)


def called(module: Any, inputs: Inputs, **call: Any) -> Any:
    p = inputs.problem
    call = {**inputs.modifiers.of_prefill, "causal": p.causal, "layout": p.layout, **call}
    return module.prefill(inputs.q, inputs.k, inputs.v, return_lse=True, **call)


@pytest.mark.parametrize("changed", [{}, {"layout": "thd"}], ids=["dense", "packed"])
def test_the_module_gives_the_gradients_of_the_very_mask_of_its_forward(module, changed) -> None:
    """Twice: the second call is launched by the recipe of the first, under another seed."""
    for seed in (0, 1):
        p = problem(dtype="bf16", causal=True, num_kv_heads=1, **changed)
        p = replace(p, op="backward", lengths="ragged" if p.varlen else "equal")
        lengths = [(20, 33), (7, 5)] if p.varlen else None
        inputs = make_inputs(p, seed, lengths=lengths)
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out, lse = called(module, replace(inputs, q=leaves[0], k=leaves[1], v=leaves[2]))
        forward_problem = replace(inputs, problem=replace(p, op="prefill"))
        verdict = Budget(forward_problem).judge(out.detach(), lse.detach())
        assert verdict.correct, verdict.reason
        found = Gradients(*torch.autograd.grad(out, leaves, inputs.dout))
        verdict = GradientBudget(inputs).judge(found)
        assert verdict.correct, verdict.reason


def test_an_rng_that_is_not_given_follows_torchs_generator(module) -> None:
    inputs = make_inputs(problem(dtype="bf16", batch=1))

    def drawn() -> torch.Tensor:
        return called(module, inputs, rng=None)[0]

    torch.manual_seed(3)
    first, second = drawn(), drawn()
    torch.manual_seed(3)
    assert torch.equal(drawn(), first) and torch.equal(drawn(), second)
    assert not torch.equal(first, second)
    torch.manual_seed(3)
    rng = torch.randint(2**62, (2,))
    assert torch.equal(called(module, inputs, rng=rng)[0], first)


def test_no_dropout_is_the_plain_call_whatever_the_rng(module) -> None:
    inputs = make_inputs(problem(dtype="bf16", batch=1))
    state = torch.get_rng_state()
    out, lse = called(module, inputs, dropout_p=0.0)
    expected = module.prefill(inputs.q, inputs.k, inputs.v, return_lse=True)
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])
    assert torch.equal(torch.get_rng_state(), state)


def test_the_bits_of_a_sequence_alone_are_not_promised_with_dropout(module) -> None:
    inputs = make_inputs(problem(dtype="bf16", batch=1))
    with pytest.raises(ValueError, match="with dropout: batch_invariant is not supported"):
        called(module, inputs, batch_invariant=True)


def test_a_combination_that_was_not_tuned_is_refused_by_name(module) -> None:
    inputs = make_inputs(problem(dtype="bf16", batch=1, softcap=True))
    with pytest.raises(ValueError, match="no kernels for softcap with dropout: none were tuned"):
        called(module, inputs)


def test_a_combination_that_was_tuned_is_in_the_module(tmp_path) -> None:
    p = problem(dtype="bf16", batch=1, softcap=True)
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export([winner_of(p), winner_of(replace(p, op="backward"))]).text)
    module, inputs = load_module(path), make_inputs(p)
    verdict = Budget(inputs).judge(*called(module, inputs))
    assert verdict.correct, verdict.reason
    assert module.coverage()["exact"] == 1
