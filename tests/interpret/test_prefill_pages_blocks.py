"""Blocks over pages: rows of a chunk by the keys of its sequence, in whatever pages they lie."""

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from making import prefill_of, winner_of
from test_prefill import LOADS, config
from test_prefill_pages import assert_right, chunks, same_bits, tokens_first

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs, make_inputs
from autoflash.runtime.masks import BlockLists
from autoflash.subjects import exported_module

BLOCKS: dict[str, Any] = {"masked_by": "blocks", "density": 50}
BLOCKS |= {"mask_block_q": 16, "mask_block_k": 32}
SMALL = {"BLOCK_M": 16, "BLOCK_N": 32}
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 3)"
DEAD = 2**30

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def hidden_keys(inputs: Inputs) -> torch.Tensor:
    """(batch, keys, num_kv_heads): in blocks that no row of any head of the group lists."""
    p, lists = inputs.problem, inputs.block_mask
    assert lists is not None and inputs.block_table is not None
    keys = inputs.block_table.shape[1] * p.page_size
    listed = torch.zeros(p.batch, p.num_kv_heads, -(-keys // p.mask_block_k), dtype=torch.bool)
    for counts, indices in (lists[:2], lists[2:4]):
        for b, h, row in product(range(p.batch), range(p.num_heads), range(counts.shape[2])):
            own = indices[b, h, row, : counts[b, h, row]].long()
            listed[b, h // p.group_size, own] = True
    return ~listed.repeat_interleave(p.mask_block_k, dim=2)[..., :keys].transpose(1, 2)


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("causal", [True, False])
def test_chunks_of_all_lengths_see_their_blocks(causal: bool, load: str) -> None:
    """Of lists for as many keys as the table holds, some past a sequence's length."""
    for page_size, kv_layout in ((32, "nhd"), (16, "hnd"), (3, "nhd")):
        sizes = {"page_size": page_size, "kv_layout": kv_layout, "causal": causal}
        assert_right(chunks(**BLOCKS, **sizes), config(LOAD=load, **SMALL))


def test_tiles_smaller_than_blocks_meet_rules_softcap_slopes_a_bias_and_sinks() -> None:
    blocks = {**BLOCKS, "mask_block_k": 64, "mask_block_q": 32}
    fields: dict[str, Any] = {"softcap": True, "sinks": True, "causal": True}
    for added in ("alibi", "bias"):
        for mask in ("", RULE):
            inputs = chunks(**blocks, **fields, **{added: True}, mask=mask, num_heads=4)
            assert_right(inputs, config(**SMALL))
    assert_right(chunks(**blocks, dtype="fp32", head_dim=24, head_dim_v=40), config(**SMALL))


def test_lists_may_be_of_all_heads_and_without_whole_blocks() -> None:
    """Rows of the call by keys of each sequence: partial blocks are causal by positions."""
    counts = torch.tensor([2, 1, 3], dtype=torch.int32)[None, None]
    indices = torch.tensor([[2, 0, DEAD], [1, DEAD, DEAD], [3, 0, 9]], dtype=torch.int32)
    lists = BlockLists(counts, indices[None, None], None, None, BLOCK_SIZE=(16, 32))
    inputs = chunks(**BLOCKS, causal=True)
    assert_right(replace(inputs, block_mask=lists), config(**SMALL))


def test_what_no_head_lists_and_entries_that_do_not_count_change_no_bit() -> None:
    inputs = chunks(**{**BLOCKS, "density": 20}, causal=False, num_heads=4, num_kv_heads=2)
    lists, table = inputs.block_mask, inputs.block_table
    assert lists is not None and table is not None and lists.full_kv_indices is not None
    for dead in (0, -1):
        changed = {
            name: getattr(lists, name).masked_fill(getattr(lists, name) == DEAD, dead)
            for name in ("kv_indices", "full_kv_indices")
        }
        other = replace(inputs, block_mask=lists._replace(**changed))
        assert same_bits(inputs, other, config(**SMALL))
    hidden = hidden_keys(inputs).unflatten(1, (table.shape[1], -1))
    k, v = inputs.k.clone(), inputs.v.clone()
    assert inputs.cache_seqlens is not None
    for b, length in enumerate(inputs.cache_seqlens.tolist()):
        for page in range(-(-length // inputs.problem.page_size)):
            for cache in (k, v):
                cells = tokens_first(cache, inputs.problem)[int(table[b, page])]
                cells[hidden[b, page]] = float("nan")
    assert not torch.equal(k.isnan(), inputs.k.isnan())
    assert same_bits(inputs, replace(inputs, k=k, v=v), config(**SMALL))


SIZES: dict[str, Any] = {"batch": 3, "seqlen_q": 40, "seqlen_k": 97, "head_dim": 16}
SIZES |= {"dtype": "fp16", "page_size": 16, "lengths": "ragged", **BLOCKS}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("blocks") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of(**SIZES, causal=True))]).text)
    return exported_module(path)


def made(seed: int = 0) -> Inputs:
    return make_inputs(prefill_of(**SIZES, causal=True), seed, lengths=[97, 40, 63])


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    given = {**inputs.modifiers.of_prefill, "causal": True, "return_lse": True}
    return module.prefill(inputs.q, inputs.k, inputs.v, **{**given, **changed})


def test_calls_of_one_form_follow_their_lists_and_are_one_operator_in_a_graph(
    exported: ModuleType,
) -> None:
    for seed in range(3):
        inputs = made(seed)
        for check in (False, True):
            verdict = Budget(inputs).judge(*call(exported, inputs, check=check))
            assert verdict.correct, verdict.reason

    def layer(q: torch.Tensor) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(inputs.q), layer(inputs.q)))
    lists = inputs.block_mask
    assert lists is not None
    wrong = lists._replace(kv_indices=torch.full_like(lists.kv_indices, 4))
    with pytest.raises(exported.ProblemError, match=r"is 4, there are blocks 0\.\.3"):
        call(exported, inputs, block_mask=wrong, check=True)
