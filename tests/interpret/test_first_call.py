"""The first call gives what every later one gives, and no call changes what it is given."""

import importlib.util
import sys

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    """A module that was never called."""
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    spec = importlib.util.spec_from_file_location("never_called", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


def bits(tensors):
    return [tensor.clone().view(torch.uint8) for tensor in tensors]


def test_a_first_prefill_is_as_any_other_and_leaves_its_tensors_alone(module):  # case B27
    given = [normal(1, 40, heads, 64) for heads in (4, 2, 2)]
    before = bits(given)
    first, again = (module.prefill(*given, causal=True, return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(bits(given), before, strict=True))


def test_a_first_decode_is_as_any_other_and_leaves_cache_and_table_alone(module):  # case B27
    table = torch.randperm(12, dtype=torch.int32).view(2, 6)
    lengths = torch.tensor([90, 17], dtype=torch.int32)
    given = [normal(2, 1, 4, 64), normal(12, 16, 2, 64), normal(12, 16, 2, 64), lengths, table]
    before = bits(given)
    first, again = (module.decode(*given[:4], block_table=table, return_lse=True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(bits(given), before, strict=True))
