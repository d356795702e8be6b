# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Split-KV decode: one query token a sequence, all query heads of a KV head in one tile of rows.
# The keys of a sequence are cut into runs of tiles; a program attends to one run and writes a
# partial result, `combine` merges the partial results of each head.
#
#   q, out             (batch, 1, num_heads, head_dim), any strides, the last one 1
#   k_cache, v_cache   nhd or hnd by strides alone; stride_kb is a page's stride when paged
#   block_table        (batch, max_pages), page ids; entries past a length may hold anything
#   cache_seqlens      (batch,), valid keys; slots past a length may hold anything
#   out_partial        (slots, num_heads, head_dim) fp32, each the softmax over its own keys
#   lse_partial        (slots, num_heads) fp32, base 2
#   lse                (batch, num_heads) fp32, natural logarithm, or None
#
#   BLOCK_M   query heads a tile, padded: tl.dot needs 16 rows. GROUP_SIZE are real; a larger group
#             takes ROW_BLOCKS tiles
#   BLOCK_D   HEAD_DIM padded to a power of two
#   tunable   SCHEDULE, SWAP, BLOCK_N, DEPENDENT_LAUNCH, num_splits, num_warps, num_stages
#
# SCHEDULE "split": a program is (sequence, block of heads, split), and each sequence is cut into
# num_splits equal runs. "group": the tiles of all sequences make one list, cut into num_splits
# equal shares; a program is (share, block of heads) and walks the sequences its share touches.

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_keys(
    head,
    offsets,
    live,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # (BLOCK_N, BLOCK_D) of one KV head. A dead key is masked, never read and multiplied by zero:
    # its slot may hold NaN, its page id may point anywhere.
    offs_d = tl.arange(0, BLOCK_D)
    if HEAD_DIM == BLOCK_D:
        mask = live[:, None]
    else:
        mask = live[:, None] & (offs_d < HEAD_DIM)[None, :]
    return tl.load(head + offsets[:, None] + offs_d[None, :], mask=mask, other=0.0)


@triton.jit
def online_softmax(qk, m_i, KEY_AXIS: tl.constexpr):
    # p of the scores in base 2, the new maximum, and the factor for what was summed before. While
    # a row has seen no key its maximum is -inf: shifting by 0 then gives 0 where -inf would NaN.
    m_new = tl.maximum(m_i, tl.max(qk, KEY_AXIS))
    shift = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.math.exp2(m_i - shift)
    p = tl.math.exp2(qk - tl.expand_dims(shift, KEY_AXIS))
    return p, m_new, alpha


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
def mark_blocks(
    states_row,
    listed,
    count,
    blocks,
    STATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Gives the first `count` listed blocks this state, of those that begin before the last key.
    for start in tl.range(0, count, BLOCK):
        offs = start + tl.arange(0, BLOCK)
        block = tl.load(listed + offs, mask=offs < count, other=-1)
        inside = (block >= 0) & (block < blocks)
        tl.store(states_row + block, tl.full([BLOCK], STATE, tl.int8), mask=inside)


@triton.jit(
    do_not_specialize=[
        "stride_nb",
        "stride_nh",
        "columns",
        "batch",
        "num_kv_heads",
        "group_size",
        "blocks_of_row",
        "tiles_of_row",
    ]
)
def list_tiles(
    kv_num_blocks,
    kv_indices,
    full_kv_num_blocks,
    full_kv_indices,
    stride_nb,
    stride_nh,
    columns,
    cache_seqlens,
    stride_lb,
    states,
    tile_counts,
    listed_tiles,
    batch,
    num_kv_heads,
    group_size,
    blocks_of_row,
    tiles_of_row,
    LISTED_HEADS: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    # One program per (sequence, KV head) finds the tiles of keys that some head of the group lists,
    # whatever the order of its lists, and the state of each block for each head: 0 hidden, 1 seen
    # in part, 2 whole.
    if DEPENDENT_LAUNCH:
        # an earlier call's kernels may still read in the same memory
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    sequence = program // num_kv_heads
    kv_head = program % num_kv_heads
    seqlen_k = tl.load(cache_seqlens + sequence.to(tl.int64) * stride_lb).to(tl.int32)
    blocks = tl.cdiv(seqlen_k, MASK_BLOCK_K)
    offs = tl.arange(0, BLOCK)
    rows = states + program.to(tl.int64) * LISTED_HEADS * blocks_of_row
    for member in tl.range(0, LISTED_HEADS):
        for start in tl.range(0, blocks, BLOCK):
            place = member * blocks_of_row + start + offs
            tl.store(rows + place, tl.zeros([BLOCK], tl.int8), mask=start + offs < blocks)
    tl.debug_barrier()  # other threads' zeros are stored before what follows
    for member in tl.range(0, LISTED_HEADS):
        row = row_of_blocks(sequence, kv_head * group_size + member, 0, stride_nb, stride_nh)
        count, listed = listed_blocks(kv_num_blocks, kv_indices, row, columns)
        mark_blocks(rows + member * blocks_of_row, listed, count, blocks, 1, BLOCK)
    if full_kv_num_blocks is not None:
        tl.debug_barrier()
        for member in tl.range(0, LISTED_HEADS):
            row = row_of_blocks(sequence, kv_head * group_size + member, 0, stride_nb, stride_nh)
            count, listed = listed_blocks(full_kv_num_blocks, full_kv_indices, row, columns)
            mark_blocks(rows + member * blocks_of_row, listed, count, blocks, 2, BLOCK)
    tl.debug_barrier()
    tiles_row = listed_tiles + program.to(tl.int64) * tiles_of_row
    found = 0
    for start in tl.range(0, tl.cdiv(seqlen_k, BLOCK_N), BLOCK):
        tile = start + offs
        end = tl.minimum(tile * BLOCK_N + BLOCK_N, seqlen_k)
        there = tl.zeros([BLOCK], tl.int32)
        for member in tl.range(0, LISTED_HEADS):
            # of the blocks that a tile may touch
            for n in tl.static_range((BLOCK_N + MASK_BLOCK_K - 2) // MASK_BLOCK_K + 1):
                block = tile * BLOCK_N // MASK_BLOCK_K + n
                inside = block * MASK_BLOCK_K < end
                state = tl.load(rows + member * blocks_of_row + block, mask=inside, other=0)
                there |= state.to(tl.int32)
        there = (there > 0).to(tl.int32)
        tl.store(tiles_row + found + tl.cumsum(there, 0) - there, tile, mask=there > 0)
        found += tl.sum(there, 0)
    # where none is listed one past the last key: somebody must write the zeros
    tl.store(tiles_row, tl.cdiv(seqlen_k, BLOCK_N), mask=found == 0)
    tl.store(tile_counts + kv_head * batch + sequence, tl.maximum(found, 1))


@triton.jit
def blocks_of_step(lists, place, heads, head_mask, LISTED_HEADS: tl.constexpr):
    # The tiles of a sequence's KV head, at this place, and where the states of each row's blocks
    # begin, (BLOCK_M,).
    states, listed_tiles, blocks_of_row, tiles_of_row = lists
    place = place.to(tl.int64)
    rows = place * LISTED_HEADS + heads % LISTED_HEADS
    return listed_tiles + place * tiles_of_row, states + rows * blocks_of_row, head_mask


@triton.jit
def listed_tile(blocks, place, tile_end):
    return tl.load(blocks[0] + place, mask=place < tile_end, other=0)


@triton.jit
def states_of_tile(
    blocks,
    tile,
    seqlen_k,
    KEY_AXIS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    # How each row sees each key, or in a tile that lies in one block all of them.
    _, rows, head_mask = blocks
    if MASK_BLOCK_K % BLOCK_N == 0:
        mask = head_mask & (tile * BLOCK_N < seqlen_k)
        state = tl.load(rows + tile * BLOCK_N // MASK_BLOCK_K, mask=mask, other=0)
        return tl.expand_dims(state, KEY_AXIS)
    else:
        keys = tile * BLOCK_N + tl.arange(0, BLOCK_N)
        mask = tl.expand_dims(head_mask, KEY_AXIS) & tl.expand_dims(keys < seqlen_k, 1 - KEY_AXIS)
        places = tl.expand_dims(keys // MASK_BLOCK_K, 1 - KEY_AXIS)
        return tl.load(tl.expand_dims(rows, KEY_AXIS) + places, mask=mask, other=0)


@triton.jit
def within_blocks(
    live,
    states,
    KEY_AXIS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    # Which keys are in a block that some row's head lists: no others are read. Of a tile in one
    # block, which somebody listed, all.
    if MASK_BLOCK_K % BLOCK_N == 0:
        return live
    else:
        return live & (tl.max(states.to(tl.int32), 1 - KEY_AXIS) > 0)


def plan_listing(
    block_mask,
    num_heads,
    k_cache,
    cache_seqlens,
    block_table,
    kv_layout,
    knobs,
    new_workspace,
):
    """The launch of list_tiles, what decode takes of its results, and the sizes of these."""
    token_axis, head_axis = (1, 2) if kv_layout == "nhd" else (2, 1)
    batch, num_kv_heads = cache_seqlens.shape[0], k_cache.shape[head_axis]
    keys = k_cache.shape[token_axis] * (1 if block_table is None else block_table.shape[1])
    strides, (_, mask_block_k) = block_mask[0].stride()[:2], block_mask.BLOCK_SIZE
    group_size, block_n = num_heads // num_kv_heads, knobs["BLOCK_N"]
    listed_heads = group_size if strides[1] else 1  # where all heads share their lists
    blocks, tiles = max(1, triton.cdiv(keys, mask_block_k)), max(1, triton.cdiv(keys, block_n))
    states = new_workspace((batch, num_kv_heads, listed_heads, blocks), torch.int8)
    tile_counts = new_workspace((num_kv_heads, batch), torch.int32)
    listed_tiles = new_workspace((batch, num_kv_heads, tiles), torch.int32)
    dependent = knobs["DEPENDENT_LAUNCH"] if k_cache.device.type != "cpu" else 0
    arguments = (
        *block_mask[:4],
        *strides,
        block_mask[1].shape[3],
        cache_seqlens,
        cache_seqlens.stride(0),
        states,
        tile_counts,
        listed_tiles,
        batch,
        num_kv_heads,
        group_size,
        blocks,
        tiles,
        listed_heads,
        mask_block_k,
        block_n,
        min(1024, triton.next_power_of_2(max(blocks, tiles))),
        dependent,
    )
    options = {"num_warps": 4, **({"launch_pdl": True} if dependent else {})}
    launch = (list_tiles, (batch * num_kv_heads,), arguments, options)
    return launch, (states, tile_counts, listed_tiles, blocks, tiles), (listed_heads, mask_block_k)


# What follows is None where it is off, and then costs nothing:
#
#   reach          how many of a sequence's last keys its queries see at most, by a sliding window
#   visited        how many slots the chosen pages of a sequence have, page_positions which of its
#                  pages they are, (batch, max_pages); of no page negative
#   softcap_log2   the softcap in base 2
#   alibi_slopes   (batch, num_heads) fp32, any strides
#   states         (batch, num_kv_heads, LISTED_HEADS, blocks_of_row) int8: how each head of a
#                  group, or all of them alike, sees the blocks of MASK_BLOCK_K keys, by their place
#                  in the sequence: 0 not at all, 1 as causal and the rule leave them, 2 whole
#   tile_counts    (num_kv_heads, batch), how many tiles a group's heads list of a sequence, and
#   listed_tiles   (batch, num_kv_heads, tiles_of_row), which
#   sinks          (num_heads,)


@triton.jit
def first_key_seen(seqlen_k, reach, visited):
    # tiles before it are skipped: they are in no part
    if reach is None or visited is not None:
        return 0
    else:
        return tl.maximum(seqlen_k - reach, 0)


@triton.jit
def row_slopes(
    alibi_slopes,
    stride_ab,
    stride_ah,
    sequence,
    heads,
    head_mask,
):
    # (BLOCK_M,) in base 2
    places = sequence.to(tl.int64) * stride_ab + heads * stride_ah
    slopes = tl.load(alibi_slopes + places, mask=head_mask, other=0.0)
    return slopes * 1.4426950408889634  # log2(e)


@triton.jit
def live_keys(keys, seqlen_k, reach):
    # Whether a query sees them: no others are read.
    if reach is None:
        return keys < seqlen_k
    else:
        return (keys < seqlen_k) & (keys >= seqlen_k - reach)


@triton.jit
def modified_scores(
    qk,
    keys,
    seqlen_k,
    softcap_log2,
    slopes_log2,
    states,
    KEY_AXIS: tl.constexpr,
):
    # Scores in base 2 capped, then lowered by their distance, then hidden before their windows.
    if softcap_log2 is not None:
        qk = soft_capped(qk, 1.0, softcap_log2)
    distance = tl.expand_dims(seqlen_k - 1 - keys, 1 - KEY_AXIS)
    if slopes_log2 is not None:
        qk -= tl.expand_dims(slopes_log2, KEY_AXIS) * distance.to(tl.float32)
    # and in blocks that a row's head does not list
    qk = tl.where(states > 0, qk, float("-inf"))
    return qk


@triton.jit
def row_sinks(sinks, heads, counts):
    # (BLOCK_M,) in base 2; a sink that does not count is -inf
    return (
        tl.load(sinks + heads, mask=counts, other=float("-inf")).to(tl.float32) * 1.4426950408889634
    )


@triton.jit
def add_sinks(acc, m_i, l_i, sinks_log2):
    # as if each row had seen one more key, of this score and a v of zeros
    weights, m_i, alpha = online_softmax(sinks_log2[:, None], m_i, 1)
    return acc * alpha[:, None], m_i, l_i * alpha + tl.sum(weights, 1)


@triton.jit
def attend(
    q_rows,
    k_head,
    v_head,
    stride_ks,
    stride_vs,
    seqlen_k,
    reach,
    softcap_log2,
    slopes_log2,
    blocks,
    MASK_BLOCK_K: tl.constexpr,
    tile_start,
    tile_end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):
    # Keys of tiles tile_start to tile_end: acc (BLOCK_M, BLOCK_D) not yet divided by l_i, the
    # maximum m_i in base 2 and the sum l_i, both (BLOCK_M,). q_rows is (BLOCK_M, BLOCK_D).
    offs_n = tl.arange(0, BLOCK_N)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # one tile ahead, and no more: what a loop hands on twice keeps it from loading K and V ahead
    next_tile = listed_tile(blocks, tile_start, tile_end)
    next_states = states_of_tile(blocks, next_tile, seqlen_k, 1, BLOCK_N, MASK_BLOCK_K)
    for tile in tl.range(tile_start, tile_end):
        place = tile + 1
        tile = next_tile
        states = next_states
        next_tile = listed_tile(blocks, place, tile_end)
        next_states = states_of_tile(blocks, next_tile, seqlen_k, 1, BLOCK_N, MASK_BLOCK_K)
        keys = tile * BLOCK_N + offs_n
        live = live_keys(keys, seqlen_k, reach)
        live = within_blocks(live, states, 1, BLOCK_N, MASK_BLOCK_K)
        k_offsets = keys.to(tl.int64) * stride_ks
        if SAME_STRIDES:
            v_offsets = k_offsets
        else:
            v_offsets = keys.to(tl.int64) * stride_vs
        k = load_keys(k_head, k_offsets, live, HEAD_DIM, BLOCK_D)
        qk = tl.dot(q_rows, k.T, input_precision="ieee") * scale_log2
        qk = modified_scores(
            qk,
            keys,
            seqlen_k,
            softcap_log2,
            slopes_log2,
            states,
            1,
        )
        qk = tl.where(live[None, :], qk, float("-inf"))
        p, m_i, alpha = online_softmax(qk, m_i, 1)
        v = load_keys(v_head, v_offsets, live, HEAD_DIM, BLOCK_D)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")
    return acc, m_i, l_i


@triton.jit
def attend_swapped(
    q_columns,
    k_head,
    v_head,
    stride_ks,
    stride_vs,
    seqlen_k,
    reach,
    softcap_log2,
    slopes_log2,
    blocks,
    MASK_BLOCK_K: tl.constexpr,
    tile_start,
    tile_end,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
):
    # What `attend` gives, from K q and V^T p: keys and channels fill the 64 rows that a warp
    # group's product needs, and the few query heads are its columns. q_columns is
    # (BLOCK_D, BLOCK_M).
    offs_n = tl.arange(0, BLOCK_N)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)  # added up across keys once, at the end
    acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    # one tile ahead, and no more: what a loop hands on twice keeps it from loading K and V ahead
    next_tile = listed_tile(blocks, tile_start, tile_end)
    next_states = states_of_tile(blocks, next_tile, seqlen_k, 0, BLOCK_N, MASK_BLOCK_K)
    for tile in tl.range(tile_start, tile_end):
        place = tile + 1
        tile = next_tile
        states = next_states
        next_tile = listed_tile(blocks, place, tile_end)
        next_states = states_of_tile(blocks, next_tile, seqlen_k, 0, BLOCK_N, MASK_BLOCK_K)
        keys = tile * BLOCK_N + offs_n
        live = live_keys(keys, seqlen_k, reach)
        live = within_blocks(live, states, 0, BLOCK_N, MASK_BLOCK_K)
        k_offsets = keys.to(tl.int64) * stride_ks
        if SAME_STRIDES:
            v_offsets = k_offsets
        else:
            v_offsets = keys.to(tl.int64) * stride_vs
        k = load_keys(k_head, k_offsets, live, HEAD_DIM, BLOCK_D)
        qk = tl.dot(k, q_columns, input_precision="ieee") * scale_log2
        qk = modified_scores(
            qk,
            keys,
            seqlen_k,
            softcap_log2,
            slopes_log2,
            states,
            0,
        )
        qk = tl.where(live[:, None], qk, float("-inf"))
        p, m_i, alpha = online_softmax(qk, m_i, 0)
        v = load_keys(v_head, v_offsets, live, HEAD_DIM, BLOCK_D)
        sums = sums * alpha[None, :] + p
        acc = tl.dot(v.T, p.to(v.dtype), acc * alpha[None, :], input_precision="ieee")
    return acc.T, m_i, tl.sum(sums, 0)


@triton.jit
def batch_tiles(
    tile_counts,
    batch,
    num_splits,
    BATCH_BLOCK: tl.constexpr,
):
    # "group": the tiles listed of every sequence (BATCH_BLOCK,), of all, and of one share.
    sequences = tl.arange(0, BATCH_BLOCK)
    tiles = tl.load(tile_counts + sequences, mask=sequences < batch, other=0)
    total = tl.sum(tiles, 0)
    return tiles, total, (total + num_splits - 1) // num_splits


@triton.jit
def tiles_before(tiles, sequence, BATCH_BLOCK: tl.constexpr):
    return tl.sum(tl.where(tl.arange(0, BATCH_BLOCK) < sequence, tiles, 0), 0)


@triton.jit
def partial_slot(part, first, SCHEDULE: tl.constexpr):
    # Where part `part` of a sequence is kept. "group": a share touches at most two cut sequences,
    # the one it goes on with (even slots) and the one it begins (odd); `first` is the share in
    # which the sequence begins.
    if SCHEDULE == "group":
        return tl.where(part == 0, 2 * first + 1, 2 * (first + part))
    else:
        return first + part


@triton.jit
def store_rows(
    out,
    lse,
    out_rows,
    lse_log2,
    sequence,
    heads,
    head_mask,
    num_heads,
    stride_ob,
    stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    # The final rows (heads, BLOCK_D) of one sequence.
    offs_d = tl.arange(0, BLOCK_D)
    rows = sequence.to(tl.int64) * stride_ob + heads.to(tl.int64) * stride_oh
    tl.store(
        out + rows[:, None] + offs_d[None, :],
        out_rows.to(out.dtype.element_ty),
        mask=head_mask[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    if lse is not None:
        lse_row = lse + sequence.to(tl.int64) * num_heads
        tl.store(lse_row + heads, lse_log2 * LN2, mask=head_mask)


@triton.jit
def store_partial(
    out_partial,
    lse_partial,
    out_rows,
    lse_log2,
    slot,
    heads,
    head_mask,
    num_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    offs_d = tl.arange(0, BLOCK_D)
    rows = slot.to(tl.int64) * num_heads + heads
    tl.store(
        out_partial + rows[:, None] * HEAD_DIM + offs_d[None, :],
        out_rows,
        mask=head_mask[:, None] & (offs_d < HEAD_DIM)[None, :],
    )
    tl.store(lse_partial + rows, lse_log2, mask=head_mask)


# Counts are not specialised, so that shapes share one compiled kernel. Strides must be: without
# their divisibility by 16 the loads of K and V are not vectors and the kernel takes twice as long.
@triton.jit(
    do_not_specialize=[
        "batch",
        "num_heads",
        "num_kv_heads",
        "num_splits",
        "max_pages",
        "table_width",
        "reach",
        "visited",
        "stride_ab",
        "stride_ah",
        "blocks_of_row",
        "tiles_of_row",
    ]
)
def decode(
    reach,
    visited,
    softcap_log2,
    alibi_slopes,
    stride_ab,
    stride_ah,
    sinks,
    states,
    tile_counts,
    listed_tiles,
    blocks_of_row,
    tiles_of_row,
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    out,
    lse,
    out_partial,
    lse_partial,
    scale_log2,
    batch,
    num_heads,
    num_kv_heads,
    num_splits,
    stride_qb,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_vb,
    stride_vs,
    stride_vh,
    stride_ob,
    stride_oh,
    stride_lb,
    GROUP_SIZE: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    BATCH_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SAME_STRIDES: tl.constexpr,
    SCHEDULE: tl.constexpr,
    SWAP: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
    LISTED_HEADS: tl.constexpr,
    MASK_BLOCK_K: tl.constexpr,
):
    if DEPENDENT_LAUNCH:
        # wait first, then trigger: who comes next reads lengths before it waits itself
        gdc_wait()
        gdc_launch_dependents()
    program = tl.program_id(0)
    head_blocks = num_kv_heads * ROW_BLOCKS
    if SCHEDULE == "group":
        split = program // head_blocks
        head_block = program % head_blocks  # neighbours read the same pages
        own_counts = tile_counts + head_block // ROW_BLOCKS * batch
        tiles, total, share = batch_tiles(own_counts, batch, num_splits, BATCH_BLOCK)
        position = split * share
        end = tl.minimum(position + share, total)
        sequence = tl.sum((tl.cumsum(tiles, 0) <= position).to(tl.int32), 0)
        sequence_start = tiles_before(tiles, sequence, BATCH_BLOCK)
    else:
        split = program % num_splits
        head_block = program // num_splits % head_blocks
        sequence = program // num_splits // head_blocks
        position = 0
        end = 1
    kv_head = head_block // ROW_BLOCKS
    offs_m = head_block % ROW_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    head_mask = offs_m < GROUP_SIZE
    heads = kv_head * GROUP_SIZE + offs_m
    offs_d = tl.arange(0, BLOCK_D)
    while position < end:
        seqlen_k = tl.load(cache_seqlens + sequence.to(tl.int64) * stride_lb).to(tl.int32)
        sequence_tiles = tl.load(tile_counts + kv_head * batch + sequence)
        if SCHEDULE == "group":
            tile_start = position - sequence_start
            tile_end = tl.minimum(sequence_tiles, tile_start + end - position)
            first = sequence_start // share
            part = split - first
            parts = (sequence_start + sequence_tiles - 1) // share - first + 1
        else:
            run = (sequence_tiles + num_splits - 1) // num_splits
            tile_start = split * run
            tile_end = tl.minimum(sequence_tiles, tile_start + run)
            first = sequence * num_splits
            part = split
            parts = (sequence_tiles + run - 1) // run
        if tile_start < tile_end:
            skipped = first_key_seen(seqlen_k, reach, visited) // BLOCK_N
            slopes_log2 = None
            if alibi_slopes is not None:
                slopes_log2 = row_slopes(
                    alibi_slopes, stride_ab, stride_ah, sequence, heads, head_mask
                )
            q_row = q + sequence.to(tl.int64) * stride_qb
            q_heads = heads.to(tl.int64) * stride_qh
            lists = states, listed_tiles, blocks_of_row, tiles_of_row
            place = sequence * num_kv_heads + kv_head
            blocks = blocks_of_step(lists, place, heads, head_mask, LISTED_HEADS)
            k_head = k_cache + kv_head.to(tl.int64) * stride_kh
            v_head = v_cache + kv_head.to(tl.int64) * stride_vh
            k_head += sequence.to(tl.int64) * stride_kb
            v_head += sequence.to(tl.int64) * stride_vb
            if SWAP:
                q_columns = tl.load(
                    q_row + q_heads[None, :] + offs_d[:, None],
                    mask=head_mask[None, :] & (offs_d < HEAD_DIM)[:, None],
                    other=0.0,
                )  # (BLOCK_D, BLOCK_M)
                acc, m_i, l_i = attend_swapped(
                    q_columns,
                    k_head,
                    v_head,
                    stride_ks,
                    stride_vs,
                    seqlen_k,
                    reach,
                    softcap_log2,
                    slopes_log2,
                    blocks,
                    MASK_BLOCK_K,
                    tile_start + skipped,
                    tile_end + skipped,
                    scale_log2,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_M,
                    BLOCK_N,
                    SAME_STRIDES,
                )
            else:
                q_rows = tl.load(
                    q_row + q_heads[:, None] + offs_d[None, :],
                    mask=head_mask[:, None] & (offs_d < HEAD_DIM)[None, :],
                    other=0.0,
                )  # (BLOCK_M, BLOCK_D)
                acc, m_i, l_i = attend(
                    q_rows,
                    k_head,
                    v_head,
                    stride_ks,
                    stride_vs,
                    seqlen_k,
                    reach,
                    softcap_log2,
                    slopes_log2,
                    blocks,
                    MASK_BLOCK_K,
                    tile_start + skipped,
                    tile_end + skipped,
                    scale_log2,
                    HEAD_DIM,
                    BLOCK_D,
                    BLOCK_M,
                    BLOCK_N,
                    SAME_STRIDES,
                )
            if sinks is not None:
                # a sequence in parts has its sinks where they are merged
                counts = head_mask & (parts == 1)
                acc, m_i, l_i = add_sinks(acc, m_i, l_i, row_sinks(sinks, heads, counts))
            out_rows = acc * tl.where(l_i > 0, 1.0 / l_i, 0.0)[:, None]
            lse_log2 = tl.where(l_i > 0, m_i + tl.math.log2(l_i), float("-inf"))
            if parts == 1:
                store_rows(
                    out,
                    lse,
                    out_rows,
                    lse_log2,
                    sequence,
                    heads,
                    head_mask,
                    num_heads,
                    stride_ob,
                    stride_oh,
                    HEAD_DIM,
                    BLOCK_D,
                )
            else:
                store_partial(
                    out_partial,
                    lse_partial,
                    out_rows,
                    lse_log2,
                    partial_slot(part, first, SCHEDULE),
                    heads,
                    head_mask,
                    num_heads,
                    HEAD_DIM,
                    BLOCK_D,
                )
        if SCHEDULE == "group":
            position += tile_end - tile_start
            sequence_start += sequence_tiles
            sequence += 1
        else:
            position += 1


@triton.jit(do_not_specialize=["group_size", "batch", "num_heads", "num_splits"])
def combine(
    tile_counts,
    group_size,
    sinks,
    out,
    lse,
    out_partial,
    lse_partial,
    cache_seqlens,
    batch,
    num_heads,
    num_splits,
    stride_ob,
    stride_oh,
    stride_lb,
    BATCH_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_S: tl.constexpr,
    SCHEDULE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):
    # One program per (sequence, query head) merges its partial results, BLOCK_S at a time. The
    # split is found again from the length, exactly as `decode` found it. A sequence with one part
    # is done already.
    program = tl.program_id(0)
    sequence = program // num_heads
    head = program % num_heads
    counts = tile_counts + head // group_size * batch  # of what decode() read of each sequence
    sequence_tiles = tl.load(counts + sequence)
    if SCHEDULE == "group":
        tiles, _, share = batch_tiles(counts, batch, num_splits, BATCH_BLOCK)
        sequence_start = tiles_before(tiles, sequence, BATCH_BLOCK)
        first = sequence_start // share
        parts = (sequence_start + sequence_tiles - 1) // share - first + 1
    else:
        run = (sequence_tiles + num_splits - 1) // num_splits
        first = sequence * num_splits
        parts = (sequence_tiles + run - 1) // run
    if DEPENDENT_LAUNCH:
        # Lengths are older than `decode`, which waited before it triggered this kernel: only the
        # partial results must be waited for.
        gdc_wait()
        gdc_launch_dependents()
    if parts > 1:
        offs_d = tl.arange(0, BLOCK_D)
        m_i = float("-inf")
        l_i = 0.0
        if sinks is not None:
            # as if one part had seen one key, of this score and a v of zeros
            m_i = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634  # log2(e)
            l_i = 1.0
        acc = tl.zeros([BLOCK_D], tl.float32)
        for chunk in tl.range(0, parts, BLOCK_S, num_stages=1):
            part = chunk + tl.arange(0, BLOCK_S)
            rows = partial_slot(part, first, SCHEDULE).to(tl.int64) * num_heads + head
            inside = part < parts
            part_lse = tl.load(lse_partial + rows, mask=inside, other=float("-inf"))
            part_out = tl.load(
                out_partial + rows[:, None] * HEAD_DIM + offs_d[None, :],
                mask=inside[:, None] & (offs_d < HEAD_DIM)[None, :],
                other=0.0,
            )  # (BLOCK_S, BLOCK_D)
            weights, m_i, alpha = online_softmax(part_lse, m_i, 0)
            l_i = l_i * alpha + tl.sum(weights, 0)
            acc = acc * alpha + tl.sum(part_out * weights[:, None], 0)
        row = sequence.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
        merged = acc * tl.where(l_i > 0, 1.0 / l_i, 0.0)
        tl.store(out + row + offs_d, merged.to(out.dtype.element_ty), mask=offs_d < HEAD_DIM)
        if lse is not None:
            lse_log2 = tl.where(l_i > 0, m_i + tl.math.log2(l_i), float("-inf"))
            tl.store(lse + sequence.to(tl.int64) * num_heads + head, lse_log2 * LN2)


def plan(
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    block_table,
    out,
    lse,
    softmax_scale,
    kv_layout,
    max_seqlen_k,
    num_sms,
    knobs,
    new_workspace,
):
    """What to launch, in order: (kernel, grid, arguments, options). Reads no device memory.

    `max_seqlen_k` only decides how many splits there are; a longer sequence is right, and slower.
    """
    batch, _, num_heads, head_dim = q.shape
    token_axis, head_axis = (1, 2) if kv_layout == "nhd" else (2, 1)
    num_kv_heads = k_cache.shape[head_axis]
    group_size = num_heads // num_kv_heads
    block_n, schedule = knobs["BLOCK_N"], knobs["SCHEDULE"]
    block_d = triton.next_power_of_2(head_dim)
    # at least the 16 rows tl.dot needs; at most what leaves the accumulator in registers
    block_m = max(
        16, min(triton.next_power_of_2(group_size), 128, 16384 // (block_d * q.element_size()))
    )
    row_blocks = triton.cdiv(group_size, block_m)
    dependent = knobs["DEPENDENT_LAUNCH"] if q.device.type != "cpu" else 0  # not interpreted

    head_blocks = num_kv_heads * row_blocks
    tiles = max(1, triton.cdiv(max_seqlen_k, block_n))
    programs = num_sms * knobs["PROGRAMS_PER_SM"]
    if schedule == "group":
        num_splits = max(1, min(batch * tiles, programs // head_blocks))
        grid = (num_splits * head_blocks,)
        slots = 2 * num_splits
        # few sizes, so that batches share compiled kernels
        batch_block = next(size for size in (8, 128, 1024) if size >= batch)
    else:
        num_splits = max(1, min(tiles, programs // (batch * head_blocks)))
        grid = (num_splits * batch * head_blocks,)
        slots = batch * num_splits if num_splits > 1 else 0
        batch_block = 1
    out_partial = new_workspace((slots, num_heads, head_dim), torch.float32)
    lse_partial = new_workspace((slots, num_heads), torch.float32)

    options = {"num_warps": knobs["num_warps"], "num_stages": knobs["num_stages"]}
    combine_options = {"num_warps": knobs["COMBINE_WARPS"]}
    if dependent:
        options["launch_pdl"] = combine_options["launch_pdl"] = True
    arguments = (
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        out,
        lse,
        out_partial,
        lse_partial,
        softmax_scale * 1.4426950408889634,  # log2(e): exp2 is one instruction
        batch,
        num_heads,
        num_kv_heads,
        num_splits,
        q.stride(0),
        q.stride(2),
        k_cache.stride(0),
        k_cache.stride(token_axis),
        k_cache.stride(head_axis),
        v_cache.stride(0),
        v_cache.stride(token_axis),
        v_cache.stride(head_axis),
        out.stride(0),
        out.stride(2),
        cache_seqlens.stride(0),
        group_size,
        row_blocks,
        batch_block,
        head_dim,
        block_d,
        block_m,
        block_n,
        k_cache.stride() == v_cache.stride(),  # the usual case: addresses are worked out once
        schedule,
        knobs["SWAP"],
        dependent,
    )
    launches = [(decode, grid, arguments, options)]
    if slots == 0:
        return launches
    combine_arguments = (
        out,
        lse,
        out_partial,
        lse_partial,
        cache_seqlens,
        batch,
        num_heads,
        num_splits,
        out.stride(0),
        out.stride(2),
        cache_seqlens.stride(0),
        batch_block,
        head_dim,
        block_d,
        block_n,
        # a thread holds 32 values of a chunk
        1024 * knobs["COMBINE_WARPS"] // block_d,
        schedule,
        dependent,
    )
    return [*launches, (combine, (batch * num_heads,), combine_arguments, combine_options)]


def plan_modified(
    modifiers,
    q,
    k_cache,
    v_cache,
    cache_seqlens,
    block_table,
    out,
    lse,
    softmax_scale,
    kv_layout,
    max_seqlen_k,
    num_sms,
    knobs,
    new_workspace,
):
    """The launches of kernels that take `modifiers` beside what plan() is given.

    Of `modifiers` are read `window` (left, right), whose left is -1 where it is unbounded,
    `softcap`, 0.0 off, `alibi_slopes` (batch, num_heads) of any strides, `sinks` (num_heads,) and
    `page_positions`, which of its sequence's pages each entry of the block table is, None off.
    `block_mask` has the lists of blocks, with a stride for each sequence and head.
    """
    slopes, sinks, reach = modifiers.alibi_slopes, modifiers.sinks, None
    positions, visited = modifiers.page_positions, None
    if positions is not None:
        visited = max_seqlen_k = positions.shape[1] * k_cache.shape[1 if kv_layout == "nhd" else 2]
    if modifiers.window[0] >= 0:
        reach = min(modifiers.window[0] + q.shape[1], 2**31 - 1)
        # of the tiles that so many keys touch, which may begin and end inside of one
        block_n = knobs["BLOCK_N"]
        touched = (triton.cdiv(reach - 1, block_n) + 1) * block_n
        max_seqlen_k = min(max_seqlen_k, touched) if visited is None else visited
    plain = plan(
        q,
        k_cache,
        v_cache,
        cache_seqlens,
        block_table,
        out,
        lse,
        softmax_scale,
        kv_layout,
        max_seqlen_k,
        num_sms,
        knobs,
        new_workspace,
    )
    listing, lists, sizes = plan_listing(
        modifiers.block_mask,
        q.shape[2],
        k_cache,
        cache_seqlens,
        block_table,
        kv_layout,
        knobs,
        new_workspace,
    )
    own = (
        reach,
        visited,
        modifiers.softcap * 1.4426950408889634 or None,  # log2(e)
        slopes,
        *((None, None) if slopes is None else slopes.stride()),
        sinks,
        *lists,
    )
    (kernel, grid, arguments, options), *rest = plain
    group_size = q.shape[2] // k_cache.shape[2 if kv_layout == "nhd" else 1]
    combined = [
        (combine, rows, (lists[1], group_size, sinks, *others), combine_options)
        for _, rows, others, combine_options in rest
    ]
    return [listing, (kernel, grid, (*own, *arguments, *sizes), options), *combined]
