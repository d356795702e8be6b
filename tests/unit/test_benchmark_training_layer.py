"""The benchmark of a layer without a GPU: its layer, its masks, its reference and its measure."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("training_layer")


def masked_sdpa(benchmark, case, q, k, v, bias):
    mask = benchmark.visible(case, q.device).float().log() + (0.0 if bias is None else bias)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("number", range(4))
def test_the_reference_has_the_gradients_of_sdpa_in_every_case(benchmark, number):
    small = {"tokens": 24, "batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    case = replace(benchmark.CASES[number], **small)
    case = replace(case, window=min(case.window, 5))
    torch.manual_seed(0)
    layer = benchmark.AttentionLayer(case, lambda t: t * 2)
    x = torch.randn(2, 24, 64, requires_grad=True)

    def exact(*given):
        return benchmark.in_fp32(case, *given)

    def other(*given):
        return masked_sdpa(benchmark, case, *given)

    ours, theirs = (benchmark.gradients(layer, x, x.detach(), each) for each in (exact, other))
    assert len(ours) == 5 + case.bias
    for one, same in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, same)
    assert benchmark.distance(1.01 * ours[0], ours[0]) == pytest.approx(0.01, rel=1e-3)
    wider = replace(case, window=2 if case.window < 0 else -1)
    changed = benchmark.gradients(layer, x, x.detach(), lambda *g: benchmark.in_fp32(wider, *g))
    assert benchmark.distance(changed[0], ours[0]) > 0.1
