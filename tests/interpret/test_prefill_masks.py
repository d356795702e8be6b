"""Blocks, documents, prefixes and custom rules of the portable prefill family, interpreted."""

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from running import run
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.families.prefill import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.runtime.masks import BlockLists, block_lists
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module
from autoflash.visibility import seen_keys

H200 = gpus.known("NVIDIA_H200")
LOADS = ("pointer", "descriptor")
NAN = float("nan")
BLOCKS = {"masked_by": "blocks", "density": 50, "mask_block_q": 64, "mask_block_k": 32}
DOCUMENTS = {"masked_by": "documents", "density": 30}
PREFIX = {"masked_by": "prefix", "density": 30}
# floors negative numbers, and knows heads and sequences apart
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 0) or abs(q_idx - kv_idx) < h + 3"

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def config(**changed: int | str) -> Config:
    knobs: dict[str, int | str] = {"BLOCK_M": 32, "BLOCK_N": 32, "LOAD": "pointer"}
    knobs |= {"HEAD_GROUP_MIB": 4, "num_warps": 4, "num_stages": 2}
    return Config.of("prefill", knobs | changed)


def problem(seqlen_q: int, seqlen_k: int, **changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 2, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 16, "causal": False, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("prefill", **(fields | changed))


def assert_right(inputs: Inputs, chosen: Config) -> None:
    verdict = Budget(inputs).judge(*run(inputs, chosen))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


def seen(inputs: Inputs) -> torch.Tensor:
    """(batch, heads, rows, keys): what each row sees."""
    p = inputs.problem
    rows, heads = torch.arange(p.seqlen_q), range(p.num_heads)
    masks, sizes = inputs.modifiers.masks, (p.seqlen_k, p.seqlen_q)
    every = [
        seen_keys(p, masks, b, heads, rows, *sizes).expand(p.num_heads, -1, -1)
        for b in range(p.batch)
    ]
    return torch.stack(every)


def assert_counted(inputs: Inputs, visible: torch.Tensor, chosen: Config | None = None) -> None:
    """K = 0 makes lse the log of how many keys are seen, V = [1, j, j * j] tells which."""
    j = torch.arange(inputs.problem.seqlen_k, dtype=inputs.v.dtype)[None, :, None]
    v = torch.zeros_like(inputs.v)
    v[..., 0], v[..., 1], v[..., 2] = 1.0, j, j * j
    out, lse = run(replace(inputs, k=inputs.k * 0, v=v), chosen or config())
    assert lse is not None
    number = visible.sum(dim=3).double()
    assert torch.equal(lse.double().exp().round(), number)
    for channel, values in ((1, j[0, :, 0]), (2, j[0, :, 0] ** 2)):
        total = (out[..., channel].transpose(1, 2).double() * number).round()
        assert torch.equal(total, (visible * values.double()).sum(dim=3))


KINDS = {
    "blocks": BLOCKS,
    "causal blocks": BLOCKS | {"causal": True},
    "blocks and rule": BLOCKS | {"mask": RULE},
    "documents": DOCUMENTS,
    "causal documents": DOCUMENTS | {"causal": True},
    "documents in a window": DOCUMENTS | {"window_left": 20, "window_right": 5},
    "documents and rule": DOCUMENTS | {"causal": True, "mask": RULE},
    "prefix": PREFIX | {"causal": True},
    "prefix and rule": PREFIX | {"causal": True, "mask": RULE},
    "rule": {"mask": RULE},
    "causal rule": {"mask": RULE, "causal": True},
    "rule in a window": {"mask": RULE, "window_left": 20, "causal": True},
}


@pytest.mark.parametrize("lengths", [(70, 100), (100, 70)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_mask_is_right(kind: str, lengths: tuple[int, int]) -> None:
    for load in LOADS:
        assert_right(make_inputs(problem(*lengths, **KINDS[kind])), config(LOAD=load))


@pytest.mark.parametrize("modifiers", [("softcap", "sinks"), ("alibi",), ("bias", "sinks")])
@pytest.mark.parametrize("kind", ["causal blocks", "documents and rule", "prefix", "rule"])
def test_every_kind_of_mask_meets_the_modifiers(kind: str, modifiers: tuple[str, ...]) -> None:
    on = dict.fromkeys(modifiers, True)
    assert_right(make_inputs(problem(70, 100, **KINDS[kind], **on)), config())


@pytest.mark.parametrize(
    ("tile", "dtype", "layout"),
    [((16, 32), "fp32", "bshd"), ((64, 16), "bf16", "bhsd"), ((64, 32), "fp16", "bhsd")],
    ids=str,
)
@pytest.mark.parametrize("kind", KINDS)
def test_tiles_types_and_layouts_are_right(
    kind: str, tile: tuple[int, int], dtype: str, layout: str
) -> None:
    fields = {"dtype": dtype, "head_dim": 40, "layout": layout, "num_heads": 3, "batch": 1}
    p = problem(65, 97, **{**KINDS[kind], **fields})
    assert_right(make_inputs(p, wide_rows=8), config(BLOCK_M=tile[0], BLOCK_N=tile[1]))


@pytest.mark.parametrize("kind", ["causal blocks", "causal documents", "prefix", "rule"])
def test_the_tuners_own_check_passes(kind: str) -> None:
    p = problem(70, 70, **KINDS[kind])
    assert InterpretedDevice(H200).check(p, FAMILY.default(p, H200), 0).correct


def with_lists(block_mask: BlockMask, **changed: Any) -> Inputs:
    lists = block_lists(block_mask)
    sizes = dict(zip(("mask_block_q", "mask_block_k"), lists.BLOCK_SIZE, strict=True))
    seqlen_q, seqlen_k = block_mask.seq_lengths
    p = problem(seqlen_q, seqlen_k, **(BLOCKS | sizes | changed))
    return replace(make_inputs(p), block_mask=lists)


MODS: dict[str, tuple[Callable, str]] = {
    "causal": (lambda b, h, i, j: i >= j, "q_idx >= kv_idx"),
    "stripes": (lambda b, h, i, j: (j // 32) % 2 == 0, "kv_idx // 32 % 2 == 0"),
    "heads": (lambda b, h, i, j: (i - j).abs() < 20 * (h + 1), "abs(q_idx - kv_idx) < 20 * h + 20"),
}


@pytest.mark.parametrize("mod", MODS)
def test_a_block_mask_of_torch_is_taken_as_it_is(mod: str) -> None:  # case B31
    """Made with and without heads of their own, and with full blocks apart or not."""
    rule, text = MODS[mod]
    for heads, apart in ((2, True), (2, False)) if mod == "heads" else ((None, True), (2, False)):
        made = create_block_mask(
            rule, None, heads, 100, 130, "cpu", BLOCK_SIZE=32, separate_full_blocks=apart
        )
        i, j = torch.arange(100)[:, None], torch.arange(130)[None]
        visible = rule(0, torch.arange(2)[:, None, None], i, j).expand(2, 2, 100, 130)
        assert_counted(with_lists(made, mask=text, dtype="fp32"), visible)


def lists_of(there: torch.Tensor, whole: torch.Tensor | None, size: int = 32) -> BlockLists:
    """The lists of booleans (batch, heads, rows, columns); 2**30 where they end."""

    def listed(chosen: torch.Tensor) -> list[torch.Tensor]:
        counts = chosen.sum(dim=-1, dtype=torch.int32)
        order = torch.argsort(chosen.int(), dim=-1, descending=True, stable=True).int()
        dead = torch.arange(chosen.shape[-1]) >= counts[..., None]
        return [counts, order.masked_fill(dead, 2**30)]

    counts, indices = listed(there)
    full, full_indices = (None, None) if whole is None else listed(whole)
    return BlockLists(counts, indices, full, full_indices, (size, size))


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("seqlen_k", [96, 97, 127, 128])
def test_full_blocks_are_not_masked_and_absent_ones_not_visited(  # case B31
    seqlen_k: int, kind: str
) -> None:
    """The last one reaches past the keys; NaN in a visited tile would reach every row."""
    columns = -(-seqlen_k // 32)
    whole = torch.zeros(2, 2, 3, columns, dtype=torch.bool)
    whole[:, :, 0, 1] = whole[0, :, 1, columns - 1] = whole[:, 1, 2, [0, columns - 1]] = True
    p = problem(70, seqlen_k, **(BLOCKS | {"mask_block_q": 32, "mask": "kv_idx < 0"}), dtype="fp32")
    lists = lists_of(~whole, whole)  # the rule hides all of the others
    inputs = replace(make_inputs(p), block_mask=lists)
    visible = whole.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :70, :seqlen_k]
    assert_counted(inputs, visible, config(LOAD=kind))
    none = torch.zeros_like(whole)
    inputs = replace(inputs, block_mask=lists_of(none, whole))
    out, lse = run(inputs, config(LOAD=kind))
    v = inputs.v.clone()
    v[:, ~visible.any(dim=(0, 1, 2))] = NAN
    again, lse_again = run(replace(inputs, v=v), config(LOAD=kind))
    assert lse is not None and lse_again is not None
    assert torch.equal(out, again) and torch.equal(lse, lse_again)
    assert (lse[0, 0, 64:] == -math.inf).all() and (out[0, 64:, 0] == 0).all()


def test_lists_are_not_followed_past_what_counts() -> None:
    poisoned, plain = (make_inputs(problem(70, 100, **BLOCKS), poison=p) for p in (True, False))
    assert poisoned.block_mask is not None and (poisoned.block_mask.kv_indices == 2**30).any()
    (out, lse), (other, other_lse) = run(poisoned, config()), run(plain, config())
    assert lse is not None and other_lse is not None
    assert torch.equal(out, other) and torch.equal(lse, other_lse)


def test_without_a_rule_a_block_in_part_is_seen_whole_and_without_full_lists_none_is() -> None:
    there = torch.rand(1, 1, 3, 4, generator=torch.Generator().manual_seed(1)) < 0.5
    p = problem(70, 100, **(BLOCKS | {"mask_block_q": 32}), dtype="fp32")
    inputs = replace(make_inputs(p), block_mask=lists_of(there, None))
    visible = there.repeat_interleave(32, 2).repeat_interleave(32, 3)[:, :, :70, :100]
    assert_counted(inputs, visible.expand(2, 2, -1, -1))


IDS = {
    "rising": torch.arange(130) // 20,
    "falling": 7 - torch.arange(130) // 20,
    "one": torch.zeros(130),
    "a token each": torch.arange(130),
    "in turns": torch.arange(130) % 3,
    "come again": torch.arange(130) // 40 % 2,
    "extremes": torch.where(torch.arange(130) < 65, -(2**31), 2**31 - 1),
    "of 32 tokens": torch.arange(130) // 32,
}


@pytest.mark.parametrize("ids", IDS)
@pytest.mark.parametrize("causal", [False, True])
def test_documents_may_have_any_ids_in_any_order(ids: str, causal: bool) -> None:
    for seqlen_q, block_n in ((50, 32), (180, 64)) if causal else ((130, 16),):
        heads = {"num_heads": 1, "num_kv_heads": 1}
        p = problem(seqlen_q, 130, **DOCUMENTS, causal=causal, dtype="fp32", **heads)
        both = torch.stack([IDS[ids].int(), IDS["rising"].int()])
        position = torch.arange(seqlen_q) + 130 - seqlen_q
        visible = both[:, position.clamp_min(0), None] == both[:, None]
        visible &= (position >= 0)[:, None]
        if causal:
            visible &= torch.arange(130) <= position[:, None]
        inputs = replace(make_inputs(p), document_ids=both)
        chosen = config(BLOCK_N=block_n)
        assert_counted(inputs, visible[:, None], chosen)


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("causal", [False, True])
def test_tiles_of_other_documents_are_skipped_and_not_masked(causal: bool, kind: str) -> None:
    """A NaN in v reaches every row whose program multiplies it, seen or not."""
    p = problem(160, 160, **DOCUMENTS, causal=causal, batch=1, num_heads=1)
    ids = torch.bucketize(torch.arange(160), torch.tensor([31, 69, 129])).int()[None]
    inputs = replace(make_inputs(p), document_ids=ids)
    out, lse = run(inputs, config(LOAD=kind))
    for start in range(0, 160, 32):
        rows = slice(start, start + 32)
        met = torch.isin(ids[0], ids[0, rows]).nonzero()
        first, last = (int(met.min()) // 32 * 32, -(-(int(met.max()) + 1) // 32) * 32)
        last = min(last, start + 32) if causal else last
        v = inputs.v.clone()
        v[:, :first] = v[:, last:] = NAN
        again, lse_again = run(replace(inputs, v=v), config(LOAD=kind))
        assert lse is not None and lse_again is not None
        assert torch.equal(again[:, rows], out[:, rows])
        assert torch.equal(lse_again[..., rows], lse[..., rows])


@pytest.mark.parametrize("lengths", [(100, 100), (40, 130), (130, 40)], ids=str)
@pytest.mark.parametrize("prefix", [0, 1, 31, 32, 33, 64, 500])
def test_a_prefix_is_seen_by_all_and_what_follows_is_causal(
    prefix: int, lengths: tuple[int, int]
) -> None:
    p = problem(*lengths, **PREFIX, causal=True, dtype="fp32")
    inputs = replace(make_inputs(p), prefix_lens=torch.tensor([prefix, 20], dtype=torch.int32))
    position = torch.arange(p.seqlen_q) + p.seqlen_k - p.seqlen_q
    j = torch.arange(p.seqlen_k)
    visible = (j <= position[:, None]) | (j < torch.tensor([prefix, 20])[:, None, None])
    assert_counted(inputs, visible[:, None].expand(-1, 2, -1, -1))


def test_keys_behind_the_prefix_and_the_query_are_skipped() -> None:
    inputs = make_inputs(problem(160, 160, **PREFIX, causal=True, batch=1))
    inputs = replace(inputs, prefix_lens=torch.tensor([40], dtype=torch.int32))
    out, _ = run(inputs, config())
    v = inputs.v.clone()
    v[:, 64:] = NAN
    again, _ = run(replace(inputs, v=v), config())
    assert torch.equal(out[:, :64], again[:, :64]) and again[:, 64:].isnan().any()


@pytest.mark.parametrize("causal", [False, True])
def test_a_rule_hides_where_it_does_not_hold(causal: bool) -> None:
    inputs = make_inputs(problem(70, 100, mask=RULE, causal=causal, dtype="fp32"))
    visible = seen(inputs)
    assert 0.1 < visible.float().mean() < 0.9
    assert_counted(inputs, visible)


def test_a_causal_rule_skips_tiles_behind_the_queries() -> None:
    inputs = make_inputs(problem(96, 96, mask=RULE, causal=True))
    out, _ = run(inputs, config())
    v = inputs.v.clone()
    v[:, 64:] = NAN
    assert torch.equal(run(replace(inputs, v=v), config())[0][:, :64], out[:, :64])


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("masks") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    names = ("block_mask", "document_ids", "prefix_lens", "mask")
    given = {name: getattr(inputs.modifiers, name) for name in names}
    arguments = {"causal": inputs.problem.causal, "return_lse": True, **given, **changed}
    return module.prefill(inputs.q, inputs.k, inputs.v, **arguments)


@pytest.mark.parametrize("kind", ["blocks", "causal documents", "prefix"])
def test_the_exported_module_serves_masks_again_and_again(exported: ModuleType, kind: str) -> None:
    on = KINDS[kind] | ({"mask_block_k": 64} if kind == "blocks" else {})
    for seed in (0, 1, 2):
        inputs = make_inputs(problem(70, 100, **on), seed=seed)
        verdict = Budget(inputs).judge(*call(exported, inputs))
        assert verdict.correct, verdict.reason
        told = exported.explain(call, exported, inputs)
        assert told["problem"].masked_by == inputs.problem.masked_by
        assert told["problem"].density == 10  # nobody told it


def test_the_exported_module_takes_a_block_mask_of_torch(exported: ModuleType) -> None:
    made = create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 70, "cpu", BLOCK_SIZE=32)
    inputs = make_inputs(problem(70, 70, causal=True))
    out, _ = call(exported, inputs, block_mask=made, density=60)
    verdict = Budget(inputs).judge(out, None)
    assert verdict.correct, verdict.reason
    with pytest.raises(exported.ProblemError, match="has the mask_mod <lambda>, which no kernel"):
        call(exported, inputs, block_mask=made, causal=False)


def test_masks_are_one_operator_of_one_graph(exported: ModuleType) -> None:
    made = create_block_mask(lambda b, h, i, j: i >= j, None, None, 70, 100, "cpu", BLOCK_SIZE=32)
    graphs = []

    def backend(graph: Any, inputs: Any) -> Any:
        called = [str(node.target) for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append([name for name in called if name.startswith("autoflash_")])
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    for kind in ("causal documents", "prefix"):
        inputs = make_inputs(problem(70, 100, **KINDS[kind]))
        given = {name: getattr(inputs, name) for name in ("document_ids", "prefix_lens")}
        given |= {"causal": True, "return_lse": True}
        compiled = torch.compile(exported.prefill, fullgraph=True, backend=backend)
        results = compiled(inputs.q, inputs.k, inputs.v, **given)
        assert Budget(inputs).judge(*results).correct
    inputs = make_inputs(problem(70, 100))
    options: dict[str, Any] = {"block_mask": made, "causal": True}
    compiled = torch.compile(exported.prefill, fullgraph=True, backend=backend)
    out = compiled(inputs.q, inputs.k, inputs.v, **options)
    assert torch.equal(out, exported.prefill(inputs.q, inputs.k, inputs.v, **options))
    assert graphs == [[f"{exported.operator_namespace()}.prefill_masked.default"]] * 3


def test_what_was_not_tuned_and_is_not_carried_is_told(exported: ModuleType) -> None:
    inputs = make_inputs(problem(40, 40, mask="q_idx > kv_idx"))
    with pytest.raises(exported.ProblemError, match=r"no kernels for mask_.*: none were"):
        call(exported, inputs)


def test_checking_sees_a_block_that_there_is_not(exported: ModuleType) -> None:
    inputs = make_inputs(problem(70, 100, **BLOCKS))
    call(exported, inputs, check=True)
    lists = inputs.block_mask
    assert lists is not None
    beyond = lists.kv_indices.masked_fill(lists.kv_indices < 2**30, 4)
    with pytest.raises(exported.ProblemError, match=r"kv_indices\[.*\] is 4, there are blocks 0"):
        call(exported, inputs, check=True, block_mask=lists._replace(kv_indices=beyond))
