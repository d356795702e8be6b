"""Arguments of a wrong type are named, with what they must be and what was given."""

from inspect import signature

import pytest
import torch

from autoflash.runtime import merging
from autoflash.runtime.appending import append_kv
from autoflash.runtime.argument_types import KINDS
from autoflash.runtime.dispatch import decode, prefill
from autoflash.runtime.problem import ProblemError

FUNCTIONS = {"prefill": prefill, "decode": decode, "append_kv": append_kv, "merge": merging.merge}
Q = torch.zeros(2, 5, 4, 32, dtype=torch.float16)
K = torch.zeros(2, 7, 2, 32, dtype=torch.float16)
LENGTHS = torch.tensor([3, 7])
GIVEN = {
    "prefill": (Q, K, K),
    "decode": (Q, K, K, LENGTHS),
    "append_kv": (K[0], K[0], K, K, LENGTHS),
    "merge": (Q, torch.zeros(2, 4, 5), Q, torch.zeros(2, 4, 5)),
}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_argument_has_its_kind_in_its_place(function):
    assert list(KINDS[function]) == list(signature(FUNCTIONS[function]).parameters)


@pytest.mark.parametrize(
    ("function", "changes", "told"),
    [
        ("prefill", {"q": None}, "q must be a tensor, given NoneType"),
        ("prefill", {"k": "x"}, "k must be a tensor, given str"),
        ("prefill", {"sinks": [1, 2]}, "sinks must be a tensor or None, given list"),
        ("prefill", {"softcap": "x"}, "softcap must be a number, given str"),
        ("prefill", {"softmax_scale": "x"}, "softmax_scale must be a number or None, given str"),
        ("prefill", {"window": 3}, r"window must be \(keys before, keys after\), given int"),
        ("prefill", {"out": 1}, "out must be a tensor or None, given int"),
        ("prefill", {"max_seqlen_k": 8.0}, "max_seqlen_k must be a whole number or None, given fl"),
        ("decode", {"cache_seqlens": [8]}, "cache_seqlens must be a tensor, given list"),
        ("decode", {"max_seqlen_k": "9"}, "max_seqlen_k must be a whole number or None, given str"),
        ("decode", {"max_seqlen_k": torch.tensor(7)}, "max_seqlen_k must be a whole .*Tensor"),
        ("decode", {"max_seqlen_k": 7.0}, "max_seqlen_k must be a whole number or None, given flo"),
        ("decode", {"max_seqlen_k": True}, "max_seqlen_k True is not from 0 to the cache's"),
        ("decode", {"lengths": 4}, "lengths must be a string, given int"),
        ("append_kv", {"k": None}, "k must be a tensor, given NoneType"),
        ("append_kv", {"k_scale": "1"}, "k_scale must be a number, a tensor or None, given str"),
        ("merge", {"lse_b": None}, "lse_b must be a tensor, given NoneType"),
    ],
)
def test_a_wrong_type_is_named_with_what_is_expected(function, changes, told):
    call = dict(zip(KINDS[function], GIVEN[function])) | changes
    with pytest.raises(ProblemError, match=f"^{function}: {told}"):
        FUNCTIONS[function](**call)


def test_a_block_table_of_one_dimension_is_told_so():
    with pytest.raises(ProblemError, match=r"block_table has 1 dimensions, not \(batch, most page"):
        decode(Q, K, K, LENGTHS, block_table=torch.zeros(2, dtype=torch.int32))


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("shape", [(0, 5), (2, 0)], ids=str)
def test_prefill_without_a_query_has_results_without_an_element(layout, shape):
    batch, tokens = shape
    q, k, v = torch.zeros(batch, tokens, 4, 32), torch.ones(batch, 7, 2, 32), K[:batch].float()
    if layout == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    out, lse = prefill(*leaves, layout=layout, return_lse=True)
    assert out.shape == q.shape and lse.shape == (batch, 4, tokens)
    assert lse.dtype == torch.float32
    gradients = torch.autograd.grad((out.sum(), lse.sum()), leaves)
    assert all((one == 0).all() for one in gradients)
    assert [one.shape for one in gradients] == [leaf.shape for leaf in leaves]


def test_decode_of_an_empty_batch_gives_an_empty_batch():
    out, lse = decode(Q[:0, 0], K[:0], K[:0], LENGTHS[:0], return_lse=True)
    assert out.shape == (0, 4, 32) and lse.shape == (0, 4)
    given = Q.new_empty(0, 1, 4, 32)
    assert decode(Q[:0, :1], K[:0], K[:0], LENGTHS[:0], out=given) is given


def test_tensors_that_never_fit_are_told_without_a_query_too():
    with pytest.raises(ProblemError, match=r"k is torch.float32, q is torch.float16"):
        prefill(Q[:0], K[:0].float(), K[:0])
    with pytest.raises(ProblemError, match=r"out must be \(0, 5, 4, 32\)"):
        prefill(Q[:0], K[:0], K[:0], out=Q)
