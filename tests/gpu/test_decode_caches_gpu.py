"""Decode on a GPU over caches of any form: pages of any size, K and V in one tensor, far scores."""

import math
from dataclasses import replace

import pytest
import torch
from running import run
from test_decode_gpu import problem, same_bits, schedules

from autoflash.accuracy import Budget
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def in_order(paged: Inputs) -> Inputs:
    """The same sequences in a contiguous cache whose dead slots are NaN."""
    p = replace(paged.problem, page_size=0)
    shape = (p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim)
    k, v = (paged.k.new_full(shape, float("nan")) for _ in range(2))
    for b in range(p.batch):
        _, k_b, v_b = paged.sequence(b)
        k[b, : k_b.shape[1]], v[b, : v_b.shape[1]] = k_b.transpose(0, 1), v_b.transpose(0, 1)
    return Inputs(p, paged.q, k, v, paged.cache_seqlens, None)


@pytest.mark.parametrize("page_size", [1, 3, 16, 48, 480])
def test_pages_of_any_size_are_right(page_size: int, gpu: Gpu) -> None:  # case B24
    p = problem(6, num_heads=4, seqlen_k=500, page_size=page_size)
    paged = make_inputs(p, device="cuda", lengths=[1, 47, 48, 49, 96, 500])
    budget = Budget(in_order(paged))
    for config in schedules(p, gpu):
        verdict = budget.judge(*run(paged, config, gpu=gpu))
        assert verdict.correct, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("place", [0, 1, 3], ids=["first", "after the pages", "after the heads"])
def test_k_and_v_of_one_tensor_are_read_where_they_are(  # case B25
    place: int, page_size: int, gpu: Gpu
) -> None:
    """And the table may be columns of a wider one, the lengths every other number of a tensor."""
    inputs = make_inputs(
        problem(3, seqlen_k=600, page_size=page_size), device="cuda", lengths=[600, 21, 300]
    )
    assert inputs.block_table is not None and inputs.cache_seqlens is not None
    k, v = torch.stack([inputs.k, inputs.v], dim=place).unbind(place)
    table = torch.nn.functional.pad(inputs.block_table, (2, 3), value=2**30)[:, 2:-3]
    lengths = torch.stack([inputs.cache_seqlens] * 2, dim=1)[:, 0]
    views = replace(inputs, k=k, v=v, block_table=table, cache_seqlens=lengths)
    for config in schedules(inputs.problem, gpu):
        plain = run(inputs, config, gpu=gpu)
        assert same_bits(run(views, config, gpu=gpu), plain), config
        other = replace(inputs, v=inputs.v.transpose(1, 2).contiguous().transpose(1, 2))
        assert same_bits(run(other, config, gpu=gpu), plain), config


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_scores_far_from_zero_keep_their_softmax(sign: float, gpu: Gpu) -> None:  # case B38
    p = problem(2, num_kv_heads=1, seqlen_k=37)
    inputs = make_inputs(p, device="cuda", lengths=[37, 36], poison=False)
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, 544.0 * sign
    budget = Budget(inputs)
    for config in schedules(p, gpu):
        verdict = budget.judge(*run(inputs, config, gpu=gpu))
        assert verdict.correct, f"{config}: {verdict.reason}"


@pytest.mark.parametrize("page_size", [0, 16])
def test_zero_keys_make_lse_the_log_of_their_number(page_size: int, gpu: Gpu) -> None:  # case B50
    lengths = [4096, 1, 77, 1000]
    p = problem(4, page_size=page_size)
    inputs = make_inputs(p, device="cuda", lengths=lengths, poison=False)
    inputs.k.zero_()
    expected = torch.tensor([math.log(n) for n in lengths], device="cuda")[:, None, None]
    for config in schedules(p, gpu):
        _, lse = run(inputs, config, gpu=gpu)
        torch.testing.assert_close(lse, expected.expand_as(lse), rtol=2**-20, atol=2**-20)
