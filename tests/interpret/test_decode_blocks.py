"""Blocks in decode: listed for a step's query tokens, by the places of keys in their sequence."""

from dataclasses import replace
from itertools import product
from types import ModuleType
from typing import Any

import pytest
import torch
from decoding import (
    LAST,
    check,
    config,
    decode,
    each_choice,
    every_config,
    expect_seen,
    problem,
    replace_block_n,
    same_bits,
    step,
)
from making import decode_of, winner_of
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.inputs import Inputs, make_inputs
from autoflash.runtime.masks import BlockLists
from autoflash.subjects import exported_module

BLOCKS: dict[str, Any] = {"masked_by": "blocks", "density": 40, "mask_block_k": 32}
EDGES = [100, 0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65]  # of pages of 16, of blocks and tiles of 32
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 or h == 1"
DEAD = 2**30

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


def lists_of(
    partial: list[list[int]], full: list[list[int]] | None, heads: int, block_k: int = 32
) -> BlockLists:
    """Lists of heads of sequences, one sequence's after the other's; dead entries after them."""

    def listed(rows: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        width = max(map(len, rows)) + 1
        padded = [row + [DEAD] * (width - len(row)) for row in rows]
        shape = (len(rows) // heads, heads, 1)
        counts = torch.tensor([len(row) for row in rows], dtype=torch.int32).view(shape)
        return counts, torch.tensor(padded, dtype=torch.int32).view(*shape, width)

    if full is None:
        return BlockLists(*listed(partial), None, None, BLOCK_SIZE=(128, block_k))
    width = max(map(len, (*partial, *full)))
    lists = []
    for rows in (partial, full):
        counts, indices = listed(rows)
        wider = torch.full((*indices.shape[:3], width + 1), DEAD, dtype=torch.int32)
        wider[..., : indices.shape[3]] = indices
        lists += [counts, wider]
    return BlockLists(*lists, BLOCK_SIZE=(128, block_k))


@every_config
def test_lengths_around_every_edge_of_tiles_blocks_and_pages_are_right(config: Config) -> None:
    for seqlen_q, page_size in ((1, 16), (4, 0)):
        inputs = step(EDGES, page_size=page_size, seqlen_q=seqlen_q, **BLOCKS)
        check(inputs, config, splits=3)


@each_choice
def test_blocks_smaller_than_a_tile_larger_or_across_its_edges_are_right(config: Config) -> None:
    for block_k, seqlen_q, page_size in ((16, 1, 0), (48, 3, 16), (80, 1, 3), (128, 2, 64)):
        sizes = {"mask_block_k": block_k, "seqlen_q": seqlen_q, "page_size": page_size}
        inputs = step([200, 33, 0, 129], seqlen_k=200, **{**BLOCKS, **sizes})
        check(inputs, config, splits=3)
        check(inputs, replace_block_n(config, 64), splits=3)


@each_choice
@pytest.mark.parametrize("added", ["alibi", "bias"])
def test_blocks_meet_rules_softcap_sinks_and_what_is_added(added: str, config: Config) -> None:
    """Slopes count how far a key of a whole block is from its query, before or after."""
    fields: dict[str, Any] = {"softcap": True, "sinks": True, added: True}
    for seqlen_q, page_size in ((1, 0), (3, 16)):
        sizes = {"seqlen_q": seqlen_q, "page_size": page_size}
        check(step([100, 33, 0, 1], 6, 2, mask=RULE, **sizes, **fields, **BLOCKS), config)


def test_merging_programs_sixteen_queries_other_types_and_many_heads_are_right() -> None:
    for dtype, seqlen_q, chosen in (("bf16", 16, LAST), ("fp32", 5, config()), ("bf16", 1, LAST)):
        sizes = {"head_dim": 40, "dtype": dtype, **BLOCKS, "seqlen_q": seqlen_q}
        check(step([100, 17, 65, 3], 6, 2, **sizes, sinks=True), chosen, splits=3)
    for chosen in (config(), config("group"), LAST):  # the rows of a KV head take two tiles
        check(step([100, 33], 71, 1, seqlen_q=2, **BLOCKS), chosen, splits=3)


def test_quantised_caches_and_latent_attention_are_right() -> None:
    for kv_dtype, kv_scales, page_size in (("fp8_e4m3", "head", 16), ("int8", "token", 0)):
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, "page_size": page_size}
        for seqlen_q in (1, 3):
            fields |= {"head_dim": 32, **BLOCKS, "seqlen_q": seqlen_q}
            check(step([100, 65, 0], **fields), config(), splits=3)
    check(step([100, 65, 64], **fields), LAST, splits=3)
    knobs = {k: v for k, v in config("group").knobs if k != "SWAP"} | {"BLOCK_M": 16}
    latent = {"head_dim": 576, "head_dim_v": 512, "dtype": "bf16", **BLOCKS, "seqlen_q": 2}
    for page_size, block_k in ((0, 32), (16, 48)):
        latent |= {"page_size": page_size, "mask_block_k": block_k}
        check(step([100, 65, 33, 0], 4, 1, **latent), Config.of("decode_latent", knobs), splits=3)


@each_choice
def test_each_head_sees_its_own_blocks_whole_ones_beyond_its_tokens_too(config: Config) -> None:
    """In any order, and those past a length in vain; heads of a group may list others."""
    lengths = [100, 33, 64]
    partial = [[3, 0], [], [1], [2, 1], [0, 1], [1], [], [9, 0], [1], [0], [1, 0], [5]]
    full = [[1], [3, 9], [], [0], [], [0], [1], [1], [], [1], [3], [1, 0]]
    lists = lists_of(partial, full, heads=4)

    def seen(b: int, i: int, h: int) -> list[int]:
        place, row = lengths[b] - 3 + i, 4 * b + h
        return [
            j
            for j in range(lengths[b])
            if j // 32 in full[row] or (j // 32 in partial[row] and j <= place)
        ]

    inputs = step(lengths, 4, 2, dtype="fp32", seqlen_q=3, seqlen_k=128, **BLOCKS)
    given = replace(inputs, block_mask=lists)
    expect_seen(given, config, seen)
    check(given, config, splits=3)


@each_choice
def test_lists_may_be_of_all_heads_of_all_sequences_and_without_whole_blocks(
    config: Config,
) -> None:
    lengths = [100, 5, 66]
    lists = lists_of([[2, 0]], None, heads=1)

    def seen(b: int, i: int, _: int) -> list[int]:
        return [j for j in range(lengths[b] - 1 + i) if j // 32 in (0, 2)]

    inputs = step(lengths, 6, 2, dtype="fp32", seqlen_q=2, seqlen_k=128, **BLOCKS)
    given = replace(inputs, block_mask=lists)
    expect_seen(given, config, seen)
    check(given, config, splits=3)


@each_choice
def test_where_no_block_is_listed_there_is_nothing_or_the_sink(config: Config) -> None:
    lists = lists_of([[], [DEAD, 7]], [[], []], heads=1)
    for sinks, page_size in product((False, True), (0, 16)):
        inputs = step([100, 33], seqlen_q=2, page_size=page_size, sinks=sinks, **BLOCKS)
        spoilt = replace(inputs, k=inputs.k * float("nan"), v=inputs.v * float("nan"))
        out, lse = decode(replace(spoilt, block_mask=lists), config)
        assert not out.any()
        expected = inputs.sinks[None, :, None] if sinks else torch.tensor(float("-inf"))
        torch.testing.assert_close(lse, expected.expand_as(lse))


@each_choice
def test_all_blocks_listed_in_any_order_change_no_bit(config: Config) -> None:
    for seqlen_q, page_size in product((1, 3), (0, 16)):
        inputs = step([100, 0, 33], page_size=page_size, seqlen_q=seqlen_q, **BLOCKS)
        plain = replace(inputs.problem, masked_by="", density=0, mask_block_q=0, mask_block_k=0)
        expected = decode(replace(inputs, problem=plain, block_mask=None), config)
        for order in ([0, 1, 2, 3], [2, 3, 0, 1, 8]):
            every = replace(inputs, block_mask=lists_of([order], None, heads=1))
            assert same_bits(decode(every, config), expected)


@each_choice
def test_what_is_listed_in_vain_and_what_no_head_lists_change_no_bit(config: Config) -> None:
    for block_k, seqlen_q in ((32, 1), (16, 3), (48, 1)):
        fields = {**BLOCKS, "mask_block_k": block_k, "seqlen_q": seqlen_q}
        inputs = step([100, 33, 66], seqlen_k=128, **fields)
        lists = inputs.block_mask
        assert lists is not None and lists.full_kv_indices is not None
        expected = decode(inputs, config)
        for dead in (0, 1, -1):  # past those that count
            changed = {
                name: getattr(lists, name).masked_fill(getattr(lists, name) == DEAD, dead)
                for name in ("kv_indices", "full_kv_indices")
            }
            other = replace(inputs, block_mask=lists._replace(**changed))
            assert same_bits(decode(other, config), expected)
        listed = torch.zeros(3, 2, -(-128 // block_k), dtype=torch.bool)
        for counts, indices in (lists[:2], lists[2:4]):
            for b, h in product(range(3), range(4)):
                listed[b, h // 2, indices[b, h, 0, : counts[b, h, 0]].long()] = True
        hidden = ~listed.repeat_interleave(block_k, dim=2)[..., :128].transpose(1, 2)
        assert hidden[:, :33].any()
        k, v = (t.masked_fill(hidden[..., None], float("nan")) for t in (inputs.k, inputs.v))
        assert same_bits(decode(replace(inputs, k=k, v=v), config), expected)


@each_choice
def test_blocks_follow_the_key_and_not_its_page(config: Config) -> None:
    p = problem(3, 4, 2, page_size=16, seqlen_q=3, **BLOCKS)
    inputs = make_inputs(p, lengths=[100, 33, 64], poison=False)
    assert inputs.block_table is not None
    place = torch.arange(len(inputs.k)).flip(0)
    table = place[inputs.block_table.long()].int()
    moved = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
    assert same_bits(decode(moved, config), decode(inputs, config))


SIZES: dict[str, Any] = {"batch": 3, "seqlen_k": 128, "head_dim": 16, "dtype": "fp16"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module that no masks were tuned for, but a rule beside blocks."""
    path = tmp_path_factory.mktemp("blocks") / "attention_dispatch.py"
    ruled = decode_of(page_size=16, **SIZES, mask=RULE, **BLOCKS)
    path.write_text(export([winner_of(p) for p in (decode_of(**SIZES), ruled)]).text)
    return exported_module(path)


def made(seed: int = 0, **fields: Any) -> Inputs:
    p = decode_of(page_size=16, **{**SIZES, **BLOCKS, **fields})
    return make_inputs(p, seed, lengths=[100, 0, 33])


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    on = inputs.modifiers
    given = {"block_table": inputs.block_table, "return_lse": True}
    given |= {name: getattr(on, name) for name in ("block_mask", "mask", "density", "sinks")}
    read = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens)
    return module.decode(*read, **{**given, **changed})


def expect_right(module: ModuleType, inputs: Inputs, **changed: Any) -> None:
    verdict = Budget(inputs).judge(*call(module, inputs, **changed))
    assert verdict.correct, verdict.reason


def test_a_module_serves_blocks_that_nobody_tuned_and_calls_of_one_form_follow_their_lists(
    exported: ModuleType,
) -> None:
    for seed in range(3):
        for fields in ({}, {"seqlen_q": 3, "sinks": True}, {"mask_block_k": 64}):
            expect_right(exported, made(seed, **fields))
        expect_right(exported, made(seed, mask=RULE), density=None, check=True)
    assert exported.explain(call, exported, made())["how"] == "default"


def test_a_block_mask_of_torch_is_served_and_its_function_must_be_told(
    exported: ModuleType,
) -> None:
    def every_other(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx // 16) % 2 == 0

    inputs = made(seqlen_q=2)
    lists = create_block_mask(every_other, None, None, 2, 128, "cpu", BLOCK_SIZE=(16, 32))
    with pytest.raises(exported.ProblemError, match="block_mask has the mask_mod every_other, whi"):
        call(exported, inputs, block_mask=lists)
    message = "decode: no kernels for blocks with paged with queries with mask_.*: none were tuned"
    with pytest.raises(exported.ProblemError, match=message):
        call(exported, inputs, block_mask=lists, mask="kv_idx // 16 % 2 == 0")
    ruled = made(mask=RULE)
    told = lists_of([[0, 2, 3]], None, heads=1)._replace(mask_mod=every_other)
    expect_right(exported, replace(ruled, block_mask=told))
    alone = BlockMask.from_kv_blocks(lists.kv_num_blocks, lists.kv_indices, BLOCK_SIZE=(16, 32))
    plain = lists_of([[0, 1, 2, 3]], None, heads=1)
    expect_right(exported, replace(inputs, block_mask=plain), block_mask=alone)


def test_steps_of_blocks_are_one_operator_in_a_graph(exported: ModuleType) -> None:
    operators = getattr(torch.ops, exported.operator_namespace())
    inputs = made(seqlen_q=2)

    def layer(q: torch.Tensor, inputs: Inputs = inputs) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(inputs.q), layer(inputs.q))
    lists = inputs.block_mask
    assert lists is not None
    read = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens)
    options = {"block_table": inputs.block_table, "density": 7, "sinks": torch.ones(8)}
    options |= dict(zip(BlockLists._fields[:4], lists.tensors, strict=True))
    options |= {"mask_block_q": 128, "mask_block_k": 32}
    for name, out in (("decode_masked", ()), ("decode_masked_out", (inputs.q.clone(),))):
        checks = torch.library.opcheck(getattr(operators, name).default, (*read, *out), options)
        assert set(checks.values()) == {"SUCCESS"}


def test_what_is_out_of_range_is_told(exported: ModuleType) -> None:
    inputs = made()
    for listed, told in (([0, 4], r"kv_indices\[0, 0, 0, 1\] is 4, there are blocks 0\.\.3"),):
        lists = lists_of([listed], None, heads=1)
        with pytest.raises(exported.ProblemError, match=f"decode: {told}"):
            call(exported, inputs, block_mask=lists, check=True)
    short = lists_of([[0]], None, heads=1)._replace(BLOCK_SIZE=(2, 32))
    with pytest.raises(exported.ProblemError, match="decode: block_mask has blocks of 2 queries"):
        call(exported, made(seqlen_q=3), block_mask=short)
