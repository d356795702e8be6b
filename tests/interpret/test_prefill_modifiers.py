"""Softcap, ALiBi, biases and sinks of the portable prefill family in the interpreter."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.family import samples
from autoflash.families.prefill import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

LOADS = ("pointer", "descriptor")
MODIFIERS = ("softcap", "alibi", "bias", "sinks")
# biases of packed sequences and over pages have tests of their own
APART = [each for each in samples(FAMILY) if each.bias and (each.varlen or each.paged)]
ON = [each for each in samples(FAMILY) if each.modifiers and each not in APART]

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def config(**changed: int | str) -> Config:
    knobs: dict[str, int | str] = {"BLOCK_M": 64, "BLOCK_N": 32, "LOAD": "pointer"}
    knobs |= {"HEAD_GROUP_MIB": 4, "num_warps": 4, "num_stages": 2}
    return Config.of("prefill", knobs | changed)


def problem(seqlen_q: int, seqlen_k: int, *modifiers: str, **changed: int | str) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 16, "causal": True, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("prefill", **(fields | dict.fromkeys(modifiers, True) | changed))


def assert_right(inputs: Inputs, chosen: Config, softmax_scale: float | None = None) -> None:
    verdict = Budget(inputs, softmax_scale).judge(*run(inputs, chosen, softmax_scale=softmax_scale))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


def shifted(inputs: Inputs, by: float) -> Inputs:
    """The inputs with a bias that adds the same to every score."""
    p = replace(inputs.problem, bias=True)
    return replace(inputs, problem=p, bias=torch.full((1, 1, 1, 1), by, dtype=inputs.q.dtype))


@pytest.mark.parametrize("sample", ON, ids=lambda p: FAMILY.variant(p).name)
@pytest.mark.parametrize("lengths", [(70, 100), (100, 70)], ids=str)
def test_every_combination_of_mask_and_modifiers_is_right(
    sample: Problem, lengths: tuple[int, int]
) -> None:
    """Rows without a visible key, whole tiles and parts of tiles, several heads and sequences."""
    fields: dict[str, Any] = dict(zip(("seqlen_q", "seqlen_k"), lengths, strict=True))
    window = (33, 20) if sample.windowed else (-1, -1)
    fields |= dict(zip(("window_left", "window_right"), window, strict=True))
    fields |= dict.fromkeys(("dtype", "kv_dtype", "out_dtype"), "fp16")
    fields |= {"batch": 2, "num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16}
    p = replace(sample, **fields)
    assert_right(make_inputs(p), config(BLOCK_M=32))


@pytest.mark.parametrize("modifier", MODIFIERS)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_types_layouts_and_loads_are_right(modifier: str, dtype: str, layout: str) -> None:
    for head_dim, kind in zip((40, 64), LOADS, strict=True):
        p = problem(70, 100, modifier, dtype=dtype, layout=layout, batch=2, head_dim=head_dim)
        assert_right(make_inputs(p), config(LOAD=kind))


@pytest.mark.parametrize("modifier", MODIFIERS)
def test_a_modifier_changes_the_result(modifier: str) -> None:
    """What the other tests find right is not the plain attention."""
    plain = make_inputs(problem(40, 70))
    verdict = Budget(plain).judge(*run(make_inputs(problem(40, 70, modifier)), config()))
    assert not verdict.correct


@pytest.mark.parametrize("softcap", [0.01, 1.0, 30.0, 1e4])
@pytest.mark.parametrize("softmax_scale", [None, 0.0, 3.0, 1000.0])
def test_scores_are_scaled_before_they_are_capped(  # case B44
    softcap: float, softmax_scale: float
) -> None:
    inputs = replace(make_inputs(problem(40, 70, "softcap")), softcap=softcap)
    assert_right(inputs, config(), softmax_scale)


@pytest.mark.parametrize("window_left", [-1, 10])
def test_what_a_mask_hides_is_hidden_whatever_the_cap(window_left: int) -> None:  # case B44
    """Capped after the mask, a hidden key would count exp(-softcap)."""
    p = problem(40, 70, "softcap", dtype="fp32", window_left=window_left)
    inputs = replace(make_inputs(p), softcap=0.5)
    inputs.k.zero_()
    _, lse = run(inputs, config())
    assert lse is not None
    last = torch.arange(31, 71)
    visible = last if window_left < 0 else torch.full_like(last, window_left + 1)
    assert torch.equal(lse.exp().round(), visible.float().expand_as(lse))


def test_a_cap_is_that_of_tanh_within_seven_units_in_the_last_place() -> None:
    """With one key lse is its score: 1.0, scaled to every size, then capped at 1."""
    inputs = make_inputs(problem(1, 1, "softcap", dtype="fp32", num_heads=1))
    for tensor in (inputs.q, inputs.k):
        tensor.zero_()[..., 0] = 1.0
    one = replace(inputs, softcap=1.0)
    for x in torch.logspace(-6, 2, 60, dtype=torch.float32).tolist():
        _, lse = run(one, config(BLOCK_M=16, BLOCK_N=16), softmax_scale=x)
        assert lse is not None
        # a unit is 2**-24 here: rounding to base 2 and back takes two more
        assert abs(lse.item() / math.tanh(x) - 1.0) < 9 * 2**-24, x


@pytest.mark.parametrize("lengths", [(33, 90), (90, 33), (64, 64)], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_alibi_counts_from_positions_at_the_bottom_right(  # case B45
    lengths: tuple[int, int], causal: bool
) -> None:
    """K = 0 leaves the penalties alone."""
    p = problem(*lengths, "alibi", dtype="fp32", causal=causal)
    inputs = make_inputs(p)
    inputs.k.zero_()
    _, lse = run(inputs, config())
    position = torch.arange(p.seqlen_q) + p.seqlen_k - p.seqlen_q
    distance = (torch.arange(p.seqlen_k)[None] - position[:, None]).double()
    slopes = torch.tensor([2.0**-4, 2.0**-8]).double()  # of two heads
    scores = -slopes[:, None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance > 0, -math.inf)
    assert lse is not None
    torch.testing.assert_close(lse[0].double(), scores.logsumexp(-1), rtol=2**-20, atol=2**-20)


def test_slopes_may_be_those_of_heads_or_of_each_sequence() -> None:  # case B45
    inputs = make_inputs(problem(40, 70, "alibi", batch=3))
    assert inputs.alibi_slopes is not None and len(set(inputs.alibi_slopes[:, 0].tolist())) == 3
    assert_right(inputs, config())
    of_heads = inputs.alibi_slopes[1]
    assert_right(replace(inputs, alibi_slopes=of_heads.expand(3, 2)), config())
    transposed = inputs.alibi_slopes.T.contiguous().T
    out, _ = run(replace(inputs, alibi_slopes=transposed), config())
    assert torch.equal(out, run(inputs, config())[0])


BROADCAST = [
    (2, 4, 40, 70),
    (1, 4, 40, 70),
    (2, 1, 40, 70),
    (2, 4, 1, 70),
    (2, 4, 40, 1),
    (1, 1, 40, 70),
    (1, 1, 1, 70),
    (1, 1, 1, 1),
    (40, 70),
    (4, 1, 70),
]


@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_a_bias_is_broadcast_along_axes_of_one(shape: tuple[int, ...]) -> None:
    inputs = make_inputs(problem(40, 70, "bias", batch=2, num_heads=4))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    assert_right(replace(inputs, bias=bias), config())
    full = bias.expand(2, 4, 40, 70).contiguous()
    out, _ = run(replace(inputs, bias=bias), config())
    assert torch.equal(out, run(replace(inputs, bias=full), config())[0])


def test_a_bias_may_be_a_view_of_any_strides_and_its_neighbours_are_not_read() -> None:
    inputs = make_inputs(problem(40, 70, "bias", batch=2, num_heads=4))
    plain = torch.randn(2, 4, 40, 70, generator=torch.Generator().manual_seed(1)).half()
    views = [plain.mT.contiguous().mT]
    for pad in ((0, 3), (2, 0, 0, 5)):
        wider = torch.nn.functional.pad(plain, pad, value=float("nan"))
        start = pad[0]
        views.append(wider[:, :, :40, start : start + 70])
    expected, _ = run(replace(inputs, bias=plain), config())
    for view in views:
        assert torch.equal(run(replace(inputs, bias=view), config())[0], expected)


@pytest.mark.parametrize("causal", [True, False])
def test_a_bias_of_minus_infinity_hides_keys_and_whole_rows(causal: bool) -> None:
    inputs = make_inputs(problem(70, 100, "bias", causal=causal))
    assert inputs.bias is not None
    bias = inputs.bias.clone()
    bias[..., 5, :] = bias[..., 33, :] = bias[..., :, 64:90] = float("-inf")
    hidden = replace(inputs, bias=bias)
    assert_right(hidden, config())
    out, lse = run(hidden, config())
    assert lse is not None and (lse[..., [5, 33]] == float("-inf")).all()
    assert (out[:, [5, 33]] == 0).all()


def test_a_bias_where_the_mask_hides_may_hold_anything() -> None:
    inputs = make_inputs(problem(70, 100, "bias", window_left=20))
    assert inputs.bias is not None
    after = torch.arange(100)[None] - torch.arange(30, 100)[:, None]
    bias = inputs.bias.masked_fill((after > 0) | (after < -20), float("nan"))
    out, lse = run(replace(inputs, bias=bias), config())
    expected, expected_lse = run(inputs, config())
    assert lse is not None and expected_lse is not None
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_a_constant_bias_moves_lse_and_not_out() -> None:
    inputs = make_inputs(problem(40, 70))
    (out, lse), (same, moved) = (run(shifted(inputs, by), config()) for by in (0.0, 8.0))
    assert lse is not None and moved is not None
    assert torch.equal(out, same) or Budget(inputs).judge(same, lse).correct
    torch.testing.assert_close(moved, lse + 8.0, rtol=0, atol=2**-19)


def test_a_sink_is_a_key_that_all_see_and_whose_value_is_zero() -> None:  # case B29
    """It is not scaled, and counted once however many tiles there are."""
    plain = make_inputs(problem(70, 130, dtype="fp32", causal=False))
    p = replace(plain.problem, sinks=True)
    inputs = replace(plain, problem=p, sinks=torch.tensor([1.5, -2.0]))
    (_, lse), (bare, bare_lse) = run(inputs, config()), run(plain, config())
    assert lse is not None and bare_lse is not None and inputs.sinks is not None
    with_sink = torch.logaddexp(bare_lse.double(), inputs.sinks[:, None].double())
    torch.testing.assert_close(lse.double(), with_sink, rtol=2**-20, atol=2**-20)
    share = (bare_lse - with_sink).exp().transpose(1, 2)[..., None]
    verdict = Budget(inputs).judge((bare * share).float(), lse)
    assert verdict.correct, verdict.reason
    assert_right(inputs, config())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sink", [-1e4, -3.0, 0.0, 1e3])
def test_a_row_without_a_visible_key_is_zero_and_its_lse_the_sink(  # case B29
    sink: float, dtype: torch.dtype
) -> None:
    inputs = make_inputs(problem(130, 3, "sinks"))
    sinks = torch.tensor([sink, 2.0], dtype=dtype)
    chosen = replace(inputs, sinks=sinks)
    out, lse = run(chosen, config())
    assert lse is not None
    torch.testing.assert_close(lse[0, :, :127], sinks.float()[:, None].expand(2, 127))
    assert (out[:, :127] == 0).all()
    assert_right(chosen, config())


def test_a_sink_of_minus_infinity_is_none() -> None:
    inputs = make_inputs(problem(130, 70, "sinks"))
    none = replace(inputs, sinks=torch.full((2,), float("-inf")))
    out, lse = run(none, config())
    plain = replace(inputs, problem=replace(inputs.problem, sinks=False), sinks=None)
    expected, expected_lse = run(plain, config())
    assert lse is not None and expected_lse is not None
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)


def test_no_keys_at_all_leave_the_sink_alone() -> None:
    for modifiers in (("sinks",), ("sinks", "softcap", "bias")):
        inputs = make_inputs(problem(17, 0, *modifiers))
        out, lse = run(inputs, config())
        assert lse is not None and inputs.sinks is not None and (out == 0).all()
        torch.testing.assert_close(lse, inputs.sinks[None, :, None].expand_as(lse))


def test_logits_far_from_zero_keep_their_weights_under_every_modifier() -> None:
    for modifiers in (("alibi",), ("bias", "sinks"), ("alibi", "sinks")):
        inputs = make_inputs(problem(37, 37, *modifiers, dtype="bf16", head_dim=128))
        for sign in (-1.0, 1.0):
            inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * 544.0
            assert_right(inputs, config())


# A bias whose last element is the last that may be read: the page after it is forbidden.
AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
from dataclasses import replace
import torch
sys.path[:0] = [sys.argv[1]]
from test_prefill_modifiers import config, make_inputs, problem, run

inputs = make_inputs(problem(40, 70, "bias"))
pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = 3 * mmap.PAGESIZE
forbidden = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0)
assert forbidden == 0
bias = torch.frombuffer(pages, dtype=torch.float16, count=40 * 70, offset=end - 2 * 40 * 70)
bias = bias.view(1, 1, 40, 70).copy_(inputs.bias[:, :1])
run(replace(inputs, bias=bias), config(BLOCK_M=int(sys.argv[2]), BLOCK_N=64))
"""


@pytest.mark.parametrize("block_m", [8, 64])
def test_a_bias_is_not_read_past_its_last_key_nor_its_last_query(block_m: int) -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, here, str(block_m)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
