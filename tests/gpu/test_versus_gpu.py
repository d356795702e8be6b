"""Gauges and `autoflash bench` on a GPU: what is counted of known calls, and a whole small run."""

import json

import pytest
import torch
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.gauges import TAIL_CALLS, gauged

pytestmark = pytest.mark.gpu

MIB = 2**20
WORKLOAD = """
model: {num_heads: 8, num_kv_heads: 2, head_dim: 128, dtype: bf16}
prefill: [{batch: 2, seqlen_q: 512}]
decode: [{batch: 4, seqlen_k: 1024, page_size: [0, 16]}]
"""


def test_launches_and_memory_of_a_known_call_are_counted():
    x = torch.ones(MIB, device="cuda")

    def call() -> torch.Tensor:
        return (x + 1).mul_(2) + x  # three kernels; one temporary beside the output

    call()
    found = gauged({"one": [call]})["one"]
    assert found.launches == 3
    assert found.temporary_bytes == 4 * MIB
    assert 0 < found.host_us < found.eager_us and found.p99_us >= found.eager_us


def test_a_call_too_long_for_a_thousand_has_no_99th_percentile():
    def call() -> None:
        torch.cuda._sleep(20_000_000)  # some ten milliseconds

    found = gauged({"one": [call]})["one"]
    assert found.p99_us is None and found.eager_us > 3e6 / TAIL_CALLS


def test_a_small_workload_beside_what_torch_has(tmp_path):
    workload, results = tmp_path / "small.yaml", tmp_path / "results.json"
    workload.write_text(WORKLOAD)
    arguments = ["bench", workload, "-o", results, "--gpu-ms", 20]
    for peer in ("math", "flash", "xformers"):
        arguments += ["--against", peer]
    done = CliRunner().invoke(app, list(map(str, arguments)))
    assert done.exception is None, done.output
    prefill, decode, paged = json.loads(results.read_text())["cases"]
    for case in (prefill, decode, paged):
        assert case["ours"] > 0
        assert case["figures"]["autoflash"]["launches"] >= 1
        assert case["figures"]["autoflash"]["error"] <= 2
        assert 0 < case["figures"]["autoflash"]["percent_of_roofline"] < 100
    assert prefill["peers"]["math"] > 0 and decode["peers"]["math"] > 0
    assert paged["unavailable"]["math"] == "it reads no pages"
    assert decode["unavailable"]["xformers"] == "it has no adapter for decode"
