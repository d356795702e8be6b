"""Merging on a GPU: results over parts of the keys are the result over all of them."""

import pytest
import torch
from exported_calls import load_module
from making import decode_of, prefill_of, winner_of
from test_merge import SUMMED, expected, part

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.gpu import detect
from autoflash.inputs import Inputs, make_inputs

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:autoflash")]


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    winners = [winner_of(problem, gpu=detect()) for problem in (prefill_of(), decode_of())]
    path = tmp_path_factory.mktemp("merging") / "attention_dispatch.py"
    path.write_text(export(winners).text)
    return load_module(path)


def parts_of(inputs: Inputs) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """K and V of the first two thirds of the keys, and of the rest."""
    at = 2 * inputs.problem.seqlen_k // 3
    return [(inputs.k[:, keys], inputs.v[:, keys]) for keys in (slice(at), slice(at, None))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [40, 128])
def test_rows_are_weighed_by_their_sums(module, dtype, head_dim):
    a, b = (
        tuple(each.cuda() for each in part(2, 700, 3, head_dim, seed=seed, dtype=dtype))
        for seed in (1, 2)
    )
    out, lse = module.merge(*a, *b)
    right, right_lse, size = expected(a, b)
    unit = torch.finfo(dtype).eps
    assert ((out.double() - right).abs() <= unit * right.abs() + SUMMED * size).all()
    torch.testing.assert_close(lse.double(), right_lse, rtol=2**-20, atol=2**-20)


def test_parts_of_a_prefill_merged_are_the_whole(module):  # case B50
    p = prefill_of(batch=2, seqlen_q=333, seqlen_k=999, causal=False, dtype="fp32")
    inputs = make_inputs(p, device="cuda")
    parts = [module.prefill(inputs.q, *each, return_lse=True) for each in parts_of(inputs)]
    verdict = Budget(inputs).judge(*module.merge(*parts[0], *parts[1]))
    assert verdict.correct, verdict.reason


def test_parts_of_a_step_merged_are_the_whole(module):  # case B50
    p = decode_of(batch=3, seqlen_k=3000, dtype="fp32")
    inputs = make_inputs(p, device="cuda")
    parts = []
    for k, v in parts_of(inputs):
        lengths = torch.full((3,), k.shape[1], dtype=torch.int32, device="cuda")
        parts.append(module.decode(inputs.q, k, v, lengths, return_lse=True))
    verdict = Budget(inputs).judge(*module.merge(*parts[0], *parts[1]))
    assert verdict.correct, verdict.reason


def test_a_part_without_keys_says_nothing_whatever_it_holds(module):
    inputs = make_inputs(prefill_of(), device="cuda")
    out, lse = module.prefill(inputs.q, inputs.k, inputs.v, causal=True, return_lse=True)
    spoilt, nothing = torch.full_like(out, float("nan")), torch.full_like(lse, -torch.inf)
    for merged in (
        module.merge(out, lse, spoilt, nothing),
        module.merge(spoilt, nothing, out, lse),
    ):
        assert torch.equal(merged[0], out) and torch.equal(merged[1], lse)
