"""Documents, prefixes and blocks of decode steps on a GPU: candidates, the module, a graph."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from making import decode_of, winner_of
from running import run
from test_rules_gpu import LENGTHS, STEP, assert_right, same_bits, step

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.families import serving
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.subjects import exported_module

pytestmark = pytest.mark.gpu

DOCUMENTS: dict[str, Any] = {"masked_by": "documents", "density": 20}
BLOCKS: dict[str, Any] = {"masked_by": "blocks", "density": 20, "mask_block_k": 128}
PREFIX: dict[str, Any] = {"masked_by": "prefix", "density": 20, "seqlen_q": 4}
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 or h == 1"


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"seqlen_q": 4, "page_size": 0, "window_left": 300, "softcap": True, "sinks": True},
        {"seqlen_q": 16, "bias": True},
        {"dtype": "fp32", "head_dim": 64, "seqlen_q": 3, "alibi": True},
        {"kv_dtype": "int8", "kv_scales": "token", "page_size": 64, "seqlen_q": 2},
        {"kv_dtype": "fp8_e4m3", "kv_scales": "head"},
        {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "num_heads": 16, "seqlen_q": 2},
        {"pages": "chosen", "seqlen_q": 3},
        {"mask": RULE, "kv_layout": "hnd", "seqlen_q": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "masked", [DOCUMENTS, PREFIX, BLOCKS], ids=lambda fields: fields["masked_by"]
)
def test_candidates_of_masked_steps_are_right_and_repeat_their_bits(
    masked: dict, changed: dict, gpu: Gpu
) -> None:
    fields = {"mask": "", **masked, **changed}
    if masked is PREFIX:  # which excludes windows, and is nothing to one query token
        fields |= {"window_left": -1, "seqlen_q": max(2, changed.get("seqlen_q", 4))}
    if masked is BLOCKS:  # which exclude windows, and say themselves what is read
        fields |= {"window_left": -1, "pages": ""}
    assert_right(step(**fields), gpu)


@pytest.mark.parametrize("block_k", [16, 48, 64, 1024])
def test_blocks_of_any_size_are_right(block_k: int, gpu: Gpu) -> None:
    for seqlen_q, page_size in ((1, 16), (4, 0), (3, 256)):
        sizes = {"seqlen_q": seqlen_q, "page_size": page_size, "mask_block_k": block_k}
        assert_right(step("", **{**BLOCKS, **sizes}), gpu)


def test_blocks_that_no_head_of_a_group_lists_are_not_read(gpu: Gpu) -> None:
    """What lies in them may be NaN: every schedule and product."""
    for block_k, seqlen_q in ((128, 1), (48, 3)):
        fields = {**BLOCKS, "mask_block_k": block_k, "seqlen_q": seqlen_q, "page_size": 0}
        inputs = step("", **fields)
        p, lists = inputs.problem, inputs.block_mask
        assert lists is not None
        blocks = -(-p.seqlen_k // block_k)
        listed = torch.zeros(p.batch, p.num_kv_heads, blocks + 1, dtype=torch.bool, device="cuda")
        for counts, indices in (lists[:2], lists[2:4]):
            live = torch.arange(indices.shape[3], device="cuda") < counts[..., None]
            places = torch.where(live, indices, blocks).squeeze(2).long()
            for h in range(p.num_heads):
                listed[:, h // p.group_size].scatter_(1, places[:, h], True)
        hidden = ~listed[..., :blocks].repeat_interleave(block_k, dim=2)[..., : p.seqlen_k]
        assert 0.5 < hidden.float().mean() < 0.9
        cells = hidden.transpose(1, 2)[..., None]
        k, v = (t.masked_fill(cells, float("nan")) for t in (inputs.k, inputs.v))
        spoilt = replace(inputs, k=k, v=v)
        for family in serving(p, gpu):
            config = family.default(p, gpu)
            results = (run(each, config, gpu=gpu) for each in (inputs, spoilt))
            assert same_bits(*results), str(config)


def test_keys_of_other_documents_are_not_read(gpu: Gpu) -> None:
    """What lies before the documents of a step may be NaN: every schedule and product."""
    for seqlen_q in (1, 3):
        inputs = step("", **DOCUMENTS, seqlen_q=seqlen_q, page_size=0)
        ids, lengths = inputs.document_ids, inputs.cache_seqlens
        assert ids is not None and lengths is not None
        first = ids.gather(1, (lengths - seqlen_q).clamp_min(0).long()[:, None])
        before = (ids < first) & (torch.arange(ids.shape[1], device="cuda") < lengths[:, None])
        assert before.sum() > 1000
        k, v = inputs.k.clone(), inputs.v.clone()
        k[before], v[before] = float("nan"), float("nan")
        spoilt = replace(inputs, k=k, v=v)
        for family in serving(inputs.problem, gpu):
            config = family.default(inputs.problem, gpu)
            results = (run(each, config, gpu=gpu) for each in (inputs, spoilt))
            assert same_bits(*results), str(config)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory, gpu: Gpu) -> ModuleType:
    """That no masks were tuned for."""
    path = tmp_path_factory.mktemp("masks") / "attention_dispatch.py"
    tuned = [decode_of(**STEP, seqlen_q=seqlen_q) for seqlen_q in (1, 4)]
    path.write_text(export([winner_of(p, gpu=gpu) for p in tuned]).text)
    return exported_module(path)


def called(module: ModuleType, inputs: Inputs) -> Any:
    p, names = inputs.problem, ("block_table", "block_mask", "document_ids", "prefix_lens")
    given = {name: getattr(inputs, name) for name in names}
    given |= {"max_seqlen_k": p.seqlen_k, "return_lse": True, "window": inputs.modifiers.window}
    return module.decode(inputs.q, inputs.k, inputs.v, inputs.cache_seqlens, **given)


@pytest.mark.parametrize(
    "masked",
    [
        DOCUMENTS,
        {**DOCUMENTS, "seqlen_q": 4, "window_left": 500},
        PREFIX,
        BLOCKS,
        {**BLOCKS, "seqlen_q": 4},
    ],
    ids=[
        "documents",
        "documents of four tokens in a window",
        "prefix",
        "blocks",
        "blocks of four tokens",
    ],
)
def test_calls_of_one_form_follow_their_masks_bound_recalled_and_in_a_graph(
    masked: dict, module: ModuleType
) -> None:
    """Lengths, ids, prefixes and lists change in place under a captured step."""
    lengths = [LENGTHS, LENGTHS[::-1], [4096] * 7, [7, 900, 64, 63, 2000, 1, 0]]
    p = decode_of(**{**STEP, **masked})
    every = [make_inputs(p, seed, "cuda", each) for seed, each in enumerate(lengths)]
    for turn, inputs in enumerate(every):  # planned, by its recipe, recalled
        verdict = Budget(inputs).judge(*called(module, inputs))
        assert verdict.correct, f"call {turn}: {verdict.reason}"
    first = every[0]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = called(module, first)
    for turn, other in enumerate(every[1:]):
        for name in ("q", "k", "v", "block_table", "cache_seqlens", "document_ids", "prefix_lens"):
            if getattr(first, name) is not None:
                getattr(first, name).copy_(getattr(other, name))
        for own, new in zip(*(each.block_mask or () for each in (first, other)), strict=True):
            if isinstance(own, torch.Tensor):
                own.copy_(new)
        graph.replay()
        verdict = Budget(other).judge(out, lse)
        assert verdict.correct, f"replay {turn}: {verdict.reason}"
