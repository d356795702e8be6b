"""The example that checks an exported module: it tells a right module from a wrong one."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "check_against_sdpa.py"

# What an exported module offers, made of torch alone; `off` is added to every output.
MODULE = """
import torch
import torch.nn.functional as F

def attention(q, k, v, mask):
    q, k, v = (t.transpose(1, 2).float() for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)

def prefill(q, k, v, *, causal, layout):
    mask = torch.ones(q.shape[1], k.shape[1]).tril().bool() if causal else None
    return (attention(q, k, v, mask).transpose(1, 2) + {off}).to(q.dtype)

def decode(q, k, v, cache_seqlens, *, block_table, kv_layout, max_seqlen_k, lengths):
    if block_table is not None:
        k, v = (t[block_table.long()].flatten(1, 2)[:, :max_seqlen_k] for t in (k, v))
    return (attention(q, k, v, None).transpose(1, 2) + {off}).to(q.dtype)
"""
WORKLOAD = """
model: {num_heads: 4, num_kv_heads: 2, head_dim: 32, dtype: bf16}
prefill: [{seqlen_q: 48, causal: [true, false]}]
decode: [{batch: 2, seqlen_k: 50, page_size: [0, 16]}]
"""


@pytest.mark.parametrize(
    ("off", "status", "last_line"),
    [
        ("0.0", 0, "4 of 4 shapes agree with SDPA"),
        ("0.02", 1, "0 of 4 shapes agree with SDPA"),
        ("float('nan')", 1, "0 of 4 shapes agree with SDPA"),
    ],
)
def test_it_tells_a_right_module_from_a_wrong_one(tmp_path, off, status, last_line):
    module, workload = tmp_path / "attention_dispatch.py", tmp_path / "workload.yaml"
    module.write_text(MODULE.format(off=off))
    workload.write_text(WORKLOAD)
    command = [sys.executable, str(SCRIPT), str(module), str(workload)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == last_line
