"""The benchmark of a layer without a GPU: its layer, its masks, its reference and its measure."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

from autoflash.dropout import dropout_numbers

RNG = torch.tensor([3, 4])
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def benchmark(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("training_layer")


def masked_sdpa(benchmark, case, q, k, v, bias):
    mask = benchmark.visible(case, q.device).float().log() + (0.0 if bias is None else bias)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if case.dropout:  # of which SDPA would drop others
        k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
        places = [torch.arange(n) for n in (q.shape[1], case.tokens, case.tokens)]
        numbers = [dropout_numbers(RNG, b, *places) for b in range(case.batch)]
        kept = torch.stack(numbers) >= round(65536 * case.dropout)
        p = (q @ k.transpose(2, 3) * case.head_dim**-0.5 + mask).softmax(-1) * kept
        return (p @ v / (1 - round(65536 * case.dropout) / 65536)).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True).transpose(1, 2)


@pytest.mark.parametrize("number", range(7))
def test_the_reference_has_the_gradients_of_sdpa_in_every_case(benchmark, number):
    small = {"tokens": 24, "batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    case = replace(benchmark.CASES[number], **small)
    case = replace(case, window=min(case.window, 5))
    torch.manual_seed(0)
    layer = benchmark.AttentionLayer(case, lambda t: t * 2)
    x = torch.randn(2, 24, 64, requires_grad=True)

    def exact(*given):
        return benchmark.in_fp32(case, RNG, *given)

    def other(*given):
        return masked_sdpa(benchmark, case, *given)

    ours, theirs = (benchmark.gradients(layer, x, x.detach(), each) for each in (exact, other))
    assert len(ours) == 5 + case.bias
    for one, same in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, same)
    assert benchmark.distance(1.01 * ours[0], ours[0]) == pytest.approx(0.01, rel=1e-3)
    wider = replace(case, window=2 if case.window < 0 else -1)
    changed = benchmark.gradients(
        layer, x, x.detach(), lambda *g: benchmark.in_fp32(wider, RNG, *g)
    )
    assert benchmark.distance(changed[0], ours[0]) > 0.1
