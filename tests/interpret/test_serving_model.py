"""The serving benchmark on a model of one layer. Skipped where transformers is not installed."""

import argparse
import importlib
from pathlib import Path

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners

pytest.importorskip("transformers")

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {"layers": 1, "hidden": 256, "vocabulary": 97, "prompt": 20, "tokens": 3}


@pytest.fixture
def options():
    return argparse.Namespace(**SMALL)


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("serving")


@pytest.fixture
def module(serving, tmp_path):
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return importlib.import_module("harness").load_module(path)


@pytest.fixture
def names(serving, module):
    module.register_attention(serving.NAME)
    return {"autoflash": serving.NAME, "sdpa": "sdpa", "nobody": "nobody"}


def test_a_generation_of_each_is_timed_and_their_tokens_compared(serving, module, options, names):
    prompt = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    model = serving.llama(options, torch.bfloat16, "cpu")
    with torch.inference_mode():
        before = sum(module.coverage().values())
        times, generations, left_out = serving.timed(model, names, prompt, 3, rounds=1)
        assert sum(module.coverage().values()) == before + 4 * 3  # generations, steps
        assert list(left_out) == ["nobody"] and set(times) == {"autoflash", "sdpa"}
        assert all(len(each[name]) == 1 for each in times.values() for name in each)
        assert generations["sdpa"].tokens.shape == (2, 3)
        assert serving.divergences_beyond_bf16(model, generations, prompt) == []
        assert serving.different_in_fp32(options, names, prompt, "cpu") == []


def test_tokens_that_bf16_does_not_explain_are_told(serving, options, monkeypatch):
    prompt = torch.randint(1, 97, (2, 20), generator=torch.Generator().manual_seed(0))
    model = serving.llama(options, torch.bfloat16, "cpu")
    with torch.inference_mode():
        right = serving.generated(model, "sdpa", prompt, 2)
        tokens = right.tokens.clone()
        tokens[1, 1] += 1
        wrong = serving.Generation(tokens, right.logits, right.seconds)
        seen = torch.cat([prompt[1], right.tokens[1, :1]])[None]
        change = serving.largest_change(model, seen, right.logits[1][1].double())
        assert 0 < change < 0.1 and model.dtype == torch.bfloat16
        for limit, told in ((0.0, 1), (1e9, 0)):
            monkeypatch.setattr(serving, "largest_change", lambda *_, limit=limit: limit)
            given = {"autoflash": wrong, "sdpa": right}
            assert len(serving.divergences_beyond_bf16(model, given, prompt)) == told
