"""The read kernel of the decode benchmark reads every number that it is told to, and no other."""

import sys
from pathlib import Path

import pytest
import torch
import triton

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from read_floor import read

MAGIC = 0x1234567  # the sum for which `out` is written


@pytest.mark.parametrize("cache", [0, 1], ids="kv")
@pytest.mark.parametrize(("place", "is_read"), [(0, True), (299, True), (300, False)])
def test_the_last_number_is_read_and_the_one_after_it_is_not(cache, place, is_read):
    assert not isinstance(read, triton.JITFunction)  # it is interpreted
    caches = [torch.zeros(400, dtype=torch.int32) for _ in "kv"]
    caches[cache][place] = MAGIC
    out = torch.ones(1, dtype=torch.int32)
    read[(2,)](*caches, 300, out, PROGRAMS=2, BLOCK=64)
    assert (out.item() == 0) is is_read
