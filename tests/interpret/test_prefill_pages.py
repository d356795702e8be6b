"""Chunked prefill in the interpreter: queries over keys in pages, of lengths that no host knows."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from running import run
from test_prefill import LOADS, config

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.families.prefill import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.pages import POISON_PAGE
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module

H200 = gpus.known("NVIDIA_H200")
NAN = float("nan")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

# of a chunk of 40 queries: none, fewer than queries, as many, one more than pages and tiles have
LENGTHS = [0, 7, 40, 97]
# queries and keys of packed chunks: none of either, a step of decode, a prompt, more queries
PACKED = [(1, 65), (0, 5), (40, 40), (33, 97), (5, 0), (9, 3)]


def problem(**changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": len(LENGTHS), "num_heads": 2}
    fields |= {"num_kv_heads": 1, "head_dim": 16, "seqlen_q": 40, "seqlen_k": 97}
    fields |= {"page_size": 16, "lengths": "ragged", **changed}
    if fields.get("layout") == "thd":
        fields["batch"] = len(PACKED)
    return Problem("prefill", **fields)


def chunks(
    lengths: list[int] | None = None, seed: int = 0, poison: bool = True, **changed: Any
) -> Inputs:
    """Chunks of 40 queries, or the packed ones; what is dead is poisoned."""
    if changed.get("layout") == "thd":
        return make_inputs(problem(**changed), seed, lengths=PACKED, poison=poison)
    lengths = LENGTHS if lengths is None else lengths
    own = problem(batch=len(lengths), **changed)
    return make_inputs(own, seed, lengths=lengths, poison=poison)


def assert_right(inputs: Inputs, chosen: Config) -> None:
    verdict = Budget(inputs).judge(*run(inputs, chosen))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


def same_bits(inputs: Inputs, other: Inputs, chosen: Config) -> bool:
    pairs = zip(run(inputs, chosen), run(other, chosen), strict=True)
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


def tokens_first(cache: torch.Tensor, p: Problem) -> torch.Tensor:
    return cache.transpose(1, 2) if p.kv_layout == "hnd" else cache


ON = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_left": 20},
    "both sides": {"causal": False, "window_left": 9, "window_right": 30, "sinks": True},
    "modified": {"softcap": True, "alibi": True, "sinks": True},
}
KINDS = [  # (what is on, page size, layouts of q and of pages, LOAD)
    ("causal", 1, "bshd", "nhd", "pointer"),
    ("causal", 3, "bhsd", "hnd", "pointer"),
    ("causal", 16, "bshd", "hnd", "pointer"),
    ("causal", 64, "bshd", "nhd", "descriptor"),
    ("causal", 480, "thd", "hnd", "descriptor"),
    ("causal", 16, "thd", "nhd", "pointer"),
    ("full", 16, "bhsd", "nhd", "descriptor"),
    ("full", 32, "bshd", "nhd", "descriptor"),
    ("full", 5, "thd", "hnd", "pointer"),
    ("window", 16, "bshd", "nhd", "pointer"),
    ("window", 64, "thd", "hnd", "descriptor"),
    ("both sides", 3, "bshd", "nhd", "pointer"),
    ("both sides", 32, "thd", "nhd", "pointer"),
    ("modified", 16, "bshd", "hnd", "pointer"),
    ("modified", 32, "thd", "nhd", "descriptor"),
]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_chunks_over_pages_of_any_size_are_right_under_any_mask(kind: tuple) -> None:  # case B24
    on, page_size, layout, kv_layout, load = kind
    fields = {"page_size": page_size, "layout": layout, "kv_layout": kv_layout}
    assert_right(chunks(**fields, **ON[on]), config(LOAD=load))


@pytest.mark.parametrize(("dtype", "heads"), [("bf16", (6, 2)), ("fp32", (7, 1))], ids=str)
def test_types_grouped_heads_and_channels_are_right(dtype: str, heads: tuple[int, int]) -> None:
    fields = {"dtype": dtype, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 40}
    assert_right(chunks([41], **fields), config())
    assert_right(chunks([41], **fields, head_dim_v=24), config(BLOCK_M=16))


@pytest.mark.parametrize("kind", ["bshd", "thd"])
def test_equal_keys_make_lse_the_log_of_how_many_a_query_of_a_chunk_sees(  # case B50
    kind: str,
) -> None:
    """Causal is aligned to the last key of each sequence, wherever its chunk begins."""
    inputs = chunks(dtype="fp32", layout=kind, page_size=3)
    _, lse = run(replace(inputs, k=inputs.k * 0), config())
    assert lse is not None
    pairs = PACKED if kind == "thd" else [(40, keys) for keys in LENGTHS]
    counts = [max(0, i + 1 + keys - rows) for rows, keys in pairs for i in range(rows)]
    expected = torch.tensor([math.log(n) if n else -math.inf for n in counts])
    of_rows = lse if kind == "thd" else lse.transpose(0, 1).flatten(1)
    live = of_rows.isfinite()
    assert torch.equal(live, expected.isfinite().expand(2, -1))
    torch.testing.assert_close(of_rows[live], expected.expand(2, -1)[live], rtol=0, atol=2**-19)


def test_a_window_shows_a_query_of_a_chunk_so_many_keys_before_its_own_position() -> None:
    inputs = chunks([97, 41], dtype="fp32", causal=False, window_left=9, window_right=4)
    _, lse = run(replace(inputs, k=inputs.k * 0), config())
    assert lse is not None
    for b, keys in enumerate((97, 41)):
        seen = [min(keys - 1, p + 4) - max(0, p - 9) + 1 for p in range(keys - 40, keys)]
        assert torch.equal(lse[b].exp().round(), torch.tensor(seen).float().expand(2, -1))


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("causal", [True, False])
def test_pages_give_the_bits_of_keys_that_lie_in_order(causal: bool, load: str) -> None:
    inputs = chunks([97], causal=causal, page_size=32, kv_layout="hnd")
    _, k, v = inputs.sequence(0)
    alone = replace(inputs.problem, page_size=0, lengths="equal")
    in_order = [t.transpose(0, 1)[None].contiguous() for t in (k, v)]
    plain = Inputs(alone, inputs.q, in_order[0], in_order[1])
    chosen = config(LOAD=load)
    for a, b in zip(run(inputs, chosen), run(plain, chosen), strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


@pytest.mark.parametrize(("layout", "load"), [("bshd", "pointer"), ("thd", "descriptor")])
def test_dead_slots_and_entries_change_no_bit(layout: str, load: str) -> None:  # case B04, case B13
    inputs = chunks(layout=layout, page_size=32)
    assert inputs.block_table is not None
    k, v = (t.masked_fill(t.isnan(), float("inf")) for t in (inputs.k, inputs.v))
    table = inputs.block_table.masked_fill(inputs.block_table == POISON_PAGE, -1)
    other = replace(inputs, k=k, v=v, block_table=table)
    assert same_bits(inputs, other, config(LOAD=load))
    plain = chunks(layout=layout, page_size=32, poison=False)
    assert same_bits(inputs, plain, config(LOAD=load))


@pytest.mark.parametrize("page_size", [3, 64])
def test_keys_before_all_windows_may_be_gone(page_size: int) -> None:
    inputs = chunks([97, 80], page_size=page_size, window_left=10)
    table = inputs.block_table
    assert table is not None
    k, v, spoilt = inputs.k.clone(), inputs.v.clone(), table.clone()
    for b, keys in enumerate((97, 80)):
        gone = keys - 40 - 10  # the first query's window begins there
        for cache in (k, v):
            cache[table[b, gone // page_size], : gone % page_size] = NAN
        spoilt[b, : gone // page_size] = POISON_PAGE
    assert same_bits(inputs, replace(inputs, k=k, v=v, block_table=spoilt), config())


def test_rows_without_keys_are_zero_and_their_lse_minus_infinity_or_the_sink() -> None:
    inputs = chunks()
    out, lse = run(inputs, config())
    assert lse is not None
    for b, keys in enumerate(LENGTHS):
        blind = max(0, 40 - keys)
        assert (out[b, :blind] == 0).all() and (lse[b, :, :blind] == -math.inf).all()
        assert (out[b, blind:] != 0).all()
    inputs = chunks(sinks=True)
    _, lse = run(inputs, config())
    assert lse is not None and inputs.sinks is not None
    torch.testing.assert_close(lse[0], inputs.sinks[:, None].expand(2, 40), rtol=2**-20, atol=0)


def test_page_ids_whose_offset_passes_32_bits_are_read_where_they_are() -> None:  # case B05
    inputs = chunks([40], head_dim=32, num_heads=1, poison=False)
    near = replace(inputs, v=inputs.k)
    assert near.block_table is not None
    apart = 16384  # elements between pages: 4.3 GB, of which 3 pages are used
    memory = torch.empty(131_080 * apart, dtype=near.k.dtype)
    far = memory.as_strided((131_080, 16, 1, 32), (apart, 32, 32, 1))
    ids = torch.tensor([[131_072, 3, 131_079]], dtype=torch.int32)
    far[ids.long()] = near.k[near.block_table[:, :3].long()]
    moved = replace(near, k=far, v=far, block_table=ids)
    for block_n in (16, 32):  # a tile in one page, and in several
        assert same_bits(near, moved, config(BLOCK_N=block_n))


@pytest.mark.parametrize("page_size", [3, 32])
def test_lengths_and_table_may_be_views_of_either_type(page_size: int) -> None:  # case B25
    inputs = chunks([97, 41], page_size=page_size)
    assert inputs.cache_seqlens is not None and inputs.block_table is not None
    wider = torch.nn.functional.pad(inputs.block_table.long(), (2, 3), value=POISON_PAGE)
    apart = torch.stack([inputs.cache_seqlens.long()] * 2, dim=1)[:, 0]
    other = replace(inputs, cache_seqlens=apart, block_table=wider[:, 2:-3])
    assert same_bits(inputs, other, config())


@pytest.mark.parametrize("load", LOADS)
def test_queries_and_caches_may_be_views_of_wider_rows(load: str) -> None:
    p, lengths = problem(head_dim=24, page_size=32, kv_layout="hnd", batch=2), [97, 41]
    for wider in (8, 3):
        assert_right(make_inputs(p, lengths=lengths, wide_rows=wider), config(LOAD=load))


def test_the_caches_share_no_stride() -> None:  # case B25
    inputs = chunks([97, 41], num_heads=4, num_kv_heads=2)
    v = inputs.v.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(replace(inputs, v=v), config())


# The page of memory after the table's last entry in use is forbidden: the dead ones lie there.
AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
from dataclasses import replace
import torch
sys.path[:0] = [sys.argv[1]]
from autoflash.accuracy import Budget
from running import run
from test_prefill import config
from test_prefill_pages import chunks

pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = 3 * mmap.PAGESIZE
forbidden = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0)
assert forbidden == 0
for on, block_n in (({}, 16), ({"causal": False}, 64), ({"window_left": 20}, 32)):
    inputs = chunks([97, 49], page_size=16, num_heads=1, **on)
    table = inputs.block_table  # seven pages and four, in a table of two rows of seven
    ids = torch.frombuffer(pages, dtype=torch.int32, count=14, offset=end - 4 * 11)
    ids[:11] = table.flatten()[:11]
    result = run(replace(inputs, block_table=ids.view(2, 7)), config(BLOCK_N=block_n))
    assert Budget(inputs).judge(*result).correct
"""


def test_the_table_is_not_read_past_the_page_of_the_last_key() -> None:  # case B13
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


def test_the_tuners_own_check_passes() -> None:
    for layout in ("bshd", "thd"):
        p = problem(layout=layout, window_left=20)
        assert InterpretedDevice(H200).check(p, FAMILY.default(p, H200), 0).correct


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("pages") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    p = inputs.problem
    given = {"causal": p.causal, "layout": p.layout, **inputs.modifiers.of_prefill}
    given |= {"window": (p.window_left, p.window_right), "return_lse": True, **changed}
    return module.prefill(inputs.q, inputs.k, inputs.v, **given)


@pytest.mark.parametrize(
    "fields",
    [
        {"kv_layout": "hnd", "layout": "bhsd", "sinks": True},
        {"layout": "thd", "window_left": 20, "softcap": True},
        {"causal": False, "alibi": True, "head_dim_v": 32},
        {"layout": "thd", "bias": True},
    ],
    ids=str,
)
def test_the_exported_module_serves_chunks_and_follows_lengths_and_table_in_place(
    exported: ModuleType, fields: dict[str, Any]
) -> None:
    inputs, again = (chunks(seed=seed, **fields) for seed in (0, 1))
    for _ in range(2):  # planned, then served by the recipe
        verdict = Budget(inputs).judge(*call(exported, inputs, check=False))
        assert verdict.correct, verdict.reason
    assert call(exported, inputs, check=True)[0].equal(call(exported, inputs)[0])
    names = ("q", "k", "v", "block_table", "cache_seqlens", "sinks", "alibi_slopes", "bias")
    for name in names:
        tensor = getattr(inputs, name)
        if tensor is not None:
            tensor.copy_(getattr(again, name))
    assert inputs.cache_seqlens is not None
    inputs.cache_seqlens.sub_(inputs.cache_seqlens // 3)
    verdict = Budget(inputs).judge(*call(exported, inputs))
    assert verdict.correct, verdict.reason


def test_a_cache_is_known_by_what_it_is_called(exported: ModuleType) -> None:
    inputs = chunks([97, 41])
    named = call(exported, inputs, kv_layout=exported.kv_identity("nhd", 16))
    assert named[0].equal(call(exported, inputs)[0])
    with pytest.raises(exported.ProblemError, match="this cache is nhd:16:1"):
        call(exported, inputs, kv_layout=exported.kv_identity("nhd", 32))


def test_calls_of_one_form_are_told_apart_by_the_layout_of_the_cache(exported: ModuleType) -> None:
    """With as many heads as tokens in a page both layouts have the same shapes and strides."""
    fields: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 2, "page_size": 2}
    for _ in range(2):
        for kv_layout in ("nhd", "hnd"):
            inputs = chunks([97, 41], **fields, kv_layout=kv_layout)
            verdict = Budget(inputs).judge(*call(exported, inputs))
            assert verdict.correct, verdict.reason


def test_a_chunk_in_a_batch_has_the_bits_that_it_has_alone(exported: ModuleType) -> None:
    inputs = chunks([97, 41, 0])
    whole, _ = call(exported, inputs, batch_invariant=True)
    pages = {"block_table": inputs.block_table, "cache_seqlens": inputs.cache_seqlens}
    for b in range(3):
        one = {name: each[b : b + 1] for name, each in pages.items() if each is not None}
        given = {**inputs.modifiers.of_prefill, **one, "max_seqlen_k": None, "causal": True}
        given |= {"window": (-1, -1), "batch_invariant": True}
        alone = exported.prefill(inputs.q[b : b + 1], inputs.k, inputs.v, **given)
        assert torch.equal(whole[b], alone[0])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"block_table": None}, "prefill: cache_seqlens is not supported yet"),
        ({"block_mask": torch.ones(2)}, "prefill: block_mask is no BlockMask"),
        ({"k_scale": torch.ones(1)}, "prefill: k_scale is not supported yet"),
    ],
)
def test_what_chunks_have_not_yet_is_refused_by_name(
    exported: ModuleType, changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(exported.ProblemError, match=message):
        call(exported, chunks([97, 41]), **changed)


def test_gradients_of_keys_in_pages_are_refused(exported: ModuleType) -> None:
    inputs = chunks([97, 41])
    with pytest.raises(exported.ProblemError, match="with gradients: block_table is not"):
        call(exported, replace(inputs, q=inputs.q.clone().requires_grad_()))
