"""A bias of chunks over pages in the interpreter: added by query and key of the own sequence."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from test_prefill import config
from test_prefill_pages import LENGTHS, PACKED, assert_right, chunks, same_bits

from autoflash.inputs import Inputs

NAN, INF = float("nan"), float("inf")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def biased(lengths: list[int] | None = None, **changed: Any) -> Inputs:
    """Chunks with a bias of each head of each sequence, NaN past the keys of its own."""
    inputs = chunks(lengths, bias=True, **changed)
    p, table = inputs.problem, inputs.block_table
    assert table is not None and inputs.cache_seqlens is not None
    shape = (p.batch, p.num_heads, p.seqlen_q, table.shape[1] * p.page_size)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(inputs.q.dtype)
    dead = torch.arange(shape[3]) >= inputs.cache_seqlens[:, None]
    return replace(inputs, bias=bias.masked_fill(dead[:, None, None], NAN))


def bias_of(inputs: Inputs) -> torch.Tensor:
    assert inputs.bias is not None
    return inputs.bias


KINDS = [  # (mask and modifiers, page size, layouts of q and of pages, LOAD)
    ({}, 3, "bhsd", "hnd", "pointer"),
    ({}, 32, "thd", "nhd", "descriptor"),
    ({"causal": False, "softcap": True}, 64, "bshd", "hnd", "descriptor"),
    ({"causal": False}, 5, "thd", "nhd", "pointer"),
    ({"window_left": 20, "sinks": True}, 16, "bshd", "nhd", "pointer"),
    ({"causal": False, "window_left": 9, "window_right": 30}, 32, "thd", "hnd", "pointer"),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_bias_of_chunks_is_right_under_any_mask(kind: tuple) -> None:
    on, page_size, layout, kv_layout, load = kind
    fields = {"page_size": page_size, "layout": layout, "kv_layout": kv_layout}
    assert_right(biased(**fields, **on), config(LOAD=load))
    assert_right(chunks(**fields, **on, bias=True), config(LOAD=load, BLOCK_M=16))  # of all


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_types_and_wide_rows_are_right(dtype: str) -> None:
    fields = {"dtype": dtype, "num_heads": 6, "num_kv_heads": 2, "head_dim": 40}
    assert_right(biased([41], **fields, head_dim_v=24), config(BLOCK_M=16))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_with_equal_keys_lse_is_that_of_the_biases_a_query_sees(layout: str) -> None:
    inputs = biased(dtype="fp32", layout=layout, page_size=3)
    _, lse = run(replace(inputs, k=inputs.k.nan_to_num() * 0), config())
    assert lse is not None
    pairs = PACKED if layout == "thd" else [(40, keys) for keys in LENGTHS]
    row = 0
    for b, (rows, keys) in enumerate(pairs):
        own = lse[:, row : row + rows] if layout == "thd" else lse[b]
        row += rows
        for i in range(rows):
            seen = max(0, i + 1 + keys - rows)
            expected = bias_of(inputs)[b, :, i, :seen].logsumexp(dim=1)
            torch.testing.assert_close(own[:, i], expected, rtol=2**-20, atol=2**-19)


@pytest.mark.parametrize("shape", [(), (112,), (40, 1), (2, 1, 112), (2, 1, 40, 1)], ids=str)
def test_a_bias_is_broadcast_along_axes_of_one_and_any_view(shape: tuple[int, ...]) -> None:
    inputs = chunks([97, 41], bias=True)
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(1)).half()
    whole = bias.expand(2, 2, 40, 112).permute(1, 3, 0, 2).contiguous().permute(2, 0, 3, 1)
    assert same_bits(replace(inputs, bias=bias), replace(inputs, bias=whole), config())
    assert_right(replace(inputs, bias=bias), config())


@pytest.mark.parametrize("causal", [True, False])
def test_minus_infinity_hides_keys_and_whole_rows(causal: bool) -> None:
    inputs = biased([97, 41], causal=causal)
    bias = bias_of(inputs).clone()
    bias[0, :, 5] = bias[1, 1, 33] = bias[0, :, :, 10:70] = -INF
    hidden = replace(inputs, bias=bias)
    assert_right(hidden, config())
    out, lse = run(hidden, config())
    assert lse is not None and (lse[0, :, 5] == -INF).all() and (lse[1, 1, 33] == -INF).all()
    assert (out[0, 5] == 0).all() and (out[1, 33, 1] == 0).all()


def test_where_no_key_is_seen_a_bias_may_hold_anything() -> None:
    inputs = biased([97, 40, 0], window_left=20)
    lengths = torch.tensor([97, 40, 0])[:, None]
    positions = lengths - 40 + torch.arange(40)
    after = torch.arange(112) - positions[:, None, :, None]
    hidden = (after > 0) | (after < -20)
    for dead in (NAN, INF):
        spoilt = bias_of(inputs).masked_fill(hidden, dead)
        assert same_bits(inputs, replace(inputs, bias=spoilt), config())


def test_a_bias_follows_the_key_and_not_its_page() -> None:
    inputs = biased([97, 41], page_size=16)
    assert inputs.block_table is not None
    place = torch.arange(len(inputs.k)).flip(0)
    table = inputs.block_table
    table = place[table.clamp(max=len(place) - 1).long()].int().where(table < len(place), table)
    moved = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
    assert same_bits(inputs, moved, config())


# A bias of which the last key that counts is the last that may be read: what follows is forbidden.
AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
from dataclasses import replace
import torch
sys.path[:0] = [sys.argv[1]]
from test_prefill import config
from test_prefill_pages import chunks, run

pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = 3 * mmap.PAGESIZE
forbidden = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0)
assert forbidden == 0
memory = torch.frombuffer(pages, dtype=torch.float16, count=2 * mmap.PAGESIZE)
for on in ({}, {"causal": False}, {"window_left": 20}):
    inputs = chunks([97], page_size=16, num_heads=1, bias=True, **on)
    bias = memory.as_strided((1, 1, 40, 112), (0, 0, 97, 1), end // 2 - 40 * 97)
    bias[..., :97].copy_(inputs.bias[..., :97])
    run(replace(inputs, bias=bias), config(BLOCK_N=64))
"""


def test_a_bias_is_not_read_past_the_last_key_nor_the_last_query() -> None:
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
