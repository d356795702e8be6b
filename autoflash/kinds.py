"""Kinds: the problems of every sort by which the contract is verified, whose sizes mean nothing."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

from autoflash.check import MIXED, NARROW
from autoflash.families import sample
from autoflash.problem import Problem
from autoflash.runtime.problem import DTYPE_BYTES as DTYPES
from autoflash.runtime.problem import KV_SCALES, QUANTISED_BYTES

HEAD_DIMS = (16, 40, 64, 80, 96, 128, 160, 192, 256)
RATIOS = ((28, 4), (6, 1), (15, 5), (71, 1), (4, 4))  # query heads and KV heads
PAGE_SIZES = (1, 3, 16, 48, 64, 480)
MASKS = (  # beyond windows
    {"masked_by": "blocks", "mask_block_q": 128, "mask_block_k": 128},
    {"masked_by": "blocks", "mask_block_q": 64, "mask_block_k": 192, "causal": True},
    {"masked_by": "documents"},
    {"masked_by": "documents", "causal": True},
    {"masked_by": "prefix", "causal": True},
)
# floors negative numbers, knows heads and sequences apart, and hides whole tiles and rows
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and kv_idx // 64 != h and not (h == 1 and b == q_idx)"


def kinds_of(op: str, small: bool) -> list[Problem]:
    """A problem of every kind: switches, types, widths, ratios, layouts. Sizes mean nothing.

    The small list has each switch once, and each type.
    """
    if op == "backward":
        served = [kind for kind in kinds_of("prefill", small) if not kind.paged]
        if small:
            few = like(sample("prefill"), head_dim=16, num_heads=2)
            served += [like(few, mask=RULE), like(few, layout="thd", bias=True, causal=True)]
            blocks = {"masked_by": "blocks", "mask_block_q": 32, "mask_block_k": 64}
            served += [like(few, density=MIXED, bias=True, **blocks)]
            served += [like(few, layout="thd", density=MIXED, masked_by="documents")]
        return [replace(kind, op="backward") for kind in served]
    if op == "prefill":
        return _few_prefills() if small else list(dict.fromkeys(_all_prefills()))
    return _few_decodes() if small else list(dict.fromkeys(_all_decodes()))


def kind_of(problem: Problem) -> Problem:
    """The kind of a problem that somebody tuned: few heads in few sequences of one length."""
    p = problem
    kv_heads = min(p.num_kv_heads, 2)
    heads = {"batch": 2, "num_heads": kv_heads * p.group_size, "num_kv_heads": kv_heads}
    left, right = (min(side, NARROW) for side in (p.window_left, p.window_right))
    density = MIXED if p.density else 0
    sizes = {"window_left": left, "window_right": right, "density": density}
    alike = replace(p, **heads, lengths="equal", **sizes)
    return as_long_as(alike, 1)


def as_long_as(kind: Problem, tokens: int) -> Problem:
    """The kind with so many keys, and in prefill queries."""
    return replace(kind, seqlen_k=tokens, seqlen_q=kind.seqlen_q if kind.op == "decode" else tokens)


def _few_prefills() -> list[Problem]:
    def kind(head_dim: int = 16, heads: int = 2, kv_heads: int = 1, **fields: Any) -> Problem:
        sizes = {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
        return like(sample("prefill"), **{**sizes, **fields})

    return [
        kind(40, 3, 1, layout="bhsd"),
        kind(dtype="fp32", causal=True),
        kind(causal=True, softcap=True, sinks=True),
        kind(dtype="fp16", window_left=16, alibi=True),
        kind(causal=True, window_left=16, bias=True, dropout=True),
        kind(layout="thd", causal=True),
        kind(24, head_dim_v=40, causal=True),
        kind(masked_by="blocks", density=MIXED, mask_block_q=32, mask_block_k=64),
        kind(masked_by="documents", density=MIXED, causal=True),
        kind(masked_by="prefix", density=MIXED, causal=True),
        kind(page_size=3, causal=True, kv_layout="hnd", bias=True),
        kind(page_size=16, layout="thd", window_left=16, softcap=True, alibi=True, sinks=True),
        kind(page_size=16, causal=True, mask=RULE),
        kind(page_size=16, masked_by="blocks", density=MIXED, mask_block_q=32, mask_block_k=64),
        kind(layout="thd", mask=RULE),
        kind(page_size=16, layout="thd", masked_by="documents", density=MIXED, causal=True),
    ]


def _few_decodes() -> list[Problem]:
    def kind(head_dim: int = 16, heads: int = 3, kv_heads: int = 1, **fields: Any) -> Problem:
        sizes = {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
        return like(sample("decode"), **{**sizes, **fields})

    return [
        kind(40, 4, 2, kv_layout="hnd"),
        kind(dtype="fp32"),
        kind(dtype="fp16", page_size=3, bias=True),
        kind(page_size=16, seqlen_q=2),
        kind(32, 2, 1, page_size=16, kv_dtype="fp8_e4m3", kv_scales="head"),
        kind(32, 2, 1, kv_dtype="int8", kv_scales="token"),
        kind(576, 5, 1, head_dim_v=512, page_size=16, seqlen_q=2),
        kind(page_size=16, pages="chosen"),
        kind(page_size=16, window_left=16, sinks=True),
        kind(page_size=16, seqlen_q=3, window_left=16, softcap=True, alibi=True),
        kind(page_size=16, seqlen_q=2, mask=RULE),
        kind(page_size=16, masked_by="documents", density=MIXED),
        kind(seqlen_q=3, masked_by="documents", density=MIXED, window_left=16),
        kind(page_size=3, seqlen_q=3, masked_by="prefix", density=MIXED),
        kind(page_size=16, seqlen_q=2, masked_by="blocks", density=MIXED, mask_block_k=32),
    ]


def _all_prefills() -> Iterator[Problem]:
    wide = like(sample("prefill"), head_dim=128, num_heads=8, num_kv_heads=2)
    on_off = (False, True)
    for mask in ({}, {"causal": True}, {"window_left": 16}):
        for softcap, sinks in product(on_off, on_off):
            for added in ({}, {"alibi": True}, {"bias": True}):
                yield like(wide, **mask, **added, softcap=softcap, sinks=sinks)
    plain = like(sample("prefill"), num_heads=4, num_kv_heads=2)
    for dtype, head_dim in product(DTYPES, HEAD_DIMS):
        yield like(plain, dtype=dtype, head_dim=head_dim, causal=True)
    for heads, kv_heads in RATIOS:
        yield like(plain, num_heads=heads, num_kv_heads=kv_heads)
    for causal in on_off:
        yield like(plain, layout="bhsd", causal=causal)
        for head_dim, head_dim_v in ((192, 128), (64, 96), (40, 256)):
            yield like(plain, head_dim=head_dim, head_dim_v=head_dim_v, causal=causal)
    beside = ({}, {"softcap": True, "sinks": True}, {"alibi": True}, {"bias": True})
    for mask, added in product(MASKS, beside):
        yield like(wide, density=MIXED, **mask, **added)
    for dtype in DTYPES:
        yield like(plain, dtype=dtype, head_dim=40, layout="bhsd", density=MIXED, **MASKS[0])
    for mask in ({}, {"causal": True}, {"window_left": 16}):
        for softcap, sinks, alibi in product(on_off, on_off, on_off):
            fields = {"softcap": softcap, "sinks": sinks, "alibi": alibi}
            yield like(wide, layout="thd", **mask, **fields)
        yield like(wide, layout="thd", bias=True, **mask)
        for added in ({}, {"bias": True}, {"layout": "thd"}):
            yield like(wide, dropout=True, **mask, **added)
    yield from _prefills_over_pages(wide, plain)
    for mask, layout, page_size in product(
        ({}, {"causal": True}, {"window_left": 16}), ("bshd", "thd"), (0, 16)
    ):
        where = {"layout": layout, "page_size": page_size, "mask": RULE}
        yield like(wide, **where, **mask)
        yield like(wide, **where, **mask, softcap=True, sinks=True, bias=layout == "bshd")
    everything = {"softcap": True, "alibi": True, "sinks": True}
    for layout, page_size in (("thd", 0), ("bshd", 16), ("thd", 16), ("bshd", 128)):
        where = {"layout": layout, "page_size": page_size, "density": MIXED}
        for mask in MASKS[2:] if layout == "thd" else MASKS:
            yield like(wide, **where, **mask)
            yield like(wide, **where, **mask, **everything)
        windowed = {**where, "masked_by": "documents", "window_left": 16}
        yield like(wide, **windowed, mask=RULE)
        yield like(wide, **windowed, bias=True)


def _prefills_over_pages(wide: Problem, plain: Problem) -> Iterator[Problem]:
    everything = {"softcap": True, "alibi": True, "sinks": True}
    for mask, layout, page_size in product(
        ({}, {"causal": True}, {"window_left": 16}), ("bshd", "thd"), (16, 128)
    ):
        yield like(wide, layout=layout, page_size=page_size, **mask)
        yield like(wide, layout=layout, page_size=page_size, **mask, **everything)
        yield like(wide, layout=layout, page_size=page_size, **mask, bias=True)
    for page_size in PAGE_SIZES:
        yield like(plain, page_size=page_size, causal=True)
    for dtype, head_dim in (("fp32", 64), ("fp16", 40), ("bf16", 256)):
        yield like(plain, page_size=64, dtype=dtype, head_dim=head_dim, causal=True)
    for heads, kv_heads in RATIOS:
        yield like(plain, page_size=16, num_heads=heads, num_kv_heads=kv_heads, causal=True)
    for layout in ("bshd", "bhsd", "thd"):
        yield like(plain, page_size=16, layout=layout, kv_layout="hnd", causal=True)
    yield like(plain, page_size=64, head_dim=192, head_dim_v=128, causal=True)
    yield like(wide, page_size=16, window_left=16, softcap=True, bias=True, sinks=True)


def _all_decodes() -> Iterator[Problem]:
    wide = like(sample("decode"), head_dim=128, num_heads=8, num_kv_heads=2)
    plain = like(sample("decode"), num_heads=4, num_kv_heads=2)
    for page_size, seqlen_q in product((0, 16), (1, 4)):
        yield like(wide, page_size=page_size, seqlen_q=seqlen_q)
        for kv_dtype, kv_scales in product(QUANTISED_BYTES, KV_SCALES):
            fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales}
            yield like(wide, page_size=page_size, seqlen_q=seqlen_q, **fields)
    for page_size in (0, 16):
        for dtype, head_dim in product(DTYPES, HEAD_DIMS):
            yield like(plain, page_size=page_size, dtype=dtype, head_dim=head_dim)
        for heads, kv_heads in RATIOS:
            yield like(plain, page_size=page_size, num_heads=heads, num_kv_heads=kv_heads)
        yield like(plain, page_size=page_size, kv_layout="hnd")
    for page_size in PAGE_SIZES:
        yield like(plain, page_size=page_size)
    for page_size, seqlen_q in product((1, 16, 64), (1, 3)):
        sizes = {"page_size": page_size, "seqlen_q": seqlen_q, "pages": "chosen"}
        yield like(wide, **sizes)
        yield like(wide, **sizes, window_left=16, alibi=True, sinks=True)
    latent = like(wide, head_dim=576, head_dim_v=512, num_heads=16, num_kv_heads=1)
    for dtype, page_size, seqlen_q in product(("bf16", "fp16"), (0, 16, 64), (1, 2)):
        fields = {"dtype": dtype, "page_size": page_size, "seqlen_q": seqlen_q}
        yield like(latent, head_dim_v=512, **fields)
    yield like(latent, head_dim_v=512, num_heads=128)
    yield like(latent, head_dim_v=512, window_left=16, softcap=True, alibi=True, sinks=True)
    on_off = (False, True)
    for seqlen_q, left, *on in product((1, 3), (-1, 16), on_off, on_off, on_off):
        fields = dict(zip(("softcap", "alibi", "sinks"), on, strict=True))
        yield like(wide, page_size=16, seqlen_q=seqlen_q, window_left=left, **fields)
    yield from _biased_decodes(wide, latent)
    yield from _ruled_decodes(wide, latent)
    yield from _masked_decodes(wide, latent)
    for seqlen_q, (kv_dtype, kv_scales) in product(
        (1, 4), (("fp8_e4m3", "head"), ("int8", "token"))
    ):
        everything = {"window_left": 16, "softcap": True, "alibi": True, "sinks": True}
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, **everything}
        yield like(wide, seqlen_q=seqlen_q, **fields)


def _biased_decodes(wide: Problem, latent: Problem) -> Iterator[Problem]:
    beside: tuple[dict[str, Any], ...] = (
        {},
        {"window_left": 16, "softcap": True, "sinks": True},
        {"dtype": "fp32"},
        {"kv_dtype": "fp8_e4m3", "kv_scales": "head"},
        {"kv_dtype": "int8", "kv_scales": "token"},
    )
    for page_size, seqlen_q, more in product((0, 16), (1, 3), beside):
        yield like(wide, bias=True, page_size=page_size, seqlen_q=seqlen_q, **more)
    yield like(wide, bias=True, page_size=16, seqlen_q=3, pages="chosen")
    for heads, kv_heads in RATIOS:
        sizes = {"num_heads": heads, "num_kv_heads": kv_heads, "head_dim": 64}
        yield like(wide, bias=True, page_size=16, **sizes)
    yield like(latent, head_dim_v=512, bias=True, page_size=16, seqlen_q=2)


def _ruled_decodes(wide: Problem, latent: Problem) -> Iterator[Problem]:
    beside: tuple[dict[str, Any], ...] = (
        {},
        {"window_left": 16, "softcap": True, "alibi": True, "sinks": True},
        {"bias": True},
        {"dtype": "fp32"},
        {"kv_dtype": "fp8_e4m3", "kv_scales": "head"},
        {"kv_dtype": "int8", "kv_scales": "token"},
    )
    for page_size, seqlen_q, more in product((0, 16), (1, 3), beside):
        yield like(wide, mask=RULE, page_size=page_size, seqlen_q=seqlen_q, **more)
    yield like(wide, mask=RULE, page_size=16, seqlen_q=3, pages="chosen")
    yield like(wide, mask=RULE, num_heads=71, num_kv_heads=1, head_dim=64)
    yield like(latent, head_dim_v=512, mask=RULE, page_size=16, seqlen_q=2)


def _masked_decodes(wide: Problem, latent: Problem) -> Iterator[Problem]:
    everything = {"softcap": True, "alibi": True, "sinks": True}
    documents = {"masked_by": "documents", "density": MIXED}
    prefix = {"masked_by": "prefix", "density": MIXED}
    beside: tuple[dict[str, Any], ...] = (
        {},
        everything,
        {"bias": True},
        {"dtype": "fp32"},
        {"kv_dtype": "fp8_e4m3", "kv_scales": "head"},
        {"kv_dtype": "int8", "kv_scales": "token"},
    )
    for page_size, more in product((0, 16), beside):
        for seqlen_q in (1, 3):
            yield like(wide, page_size=page_size, seqlen_q=seqlen_q, **documents, **more)
        yield like(wide, page_size=page_size, seqlen_q=3, **prefix, **more)
    for seqlen_q, mask in product((1, 3), ("", RULE)):
        sizes = {"page_size": 16 * bool(mask), "seqlen_q": seqlen_q, "window_left": 16}
        yield like(wide, **sizes, **documents, mask=mask)
    for page_size, seqlen_q, block in product((0, 16), (1, 3), (32, 48, 128)):
        sizes = {"page_size": page_size, "seqlen_q": seqlen_q, "mask_block_k": block}
        blocks = {"masked_by": "blocks", "density": MIXED, **sizes}
        for more in beside if block == 48 else ({}, everything, {"mask": RULE}):
            yield like(wide, **blocks, **more)
    blocks = {"masked_by": "blocks", "density": MIXED, "mask_block_k": 64}
    for masked in (documents, prefix):
        yield like(wide, page_size=16, seqlen_q=3, pages="chosen", **masked)
        yield like(wide, num_heads=71, num_kv_heads=1, head_dim=64, seqlen_q=2, **masked)
        yield like(latent, head_dim_v=512, page_size=16, seqlen_q=2, **masked)
    yield like(wide, num_heads=71, num_kv_heads=1, head_dim=64, seqlen_q=2, **blocks)
    yield like(latent, head_dim_v=512, page_size=16, seqlen_q=2, **blocks)


def like(problem: Problem, **changes: Any) -> Problem:
    """The problem with changes; what follows from other fields follows from the new ones."""
    follows = {"head_dim_v": 0, "kv_dtype": "", "out_dtype": "", "pages": ""}
    return replace(problem, **{**follows, **changes})
