# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Prefill attention: out = softmax(softmax_scale * q k^T + mask) v, one program per tile of queries.
#
# Symbols
#   i, j          query row, key column; the query sits at position p = i + seqlen_k - seqlen_q
#   q, out        (batch, num_heads, seqlen_q, HEAD_DIM), in any order of the first three
#   k, v          (pages, num_kv_heads, PAGE_SIZE, width), each with strides of its own
#   block_table   (batch, max_pages), which pages hold a sequence's keys, one after the other;
#                 entries past the last page, and slots past the last key, may hold anything
#   cache_seqlens (batch,), the keys of each sequence, those of its queries included
#   lse           (batch, num_heads, seqlen_q) fp32, natural logarithm; inside it is base 2
#   head          batch * num_heads + query head, counted flat
#   stride_xb, stride_xh, stride_xs   elements between sequences, heads, tokens of tensor x
#   qk, p, acc    scores, exponentials, output sums of a tile; fp32
#   m_i, l_i      running maximum of the scaled scores (base 2) and sum of exponentials, per row
#   kv_num_blocks, kv_indices   (batch, num_heads, rows), and as many of (..., columns): the blocks
#                 of keys that a block of queries sees, those seen whole apart (full_)
#   stride_nb, stride_nh   rows between the lists of sequences and heads, 0 where they share them
#
# Tunable
#   BLOCK_M       query rows of a program           BLOCK_N   keys of one step
#   LOAD          "pointer" or "descriptor" (tensor memory accelerator) for q, k and v
#   HEAD_GROUP_MIB   K and V of the heads that run side by side, so that they stay in the L2 cache
#   num_warps, num_stages
# Given by the problem
#   PAGE_SIZE     keys of a page
#   HEAD_DIM_V    channels of v and out; BLOCK_DV the power of two that holds them
#   HEAD_DIM      channels; BLOCK_D the power of two that holds them


@triton.jit
def tile_of_program(
    seqlen_q,
    heads,
    heads_per_group,
    BLOCK_M: tl.constexpr,
):
    """The first query row and the flat head of this program.

    Heads are taken in groups whose K and V share the L2 cache. Within a group all heads of one row
    of tiles run before the next row.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    program = tl.program_id(0)
    group_first = program // (tiles * heads_per_group) * heads_per_group
    group_heads = tl.minimum(heads_per_group, heads - group_first)
    within = program - group_first * tiles
    head = group_first + within % group_heads
    tile = within // group_heads
    return tile * BLOCK_M, head


@triton.jit
def load_tile(
    source,
    batch,
    head,
    start,
    seqlen,
    stride_s,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Tokens [start, start + ROWS) of one head, zero past `seqlen` and HEAD_DIM.

    `source` is a descriptor of the whole tensor, or the address of the head. Only a PARTIAL tile
    may reach past `seqlen`.
    """
    if LOAD == "descriptor":
        tile = source.load([batch, head, start, 0]).reshape([ROWS, BLOCK_D])
    else:
        offs_s = tl.arange(0, ROWS)
        offs_d = tl.arange(0, BLOCK_D)
        # 64 bits: one head alone may span more than 2**31 elements
        first = source + tl.cast(start, tl.int64) * stride_s
        pointers = first + ((offs_s.to(tl.int64) * stride_s)[:, None] + offs_d[None, :])
        # a channel past HEAD_DIM belongs to the neighbour in a wider row and may hold anything
        if PARTIAL and HEAD_DIM != BLOCK_D:
            inside = (start + offs_s < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif PARTIAL:
            tile = tl.load(pointers, mask=(start + offs_s < seqlen)[:, None], other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile  # (ROWS, BLOCK_D)


@triton.jit
def visible(
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
):
    """Which keys `offs_n` the query rows `offs_m` see, both counted from the sequence's start."""
    return (offs_n < seqlen_k)[None, :] & (offs_m >= 0)[:, None]


@triton.jit
def soft_capped(
    qk,
    scale_log2,
    softcap_log2,
):
    """softcap * tanh(scaled scores / softcap), all in base 2."""
    x = qk * (scale_log2 / softcap_log2)
    # In fp32 tanh is 1 from there on. Between, a quotient of polynomials (that of Eigen) is within
    # 6 units in the last place and leaves the unit for exponentials to the softmax.
    x = tl.minimum(tl.maximum(x, -7.90531110763549805), 7.90531110763549805)
    z = x * x
    above = z * -2.76076847742355e-16 + 2.00018790482477e-13
    above = above * z + -8.60467152213735e-11
    above = above * z + 5.12229709037114e-08
    above = above * z + 1.48572235717979e-05
    above = above * z + 6.37261928875436e-04
    above = above * z + 4.89352455891786e-03
    below = z * 1.19825839466702e-06 + 1.18534705686654e-04
    below = below * z + 2.26843463243900e-03
    below = below * z + 4.89352518554385e-03
    return softcap_log2 * (x * above / below)


@triton.jit
def alibi_penalty(
    slope_log2,
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
):
    """What a key loses by its distance from the query's position."""
    distance = tl.abs(offs_n[None, :] - (offs_m + (seqlen_k - seqlen_q))[:, None])
    return slope_log2 * distance.to(tl.float32)  # (BLOCK_M, BLOCK_N)


@triton.jit
def row_of_blocks(
    batch,
    q_head,
    row,
    stride_nb,
    stride_nh,
):
    """The row of blocks counted over all sequences and heads that have lists of their own."""
    return tl.cast(batch, tl.int64) * stride_nb + tl.cast(q_head, tl.int64) * stride_nh + row


@triton.jit
def listed_blocks(
    counts,
    indices,
    row,
    columns,
):
    """How many blocks are listed for a row of blocks, and where; of no list none."""
    if counts is None:
        return 0, indices
    else:
        return tl.load(counts + row), indices + row * columns


@triton.jit
def online_softmax(
    qk,
    m_i,
    scale_log2,
    MASKED: tl.constexpr,
):
    """(p, alpha, m_i) of one tile of scores: exponentials, factor of what was summed, maximum.

    A MASKED tile comes scaled, holds -inf where the mask hides, and may leave a row empty.
    """
    if MASKED:
        m_new = tl.maximum(m_i, tl.max(qk, 1))
        # an empty row has no maximum; any finite one keeps -inf - (-inf) away
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.math.exp2(qk - shift[:, None])
    else:
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale_log2)
        shift = m_new
        p = tl.math.exp2(qk * scale_log2 - shift[:, None])  # one multiply-add and one exp2
    return p, tl.math.exp2(m_i - shift), m_new


@triton.jit
def pages_of_tile(
    table_row,
    start,
    seqlen_k,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
):
    """The pages that BLOCK_N keys from `start` on lie in: one for all or one for each, (BLOCK_N,).

    The table is not read past the page of the last key.
    """
    if ONE_PAGE:
        keys = start
    else:
        keys = start + tl.arange(0, BLOCK_N)
    return tl.load(table_row + keys // PAGE_SIZE, mask=keys < seqlen_k, other=0)


@triton.jit
def key_of_step(
    blocks,
    step,
    end,
    MASK_BLOCK_K: tl.constexpr,
):
    """The key that is the `step`th of those of the listed blocks, which are `end` in all."""
    block = tl.load(blocks + step // MASK_BLOCK_K, mask=step < end, other=0)
    return block * MASK_BLOCK_K + step % MASK_BLOCK_K


@triton.jit
def load_page_tile(
    cache,
    pages,
    kv_head,
    start,
    seqlen_k,
    stride_b,
    stride_s,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    LOAD: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """Keys [start, start + ROWS) of a sequence, which lie in these pages; zero past HEAD_DIM.

    `cache` is a descriptor of all pages, which gives what lies past `seqlen_k` in the last one; or
    the address of the KV head in the first page, from which a PARTIAL tile has zeros there.
    """
    if LOAD == "descriptor":
        tile = cache.load([pages.to(tl.int32), kv_head, start % PAGE_SIZE, 0])
        tile = tile.reshape([ROWS, BLOCK_D])
    else:
        offs_n = start + tl.arange(0, ROWS)
        offs_d = tl.arange(0, BLOCK_D)
        if ONE_PAGE:
            tokens = start % PAGE_SIZE + tl.arange(0, ROWS)
        else:
            tokens = offs_n % PAGE_SIZE
        # 64 bits: a page id times a page's stride passes 2**31 in a cache of a few gigabytes
        offsets = pages.to(tl.int64) * stride_b + tokens.to(tl.int64) * stride_s
        pointers = cache + (offsets[:, None] + offs_d[None, :])
        # a channel past HEAD_DIM belongs to the neighbour in a wider row and may hold anything
        if PARTIAL and HEAD_DIM != BLOCK_D:
            inside = (offs_n < seqlen_k)[:, None] & (offs_d < HEAD_DIM)[None, :]
            tile = tl.load(pointers, mask=inside, other=0.0)
        elif PARTIAL:
            tile = tl.load(pointers, mask=(offs_n < seqlen_k)[:, None], other=0.0)
        elif HEAD_DIM != BLOCK_D:
            tile = tl.load(pointers, mask=(offs_d < HEAD_DIM)[None, :], other=0.0)
        else:
            tile = tl.load(pointers)
    return tile  # (ROWS, BLOCK_D)


@triton.jit
def attend(
    acc,
    l_i,
    m_i,
    q_tile,
    k,
    v,
    table_row,
    kv_head,
    blocks,
    low,
    high,
    offs_m,
    seqlen_q,
    seqlen_k,
    stride_kb,
    stride_ks,
    stride_vb,
    stride_vs,
    scale_log2,
    softcap_log2,
    slope_log2,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    LOAD: tl.constexpr,
    MASKED: tl.constexpr,
    RULED: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    """acc, l_i, m_i after the keys [low, high); with MASKED a tile may hold hidden ones.

    low and high count the keys of the listed `blocks` one after the other. Those of blocks that are
    not RULED are hidden past the last alone. What else is off is None.
    """
    first = key_of_step(blocks, low, high, MASK_BLOCK_K)
    following = pages_of_tile(table_row, first, seqlen_k, BLOCK_N, PAGE_SIZE, ONE_PAGE)
    for step in tl.range(low, high, BLOCK_N):
        start_n = key_of_step(blocks, step, high, MASK_BLOCK_K)
        next_n = key_of_step(blocks, step + BLOCK_N, high, MASK_BLOCK_K)
        offs_n = start_n + tl.arange(0, BLOCK_N)
        pages = following
        # one tile ahead: the next keys' addresses are known before they are needed
        following = pages_of_tile(table_row, next_n, seqlen_k, BLOCK_N, PAGE_SIZE, ONE_PAGE)
        k_tile = load_page_tile(
            k,
            pages,
            kv_head,
            start_n,
            seqlen_k,
            stride_kb,
            stride_ks,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_D,
            PAGE_SIZE,
            ONE_PAGE,
            LOAD,
            MASKED,
        )
        qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if MASKED:
            seen = visible(offs_m, offs_n, seqlen_q, seqlen_k)
            if not RULED:
                seen = (offs_n < seqlen_k)[None, :] & (offs_m >= 0)[:, None]
        if softcap_log2 is None and slope_log2 is None:
            if MASKED:
                qk = tl.where(seen, qk * scale_log2, float("-inf"))
            p, alpha, m_i = online_softmax(qk, m_i, scale_log2, MASKED)
        else:
            if softcap_log2 is None:
                qk = qk * scale_log2
            else:
                qk = soft_capped(qk, scale_log2, softcap_log2)
            if slope_log2 is not None:
                qk -= alibi_penalty(slope_log2, offs_m, offs_n, seqlen_q, seqlen_k)
            if MASKED:
                qk = tl.where(seen, qk, float("-inf"))
            p, alpha, m_i = online_softmax(qk, m_i, scale_log2, True)  # scaled in every tile
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_tile = load_page_tile(
            v,
            pages,
            kv_head,
            start_n,
            seqlen_k,
            stride_vb,
            stride_vs,
            BLOCK_N,
            HEAD_DIM_V,
            BLOCK_DV,
            PAGE_SIZE,
            ONE_PAGE,
            LOAD,
            MASKED,
        )
        if MASKED and LOAD == "descriptor":
            # slots past the last key may hold no numbers, which zeros do not hide
            v_tile = tl.where((offs_n < seqlen_k)[:, None], v_tile, 0.0)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=[
        "stride_nb",
        "stride_nh",
        "columns",
        "stride_ab",
        "stride_ah",
        "table_width",
        "group_size",
        "heads",
        "heads_per_group",
        "num_heads",
        "seqlen_q",
    ]
)
def prefill_kernel(
    softcap_log2,
    alibi_slopes,
    stride_ab,
    stride_ah,
    sinks,
    kv_num_blocks,
    kv_indices,
    full_kv_num_blocks,
    full_kv_indices,
    stride_nb,
    stride_nh,
    columns,
    cache_seqlens,
    stride_lb,
    block_table,
    table_width,
    q,
    k,
    v,
    out,
    lse,
    scale_log2,
    stride_qb,
    stride_qh,
    stride_qs,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_os,
    heads,
    group_size,
    heads_per_group,
    num_heads,
    seqlen_q,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    ONE_PAGE: tl.constexpr,
    LOAD: tl.constexpr,
    MASK_BLOCK_Q: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    """One tile of query rows of one head. softcap_log2, alibi_slopes, sinks, `lse` may be None.

    With ONE_PAGE a tile of keys lies in one page.
    """
    start_m, head = tile_of_program(seqlen_q, heads, heads_per_group, BLOCK_M)
    batch = head // num_heads
    q_head = head % num_heads
    if LOAD == "pointer":
        q += tl.cast(batch, tl.int64) * stride_qb + tl.cast(q_head, tl.int64) * stride_qh
    q_tile = load_tile(
        q, batch, q_head, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, True
    )
    seqlen_k = tl.load(cache_seqlens + tl.cast(batch, tl.int64) * stride_lb).to(tl.int32)
    table_row = block_table + tl.cast(batch, tl.int64) * table_width
    kv_head = q_head // group_size
    if LOAD == "pointer":
        k += tl.cast(kv_head, tl.int64) * stride_kh
        v += tl.cast(kv_head, tl.int64) * stride_vh
    offs_m = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if sinks is None:
        m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
        l_i = tl.zeros([BLOCK_M], tl.float32)
    else:
        # as if every row had seen one key already, of this score and a v of zeros
        sink_log2 = tl.load(sinks + q_head).to(tl.float32) * 1.4426950408889634  # log2(e)
        m_i = tl.zeros([BLOCK_M], tl.float32) + sink_log2
        l_i = tl.full([BLOCK_M], 1.0, tl.float32)
    slope_log2 = None
    if alibi_slopes is not None:
        alibi_slopes += tl.cast(batch, tl.int64) * stride_ab + q_head * stride_ah
        slope_log2 = tl.load(alibi_slopes) * 1.4426950408889634  # log2(e)
    # those that are seen whole first, then those seen in part
    row = row_of_blocks(batch, q_head, start_m // MASK_BLOCK_Q, stride_nb, stride_nh)
    whole, whole_blocks = 0, kv_indices  # of which none is followed
    if full_kv_num_blocks is not None:
        whole, whole_blocks = listed_blocks(full_kv_num_blocks, full_kv_indices, row, columns)
    partial, blocks = listed_blocks(kv_num_blocks, kv_indices, row, columns)
    acc, l_i, m_i = attend(
        acc,
        l_i,
        m_i,
        q_tile,
        k,
        v,
        table_row,
        kv_head,
        whole_blocks,
        0,
        whole * MASK_BLOCK_K,
        offs_m,
        seqlen_q,
        seqlen_k,
        stride_kb,
        stride_ks,
        stride_vb,
        stride_vs,
        scale_log2,
        softcap_log2,
        slope_log2,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
        HEAD_DIM_V,
        BLOCK_DV,
        PAGE_SIZE,
        ONE_PAGE,
        LOAD,
        True,
        False,
        MASK_BLOCK_K,
    )
    acc, l_i, m_i = attend(
        acc,
        l_i,
        m_i,
        q_tile,
        k,
        v,
        table_row,
        kv_head,
        blocks,
        0,
        partial * MASK_BLOCK_K,
        offs_m,
        seqlen_q,
        seqlen_k,
        stride_kb,
        stride_ks,
        stride_vb,
        stride_vs,
        scale_log2,
        softcap_log2,
        slope_log2,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
        HEAD_DIM_V,
        BLOCK_DV,
        PAGE_SIZE,
        ONE_PAGE,
        LOAD,
        True,
        True,
        MASK_BLOCK_K,
    )
    inside = offs_m < seqlen_q
    if lse is not None:
        lse_log2 = m_i + tl.math.log2(l_i)  # -inf for an empty row
        lse += tl.cast(head, tl.int64) * seqlen_q
        tl.store(lse + offs_m, lse_log2 * 0.6931471805599453, mask=inside)  # ln(2)
    acc = acc / tl.where(l_i == 0.0, 1.0, l_i)[:, None]
    out += tl.cast(batch, tl.int64) * stride_ob + tl.cast(q_head, tl.int64) * stride_oh
    offs_d = tl.arange(0, BLOCK_DV)
    rows = offs_m.to(tl.int64) * stride_os
    tl.store(
        out + rows[:, None] + offs_d[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (offs_d < HEAD_DIM_V)[None, :],
    )


LOG2_E = 1.4426950408889634


def describable(tensor):
    """Whether a descriptor may name the tensor: not empty, 16-byte steps, none of them 0."""
    steps = (stride * tensor.element_size() for stride in tensor.stride()[:-1])
    aligned = all(step > 0 and step % 16 == 0 for step in steps)
    return aligned and tensor.data_ptr() % 16 == 0 and tensor.numel() > 0


def source_of(tensor, order, block, load):
    """What a kernel loads tiles of `block` tokens from: the tensor, or its host descriptor."""
    if load == "pointer":
        return tensor
    width = triton.next_power_of_2(tensor.shape[-1])
    return TensorDescriptor(
        tensor,
        [tensor.shape[axis] for axis in order],
        [tensor.stride(axis) for axis in order],
        [*[1] * (len(order) - 2), block, width],
    )


def plan(modifiers, q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace):
    """The launch: [(kernel, grid, arguments, options)]. Nothing is read from the device.

    k and v are caches: (pages, page_size, num_kv_heads, width), heads first if the `kv_layout` of
    `modifiers` is "hnd". These have `cache_seqlens` (batch,) and `block_table` (batch, max_pages)
    too, `max_seqlen_k` or None, which only says how many heads share the L2 cache, and what may be
    off: `softcap`, 0.0 then, `alibi_slopes` (batch, num_heads) and `sinks` (num_heads,), None then.
    `block_mask` has the lists of blocks, with a stride for each sequence and head.
    A call whose tensors no descriptor can name is loaded by pointers whatever the knob says.
    """
    nhd = (0, 2, 1, 3)  # axes of heads and tokens change places
    kv_order = nhd if modifiers.kv_layout == "nhd" else (0, 1, 2, 3)
    order = nhd if layout == "bshd" else (0, 1, 2, 3)
    num_heads, tokens, head_dim = (q.shape[axis] for axis in order[-3:])
    num_kv_heads, page_size, head_dim_v = (v.shape[axis] for axis in kv_order[1:])
    group_size = num_heads // num_kv_heads
    block_table, cache_seqlens = modifiers.block_table, modifiers.cache_seqlens
    block_m, block_n, load = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["LOAD"]
    one_page = page_size % block_n == 0
    if load == "descriptor" and not (one_page and all(map(describable, (q, k, v)))):
        load = "pointer"
    tiles, heads = triton.cdiv(tokens, block_m), q.shape[0] * num_heads
    of_queries = (num_heads, tokens)
    seqlen_k = modifiers.max_seqlen_k
    if seqlen_k is None:
        seqlen_k = block_table.shape[1] * page_size
    kv_bytes = max(1, 2 * seqlen_k * head_dim * k.element_size())  # of one KV head
    kv_heads_per_group = max(1, (knobs["HEAD_GROUP_MIB"] << 20) // kv_bytes)
    slopes = modifiers.alibi_slopes
    arguments = (
        modifiers.softcap * LOG2_E if modifiers.softcap else None,
        slopes,
        *((0, 0) if slopes is None else slopes.stride()),
        modifiers.sinks,
        *modifiers.block_mask[:4],
        *modifiers.block_mask[0].stride()[:2],
        modifiers.block_mask[1].shape[3],
        cache_seqlens,
        cache_seqlens.stride(0),
        block_table,
        block_table.stride(0),
        source_of(q, order, block_m, load),
        source_of(k, kv_order, block_n, load),
        source_of(v, kv_order, block_n, load),
        out,
        lse,
        softmax_scale * LOG2_E,  # exp2 is one instruction: log2(e) goes into the scale
        *(q.stride(axis) for axis in order[:-1]),
        *(cache.stride(axis) for cache in (k, v) for axis in kv_order[:-1]),
        *(out.stride(axis) for axis in order[:-1]),
        heads,
        group_size,
        min(heads, kv_heads_per_group * group_size),
        *of_queries,
        block_m,
        block_n,
        head_dim,
        triton.next_power_of_2(head_dim),
        head_dim_v,
        triton.next_power_of_2(head_dim_v),
        page_size,
        one_page,
        load,
        *modifiers.block_mask.BLOCK_SIZE,
    )
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(prefill_kernel, (tiles * heads,), arguments, options)]
