"""Batch-invariant calls of the exported module on a GPU: the bits of a sequence alone."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    spec = importlib.util.spec_from_file_location("invariant_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normal(*shape):
    return torch.randn(shape, device="cuda").bfloat16()


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("causal", [True, False])
def test_a_prompt_has_the_bits_that_it_has_alone(module, head_dim, causal):
    for keys in (100, 1024):
        q = normal(17, keys, 8, head_dim)
        k, v = normal(17, keys, 2, head_dim), normal(17, keys, 2, head_dim)
        call = {"causal": causal, "batch_invariant": True}
        out = module.prefill(q, k, v, **call)
        for batch in (1, 4):
            few = module.prefill(q[:batch], k[:batch], v[:batch], **call)
            assert torch.equal(few, out[:batch])


def test_a_packed_prompt_has_the_bits_that_it_has_alone(module):
    lengths = [70, 1, 1500, 333]
    starts = torch.tensor([0, *lengths], device="cuda").cumsum(0)
    q, k, v = normal(sum(lengths), 8, 128), *(normal(sum(lengths), 2, 128) for _ in "kv")

    def prefill(part, longest):
        rows = slice(int(starts[part.start]), int(starts[part.stop]))
        own = starts[part.start : part.stop + 1] - starts[part.start]
        packing = {"cu_seqlens_q": own, "cu_seqlens_k": own, "layout": "thd"}
        sizes = {"max_seqlen_q": longest, "max_seqlen_k": longest}
        call = {**packing, **sizes, "causal": True, "batch_invariant": True}
        return module.prefill(q[rows], k[rows], v[rows], **call), rows

    out, _ = prefill(slice(0, 4), 1500)
    for b, length in enumerate(lengths):
        alone, rows = prefill(slice(b, b + 1), length)
        assert torch.equal(alone, out[rows])


@pytest.mark.parametrize("seqlen_q", [0, 4])
def test_a_step_gives_a_sequence_the_bits_that_it_has_alone(module, seqlen_q):
    lengths = torch.tensor([5000, 17, 900, *[300] * 61], device="cuda", dtype=torch.int32)
    caches = [normal(64 * 320, 16, 8, 128) for _ in "kv"]
    table = torch.randperm(64 * 320, device="cuda", dtype=torch.int32).view(64, 320)
    q = normal(64, *([seqlen_q] if seqlen_q else []), 32, 128)
    call = {"batch_invariant": True}
    out = module.decode(q, *caches, lengths, block_table=table, **call)
    for batch in (1, 3, 20):
        own = table[:batch, : 313 + batch]
        few = module.decode(q[:batch], *caches, lengths[:batch], block_table=own, **call)
        assert torch.equal(few, out[:batch]), batch
