"""How a problem's fields match: exactly, by nearness, or not at all; one table for all.

The tuner, the store, the export and the exported module ask the same functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any, NamedTuple

from .problem import LENGTHS, PAGES, Problem

# What each field of Problem and each argument of prefill() and decode() means for a match.
# "exact" must be equal; "near" may differ, the nearest wins; "derived" counts through what
# match_key and match_sizes make of it; "never" plays no part; "refused" is not served yet.
MATCH_RULES = {
    "op": "exact",
    "dtype": "exact",
    "kv_dtype": "exact",
    "out_dtype": "exact",
    "acc_dtype": "exact",
    "head_dim": "exact",
    "head_dim_v": "exact",
    "causal": "exact",
    "layout": "exact",
    "kv_layout": "exact",
    "deterministic": "exact",
    "batch_invariant": "exact",
    "num_heads": "derived",  # group_size exactly
    "num_kv_heads": "derived",  # batch x num_kv_heads by nearness
    "batch": "derived",
    "seqlen_q": "near",  # one token or several: exactly
    "seqlen_k": "near",
    "page_size": "near",  # paged or not: exactly
    "lengths": "near",
    "pages": "near",
    "kv_scales": "exact",
    "window_left": "near",  # a window or none: exactly
    "window_right": "near",
    "softcap": "exact",  # whether there is one, as with the next three; never its value
    "alibi": "exact",
    "bias": "exact",
    "sinks": "exact",
    "mask": "exact",  # the expression itself
    "masked_by": "exact",
    "density": "near",
    "mask_block_q": "exact",
    "mask_block_k": "exact",
    "dropout": "exact",  # whether there is any
    # tensors: their shapes and dtypes fill the fields above
    "q": "derived",
    "k": "derived",
    "v": "derived",
    "k_cache": "derived",
    "v_cache": "derived",
    "block_table": "derived",
    "page_positions": "derived",
    "window": "derived",
    "alibi_slopes": "derived",
    "dropout_p": "derived",  # whether it is 0
    "rng": "never",
    "k_scale": "derived",
    "v_scale": "derived",
    "cu_seqlens_q": "derived",
    "cu_seqlens_k": "derived",
    "max_seqlen_q": "derived",
    "max_seqlen_k": "derived",
    "block_mask": "derived",
    "document_ids": "derived",
    "prefix_lens": "derived",
    "cache_seqlens": "never",
    "softmax_scale": "never",
    "out": "never",
    "return_lse": "never",
    "check": "never",
    # not served yet
    "q_scale": "refused",
}

MATCH_EXACT_FIELDS = tuple(
    name
    for name, rule in MATCH_RULES.items()
    if rule == "exact" and name in Problem.__annotations__
)
# A size further than this factor from every tuned one says nothing about it: the default serves.
MATCH_LIMIT = 8.0
# Distances in powers of two: another distribution of lengths or of pages is half a doubling.
MATCH_DISTRIBUTION_DISTANCE = 0.5


class MatchSizes(NamedTuple):
    """The sizes that match by nearness. `lengths` and `pages` are places in LENGTHS and PAGES.

    The keys before and after a query are 0 where there is no window, an unbounded side's all keys.
    """

    kv_heads: int  # of the whole batch
    seqlen_q: int
    seqlen_k: int
    page_size: int
    lengths: int
    pages: int = 0
    keys_before: int = 0
    keys_after: int = 0
    density: int = 0


def match_key(problem: Problem) -> tuple[str | int | bool, ...]:
    """What must be equal for one problem's winner to serve another."""
    exact = [getattr(problem, name) for name in MATCH_EXACT_FIELDS]
    return (*exact, problem.group_size, problem.paged, problem.seqlen_q > 1, problem.windowed)


def match_sizes(problem: Problem) -> MatchSizes:
    before, after = (
        (problem.seqlen_k if side < 0 else side) if problem.windowed else 0
        for side in problem.window
    )
    return MatchSizes(
        problem.batch * problem.num_kv_heads,
        problem.seqlen_q,
        problem.seqlen_k,
        problem.page_size,
        LENGTHS.index(problem.lengths),
        PAGES.index(problem.pages) if problem.paged else 0,
        before,
        after,
        problem.density,
    )


def match_bucket(sizes: MatchSizes) -> MatchSizes:
    """The sizes rounded up to powers of two: equal buckets are the same size class."""
    rounded = {
        name: 1 << (size - 1).bit_length() if size > 0 else 0
        for name, size in _match_scales(sizes).items()
    }
    return sizes._replace(**rounded)


def match_distance(a: MatchSizes, b: MatchSizes) -> float | None:
    """How many doublings lie between two sizes, summed; None when one is beyond MATCH_LIMIT."""
    total = MATCH_DISTRIBUTION_DISTANCE * ((a.lengths != b.lengths) + (a.pages != b.pages))
    others = _match_scales(b)
    for name, x in _match_scales(a).items():
        doublings = abs(log2(max(x, 1)) - log2(max(others[name], 1)))
        # a density that nobody told is assumed, so it rules nothing out
        if doublings > log2(MATCH_LIMIT) and name != "density":
            return None
        total += doublings
    return total


def match_serves(problem: Problem, sizes: MatchSizes, knobs: Mapping[str, Any]) -> bool:
    """Whether knobs that were found for these sizes may serve the problem.

    A schedule that cuts sequences alike, found for equal lengths, waits for the longest of others:
    on an H200 it took up to a third longer than a default that balances them.
    """
    alike = knobs.get("SCHEDULE") == "split" and LENGTHS[sizes.lengths] == "equal"
    return not alike or problem.lengths == "equal" or problem.batch == 1


def _match_scales(sizes: MatchSizes) -> dict[str, int]:
    """The sizes that are counted in doublings."""
    return {
        name: size for name, size in sizes._asdict().items() if name not in ("lengths", "pages")
    }
