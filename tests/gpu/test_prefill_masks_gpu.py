"""Masks of prefill on a GPU: candidates, long prompts, FlexAttention's masks, the module."""

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ahead import compile_ahead, varied
from running import run
from torch.nn.attention.flex_attention import create_block_mask

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.export import export
from autoflash.families.prefill import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.runtime.masks import block_lists
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module

pytestmark = pytest.mark.gpu

RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 0) or abs(q_idx - kv_idx) < h + 3"
BLOCKS = {"masked_by": "blocks", "mask_block_q": 128, "mask_block_k": 128}
EDGES = [(1, 1), (64, 64), (65, 129), (300, 77), (130, 3), (385, 385), (5, 0)]
ON = {
    "blocks": {**BLOCKS, "causal": False, "density": 40},
    "causal blocks and rule": {**BLOCKS, "density": 40, "mask": RULE},
    "documents": {"masked_by": "documents", "density": 30, "causal": False},
    "causal documents": {"masked_by": "documents", "density": 30},
    "documents in a window": {"masked_by": "documents", "density": 30, "window_left": 65},
    "prefix": {"masked_by": "prefix", "density": 30, "softcap": True},
    "rule": {"mask": RULE, "causal": False, "sinks": True},
}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    return Problem("prefill", seqlen_q=seqlen_q, seqlen_k=seqlen_k, **{**fields, **changes})


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim"),
    [
        *((kind, "bf16", 128) for kind in ON),
        *((kind, "fp16", 64) for kind in ("causal blocks and rule", "documents in a window")),
        *((kind, "fp32", 40) for kind in ("causal blocks and rule", "prefix")),
    ],
)
def test_candidates_are_right_at_every_edge_and_repeat_their_bits(  # case B31
    gpu, kind, dtype, head_dim
):
    changes = {"dtype": dtype, "head_dim": head_dim, **ON[kind]}
    configs = varied(FAMILY, of(1000, 1000, **changes), gpu)
    problems = [of(*lengths, **changes) for lengths in EDGES]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        inputs = make_inputs(problem, device="cuda")
        budget = Budget(inputs)
        for config in configs:
            out, lse = run(inputs, config, gpu=gpu)
            verdict = budget.judge(out, lse)
            lengths = f"{problem.seqlen_q}x{problem.seqlen_k}"
            if not verdict.correct:
                failures.append(f"{lengths} {config}: {verdict.reason}")
            if not torch.equal(out, run(inputs, config, gpu=gpu)[0]):
                failures.append(f"{lengths} {config}: two runs differ")
    assert failures == []


@pytest.mark.parametrize("on", ON.values(), ids=ON)
def test_rows_of_a_long_prompt_are_right(gpu, on):
    long = {"density": 10} if "density" in on else {}
    problem = of(16384, 16384, batch=1, **{**on, **long})
    inputs = make_inputs(problem, device="cuda")
    rows = sample_rows(problem, seed=0)
    out, lse = run(inputs, FAMILY.default(problem, gpu), gpu=gpu)
    verdict = Budget(inputs, rows=rows).judge(*picked(problem, out, lse, rows))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("ids", ["in turns", "one", "falling", "a token each"])
def test_documents_of_a_long_prompt_may_have_any_ids(gpu, ids):
    problem = of(16384, 16384, batch=1, num_heads=2, num_kv_heads=1, **ON["causal documents"])
    token = torch.arange(16384, device="cuda")
    made = {
        "in turns": token % 3,
        "one": token * 0,
        "falling": -(token // 700),
        "a token each": token,
    }
    inputs = replace(make_inputs(problem, device="cuda"), document_ids=made[ids].int()[None])
    rows = sample_rows(problem, seed=0)
    out, lse = run(inputs, FAMILY.default(problem, gpu), gpu=gpu)
    verdict = Budget(inputs, rows=rows).judge(*picked(problem, out, lse, rows))
    assert verdict.correct, verdict.reason


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path: Path = tmp_path_factory.mktemp("masks") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


def called(module, inputs: Inputs, **changes):
    names = ("block_mask", "document_ids", "prefix_lens")
    given = {name: getattr(inputs, name) for name in names}
    options = {"causal": inputs.problem.causal, "return_lse": True, **given, **changes}
    return module.prefill(inputs.q, inputs.k, inputs.v, **options)


@pytest.mark.parametrize("kind", ["blocks", "causal documents", "prefix"])
def test_the_exported_module_serves_masks_bound_and_in_a_graph(module, kind):
    on = {key: value for key, value in ON[kind].items() if key != "softcap"}
    every = [make_inputs(of(300, 385, **on), seed, "cuda") for seed in range(5)]
    for seed, inputs in enumerate(every):  # the later ones by the recipe of the first
        verdict = Budget(inputs).judge(*called(module, inputs))
        assert verdict.correct, f"call {seed}: {verdict.reason}"
    inputs, other = every[:2]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = called(module, inputs)
    for name in ("q", "k", "v", "document_ids", "prefix_lens"):
        if getattr(other, name) is not None:
            getattr(inputs, name).copy_(getattr(other, name))
    if other.block_mask is not None and inputs.block_mask is not None:
        for mine, new in zip(inputs.block_mask.tensors, other.block_mask.tensors, strict=True):
            assert mine is not None and new is not None
            mine.copy_(new)
    graph.replay()
    verdict = Budget(other).judge(out, lse)
    assert verdict.correct, f"replayed: {verdict.reason}"


@pytest.mark.parametrize("heads", [None, 6])
def test_a_block_mask_of_torch_on_the_device_is_taken_as_it_is(module, heads):
    made = create_block_mask(lambda b, h, i, j: i >= j, None, heads, 700, 700, device="cuda")
    inputs = make_inputs(of(700, 700, causal=True), device="cuda")
    out, lse = called(module, inputs, block_mask=made)
    verdict = Budget(inputs).judge(out, lse)
    assert verdict.correct, verdict.reason
    assert block_lists(made).kv_indices.is_cuda


def test_a_long_document_mask_never_waits_for_the_device(module):
    problem = of(4096, 4096, batch=1, **ON["causal documents"])
    inputs = make_inputs(problem, device="cuda")
    called(module, inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(module, inputs)
        called(module, inputs, density=7)  # planned anew
    finally:
        torch.cuda.set_sync_debug_mode("default")
        gc.collect()
