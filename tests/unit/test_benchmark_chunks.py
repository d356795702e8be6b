"""The benchmark of chunks without a GPU: what the others are given, and what is told."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from making import H200

from autoflash.accuracy import Budget
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.reference import eager, reference
from autoflash.turns import Times
from autoflash.workload import load_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEMS = [problem for problem, _ in load_workload(BENCHMARKS / "workloads/chunks.yaml").problems]
SOME = [PROBLEMS[0], *PROBLEMS[-2:]]  # alone, packed, under a window


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def peers() -> ModuleType:
    return importlib.import_module("chunk_peers")


def small(problem: Problem) -> Problem:
    sizes = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16, "seqlen_q": 9}
    left = 20 if problem.windowed else -1
    return replace(problem, batch=3, lengths="ragged", seqlen_k=70, window_left=left, **sizes)


def paged_attention(
    q, k, v, *, cu_seqlens_q, seqused_k, block_table, causal, window_size=(-1, -1), **rest
):
    """What vLLM's call computes, by the reference."""
    assert rest["fa_version"] == 3 and rest["max_seqlen_k"] >= int(seqused_k.max())
    rows = cu_seqlens_q.diff()
    assert rest["max_seqlen_q"] >= int(rows.max())
    heads = {"num_heads": q.shape[1], "num_kv_heads": k.shape[2], "head_dim": q.shape[2]}
    sizes = {"batch": len(rows), "seqlen_q": int(rows.max()), "seqlen_k": int(seqused_k.max())}
    fields = {"page_size": k.shape[1], "window_left": window_size[0], "causal": causal}
    problem = Problem("prefill", "bf16", **heads, **sizes, **fields, layout="thd", lengths="ragged")
    given = Inputs(problem, q, k, v, seqused_k, block_table, cu_seqlens_q=cu_seqlens_q)
    return eager(given)[0]


@pytest.mark.parametrize("problem", SOME, ids=str)
def test_flash_attention_is_given_the_chunks_of_the_problem(monkeypatch, peers, problem):
    interface = SimpleNamespace(flash_attn_varlen_func=paged_attention)
    name = "vllm.vllm_flash_attn.flash_attn_interface"
    for module in ("vllm", "vllm.vllm_flash_attn"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, name, interface)
    inputs = [make_inputs(small(problem), seed) for seed in range(2)]
    contender = peers.flash_attention_3(inputs)
    for number, one in enumerate(inputs):
        verdict = Budget(one).judge(contender.out(number), None)
        assert verdict.correct, verdict.reason


@pytest.mark.parametrize("problem", SOME, ids=str)
def test_keys_in_order_are_those_of_the_pages(peers, problem):
    one = make_inputs(small(problem))
    out, lse = reference(one)
    plain = peers.packed(one)
    assert not plain.problem.paged and plain.problem.windowed == problem.windowed
    expected, expected_lse = reference(plain)
    if problem.layout == "bshd":
        out, lse = out.flatten(0, 1), lse.transpose(0, 1).flatten(1)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(lse, expected_lse, rtol=0, atol=0)


def test_a_case_tells_its_ratios_to_flash_attention_and_to_keys_in_order(
    monkeypatch, tmp_path, capsys
):
    chunks = importlib.import_module("chunks")
    monkeypatch.setattr(importlib.import_module("harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/chunks.py", "--module", str(tmp_path / "m.py")])
    monkeypatch.setattr(chunks, "detect", lambda: H200)
    tuned, written = [], []
    monkeypatch.setattr(chunks, "tune", lambda *given: tuned.append(given))
    monkeypatch.setattr(chunks, "export_module", lambda db, path: path.write_text(""))
    monkeypatch.setattr(chunks, "load_module", lambda path: SimpleNamespace())
    monkeypatch.setattr(
        chunks, "write_results", lambda name, results, *_, **more: written.append(more) or "path"
    )

    def measured(problem, module, gpu, ms):
        told = (("autoflash", 10.0), ("flash_attention_3", 12.0), ("in_order", 9.0))
        return chunks.result_of(problem, {n: Times("graph", [us] * 5) for n, us in told}, {})

    monkeypatch.setattr(chunks, "measured", measured)
    chunks.main()
    assert len(tuned) == 1 and len(written) == len(PROBLEMS)
    (summary,) = written[-1].values()
    assert summary["over_flash_attention_3"]["geometric_mean"] == 1.2
    assert summary["over_in_order"]["worst"] == 0.9
    assert "ratio 1.2  over keys in order 0.9" in capsys.readouterr().out
