"""Merging in the interpreter: results over parts of the keys are the result over all of them."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module

ALL: dict[str, Any] = {"window_left": 40, "softcap": True, "alibi": True, "sinks": True}
Result = tuple[torch.Tensor, torch.Tensor]

# Weights are exponentials in fp32 of differences of at most 8, whose own rounding counts.
SUMMED = 2.0**-19

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("merging") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


def part(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Result:
    """Some result: out (batch, seqlen, num_heads, d) and lse (batch, num_heads, seqlen)."""
    generator = torch.Generator().manual_seed(seed)
    out = torch.randn(shape, generator=generator).to(dtype)
    lse = torch.randn(shape[0], shape[2], shape[1], generator=generator) * 2
    return out, lse.clamp(-4, 4)


def expected(a: Result, b: Result) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In fp64, with the sum of magnitudes."""
    (out_a, lse_a), (out_b, lse_b) = a, b
    lse = torch.logaddexp(lse_a.double(), lse_b.double())
    weights = [(each.double() - lse).exp().transpose(1, 2)[..., None] for each in (lse_a, lse_b)]
    outs = (out_a.double(), out_b.double())
    out, size = (
        sum(w * f(o) for w, o in zip(weights, outs, strict=True)) for f in (torch.clone, torch.abs)
    )
    assert isinstance(out, torch.Tensor) and isinstance(size, torch.Tensor)
    return out, lse, size


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [16, 40, 128])
def test_rows_are_weighed_by_their_sums(
    module: ModuleType, dtype: torch.dtype, head_dim: int
) -> None:
    a, b = (part(2, 7, 3, head_dim, seed=seed, dtype=dtype) for seed in (1, 2))
    out, lse = module.merge(*a, *b)
    right, right_lse, size = expected(a, b)
    unit = torch.finfo(dtype).eps
    assert out.dtype == dtype and out.shape == a[0].shape and lse.shape == a[1].shape
    assert ((out.double() - right).abs() <= unit * right.abs() + SUMMED * size).all()
    torch.testing.assert_close(lse.double(), right_lse, rtol=2**-20, atol=2**-20)


def split(inputs: Inputs, at: int) -> list[Inputs]:
    """The inputs with the keys before a place, and with those from it on."""
    p, keys = inputs.problem, inputs.problem.seqlen_k
    return [
        replace(inputs, problem=replace(p, seqlen_k=len_), k=inputs.k[:, span], v=inputs.v[:, span])
        for span, len_ in ((slice(at), at), (slice(at, None), keys - at))
    ]


def test_two_parts_of_the_keys_merged_are_the_whole(module: ModuleType) -> None:  # case B50
    problem = Problem("prefill", "fp32", 2, 4, 2, 32, 40, 90, causal=False)
    inputs = make_inputs(problem)
    parts = [module.prefill(each.q, each.k, each.v, return_lse=True) for each in split(inputs, 60)]
    verdict = Budget(inputs).judge(*module.merge(*parts[0], *parts[1]))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("on", [{}, *({name: ALL[name]} for name in ALL), ALL], ids=str)
def test_a_shared_prefix_and_what_follows_it_are_merged_into_the_whole(
    module: ModuleType, on: dict[str, Any]
) -> None:
    """Positions tell where the pages of either part stand, for windows and slopes to be right."""
    shape: dict[str, Any] = {"batch": 3, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32}
    shape |= {"seqlen_q": 2, "seqlen_k": 96, "page_size": 16, "pages": "shared", "dtype": "fp32"}
    inputs = make_inputs(Problem("decode", **shape, **on), lengths=[96, 50, 81])
    table, lengths = inputs.block_table, inputs.cache_seqlens
    assert table is not None and lengths is not None
    assert (table[:, :3] == table[0, :3]).all()  # half of seqlen_k is shared

    def part(columns: slice, with_sinks: bool) -> Result:
        positions = torch.arange(6, dtype=torch.int32)[columns].repeat(3, 1)
        return module.decode(
            *(inputs.q, inputs.k, inputs.v, lengths),
            block_table=table[:, columns].contiguous(),
            page_positions=positions,
            window=inputs.problem.window,
            softcap=inputs.softcap,
            alibi_slopes=inputs.alibi_slopes,
            sinks=inputs.sinks if with_sinks else None,
            return_lse=True,
        )

    merged = module.merge(*part(slice(0, 3), False), *part(slice(3, 6), True))
    verdict = Budget(inputs).judge(*merged)
    assert verdict.correct, verdict.reason
    assert not Budget(inputs).judge(*part(slice(3, 6), True)).correct


def test_a_part_without_keys_says_nothing_whatever_it_holds(module: ModuleType) -> None:
    (out, lse), (_, nothing) = part(1, 5, 2, 16, seed=1), part(1, 5, 2, 16, seed=2)
    spoilt = torch.full_like(out, math.nan)
    nothing = nothing.fill_(-math.inf)
    for merged in (
        module.merge(out, lse, spoilt, nothing),
        module.merge(spoilt, nothing, out, lse),
    ):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
    neither, lse = module.merge(spoilt, nothing, spoilt, nothing)
    assert (neither == 0).all() and (lse == -math.inf).all()


def test_weights_of_rows_far_from_zero_do_not_overflow(module: ModuleType) -> None:
    (out_a, lse), (out_b, _) = part(1, 5, 2, 16, seed=1), part(1, 5, 2, 16, seed=2)
    for far in (2e4, -2e4):
        merged, merged_lse = module.merge(out_a, lse * 0 + far, out_b, lse * 0 + far)
        torch.testing.assert_close(merged, (out_a + out_b) / 2, rtol=2**-19, atol=2**-19)
        torch.testing.assert_close(merged_lse, lse * 0 + far + math.log(2), rtol=2**-20, atol=0)


def test_every_layout_and_any_strides_give_the_same_bits(module: ModuleType) -> None:
    a, b = part(1, 7, 3, 40, seed=1), part(1, 7, 3, 40, seed=2)
    out, lse = module.merge(*a, *b)
    heads_first = [each for o, s in (a, b) for each in (o.transpose(1, 2), s)]
    other, other_lse = module.merge(*heads_first, layout="bhsd")
    assert torch.equal(other.transpose(1, 2), out) and torch.equal(other_lse, lse)
    packed = [each[0] for each in (*a, *b)]
    other, other_lse = module.merge(*packed, layout="thd")
    assert torch.equal(other, out[0]) and torch.equal(other_lse, lse[0])
    steps = [each for o, s in (a, b) for each in (o[:, 3], s[:, :, 3])]  # of decode, strided
    other, other_lse = module.merge(*steps)
    assert torch.equal(other, out[:, 3]) and torch.equal(other_lse, lse[:, :, 3])


def test_no_rows_at_all_are_merged_to_none(module: ModuleType) -> None:
    out, lse = torch.zeros(0, 2, 16), torch.zeros(2, 0)
    merged, merged_lse = module.merge(out, lse, out, lse, layout="thd")
    assert merged.shape == out.shape and merged_lse.shape == lse.shape
