"""The gradient of a bias in the interpreter under listed blocks, where some tiles have none."""

from typing import Any

import pytest
import torch
from test_backward import config, every_way, problem, single
from test_backward_masks import BLOCKS
from test_backward_modifiers import assert_right, changed, run

from autoflash.accuracy import GradientBudget
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]


@pytest.mark.parametrize(
    "shape",
    [(2, 2, 130, 150), (1, 2, 130, 150), (2, 1, 130, 1), (1, 1, 1, 150), (2, 1, 1)],
    ids=str,
)
def test_what_shares_a_number_is_summed_over_its_listed_blocks(shape: tuple[int, ...]) -> None:
    made = make_inputs(problem(130, 150, batch=2, bias=True, **BLOCKS))
    bias = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(made.q.dtype)
    for way in (config(), single()) if shape[0] == 1 else (config(),):
        assert_right(changed(made, bias=bias), way)


def listing(made: Inputs, partial: list[list[int]], full: list[list[int]]) -> Inputs:
    """The inputs with these blocks of keys for each block of queries, of all heads alike."""
    lists: dict[str, Any] = {}
    for name, rows in (("kv", partial), ("full_kv", full)):
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32)
        most = 1 + max(map(len, (*partial, *full)))
        padded = [row + [1] * (most - len(row)) for row in rows]  # a block that is there
        lists[f"{name}_num_blocks"] = counts[None, None]
        lists[f"{name}_indices"] = torch.tensor(padded, dtype=torch.int32)[None, None]
    assert made.block_mask is not None
    return changed(made, block_mask=made.block_mask._replace(**lists))


@every_way
def test_places_in_no_list_have_exactly_no_gradient_and_are_not_read(way: Config) -> None:
    made = make_inputs(problem(190, 190, num_heads=1, bias=True, causal=False, **BLOCKS))
    inputs = listing(made, [[0], [], [2]], [[2], [1], []])
    assert inputs.bias is not None
    bias = torch.full_like(inputs.bias, float("nan"))
    seen = [(0, 0), (0, 2), (1, 1), (2, 2)]
    for i, j in seen:
        place = (..., slice(64 * i, 64 * i + 64), slice(64 * j, 64 * j + 64))
        bias[place] = inputs.bias[place]
    _, beside = assert_right(changed(inputs, bias=bias), way)
    assert beside.dbias is not None
    for i, j in ((i, j) for i in range(3) for j in range(3)):
        tile = beside.dbias[..., 64 * i : 64 * i + 64, 64 * j : 64 * j + 64]
        assert (tile != 0).any() if (i, j) in seen else (tile == 0).all(), (i, j)


@pytest.mark.parametrize("full", [True, False], ids=["full", "partial"])
def test_lists_of_more_blocks_than_are_read_at_once_are_read_to_their_ends(full: bool) -> None:
    sizes = {"mask_block_q": 16, "mask_block_k": 16}
    made = make_inputs(problem(16, 1120, num_heads=1, bias=True, causal=False, **BLOCKS | sizes))
    some = [[*range(3), *range(4, 70)]]
    inputs = listing(made, [[]] if full else some, some if full else [[]])
    _, beside = assert_right(inputs, single(KV_BLOCK_M=16, KV_BLOCK_N=16))
    assert beside.dbias is not None
    assert (beside.dbias[..., 48:64] == 0).all() and (beside.dbias[..., 1104:] != 0).any()


def test_there_may_be_no_list_of_full_blocks() -> None:
    made = make_inputs(problem(70, 130, batch=2, bias=True, **BLOCKS))
    assert made.block_mask is not None
    alone = made.block_mask._replace(full_kv_num_blocks=None, full_kv_indices=None)
    inputs = changed(made, block_mask=alone)
    for way in (config(), single()):
        assert_right(inputs, way)


def test_the_blocks_are_felt() -> None:
    """What is found right is not the gradient of the bias without them."""
    plain = make_inputs(problem(70, 97, bias=True))
    masked = make_inputs(problem(70, 97, bias=True, **BLOCKS))
    for way in (config(), single()):
        _, beside = run(masked, way)
        gradients, _ = run(plain, way)
        assert not GradientBudget(plain).judge(gradients, beside).correct
