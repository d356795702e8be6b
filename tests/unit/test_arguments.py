"""A wrong argument is one line that names it, what was expected and what was given."""

import pytest
import torch

from autoflash.runtime.arguments import (
    check_cache_entries,
    check_output,
    decode_problem,
    prefill_problem,
    refuse_arguments,
    scale_or_default,
)
from autoflash.runtime.dispatch import PREFILL_OTHERS, prefill
from autoflash.runtime.masks import BlockLists
from autoflash.runtime.match import MATCH_RULES
from autoflash.runtime.modifiers import Modifiers
from autoflash.runtime.problem import Problem, ProblemError


def tensors(**changes):
    shapes = {"q": (2, 5, 4, 32), "k": (2, 7, 2, 32), "v": (2, 7, 2, 32), **changes}
    return [torch.zeros(shape, dtype=torch.float16) for shape in shapes.values()]


def decode_call(**changes):
    call = {
        "q": torch.zeros(3, 1, 4, 32),
        "k_cache": torch.zeros(9, 16, 2, 32),
        "v_cache": torch.zeros(9, 16, 2, 32),
        "cache_seqlens": torch.tensor([1, 2, 40], dtype=torch.int32),
        "block_table": torch.zeros(3, 3, dtype=torch.int32),
        "kv_layout": "nhd",
        "max_seqlen_k": None,
        "lengths": "ragged",
        "pages": "permuted",
    }
    return {**call, **changes}


def test_the_problem_is_read_from_the_shapes():
    q, k, v = tensors()
    problem = prefill_problem(q, k, v, True, "bshd")
    assert problem == Problem("prefill", "fp16", 2, 4, 2, 32, 5, 7, causal=True)
    swapped = prefill_problem(*(t.transpose(1, 2) for t in (q, k, v)), True, "bhsd")
    assert (swapped.num_heads, swapped.seqlen_k, swapped.layout) == (4, 7, "bhsd")


def test_the_capacity_of_the_cache_stands_for_a_missing_max_seqlen_k():
    assert decode_problem(**decode_call()).seqlen_k == 48
    assert decode_problem(**decode_call(max_seqlen_k=40)).seqlen_k == 40
    hnd = decode_call(kv_layout="hnd", block_table=None)
    hnd["k_cache"] = hnd["v_cache"] = torch.zeros(3, 2, 16, 32)
    assert decode_problem(**hnd).seqlen_k == 16


def test_k_and_v_may_be_views_of_one_tensor():
    for both in (torch.zeros(9, 2, 16, 2, 32).unbind(1), torch.zeros(9, 16, 2, 2, 32).unbind(3)):
        views = dict(zip(("k_cache", "v_cache"), both, strict=True))
        assert decode_problem(**decode_call(**views)) == decode_problem(**decode_call())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": (2, 7, 2, 64)}, "k has head_dim 64, expected 32"),
        ({"k": (3, 7, 2, 32)}, "k has batch 3, expected 2"),
        ({"v": (2, 8, 2, 32)}, "v has seqlen_k 8, expected 7"),
        ({"v": (2, 7, 4, 32)}, "v has num_kv_heads 4, expected 2"),
        ({"q": (2, 5, 3, 32)}, "num_heads 3 is not a multiple of num_kv_heads 2"),
        ({"q": (2, 5, 32)}, "q has 3 dimensions, not 4"),
        ({"q": (2, 5, 4, 20), "k": (2, 7, 2, 20)}, "head_dim 20 is not a multiple of 8"),
        ({"q": (2, 5, 4, 264), "k": (2, 7, 2, 264)}, "head_dim 264 is not a multiple of 8"),
        ({"q": (0, 5, 4, 32), "k": (0, 7, 2, 32), "v": (0, 7, 2, 32)}, "batch 0 is not positive"),
    ],
)
def test_prefill_names_the_shape_that_does_not_fit(changes, message):  # case B40
    with pytest.raises(ProblemError, match=message):
        prefill_problem(*tensors(**changes), False, "bshd")


def test_mixed_and_unknown_dtypes_are_refused():
    q, k, v = tensors()
    with pytest.raises(ProblemError, match=r"v is torch.float32, q is torch.float16"):
        prefill_problem(q, k, v.float(), False, "bshd")
    with pytest.raises(ProblemError, match=r"q is torch.int32, not bf16, fp16 or fp32"):
        prefill_problem(q.int(), k.int(), v.int(), False, "bshd")


def test_a_last_dimension_with_gaps_is_refused():  # case B49
    q, k, v = tensors(v=(2, 7, 2, 64))
    with pytest.raises(ProblemError, match="v's last dimension must be contiguous"):
        prefill_problem(q, k, v[..., ::2], False, "bshd")


def test_inputs_that_require_grad_are_refused_while_there_is_no_backward():
    q, k, v = tensors()
    q.requires_grad_()
    with pytest.raises(ProblemError, match="q requires grad and there is no backward yet"):
        prefill_problem(q, k, v, False, "bshd")
    with torch.no_grad():
        assert prefill_problem(q, k, v, False, "bshd").batch == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cache_seqlens": torch.zeros(2, dtype=torch.int32)}, r"cache_seqlens is \(2,\), expec"),
        ({"cache_seqlens": torch.zeros(3)}, "cache_seqlens is torch.float32, not int32 or int64"),
        ({"block_table": torch.zeros(2, 3, dtype=torch.int32)}, r"block_table is \(2, 3\)"),
        ({"block_table": torch.zeros(3, dtype=torch.int32)}, "block_table has 1 dimensions, not"),
        ({"max_seqlen_k": 49}, "max_seqlen_k 49 is not from 0 to the cache's capacity 48"),
        ({"max_seqlen_k": -1}, "max_seqlen_k -1 is not from 0"),
        ({"kv_layout": "dnh"}, "kv_layout 'dnh' is none of nhd, hnd"),
        ({"lengths": "long"}, "lengths 'long' is none of equal, ragged"),
        ({"pages": "random"}, "pages 'random' is none of permuted, contiguous, shared"),
        ({"block_table": None}, "k_cache has batch 9, expected 3"),
        ({"v_cache": torch.zeros(9, 16, 1, 32)}, "v_cache has num_kv_heads 1, expected 2"),
    ],
)
def test_decode_names_the_argument_that_does_not_fit(changes, message):
    with pytest.raises(ProblemError, match=message):
        decode_problem(**decode_call(**changes))


def test_positions_of_pages_make_them_chosen_ones_of_longer_sequences():
    def posed(positions, **changes):
        modifiers = Modifiers(page_positions=positions)
        return decode_problem(**decode_call(**changes), modifiers=modifiers)

    positions = torch.zeros(3, 3, dtype=torch.int32)
    p = posed(positions, max_seqlen_k=1_000_000)
    assert (p.pages, p.seqlen_k, p.switches) == ("chosen", 48, ("paged", "chosen"))
    for given, changes, message in (
        (positions[:2], {}, r"page_positions is \(2, 3\), expected \(3, 3\)"),
        (positions.float(), {}, "page_positions is torch.float32, not int32 or int64"),
        (positions.T, {}, "page_positions rows must be contiguous"),
        (None, {"pages": "chosen"}, "pages 'chosen' is for calls with page_positions"),
    ):
        with pytest.raises(ProblemError, match=message):
            posed(given, **changes)
    contiguous = {"block_table": None, "k_cache": torch.zeros(3, 16, 2, 32)}
    contiguous["v_cache"] = contiguous["k_cache"]
    with pytest.raises(ProblemError, match="page_positions is for a cache in pages"):
        posed(positions, **contiguous)


def test_checking_looks_at_the_pages_that_are_read_and_not_at_how_long_sequences_are():
    call = decode_call(cache_seqlens=torch.tensor([1000, 900, 40]))
    problem = decode_problem(**call)
    table = torch.tensor([[0, -1, 2**30], [3, 4, 5], [6, 7, 2**30]], dtype=torch.int32)
    positions = torch.tensor([[62, -1, 63], [0, 7, 56], [2, 1, 3]], dtype=torch.int32)
    given = (problem, call["k_cache"], call["cache_seqlens"])
    check_cache_entries(*given, table, positions)
    positions[0, 1] = 5
    with pytest.raises(ProblemError, match=r"block_table\[0, 1\] is -1"):
        check_cache_entries(*given, table, positions)


def test_values_of_latent_attention_are_channels_of_the_keys():
    wide = {"q": torch.zeros(3, 1, 4, 576).half(), "k_cache": torch.zeros(9, 16, 1, 576).half()}
    p = decode_problem(**decode_call(**wide, v_cache=None))
    assert p.latent and (p.head_dim, p.head_dim_v, p.num_kv_heads) == (576, 512, 1)
    with pytest.raises(ProblemError, match="v_cache must be None with keys 576 wide: their first"):
        decode_problem(**decode_call(**wide, v_cache=wide["k_cache"][..., :512]))
    with pytest.raises(ProblemError, match="v_cache is None, which is for keys 576 wide"):
        decode_problem(**decode_call(v_cache=None))


def test_an_argument_that_is_not_served_yet_is_refused_by_name():
    names = ("softcap", "window", "bias")
    refuse_arguments("prefill", names, (None, None, None))
    for place, value in enumerate((30.0, (128, 0), torch.zeros(3))):
        given = tuple(value if place == n else None for n in range(3))
        with pytest.raises(ProblemError, match=f"prefill: {names[place]} is not supported yet"):
            refuse_arguments("prefill", names, given)


REFUSED = {
    "window": (3, 0),
    "kv_layout": "hnd",
    "mask": "checkerboard",
    "batch_invariant": True,
    "softcap": 2.0,
}


@pytest.mark.parametrize("name", PREFILL_OTHERS)
def test_each_argument_that_is_not_served_yet_is_refused_by_its_own_name(name):
    value = REFUSED.get(name, torch.zeros(2))
    with pytest.raises(ProblemError, match=f"prefill: {name} is not supported yet"):
        prefill(*[torch.zeros(2, 2)] * 3, **{name: value})


def masked_step(queries=3, **given):
    """The problem of a step over pages for 48 keys of each of three sequences."""
    call = decode_call(q=torch.zeros(3, queries, 4, 32), modifiers=Modifiers(**given))
    return decode_problem(**call)


def test_documents_and_prefixes_of_a_step_are_masks_of_its_problem():
    p = masked_step(document_ids=torch.zeros(3, 48).int(), mask="h > 1", window=(4, 0))
    assert (p.masked_by, p.density) == ("documents", 10) and p.masks == ("documents", "mask")
    p = masked_step(prefix_lens=torch.zeros(3).int(), density=7)
    assert (p.masked_by, p.density) == ("prefix", 7)
    assert p.switches == ("prefix", "paged", "queries")


def test_a_prefix_of_one_query_token_is_nothing_but_is_looked_at():
    prefix = torch.zeros(3).int()
    assert masked_step(1, prefix_lens=prefix) == masked_step(1)
    with pytest.raises(ProblemError, match=r"decode: prefix_lens is \(1,\), expected \(3,\)"):
        masked_step(1, prefix_lens=prefix[:1])
    with pytest.raises(ProblemError, match="prefix and a window exclude each other"):
        masked_step(1, prefix_lens=prefix, window=(4, 0))


def step_lists(batch=1, heads=1, size=(128, 16), mask_mod=None):
    """The first of three blocks for all tokens of a step."""
    counts, indices = torch.ones(batch, heads, 1).int(), torch.zeros(batch, heads, 1, 3).int()
    return BlockLists(counts, indices, None, None, size, mask_mod=mask_mod)


def test_blocks_of_a_step_are_of_its_query_tokens_and_of_keys_by_their_place():
    def rule(b, h, q_idx, kv_idx):
        return q_idx >= kv_idx

    p = masked_step(block_mask=step_lists())
    assert (p.masked_by, p.density, p.mask_block_k) == ("blocks", 10, 16)
    assert p.switches == ("blocks", "paged", "queries")
    for lists in (step_lists(3, 4), step_lists(1, 4), step_lists(3, 1, (3, 16))):
        assert masked_step(block_mask=lists) == p
    told = masked_step(block_mask=step_lists(mask_mod=rule), mask="h > 1", density=4)
    assert (told.masks, told.density) == (("blocks", "mask"), 4)
    for given, message in (
        (step_lists(2), r"block_mask's kv_num_blocks is \(2, 1, 1\), expected \(1, 1, 1\) or"),
        (step_lists(size=(2, 16)), "block_mask has blocks of 2 queries, the 3 query tokens of a"),
        (step_lists(mask_mod=rule), "block_mask has the mask_mod rule, which no kernel can call"),
    ):
        with pytest.raises(ProblemError, match=f"^decode: {message}"):
            masked_step(block_mask=given)
    with pytest.raises(ProblemError, match="blocks of 128 by 24: sizes are multiples of 16"):
        masked_step(block_mask=step_lists(size=(128, 24)))
    with pytest.raises(ProblemError, match="blocks and a window exclude each other"):
        masked_step(block_mask=step_lists(), window=(4, 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"document_ids": torch.zeros(3, 48)},
            "document_ids is torch.float32, expected torch.int32",
        ),
        (
            {"document_ids": torch.zeros(3, 47).int()},
            r"document_ids is \(3, 47\), expected \(3, 48",
        ),
        ({"document_ids": torch.zeros(3, 96).int()[:, ::2]}, "document_ids's last dimension must"),
        (
            {"document_ids": torch.zeros(48, device="meta").int()},
            "document_ids is on meta, q is on",
        ),
        ({"density": 5}, "density 5 is of a mask, and none is given"),
        ({"mask": "h > 1", "density": 0}, "density 0 is not from 1 to 100 percent"),
    ],
)
def test_masks_that_do_not_fit_a_step_are_refused_by_name(given, message):
    with pytest.raises(ProblemError, match=f"^decode: {message}"):
        masked_step(**given)
    both = {"document_ids": torch.zeros(3, 48).int(), "prefix_lens": torch.zeros(3).int()}
    with pytest.raises(ProblemError, match="decode: documents and prefix exclude"):
        masked_step(**both)


def test_of_chosen_pages_ids_have_as_many_keys_as_sequences_do():
    positions = torch.tensor([[0, 1, 9]] * 3, dtype=torch.int32)
    given = {"page_positions": positions, "document_ids": torch.zeros(3, 160).int()}
    problem = masked_step(**given)
    assert problem.pages == "chosen" and problem.masked_by == "documents"
    call = decode_call()
    lengths = torch.tensor([150, 1, 160], dtype=torch.int32)
    entries = (call["k_cache"], lengths, call["block_table"], positions, None)
    check_cache_entries(problem, *entries, given["document_ids"])
    with pytest.raises(ProblemError, match=r"cache_seqlens holds 160, not in 0\.\.159"):
        check_cache_entries(problem, *entries, given["document_ids"][:, :159])


def test_a_rule_of_a_step_is_part_of_its_problem_in_one_spelling():
    p = decode_problem(**decode_call(modifiers=Modifiers(mask="(kv_idx>=q_idx+3)", softcap=2.0)))
    assert p.mask == "kv_idx >= q_idx + 3" and p.masks == ("mask",)
    assert p.switches[:2] == ("softcap", "paged") and p.switches[2].startswith("mask_")
    for mask, told in (("kv_idx // h > 2", "divides by something"), (3, "an expression, given")):
        with pytest.raises(ProblemError, match=f"^decode: mask.*{told}"):
            decode_problem(**decode_call(modifiers=Modifiers(mask=mask)))


def test_what_the_table_calls_refused_is_refused():
    refused = {name for name, rule in MATCH_RULES.items() if rule == "refused"}
    assert refused <= {*PREFILL_OTHERS}


def test_an_output_of_another_shape_or_type_is_refused():
    q, _, _ = tensors()
    check_output("prefill", torch.empty_like(q), q, 32)
    for out in (torch.empty(2, 5, 4, 16).half(), torch.empty(2, 5, 4, 32)):
        with pytest.raises(ProblemError, match="out must be"):
            check_output("prefill", out, q, 32)


def test_checking_finds_a_bad_page_inside_the_used_range_and_only_there():  # case B13
    call = decode_call()
    problem = decode_problem(**call)
    table = torch.tensor([[0, -1, 2**30], [3, 2**30, -1], [4, 5, 6]], dtype=torch.int32)
    check_cache_entries(problem, call["k_cache"], call["cache_seqlens"], table)
    table[2, 1] = 9
    with pytest.raises(ProblemError, match=r"block_table\[2, 1\] is 9, the cache has pages 0\.\.8"):
        check_cache_entries(problem, call["k_cache"], call["cache_seqlens"], table)
    with pytest.raises(ProblemError, match=r"cache_seqlens holds 49, not in 0\.\.48"):
        lengths = torch.tensor([1, 49, 2])
        check_cache_entries(problem, call["k_cache"], lengths, table)


def test_a_scale_that_would_turn_the_order_of_scores_is_refused():
    assert scale_or_default("prefill", None, 64) == 0.125
    assert scale_or_default("prefill", 0.0, 64) == 0.0
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(ProblemError, match=r"prefill: softmax_scale .* is not from 0 upwards"):
            scale_or_default("prefill", wrong, 64)
