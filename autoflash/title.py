"""Title: a problem told in a line, for people."""

from collections.abc import Sequence

from autoflash.runtime.problem import PAGES, Problem


def title(problem: Problem) -> str:
    """The problem in one line for people; what is as usual is left out."""
    kind = " ".join(_kind(problem))
    return ", ".join([kind, *(told for told, _ in _parts(problem))])


def briefs(problems: Sequence[Problem]) -> tuple[str, list[str]]:
    """What all of several problems have alike, and each of them without it, in short.

    A letter and a number are `b` batch, `h` num_heads/num_kv_heads, `d` head_dim, `q` queries, `k`
    keys, `p` page_size and `w` window. One problem alone has nothing alike.
    """
    told = [[*_kind(problem), *(short for _, short in _parts(problem))] for problem in problems]
    alike = [part for part in told[0] if all(part in each for each in told)] if told[1:] else []
    return " ".join(alike), [" ".join(x for x in each if x not in alike) for each in told]


def _kind(p: Problem) -> list[str]:
    return [p.op, p.dtype, *(["causal" if p.causal else "full"] if p.op != "decode" else [])]


def _parts(p: Problem) -> list[tuple[str, str]]:
    """What a title says after the kind, and the same in short."""
    wide = f"/{p.head_dim_v}" * (p.head_dim_v != p.head_dim)
    queries = p.seqlen_q > 1 if p.op == "decode" else p.seqlen_q != p.seqlen_k
    window, w = f"window {p.window_left}, {p.window_right}", f"w{p.window_left},{p.window_right}"
    blocks = f" of {p.mask_block_q} by {p.mask_block_k}" if p.mask_block_q else ""
    of = f" {p.mask_block_q}x{p.mask_block_k}" if p.mask_block_q else ""
    if p.op == "decode" and p.mask_block_k:
        blocks, of = f" of {p.mask_block_k} keys", f" {p.mask_block_k}"
    masked = f"{p.masked_by}{blocks}, {p.density} %", f"{p.masked_by}{of} {p.density}%"
    first = [
        (f"batch {p.batch}", f"b{p.batch}"),
        (f"heads {p.num_heads}/{p.num_kv_heads}", f"h{p.num_heads}/{p.num_kv_heads}"),
        (f"head_dim {p.head_dim}{wide}", f"d{p.head_dim}{wide}"),
        (f"{p.seqlen_q} queries", f"q{p.seqlen_q}") if queries else None,
        (f"{p.seqlen_k} keys", f"k{p.seqlen_k}"),
    ]
    pages = [
        (f"pages of {p.page_size}", f"p{p.page_size}") if p.paged else None,
        _as_it_is(f"pages {p.pages}") if p.pages in PAGES[1:] else None,
    ]
    kv_layout = _as_it_is(p.kv_layout) if p.kv_layout != "nhd" else None
    lengths = _as_it_is(p.lengths) if p.lengths != "equal" else None
    mask = _as_it_is(f"mask {p.mask}") if p.mask else None
    modifiers = [_as_it_is(name) for name in p.modifiers]
    if p.op != "decode":
        told = [
            *first,
            (window, w) if p.windowed else None,
            *modifiers,
            masked if p.density else None,
            mask,
            _as_it_is(p.layout) if p.layout != "bshd" else None,
            lengths,
            _as_it_is("deterministic") if p.deterministic else None,
            *pages,
            kv_layout,
        ]
    else:
        scales = (f"{p.kv_dtype} with scales per {p.kv_scales}", f"{p.kv_dtype}/{p.kv_scales}")
        told = [
            *first,
            *(pages if p.paged else [_as_it_is("contiguous")]),
            (f"window {p.window_left}", f"w{p.window_left}") if p.windowed else None,
            *modifiers,
            masked if p.density else None,
            mask,
            scales if p.quantised else None,
            kv_layout,
            lengths,
        ]
    return [part for part in told if part]


def _as_it_is(word: str) -> tuple[str, str]:
    return word, word
