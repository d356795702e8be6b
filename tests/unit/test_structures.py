"""Structures of masks: what is drawn for a problem fits its sequences, however short."""

import pytest
from making import decode_of

from autoflash.structures import document_ids, document_lengths

LENGTHS = [0, 1, 2, 3, 5, 17, 64, 4096]


@pytest.mark.parametrize("density", [3, 20, 60, 100])
@pytest.mark.parametrize("seqlen_q", [1, 2, 16])
def test_documents_make_up_each_sequence_whatever_its_length(seqlen_q, density):
    problem = decode_of(
        batch=len(LENGTHS),
        seqlen_q=seqlen_q,
        seqlen_k=4096,
        masked_by="documents",
        density=density,
    )
    for seed in range(20):
        drawn = document_lengths(problem, seed, LENGTHS)
        assert [sum(each) for each in drawn] == LENGTHS
        assert min(min(each) for each in drawn) >= 0
        ids = document_ids(problem, seed, LENGTHS, width=4096, poison=True)
        assert ids.shape == (len(LENGTHS), 4096)
