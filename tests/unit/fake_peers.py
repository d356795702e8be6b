"""Stand-ins with the arguments of peers' libraries; each computes from what it is given."""

import math
import sys
from itertools import pairwise
from types import ModuleType

import torch

UNBOUNDED = (-1, -1)


def attention(q, k, v, causal, window=UNBOUNDED, softcap=0.0, slopes=None, sinks=None):
    """Of (tokens, heads, d) each, fp32 inside; a window is inclusive, aligned bottom-right."""
    group = q.shape[1] // k.shape[1]
    q32, k32, v32 = (each.float().transpose(0, 1) for each in (q, k, v))
    k32, v32 = (each.repeat_interleave(group, dim=0) for each in (k32, v32))
    distance = (len(k) - len(q) + torch.arange(len(q)))[:, None] - torch.arange(len(k))
    left, right = (-1 if side is None else side for side in window)
    right = 0 if causal else right
    seen = torch.ones_like(distance, dtype=torch.bool)
    seen &= (distance <= left) if left >= 0 else seen
    seen &= (distance >= -right) if right >= 0 else seen
    scores = q32 @ k32.transpose(1, 2) / math.sqrt(q.shape[2])
    scores = softcap * (scores / softcap).tanh() if softcap else scores
    scores = scores if slopes is None else scores - slopes[:, None, None] * distance.abs()
    scores = scores.masked_fill(~seen, float("-inf"))
    beside = torch.full((q.shape[1],), float("-inf")) if sinks is None else sinks.float()
    beside = beside[:, None, None].expand(-1, len(q), 1)
    weights = torch.cat([scores, beside], dim=2).softmax(dim=2)[..., :-1].nan_to_num()
    return (weights @ v32).transpose(0, 1).to(q.dtype)


def of_packed(q, k, v, starts_q, starts_k, causal, slopes=None, **more):
    outs = []
    for b in range(len(starts_q) - 1):
        rows, keys = (slice(*each[b : b + 2].tolist()) for each in (starts_q, starts_k))
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        outs.append(attention(q[rows], k[keys], v[keys], causal, slopes=own, **more))
    return torch.cat(outs)


def over_pages(q, k, v, starts_q, lengths, table, slopes=None, **more):
    outs = []
    for b, keys in enumerate(lengths.tolist()):
        pages = table[b, : -(-keys // k.shape[1])].long()
        own_k, own_v = (each[pages].flatten(0, 1)[:keys] for each in (k, v))
        own_q = q[slice(*starts_q[b : b + 2].tolist())]
        own = slopes if slopes is None or slopes.dim() == 1 else slopes[b]
        outs.append(attention(own_q, own_k, own_v, True, slopes=own, **more))
    return torch.cat(outs)


def by_sequence(q, k, v, causal, slopes=None, **more):
    each = [None] * len(q) if slopes is None else slopes
    return torch.stack(
        [attention(*one, causal, slopes=own, **more) for *one, own in zip(q, k, v, each)]
    )


def two_dense(q, k, v, causal, window_size=UNBOUNDED, softcap=0.0, alibi_slopes=None):
    more = {"window": window_size, "softcap": softcap}
    return by_sequence(q, k, v, causal, slopes=alibi_slopes, **more)


def two_packed(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    causal,
    window_size=UNBOUNDED,
    softcap=0.0,
    alibi_slopes=None,
):
    assert max_seqlen_q == cu_seqlens_q.diff().max() and max_seqlen_k == cu_seqlens_k.diff().max()
    more = {"window": window_size, "softcap": softcap, "slopes": alibi_slopes}
    return of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, **more)


def two_cache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    block_table,
    causal,
    window_size=UNBOUNDED,
    softcap=0.0,
    alibi_slopes=None,
):
    starts = torch.arange(len(q) + 1) * q.shape[1]
    more = {"window": window_size, "softcap": softcap, "slopes": alibi_slopes}
    out = over_pages(q.flatten(0, 1), k_cache, v_cache, starts, cache_seqlens, block_table, **more)
    return out.view(q.shape)


def three(
    q,
    k,
    v,
    max_seqlen_q,
    cu_seqlens_q,
    max_seqlen_k,
    cu_seqlens_k=None,
    seqused_k=None,
    causal=False,
    window_size=None,
    softcap=0.0,
    block_table=None,
    fa_version=2,
    s_aux=None,
):
    assert fa_version == 3 and (s_aux is None or s_aux.dtype == torch.bfloat16)
    more = {"window": window_size or UNBOUNDED, "softcap": softcap, "sinks": s_aux}
    if block_table is not None:
        return over_pages(q, k, v, cu_seqlens_q, seqused_k, block_table, **more)
    return of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, **more)


def four_dense(q, k, v, causal, window_size=(None, None), learnable_sink=None, softcap=0.0):
    more = {"window": window_size, "softcap": softcap, "sinks": learnable_sink}
    return by_sequence(q, k, v, causal, **more), None


def four_packed(
    q,
    k,
    v,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    seqused_k=None,
    page_table=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
):
    more = {"window": window_size, "softcap": softcap, "sinks": learnable_sink}
    if page_table is not None:
        return over_pages(q, k, v, cu_seqlens_q, seqused_k, page_table, **more), None
    return of_packed(q, k, v, cu_seqlens_q, cu_seqlens_k, causal, **more), None


def unified(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    max_seqlen_q,
    seqused_k,
    max_seqlen_k,
    softmax_scale,
    causal,
    window_size,
    block_table,
    softcap,
    q_descale,
    k_descale,
    v_descale,
    alibi_slopes=None,
    sinks=None,
):
    assert alibi_slopes is None or alibi_slopes.dim() == 1
    more = {"window": window_size, "softcap": softcap, "slopes": alibi_slopes, "sinks": sinks}
    out.copy_(over_pages(q, k, v, cu_seqlens_q, seqused_k, block_table, **more))


class Ragged:
    def __init__(self, workspace, layout):
        assert layout == "NHD"

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        head_dim_vo=None,
        causal=False,
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
    ):
        self.starts, self.causal = (qo_indptr, kv_indptr), causal
        self.more = {"window": (window_left, -1), "softcap": logits_soft_cap or 0.0}

    def run(self, q, k, v):
        return of_packed(q, k, v, *self.starts, self.causal, **self.more)


class Paged:
    """Both wrappers over pages; that of several queries is told where they begin."""

    def __init__(self, workspace, layout, use_tensor_cores=False):
        assert layout == "NHD"

    def plan(self, *given, window_left=-1, logits_soft_cap=None, causal=True, **types):
        indptr, indices, last, *_heads, page_size = given[-7:]
        counts = indptr.diff()
        self.lengths = (counts - 1) * page_size + last
        self.table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int32)
        for b, (begin, end) in enumerate(pairwise(indptr.tolist())):
            self.table[b, : end - begin] = indices[begin:end]
        self.starts = given[0] if len(given) == 8 else torch.arange(len(counts) + 1)
        self.more = {"window": (window_left, -1), "softcap": logits_soft_cap or 0.0}

    def run(self, q, cache):
        return over_pages(q, *cache, self.starts, self.lengths, self.table, **self.more)


LIBRARIES = {
    "flash_attn": {
        "flash_attn_func": two_dense,
        "flash_attn_varlen_func": two_packed,
        "flash_attn_with_kvcache": two_cache,
    },
    "flash_attn.cute": {},
    "flash_attn.cute.interface": {
        "flash_attn_func": four_dense,
        "flash_attn_varlen_func": four_packed,
    },
    "flashinfer": {
        "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
        "BatchDecodeWithPagedKVCacheWrapper": Paged,
        "BatchPrefillWithPagedKVCacheWrapper": Paged,
    },
    "vllm": {},
    "vllm.vllm_flash_attn": {},
    "vllm.vllm_flash_attn.flash_attn_interface": {"flash_attn_varlen_func": three},
    "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified},
    "xformers": {},
    "xformers.ops": {
        "memory_efficient_attention": None,
        "LowerTriangularFromBottomRightMask": object,
    },
}


def install(monkeypatch) -> None:
    for name, functions in LIBRARIES.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            package = ".".join(parts[:count])
            if package not in LIBRARIES:
                monkeypatch.setitem(sys.modules, package, ModuleType(package))
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
