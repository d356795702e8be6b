"""Chunked prefill over pages on a GPU: candidates, far pages, long contexts, graphs."""

import importlib.util
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead, varied
from running import run

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.families.prefill import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

KEYS = [0, 1, 17, 77, 128, 300, 641]  # of chunks of 77 queries
PACKED = [(1, 641), (0, 5), (77, 77), (64, 300), (5, 0), (33, 129)]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(batch: int, seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "num_heads": 6, "num_kv_heads": 3, "head_dim": 128, "page_size": 16}
    fields |= {"batch": batch, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "lengths": "ragged"}
    return Problem("prefill", **{**fields, **changes})


def chunks(**changes) -> Inputs:
    packed = changes.get("layout") == "thd"
    lengths = PACKED if packed else KEYS
    return make_inputs(of(len(lengths), 77, 641, **changes), device="cuda", lengths=lengths)


EVERYTHING = {"window_left": 100, "softcap": True, "alibi": True, "sinks": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 128, "kv_layout": "hnd"},
        {"page_size": 1, "layout": "bhsd", "causal": False, "head_dim": 64},
        {"page_size": 64, "layout": "thd", "head_dim": 64},
        {"layout": "thd", "dtype": "fp16", "head_dim": 40, "kv_layout": "hnd", **EVERYTHING},
        {"page_size": 48, "dtype": "fp32", "head_dim": 64, "sinks": True},
        {"page_size": 3, "kv_layout": "hnd"},
        {"page_size": 480, "layout": "thd"},
        {"page_size": 64, "head_dim": 192, "head_dim_v": 128},
    ],
    ids=str,
)
def test_candidates_are_right_and_dead_memory_changes_no_bit(  # case B04, case B13, case B24
    gpu, changes
):
    configs = varied(FAMILY, of(4, 2048, 16384, **changes), gpu)
    inputs = chunks(**changes)
    compile_ahead({config: [inputs.problem] for config in configs}, gpu)
    budget = Budget(inputs)
    k, v = (t.masked_fill(t.isnan(), float("inf")) for t in (inputs.k, inputs.v))
    table = inputs.block_table.clamp_max(len(inputs.k))  # past the last page, where it was 2**30
    table[table == len(inputs.k)] = -1
    spoilt, failures = replace(inputs, k=k, v=v, block_table=table), []
    for config in configs:
        result = run(inputs, config, gpu=gpu)
        verdict = budget.judge(*result)
        if not verdict.correct:
            failures.append(f"{config}: {verdict.reason}")
        if not all(map(torch.equal, result, run(spoilt, config, gpu=gpu))):
            failures.append(f"{config}: dead memory counts")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("page_size", [16, 64])
def test_k_and_v_of_a_page_may_lie_side_by_side(gpu, page_size):  # case B25
    """And the table may be columns of a wider one, the lengths every other number of a tensor."""
    inputs = chunks(page_size=page_size)
    k, v = torch.stack([inputs.k, inputs.v], dim=1).unbind(1)
    table = torch.nn.functional.pad(inputs.block_table, (2, 3), value=2**30)[:, 2:-3]
    lengths = torch.stack([inputs.cache_seqlens] * 2, dim=1)[:, 0]
    views = replace(inputs, k=k, v=v, block_table=table, cache_seqlens=lengths)
    config = FAMILY.default(inputs.problem, gpu)
    expected = run(inputs, config, gpu=gpu)
    assert all(map(torch.equal, expected, run(views, config, gpu=gpu)))


@pytest.mark.parametrize("page_size", [16, 64])
def test_pages_beyond_32_bits_are_read_where_they_are(gpu, page_size):  # case B05
    """By pointers and, where a tile lies in one page, by descriptors."""
    problem = of(2, 77, 641, num_heads=16, num_kv_heads=8, page_size=page_size)
    near = make_inputs(problem, device="cuda", lengths=[641, 100])
    near = replace(near, v=near.k)
    first = 2**31 // near.k[0].numel() + 1
    far = near.k.new_empty((first + len(near.k), *near.k.shape[1:]))
    far[first:] = near.k
    moved = replace(near, k=far, v=far, block_table=near.block_table + first)
    default = FAMILY.default(problem, gpu)
    for load in ("pointer", default["LOAD"]):
        config = Config.of("prefill", {**default.as_dict(), "LOAD": load})
        expected = run(near, config, gpu=gpu)
        assert all(map(torch.equal, expected, run(moved, config, gpu=gpu))), config


@pytest.mark.parametrize("changes", [{}, {"layout": "thd", "page_size": 64}], ids=str)
def test_chunks_of_a_long_context_are_right(gpu, changes):
    problem = of(5, 2048, 65536, num_heads=32, num_kv_heads=8, **changes)
    inputs = make_inputs(problem, device="cuda")
    rows = sample_rows(problem, 0)
    result = picked(problem, *run(inputs, FAMILY.default(problem, gpu), gpu=gpu), rows)
    verdict = Budget(inputs, rows=rows).judge(*result)
    assert verdict.correct, verdict.reason


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "paged_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    spec = importlib.util.spec_from_file_location("paged_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "changes", [{"kv_layout": "hnd"}, {"layout": "thd", "page_size": 64}, EVERYTHING], ids=str
)
def test_a_captured_call_follows_lengths_and_table_and_so_do_calls_that_repeat(  # case B21
    module, changes
):
    inputs = chunks(**changes)
    p = inputs.problem
    given = {**inputs.modifiers.of_prefill, "causal": p.causal, "layout": p.layout}
    given["window"] = (p.window_left, p.window_right)

    def call():
        return module.prefill(inputs.q, inputs.k, inputs.v, **given, return_lse=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    tables = ("block_table", "cache_seqlens", "cu_seqlens_q", "alibi_slopes", "sinks")
    for seed in (1, 2, 3, 4):  # by its recipe first, then recalled
        # as many queries, of other sequences
        lengths = [(5, 60), (0, 5), (73, 77), *PACKED[3:]] if p.varlen else [641 - seed, *KEYS[:-1]]
        other = make_inputs(p, seed, "cuda", lengths)
        for name in ("q", "k", "v", *tables):
            if getattr(inputs, name) is not None:
                getattr(inputs, name).copy_(getattr(other, name))
        result = call()
        graph.replay()
        assert all(map(torch.equal, result, captured)), seed
        verdict = Budget(inputs).judge(*captured)
        assert verdict.correct, verdict.reason
