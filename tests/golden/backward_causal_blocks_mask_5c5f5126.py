# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Backward of prefill attention: dq, dk and dv for a dout, scores computed again from lse.
#
#   p = exp(scale * q k^T - lse)      dv = p^T dout
#   ds = p (dout v^T - delta)         dk = scale * ds^T q      dq = scale * ds k
#
# Symbols
#   i, j          query row, key column; the query sits at position i + seqlen_k - seqlen_q
#   q, out        (batch, num_heads, seqlen_q, HEAD_DIM), in any order of the first three, as dout
#                 and dq
#   k, v          (batch, num_kv_heads, seqlen_k, HEAD_DIM), as dk and dv; each with own strides
#   lse, dlse     (batch, num_heads, seqlen_q) fp32, natural logarithm, and its gradient or None
#   delta         rowsum(dout * out) - dlse
#   lse_log2, delta   (batch * num_heads, padded_q) fp32 workspaces; rows past seqlen_q are as rows
#                 that see no key: lse_log2 is inf, so that p is 0, and delta is 0
#   head          batch * num_heads + query head, counted flat; kv alike of the KV heads
#   num_blocks, indices   how many blocks of the other side each block of queries, or of keys, has
#                 to do with, (batch, num_heads, blocks), and which, (..., columns); full_ alike of
#                 those that are seen whole; of dk and dv by blocks of keys, of dq of queries
#   stride_xb, stride_xh, stride_xs   elements between sequences, heads, tokens of tensor x;
#                 x is g for dout, and dq, dk, dv
#
# Tunable
#   KV_BLOCK_N, KV_BLOCK_M   keys of a program of dk and dv, queries of one step
#   Q_BLOCK_M, Q_BLOCK_N     queries of a program of dq, keys of one step
#   LOAD          "pointer" or "descriptor" (tensor memory accelerator) for q, k, v and dout
#   KV_WARPS, KV_STAGES, Q_WARPS, Q_STAGES
# Given by the problem
#   MASK_BLOCK_Q, MASK_BLOCK_K   queries and keys of a block of the mask, multiples of the tiles'
#   HEAD_DIM      channels; BLOCK_D the power of two that holds them


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
def store_tile(
    target,
    tile,
    start,
    seqlen,
    stride_s,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write tokens [start, start + ROWS) of one head, those there are."""
    offs_s = start + tl.arange(0, ROWS)
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offs_s < seqlen)[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = offs_s.to(tl.int64) * stride_s
    tl.store(target + rows[:, None] + offs_d[None, :], tile.to(target.dtype.element_ty), inside)


@triton.jit
def head_of(
    tensor,
    batch,
    head,
    stride_b,
    stride_h,
):
    """The address of one head of one sequence."""
    return tensor + tl.cast(batch, tl.int64) * stride_b + tl.cast(head, tl.int64) * stride_h


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


@triton.jit(do_not_specialize=["num_heads", "seqlen_q", "padded_q"])
def statistics_kernel(
    out,
    dout,
    lse,
    dlse,
    lse_log2,
    delta,
    stride_ob,
    stride_oh,
    stride_os,
    stride_gb,
    stride_gh,
    stride_gs,
    num_heads,
    seqlen_q,
    padded_q,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What the other kernels read of ROWS rows of one head: lse in base 2, and delta."""
    blocks = padded_q // ROWS
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    batch = head // num_heads
    q_head = head % num_heads
    out_tile = load_tile(
        head_of(out, batch, q_head, stride_ob, stride_oh),
        batch,
        q_head,
        start,
        seqlen_q,
        stride_os,
        ROWS,
        HEAD_DIM,
        BLOCK_D,
        "pointer",
        True,
    )
    dout_tile = load_tile(
        head_of(dout, batch, q_head, stride_gb, stride_gh),
        batch,
        q_head,
        start,
        seqlen_q,
        stride_gs,
        ROWS,
        HEAD_DIM,
        BLOCK_D,
        "pointer",
        True,
    )
    of_rows = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    offs_m = start + tl.arange(0, ROWS)
    place = tl.cast(head, tl.int64) * seqlen_q + offs_m
    logarithm = tl.load(lse + place, mask=offs_m < seqlen_q, other=float("-inf"))
    if dlse is not None:
        of_rows -= tl.load(dlse + place, mask=offs_m < seqlen_q, other=0.0)
    empty = logarithm == float("-inf")  # sees no key
    place = tl.cast(head, tl.int64) * padded_q + offs_m
    log2_e = 1.4426950408889634
    tl.store(lse_log2 + place, tl.where(empty, float("inf"), logarithm * log2_e))
    tl.store(delta + place, tl.where(empty, 0.0, of_rows))


@triton.jit
def query_range(
    start_n,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first, full, full_end, end): no query outside [first, end) sees a key of the tile.

    The queries of [full, full_end) see all of them, in whole steps of BLOCK_M. All four are places
    where a step begins.
    """
    full_end = seqlen_q // BLOCK_M * BLOCK_M
    end = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
    offset = seqlen_k - seqlen_q
    sees_first = tl.maximum(start_n - offset, 0)
    sees_all = tl.maximum(tl.minimum(start_n + BLOCK_N, seqlen_k) - 1 - offset, 0)
    first = tl.minimum(sees_first // BLOCK_M * BLOCK_M, full_end)
    full = tl.minimum(tl.cdiv(sees_all, BLOCK_M) * BLOCK_M, full_end)
    return first, full, full_end, end


@triton.jit
def add_queries(
    dk,
    dv,
    k_tile,
    v_tile,
    q,
    dout,
    lse_log2,
    delta,
    batch,
    q_head,
    blocks,
    low,
    high,
    done,
    done_end,
    offs_n,
    seqlen_q,
    seqlen_k,
    stride_qs,
    stride_gs,
    scale_log2,
    BLOCK_M: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    EDGE: tl.constexpr,
    RULED: tl.constexpr,
    MASK_BLOCK_Q: tl.constexpr,
):
    """dk and dv with what the listed `blocks` of queries of one head add.

    low and high count the queries of these blocks one after the other. Where a block is RULED some
    may not see all keys, and the last one may have EDGE steps past the queries.
    """
    for start_m in tl.range(low, high, BLOCK_M):
        block = tl.load(blocks + start_m // MASK_BLOCK_Q)
        start_m = block * MASK_BLOCK_Q + start_m % MASK_BLOCK_Q
        q_tile = load_tile(
            q, batch, q_head, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, EDGE
        )
        offs_m = start_m + tl.arange(0, BLOCK_M)
        qk = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        # keys past seqlen_k are rows of dk and dv that are not stored
        p = tl.math.exp2(qk * scale_log2 - tl.load(lse_log2 + offs_m)[None, :])
        if RULED:
            # queries and keys in each other's places, as the tile lies
            rows = offs_m[None, :]
            columns = offs_n[:, None]
            seen = columns <= rows + (seqlen_k - seqlen_q)
            seen &= custom_mask(batch, q_head, rows, columns)
            p = tl.where(seen, p, 0.0)
        dout_tile = load_tile(
            dout,
            batch,
            q_head,
            start_m,
            seqlen_q,
            stride_gs,
            BLOCK_M,
            HEAD_DIM,
            BLOCK_D,
            LOAD,
            EDGE,
        )
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, dout_tile.T, input_precision="ieee")
        ds = p * (dp - tl.load(delta + offs_m)[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_kv_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "padded_q",
        "stride_nb",
        "stride_nh",
        "columns",
    ]
)
def backward_kv_kernel(
    num_blocks,
    indices,
    full_num_blocks,
    full_indices,
    stride_nb,
    stride_nh,
    columns,
    q,
    k,
    v,
    dout,
    dk,
    dv,
    lse_log2,
    delta,
    softmax_scale,
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
    stride_gb,
    stride_gh,
    stride_gs,
    stride_dkb,
    stride_dkh,
    stride_dks,
    stride_dvb,
    stride_dvh,
    stride_dvs,
    num_kv_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    padded_q,
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
    """dk and dv of one tile of keys, summed over the query heads of the group.

    Without BOUNDARY every step of queries is whole and sees the whole tile.
    """
    tiles = tl.cdiv(seqlen_k, BLOCK_N)
    start_n = tl.program_id(0) % tiles * BLOCK_N
    kv = tl.program_id(0) // tiles
    batch = kv // num_kv_heads
    kv_head = kv % num_kv_heads
    if LOAD == "pointer":
        k = head_of(k, batch, kv_head, stride_kb, stride_kh)
        v = head_of(v, batch, kv_head, stride_vb, stride_vh)
    k_tile = load_tile(
        k, batch, kv_head, start_n, seqlen_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, True
    )
    v_tile = load_tile(
        v, batch, kv_head, start_n, seqlen_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, True
    )
    offs_n = start_n + tl.arange(0, BLOCK_N)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(group_size):
        q_head = kv_head * group_size + member
        if LOAD == "pointer":
            q_source = head_of(q, batch, q_head, stride_qb, stride_qh)
            dout_source = head_of(dout, batch, q_head, stride_gb, stride_gh)
        else:
            q_source = q
            dout_source = dout
        head = kv * group_size + member
        rows_before = tl.cast(head, tl.int64) * padded_q
        row = row_of_blocks(batch, q_head, start_n // MASK_BLOCK_K, stride_nb, stride_nh)
        whole, whole_blocks = listed_blocks(full_num_blocks, full_indices, row, columns)
        partial, blocks = listed_blocks(num_blocks, indices, row, columns)
        first, full, full_end, end = 0, 0, whole * MASK_BLOCK_Q, (whole + partial) * MASK_BLOCK_Q
        dk_acc, dv_acc = add_queries(
            dk_acc,
            dv_acc,
            k_tile,
            v_tile,
            q_source,
            dout_source,
            lse_log2 + rows_before,
            delta + rows_before,
            batch,
            q_head,
            whole_blocks,
            full,
            full_end,
            full,
            full_end,
            offs_n,
            seqlen_q,
            seqlen_k,
            stride_qs,
            stride_gs,
            scale_log2,
            BLOCK_M,
            HEAD_DIM,
            BLOCK_D,
            LOAD,
            RAGGED,
            False,
            MASK_BLOCK_Q,
        )
        if BOUNDARY:
            dk_acc, dv_acc = add_queries(
                dk_acc,
                dv_acc,
                k_tile,
                v_tile,
                q_source,
                dout_source,
                lse_log2 + rows_before,
                delta + rows_before,
                batch,
                q_head,
                blocks,
                first,
                end - (full_end - full),
                full,
                full_end,
                offs_n,
                seqlen_q,
                seqlen_k,
                stride_qs,
                stride_gs,
                scale_log2,
                BLOCK_M,
                HEAD_DIM,
                BLOCK_D,
                LOAD,
                True,
                True,
                MASK_BLOCK_Q,
            )
    dk = head_of(dk, batch, kv_head, stride_dkb, stride_dkh)
    dv = head_of(dv, batch, kv_head, stride_dvb, stride_dvh)
    dk_acc = dk_acc * softmax_scale
    store_tile(dk, dk_acc, start_n, seqlen_k, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv, dv_acc, start_n, seqlen_k, stride_dvs, BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit
def key_range(
    start_m,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(full, end): every row of the tile sees the keys before `full`, no row one from `end` on."""
    offset = seqlen_k - seqlen_q
    end = tl.maximum(tl.minimum(start_m + BLOCK_M, seqlen_q) + offset, 0)
    seen_by_all = tl.maximum(start_m + offset + 1, 0)
    return tl.minimum(seen_by_all, seqlen_k) // BLOCK_N * BLOCK_N, end


@triton.jit
def add_keys(
    dq,
    q_tile,
    dout_tile,
    lse_rows,
    delta_rows,
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
    EDGE: tl.constexpr,
    RULED: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    """dq with what the listed `blocks` of keys add; an EDGE step may hold keys that are not seen.

    low and high count the keys of these blocks one after the other. Those of blocks that are not
    RULED are hidden past the last alone.
    """
    for start_n in tl.range(low, high, BLOCK_N):
        block = tl.load(blocks + start_n // MASK_BLOCK_K)
        start_n = block * MASK_BLOCK_K + start_n % MASK_BLOCK_K
        k_tile = load_tile(
            k, batch, kv_head, start_n, seqlen_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, EDGE
        )
        qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        p = tl.math.exp2(qk * scale_log2 - lse_rows[:, None])
        if EDGE:
            offs_n = start_n + tl.arange(0, BLOCK_N)
            # a row below seqlen_q sees no key past seqlen_k; the rows past it are never stored
            seen = offs_n[None, :] <= (offs_m + (seqlen_k - seqlen_q))[:, None]
            seen &= custom_mask(batch, q_head, offs_m[:, None], offs_n[None, :])
            if not RULED:
                seen = (offs_n < seqlen_k)[None, :] & (offs_m >= 0)[:, None]
            p = tl.where(seen, p, 0.0)
        v_tile = load_tile(
            v, batch, kv_head, start_n, seqlen_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, EDGE
        )
        dp = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
        ds = p * (dp - delta_rows[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision="ieee")
    return dq


@triton.jit(
    do_not_specialize=[
        "num_heads",
        "group_size",
        "seqlen_q",
        "seqlen_k",
        "padded_q",
        "stride_nb",
        "stride_nh",
        "columns",
    ]
)
def backward_q_kernel(
    num_blocks,
    indices,
    full_num_blocks,
    full_indices,
    stride_nb,
    stride_nh,
    columns,
    q,
    k,
    v,
    dout,
    dq,
    lse_log2,
    delta,
    softmax_scale,
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
    stride_gb,
    stride_gh,
    stride_gs,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    num_heads,
    group_size,
    seqlen_q,
    seqlen_k,
    padded_q,
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
    """dq of one tile of queries of one head.

    Without BOUNDARY every step of keys is whole and seen by all rows.
    """
    tiles = tl.cdiv(seqlen_q, BLOCK_M)
    head = tl.program_id(0) // tiles
    tile = tiles - 1 - tl.program_id(0) % tiles  # the last rows see the most keys: start them first
    start_m = tile * BLOCK_M
    batch = head // num_heads
    q_head = head % num_heads
    kv_head = q_head // group_size
    if LOAD == "pointer":
        q = head_of(q, batch, q_head, stride_qb, stride_qh)
        k = head_of(k, batch, kv_head, stride_kb, stride_kh)
        v = head_of(v, batch, kv_head, stride_vb, stride_vh)
        dout = head_of(dout, batch, q_head, stride_gb, stride_gh)
    q_tile = load_tile(
        q, batch, q_head, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, True
    )
    dout_tile = load_tile(
        dout, batch, q_head, start_m, seqlen_q, stride_gs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, True
    )
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = tl.cast(head, tl.int64) * padded_q + offs_m
    lse_rows = tl.load(lse_log2 + rows)
    delta_rows = tl.load(delta + rows)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # those that are seen whole first, then those seen in part
    row = row_of_blocks(batch, q_head, start_m // MASK_BLOCK_Q, stride_nb, stride_nh)
    whole, whole_blocks = listed_blocks(full_num_blocks, full_indices, row, columns)
    partial, blocks = listed_blocks(num_blocks, indices, row, columns)
    full, end = whole * MASK_BLOCK_K, partial * MASK_BLOCK_K
    acc = add_keys(
        acc,
        q_tile,
        dout_tile,
        lse_rows,
        delta_rows,
        k,
        v,
        batch,
        kv_head,
        q_head,
        whole_blocks,
        0,
        full,
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
        acc = add_keys(
            acc,
            q_tile,
            dout_tile,
            lse_rows,
            delta_rows,
            k,
            v,
            batch,
            kv_head,
            q_head,
            blocks,
            0,
            end,
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
    dq = head_of(dq, batch, q_head, stride_dqb, stride_dqh)
    store_tile(dq, acc * softmax_scale, start_m, seqlen_q, stride_dqs, BLOCK_M, HEAD_DIM, BLOCK_D)


LOG2_E = 1.4426950408889634
STATISTICS_ROWS = 32  # of a program; of two tensors they are in registers


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


def listed(lists):
    """The lists, rows between those of sequences and heads, and how many blocks a row lists."""
    counts, indices, full_counts, full_indices = lists
    # a kernel has a place to load from where it loads none
    full = (full_counts, indices if full_indices is None else full_indices)
    return [counts, indices, *full, *counts.stride()[:2], indices.shape[3]]


def plan(
    modifiers,
    dbias,
    dsinks,
    q,
    k,
    v,
    out,
    lse,
    dout,
    dlse,
    dq,
    dk,
    dv,
    softmax_scale,
    layout,
    num_sms,
    knobs,
    new_workspace,
):
    """The launches: [(kernel, grid, arguments, options)]. Nothing is read from the device.

    Of `modifiers` the text reads what it is for: `window` (left, right), -1 unbounded; `softcap`, a
    number; `alibi_slopes` (batch, num_heads), `bias` (batch, num_heads, seqlen_q, seqlen_k) of any
    strides, 0 along the axes that share it, and `sinks` (num_heads,); `cu_seqlens_q` and
    `cu_seqlens_k` (batch + 1,) of packed sequences. `dbias`, whose axes are 1 where those of `bias`
    are shared, and `dsinks` are None where nobody asks for them.
    `block_mask` has the lists of blocks, with a stride for each sequence and head, those by blocks
    of keys as `queries`.
    A call whose tensors no descriptor can name is loaded by pointers whatever the knob says.
    """
    s, h = (1, 2) if layout == "bshd" else (2, 1)  # axes of tokens and heads
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    seqlen_k, num_kv_heads = k.shape[s], k.shape[h]
    group_size = num_heads // num_kv_heads
    kv_block_m, kv_block_n, load = knobs["KV_BLOCK_M"], knobs["KV_BLOCK_N"], knobs["LOAD"]
    if load == "descriptor" and not all(map(describable, (q, k, v, dout))):
        load = "pointer"
    block_d = triton.next_power_of_2(head_dim)
    q_block_m, q_block_n = knobs["Q_BLOCK_M"], knobs["Q_BLOCK_N"]
    largest = max(kv_block_m, q_block_m, STATISTICS_ROWS)
    mask_block_q, mask_block_k = modifiers.block_mask.BLOCK_SIZE
    # the last block of queries is whole too; tiles divide blocks, or one of them is STATISTICS_ROWS
    padded_rows = mask_block_q if mask_block_q % largest == 0 else 2 * mask_block_q
    padded_q = triton.cdiv(seqlen_q, padded_rows) * padded_rows
    heads = batch * num_heads
    lse_log2, delta = (new_workspace((heads, padded_q), torch.float32) for _ in range(2))

    def steps(*tensors):
        return (tensor.stride(axis) for tensor in tensors for axis in (0, h, s))

    def sources(m, n):
        return (source_of(t, s, h, block, load) for t, block in ((q, m), (k, n), (v, n), (dout, m)))

    lengths = (group_size, seqlen_q, seqlen_k, padded_q)
    scales = (softmax_scale, softmax_scale * LOG2_E)  # exp2 is one instruction
    changes = []
    statistics_arguments = (
        out,
        dout,
        lse,
        dlse,
        lse_log2,
        delta,
        *steps(out, dout),
        num_heads,
        seqlen_q,
        padded_q,
        STATISTICS_ROWS,
        head_dim,
        block_d,
    )
    kv_arguments = (
        *changes,
        *listed(modifiers.block_mask.queries),
        *sources(kv_block_m, kv_block_n),
        dk,
        dv,
        lse_log2,
        delta,
        *scales,
        *steps(q, k, v, dout, dk, dv),
        num_kv_heads,
        *lengths,
        kv_block_m,
        kv_block_n,
        head_dim,
        block_d,
        load,
        True,
        *(mask_block_q, mask_block_k, seqlen_q % mask_block_q != 0),
    )
    q_arguments = (
        *changes,
        *listed(modifiers.block_mask[:4]),
        *sources(q_block_m, q_block_n),
        dq,
        lse_log2,
        delta,
        *scales,
        *steps(q, k, v, dout, dq),
        num_heads,
        *lengths,
        q_block_m,
        q_block_n,
        head_dim,
        block_d,
        load,
        True,
        *(mask_block_q, mask_block_k, seqlen_k % mask_block_k != 0),
    )
    q_grid = (triton.cdiv(seqlen_q, q_block_m) * heads,)
    q_options = {"num_warps": knobs["Q_WARPS"], "num_stages": knobs["Q_STAGES"]}
    statistics_grid = (padded_q // STATISTICS_ROWS * heads,)
    kv_grid = (triton.cdiv(seqlen_k, kv_block_n) * batch * num_kv_heads,)
    kv_options = {"num_warps": knobs["KV_WARPS"], "num_stages": knobs["KV_STAGES"]}
    launches = [
        (statistics_kernel, statistics_grid, statistics_arguments, {"num_warps": 4}),
        (backward_kv_kernel, kv_grid, kv_arguments, kv_options),
        (backward_q_kernel, q_grid, q_arguments, q_options),
    ]
    return [launch for launch in launches if launch[1][0]]  # without keys there is no dk, dv
