"""Inputs of decode: pages where the problem says they lie, and no live slot among the dead."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from autoflash.gpu import known
from autoflash.inputs import POISON_PAGE, Inputs, lengths_of, make_inputs, sequence_lengths
from autoflash.pages import shared_tokens
from autoflash.problem import Problem, ProblemError, title
from autoflash.roofline import floor

PAGED = Problem("decode", "bf16", 4, 4, 2, 16, 1, 100, page_size=16, lengths="ragged")


def used_ids(inputs: Inputs) -> list[list[int]]:
    """The page ids of each sequence up to its length."""
    assert inputs.block_table is not None and inputs.cache_seqlens is not None
    pages = (inputs.cache_seqlens + 15) // 16
    return [row[:n].tolist() for row, n in zip(inputs.block_table, pages, strict=True)]


def test_contiguous_pages_follow_each_other_and_permuted_ones_do_not() -> None:
    for pages, in_order in (("contiguous", True), ("permuted", False)):
        ids = used_ids(make_inputs(replace(PAGED, pages=pages)))
        steps = {b - a for row in ids for a, b in pairwise(row)}
        assert (steps == {1}) is in_order
        flat = [page for row in ids for page in row]
        assert len(flat) == len(set(flat))


def test_shared_pages_are_those_of_the_first_half_and_the_rest_is_each_sequences_own() -> None:
    problem = replace(PAGED, pages="shared")
    assert shared_tokens(problem) == 48  # three whole pages of 50 tokens
    ids = used_ids(make_inputs(problem))
    assert all(row[:3] == ids[0][:3][: len(row)] for row in ids)
    own = [page for row in ids for page in row[3:]]
    assert len(own) == len(set(own)) and not set(own) & set(ids[0][:3])
    assert len(own) > len(ids[0][3:])


@pytest.mark.parametrize("pages", ["permuted", "contiguous", "shared"])
@pytest.mark.parametrize("lengths", [[100, 20, 0, 97], [100, 97, 48, 10], [90]])
def test_what_a_sequence_sees_is_finite_and_all_else_is_poison(
    pages: str, lengths: list[int]
) -> None:
    problem = replace(PAGED, batch=len(lengths), pages=pages, bias=True)
    inputs = make_inputs(problem, lengths=lengths)
    live = torch.zeros_like(inputs.k, dtype=torch.bool)
    assert inputs.block_table is not None and inputs.bias is not None
    assert inputs.bias.shape[2:] == (problem.seqlen_q, inputs.block_table.shape[1] * 16)
    for b, keys in enumerate(lengths):
        _, k, v = inputs.sequence(b)
        assert k.shape[1] == keys and k.isfinite().all() and v.isfinite().all()
        assert inputs.bias[b, ..., :keys].isfinite().all()
        assert inputs.bias[b, ..., keys:].isnan().all()
        for position in range(keys):
            live[inputs.block_table[b, position // 16], position % 16] = True
        assert (inputs.block_table[b, -(-keys // 16) :] == POISON_PAGE).all()
    assert torch.equal(inputs.k.isfinite(), live) and torch.equal(inputs.v.isfinite(), live)


def test_the_roofline_reads_a_shared_page_once() -> None:
    gpu = known("NVIDIA_H200")
    problem = replace(PAGED, lengths="equal")
    saved = (
        floor(problem, gpu).bytes_moved - floor(replace(problem, pages="shared"), gpu).bytes_moved
    )
    assert saved == 3 * 48 * 2 * (16 + 16) * 2  # of three sequences, K and V of two heads in bf16
    ragged = replace(PAGED, batch=12, pages="shared")
    first, *others = sequence_lengths(ragged)
    assert min(others) < 48  # a sequence of shared tokens alone brings nothing of its own
    read = first + sum(max(0, keys - 48) for keys in others)
    queries = 2 * 12 * 4 * 16 * 2
    assert floor(ragged, gpu).bytes_moved == read * 2 * (16 + 16) * 2 + queries


def test_a_problem_says_of_its_pages_and_scales_what_is_not_as_usual() -> None:
    assert title(PAGED).endswith("pages of 16, ragged")
    documents = replace(PAGED, masked_by="documents", density=7)
    assert title(documents).endswith("pages of 16, documents, 7 %, ragged")
    blocks = replace(documents, masked_by="blocks", mask_block_k=64)
    assert title(blocks).endswith("pages of 16, blocks of 64 keys, 7 %, ragged")
    told = title(replace(PAGED, pages="shared", kv_dtype="int8", kv_scales="head"))
    assert told.endswith("pages of 16, pages shared, int8 with scales per head, ragged")


def captured(batch: int, **changes: Any) -> Problem:
    fields = {"page_size": 16, "lengths": "captured", **changes}
    return Problem("decode", "bf16", batch, 8, 2, 64, 1, 8192, **fields)


def test_replays_of_a_captured_step_have_other_lengths_with_as_many_short_as_long_ones() -> None:
    draws = [sequence_lengths(captured(64), seed) for seed in range(9)]
    assert len({tuple(draw) for draw in draws}) == 9
    assert draws[0] == sequence_lengths(captured(64), 0)
    for draw in draws:
        used = sorted(keys for keys in draw if keys)
        assert len(draw) - len(used) == 8
        assert 8192 // 64 <= used[0] < 160 and 7600 < used[-1] <= 8192
        assert 900 < used[len(used) // 2] < 1150  # an eighth of the longest
    assert max(map(sum, draws)) < 1.03 * min(map(sum, draws))


def test_a_captured_batch_of_one_is_long_and_short_and_never_empty() -> None:
    draws = [sequence_lengths(captured(1), seed)[0] for seed in range(40)]
    assert min(draws) < 200 and max(draws) > 6000


def test_inputs_of_a_captured_step_are_of_replays_whose_tables_are_alike() -> None:
    assert lengths_of(captured(8)) is None and lengths_of(captured(8, lengths="ragged"))
    inputs = [make_inputs(captured(8), seed) for seed in range(2)]
    a, b = (each.cache_seqlens for each in inputs)
    assert a is not None and b is not None and not torch.equal(a, b) and (a == 0).any()
    tables = [each.block_table for each in inputs]
    assert {None if table is None else tuple(table.shape) for table in tables} == {(8, 512)}


def test_only_a_decode_step_over_whole_sequences_is_captured() -> None:
    for op, changes in (("prefill", {}), ("decode", {"pages": "chosen"})):
        fields = {"page_size": 16, "lengths": "captured", **changes}
        with pytest.raises(ProblemError, match="'captured' are of a decode step over whole"):
            Problem(op, "bf16", 2, 8, 2, 64, 1, 512, **fields)
