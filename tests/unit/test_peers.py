"""Peers that the benchmarks do not have: each is called so that its result is right."""

import sys
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from making import decode_of, prefill_of

from autoflash.accuracy import Budget
from autoflash.inputs import make_inputs
from autoflash.peers import PEERS, Unavailable, peer_versions
from autoflash.peers.contender import told


def attention(q, k, v, causal) -> torch.Tensor:
    """Of (tokens, heads, d) each; causal is aligned bottom-right."""
    rows, keys = len(q), len(k)
    visible = torch.ones(rows, keys, dtype=torch.bool)
    visible = visible.tril(keys - rows) if causal else visible
    heads_first = (each.transpose(0, 1)[None].float() for each in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=gqa)
    return out[0].transpose(0, 1).to(q.dtype)


def flash_attn_func(q, k, v, causal):
    return torch.stack([attention(*one, causal) for one in zip(q, k, v, strict=True)])


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, causal):
    assert causal and q.dim() == 4
    outs = []
    for b, keys in enumerate(cache_seqlens.tolist()):
        k, v = (
            cache[b] if block_table is None else cache[block_table[b].long()].flatten(0, 1)
            for cache in (k_cache, v_cache)
        )
        outs.append(attention(q[b], k[:keys], v[:keys], causal=True))
    return torch.stack(outs)


class Ragged:
    def __init__(self, workspace, layout):
        assert workspace.dtype == torch.uint8 and layout == "NHD"

    def plan(self, starts_q, starts_k, heads, kv_heads, head_dim, *, causal, q_data_type):
        assert starts_q.dtype == starts_k.dtype == torch.int32 and q_data_type == torch.bfloat16
        self.starts, self.causal = (starts_q.tolist(), starts_k.tolist()), causal

    def run(self, q, k, v):
        outs = []
        for b in range(len(self.starts[0]) - 1):
            rows, keys = (slice(starts[b], starts[b + 1]) for starts in self.starts)
            outs.append(attention(q[rows], k[keys], v[keys], self.causal))
        return torch.cat(outs)


def memory_efficient_attention(q, k, v, attn_bias):
    if q.dim() == 5:
        assert q.shape[2:] == k.shape[2:]
        q, k, v = (each.flatten(2, 3) for each in (q, k, v))
        out = flash_attn_func(q, k, v, attn_bias is not None)
        return out.unflatten(2, (2, -1))
    return flash_attn_func(q, k, v, attn_bias is not None)


@pytest.fixture
def libraries(monkeypatch):
    """Stand-ins with the arguments of the libraries; each computes from what it is given."""
    held = {
        "flash_attn": {
            "flash_attn_func": flash_attn_func,
            "flash_attn_varlen_func": None,
            "flash_attn_with_kvcache": flash_attn_with_kvcache,
        },
        "flashinfer": {"BatchPrefillWithRaggedKVCacheWrapper": Ragged},
        "xformers": {},
        "xformers.ops": {
            "memory_efficient_attention": memory_efficient_attention,
            "LowerTriangularFromBottomRightMask": object,
        },
    }
    for name, functions in held.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def judged(problem, peer):
    """The verdict on a peer's output for each of two sets of inputs."""
    inputs = [make_inputs(problem, seed) for seed in range(2)]
    contender = PEERS[problem.op][peer](inputs)
    assert len(contender.calls) == 2
    return [Budget(one).judge(contender.out(i), None).reason for i, one in enumerate(inputs)]


@pytest.mark.parametrize("peer", ["math", "flash_attention_2", "flashinfer", "xformers"])
@pytest.mark.parametrize(
    "changes",
    [{}, {"layout": "bhsd", "causal": False}, {"num_kv_heads": 8}, {"seqlen_q": 16}],
    ids=str,
)
def test_peers_in_prefill(libraries, peer, changes):
    problem = prefill_of(**{"batch": 2, "seqlen_q": 48, "seqlen_k": 48, **changes})
    if peer == "math" and problem.seqlen_q != problem.seqlen_k:
        with pytest.raises(Unavailable, match="aligned top-left"):
            judged(problem, peer)
    else:
        assert judged(problem, peer) == ["", ""]


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 0},
        {"page_size": 256, "lengths": "ragged"},
        {"page_size": 256, "kv_layout": "hnd", "seqlen_q": 3},
    ],
    ids=str,
)
def test_flash_attention_2_in_decode(libraries, changes):
    assert judged(decode_of(batch=2, seqlen_k=512, **changes), "flash_attention_2") == ["", ""]


def test_what_flash_attention_2_does_not_read_is_told(libraries):
    for changes, reason in (
        ({"page_size": 16}, "its pages are multiples of 256 tokens"),
        ({"kv_dtype": "int8"}, "it reads no int8 cache"),
    ):
        with pytest.raises(Unavailable) as error:
            judged(decode_of(**changes), "flash_attention_2")
        assert told(error.value) == reason


def test_a_peer_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ImportError) as error:
        judged(prefill_of(), "flash_attention_2")
    assert told(error.value).startswith("ModuleNotFoundError: ") and "\n" not in told(error.value)


@pytest.mark.parametrize("cudnn", [None, 91900])
def test_versions_are_those_of_what_is_installed(cudnn, monkeypatch):
    monkeypatch.setattr("autoflash.peers.PACKAGES", ("numpy", "no-such-package"))
    monkeypatch.setattr("torch.backends.cudnn.version", lambda: cudnn)
    found = peer_versions()
    assert found.pop("numpy")[0].isdigit()
    assert found == ({"cudnn": "91900"} if cudnn else {})
