# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Backward of prefill attention: dq, dk and dv for a dout, scores computed again from lse.
#
#   p = exp(s - lse)                  dv = p^T dout
#   ds = p (dout v^T - delta)         dk = scale * ds^T q      dq = scale * ds k
#   dbias = ds, summed over what shares a bias
#
# Symbols
#   i, j          query row, key column; the query sits at position i + seqlen_k - seqlen_q
#   q, out        (1, num_heads, total_q, HEAD_DIM), one sequence after the other, as dout and dq
#   k, v          (1, num_kv_heads, total_k, HEAD_DIM), as dk and dv; each with own strides
#   cu_seqlens_q, cu_seqlens_k   (batches + 1,), where each sequence begins and the one before ends
#   seqlen_q, seqlen_k   the token after a sequence's last; like i and j counted among all tokens,
#                 which leaves positions, masks and distances as they are: they count from the end
#   lse, dlse     (num_heads, total_q) fp32, natural logarithm, and its gradient or None
#   delta         rowsum(dout * out) - dlse
#   lse_log2, delta   (num_heads, padded_q) fp32 workspaces, in which each sequence begins at a
#                 multiple of PAD, `shift` rows from its place among the queries; rows between two
#                 are as rows that see no key: lse_log2 is inf, so that p is 0, and delta is 0
#   batch         0, as what is packed lies in one; `sequence` is the one of those packed
#   origin        (sequence, first_q, first_k), its number and first tokens, by which a rule counts
#   head          query head; kv alike of the KV heads
#   window_left, window_right   keys before and after its own position that a query sees at most
#   document_ids  (batches, keys of the longest), by a key's place in its own sequence, as `origin`
#                 tells; a query is of the document at its position
#   query_ranges, key_ranges   (tiles of keys, 4) and (tiles of queries, 4): what of the other side
#                 a tile's documents are in, counted among all tokens
#   stride_xb, stride_xh, stride_xs   elements between sequences, heads, tokens of tensor x;
#                 x is g for dout, and dq, dk, dv
#   dq_sums       (batch * num_heads, padded_q, BLOCK_D) fp32 workspace; zeroed, added to, converted
#
# Tunable
#   KV_BLOCK_N, KV_BLOCK_M   keys of a program, queries of one step
#   LOAD          "pointer" or "descriptor" (tensor memory accelerator) for q, k, v and dout, and
#                 atomic adds of elements or of tiles to dq_sums
#   KV_WARPS, KV_STAGES
# Given by the problem
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
    """Tokens [start, start + ROWS) of one head, zero past HEAD_DIM.

    `source` is a descriptor of the whole tensor, past `seqlen` the next sequence's tokens; or the
    address of the head, zero past `seqlen`. Only a PARTIAL tile may reach past it.
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
def own_tokens(
    tile,
    start,
    seqlen,
    ROWS: tl.constexpr,
):
    """The tile with zeros for the next sequence's tokens, which may be no numbers."""
    return tl.where((start + tl.arange(0, ROWS) < seqlen)[:, None], tile, 0.0)


@triton.jit
def bias_tile(
    bias,
    start_m,
    start_n,
    seqlen_q,
    seqlen_k,
    stride_bi,
    stride_bj,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PARTIAL: tl.constexpr,
):
    """The bias of one head in base 2; only a PARTIAL tile has keys past the last, where it is 0."""
    # 64 bits to the tile: one head alone may span more than 2**31 elements. Within it 32 are
    # enough, and take half of the registers.
    first = bias + tl.cast(start_m, tl.int64) * stride_bi + tl.cast(start_n, tl.int64) * stride_bj
    # rows past the last one read it again: they are never stored, and no mask is slow or spilled
    rows = tl.minimum(tl.arange(0, BLOCK_M), seqlen_q - 1 - start_m)
    columns = tl.arange(0, BLOCK_N)
    pointers = first + (rows[:, None] * stride_bi + columns[None, :] * stride_bj)
    if PARTIAL:
        inside = (start_n + columns < seqlen_k)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)  # (BLOCK_M, BLOCK_N)
    else:
        tile = tl.load(pointers)
    return tile.to(tl.float32) * 1.4426950408889634  # log2(e)


@triton.jit
def documents_of_rows(
    document_ids,
    offs_m,
    seqlen_q,
    seqlen_k,
):
    """The ids at the rows' positions, of those that have one."""
    position = offs_m + (seqlen_k - seqlen_q)
    inside = (position >= 0) & (offs_m < seqlen_q)
    return tl.load(document_ids + position, mask=inside, other=0)


@triton.jit
def same_document(
    document_ids,
    row_ids,
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
):
    """Which keys are of the document at a row's position; a row before all keys is of none."""
    key_ids = tl.load(document_ids + offs_n, mask=offs_n < seqlen_k, other=0)
    has_one = offs_m + (seqlen_k - seqlen_q) >= 0
    return (row_ids[:, None] == key_ids[None, :]) & has_one[:, None]


@triton.jit
def within_documents(
    key_ranges,
    first,
    full,
    full_end,
    end,
    BLOCK_N: tl.constexpr,
):
    """(first, full, full_end, end) of a tile, with what its documents leave of it.

    `key_ranges` has the same four of the documents alone.
    """
    first = tl.maximum(first, tl.load(key_ranges))
    end = tl.minimum(end, tl.load(key_ranges + 3))
    seen_from = tl.maximum(full, tl.load(key_ranges + 1))
    seen_to = tl.minimum(full_end, tl.load(key_ranges + 2))
    full = first + tl.cdiv(tl.maximum(seen_from - first, 0), BLOCK_N) * BLOCK_N
    steps = tl.maximum(seen_to - full, 0) // BLOCK_N
    return first, full, full + steps * BLOCK_N, end


@triton.jit
def sequence_of_tile(
    cu_seqlens_q,
    batches,
    tile,
    BLOCK_M: tl.constexpr,
):
    """The sequence of a tile of the whole batch, and the tile's first row in it.

    Sequence b has the tiles from cu_seqlens_q[b] // BLOCK_M + b on: room for all of its own
    whatever the lengths are, so that nobody needs to know them. One may be left over, past its end.
    """
    low, high = tile * 0, batches
    while high - low > 1:
        middle = (low + high) // 2
        begins = tl.load(cu_seqlens_q + middle).to(tl.int32) // BLOCK_M + middle
        high = tl.where(begins <= tile, high, middle)
        low = tl.where(begins <= tile, middle, low)
    first_tile = tl.load(cu_seqlens_q + low).to(tl.int32) // BLOCK_M + low
    return low, (tile - first_tile) * BLOCK_M


@triton.jit
def span_of(cu_seqlens, batch):
    """The first token of a sequence and how many it has."""
    first = tl.load(cu_seqlens + batch).to(tl.int32)
    return first, tl.load(cu_seqlens + batch + 1).to(tl.int32) - first


@triton.jit
def bias_of_sequence(
    bias,
    sequence,
    first_q,
    first_k,
    stride_bb,
    stride_bi,
    stride_bj,
):
    """Where a sequence's biases would begin, if they were counted by tokens among all."""
    before = tl.cast(first_q, tl.int64) * stride_bi + tl.cast(first_k, tl.int64) * stride_bj
    return bias + (tl.cast(sequence, tl.int64) * stride_bb - before)


@triton.jit
def in_window(
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
):
    """Whether keys lie in the windows of queries; one of both is a row, the other a column."""
    after = offs_n - (offs_m + (seqlen_k - seqlen_q))
    return (after >= -window_left) & (after <= window_right) & (offs_n < seqlen_k)


@triton.jit(do_not_specialize=["num_heads", "total_q", "padded_q", "batches"])
def statistics_kernel(
    cu_seqlens_q,
    out,
    dout,
    lse,
    dlse,
    lse_log2,
    delta,
    dq_sums,
    stride_ob,
    stride_oh,
    stride_os,
    stride_gb,
    stride_gh,
    stride_gs,
    num_heads,
    total_q,
    padded_q,
    batches,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """What is read of ROWS rows of one head: lse in base 2, and delta. Their dq_sums become 0."""
    blocks = padded_q // ROWS
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    padded_start = start
    sequence, start = sequence_of_tile(cu_seqlens_q, batches, start // PAD, PAD)
    first_q, seqlen_q = span_of(cu_seqlens_q, sequence)
    start += first_q + padded_start % PAD
    seqlen_q += first_q
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
    place = tl.cast(head, tl.int64) * total_q + offs_m
    logarithm = tl.load(lse + place, mask=offs_m < seqlen_q, other=float("-inf"))
    if dlse is not None:
        of_rows -= tl.load(dlse + place, mask=offs_m < seqlen_q, other=0.0)
    empty = logarithm == float("-inf")  # sees no key
    place = tl.cast(head, tl.int64) * padded_q + padded_start + tl.arange(0, ROWS)
    log2_e = 1.4426950408889634
    tl.store(lse_log2 + place, tl.where(empty, float("inf"), logarithm * log2_e))
    tl.store(delta + place, tl.where(empty, 0.0, of_rows))
    sums = dq_sums + (place * BLOCK_D)[:, None] + tl.arange(0, BLOCK_D)[None, :]
    tl.store(sums, tl.zeros([ROWS, BLOCK_D], tl.float32))


@triton.jit
def query_range(
    start_n,
    seqlen_q,
    seqlen_k,
    window_left,
    window_right,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """(first, full, full_end, end): no query outside [first, end) sees a key of the tile.

    The queries of [full, full_end) see all of them, in whole steps of BLOCK_M. All four are places
    where a step begins.
    """
    full_end = seqlen_q // BLOCK_M * BLOCK_M
    end = tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M
    first_p = start_n - (seqlen_k - seqlen_q)  # the queries whose positions are those of the tile
    last_p = tl.minimum(start_n + BLOCK_N, seqlen_k) - 1 - (seqlen_k - seqlen_q)
    sees_last = tl.maximum(tl.minimum(last_p + window_left + 1, seqlen_q), 0)
    end = tl.cdiv(sees_last, BLOCK_M) * BLOCK_M
    first = tl.maximum(first_p - window_right, 0) // BLOCK_M * BLOCK_M
    full = tl.cdiv(tl.maximum(last_p - window_right, 0), BLOCK_M) * BLOCK_M
    see_all = tl.maximum(tl.minimum(first_p + window_left + 1, seqlen_q), 0)
    full_end = tl.maximum(see_all // BLOCK_M * BLOCK_M, full)
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
    window_left,
    window_right,
    bias,
    stride_bi,
    stride_bj,
    start_n,
    document_ids,
    origin,
    dq_sums,
    head,
    padded_q,
    shift,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    EDGE: tl.constexpr,
):
    """dk and dv with what the queries [low, high) of one head add.

    EDGE steps may hold queries that see part of the tile, and the last, partial one; they leave out
    [done, done_end), and `high` is as much lower.
    """
    for start_m in tl.range(low, high, BLOCK_M):
        if EDGE:
            start_m += tl.where(start_m < done, 0, done_end - done)
        q_tile = load_tile(
            q, batch, q_head, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, LOAD, EDGE
        )
        if EDGE and LOAD == "descriptor":
            q_tile = own_tokens(q_tile, start_m, seqlen_q, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        qk = tl.dot(k_tile, q_tile.T, input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        qk = qk * scale_log2
        # queries and keys in each other's places, as the tile lies
        qk += bias_tile(
            bias,
            start_n,
            start_m,
            seqlen_k,
            seqlen_q,
            stride_bj,
            stride_bi,
            BLOCK_N,
            BLOCK_M,
            EDGE,
        )
        # keys past seqlen_k are rows of dk and dv that are not stored
        p = tl.math.exp2(qk - tl.load(lse_log2 + offs_m)[None, :])
        p = tl.where((offs_n < seqlen_k)[:, None], p, 0.0)  # infinite, they would spoil dq
        if EDGE:
            # queries and keys in each other's places, as the tile lies
            rows = offs_m[None, :]
            columns = offs_n[:, None]
            seen = in_window(rows, columns, seqlen_q, seqlen_k, window_left, window_right)
            sequence, first_q, first_k = origin
            seen &= documents_of_queries(
                document_ids,
                offs_m - first_q,
                offs_n - first_k,
                seqlen_q - first_q,
                seqlen_k - first_k,
            )
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
        if EDGE and LOAD == "descriptor":
            dout_tile = own_tokens(dout_tile, start_m, seqlen_q, BLOCK_M)
        dv = tl.dot(p.to(dout_tile.dtype), dout_tile, dv, input_precision="ieee")
        dp = tl.dot(v_tile, dout_tile.T, input_precision="ieee")
        ds = p * (dp - tl.load(delta + offs_m)[None, :])
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision="ieee")
        dq = tl.dot(ds.to(k_tile.dtype).T, k_tile, input_precision="ieee")  # (BLOCK_M, BLOCK_D)
        if LOAD == "descriptor":
            dq_sums.atomic_add([head, start_m + shift, 0], dq.reshape([1, BLOCK_M, BLOCK_D]))
        else:
            rows = (tl.cast(head, tl.int64) * padded_q + shift + offs_m) * BLOCK_D
            sums = dq_sums + rows[:, None] + tl.arange(0, BLOCK_D)[None, :]
            tl.atomic_add(sums, dq, sem="relaxed")
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "num_kv_heads",
        "group_size",
        "tiles",
        "batches",
        "padded_q",
        "window_left",
        "window_right",
        "stride_bb",
        "stride_bh",
        "stride_jb",
    ]
)
def backward_kv_kernel(
    window_left,
    window_right,
    bias,
    stride_bb,
    stride_bh,
    stride_bi,
    stride_bj,
    document_ids,
    stride_jb,
    cu_seqlens_q,
    cu_seqlens_k,
    query_ranges,
    q,
    k,
    v,
    dout,
    dk,
    dv,
    lse_log2,
    delta,
    dq_sums,
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
    tiles,
    batches,
    padded_q,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    LOAD: tl.constexpr,
    BOUNDARY: tl.constexpr,
):
    """dk and dv of one tile of keys, summed over the query heads of the group; dq is added to.

    Without BOUNDARY every step of queries is whole and sees the whole tile.
    """
    tile = tl.program_id(0) % tiles
    sequence, start_n = sequence_of_tile(cu_seqlens_k, batches, tile, BLOCK_N)
    first_k, seqlen_k = span_of(cu_seqlens_k, sequence)
    if start_n >= seqlen_k:
        return
    first_q, seqlen_q = span_of(cu_seqlens_q, sequence)
    kv = tl.program_id(0) // tiles
    batch = kv // num_kv_heads
    kv_head = kv % num_kv_heads
    first, full, full_end, end = query_range(
        start_n, seqlen_q, seqlen_k, window_left, window_right, BLOCK_M, BLOCK_N
    )
    first += first_q
    full += first_q
    full_end += first_q
    end += first_q
    start_n += first_k
    seqlen_q += first_q
    seqlen_k += first_k
    shift = (first_q // PAD + sequence) * PAD - first_q
    bias = bias_of_sequence(bias, sequence, first_q, first_k, stride_bb, stride_bi, stride_bj)
    if LOAD == "pointer":
        k = head_of(k, batch, kv_head, stride_kb, stride_kh)
        v = head_of(v, batch, kv_head, stride_vb, stride_vh)
    k_tile = load_tile(
        k, batch, kv_head, start_n, seqlen_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, True
    )
    v_tile = load_tile(
        v, batch, kv_head, start_n, seqlen_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, LOAD, True
    )
    if LOAD == "descriptor":
        k_tile = own_tokens(k_tile, start_n, seqlen_k, BLOCK_N)
        v_tile = own_tokens(v_tile, start_n, seqlen_k, BLOCK_N)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    document_ids += tl.cast(sequence, tl.int64) * stride_jb
    query_ranges += tile.to(tl.int64) * 4
    first, full, full_end, end = queries_within_documents(query_ranges, first, full, full_end, end)
    origin = sequence, first_q, first_k
    for member in range(group_size):
        q_head = kv_head * group_size + member
        if LOAD == "pointer":
            q_source = head_of(q, batch, q_head, stride_qb, stride_qh)
            dout_source = head_of(dout, batch, q_head, stride_gb, stride_gh)
        else:
            q_source = q
            dout_source = dout
        head = kv * group_size + member
        rows_before = tl.cast(head, tl.int64) * padded_q + shift
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
            window_left,
            window_right,
            head_of(bias, batch, q_head, stride_bb, stride_bh),
            stride_bi,
            stride_bj,
            start_n,
            document_ids,
            origin,
            dq_sums,
            head,
            padded_q,
            shift,
            BLOCK_M,
            BLOCK_N,
            HEAD_DIM,
            BLOCK_D,
            LOAD,
            False,
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
                window_left,
                window_right,
                head_of(bias, batch, q_head, stride_bb, stride_bh),
                stride_bi,
                stride_bj,
                start_n,
                document_ids,
                origin,
                dq_sums,
                head,
                padded_q,
                shift,
                BLOCK_M,
                BLOCK_N,
                HEAD_DIM,
                BLOCK_D,
                LOAD,
                True,
            )
    dk = head_of(dk, batch, kv_head, stride_dkb, stride_dkh)
    dv = head_of(dv, batch, kv_head, stride_dvb, stride_dvh)
    dk_acc = dk_acc * softmax_scale
    store_tile(dk, dk_acc, start_n, seqlen_k, stride_dks, BLOCK_N, HEAD_DIM, BLOCK_D)
    store_tile(dv, dv_acc, start_n, seqlen_k, stride_dvs, BLOCK_N, HEAD_DIM, BLOCK_D)


@triton.jit(do_not_specialize=["num_heads", "padded_q", "batches"])
def convert_kernel(
    cu_seqlens_q,
    dq_sums,
    dq,
    softmax_scale,
    stride_dqb,
    stride_dqh,
    stride_dqs,
    num_heads,
    padded_q,
    batches,
    PAD: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """dq of ROWS rows of one head, from their sums."""
    blocks = padded_q // ROWS
    head = tl.program_id(0) // blocks
    start = tl.program_id(0) % blocks * ROWS
    rows = (tl.cast(head, tl.int64) * padded_q + start + tl.arange(0, ROWS)) * BLOCK_D
    sums = tl.load(dq_sums + rows[:, None] + tl.arange(0, BLOCK_D)[None, :])
    sequence, within = sequence_of_tile(cu_seqlens_q, batches, start // PAD, PAD)
    first_q, seqlen_q = span_of(cu_seqlens_q, sequence)
    start = first_q + within + start % PAD
    seqlen_q += first_q
    dq = head_of(dq, head // num_heads, head % num_heads, stride_dqb, stride_dqh)
    store_tile(dq, sums * softmax_scale, start, seqlen_q, stride_dqs, ROWS, HEAD_DIM, BLOCK_D)


@triton.jit(
    do_not_specialize=[
        "batches",
        "num_heads",
        "bias_batches",
        "bias_heads",
        "group_size",
        "rows",
        "columns",
        "padded_q",
        "window_left",
        "window_right",
        "stride_bb",
        "stride_bh",
        "stride_jb",
        "stride_db",
        "stride_dh",
    ]
)
def backward_bias_kernel(
    window_left,
    window_right,
    bias,
    stride_bb,
    stride_bh,
    stride_bi,
    stride_bj,
    document_ids,
    stride_jb,
    cu_seqlens_q,
    cu_seqlens_k,
    q,
    k,
    v,
    dout,
    dbias,
    lse_log2,
    delta,
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
    stride_db,
    stride_dh,
    stride_di,
    stride_dj,
    batches,
    num_heads,
    bias_batches,
    bias_heads,
    group_size,
    rows,
    columns,
    padded_q,
    PAD: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OWN_M: tl.constexpr,
    OWN_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """One tile of dbias, summed in one order over all that shares its biases.

    OWN_M is 1 where all queries share a bias, else BLOCK_M; OWN_N alike of the keys. `bias_batches`
    and `bias_heads` are 1 where sequences or heads share it, else all there are.
    """
    tiles_n = tl.cdiv(columns, OWN_N)
    tiles = tl.cdiv(rows, OWN_M) * tiles_n
    of_bias = tl.program_id(0) // tiles
    bias_batch = of_bias // bias_heads
    bias_head = of_bias % bias_heads
    own_m = tl.program_id(0) % tiles // tiles_n * OWN_M
    own_n = tl.program_id(0) % tiles_n * OWN_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for batch in tl.range(bias_batch, batches, bias_batches):
        # queries and keys are counted in their own sequence here, whose end a tile may lie past
        first_q, seqlen_q = span_of(cu_seqlens_q, batch)
        first_k, seqlen_k = span_of(cu_seqlens_k, batch)
        end_m = seqlen_q if OWN_M == 1 else tl.minimum(own_m + 1, seqlen_q)
        end_n = seqlen_k if OWN_N == 1 else tl.minimum(own_n + 1, seqlen_k)
        ids = document_ids + tl.cast(batch, tl.int64) * stride_jb
        for q_head in tl.range(bias_head, num_heads, bias_heads):
            kv_head = q_head // group_size
            q_source = head_of(q, first_q, q_head, stride_qs, stride_qh)
            k_source = head_of(k, first_k, kv_head, stride_ks, stride_kh)
            v_source = head_of(v, first_k, kv_head, stride_vs, stride_vh)
            dout_source = head_of(dout, first_q, q_head, stride_gs, stride_gh)
            bias_source = head_of(bias, batch, q_head, stride_bb, stride_bh)
            rows_before = tl.cast(q_head, tl.int64) * padded_q + (first_q // PAD + batch) * PAD
            for start_m in tl.range(own_m, end_m, BLOCK_M):
                first_p = start_m + seqlen_k - seqlen_q
                last_p = tl.minimum(start_m + BLOCK_M, seqlen_q) - 1 + seqlen_k - seqlen_q
                for start_n in tl.range(own_n, end_n, BLOCK_N):
                    in_reach = start_n + BLOCK_N > first_p - window_left
                    some_seen = in_reach & (start_n <= last_p + window_right)
                    some_seen &= documents_meet(
                        ids, start_m, start_n, seqlen_q, seqlen_k, BLOCK_M, BLOCK_N
                    )
                    if some_seen:
                        acc += scores_gradient(
                            q_source,
                            k_source,
                            v_source,
                            dout_source,
                            bias_source,
                            lse_log2 + rows_before,
                            delta + rows_before,
                            start_m,
                            start_n,
                            seqlen_q,
                            seqlen_k,
                            stride_qs,
                            stride_ks,
                            stride_vs,
                            stride_gs,
                            stride_bi,
                            stride_bj,
                            scale_log2,
                            window_left,
                            window_right,
                            ids,
                            BLOCK_M,
                            BLOCK_N,
                            HEAD_DIM,
                            BLOCK_D,
                        )
    if OWN_M == 1:
        acc = tl.sum(acc, 0, keep_dims=True)
    if OWN_N == 1:
        acc = tl.sum(acc, 1, keep_dims=True)
    offs_m = own_m + tl.arange(0, OWN_M)
    offs_n = own_n + tl.arange(0, OWN_N)
    target = head_of(dbias, bias_batch, bias_head, stride_db, stride_dh)
    places = (offs_m.to(tl.int64) * stride_di)[:, None] + (offs_n.to(tl.int64) * stride_dj)[None, :]
    inside = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    tl.store(target + places, acc.to(target.dtype.element_ty), inside)


@triton.jit
def scores_gradient(
    q,
    k,
    v,
    dout,
    bias,
    lse_log2,
    delta,
    start_m,
    start_n,
    seqlen_q,
    seqlen_k,
    stride_qs,
    stride_ks,
    stride_vs,
    stride_gs,
    stride_bi,
    stride_bj,
    scale_log2,
    window_left,
    window_right,
    document_ids,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """ds of one tile of one head, (BLOCK_M, BLOCK_N), 0 where no query sees a key.

    The arguments are addresses of the head.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    offs_n = start_n + tl.arange(0, BLOCK_N)
    q_tile = load_tile(
        q, 0, 0, start_m, seqlen_q, stride_qs, BLOCK_M, HEAD_DIM, BLOCK_D, "pointer", True
    )
    k_tile = load_tile(
        k, 0, 0, start_n, seqlen_k, stride_ks, BLOCK_N, HEAD_DIM, BLOCK_D, "pointer", True
    )
    qk = tl.dot(q_tile, k_tile.T, input_precision="ieee")
    qk = qk * scale_log2
    qk += bias_tile(
        bias, start_m, start_n, seqlen_q, seqlen_k, stride_bi, stride_bj, BLOCK_M, BLOCK_N, True
    )
    p = tl.math.exp2(qk - tl.load(lse_log2 + offs_m)[:, None])
    seen = in_window(
        offs_m[:, None], offs_n[None, :], seqlen_q, seqlen_k, window_left, window_right
    )
    row_ids = documents_of_rows(document_ids, offs_m, seqlen_q, seqlen_k)
    seen &= same_document(document_ids, row_ids, offs_m, offs_n, seqlen_q, seqlen_k)
    p = tl.where(seen & (offs_m < seqlen_q)[:, None], p, 0.0)
    v_tile = load_tile(
        v, 0, 0, start_n, seqlen_k, stride_vs, BLOCK_N, HEAD_DIM, BLOCK_D, "pointer", True
    )
    dout_tile = load_tile(
        dout, 0, 0, start_m, seqlen_q, stride_gs, BLOCK_M, HEAD_DIM, BLOCK_D, "pointer", True
    )
    dp = tl.dot(dout_tile, v_tile.T, input_precision="ieee")
    return p * (dp - tl.load(delta + offs_m)[:, None])


CHUNKS_AT_ONCE = 512  # whose extents a program looks at


@triton.jit(do_not_specialize=["stride_jb", "batches"])
def document_extents_kernel(
    document_ids,
    extents,
    stride_jb,
    cu_seqlens,
    cu_seqlens_k,
    batches,
    CHUNK: tl.constexpr,
):
    """The least and the greatest id of one CHUNK of tokens: `extents` of a sequence (2, chunks).

    A token is of the document at its position, of none where that is before all keys.
    """
    batch, start = sequence_of_tile(cu_seqlens, batches, tl.program_id(0), CHUNK)
    first_token, length = span_of(cu_seqlens, batch)
    if start >= length:
        return
    _, seqlen_k = span_of(cu_seqlens_k, batch)
    tokens = start + tl.arange(0, CHUNK)
    position = tokens + (seqlen_k - length)
    inside = (position >= 0) & (tokens < length)
    ids = document_ids + (tl.cast(batch, tl.int64) * stride_jb + position)
    extents += 2 * (first_token // CHUNK + batch) + start // CHUNK
    tl.store(extents, tl.min(tl.load(ids, mask=inside, other=0x7FFFFFFF), 0))
    greatest = tl.max(tl.load(ids, mask=inside, other=-0x80000000), 0)
    tl.store(extents + tl.cdiv(length, CHUNK), greatest)


@triton.jit(do_not_specialize=["stride_jb", "batches"])
def document_ranges_kernel(
    document_ids,
    extents,
    ranges,
    stride_jb,
    own_cu_seqlens,
    cu_seqlens,
    cu_seqlens_k,
    batches,
    OWN: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    """(first, full, full_end, end) of the tokens that one tile of OWN meets by its documents.

    Tiles are of queries and tokens keys, or the other way round. Ids of a chunk that lie between
    the tile's do not say that they meet: in any order of documents no token is left out that is
    seen. [full, full_end) are chunks of the one document that all of the tile is of. All four are
    multiples of CHUNK after the sequence's first token, counted among all.
    """
    batch, start = sequence_of_tile(own_cu_seqlens, batches, tl.program_id(0), OWN)
    _, own_length = span_of(own_cu_seqlens, batch)
    first_token, length = span_of(cu_seqlens, batch)
    _, seqlen_k = span_of(cu_seqlens_k, batch)
    own_shift = seqlen_k - own_length
    shift = seqlen_k - length
    chunks = tl.cdiv(length, CHUNK)
    own = start + tl.arange(0, OWN)
    inside = (own + own_shift >= 0) & (own < own_length)
    ids = document_ids + (tl.cast(batch, tl.int64) * stride_jb + own + own_shift)
    low = tl.min(tl.load(ids, mask=inside, other=0x7FFFFFFF), 0)
    high = tl.max(tl.load(ids, mask=inside, other=-0x80000000), 0)
    of_one = (low == high) & (start + own_shift >= 0)
    extents += 2 * (first_token // CHUNK + batch)
    first, last, full = chunks, chunks * 0 - 1, chunks
    for start_c in tl.range(0, chunks, CHUNKS):
        offs_c = start_c + tl.arange(0, CHUNKS)
        least = tl.load(extents + offs_c, mask=offs_c < chunks, other=0x7FFFFFFF)
        greatest = tl.load(extents + chunks + offs_c, mask=offs_c < chunks, other=-0x80000000)
        meets = (least <= high) & (greatest >= low)
        first = tl.minimum(first, tl.min(tl.where(meets, offs_c, chunks), 0))
        last = tl.maximum(last, tl.max(tl.where(meets, offs_c, -1), 0))
        there = (offs_c * CHUNK + shift >= 0) & ((offs_c + 1) * CHUNK <= length)
        whole = of_one & there & (least == low) & (greatest == low)
        full = tl.minimum(full, tl.min(tl.where(whole, offs_c, chunks), 0))
    full_end = last + 1
    for start_c in tl.range(full, last + 1, CHUNKS):
        offs_c = start_c + tl.arange(0, CHUNKS)
        least = tl.load(extents + offs_c, mask=offs_c < chunks, other=0x7FFFFFFF)
        greatest = tl.load(extents + chunks + offs_c, mask=offs_c < chunks, other=-0x80000000)
        there = (offs_c + 1) * CHUNK <= length
        whole = there & (least == low) & (greatest == low)
        full_end = tl.minimum(full_end, tl.min(tl.where(whole, chunks, offs_c), 0))
    ranges += tl.cast(tl.program_id(0), tl.int64) * 4
    tl.store(ranges, first_token + tl.minimum(first, last + 1) * CHUNK)
    tl.store(ranges + 1, first_token + full * CHUNK)
    tl.store(ranges + 2, first_token + tl.maximum(full, full_end) * CHUNK)
    tl.store(ranges + 3, first_token + (last + 1) * CHUNK)


@triton.jit
def queries_within_documents(
    query_ranges,
    first,
    full,
    full_end,
    end,
):
    """(first, full, full_end, end) of a tile of keys, with what its documents leave of it.

    `query_ranges` has the same four of the documents alone. All are places where a step begins.
    """
    first = tl.maximum(first, tl.load(query_ranges))
    end = tl.minimum(end, tl.load(query_ranges + 3))
    full = tl.maximum(tl.maximum(full, tl.load(query_ranges + 1)), first)
    full_end = tl.minimum(tl.minimum(full_end, tl.load(query_ranges + 2)), end)
    return first, full, tl.maximum(full_end, full), end


@triton.jit
def documents_of_queries(
    document_ids,
    offs_m,
    offs_n,
    seqlen_q,
    seqlen_k,
):
    """Which queries are of the documents of keys, (keys, queries); one before all keys is not."""
    key_ids = tl.load(document_ids + offs_n, mask=offs_n < seqlen_k, other=0)
    row_ids = documents_of_rows(document_ids, offs_m, seqlen_q, seqlen_k)
    has_one = offs_m + (seqlen_k - seqlen_q) >= 0
    return (key_ids[:, None] == row_ids[None, :]) & has_one[None, :]


@triton.jit
def documents_meet(
    document_ids,
    start_m,
    start_n,
    seqlen_q,
    seqlen_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Whether ids of a tile of keys lie between those of a tile of queries, or the other way."""
    offs_n = start_n + tl.arange(0, BLOCK_N)
    position = start_m + tl.arange(0, BLOCK_M) + (seqlen_k - seqlen_q)
    has_one = (position >= 0) & (position < seqlen_k)
    low = tl.min(tl.load(document_ids + position, mask=has_one, other=0x7FFFFFFF), 0)
    high = tl.max(tl.load(document_ids + position, mask=has_one, other=-0x80000000), 0)
    there = offs_n < seqlen_k
    least = tl.min(tl.load(document_ids + offs_n, mask=there, other=0x7FFFFFFF), 0)
    greatest = tl.max(tl.load(document_ids + offs_n, mask=there, other=-0x80000000), 0)
    return (least <= high) & (greatest >= low)


def ranges_of_documents(modifiers, own, other, new_workspace):
    """What each tile of one side meets of the other by its documents, and the launches for that.

    A side is (where each sequence begins, tokens of all, tokens of a tile).
    """
    (own_cu_seqlens, own_tokens, own_block), (cu_seqlens, tokens, block) = own, other
    document_ids, batches = modifiers.document_ids, cu_seqlens.shape[0] - 1
    # each sequence begins one, of either side: never more than these
    tiles, chunks = own_tokens // own_block + batches, tokens // block + batches
    extents = new_workspace((2 * chunks,), torch.int32)
    ranges = new_workspace((tiles, 4), torch.int32)
    stride_jb, starts = document_ids.stride(0), (cu_seqlens, modifiers.cu_seqlens_k, batches)
    of_tiles = (stride_jb, own_cu_seqlens, *starts, own_block, block, CHUNKS_AT_ONCE)
    return ranges, [
        (
            document_extents_kernel,
            (chunks,),
            (document_ids, extents, stride_jb, *starts, block),
            {"num_warps": 1, "num_stages": 1},
        ),
        (
            document_ranges_kernel,
            (tiles,),
            (document_ids, extents, ranges, *of_tiles),
            {"num_warps": 4, "num_stages": 1},
        ),
    ]


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


def sums_of(dq_sums, block, load):
    """What a kernel adds tiles of `block` rows to: the workspace, or its host descriptor."""
    if load == "pointer":
        return dq_sums
    return TensorDescriptor(
        dq_sums, list(dq_sums.shape), list(dq_sums.stride()), [1, block, dq_sums.shape[2]]
    )


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
    Of packed sequences `bias` has as many queries and keys as the longest, each counted in its own.
    `document_ids` are (batch, keys of the longest sequence), by a key's place in its own.
    A call whose tensors no descriptor can name is loaded by pointers whatever the knob says.
    """
    s, h = 1, 2  # axes of tokens and heads
    q, k, v, out, dout, dq, dk, dv = (t.unsqueeze(0) for t in (q, k, v, out, dout, dq, dk, dv))
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    seqlen_k, num_kv_heads = k.shape[s], k.shape[h]
    group_size = num_heads // num_kv_heads
    kv_block_m, kv_block_n, load = knobs["KV_BLOCK_M"], knobs["KV_BLOCK_N"], knobs["LOAD"]
    if load == "descriptor" and not all(map(describable, (q, k, v, dout))):
        load = "pointer"
    block_d = triton.next_power_of_2(head_dim)
    largest = max(kv_block_m, STATISTICS_ROWS)
    batches = modifiers.cu_seqlens_q.shape[0] - 1
    padded_q = (seqlen_q // largest + batches) * largest  # room for each sequence's own, padded
    heads = batch * num_heads
    dq_sums = new_workspace((heads, padded_q, block_d), torch.float32)
    lse_log2, delta = (new_workspace((heads, padded_q), torch.float32) for _ in range(2))

    def steps(*tensors):
        return (tensor.stride(axis) for tensor in tensors for axis in (0, h, s))

    def sources(m, n):
        return (source_of(t, s, h, block, load) for t, block in ((q, m), (k, n), (v, n), (dout, m)))

    scales = (softmax_scale, softmax_scale * LOG2_E)  # exp2 is one instruction
    changes = []
    changes += [side if side >= 0 else seqlen_q + seqlen_k for side in modifiers.window]
    changes += [modifiers.bias, *modifiers.bias.stride()]
    changes += [modifiers.document_ids, modifiers.document_ids.stride(0)]
    changes += [modifiers.cu_seqlens_q, modifiers.cu_seqlens_k]
    statistics_arguments = (
        modifiers.cu_seqlens_q,
        out,
        dout,
        lse,
        dlse,
        lse_log2,
        delta,
        dq_sums,
        *steps(out, dout),
        num_heads,
        seqlen_q,
        padded_q,
        batches,
        largest,
        STATISTICS_ROWS,
        head_dim,
        block_d,
    )
    of_keys, of_queries = (modifiers.cu_seqlens_k, seqlen_k), (modifiers.cu_seqlens_q, seqlen_q)
    query_ranges, for_keys = ranges_of_documents(
        modifiers, (*of_keys, kv_block_n), (*of_queries, kv_block_m), new_workspace
    )
    kv_tiles = seqlen_k // kv_block_n + batches  # each sequence begins one: never more than these
    kv_arguments = (
        *changes,
        query_ranges,
        *sources(kv_block_m, kv_block_n),
        dk,
        dv,
        lse_log2,
        delta,
        sums_of(dq_sums, kv_block_m, load),
        *scales,
        *steps(q, k, v, dout, dk, dv),
        num_kv_heads,
        *(group_size, kv_tiles, batches, padded_q, largest),
        kv_block_m,
        kv_block_n,
        head_dim,
        block_d,
        load,
        True,
    )
    convert_arguments = (
        modifiers.cu_seqlens_q,
        dq_sums,
        dq,
        softmax_scale,
        *steps(dq),
        num_heads,
        padded_q,
        batches,
        largest,
        STATISTICS_ROWS,
        head_dim,
        block_d,
    )
    statistics_grid = (padded_q // STATISTICS_ROWS * heads,)
    kv_grid = (kv_tiles * num_kv_heads,)
    kv_options = {"num_warps": knobs["KV_WARPS"], "num_stages": knobs["KV_STAGES"]}
    launches = [
        *for_keys,
        (statistics_kernel, statistics_grid, statistics_arguments, {"num_warps": 4}),
        (backward_kv_kernel, kv_grid, kv_arguments, kv_options),
        (convert_kernel, statistics_grid, convert_arguments, {"num_warps": 4}),
    ]
    if dbias is not None:
        tile = (kv_block_m, kv_block_n)
        warps = knobs["KV_WARPS"]
        bias_batches, bias_heads, *own = dbias.shape
        own_tile = [1 if n == 1 else block for n, block in zip(own, tile, strict=True)]
        bias_arguments = (
            *changes,
            *(q, k, v, dout, dbias, lse_log2, delta, scales[1]),
            *steps(q, k, v, dout),
            *dbias.stride(),
            *(batches, num_heads, bias_batches, bias_heads, group_size, *own, padded_q, largest),
            *tile,
            *own_tile,
            head_dim,
            block_d,
        )
        programs = bias_batches * bias_heads
        for n, block in zip(own, own_tile, strict=True):
            programs *= triton.cdiv(n, block)
        options = {"num_warps": warps, "num_stages": 1}
        launches.append((backward_bias_kernel, (programs,), bias_arguments, options))
    return [launch for launch in launches if launch[1][0]]  # without keys there is no dk, dv
