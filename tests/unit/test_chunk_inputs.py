"""Inputs of prefill over pages: lengths, tables and what is dead of them."""

import pytest
import torch

from autoflash.inputs import lengths_of, make_inputs, packed_lengths, sequence_lengths
from autoflash.pages import POISON_PAGE
from autoflash.problem import Problem


def problem_of(**changes):
    fields = {"batch": 50, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "seqlen_q": 40}
    fields |= {"seqlen_k": 90, "page_size": 16, "lengths": "ragged"}
    return Problem("prefill", "fp16", **{**fields, **changes})


def test_no_sequence_has_fewer_keys_than_its_chunk_has_queries():
    keys = sequence_lengths(problem_of())
    assert keys[0] == 90 and 40 <= min(keys) < max(keys[1:]) <= 90
    assert sequence_lengths(problem_of(seqlen_q=100)) == [90] * 50
    packed = problem_of(layout="thd")
    pairs = list(zip(*packed_lengths(packed), strict=True))
    assert pairs[0] == (40, 90) and all(rows <= keys for rows, keys in pairs)
    assert len({rows for rows, _ in pairs}) > 1 and min(keys for _, keys in pairs) < 40


@pytest.mark.parametrize("changes", [{}, {"layout": "thd", "kv_layout": "hnd"}], ids=str)
def test_a_chunk_finds_its_keys_through_the_table_and_nothing_else_is_a_number(changes):
    p = problem_of(batch=3, **changes)
    inputs = make_inputs(p, seed=3)
    lengths, table = inputs.cache_seqlens, inputs.block_table
    assert lengths is not None and table is not None and inputs.cu_seqlens_k is None
    assert table.shape == (3, 6) and inputs.k.shape[0] == 18
    live = 0
    for b, keys in enumerate(lengths.tolist()):
        q, k, v = inputs.sequence(b)
        assert k.shape == v.shape == (1, keys, 16) and k.isfinite().all() and v.isfinite().all()
        assert (table[b, -(-keys // 16) :] == POISON_PAGE).all()
        live += k.numel()
        assert q.shape[:1] == (2,)
    assert int(inputs.k.isfinite().sum()) == live
    modifiers = inputs.modifiers
    assert modifiers.block_table is table and modifiers.cache_seqlens is lengths
    assert (modifiers.kv_layout, modifiers.max_seqlen_k) == (p.kv_layout, 90)


def test_inputs_of_one_timing_have_the_lengths_of_the_roofline():
    assert lengths_of(problem_of()) == sequence_lengths(problem_of())
    packed = problem_of(layout="thd")
    assert lengths_of(packed) == list(zip(*packed_lengths(packed), strict=True))
    assert lengths_of(problem_of(page_size=0, lengths="equal")) is None
    several = [make_inputs(problem_of(), seed, lengths=lengths_of(problem_of())) for seed in (1, 2)]
    first, second = (each.cache_seqlens for each in several)
    assert first is not None and second is not None and torch.equal(first, second)
