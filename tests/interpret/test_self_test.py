"""self_test() passes where the module is right and names what is wrong; a strict module refuses."""

import importlib.util
import sys

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners


@pytest.fixture(scope="module")
def text():
    return export(shipped_winners()).text


@pytest.fixture
def module(text, tmp_path):
    path = tmp_path / "attention_dispatch.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("self_tested", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_a_module_that_is_right_passes_its_own_test(module):
    cases = module.self_test()
    assert len(cases) == 8
    assert all(0.0 < case.allowed < 0.1 for case in cases)


def by_torch(module, wrong=lambda out: out):
    """A prefill that is right, made wrong; over pages it is the module's own."""
    own = module.prefill

    def prefill(q, k, v, causal, window=(-1, -1), **pages):
        if pages:
            return own(q, k, v, causal=causal, **pages)
        out = module._attention_in(torch.float32, q, k, v, causal, window[0])
        return wrong(out.to(q.dtype))

    return prefill


@pytest.mark.parametrize("wrong", [0.05, float("nan")])
def test_a_wrong_prefill_is_named(module, wrong, monkeypatch):
    def off(out):
        out[-1, -1] += wrong
        return out

    monkeypatch.setattr(module, "prefill", by_torch(module, off))
    with pytest.raises(module.SelfTestError, match=r"wrong results on cpu: prefill .*; prefill"):
        module.self_test()


def test_a_wrong_decode_is_named(module, monkeypatch):
    monkeypatch.setattr(module, "prefill", by_torch(module))
    monkeypatch.setattr(module, "decode", lambda q, *caches, **pages: torch.zeros_like(q))
    named = r"wrong results on cpu: append_kv and paged decode, 90 keys"
    with pytest.raises(module.SelfTestError, match=named):
        module.self_test()


def test_a_row_without_keys_must_be_zero(module, monkeypatch):
    prefill = by_torch(module, lambda out: out.masked_fill_(out == 0, 1e-30))
    monkeypatch.setattr(module, "prefill", prefill)
    with pytest.raises(module.SelfTestError, match=r"prefill causal=True .* 40 queries 33 keys"):
        module.self_test()


def test_a_strict_module_refuses_a_gpu_that_nothing_was_measured_on(module, monkeypatch):
    q, k, v = (torch.randn(1, 20, heads, 64).bfloat16() for heads in (4, 2, 2))
    other = module.installed().tables.gpus[0].device._replace(name="NVIDIA B300", arch="sm_103")
    monkeypatch.setattr(module, "device_of", lambda tensor, interpreted_as: other)
    with pytest.warns(UserWarning, match="no measurements for .*NVIDIA B300") as warned:
        module.prefill(q, k, v)
        module.prefill(q, k, v, causal=True)
    assert len([each for each in warned if "no measurements" in str(each.message)]) == 1
    assert warned[0].filename == __file__
    module.configure(strict=True)
    with pytest.raises(LookupError, match=r"NVIDIA B300.*the module knows NVIDIA H200"):
        module.prefill(q, k, v)
    module.configure(strict=False)
    module.prefill(q, k, v)
