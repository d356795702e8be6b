"""Rules, prefixes, documents of caches and packed sequences on a GPU: candidates, the module."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from ahead import compiling, varied
from making import decode_of, winner_of
from running import run

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import FAMILIES, decode_last, serving
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.subjects import exported_module

pytestmark = pytest.mark.gpu

RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 0) or abs(q_idx - kv_idx) < h + 3"
# all keys of some heads, queries and sequences, and of most parts of the longest one
HIDING = "h != 2 and (b != 6 or kv_idx >= 3000) and not (b == 5 and q_idx == 1) and b != 4"
PREFIX: dict[str, Any] = {"masked_by": "prefix", "density": 30}
DOCUMENTS: dict[str, Any] = {"masked_by": "documents", "density": 30}
BLOCKS: dict[str, Any] = {"masked_by": "blocks", "density": 30}
BLOCKS |= {"mask_block_q": 128, "mask_block_k": 64}
LENGTHS = [0, 1, 2, 5, 64, 65, 4096]
KEYS = [0, 1, 17, 77, 128, 300, 641]  # of chunks of 77 queries
PACKED = [(1, 641), (0, 5), (77, 77), (64, 300), (5, 0), (33, 129)]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def step(mask: str = RULE, **changed: Any) -> Inputs:
    fields: dict[str, Any] = {"dtype": "bf16", "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    fields |= {"batch": len(LENGTHS), "seqlen_q": 1, "seqlen_k": 4096, "page_size": 16}
    p = Problem("decode", mask=mask, **{**fields, **changed})
    return make_inputs(p, device="cuda", lengths=LENGTHS)


def chunks(mask: str = RULE, **changed: Any) -> Inputs:
    """Chunks over pages, or packed sequences."""
    fields: dict[str, Any] = {"dtype": "bf16", "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": 77, "seqlen_k": 641, "lengths": "ragged", **changed}
    lengths = PACKED if fields.get("layout") == "thd" else KEYS
    p = Problem("prefill", batch=len(lengths), mask=mask, **fields)
    return make_inputs(p, device="cuda", lengths=lengths)


def candidates(p: Problem, gpu: Gpu) -> list[Config]:
    """Some of the problem's candidates; those of decode that merge without a kernel too."""
    (family, *_) = serving(p, gpu)
    chosen = varied(family, p, gpu)[:6]
    if family.name == "decode":
        last = varied(decode_last.FAMILY, replace(p, batch=256), gpu)
        last = [c for c in last if FAMILIES["decode_last"].misfit(p, c.as_dict(), gpu) is None]
        chosen += last[:3]
    return compiling(chosen, p, gpu)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    ("mask", "changed"),
    [
        (RULE, {"layout": "thd"}),
        (HIDING, {"layout": "thd", "window_left": 100, "dtype": "fp16", "head_dim": 64}),
        (RULE, {"layout": "thd", "causal": False, "bias": True, "sinks": True}),
        (RULE, {"page_size": 128}),
        (HIDING, {"page_size": 16, "kv_layout": "hnd", "causal": False, "softcap": True}),
        (RULE, {"page_size": 64, "layout": "thd", "window_left": 100, "head_dim": 256}),
        ("", {"layout": "thd", **PREFIX}),
        (RULE, {"page_size": 16, **PREFIX, "dtype": "fp32", "head_dim": 40}),
        ("", {"page_size": 128, "layout": "thd", **PREFIX, "bias": True, "kv_layout": "hnd"}),
        ("", {"layout": "thd", **DOCUMENTS}),
        ("", {"layout": "thd", **DOCUMENTS, "causal": False, "window_left": 100, "sinks": True}),
        ("", {"page_size": 128, **DOCUMENTS, "softcap": True, "alibi": True}),
        ("", {"page_size": 16, "layout": "thd", **DOCUMENTS, "causal": False, "bias": True}),
        (RULE, {"page_size": 64, "layout": "thd", **DOCUMENTS, "window_left": 100}),
        ("", {"page_size": 16, **DOCUMENTS, "dtype": "fp32", "head_dim": 40}),
        ("", {"page_size": 128, **BLOCKS, "softcap": True, "alibi": True}),
        (RULE, {"page_size": 16, **BLOCKS, "bias": True, "kv_layout": "hnd"}),
        ("", {"page_size": 48, **BLOCKS, "causal": False, "dtype": "fp32", "head_dim": 40}),
    ],
    ids=str,
)
def test_candidates_of_packed_sequences_and_over_pages_are_right_and_repeat_their_bits(
    mask: str, changed: dict, gpu: Gpu
) -> None:
    assert_right(chunks(mask, **changed), gpu)


@pytest.mark.parametrize(
    ("mask", "changed"),
    [
        (RULE, {}),
        (RULE, {"page_size": 0, "seqlen_q": 4, "window_left": 63, "softcap": True, "sinks": True}),
        (RULE, {"seqlen_q": 16, "bias": True}),
        (RULE, {"dtype": "fp32", "head_dim": 64, "seqlen_q": 3, "alibi": True}),
        (RULE, {"kv_dtype": "int8", "kv_scales": "token", "page_size": 64}),
        (RULE, {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "num_heads": 16}),
        (RULE, {"pages": "chosen", "seqlen_q": 3}),
        (HIDING, {"seqlen_q": 3}),
        (HIDING, {"kv_dtype": "fp8_e4m3", "page_size": 0, "sinks": True}),
    ],
    ids=str,
)
def test_candidates_of_a_step_are_right_and_repeat_their_bits(
    mask: str, changed: dict, gpu: Gpu
) -> None:
    assert_right(step(mask, **changed), gpu)


def assert_right(inputs: Inputs, gpu: Gpu) -> None:
    budget, failures = Budget(inputs), []
    for config in candidates(inputs.problem, gpu):
        result = run(inputs, config, gpu=gpu)
        verdict = budget.judge(*result)
        if not verdict.correct:
            failures.append(f"{config}: {verdict.reason}")
        if not same_bits(result, run(inputs, config, gpu=gpu)):
            failures.append(f"{config}: two runs differ")
    assert not failures, "\n".join(failures)


STEP: dict[str, Any] = {"batch": 7, "seqlen_k": 4096, "page_size": 16, "head_dim": 128}


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory, gpu: Gpu) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("rules") / "attention_dispatch.py"
    tuned = [decode_of(mask=mask, **STEP) for mask in (RULE, HIDING)]
    path.write_text(export([winner_of(p, gpu=gpu) for p in tuned]).text)
    return exported_module(path)


def called(module: ModuleType, inputs: Inputs) -> Any:
    p, given = inputs.problem, {"block_table": inputs.block_table, "mask": inputs.problem.mask}
    given |= {"max_seqlen_k": p.seqlen_k, "return_lse": True}
    return module.decode(inputs.q, inputs.k, inputs.v, inputs.cache_seqlens, **given)


def test_rules_of_the_module_are_told_apart_bound_recalled_and_in_a_graph(
    module: ModuleType,
) -> None:
    every = {
        m: [make_inputs(decode_of(mask=m, **STEP), s, "cuda", LENGTHS) for s in range(4)]
        for m in (RULE, HIDING)
    }
    for turn in range(4):  # planned, by its recipe, recalled
        for inputs in (of_rule[turn] for of_rule in every.values()):
            verdict = Budget(inputs).judge(*called(module, inputs))
            assert verdict.correct, f"call {turn}: {verdict.reason}"
    inputs, other = every[HIDING][:2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = called(module, inputs)
    for name in ("q", "k", "v", "block_table"):
        getattr(inputs, name).copy_(getattr(other, name))
    graph.replay()
    verdict = Budget(other).judge(out, lse)
    assert verdict.correct, f"replayed: {verdict.reason}"
