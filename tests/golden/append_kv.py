# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Appending to a cache: the K and V of each new token go to the slot that is given for it.
#
#   k, v               (tokens, num_kv_heads, head_dim), any strides, the last one 1
#   k_cache, v_cache   nhd or hnd by strides alone; cache_stride_kb is a page's, or a sequence's
#   slot_mapping       (tokens,), page * page_size + place in the page; negative ones are skipped,
#                      as are those past the cache's end
#
#   BLOCK_H   KV heads of a program, which takes K and V of one token
#   BLOCK_D   HEAD_DIM padded to a power of two
@triton.jit
def append(
    tokens,
    token_places,
    cache,
    cache_places,
    head_mask,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # Some heads of one token, of K or of V; the places of a head are (BLOCK_H,).
    offs_d = tl.arange(0, BLOCK_D)
    mask = head_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    values = tl.load(tokens + token_places[:, None] + offs_d[None, :], mask=mask, other=0.0)
    tl.store(cache + cache_places[:, None] + offs_d[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_kv_heads", "page_size", "num_slots"])
def append_kv(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    num_kv_heads,
    page_size,
    num_slots,
    stride_kt,
    stride_kh,
    stride_vt,
    stride_vh,
    cache_stride_kb,
    cache_stride_ks,
    cache_stride_kh,
    cache_stride_vb,
    cache_stride_vs,
    cache_stride_vh,
    stride_slots,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    slot = tl.load(slot_mapping + token * stride_slots).to(tl.int64)
    head_mask = (heads < num_kv_heads) & (slot >= 0) & (slot < num_slots)
    # 64 bits: a page times its stride passes 2**31 in a cache of a few gigabytes
    heads = heads.to(tl.int64)
    page = slot // page_size
    place = slot % page_size
    append(
        k,
        token * stride_kt + heads * stride_kh,
        k_cache,
        page * cache_stride_kb + place * cache_stride_ks + heads * cache_stride_kh,
        head_mask,
        HEAD_DIM,
        BLOCK_D,
    )
    append(
        v,
        token * stride_vt + heads * stride_vh,
        v_cache,
        page * cache_stride_vb + place * cache_stride_vs + heads * cache_stride_vh,
        head_mask,
        HEAD_DIM,
        BLOCK_D,
    )


def plan(
    k,
    v,
    k_cache,
    v_cache,
    slot_mapping,
    kv_layout,
):
    """What to launch: (kernel, grid, arguments, options). Reads no device memory."""
    tokens, num_kv_heads, head_dim = k.shape
    token_axis, head_axis = (1, 2) if kv_layout == "nhd" else (2, 1)
    page_size = k_cache.shape[token_axis]
    num_slots = k_cache.shape[0] * page_size
    block_d = triton.next_power_of_2(head_dim)
    # two thousand numbers keep four warps busy; K and V need not have the same strides
    block_h = min(triton.next_power_of_2(num_kv_heads), max(1, 2048 // block_d))
    places = [
        (cache.stride(0), cache.stride(token_axis), cache.stride(head_axis))
        for cache in (k_cache, v_cache)
    ]
    arguments = (
        k,
        v,
        k_cache,
        v_cache,
        slot_mapping,
        num_kv_heads,
        page_size,
        num_slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *places[0],
        *places[1],
        slot_mapping.stride(0),
        head_dim,
        block_d,
        block_h,
    )
    grid = (tokens, triton.cdiv(num_kv_heads, block_h))
    return [(append_kv, grid, arguments, {"num_warps": 4})]
