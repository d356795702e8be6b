"""Arguments of prefill() over pages: the problem they pose, a line for each that does not fit."""

from typing import Any

import pytest
import torch

from autoflash.problem import Problem, title
from autoflash.runtime.chunked import check_chunks, chunked_problem
from autoflash.runtime.modifiers import NO_MODIFIERS
from autoflash.runtime.problem import ProblemError

Q, PACKED = torch.zeros(2, 33, 4, 32), torch.zeros(40, 4, 32)
K, V = torch.zeros(20, 16, 2, 32), torch.zeros(20, 16, 2, 32)
LENGTHS = torch.tensor([100, 33], dtype=torch.int32)
TABLE = torch.arange(16, dtype=torch.int32).view(2, 8)
GIVEN = NO_MODIFIERS._replace(cache_seqlens=LENGTHS, block_table=TABLE)
STARTS: dict[str, Any] = {"cu_seqlens_q": torch.tensor([0, 33, 40]), "max_seqlen_q": 33}


def posed(q: Any = Q, k: Any = K, v: Any = V, layout: Any = "bshd", **changes: Any):
    return chunked_problem(q, k, v, True, layout, GIVEN._replace(**changes))


def test_the_pages_the_queries_and_the_width_of_the_table_are_the_problem():
    problem = posed()
    assert (problem.batch, problem.seqlen_q, problem.seqlen_k) == (2, 33, 128)
    assert (problem.page_size, problem.kv_layout, problem.lengths) == (16, "nhd", "ragged")
    assert (problem.num_heads, problem.num_kv_heads, problem.head_dim) == (4, 2, 32)
    assert posed(max_seqlen_k=100).seqlen_k == 100
    by_head = posed(
        Q.transpose(1, 2), K.transpose(1, 2), V.transpose(1, 2), "bhsd", kv_layout="hnd"
    )
    assert (by_head.layout, by_head.kv_layout, by_head.seqlen_q) == ("bhsd", "hnd", 33)
    assert (by_head.num_kv_heads, by_head.page_size) == (2, 16)


def test_packed_queries_over_pages_need_to_say_where_they_begin_and_no_more():
    problem = posed(PACKED, **STARTS)
    assert (problem.layout, problem.batch, problem.seqlen_q) == ("thd", 2, 33)
    assert problem == posed(PACKED, layout="thd", **STARTS)


def test_one_sequence_alone_is_as_long_as_the_longest():
    alone = {"cache_seqlens": LENGTHS[:1], "block_table": TABLE[:1]}
    assert posed(Q[:1], **alone).lengths == "equal"


def test_a_window_that_reaches_all_keys_of_a_table_is_none():
    assert not posed(window=(127, -1)).windowed and posed(window=(126, -1)).windowed


def test_values_may_have_other_channels_and_modifiers_are_switches():
    problem = posed(v=torch.zeros(20, 16, 2, 64), softcap=2.0, sinks=torch.zeros(4))
    assert problem.head_dim_v == 64
    assert problem.switches == ("causal", "softcap", "sinks", "head_dim_v", "paged")
    ruled = posed(mask="(kv_idx>q_idx+5)")
    assert ruled.mask == "kv_idx > q_idx + 5" and ruled.switches[:2] == ("causal", "paged")
    prefixed = posed(prefix_lens=torch.zeros(2).int(), density=7)
    assert (prefixed.switches, prefixed.density) == (("causal", "prefix", "paged"), 7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": None}, "prefill: keys in pages need a block_table and cache_seqlens"),
        ({"cu_seqlens_k": torch.tensor([0])}, "cu_seqlens_k is of packed keys, cache_seqlens of"),
        ({"kv_layout": "dhn"}, "prefill: kv_layout 'dhn' is none of nhd, hnd"),
        ({"layout": "hbsd"}, "prefill: layout 'hbsd' is none of bshd, bhsd, thd"),
        ({"layout": "bhsd", **STARTS}, "layout 'bhsd' has an axis of sequences, packed ones none"),
        ({"layout": "thd", "q": PACKED}, "prefill: packed sequences need cu_seqlens_q"),
        ({"q": PACKED, "max_seqlen_q": 33}, "prefill: packed sequences need cu_seqlens_q"),
        ({"q": PACKED}, "prefill: q has 3 dimensions, not 4"),
        ({"k": K[0]}, "prefill: k has 3 dimensions, not 4"),
        ({"v": V[:, :8]}, "prefill: v has tokens 8, expected 16"),
        ({"k": K[..., :16]}, "prefill: k has head_dim 16, expected 32"),
        ({"k": K.half(), "v": V.half()}, "prefill: k is torch.float16, q is torch.float32"),
        ({"block_table": TABLE[:1]}, r"block_table is \(1, 8\), expected \(2, 8\)"),
        ({"block_table": TABLE.float()}, "block_table is torch.float32, not int32"),
        ({"cache_seqlens": LENGTHS[:1]}, r"cache_seqlens is \(1,\), expected \(2,\)"),
        ({"max_seqlen_k": 129}, "max_seqlen_k 129 is not from 0 to the cache's capacity 128"),
        ({"bias": torch.zeros(33, 100)}, r"does not broadcast to \(2, 4, 33, 128\)"),
        ({"mask": "kv_idx"}, "prefill: mask 'kv_idx': is a number, not true or false"),
        ({"density": 5}, "prefill: density 5 is of a mask, and none is given"),
        ({"prefix_lens": torch.zeros(3).int()}, r"prefix_lens is \(3,\), expected \(2,\)"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=message):
        posed(**changes)


def test_checking_finds_lengths_and_pages_that_are_not_there():
    check_chunks(posed(), Q, K, GIVEN)
    long = GIVEN._replace(cache_seqlens=LENGTHS + 96)
    with pytest.raises(ProblemError, match=r"prefill: cache_seqlens holds 196, not in 0\.\.128"):
        check_chunks(posed(), Q, K, long)
    table = TABLE.clone()
    table[1, 3:], table[0, 6] = -1, 20
    unused = GIVEN._replace(block_table=table)
    with pytest.raises(ProblemError, match=r"block_table\[0, 6\] is 20, the cache has pages 0..19"):
        check_chunks(posed(), Q, K, unused)
    packed = GIVEN._replace(**STARTS | {"max_seqlen_q": 32})
    with pytest.raises(ProblemError, match="cu_seqlens_q has a sequence of 33 tokens"):
        check_chunks(posed(PACKED, **STARTS), PACKED, K, packed)


def problem_of(**changes):
    fields = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "seqlen_q": 32}
    return Problem("prefill", "bf16", **{**fields, "seqlen_k": 64, "page_size": 16, **changes})


def test_a_prefill_over_pages_keeps_the_layout_of_its_cache_and_says_so():
    problem = problem_of(kv_layout="hnd", pages="shared", lengths="ragged")
    assert title(problem).endswith("64 keys, ragged, pages of 16, pages shared, hnd")
    assert problem_of(kv_layout="hnd", page_size=0).kv_layout == "nhd"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bias": True, "alibi": True}, "alibi and bias exclude each other"),
        ({"pages": "chosen"}, "pages 'chosen' are of decode: prefill reads all pages"),
        (
            {"masked_by": "blocks", "density": 5, "mask_block_q": 16, "mask_block_k": 24},
            "blocks of 16 by 24: sizes are multiples of 16",
        ),
        ({"masked_by": "prefix", "density": 5, "causal": False}, "prefix: what is beyond it is ca"),
    ],
)
def test_what_no_prefill_over_pages_has_is_refused(changes, message):
    with pytest.raises(ProblemError, match=message):
        problem_of(**changes)
