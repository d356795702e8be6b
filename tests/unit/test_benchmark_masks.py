"""The benchmark of masks without a GPU: FlexAttention is given the same mask, and what is told."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from making import H200
from torch.nn.attention import flex_attention as torch_flex

from autoflash.accuracy import Budget
from autoflash.inputs import make_inputs
from autoflash.peers.contender import Unavailable
from autoflash.problem import Problem
from autoflash.turns import Times
from autoflash.visibility import seen_keys
from autoflash.workload import load_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PROBLEMS = [problem for problem, _ in load_workload(BENCHMARKS / "workloads/masks.yaml").problems]
EVERY = (0, range(2), torch.arange(384), 384, 384)  # row of the first sequence of a small one


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def masks() -> ModuleType:
    return importlib.import_module("masks")


def small(problem: Problem) -> Problem:
    """As short as FlexAttention's own blocks allow to see several."""
    heads = {"num_heads": 2, "num_kv_heads": 1 if problem.group_size > 1 else 2}
    left = 150 if problem.windowed else -1
    density = 40 if problem.density else 0
    sizes = {"seqlen_q": 384, "seqlen_k": 384, "head_dim": 32, "head_dim_v": 32}
    return replace(problem, **heads, **sizes, window_left=left, density=density)


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: " ".join(p.switches))
def test_flex_attention_is_given_the_mask_of_the_problem(monkeypatch, problem):
    peers = importlib.import_module("autoflash.peers.flex")
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    exact = replace(small(problem), dtype="fp32", kv_dtype="fp32", out_dtype="fp32")
    inputs = [make_inputs(exact, seed, poison=False) for seed in range(2)]
    contender = peers.flex_attention(inputs)
    for number, one in enumerate(inputs):
        if one.block_mask is None:
            verdict = Budget(one).judge(contender.out(number), None)
            assert verdict.correct, verdict.reason
            continue
        # uncompiled it asks the rule alone, which compiled it asks in blocks that are seen in part
        given = peers.block_mask_of(one)
        masks, blocks_alone = one.modifiers.masks, replace(exact, mask="", causal=False)
        there = seen_keys(blocks_alone, masks, *EVERY)
        blocks = given.to_dense().repeat_interleave(128, 2).repeat_interleave(128, 3)
        assert torch.equal(blocks[0].bool(), there)
        ruled = replace(exact, masked_by="", density=0, mask_block_q=0, mask_block_k=0)
        seen = seen_keys(ruled, masks._replace(block_mask=None), *EVERY)
        i, j = torch.arange(384)[:, None], torch.arange(384)
        assert torch.equal(given.mask_mod(0, 0, i, j).expand(384, 384), seen[0])


def test_a_custom_mask_that_nobody_wrote_for_it_leaves_it_out():
    peers = importlib.import_module("autoflash.peers.flex")
    inputs = make_inputs(replace(small(PROBLEMS[1]), mask="h == 1"), poison=False)
    with pytest.raises(Unavailable, match="nobody wrote h == 1 for it"):
        peers.flex_attention([inputs])


def test_a_case_tells_its_ratio_to_flex_attention_and_to_the_dense_problem(
    monkeypatch, tmp_path, capsys, masks
):
    monkeypatch.setattr(importlib.import_module("harness"), "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/masks.py", "--module", str(tmp_path / "m.py")])
    monkeypatch.setattr(masks, "detect", lambda: H200)
    tuned, written = [], []
    monkeypatch.setattr(masks, "tune", lambda *given: tuned.append(given))
    monkeypatch.setattr(masks, "export_module", lambda db, path: path.write_text(""))
    monkeypatch.setattr(masks, "load_module", lambda path: SimpleNamespace())
    monkeypatch.setattr(
        masks, "write_results", lambda name, results, *_, **more: written.append(more) or "path"
    )

    def measured(name, problem, module, gpu, ms):
        times = {
            each: Times("graph", [us] * 5)
            for each, us in (("autoflash", 10.0), ("flex_attention", 12.0), ("dense", 50.0))
        }
        return masks.result_of(name, problem, times, {})

    monkeypatch.setattr(masks, "measured", measured)
    masks.main()
    assert len(tuned) == 1 and len(written) == len(PROBLEMS)
    (summary,) = written[-1].values()
    assert summary["over_flex"]["worst"] == 1.2
    assert set(summary["over_dense"].values()) == {5.0}
    assert "ratio 1.2  over dense 5.0" in capsys.readouterr().out


def test_the_dense_problem_has_the_same_tensors_and_no_mask(masks):
    for problem in PROBLEMS:
        inputs = make_inputs(small(problem), poison=False)
        plain = masks.dense(inputs)
        assert plain.q is inputs.q and not plain.problem.masks and not plain.problem.windowed
        assert plain.problem.causal == problem.causal and plain.modifiers.block_mask is None
