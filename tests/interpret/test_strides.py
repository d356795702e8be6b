"""Views: whatever the strides, results are those of contiguous copies, or the call is refused."""

import importlib.util
import sys

import pytest
import torch

from autoflash.export import export
from autoflash.store import shipped_winners


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    spec = importlib.util.spec_from_file_location("strided_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def shifted(tensor):
    """The same values one element past an aligned address."""
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape).copy_(tensor)


def in_wide_rows(tensor):
    """The same values, each token's heads in a row of 1953 elements."""
    rows = torch.full((*tensor.shape[:2], 1953), float("nan"), dtype=tensor.dtype)
    width = tensor.shape[2] * tensor.shape[3]
    return rows[..., :width].unflatten(-1, tensor.shape[2:]).copy_(tensor)


def heads_first(tensor):
    """The same values as a view of heads before tokens."""
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("view", [shifted, in_wide_rows, heads_first])
def test_prefill_reads_each_of_its_tensors_by_its_own_strides(module, view):  # case B49, case S10
    tensors = {name: normal(1, 62, heads, 64) for name, heads in zip("qkv", (4, 2, 2), strict=True)}
    expected = module.prefill(**tensors, causal=True)
    for name in tensors:
        viewed = {**tensors, name: view(tensors[name])}
        out = module.prefill(**viewed, causal=True)
        assert torch.equal(out, expected) and out.is_contiguous(), name
    out = view(torch.empty_like(tensors["q"]))
    assert torch.equal(module.prefill(**tensors, causal=True, out=out), expected)


def test_keys_that_all_sequences_share_may_have_no_stride_between_them(module):  # case B49
    q, k, v = normal(3, 20, 4, 64), normal(1, 30, 2, 64), normal(1, 30, 2, 64)
    expanded = module.prefill(q, k.expand(3, -1, -1, -1), v.expand(3, -1, -1, -1))
    copies = (each.expand(3, -1, -1, -1).contiguous() for each in (k, v))
    assert torch.equal(expanded, module.prefill(q, *copies))


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_last_dimension_with_steps_is_refused(module, name):  # case B49
    tensors = {each: normal(1, 20, 2, 64) for each in "qkv"}
    tensors[name] = normal(1, 20, 2, 128)[..., ::2]
    with pytest.raises(ValueError, match=f"{name}'s last dimension must be contiguous"):
        module.prefill(**tensors)


def test_decode_reads_caches_tables_and_lengths_by_their_strides(module):  # case B25
    q = normal(3, 1, 4, 64)
    both = normal(9, 2, 16, 2, 64)  # K and V of a page side by side
    table = torch.randperm(9, generator=torch.Generator().manual_seed(0)).int().view(3, 3)
    lengths = torch.tensor([48, 17, 30], dtype=torch.int32)
    k, v = both[:, 0].contiguous(), both[:, 1].contiguous()
    expected = module.decode(q, k, v, lengths, block_table=table)
    wide = torch.full((3, 8), 2**30, dtype=torch.int32)
    wide[:, 2:5] = table
    spread = torch.zeros(3, 5, dtype=torch.int32)
    spread[:, 1] = lengths
    for caches in (
        (both[:, 0], both[:, 1]),
        (both[:, 0], v),
        (heads_first(k), heads_first(v)),
        (k, heads_first(v)),
    ):
        out = module.decode(q, *caches, spread[:, 1], block_table=wide[:, 2:5])
        assert torch.equal(out, expected)
    hnd = [cache.transpose(1, 2).contiguous() for cache in (k, v)]
    out = module.decode(q, *hnd, lengths, block_table=table, kv_layout="hnd")
    assert torch.equal(out, expected)


def test_types_are_never_mixed_and_the_order_of_keywords_is_nothing(module):  # case B48
    q, k, v = normal(1, 20, 4, 64), normal(1, 30, 2, 64), normal(1, 30, 2, 64)
    first = module.prefill(q, k, v, causal=True, softmax_scale=0.5)
    assert torch.equal(module.prefill(softmax_scale=0.5, causal=True, v=v, k=k, q=q), first)
    forms = len(module._served)
    assert torch.equal(module.prefill(v=v, q=q, causal=True, k=k, softmax_scale=0.5), first)
    assert len(module._served) == forms
    for mixed in ((q.half(), k, v), (q, k.float(), v), (q, k, v.half())):
        with pytest.raises(ValueError, match=r"[kv] is torch\.\w+, q is torch\.\w+"):
            module.prefill(*mixed, causal=True, softmax_scale=0.5)
    half = module.prefill(q.half(), k.half(), v.half(), causal=True, softmax_scale=0.5)
    assert half.dtype == torch.float16


def test_a_forked_child_may_call_what_the_parent_imported(module):  # case B30
    q, k, v = normal(1, 20, 4, 64), normal(1, 30, 2, 64), normal(1, 30, 2, 64)
    expected = module.prefill(q, k, v)
    context = torch.multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=lambda: sender.send(module.prefill(q, k, v).tolist()))
    child.start()
    assert receiver.recv() == expected.tolist()
    child.join()
    assert not torch.cuda.is_initialized()
