"""A bias of decode in the interpreter: added by key position, read below the length alone."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoding import NAN, check, config, decode, each_choice, every_config, problem, same_bits

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs

LAST = Config.of("decode_last", {k: v for k, v in config("group").knobs if k != "COMBINE_WARPS"})
INF = float("inf")
ALL: dict[str, Any] = {"window_left": 40, "softcap": True, "sinks": True}
EDGES = [100, 0, 1, 15, 16, 17, 31, 32, 33, 64]  # of pages of 16 and of tiles of 32

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


def biased(
    lengths: list[int],
    num_heads: int = 3,
    num_kv_heads: int = 1,
    poison: bool = True,
    **fields: Any,
) -> Inputs:
    """Inputs with a bias of each head of each sequence, NaN past the lengths."""
    p = problem(len(lengths), num_heads, num_kv_heads, bias=True, **fields)
    return make_inputs(p, lengths=lengths, poison=poison)


def bias_of(inputs: Inputs) -> torch.Tensor:
    assert inputs.bias is not None
    return inputs.bias


def equal_keys(inputs: Inputs, **changed: Any) -> Inputs:
    """Every score is what is added to it."""
    return replace(inputs, k=inputs.k.nan_to_num() * 0, **changed)


@each_choice
def test_lengths_around_every_edge_of_tiles_and_pages_are_right(config: Config) -> None:
    for seqlen_q, page_size in ((1, 16), (4, 0)):
        inputs = biased(EDGES, 4, 2, page_size=page_size, seqlen_q=seqlen_q)
        check(inputs, config, splits=3)


@every_config
def test_a_bias_meets_windows_softcap_and_sinks(config: Config) -> None:
    for seqlen_q, page_size in ((1, 16), (3, 0)):
        check(biased([100, 0, 33, 1], 6, 2, seqlen_q=seqlen_q, page_size=page_size, **ALL), config)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_programs_that_merge_and_other_types_are_right(dtype: str) -> None:
    for chosen, seqlen_q in ((LAST, 2), (config(), 1)):
        inputs = biased([100, 17, 64], 6, 1, head_dim=40, dtype=dtype, seqlen_q=seqlen_q)
        check(inputs, chosen, splits=3)
    check(make_inputs(inputs.problem, lengths=[100, 17, 64], wide_rows=3), LAST, splits=3)


def test_quantised_caches_and_latent_attention_are_right() -> None:
    for kv_dtype, kv_scales in (("fp8_e4m3", "head"), ("int8", "token")):
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, "head_dim": 32, "page_size": 16}
        check(biased([100, 5, 64], 4, 2, **fields), config(), splits=3)
    check(biased([100, 5, 64], 4, 2, **fields, seqlen_q=3), LAST, splits=3)
    knobs = {k: v for k, v in config("group").knobs if k != "SWAP"} | {"BLOCK_M": 16}
    latent = {"head_dim": 576, "head_dim_v": 512, "dtype": "bf16", "seqlen_q": 2}
    check(biased([100, 0, 33], **latent), Config.of("decode_latent", knobs), splits=3)


@each_choice
def test_with_equal_keys_lse_is_that_of_the_biases_below_each_querys_own_key(
    config: Config,
) -> None:
    """So no key is left out, counted twice or biased by another's."""
    for seqlen_q in (1, 3):
        inputs = equal_keys(biased(EDGES, dtype="fp32", page_size=16, seqlen_q=seqlen_q))
        _, lse = decode(inputs, config, splits=3)
        for b, keys in enumerate(EDGES):
            for i in range(seqlen_q):
                seen = max(0, keys - seqlen_q + i + 1)
                expected = bias_of(inputs)[b, :, i, :seen].logsumexp(dim=1)
                torch.testing.assert_close(lse[b, :, i], expected, rtol=2**-20, atol=2**-20)


@every_config
def test_a_bias_is_added_to_capped_scores_and_not_scaled(config: Config) -> None:
    inputs = replace(biased([70], softcap=True), softcap=0.5)
    for softmax_scale in (0.0, 1000.0):
        check(inputs, config, softmax_scale=softmax_scale)


# (batch, num_heads, seqlen_q, keys) of which any may be 1, and the first ones left out
BROADCAST = [(), (112,), (3, 1), (4, 1, 112), (1, 4, 3, 1), (2, 1, 1, 112), (2, 1, 3, 1)]


@pytest.mark.parametrize("config", [config("split", 0), LAST], ids=["split", "last"])
@pytest.mark.parametrize("shape", BROADCAST, ids=str)
def test_a_bias_is_broadcast_along_axes_of_one(shape: tuple[int, ...], config: Config) -> None:
    inputs = biased([100, 33], 4, 2, seqlen_q=3, page_size=16)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    whole = bias.expand(2, 4, 3, 112).contiguous()
    results = [decode(replace(inputs, bias=each), config) for each in (bias, whole)]
    assert same_bits(*results)
    assert Budget(replace(inputs, bias=whole)).judge(*results[0]).correct


@each_choice
def test_a_bias_may_be_a_view_of_any_strides(config: Config) -> None:
    inputs = biased([100, 33], 4, 2, seqlen_q=3)
    plain, expected = bias_of(inputs), decode(inputs, config)
    wider = torch.nn.functional.pad(plain, (3, 4, 1, 0), value=NAN)[:, :, 1:, 3:-4]
    heads_last = plain.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    for view in (wider, heads_last):
        assert same_bits(decode(replace(inputs, bias=view), config), expected)


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
def test_steps_of_a_bias_beyond_32_bits_are_followed(axis: int) -> None:
    """Though no single step is."""
    inputs = biased([100, 70, 33], seqlen_q=3)
    near, chosen = bias_of(inputs), config("group", axis % 2)
    steps = [9, 3, 1, 27] if axis == 3 else list(near.stride())
    steps[axis] = 2**31 // (near.shape[axis] - 1) + 8  # the last one lies beyond
    memory = torch.empty(2**31 + 2**12, dtype=near.dtype)  # of which little is touched
    far = memory.as_strided(near.shape, steps).copy_(near)
    assert same_bits(decode(replace(inputs, bias=far), chosen), decode(inputs, chosen))


@pytest.mark.parametrize(
    ("config", "sinks"), [(config("split", 0), False), (LAST, True), (config("group", 1), False)]
)
def test_minus_infinity_hides_keys_and_whole_rows(config: Config, sinks: bool) -> None:
    """Of some tiles and parts all keys are hidden, and of some rows, which are as empty ones."""
    for seqlen_q in (1, 3):
        inputs = biased([100, 64, 33], 4, 2, seqlen_q=seqlen_q, sinks=sinks)
        bias = bias_of(inputs).clone()
        bias[0, :, :, 3:70] = bias[1, 2] = bias[2, :, seqlen_q - 1] = -INF
        hidden = replace(inputs, bias=bias)
        check(hidden, config, splits=4)
        out, lse = decode(hidden, config, splits=4)
        assert (out[1, :, 2] == 0).all() and (out[2, seqlen_q - 1] == 0).all()
        if not sinks:
            assert (lse[1, 2] == -INF).all() and (lse[2, :, seqlen_q - 1] == -INF).all()


@each_choice
def test_a_bias_of_minus_infinity_leaves_what_a_window_would(config: Config) -> None:
    inputs = biased([100, 33], dtype="fp32")
    keys = torch.arange(100)[None]
    old = keys < torch.tensor([[100], [33]]) - 21
    only = torch.zeros(2, 1, 1, 100).masked_fill(old[:, None, None], -INF)
    p = replace(inputs.problem, bias=False, window_left=20)
    seen = Budget(replace(inputs, problem=p, bias=None))
    verdict = seen.judge(*decode(replace(inputs, bias=only), config))
    assert verdict.correct, verdict.reason


@each_choice
@pytest.mark.parametrize("seqlen_q", [1, 3])
def test_where_no_key_is_seen_a_bias_may_hold_anything(config: Config, seqlen_q: int) -> None:
    """Past lengths, where a later query's key stands, and before all windows."""
    lengths = [100, 0, 33, 64]
    inputs = biased(lengths, seqlen_q=seqlen_q, page_size=16, poison=False, window_left=40)
    positions = torch.tensor(lengths)[:, None] - seqlen_q + torch.arange(seqlen_q)
    after = torch.arange(bias_of(inputs).shape[3]) - positions[:, None, :, None]
    expected = decode(inputs, config, splits=3)
    for dead in (NAN, INF):
        spoilt = bias_of(inputs).masked_fill((after > 0) | (after < -40), dead)
        assert same_bits(decode(replace(inputs, bias=spoilt), config, splits=3), expected)


@every_config
def test_a_bias_follows_the_key_and_not_its_page(config: Config) -> None:
    inputs = biased([100, 33, 64], 4, 2, page_size=16, poison=False)
    table, pages = inputs.block_table, len(inputs.k)
    assert table is not None
    place = torch.arange(pages).flip(0)
    moved = replace(
        inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=place[table.long()].int()
    )
    assert same_bits(decode(moved, config), decode(inputs, config))
    p = replace(inputs.problem, page_size=0, seqlen_k=112)
    k, v = (cache[table.long()].flatten(1, 2) for cache in (inputs.k, inputs.v))
    whole = Inputs(p, inputs.q, k, v, inputs.cache_seqlens, bias=inputs.bias)
    as_long = replace(inputs, problem=replace(inputs.problem, seqlen_k=112))
    assert same_bits(decode(whole, config), decode(as_long, config))


@each_choice
def test_of_chosen_pages_a_bias_is_that_of_positions_in_the_whole_sequence(config: Config) -> None:
    for seqlen_q in (1, 3):
        fields = {"pages": "chosen", "page_size": 16, "seqlen_k": 112, "seqlen_q": seqlen_q}
        inputs = biased([200, 1, 97], 4, 2, **fields, sinks=True)
        assert bias_of(inputs).shape[3] == 200
        check(inputs, config, splits=3)


def test_a_bias_changes_the_result() -> None:
    """What the other tests find right is not the plain attention."""
    inputs = biased([100, 60])
    p = replace(inputs.problem, bias=False)
    assert (
        not Budget(replace(inputs, problem=p, bias=None)).judge(*decode(inputs, config())).correct
    )


# A bias of which the last key that counts is the last that may be read: what follows is forbidden.
AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
from dataclasses import replace
import torch
sys.path[:0] = [sys.argv[1]]
from decoding import config, decode
from test_decode_bias import LAST, biased

pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = 3 * mmap.PAGESIZE
forbidden = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0)
assert forbidden == 0
memory = torch.frombuffer(pages, dtype=torch.float16, count=2 * mmap.PAGESIZE)
for chosen, seqlen_q in ((config("split", 0), 1), (config("group", 1), 2), (LAST, 2)):
    inputs = biased([70], 3, 1, seqlen_q=seqlen_q, page_size=16)
    rows = 3 * seqlen_q  # of 112 keys each, of the last one 70
    shape, steps = (1, 3, seqlen_q, 112), (0, seqlen_q * 70, 70, 1)
    bias = memory.as_strided(shape, steps, end // 2 - rows * 70)
    bias[..., :70].copy_(inputs.bias[..., :70])
    decode(replace(inputs, bias=bias), chosen, splits=2)
"""


def test_a_bias_is_not_read_past_the_length_nor_the_last_row() -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
