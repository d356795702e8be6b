"""Arguments of packed sequences: the problem they pose, and one line for each that does not fit."""

import pytest
import torch

from autoflash.runtime.arguments import prefill_problem
from autoflash.runtime.modifiers import NO_MODIFIERS
from autoflash.runtime.packed import check_packed
from autoflash.runtime.problem import ProblemError


def ends(*lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths], dtype=dtype).cumsum(0, dtype=dtype)


Q, K = torch.zeros(9, 4, 32), torch.zeros(12, 2, 32)
GIVEN = NO_MODIFIERS._replace(
    cu_seqlens_q=ends(3, 0, 6), cu_seqlens_k=ends(3, 2, 7), max_seqlen_q=6, max_seqlen_k=7
)


def posed(q=Q, k=K, layout="bshd", **changes):
    return prefill_problem(q, k, k, True, layout, GIVEN._replace(**changes))


def test_the_longest_lengths_and_the_number_of_sequences_are_the_problem():
    problem = posed()
    assert (problem.layout, problem.batch, problem.lengths) == ("thd", 3, "ragged")
    assert (problem.seqlen_q, problem.seqlen_k) == (6, 7)
    assert (problem.num_heads, problem.num_kv_heads, problem.head_dim) == (4, 2, 32)
    assert problem == posed(layout="thd")


def test_lengths_are_equal_where_all_are_the_longest():
    even = {"cu_seqlens_q": ends(3, 3, 3), "cu_seqlens_k": ends(4, 4, 4)}
    assert posed(**even, max_seqlen_q=3, max_seqlen_k=4).lengths == "equal"
    assert posed(**even, max_seqlen_q=4, max_seqlen_k=4).lengths == "ragged"


def test_a_window_that_reaches_all_keys_of_the_longest_is_none():
    assert not posed(window=(6, -1)).windowed and posed(window=(5, -1)).windowed


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_seqlen_k": None}, "prefill: packed sequences need max_seqlen_k"),
        ({"cu_seqlens_k": None}, "prefill: packed sequences need cu_seqlens_k"),
        ({"max_seqlen_q": 6.0}, "prefill: max_seqlen_q 6.0 is not a number of tokens"),
        ({"max_seqlen_q": -1}, "prefill: max_seqlen_q -1 is not a number of tokens"),
        ({"cu_seqlens_q": ends(3).float()}, "cu_seqlens_q is torch.float32, not int32 or int64"),
        ({"cu_seqlens_k": ends(3, 2)}, r"cu_seqlens_k must be contiguous, \(batch \+ 1,\)"),
        ({"cu_seqlens_q": ends(3, 0, 6)[:, None]}, "cu_seqlens_q must be contiguous"),
        ({"layout": "bhsd"}, "layout 'bhsd' has an axis of sequences, packed ones have none"),
        ({"q": Q[None]}, "prefill: q has 4 dimensions, not 3"),
        ({"k": K[:, :, :16]}, "prefill: k has head_dim 16, expected 32"),
        ({"bias": torch.zeros(9, 12)}, r"bias is \(9, 12\), which does not broadcast to"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=message):
        posed(**changes)


def test_a_bias_is_of_queries_and_keys_in_their_own_sequence():
    for shape in ((6, 7), (3, 4, 1, 7), (1, 1), ()):
        assert posed(bias=torch.zeros(shape)).switches == ("causal", "bias", "varlen")
    with pytest.raises(ProblemError, match=r"bias is \(7, 7\), which does not broadcast to"):
        posed(bias=torch.zeros(7, 7))


def test_packed_sequences_have_prefixes_and_rules():
    p = posed(prefix_lens=torch.zeros(3).int(), mask="(kv_idx>3)")
    assert p.switches[:3] == ("causal", "prefix", "varlen") and p.mask == "kv_idx > 3"
    assert p.density == 10  # nobody told it
    with pytest.raises(ProblemError, match=r"prefix_lens is \(2,\), expected \(3,\)"):
        posed(prefix_lens=torch.zeros(2).int())


def test_the_layout_of_packed_sequences_needs_to_know_where_they_begin():
    with pytest.raises(ProblemError, match="layout 'thd' needs cu_seqlens_q"):
        prefill_problem(Q, K, K, True, "thd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cu_seqlens_q": ends(3, 0, 7)}, "cu_seqlens_q does not rise from 0 to at most 9 tokens"),
        ({"cu_seqlens_k": ends(3, -1, 9)}, "cu_seqlens_k does not rise from 0 to at most 12"),
        ({"cu_seqlens_q": ends(3, 0, 6) + 1}, "cu_seqlens_q does not rise from 0"),
        ({"max_seqlen_k": 6}, "cu_seqlens_k has a sequence of 7 tokens, the longest is said to"),
    ],
)
def test_checking_finds_sequences_that_are_not_there(changes, message):
    check_packed(Q, K, GIVEN)
    with pytest.raises(ProblemError, match=message):
        check_packed(Q, K, GIVEN._replace(**changes))
