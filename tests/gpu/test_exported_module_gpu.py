"""The exported module, alone in a process, is right on every tuned shape and on untuned ones.

The module is that of the shipped winners for this GPU, or $AUTOFLASH_MODULE.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from exported_calls import wrong_results

from autoflash.problem import Problem
from autoflash.workload import load_workload

pytestmark = pytest.mark.gpu

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

UNTUNED = [
    Problem("prefill", "bf16", 1, 32, 8, 128, 1000, 1000),
    Problem("prefill", "bf16", 3, 32, 8, 128, 77, 300),
    Problem("prefill", "bf16", 2, 8, 8, 128, 1, 129, causal=False),
    Problem("prefill", "bf16", 1, 6, 2, 80, 300, 200),
    Problem("prefill", "fp16", 2, 4, 4, 40, 130, 130, causal=False),
    Problem("prefill", "fp32", 1, 4, 2, 64, 200, 333),
    Problem("prefill", "bf16", 1, 32, 8, 128, 3000, 3000, window_left=1023, sinks=True),
    Problem("prefill", "bf16", 2, 8, 2, 256, 700, 900, window_left=255, softcap=True),
    Problem("prefill", "fp16", 2, 8, 8, 64, 500, 300, causal=False, window_right=100, alibi=True),
    Problem("prefill", "bf16", 2, 8, 2, 128, 333, 777, bias=True),
    Problem("decode", "bf16", 5, 32, 8, 128, 1, 777, lengths="ragged"),
    Problem("decode", "bf16", 5, 32, 8, 128, 1, 777, page_size=3, lengths="ragged"),
    Problem("decode", "bf16", 200, 32, 8, 128, 1, 3000, page_size=16, lengths="ragged"),
    Problem("decode", "bf16", 3, 71, 1, 64, 1, 500, page_size=48, lengths="ragged"),
    Problem("decode", "fp16", 2, 8, 2, 96, 1, 65, page_size=64),
    Problem("decode", "fp32", 2, 8, 2, 128, 1, 513),
    Problem("decode", "bf16", 9, 32, 8, 128, 4, 1777, page_size=16, lengths="ragged"),
    Problem("decode", "fp16", 2, 8, 1, 64, 16, 500),
    Problem("decode", "bf16", 9, 64, 8, 64, 1, 3000, page_size=16, window_left=127, sinks=True),
    Problem("decode", "bf16", 9, 16, 8, 256, 1, 5000, page_size=16, window_left=4095, softcap=True),
    Problem("decode", "fp16", 2, 8, 2, 128, 5, 700, alibi=True, lengths="ragged"),
    Problem("decode", "bf16", 9, 32, 8, 128, 1, 2000, page_size=16, bias=True, lengths="ragged"),
    Problem("decode", "fp16", 2, 8, 2, 64, 4, 700, bias=True, sinks=True, window_left=100),
    Problem("decode", "bf16", 9, 32, 8, 128, 1, 2048, page_size=16, pages="chosen", alibi=True),
    Problem("decode", "bf16", 5, 128, 1, 576, 1, 3000, head_dim_v=512, page_size=64),
    Problem("decode", "fp16", 3, 16, 1, 576, 2, 700, head_dim_v=512, lengths="ragged"),
    Problem("decode", "bf16", 9, 32, 8, 128, 1, 1777, page_size=16, kv_dtype="fp8_e4m3"),
    Problem("decode", "fp16", 3, 8, 2, 128, 4, 700, kv_dtype="int8", kv_scales="head"),
    Problem(
        "decode", "bf16", 5, 8, 2, 128, 1, 700, page_size=3, kv_dtype="int8", kv_scales="token"
    ),
]


@pytest.fixture(scope="module")
def module_path(tmp_path_factory) -> Path:
    if given := os.environ.get("AUTOFLASH_MODULE"):
        return Path(given)
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    return path


def test_untuned_shapes_are_right_where_autoflash_cannot_be_imported(module_path, tmp_path):
    assert wrong_results(module_path, UNTUNED, tmp_path, "cuda") == []


@pytest.mark.parametrize("workload", ["llama-3-8b", "qwen2-7b", "gemma-2-9b"])
def test_a_models_shapes_are_right_where_autoflash_cannot_be_imported(
    module_path, workload, tmp_path
):
    problems = [problem for problem, _ in load_workload(EXAMPLES / f"{workload}.yaml").problems]
    assert wrong_results(module_path, problems, tmp_path, "cuda") == []
