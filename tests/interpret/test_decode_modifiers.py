"""Windows, softcap, ALiBi and sinks of decode in the interpreter: alone, together, over parts."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from decoding import (
    NAN,
    check,
    config,
    decode,
    each_choice,
    every_config,
    gathered,
    problem,
    same_bits,
)

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.gpu import known
from autoflash.inputs import POISON_PAGE, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan

ALL: dict[str, Any] = {"window_left": 40, "softcap": True, "alibi": True, "sinks": True}
LAST = Config.of("decode_last", {k: v for k, v in config().knobs if k != "COMBINE_WARPS"})
every_end = pytest.mark.parametrize("config", [config(), LAST], ids=["combine", "last"])

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


def counted(p: Problem, lengths: list[int], **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """What K = 0 and V = [1, j] give: every visible key weighs the same."""
    inputs = make_inputs(p, lengths=lengths, poison=False)
    v = torch.zeros_like(inputs.v)
    v[..., 0], v[..., 1] = 1.0, torch.arange(p.seqlen_k)[None, :, None]
    return decode(replace(inputs, k=inputs.k * 0, v=v), **options)


@pytest.mark.parametrize("on", list(product((False, True), repeat=4))[1:], ids=str)
def test_every_combination_is_right_with_one_query_and_several(on: tuple[bool, ...]) -> None:
    given = {name: value for (name, value), is_on in zip(ALL.items(), on, strict=True) if is_on}
    for seqlen_q, chosen in ((1, config("split", 0)), (3, config("group", 1))):
        p = problem(4, 6, 2, seqlen_q=seqlen_q, page_size=16, **given)
        check(make_inputs(p, lengths=[100, 0, 33, 1]), chosen, splits=3)


@every_config
@pytest.mark.parametrize("seqlen_q", [1, 4])
def test_all_together_are_right_by_both_products_in_either_schedule(
    config: Config, seqlen_q: int
) -> None:
    p = problem(4, 4, 2, seqlen_q=seqlen_q, **ALL)
    check(make_inputs(p, lengths=[100, 64, 3, 41]), config, splits=5)


@every_end
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_all_together_are_right_in_other_types(config: Config, dtype: str) -> None:
    p = problem(3, 6, 1, head_dim=40, seqlen_q=2, dtype=dtype, page_size=16, **ALL)
    check(make_inputs(p, lengths=[100, 17, 64], wide_rows=8), config, splits=3)


@every_end
@pytest.mark.parametrize(
    ("kv_dtype", "kv_scales"), [("fp8_e4m3", "tensor"), ("int8", "head"), ("int8", "token")]
)
def test_all_together_are_right_over_quantised_caches(
    config: Config, kv_dtype: str, kv_scales: str
) -> None:
    for seqlen_q, page_size in ((1, 16), (3, 0)):
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, "page_size": page_size}
        p = problem(3, 4, 2, head_dim=32, seqlen_q=seqlen_q, **fields, **ALL)
        check(make_inputs(p, lengths=[100, 5, 64]), config, splits=3)


@pytest.mark.parametrize("modifier", ALL)
def test_a_modifier_changes_the_result(modifier: str) -> None:
    """What the other tests find right is not the plain attention."""
    p = problem(2, 4, 2)
    plain = make_inputs(p, lengths=[100, 60])
    on = make_inputs(replace(p, **{modifier: ALL[modifier]}), lengths=[100, 60])
    assert torch.equal(plain.q, on.q)
    assert not Budget(plain).judge(*decode(on, config())).correct


@each_choice
@pytest.mark.parametrize("left", [0, 1, 31, 32, 33, 500])
def test_the_left_edge_of_a_window_is_inclusive(  # case B22, case B42
    config: Config, left: int
) -> None:
    lengths = [100, 1, 32, 65]
    for seqlen_q in (1, 3):
        p = problem(4, seqlen_q=seqlen_q, dtype="fp32", window_left=left)
        out, lse = counted(p, lengths, config=config)
        for b, i in product(range(4), range(seqlen_q)):
            last = lengths[b] - seqlen_q + i
            seen = range(max(0, last - left), last + 1)
            if not seen:
                assert (lse[b, :, i] == float("-inf")).all() and (out[b, i] == 0).all()
                continue
            assert torch.equal(lse[b, :, i].exp().round(), torch.full((3,), float(len(seen))))
            mean = torch.full((3,), float(sum(seen)) / len(seen))
            torch.testing.assert_close(out[b, i, :, 1], mean, rtol=1e-5, atol=1e-5)


@every_config
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_keys_before_all_windows_may_be_gone(config: Config, seqlen_q: int) -> None:
    p = problem(2, seqlen_q=seqlen_q, seqlen_k=200, page_size=16, window_left=40)
    inputs = make_inputs(p, lengths=[200, 133])
    table = inputs.block_table
    assert table is not None
    k, v, spoilt = inputs.k.clone(), inputs.v.clone(), table.clone()
    for b, keys in enumerate((200, 133)):
        gone = keys - seqlen_q - 40
        for cache in (k, v):
            cache[table[b, gone // 16], : gone % 16] = NAN
        spoilt[b, : gone // 16] = POISON_PAGE
    others = decode(replace(inputs, k=k, v=v, block_table=spoilt), config, splits=3)
    assert same_bits(others, decode(inputs, config, splits=3))


@pytest.mark.parametrize("schedule", ["split", "group"])
def test_tiles_before_windows_are_skipped_and_in_no_part(schedule: str) -> None:
    """Else the first parts would hold nothing but keys that are hidden."""
    p = problem(1, seqlen_k=1000, window_left=150)
    inputs, made = make_inputs(p), []
    gpu = replace(known("NVIDIA_H200"), num_sms=64)

    def noted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made.append(torch.full(shape, NAN, dtype=dtype))
        return made[-1]

    out, lse = new_outputs(inputs)
    module = load(render(family_of("decode").variant(p)))
    plan = plan_of(module, inputs, out, lse, gpu, config(schedule), new_workspace=noted)
    run_plan(plan)
    lse_partial = made[1]
    parts = lse_partial.isfinite().all(dim=-1)
    assert parts.sum() == 6  # 151 keys that begin inside a tile of 32 touch six
    assert not (lse_partial == float("-inf")).any()
    assert plan[0][1] == (6,)


def test_paged_and_contiguous_windows_give_the_same_bits() -> None:
    p = problem(3, 4, 2, seqlen_k=200, seqlen_q=2, page_size=48, **ALL)
    paged = make_inputs(p, lengths=[47, 100, 200])
    flat = gathered(paged)
    on = {name: getattr(paged, name) for name in ("softcap", "alibi_slopes", "sinks")}
    assert same_bits(decode(paged, config()), decode(replace(flat, **on), config()))


@each_choice
@pytest.mark.parametrize("softcap", [0.01, 30.0])
@pytest.mark.parametrize("softmax_scale", [0.0, 3.0, 1000.0])
def test_scores_are_scaled_before_they_are_capped(  # case B44
    config: Config, softcap: float, softmax_scale: float
) -> None:
    inputs = replace(make_inputs(problem(1, softcap=True), lengths=[70]), softcap=softcap)
    check(inputs, config, softmax_scale=softmax_scale)


def test_what_a_window_hides_is_hidden_whatever_the_cap() -> None:  # case B44
    """Capped after the mask, a hidden key would count exp(-softcap)."""
    p = problem(1, seqlen_q=3, dtype="fp32", window_left=9, softcap=True)
    inputs = make_inputs(p, lengths=[70])
    _, lse = decode(replace(inputs, k=inputs.k.nan_to_num() * 0, softcap=0.5), config())
    torch.testing.assert_close(lse.exp(), torch.full_like(lse, 10.0))


@each_choice
def test_alibi_counts_from_the_position_of_each_query(config: Config) -> None:  # case B45
    """With K = 0 a key of distance d weighs exp(-slope * d)."""
    for seqlen_q in (1, 3):
        p = problem(2, seqlen_q=seqlen_q, dtype="fp32", alibi=True)
        inputs = make_inputs(p, lengths=[70, 33])
        inputs = replace(inputs, k=inputs.k.nan_to_num() * 0)
        assert inputs.alibi_slopes is not None
        _, lse = decode(inputs, config)
        for b, i in product(range(2), range(seqlen_q)):
            away = torch.arange([70, 33][b] - seqlen_q + i + 1)
            expected = (-inputs.alibi_slopes[b, :, None] * away).logsumexp(dim=1)
            torch.testing.assert_close(lse[b, :, i], expected, rtol=2**-20, atol=2**-20)


@every_end
def test_slopes_may_be_those_of_heads_alone_or_any_view(config: Config) -> None:  # case B45
    inputs = make_inputs(problem(3, 4, 2, seqlen_q=2, alibi=True), lengths=[70, 33, 5])
    assert inputs.alibi_slopes is not None
    slopes = inputs.alibi_slopes
    wider = torch.nn.functional.pad(slopes.T, (1, 2), value=NAN)[:, 1:4].T
    assert same_bits(decode(replace(inputs, alibi_slopes=wider), config), decode(inputs, config))
    check(replace(inputs, alibi_slopes=slopes[:1].expand(3, 4)), config)


@every_end
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_a_sink_counts_once_however_many_parts_there_are(  # case B29
    config: Config, splits: int
) -> None:
    plain = make_inputs(problem(2, seqlen_q=2, dtype="fp32"), lengths=[100, 33])
    on = replace(plain.problem, sinks=True)
    sinks = torch.tensor([1.5, -2.0, 40.0])
    (out, lse), (bare, bare_lse) = (
        decode(each, config, splits) for each in (replace(plain, problem=on, sinks=sinks), plain)
    )
    expected = torch.logaddexp(bare_lse.double(), sinks[:, None].double())
    torch.testing.assert_close(lse.double(), expected, rtol=2**-20, atol=2**-20)
    share = (bare_lse - expected).exp().transpose(1, 2)[..., None]
    torch.testing.assert_close(out.double(), bare * share, rtol=2**-17, atol=2**-20)


@every_end
@pytest.mark.parametrize("sink", [-1e4, 0.0, 1e3])
def test_a_row_without_a_key_is_zero_and_its_lse_the_sink(config: Config, sink: float) -> None:
    inputs = make_inputs(problem(3, seqlen_q=4, sinks=True), lengths=[0, 2, 100])
    sinks = torch.tensor([sink, 2.0, -1.0], dtype=torch.bfloat16)
    out, lse = decode(replace(inputs, sinks=sinks), config)
    for b, blind in ((0, 4), (1, 2)):
        expected = sinks.float()[:, None].expand(3, blind)
        torch.testing.assert_close(lse[b, :, :blind], expected, rtol=2**-20, atol=2**-20)
        assert (out[b, :blind] == 0).all()
    check(replace(inputs, sinks=sinks), config)


@every_end
@pytest.mark.parametrize("splits", [1, 3])
def test_a_sink_of_minus_infinity_is_none(config: Config, splits: int) -> None:
    inputs = make_inputs(problem(3, seqlen_q=2, sinks=True), lengths=[0, 1, 100])
    none = replace(inputs, sinks=torch.full((3,), float("-inf")))
    plain = replace(inputs, problem=replace(inputs.problem, sinks=False), sinks=None)
    assert same_bits(decode(none, config, splits), decode(plain, config, splits))


@each_choice
def test_logits_far_from_zero_keep_their_weights_under_every_modifier(config: Config) -> None:
    for on in ({"alibi": True, "sinks": True}, {"window_left": 20}):
        inputs = make_inputs(problem(1, head_dim=128, dtype="bf16", **on), poison=False)
        for sign in (-1.0, 1.0):
            inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * 544.0
            check(inputs, config)
