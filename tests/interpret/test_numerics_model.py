"""The benchmark of numerics on a small model. Skipped where transformers is not installed."""

import argparse
import importlib
from functools import partial
from pathlib import Path

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = argparse.Namespace(layers=1, hidden=256, vocabulary=97, prompt=20, tokens=3)


@pytest.fixture
def numerics(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("numerics")


@pytest.fixture
def module(numerics, tmp_path):
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    module = importlib.import_module("harness").load_module(path)
    module.register_attention(numerics.NAME)
    return module


@pytest.fixture
def prompt():
    return torch.randint(1, 97, (2, SMALL.prompt), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_our_tokens_are_sdpas_but_where_the_dtype_explains_it(numerics, module, prompt, dtype, way):
    noise = numerics.ways(0)[way]
    with torch.inference_mode():
        model = numerics.llama(SMALL, numerics.DTYPES[dtype], "cpu")
        streams = numerics.streams_of(model, numerics.NAME, prompt, SMALL.tokens, noise)
        told = numerics.case_of(dtype, way, streams, noise)
        assert told["unexplained"] == []
        assert 0 < told["ours"] < told["largest_logit"] * torch.finfo(model.dtype).eps ** 0.5
        assert model.dtype == numerics.DTYPES[dtype]  # fp64 was for the exact logits alone
    assert streams.theirs.shape == (2, SMALL.tokens)
    assert (way == "greedy") == torch.equal(streams.theirs, streams.their_logits.argmax(-1))


def test_attention_that_sees_less_has_another_error_than_its_dtype(
    numerics, module, prompt, monkeypatch
):
    def near(whole, *tensors, **call):
        return whole(*tensors, **{**call, "window": (3, 0)})

    for function in ("prefill", "decode"):
        monkeypatch.setattr(module, function, partial(near, getattr(module, function)))
    noise = numerics.ways(0)["greedy"]
    with torch.inference_mode():
        model = numerics.llama(SMALL, torch.float32, "cpu")
        streams = numerics.streams_of(model, numerics.NAME, prompt, SMALL.tokens, noise)
        told = numerics.case_of("fp32", "greedy", streams, noise)
    assert told["ratio"] < 0.01 and told["unexplained"]
