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
#   k_scale, v_scale   what a stored 1 of one head of one token counts: the caches' shape without
#                      head_dim, fp32; written here
#
#   BLOCK_H   KV heads of a program, which takes K and V of one token
#   BLOCK_D   HEAD_DIM padded to a power of two
#   LIMIT     the largest value that a byte of the cache holds
@triton.jit
def narrowed(steps, LIMIT: tl.constexpr):
    # To the nearest that a byte holds, ties to even; what is too large becomes the largest.
    inside = tl.minimum(tl.maximum(steps, -LIMIT), LIMIT)
    if LIMIT == 127:
        return (inside + 12582912.0 - 12582912.0).to(tl.int8)  # 3 * 2**22 has no room for a half
    else:
        # fp8 e4m3: the exponent is fp32's less 120, of which three bits of the fraction follow;
        # below 2**-6 every step is 2**-9, and 2**23 has no room for less than one
        bits = inside.to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        normal = (magnitude - (120 << 23) + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
        small = (tl.abs(inside) * 512.0 + 8388608.0).to(tl.int32, bitcast=True) & 0xFF
        rounded = tl.where(tl.abs(inside) < 2.0**-6, small, normal)
        rounded = tl.where(steps == steps, rounded, 0x7F)  # what is no number stays none
        return (((bits >> 24) & 0x80) | rounded).to(tl.uint8)


@triton.jit
def append(
    tokens,
    token_places,
    cache,
    cache_places,
    scale,
    scale_places,
    head_mask,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LIMIT: tl.constexpr,
):
    # Some heads of one token, of K or of V; the places of a head are (BLOCK_H,).
    offs_d = tl.arange(0, BLOCK_D)
    mask = head_mask[:, None] & (offs_d < HEAD_DIM)[None, :]
    values = tl.load(tokens + token_places[:, None] + offs_d[None, :], mask=mask, other=0.0)
    values = values.to(tl.float32)
    # where there is something that is no number, the scale is none: x - x is 0 of numbers alone
    largest = tl.max(tl.abs(values), 1) + tl.sum(values - values, 1)
    steps = tl.div_rn(largest, LIMIT * 1.0)
    tl.store(scale + scale_places, steps, mask=head_mask)
    steps = tl.where(steps == 0.0, 1.0, steps)
    values = narrowed(tl.div_rn(values, steps[:, None]), LIMIT)
    tl.store(cache + cache_places[:, None] + offs_d[None, :], values, mask=mask)


@triton.jit(do_not_specialize=["num_kv_heads", "page_size", "num_slots"])
def append_kv(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
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
    scale_stride_kb,
    scale_stride_ks,
    scale_stride_kh,
    scale_stride_vb,
    scale_stride_vs,
    scale_stride_vh,
    stride_slots,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    LIMIT: tl.constexpr,
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
        k_scale,
        page * scale_stride_kb + place * scale_stride_ks + heads * scale_stride_kh,
        head_mask,
        HEAD_DIM,
        BLOCK_D,
        LIMIT,
    )
    append(
        v,
        token * stride_vt + heads * stride_vh,
        v_cache,
        page * cache_stride_vb + place * cache_stride_vs + heads * cache_stride_vh,
        v_scale,
        page * scale_stride_vb + place * scale_stride_vs + heads * scale_stride_vh,
        head_mask,
        HEAD_DIM,
        BLOCK_D,
        LIMIT,
    )


def plan(
    k,
    v,
    k_cache,
    v_cache,
    k_scale,
    v_scale,
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
    limit = 127 if k_cache.dtype == torch.int8 else 448
    places = [
        (cache.stride(0), cache.stride(token_axis), cache.stride(head_axis))
        for cache in (k_cache, v_cache)
    ]
    scale_places = [
        (scale.stride(0), scale.stride(token_axis), scale.stride(head_axis))
        for scale in (k_scale, v_scale)
    ]
    if k_cache.dtype == torch.float8_e4m3fn:  # not every GPU knows the type
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    arguments = (
        k,
        v,
        k_cache,
        v_cache,
        k_scale,
        v_scale,
        slot_mapping,
        num_kv_heads,
        page_size,
        num_slots,
        *k.stride()[:2],
        *v.stride()[:2],
        *places[0],
        *places[1],
        *scale_places[0],
        *scale_places[1],
        slot_mapping.stride(0),
        head_dim,
        block_d,
        block_h,
        limit,
    )
    grid = (tokens, triton.cdiv(num_kv_heads, block_h))
    return [(append_kv, grid, arguments, {"num_warps": 4})]
