"""The exported module, alone in an interpreting process, is right on shapes near and far."""

import os
import subprocess
import sys

from exported_calls import wrong_results

from autoflash.problem import Problem

PROBLEMS = [
    Problem("prefill", "bf16", 1, 4, 1, 128, 100, 100),  # near a tuned one
    Problem("prefill", "bf16", 1, 2, 2, 128, 1, 129, causal=False),
    Problem("prefill", "bf16", 1, 6, 2, 80, 90, 50),  # rows without keys
    Problem("prefill", "fp16", 1, 2, 2, 40, 70, 70, causal=False),
    Problem("prefill", "fp32", 1, 2, 1, 64, 40, 70),
    Problem("prefill", "bf16", 1, 4, 2, 64, 100, 130, window_left=33),
    Problem("prefill", "bf16", 2, 2, 1, 64, 70, 40, causal=False, window_left=9, window_right=20),
    Problem("prefill", "fp16", 2, 4, 2, 64, 70, 70, softcap=True, alibi=True, sinks=True),
    Problem("prefill", "bf16", 2, 2, 1, 64, 30, 70, causal=False, bias=True),
    Problem("decode", "bf16", 3, 4, 1, 128, 1, 277, lengths="ragged"),
    Problem("decode", "bf16", 3, 4, 1, 128, 1, 277, page_size=3, lengths="ragged"),
    Problem("decode", "fp16", 2, 8, 2, 96, 1, 65, page_size=64),
    Problem("decode", "fp32", 2, 8, 2, 128, 1, 213),
    Problem("decode", "bf16", 2, 8, 2, 128, 4, 130, page_size=16, lengths="ragged"),
    Problem("decode", "fp16", 2, 2, 1, 64, 16, 40),
    Problem("decode", "bf16", 3, 4, 2, 64, 1, 130, page_size=16, kv_dtype="fp8_e4m3"),
    Problem("decode", "fp16", 2, 4, 2, 32, 2, 70, kv_dtype="int8", kv_scales="head"),
    Problem("decode", "bf16", 2, 4, 2, 64, 1, 70, page_size=3, kv_dtype="int8", kv_scales="token"),
    Problem("decode", "bf16", 3, 4, 1, 64, 1, 130, page_size=16, window_left=40, sinks=True),
    Problem("decode", "bf16", 2, 16, 1, 576, 1, 130, head_dim_v=512, page_size=16),
    Problem("decode", "bf16", 2, 4, 2, 64, 1, 64, page_size=16, pages="chosen", alibi=True),
    Problem("decode", "fp16", 2, 4, 2, 64, 3, 90, softcap=True, alibi=True, lengths="ragged"),
    Problem("decode", "bf16", 2, 4, 2, 64, 1, 90, page_size=16, bias=True, lengths="ragged"),
]


def test_every_shape_is_right_where_autoflash_cannot_be_imported(tmp_path):
    module = tmp_path / "attention_dispatch.py"
    environment = {**os.environ, "AUTOFLASH_DB": str(tmp_path / "none.db")}
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(module)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    assert wrong_results(module, PROBLEMS, tmp_path, "cpu") == []
