"""The roofline of prefill and its backward: pairs that are visible, keys that are seen, no more."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.gpu import known
from autoflash.inputs import make_inputs, packed_lengths, sequence_lengths
from autoflash.mask import visible
from autoflash.problem import Problem
from autoflash.roofline import cache_bytes, floor, visible_pairs
from autoflash.visibility import seen_keys

H200 = known("NVIDIA_H200")
PREFILL = Problem("prefill", "bf16", 3, 4, 2, 64, 40, 70, causal=False)
sides = st.integers(-1, 90)


@given(st.integers(1, 80), st.integers(0, 80), st.booleans(), sides, sides)
@settings(deadline=None)
def test_visible_pairs_are_those_of_the_reference(seqlen_q, seqlen_k, causal, left, right):
    lengths = {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    window = {"window_left": left, "window_right": right}
    problem = replace(PREFILL, causal=causal, **lengths, **window)
    seen = visible(problem, torch.arange(seqlen_q), seqlen_k)
    assert visible_pairs(problem) == 3 * int(seen.sum())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("masked_by", ["documents", "prefix"])
@pytest.mark.parametrize(("density", "seqlen_q"), [(10, 70), (35, 70), (100, 70), (35, 40)])
def test_pairs_of_documents_and_prefixes_are_those_of_the_reference(
    masked_by, density, seqlen_q, causal
):
    if (masked_by, causal) == ("prefix", False) or (masked_by, seqlen_q) == ("documents", 40):
        return  # a prefix is causal beyond it; and documents of some queries are not counted
    fields = {"masked_by": masked_by, "density": density, "seqlen_q": seqlen_q}
    problem = replace(PREFILL, batch=1, causal=causal, **fields)
    rows = torch.arange(seqlen_q)
    masks = make_inputs(problem).modifiers.masks
    seen = seen_keys(problem, masks, 0, range(1), rows, problem.seqlen_k, seqlen_q)
    assert visible_pairs(problem) == int(seen.sum())


def test_a_step_reads_its_last_document_of_each_sequence_and_a_prefix_adds_nothing():
    problem = Problem("decode", "bf16", 4, 8, 2, 64, 1, 1000, page_size=16)
    documents = replace(problem, masked_by="documents", density=10)
    assert cache_bytes(documents) * 10 == cache_bytes(problem)
    assert visible_pairs(documents) * 10 == visible_pairs(problem)
    several = replace(problem, seqlen_q=4)
    prefix = replace(several, masked_by="prefix", density=10)
    assert visible_pairs(prefix) == visible_pairs(several)
    assert cache_bytes(prefix) == cache_bytes(several)


def test_a_prefix_ends_with_each_packed_sequence():
    where = {"layout": "thd", "lengths": "ragged", "causal": True}
    problem = replace(PREFILL, batch=8, masked_by="prefix", density=60, **where)
    lengths = list(zip(*packed_lengths(problem), strict=True))
    assert any(keys < 42 for _, keys in lengths)
    seen = [
        max(0, i + 1 + keys - rows, min(42, keys)) for rows, keys in lengths for i in range(rows)
    ]
    assert visible_pairs(problem) == sum(seen)


def test_pairs_of_blocks_are_as_many_as_their_density_says():
    sizes = {"seqlen_q": 512, "seqlen_k": 512, "mask_block_q": 16, "mask_block_k": 16}
    problem = replace(PREFILL, masked_by="blocks", density=20, **sizes)
    assert visible_pairs(problem) == 3 * 512 * 512 * 20 // 100
    lists = make_inputs(problem).block_mask
    assert lists is not None and lists.full_kv_num_blocks is not None
    there = (lists.kv_num_blocks + lists.full_kv_num_blocks).sum() / (3 * 4 * 32 * 32)
    assert 0.18 < there < 0.22


def test_a_step_moves_as_many_keys_as_the_density_of_its_blocks_says():
    fields = {"op": "decode", "seqlen_q": 2, "seqlen_k": 4000, "batch": 6, "lengths": "ragged"}
    whole = replace(PREFILL, **fields)
    step = replace(whole, masked_by="blocks", density=20, mask_block_k=16)
    listed = [keys * 20 // 100 for keys in sequence_lengths(step)]
    assert visible_pairs(step) == 2 * sum(listed)
    fewer = sum(sequence_lengths(step)) - sum(listed)
    moved = floor(whole, H200).bytes_moved - floor(step, H200).bytes_moved
    assert moved == fewer * whole.num_kv_heads * 2 * 64 * 2
    lists = make_inputs(step, poison=False).block_mask
    assert lists is not None and lists.full_kv_num_blocks is not None
    counts = lists.kv_num_blocks + lists.full_kv_num_blocks
    assert 0.17 < counts.sum() / (6 * 4 * 250) < 0.23


@pytest.mark.parametrize(
    ("left", "seen"), [(-1, 70), (0, 40), (9, 49), (29, 69), (30, 70), (99, 70)]
)
def test_keys_before_every_window_are_not_moved(left, seen):
    moved, whole = (
        floor(problem, H200).bytes_moved
        for problem in (replace(PREFILL, window_left=left), PREFILL)
    )
    assert whole - moved == (70 - seen) * 3 * 2 * (64 + 64) * 2


def test_a_bias_is_moved_once_for_all_sequences_where_it_is_visible():
    causal = replace(PREFILL, causal=True)
    pairs = visible_pairs(causal) // 3
    moved = floor(replace(causal, bias=True), H200).bytes_moved - floor(causal, H200).bytes_moved
    assert moved == pairs * 4 * 2


def test_a_bias_of_decode_is_each_sequences_own():
    step = replace(PREFILL, op="decode", seqlen_q=1)
    moved = floor(replace(step, bias=True), H200).bytes_moved - floor(step, H200).bytes_moved
    assert moved == visible_pairs(step) * 4 * 2 == 3 * 70 * 4 * 2


def test_a_backward_has_five_products_and_moves_every_gradient_as_its_tensor():
    forward, backward = floor(PREFILL, H200), floor(replace(PREFILL, op="backward"), H200)
    assert backward.flops == 2.5 * forward.flops
    lse_bytes = 3 * 4 * 40 * 4
    assert backward.bytes_moved == 2 * forward.bytes_moved + lse_bytes


def test_a_long_prompt_with_a_window_takes_a_fraction_of_the_time():
    long = Problem("prefill", "bf16", 1, 32, 8, 128, 32768, 32768)
    ratio = floor(long, H200).floor_us / floor(replace(long, window_left=4095), H200).floor_us
    assert 4.2 < ratio < 4.4  # 32768 / (2 * 4096) and the window that grows at the start
