"""The exported module, alone in a process, is right on every tuned shape and on untuned ones.

The module is that of the shipped winners for this GPU, or $AUTOFLASH_MODULE.
"""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from exported_calls import make_tensors

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.inputs import Inputs
from autoflash.problem import Problem
from autoflash.workload import load_workload

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).resolve().parent.parent.parent
WORKLOADS = ("llama-3-8b", "qwen2-7b", "gemma-2-9b")

UNTUNED = (
    Problem("prefill", "bf16", 1, 32, 8, 128, 1000, 1000),
    Problem("prefill", "bf16", 3, 32, 8, 128, 77, 300),
    Problem("prefill", "bf16", 2, 8, 8, 128, 1, 129, causal=False),
    Problem("prefill", "bf16", 1, 6, 2, 80, 300, 200),
    Problem("prefill", "fp16", 2, 4, 4, 40, 130, 130, causal=False),
    Problem("prefill", "fp32", 1, 4, 2, 64, 200, 333),
    Problem("decode", "bf16", 5, 32, 8, 128, 1, 777, lengths="ragged"),
    Problem("decode", "bf16", 5, 32, 8, 128, 1, 777, page_size=3, lengths="ragged"),
    Problem("decode", "bf16", 200, 32, 8, 128, 1, 3000, page_size=16, lengths="ragged"),
    Problem("decode", "bf16", 3, 71, 1, 64, 1, 500, page_size=48, lengths="ragged"),
    Problem("decode", "fp16", 2, 8, 2, 96, 1, 65, page_size=64),
    Problem("decode", "fp32", 2, 8, 2, 128, 1, 513),
)


def problems() -> list[Problem]:
    tuned = [
        problem
        for name in WORKLOADS
        for problem, _ in load_workload(ROOT / "examples" / f"{name}.yaml").problems
    ]
    return [*tuned, *UNTUNED]


@pytest.fixture(scope="module")
def module_path(tmp_path_factory) -> Path:
    if given := os.environ.get("AUTOFLASH_MODULE"):
        return Path(given)
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": str(path) + ".db"})
    return path


def test_every_shape_is_right_where_autoflash_cannot_be_imported(module_path, tmp_path):
    cases = [
        {**dataclasses.asdict(problem), "seed": 1000 + number}
        for number, problem in enumerate(problems())
    ]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    child = [sys.executable, str(Path(__file__).with_name("exported_calls.py"))]
    subprocess.run(
        [*child, str(module_path), str(tmp_path / "cases.json"), str(tmp_path)],
        check=True,
        cwd=tmp_path,
    )
    wrong = []
    for number, (problem, case) in enumerate(zip(problems(), cases, strict=True)):
        tensors = make_tensors(case)
        inputs = Inputs(problem, **tensors)
        result = torch.load(tmp_path / f"{number}.pt", map_location="cuda")
        rows = sample_rows(problem, seed=number)
        budget = Budget(inputs, rows=rows)
        verdict = budget.judge(*picked(problem, result["out"], result["lse"], rows))
        if not verdict.correct or result["out"].isnan().any():
            wrong.append((problem, verdict.reason or "NaN"))
        del inputs, tensors
        torch.cuda.empty_cache()
    assert not wrong
