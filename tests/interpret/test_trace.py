"""An exported module writes the problems it served, and autoflash reads what it wrote."""

import os
import subprocess
import sys

from autoflash.export import export
from autoflash.store import shipped_winners
from autoflash.trace import load_trace

SCRIPT = """
import sys, torch
sys.modules["autoflash"] = None
import attention_dispatch as module
q, k, v = (torch.randn(1, 40, heads, 64).bfloat16() for heads in (4, 2, 2))
for keys in (40, 40, 30):
    module.prefill(q, k[:, :keys], v[:, :keys], causal=True)
module.decode(q[:, :1], k, v, torch.tensor([9]))
assert sum(module.coverage().values()) == 4
outputs_of, module.outputs_of = module.outputs_of, None  # a call that is chosen for and not made
try:
    module.prefill(q, k[:, :20], v[:, :20])
except TypeError:
    module.outputs_of = outputs_of
module.write_trace("by_hand.jsonl")
"""


def test_a_process_adds_its_calls_to_the_trace_when_it_ends(tmp_path):
    (tmp_path / "attention_dispatch.py").write_text(export(shipped_winners()).text)
    environment = {**os.environ, "AUTOFLASH_TRACE": "calls.jsonl", "PYTHONPATH": str(tmp_path)}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", SCRIPT], check=True, env=environment, cwd=tmp_path)
    for name in ("calls.jsonl", "by_hand.jsonl"):
        traced = load_trace(tmp_path / name)
        posed = {(one.problem.op, one.problem.seqlen_k): one.calls for one in traced}
        assert posed == {("prefill", 40): 4, ("prefill", 30): 2, ("decode", 40): 2}
        assert {one.gpu[0] for one in traced} == {"NVIDIA H200"}
