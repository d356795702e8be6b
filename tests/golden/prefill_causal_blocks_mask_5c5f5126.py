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
#   k, v          (batch, num_kv_heads, seqlen_k, HEAD_DIM), each with strides of its own
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
    tile = tiles - 1 - within // group_heads  # the last rows see the most keys: start them first
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
    # a row below seqlen_q sees no key past seqlen_k; the rows past it are never stored
    return offs_n[None, :] <= (offs_m + (seqlen_k - seqlen_q))[:, None]


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
def floor_remainder(
    number,
    divisor,
):
    """number % divisor as Python has it: 0 or positive for a positive divisor."""
    remainder = number % divisor
    return tl.where(remainder < 0, remainder + divisor, remainder)


@triton.jit
def floor_quotient(
    number,
    divisor,
):
    """number // divisor as Python has it, rounded down."""
    return (number - floor_remainder(number, divisor)) // divisor


@triton.jit
def custom_mask(
    b,
    h,
    q_idx,
    kv_idx,
):
    """Where the rule of the mask holds; `q_idx` are rows, not positions."""
    seen = (floor_remainder(q_idx - kv_idx, 4) == 0) | (h < 2)
    return seen


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
def attend(
    acc,
    l_i,
    m_i,
    q_tile,
    k,
    v,
    batch,
    kv_head,
    q_head,
    blocks,
    low,
    high,
    offs_m,
    seqlen_q,
    seqlen_k,
    stride_ks,
    stride_vs,
    scale_log2,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    MASKED: tl.constexpr,
    RULED: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    """acc, l_i, m_i after the listed `blocks`; with MASKED a tile may hold hidden keys.

    low and high count the keys of these blocks one after the other. Those of blocks that are not
    RULED are hidden past the last alone.
    """
    for start_n in tl.range(low, high, BLOCK_N):
        block = tl.load(blocks + start_n // MASK_BLOCK_K)
        start_n = block * MASK_BLOCK_K + start_n % MASK_BLOCK_K
        k_tile = load_tile(
            k,
            batch,
            kv_head,
            start_n,
            seqlen_k,
            stride_ks,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_D,
            LOAD,
            MASKED,
        )
        qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if MASKED:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            seen = visible(offs_m, offs_n, seqlen_q, seqlen_k)
            seen &= custom_mask(batch, q_head, offs_m[:, None], offs_n[None, :])
            if not RULED:
                seen = (offs_n < seqlen_k)[None, :] & (offs_m >= 0)[:, None]
            qk = tl.where(seen, qk * scale_log2, float("-inf"))
        p, alpha, m_i = online_softmax(qk, m_i, scale_log2, MASKED)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = acc * alpha[:, None]
        v_tile = load_tile(
            v,
            batch,
            kv_head,
            start_n,
            seqlen_k,
            stride_vs,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_D,
            LOAD,
            MASKED,
        )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision="ieee")
    return acc, l_i, m_i


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "group_size",
        "heads",
        "heads_per_group",
        "seqlen_q",
        "seqlen_k",
        "stride_nb",
        "stride_nh",
        "columns",
    ]
)
def prefill_kernel(
    kv_num_blocks,
    kv_indices,
    full_kv_num_blocks,
    full_kv_indices,
    stride_nb,
    stride_nh,
    columns,
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
    num_heads,
    group_size,
    heads_per_group,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    BOUNDARY: tl.constexpr,
    MASK_BLOCK_Q: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """One tile of query rows of one head. `lse` may be None.

    Without BOUNDARY every tile of keys is whole and seen by all rows.
    """
    start_m, head = tile_of_program(seqlen_q, heads, heads_per_group, BLOCK_M)
    batch = head // num_heads
    q_head = head % num_heads
    kv_head = q_head // group_size
    if LOAD == "pointer":
        q += tl.cast(batch, tl.int64) * stride_qb + tl.cast(q_head, tl.int64) * stride_qh
        k += tl.cast(batch, tl.int64) * stride_kb + tl.cast(kv_head, tl.int64) * stride_kh
        v += tl.cast(batch, tl.int64) * stride_vb + tl.cast(kv_head, tl.int64) * stride_vh
    q_tile = load_tile(
        q, batch, q_head, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, True
    )
    offs_m = start_m + tl.arange(0, BLOCK_M)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    # those that are seen whole first, then those seen in part
    row = row_of_blocks(batch, q_head, start_m // MASK_BLOCK_Q, stride_nb, stride_nh)
    whole, whole_blocks = listed_blocks(full_kv_num_blocks, full_kv_indices, row, columns)
    partial, blocks = listed_blocks(kv_num_blocks, kv_indices, row, columns)
    acc, l_i, m_i = attend(
        acc,
        l_i,
        m_i,
        q_tile,
        k,
        v,
        batch,
        kv_head,
        q_head,
        whole_blocks,
        0,
        whole * MASK_BLOCK_K,
        offs_m,
        seqlen_q,
        seqlen_k,
        stride_ks,
        stride_vs,
        scale_log2,
        BLOCK_N,
        HEAD_DIM,
        BLOCK_D,
        LOAD,
        RAGGED,
        False,
        MASK_BLOCK_K,
    )
    if BOUNDARY:
        acc, l_i, m_i = attend(
            acc,
            l_i,
            m_i,
            q_tile,
            k,
            v,
            batch,
            kv_head,
            q_head,
            blocks,
            0,
            partial * MASK_BLOCK_K,
            offs_m,
            seqlen_q,
            seqlen_k,
            stride_ks,
            stride_vs,
            scale_log2,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_D,
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
    offs_d = tl.arange(0, BLOCK_D)
    rows = offs_m.to(tl.int64) * stride_os
    tl.store(
        out + rows[:, None] + offs_d[None, :],
        acc.to(out.dtype.element_ty),
        mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :],
    )


LOG2_E = 1.4426950408889634


def describable(tensor):
    """Whether a descriptor may name the tensor: not empty, 16-byte steps, none of them 0."""
    steps = (stride * tensor.element_size() for stride in tensor.stride()[:3])
    aligned = all(step > 0 and step % 16 == 0 for step in steps)
    return aligned and tensor.data_ptr() % 16 == 0 and tensor.numel() > 0


def source_of(tensor, s, h, block, load):
    """What a kernel loads tiles of `block` tokens from: the tensor, or its host descriptor."""
    if load == "pointer":
        return tensor
    order = (0, h, s, 3)
    return TensorDescriptor(
        tensor,
        [tensor.shape[axis] for axis in order],
        [tensor.stride(axis) for axis in order],
        [1, 1, block, triton.next_power_of_2(tensor.shape[3])],
    )


def plan(q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace):
    """The launch: [(kernel, grid, arguments, options)]. Nothing is read from the device.

    A call whose tensors no descriptor can name is loaded by pointers whatever the knob says.
    """
    s, h = (1, 2) if layout == "bshd" else (2, 1)  # axes of tokens and heads
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    seqlen_k, num_kv_heads = k.shape[s], k.shape[h]
    group_size = num_heads // num_kv_heads
    block_m, block_n, load = knobs["BLOCK_M"], knobs["BLOCK_N"], knobs["LOAD"]
    if load == "descriptor" and not all(map(describable, (q, k, v))):
        load = "pointer"
    heads = batch * num_heads
    kv_bytes = max(1, 2 * seqlen_k * head_dim * k.element_size())  # of one KV head
    kv_heads_per_group = max(1, (knobs["HEAD_GROUP_MIB"] << 20) // kv_bytes)
    arguments = (
        source_of(q, s, h, block_m, load),
        source_of(k, s, h, block_n, load),
        source_of(v, s, h, block_n, load),
        out,
        lse,
        softmax_scale * LOG2_E,  # exp2 is one instruction: log2(e) goes into the scale
        *(tensor.stride(axis) for tensor in (q, k, v, out) for axis in (0, h, s)),
        heads,
        num_heads,
        group_size,
        min(heads, kv_heads_per_group * group_size),
        seqlen_q,
        seqlen_k,
        block_m,
        block_n,
        head_dim,
        triton.next_power_of_2(head_dim),
        load,
        True,
    )
    grid = (triton.cdiv(seqlen_q, block_m) * heads,)
    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    return [(prefill_kernel, grid, arguments, options)]


def plan_modified(
    modifiers, q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace
):
    """The launch of kernels that take `modifiers` beside what plan() is given.

    Of `modifiers` the text reads what it is for: `window` (left, right), -1 unbounded; `softcap`, a
    number; `alibi_slopes` (batch, num_heads), `bias` (batch, num_heads, seqlen_q, seqlen_k) of any
    strides, and `sinks` (num_heads,).
    `block_mask` has the lists of blocks, with a stride for each sequence and head.
    """
    plain = plan(q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace)
    ((kernel, grid, arguments, options),) = plain
    return [
        (
            kernel,
            grid,
            (
                *listed(modifiers.block_mask),
                *arguments,
                *modifiers.block_mask.BLOCK_SIZE,
                k.shape[1 if layout == "bshd" else 2] % modifiers.block_mask.BLOCK_SIZE[1] != 0,
            ),
            options,
        )
    ]


def listed(block_mask):
    """The lists, rows between those of sequences and heads, and how many blocks a row lists."""
    counts, indices, full_counts, full_indices = block_mask[:4]
    # a kernel has a place to load from where it loads none
    full = (full_counts, indices if full_indices is None else full_indices)
    return [counts, indices, *full, *counts.stride()[:2], indices.shape[3]]
