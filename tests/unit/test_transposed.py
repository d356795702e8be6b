"""Lists of a block mask by blocks of keys: the caller's, or made once of those by queries."""

import torch
from torch.nn.attention.flex_attention import create_block_mask

from autoflash.problem import Problem
from autoflash.runtime.masks import BlockLists, QueryLists, block_lists
from autoflash.runtime.transposed import with_query_lists
from autoflash.structures import block_lists as drawn_lists

BLOCKS = {"masked_by": "blocks", "density": 50, "mask_block_q": 32, "mask_block_k": 16}


def problem(**changed) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 3, "num_kv_heads": 1, "head_dim": 16}
    fields |= {"seqlen_q": 70, "seqlen_k": 90, "causal": False, **BLOCKS}
    return Problem("backward", **(fields | changed))


def pairs(counts: torch.Tensor, indices: torch.Tensor) -> set[tuple[int, ...]]:
    """(sequence, head, row, listed block) of all that count."""
    return {
        (*place, int(indices[(*place, n)]))
        for *place, number in [
            (*index, int(counts[tuple(index)]))
            for index in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist()
        ]
        for n in range(number)
    }


def queries_of(p: Problem, lists: BlockLists) -> QueryLists:
    found = with_query_lists(p, lists).queries
    assert found is not None
    return found


def test_each_pair_of_blocks_is_listed_by_its_keys_too():
    """Entries past those that count are no blocks; what is by keys rises."""
    p = problem()
    lists = drawn_lists(p)
    made = queries_of(p, lists)
    for (counts, indices), (of_keys, rows) in zip(
        (lists[:2], lists[2:4]), (made[:2], made[2:]), strict=True
    ):
        turned = {(b, h, row, column) for b, h, column, row in pairs(of_keys, rows)}
        assert turned == pairs(counts, indices) and len(turned) > 10
        assert of_keys.shape == (2, 3, 6) and rows.shape == (2, 3, 6, 3)
        for b, h, column, _ in pairs(of_keys, rows):
            live = rows[b, h, column, : of_keys[b, h, column]]
            assert (live.diff() > 0).all()


def test_lists_are_transposed_once_until_they_are_written_to_or_gone():
    p = problem()
    lists = drawn_lists(p)
    first = queries_of(p, lists)
    assert queries_of(p, lists._replace(mask_mod=len)) is first
    assert queries_of(p, drawn_lists(p)) is not first
    assert any(place[:3] == (0, 0, 0) for place in pairs(*lists[:2]))
    lists.kv_num_blocks[0, 0, 0] = 0
    second = queries_of(p, lists)
    gone = pairs(*first[:2]) - pairs(*second[:2])
    assert gone and {(b, h, row) for b, h, _, row in gone} == {(0, 0, 0)}


def test_the_lists_that_a_block_mask_has_by_keys_are_taken_and_are_those_that_are_made():
    def rule(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < 40

    mask = create_block_mask(rule, None, None, 96, 96, device="cpu", BLOCK_SIZE=(32, 16))
    p = problem(batch=1, seqlen_q=96, seqlen_k=96, mask="q_idx - kv_idx < 40")
    given = block_lists(mask)
    taken = queries_of(p, given)
    assert taken.q_indices is mask.q_indices and taken.full_q_indices is mask.full_q_indices
    made = queries_of(p, given._replace(queries=None))
    assert made.q_indices is not mask.q_indices
    for one, other in ((made[:2], taken[:2]), (made[2:], taken[2:])):
        assert pairs(*one) == pairs(*other) != set()


def test_lists_by_keys_that_do_not_fit_the_problem_are_made_anew():
    p = problem()
    lists = drawn_lists(p)
    made = queries_of(p, lists)
    narrow = QueryLists(*(each[:, :, :5] for each in made))
    for wrong in (narrow, made._replace(full_q_indices=None), made._replace(q_num_blocks=None)):
        assert queries_of(p, lists._replace(queries=wrong)) is made
    assert queries_of(p, lists._replace(queries=made)) is made
