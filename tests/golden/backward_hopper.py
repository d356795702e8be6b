# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false, reportArgumentType=false, reportAssignmentType=false
# pyright: reportGeneralTypeIssues=false, reportInvalidTypeForm=false
import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.core import _aggregate as aggregate


from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


# triton 3.6 calls them copies, later versions loads and stores
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# Backward of prefill attention on Hopper: dq, dk and dv for a dout, scores computed again from lse.
#
#   p = exp(scale * q k^T - lse)      dv = p^T dout
#   ds = p (dout v^T - delta)         dk = scale * ds^T q      dq = scale * ds k
#
# In each program one warp, the producer, has the tensor memory accelerator load tiles, and two
# warpgroups, the consumers, multiply and sum.
#
# Programs of a launch start while the last ones of the launch before still run, and wait for them
# where they read what those write. What dq alone needs is complete before dk and dv begin.
#
# Symbols
#   i, j          query row, key column; the query sits at position i + seqlen_k - seqlen_q
#   q, out        (batch, num_heads, seqlen_q, HEAD_DIM), in any order of the first three, as dout
#                 and dq
#   k, v          (batch, num_kv_heads, seqlen_k, HEAD_DIM), as dk and dv; each with own strides
#   lse, dlse     (batch, num_heads, seqlen_q) fp32, natural logarithm, and its gradient or None
#   delta         rowsum(dout * out) - dlse
#   lse_rows, delta_rows   (batch * num_heads, padded_q) fp32 workspaces: what the consumers begin
#                 with, lse * log2(e) and delta, or with BIAS -lse / scale and -delta. Rows past
#                 seqlen_q are as rows that see no key: their p is 0, and their delta
#   diagonal      seqlen_k - seqlen_q, the position of the first query
#   head          batch * num_heads + query head, counted flat; kv alike of the KV heads
#   step          tiles that a program has gone through; of a group's heads one after the other
#   qk, p, dp, ds (keys, queries) in the kernel of dk and dv, (queries, keys) in that of dq
#   stride_xb, stride_xh, stride_xs   elements between sequences, heads, tokens of tensor x
#
# Tunable
#   KV_BLOCK_M    queries of a step of dk and dv. A program has 128 keys, 64 of each warpgroup; of
#                 256 channels it has 64 keys, one warpgroup sums dk and the other dv
#   KV_BIAS       sums of q k^T begin at -lse / scale, those of dout v^T at -delta
#   KV_VOLATILE, Q_VOLATILE   exponentials stay before the wait for the next product
#   Q_BLOCK_N     keys of a step of dq. A program has 128 queries, 64 of each warpgroup
#   Q_K_STAGES, Q_V_STAGES   tiles of K and of V in flight there
#   Q_PREFETCH    a step's product with K waits for the next step, whose exponentials hide it
# Given by the problem
#   HEAD_DIM      channels; BLOCK_D the power of two that holds them
#   RAGGED_K      the last tile of keys reaches past seqlen_k, and no diagonal hides what lies there
#   GROUPED       several query heads share a KV head


@aggregate
class Work:
    """What a launch computes: the same for every program and warpgroup."""

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    diagonal: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor
    padded_q: gl.tensor
    softmax_scale: gl.tensor
    scale_log2: gl.tensor
    HEAD_DIM: gl.constexpr
    RAGGED_K: gl.constexpr
    GROUPED: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        seqlen_q,
        seqlen_k,
        diagonal,
        num_heads,
        group_size,
        padded_q,
        softmax_scale,
        scale_log2,
        HEAD_DIM,
        RAGGED_K,
        GROUPED,
    ):
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.diagonal = diagonal
        self.num_heads = num_heads
        self.group_size = group_size
        self.padded_q = padded_q
        self.softmax_scale = softmax_scale
        self.scale_log2 = scale_log2
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.RAGGED_K = gl.constexpr(RAGGED_K)
        self.GROUPED = gl.constexpr(GROUPED)


@gluon.jit
def heads_of_group(work):
    """How many query heads share a KV head; known when compiling where it is one."""
    if work.GROUPED:
        return work.group_size
    else:
        return 1


@aggregate
class Target:
    """Where one head's rows of a result go."""

    pointer: gl.tensor
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_s: gl.tensor

    @gluon.constexpr_function
    def __init__(self, pointer, stride_b, stride_h, stride_s):
        self.pointer = pointer
        self.stride_b = stride_b
        self.stride_h = stride_h
        self.stride_s = stride_s


@gluon.jit
def store_rows(
    target,
    acc,
    tile,
    batch,
    head,
    start,
    seqlen,
    HEAD_DIM: gl.constexpr,
):
    """Write a warpgroup's 64 rows from token `start` on, those below `seqlen`.

    They go through `tile` of shared memory, which nobody reads any more: 16 bytes are stored at a
    time.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BLOCK_D: gl.constexpr = acc.shape[1]
    tile.store(acc.to(tile.dtype))
    rows = tile.load(LAYOUT)
    offs_s = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    first = batch.to(gl.int64) * target.stride_b + head.to(gl.int64) * target.stride_h
    inside = (offs_s < seqlen)[:, None]
    if HEAD_DIM != BLOCK_D:
        inside = inside & (offs_d < HEAD_DIM)[None, :]
    of_rows = offs_s.to(gl.int64) * target.stride_s
    gl.store(target.pointer + first + (of_rows[:, None] + offs_d[None, :]), rows, mask=inside)


@gluon.constexpr_function
def shift_of(depth):
    """The power of two that the depth is; -1 if it is none."""
    return depth.bit_length() - 1 if depth & (depth - 1) == 0 else -1


@aggregate
class Ring:
    """Slots of shared memory that are filled and emptied in turn.

    Slot number `step` % DEPTH holds the step's tile between the two barriers of the slot: `full`,
    on which what fills it arrives, and `empty`, on which those who read it do.
    """

    slots: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    DEPTH: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, slots, full, empty, DEPTH):
        self.slots = slots
        self.full = full
        self.empty = empty
        self.DEPTH = gl.constexpr(DEPTH)

    @gluon.jit
    def slot(self, step):
        # a power of two without the instructions of a signed remainder
        if shift_of(self.DEPTH) >= 0:
            return step & (self.DEPTH - 1)
        else:
            return step % self.DEPTH

    @gluon.jit
    def phase(self, step):
        if shift_of(self.DEPTH) >= 0:
            return (step >> shift_of(self.DEPTH)) & 1
        else:
            return (step // self.DEPTH) & 1

    @gluon.jit
    def wait_full(self, step):
        mbarrier.wait(self.full.index(self.slot(step)), self.phase(step))

    @gluon.jit
    def wait_empty(self, step):
        # in the first round all slots are empty: the phase before the first counts as completed
        mbarrier.wait(self.empty.index(self.slot(step)), self.phase(step) ^ 1)

    @gluon.jit
    def release(self, step):
        mbarrier.arrive(self.empty.index(self.slot(step)), count=1)


@gluon.jit
def new_ring(
    DTYPE: gl.constexpr,
    TILE: gl.constexpr,
    TILES_PER_SLOT: gl.constexpr,
    LAYOUT: gl.constexpr,
    DEPTH: gl.constexpr,
    WRITERS: gl.constexpr,
    READERS: gl.constexpr,
):
    """A ring of DEPTH empty slots, each of TILES_PER_SLOT tiles."""
    slots = gl.allocate_shared_memory(DTYPE, slots_shape(DEPTH * TILES_PER_SLOT, TILE), LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(DEPTH):
        mbarrier.init(full.index(slot), count=WRITERS)
        mbarrier.init(empty.index(slot), count=READERS)
    return Ring(slots, full, empty, DEPTH)


@gluon.constexpr_function
def slots_shape(slots, tile):
    return [slots, *tile]


@gluon.jit
def new_barrier():
    """A barrier on which one load arrives."""
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    return barrier


@gluon.jit
def opaque_zero(step):
    """Zero, of which neither LLVM nor the assembler knows. As an index of a tile it keeps them from
    holding the tile's descriptors in registers all through a loop."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 30;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def exponentials(
    x,
    VOLATILE: gl.constexpr,
):
    """2 ** x. VOLATILE: the compiler cannot move them behind the next wait."""
    if VOLATILE:
        return gl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=False, pack=1
        )
    else:
        return gl.exp2(x)


@gluon.jit
def tile_of(
    slots,
    i,
):
    """Tile number i of the slots, as a matrix."""
    SHAPE: gl.constexpr = slots.shape
    return slots.index(i).reshape([SHAPE[3], SHAPE[4]])


@gluon.jit(do_not_specialize=["num_heads", "seqlen_q", "padded_q"])
def statistics_kernel(
    out,
    dout,
    lse,
    dlse,
    lse_rows,
    delta_rows,
    lse_factor,
    delta_factor,
    stride_ob: gl.int64,
    stride_oh: gl.int64,
    stride_os: gl.int64,
    stride_gb: gl.int64,
    stride_gh: gl.int64,
    stride_gs: gl.int64,
    num_heads,
    seqlen_q,
    padded_q,
    ROWS: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """What the consumers begin with, for ROWS rows of one head."""
    gdc_launch_dependents()
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    blocks = padded_q // ROWS
    head = gl.program_id(0) // blocks
    start = gl.program_id(0) % blocks * ROWS
    batch = (head // num_heads).to(gl.int64)
    q_head = (head % num_heads).to(gl.int64)
    offs_m = start + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    inside = (offs_m < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    rows = offs_m.to(gl.int64)
    of_out = batch * stride_ob + q_head * stride_oh + (rows * stride_os)[:, None] + offs_d[None, :]
    of_dout = batch * stride_gb + q_head * stride_gh + (rows * stride_gs)[:, None] + offs_d[None, :]
    out_tile = gl.load(out + of_out, mask=inside, other=0.0).to(gl.float32)
    dout_tile = gl.load(dout + of_dout, mask=inside, other=0.0).to(gl.float32)
    delta = gl.sum(out_tile * dout_tile, 1)
    place = head.to(gl.int64) * seqlen_q + rows
    logarithm = gl.load(lse + place, mask=offs_m < seqlen_q, other=float("-inf"))
    if dlse is not None:
        delta -= gl.load(dlse + place, mask=offs_m < seqlen_q, other=0.0)
    empty = logarithm == float("-inf")  # sees no key
    place = head.to(gl.int64) * padded_q + rows
    begin = gl.where(empty, float("inf"), logarithm) * lse_factor
    gl.store(lse_rows + place, begin)
    gl.store(delta_rows + place, gl.where(empty, 0.0, delta) * delta_factor)


@gluon.jit
def query_range(
    work,
    start_n,
    KEYS: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """(first row, tiles): the queries that see any of KEYS keys from `start_n` on."""
    tiles = (work.seqlen_q + BLOCK_M - 1) // BLOCK_M
    return start_n * 0, tiles


@gluon.jit
def produce_queries(
    work,
    rings,
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    kv_head,
    start_n,
    stagger,
    KEY_TILES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    TOGETHER: gl.constexpr,
):
    """The producer warp of dk and dv: K and V once, then what each step multiplies with them.

    Full attention may begin at tile number `stagger`, so that programs do not read the same.
    TOGETHER: who releases a tile of q has read that of dout too.
    """
    KEYS: gl.constexpr = KEY_TILES * 64
    start_m, tiles = query_range(work, start_n, KEYS, BLOCK_M)
    num_kv_heads = work.num_heads // work.group_size
    batch = kv_head // num_kv_heads
    kv_of_batch = kv_head % num_kv_heads
    mbarrier.expect(rings.k_full, KEY_TILES * k_desc.block_type.nbytes)
    for w in gl.static_range(KEY_TILES):
        at = [batch, kv_of_batch, start_n + w * 64, 0]
        tma_load(k_desc, at, rings.k_full, rings.k.index(w))
    step = 0
    for g in range(heads_of_group(work)):
        head = kv_of_batch * work.group_size + g
        rows = (batch * work.num_heads + head) * work.padded_q
        for j in range(tiles):
            offs = (j + stagger) % tiles * BLOCK_M
            slot = rings.q.slot(step)
            rings.q.wait_empty(step)
            full = rings.q.full.index(slot)
            mbarrier.expect(full, q_desc.block_type.nbytes + BLOCK_M * 4)
            tma_load(q_desc, [batch, head, offs, 0], full, rings.q.slots.index(slot))
            tma_load(lse_desc, [rows + offs], full, rings.lse.index(slot))
            if step == 0:
                mbarrier.expect(rings.v_full, KEY_TILES * v_desc.block_type.nbytes)
                for w in gl.static_range(KEY_TILES):
                    at = [batch, kv_of_batch, start_n + w * 64, 0]
                    tma_load(v_desc, at, rings.v_full, rings.v.index(w))
            slot = rings.dout.slot(step)
            if not TOGETHER:
                rings.dout.wait_empty(step)
            full = rings.dout.full.index(slot)
            mbarrier.expect(full, dout_desc.block_type.nbytes + BLOCK_M * 4)
            tma_load(dout_desc, [batch, head, offs, 0], full, rings.dout.slots.index(slot))
            tma_load(delta_desc, [rows + offs], full, rings.delta.index(slot))
            step += 1


@aggregate
class KeyRings:
    """What a program of dk and dv shares: its tiles of K and V, and the tiles of queries.

    The rows of lse and delta come and go with the tiles of q and of dout.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor
    q: Ring
    dout: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    handed: gl.base_value  # a ring, or None where nothing is handed over

    @gluon.constexpr_function
    def __init__(self, k, v, k_full, v_full, q, dout, lse, delta, handed):
        self.k = k
        self.v = v
        self.k_full = k_full
        self.v_full = v_full
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.handed = gl.constexpr(None) if handed is None else handed


@gluon.jit
def own_tile(
    tiles,
    step,
    W: gl.constexpr,
):
    """Warpgroup W's tile of K or of V."""
    # of 64 channels there are products of 128 queries, which leave fewer registers
    if tiles.shape[4] == 64:
        return tile_of(tiles, W + opaque_zero(step))
    else:
        return tile_of(tiles, W)


@gluon.jit
def product_of_queries(
    a_tile,
    queries,
    row,
    LAYOUT: gl.constexpr,
    BIAS: gl.constexpr,
):
    """K q^T or V dout^T (keys, queries) in flight, begun with the row's numbers if BIAS."""
    BLOCK_M: gl.constexpr = queries.shape[0]
    zero = gl.zeros([64, BLOCK_M], gl.float32, LAYOUT)
    if BIAS:
        first, _ = gl.broadcast(row[None, :], zero)
        return warpgroup_mma(a_tile, queries.permute((1, 0)), first, is_async=True)
    else:
        return warpgroup_mma(a_tile, queries.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def hide_keys(
    work,
    x,
    start_n,
    start_m,
    BLOCK_M: gl.constexpr,
    EDGE: gl.constexpr,
):
    """Exponents of 64 keys from `start_n` on, -inf where the query does not see the key.

    Only an EDGE tile holds such beside those past seqlen_k.
    """
    LAYOUT: gl.constexpr = x.type.layout
    offs_n = start_n + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    if work.RAGGED_K:
        x = gl.where((offs_n < work.seqlen_k)[:, None], x, float("-inf"))
    return x


@gluon.jit
def add_queries(
    work,
    rings,
    dk,
    dv,
    step,
    start_n,
    start_m,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    VOLATILE: gl.constexpr,
    EDGE: gl.constexpr,
):
    """(dk, dv) of warpgroup W's 64 keys with what the step's queries add."""
    DTYPE: gl.constexpr = rings.k.dtype
    BLOCK_D: gl.constexpr = dk.shape[1]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    ROW: gl.constexpr = gl.SliceLayout(0, SCORES)
    rings.q.wait_full(step)
    q_tile = tile_of(rings.q.slots, rings.q.slot(step))
    lse = rings.lse.index(rings.q.slot(step)).load(ROW)
    own_k = own_tile(rings.k, step, W)
    qk_async = product_of_queries(own_k, q_tile, lse, SCORES, BIAS)
    rings.dout.wait_full(step)
    dout_tile = tile_of(rings.dout.slots, rings.dout.slot(step))
    own_v = own_tile(rings.v, step, W)
    if BIAS:
        begin = rings.delta.index(rings.dout.slot(step)).load(ROW)
    else:
        begin = lse  # unused; delta is loaded later, when there are registers for it
    dp_async = product_of_queries(own_v, dout_tile, begin, SCORES, BIAS)
    qk = warpgroup_mma_wait(1, deps=[qk_async])
    if BIAS:
        x = qk * work.scale_log2
    else:
        x = qk * work.scale_log2 - lse[None, :]
    x = hide_keys(work, x, start_n + W * 64, start_m, BLOCK_M, EDGE)
    p = exponentials(x, VOLATILE)
    p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
    # the branch of a wait keeps the assembler from waiting for dp before the exponentials
    if VOLATILE:
        rings.q.wait_full(step)
    if BIAS:
        dp = warpgroup_mma_wait(0, deps=[dp_async])
    else:
        delta = rings.delta.index(rings.dout.slot(step)).load(ROW)
        dp = warpgroup_mma_wait(0, deps=[dp_async]) - delta[None, :]
    ds = (p * dp).to(DTYPE)
    ds_operand = gl.convert_layout(ds, OPERAND)
    dv_async = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
    dk_async = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    dv, p_operand, dk, ds_operand = warpgroup_mma_wait(
        0, deps=[dv_async, p_operand, dk_async, ds_operand]
    )
    rings.q.release(step)
    return dk, dv


@gluon.jit
def skip_queries(
    rings,
    step,
):
    """A step whose queries see none of the warpgroup's keys."""
    rings.q.wait_full(step)
    rings.dout.wait_full(step)
    rings.q.release(step)


@gluon.jit
def consume_queries(
    work,
    rings,
    dk_target,
    dv_target,
    kv_head,
    start_n,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    VOLATILE: gl.constexpr,
):
    """Warpgroup W: dk and dv of 64 of the program's 128 keys."""
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dk = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    dv = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    start_m, tiles = query_range(work, start_n, 128, BLOCK_M)
    own_n = start_n + W * 64
    num_kv_heads = work.num_heads // work.group_size
    batch = kv_head // num_kv_heads
    kv_of_batch = kv_head % num_kv_heads
    mbarrier.wait(rings.k_full, 0)
    mbarrier.wait(rings.v_full, 0)
    step = 0
    for g in range(heads_of_group(work)):
        high = 0
        for j in range(high, tiles):
            dk, dv = add_queries(
                work,
                rings,
                dk,
                dv,
                step,
                start_n,
                start_m + j * BLOCK_M,
                W,
                BLOCK_M,
                BIAS,
                VOLATILE,
                False,
            )
            step += 1
    dk = dk * work.softmax_scale
    HEAD_DIM: gl.constexpr = work.HEAD_DIM
    own_v = tile_of(rings.v, W)  # K is read by both warpgroups, V by its own only
    store_rows(dv_target, dv, own_v, batch, kv_of_batch, own_n, work.seqlen_k, HEAD_DIM)
    store_rows(dk_target, dk, own_v, batch, kv_of_batch, own_n, work.seqlen_k, HEAD_DIM)


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "num_heads",
        "group_size",
        "padded_q",
        "blocks",
    ]
)
def backward_kv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk,
    dv,
    softmax_scale,
    scale_log2,
    stride_dkb: gl.int64,
    stride_dkh: gl.int64,
    stride_dks: gl.int64,
    stride_dvb: gl.int64,
    stride_dvh: gl.int64,
    stride_dvs: gl.int64,
    seqlen_q,
    seqlen_k,
    diagonal,
    num_heads,
    group_size,
    padded_q,
    blocks,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    VOLATILE: gl.constexpr,
    RAGGED_K: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """dk and dv of 128 keys of one KV head, summed over its query heads."""
    DTYPE: gl.constexpr = q_desc.dtype
    Q_TILE: gl.constexpr = [1, 1, BLOCK_M, BLOCK_D]
    Q_LAYOUT: gl.constexpr = q_desc.layout
    KV_LAYOUT: gl.constexpr = k_desc.layout
    k_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_D], KV_LAYOUT)
    v_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_D], KV_LAYOUT)
    handed = None
    rings = KeyRings(
        k_tiles,
        v_tiles,
        new_barrier(),
        new_barrier(),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta_desc.layout),
        handed,
    )
    fence_async_shared()
    work = Work(
        seqlen_q,
        seqlen_k,
        diagonal,
        num_heads,
        group_size,
        padded_q,
        softmax_scale,
        scale_log2,
        HEAD_DIM,
        RAGGED_K,
        GROUPED,
    )
    dk_target = Target(dk, stride_dkb, stride_dkh, stride_dks)
    dv_target = Target(dv, stride_dvb, stride_dvh, stride_dvs)
    # the first keys are seen by the most queries: they start first
    start_n = gl.program_id(0) % blocks * 128
    kv_head = gl.program_id(0) // blocks
    gdc_wait()
    gdc_launch_dependents()
    # the tuples of arguments stand inline: in a named one constexprs become tensors
    gl.warp_specialize(
        [
            (
                consume_queries,
                (work, rings, dk_target, dv_target, kv_head, start_n, 0, BLOCK_M, BIAS, VOLATILE),
            ),
            (
                consume_queries,
                (work, rings, dk_target, dv_target, kv_head, start_n, 1, BLOCK_M, BIAS, VOLATILE),
            ),
            (
                produce_queries,
                (
                    work,
                    rings,
                    q_desc,
                    k_desc,
                    v_desc,
                    dout_desc,
                    lse_desc,
                    delta_desc,
                    kv_head,
                    start_n,
                    0,
                    2,
                    BLOCK_M,
                    True,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.constexpr_function
def handed_scale(DTYPE):
    """By which p is multiplied as it is handed over: fp16 holds few bits of less than 2^-14."""
    return 2.0**14 if DTYPE == gl.float16 else 1.0


@gluon.jit
def sum_dv(
    work,
    rings,
    dv,
    p_operand,
    step,
    start_n,
    start_m,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    EDGE: gl.constexpr,
):
    """(dv, p): dv with what the step before adds, and p of this step, which is handed over too."""
    DTYPE: gl.constexpr = rings.k.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dv.type.layout, 2)
    rings.q.wait_full(step)
    slot = rings.q.slot(step)
    lse = rings.lse.index(slot).load(gl.SliceLayout(0, SCORES))
    q_tile = tile_of(rings.q.slots, slot)
    qk_async = product_of_queries(tile_of(rings.k, 0), q_tile, lse, SCORES, BIAS)
    before = gl.maximum(step - 1, 0)  # p of what is before the first step is 0
    rings.dout.wait_full(before)
    dout_tile = tile_of(rings.dout.slots, rings.dout.slot(before))
    dv_async = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
    qk = warpgroup_mma_wait(1, deps=[qk_async])
    rings.q.release(step)
    if BIAS:
        x = qk * work.scale_log2
    else:
        x = qk * work.scale_log2 - lse[None, :]
    p = gl.exp2(hide_keys(work, x, start_n, start_m, BLOCK_M, EDGE))
    rings.handed.wait_empty(step)
    slot = rings.handed.slot(step)
    rings.handed.slots.index(slot).store((p * handed_scale(DTYPE)).to(DTYPE))
    mbarrier.arrive(rings.handed.full.index(slot), count=1)
    dv, p_operand = warpgroup_mma_wait(0, deps=[dv_async, p_operand])
    slot = rings.dout.slot(before)
    mbarrier.arrive(rings.dout.empty.index(slot), count=1, pred=step > 0)
    return dv, gl.convert_layout(p.to(DTYPE), OPERAND)


@gluon.jit
def consume_for_dv(
    work,
    rings,
    target,
    kv_head,
    start_n,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
):
    """The first warpgroup: p of the program's 64 keys, and their dv."""
    DTYPE: gl.constexpr = rings.k.dtype
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dv = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    p_operand = gl.zeros([64, BLOCK_M], DTYPE, gl.DotOperandLayout(0, ACC, 2))
    start_m, tiles = query_range(work, start_n, 64, BLOCK_M)
    high = 0
    mbarrier.wait(rings.k_full, 0)
    step = 0
    for _ in range(heads_of_group(work)):
        for j in range(high, tiles):
            at = start_m + j * BLOCK_M
            dv, p_operand = sum_dv(
                work, rings, dv, p_operand, step, start_n, at, BLOCK_M, BIAS, False
            )
            step += 1
    last = step - 1
    rings.dout.wait_full(last)
    dout_tile = tile_of(rings.dout.slots, rings.dout.slot(last))
    dv_async = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
    dv, p_operand = warpgroup_mma_wait(0, deps=[dv_async, p_operand])
    num_kv_heads = work.num_heads // work.group_size
    batch = kv_head // num_kv_heads
    head = kv_head % num_kv_heads
    own = tile_of(rings.k, 0)
    store_rows(target, dv, own, batch, head, start_n, work.seqlen_k, work.HEAD_DIM)


@gluon.jit
def consume_for_dk(
    work,
    rings,
    target,
    kv_head,
    start_n,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
):
    """The second warpgroup: ds of the program's 64 keys from the p it is handed, and their dk."""
    DTYPE: gl.constexpr = rings.k.dtype
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    dk = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    ds_operand = gl.zeros([64, BLOCK_M], DTYPE, OPERAND)
    _, tiles = query_range(work, start_n, 64, BLOCK_M)
    steps = work.group_size * tiles
    mbarrier.wait(rings.v_full, 0)
    for step in range(steps):
        before = gl.maximum(step - 1, 0)  # ds of what is before the first step is 0
        rings.dout.wait_full(step)
        slot = rings.dout.slot(step)
        delta = rings.delta.index(slot).load(gl.SliceLayout(0, SCORES))
        dout_tile = tile_of(rings.dout.slots, slot)
        dp_async = product_of_queries(tile_of(rings.v, 0), dout_tile, delta, SCORES, BIAS)
        rings.q.wait_full(before)
        q_tile = tile_of(rings.q.slots, rings.q.slot(before))
        dk_async = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp_async])
        if not BIAS:
            dp = dp - delta[None, :]
        rings.dout.release(step)
        rings.handed.wait_full(step)
        p = rings.handed.slots.index(rings.handed.slot(step)).load(SCORES)
        rings.handed.release(step)
        ds = (p.to(gl.float32) * (dp * (1.0 / handed_scale(DTYPE)))).to(DTYPE)
        dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_async, ds_operand])
        slot = rings.q.slot(before)
        mbarrier.arrive(rings.q.empty.index(slot), count=1, pred=step > 0)
        ds_operand = gl.convert_layout(ds, OPERAND)
    last = steps - 1
    rings.q.wait_full(last)
    q_tile = tile_of(rings.q.slots, rings.q.slot(last))
    dk_async = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
    dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_async, ds_operand])
    dk = dk * work.softmax_scale
    num_kv_heads = work.num_heads // work.group_size
    batch = kv_head // num_kv_heads
    head = kv_head % num_kv_heads
    own = tile_of(rings.v, 0)
    store_rows(target, dk, own, batch, head, start_n, work.seqlen_k, work.HEAD_DIM)


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "num_heads",
        "group_size",
        "padded_q",
        "blocks",
    ]
)
def backward_kv_roles_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dk,
    dv,
    softmax_scale,
    scale_log2,
    stride_dkb: gl.int64,
    stride_dkh: gl.int64,
    stride_dks: gl.int64,
    stride_dvb: gl.int64,
    stride_dvh: gl.int64,
    stride_dvs: gl.int64,
    seqlen_q,
    seqlen_k,
    diagonal,
    num_heads,
    group_size,
    padded_q,
    blocks,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    RAGGED_K: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """dk and dv of 64 keys of one KV head, summed over its query heads: a warpgroup for each.

    The sums of both are more than the registers of one warpgroup where there are 256 channels.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    Q_TILE: gl.constexpr = [1, 1, BLOCK_M, BLOCK_D]
    Q_LAYOUT: gl.constexpr = q_desc.layout
    KV_LAYOUT: gl.constexpr = k_desc.layout
    P_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    k_tiles = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 64, BLOCK_D], KV_LAYOUT)
    v_tiles = gl.allocate_shared_memory(DTYPE, [1, 1, 1, 64, BLOCK_D], KV_LAYOUT)
    rings = KeyRings(
        k_tiles,
        v_tiles,
        new_barrier(),
        new_barrier(),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta_desc.layout),
        new_ring(DTYPE, [64, BLOCK_M], 1, P_LAYOUT, 1, 1, 1),
    )
    fence_async_shared()
    work = Work(
        seqlen_q,
        seqlen_k,
        diagonal,
        num_heads,
        group_size,
        padded_q,
        softmax_scale,
        scale_log2,
        HEAD_DIM,
        RAGGED_K,
        GROUPED,
    )
    dk_target = Target(dk, stride_dkb, stride_dkh, stride_dks)
    dv_target = Target(dv, stride_dvb, stride_dvh, stride_dvs)
    block = gl.program_id(0) % blocks
    start_n = block * 64
    kv_head = gl.program_id(0) // blocks
    gdc_wait()
    gdc_launch_dependents()
    # the tuples of arguments stand inline: in a named one constexprs become tensors
    gl.warp_specialize(
        [
            (consume_for_dv, (work, rings, dv_target, kv_head, start_n, BLOCK_M, BIAS)),
            (consume_for_dk, (work, rings, dk_target, kv_head, start_n, BLOCK_M, BIAS)),
            (
                produce_queries,
                (
                    work,
                    rings,
                    q_desc,
                    k_desc,
                    v_desc,
                    dout_desc,
                    lse_desc,
                    delta_desc,
                    kv_head,
                    start_n,
                    block,
                    1,
                    BLOCK_M,
                    False,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@aggregate
class QueryRings:
    """What a program of dq shares: its tiles of q and dout, and the tiles of keys."""

    q: gl.shared_memory_descriptor
    dout: gl.shared_memory_descriptor
    q_full: gl.shared_memory_descriptor
    dout_full: gl.shared_memory_descriptor
    k: Ring
    v: Ring

    @gluon.constexpr_function
    def __init__(self, q, dout, q_full, dout_full, k, v):
        self.q = q
        self.dout = dout
        self.q_full = q_full
        self.dout_full = dout_full
        self.k = k
        self.v = v


@gluon.jit
def key_blocks(
    work,
    start_m,
    ROWS: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """How many blocks hold the keys that any of ROWS query rows sees; at least one is walked."""
    blocks = (work.seqlen_k + BLOCK_N - 1) // BLOCK_N
    return blocks


@gluon.jit
def produce_keys(
    work,
    rings,
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    batch,
    head,
    start_m,
    BLOCK_N: gl.constexpr,
):
    """The producer warp of dq: q and dout once, then blocks of keys from the last one down."""
    blocks = key_blocks(work, start_m, 128, BLOCK_N)
    kv_head = head // work.group_size
    mbarrier.expect(rings.q_full, 2 * q_desc.block_type.nbytes)
    for w in gl.static_range(2):
        tma_load(q_desc, [batch, head, start_m + w * 64, 0], rings.q_full, rings.q.index(w))
    for j in range(blocks):
        at = (blocks - 1 - j) * BLOCK_N
        slot = rings.k.slot(j)
        rings.k.wait_empty(j)
        full = rings.k.full.index(slot)
        mbarrier.expect(full, k_desc.block_type.nbytes)
        tma_load(k_desc, [batch, kv_head, at, 0], full, rings.k.slots.index(slot))
        if j == 0:
            mbarrier.expect(rings.dout_full, 2 * dout_desc.block_type.nbytes)
            for w in gl.static_range(2):
                rows = [batch, head, start_m + w * 64, 0]
                tma_load(dout_desc, rows, rings.dout_full, rings.dout.index(w))
        slot = rings.v.slot(j)
        rings.v.wait_empty(j)
        full = rings.v.full.index(slot)
        mbarrier.expect(full, v_desc.block_type.nbytes)
        tma_load(v_desc, [batch, kv_head, at, 0], full, rings.v.slots.index(slot))
    gdc_wait()  # dk and dv are not read here, but the launch after waits for this one alone


@gluon.jit
def products_of_keys(
    rings,
    step,
    W: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """q K^T and dout V^T (queries, keys) of the step, in flight."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    own = W
    if rings.q.shape[4] == 256:
        own = W + opaque_zero(step)
    zero = gl.zeros([64, BLOCK_N], gl.float32, SCORES)
    rings.k.wait_full(step)
    k_tile = tile_of(rings.k.slots, rings.k.slot(step))
    q_tile = tile_of(rings.q, own)
    qk_async = warpgroup_mma(q_tile, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    rings.v.wait_full(step)
    v_tile = tile_of(rings.v.slots, rings.v.slot(step))
    dout_tile = tile_of(rings.dout, own)
    dp_async = warpgroup_mma(dout_tile, v_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    return qk_async, dp_async


@gluon.jit
def hide_from_queries(
    work,
    x,
    start_m,
    start_n,
    EDGE: gl.constexpr,
):
    """Exponents of 64 queries from `start_m` on, -inf where one does not see the key.

    Only an EDGE block holds such.
    """
    LAYOUT: gl.constexpr = x.type.layout
    BLOCK_N: gl.constexpr = x.shape[1]
    offs_n = start_n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT))
    if EDGE and work.RAGGED_K:
        x = gl.where((offs_n < work.seqlen_k)[None, :], x, float("-inf"))
    return x


@gluon.jit
def probabilities(
    work,
    rings,
    qk,
    lse,
    step,
    start_m,
    start_n,
    VOLATILE: gl.constexpr,
    EDGE: gl.constexpr,
):
    """p of the step's scores of 64 queries."""
    x = qk * work.scale_log2 - lse[:, None]
    p = exponentials(hide_from_queries(work, x, start_m, start_n, EDGE), VOLATILE)
    if VOLATILE:
        rings.k.wait_full(step)  # passed long ago: its branch keeps the next wait from moving up
    return p


@gluon.jit
def add_keys(
    work,
    rings,
    dq,
    ds_operand,
    lse,
    delta,
    step,
    start_m,
    start_n,
    W: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PREFETCH: gl.constexpr,
    VOLATILE: gl.constexpr,
    EDGE: gl.constexpr,
):
    """(dq, ds): dq of 64 queries with what the step adds, or with PREFETCH the step before; ds of
    the step is then still to be multiplied."""
    DTYPE: gl.constexpr = rings.q.dtype
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, dq.type.layout, 2)
    qk_async, dp_async = products_of_keys(rings, step, W, BLOCK_N)
    if PREFETCH:
        k_before = tile_of(rings.k.slots, rings.k.slot(step - 1))
        dq_async = warpgroup_mma(ds_operand, k_before, dq, is_async=True)
        qk = warpgroup_mma_wait(2, deps=[qk_async])
        p = probabilities(work, rings, qk, lse, step, start_m, start_n, VOLATILE, EDGE)
        dp = warpgroup_mma_wait(1, deps=[dp_async])
        rings.v.release(step)
        ds = p * (dp - delta[:, None])
        dq, ds_operand = warpgroup_mma_wait(0, deps=[dq_async, ds_operand])
        rings.k.release(step - 1)
        ds_operand = gl.convert_layout(ds.to(DTYPE), OPERAND)
    else:
        qk = warpgroup_mma_wait(1, deps=[qk_async])
        p = probabilities(work, rings, qk, lse, step, start_m, start_n, VOLATILE, EDGE)
        dp = warpgroup_mma_wait(0, deps=[dp_async])
        rings.v.release(step)
        ds_operand = gl.convert_layout((p * (dp - delta[:, None])).to(DTYPE), OPERAND)
        k_tile = tile_of(rings.k.slots, rings.k.slot(step))
        dq_async = warpgroup_mma(ds_operand, k_tile, dq, is_async=True)
        dq, ds_operand = warpgroup_mma_wait(0, deps=[dq_async, ds_operand])
        rings.k.release(step)
    return dq, ds_operand


@gluon.jit
def first_ds(
    work,
    rings,
    lse,
    delta,
    step,
    start_m,
    start_n,
    W: gl.constexpr,
    BLOCK_N: gl.constexpr,
):
    """ds of the warpgroup's first block of keys, in the layout of the scores."""
    qk_async, dp_async = products_of_keys(rings, step, W, BLOCK_N)
    qk = warpgroup_mma_wait(1, deps=[qk_async])
    p = probabilities(work, rings, qk, lse, step, start_m, start_n, False, True)
    dp = warpgroup_mma_wait(0, deps=[dp_async])
    rings.v.release(step)
    return p * (dp - delta[:, None])


@gluon.jit
def consume_keys(
    work,
    rings,
    lse_rows,
    delta_rows,
    lse_factor,
    delta_factor,
    target,
    batch,
    head,
    tile_m,
    W: gl.constexpr,
    BLOCK_N: gl.constexpr,
    PREFETCH: gl.constexpr,
    VOLATILE: gl.constexpr,
):
    """Warpgroup W: dq of 64 of the program's 128 queries."""
    DTYPE: gl.constexpr = rings.q.dtype
    BLOCK_D: gl.constexpr = rings.q.shape[4]
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    start_m = tile_m + W * 64
    flat_head = batch * work.num_heads + head
    first = flat_head.to(gl.int64) * work.padded_q + start_m
    rows = first + gl.arange(0, 64, gl.SliceLayout(1, SCORES))
    lse = gl.load(lse_rows + rows) * lse_factor
    delta = gl.load(delta_rows + rows) * delta_factor
    blocks = key_blocks(work, tile_m, 128, BLOCK_N)
    dq = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    mbarrier.wait(rings.q_full, 0)
    mbarrier.wait(rings.dout_full, 0)
    skipped = 0
    inner = 1
    at = (blocks - 1 - skipped) * BLOCK_N
    if PREFETCH:
        ds = first_ds(work, rings, lse, delta, skipped, start_m, at, W, BLOCK_N)
        ds_operand = gl.convert_layout(ds.to(DTYPE), OPERAND)
    else:
        ds_operand = gl.zeros([64, BLOCK_N], DTYPE, OPERAND)
        dq, ds_operand = add_keys(
            work,
            rings,
            dq,
            ds_operand,
            lse,
            delta,
            skipped,
            start_m,
            at,
            W,
            BLOCK_N,
            PREFETCH,
            VOLATILE,
            True,
        )
    for j in range(inner, blocks):
        dq, ds_operand = add_keys(
            work,
            rings,
            dq,
            ds_operand,
            lse,
            delta,
            j,
            start_m,
            (blocks - 1 - j) * BLOCK_N,
            W,
            BLOCK_N,
            PREFETCH,
            VOLATILE,
            False,
        )
    if PREFETCH:
        k_tile = tile_of(rings.k.slots, rings.k.slot(blocks - 1))
        dq_async = warpgroup_mma(ds_operand, k_tile, dq, is_async=True)
        dq, ds_operand = warpgroup_mma_wait(0, deps=[dq_async, ds_operand])
    dq = dq * work.softmax_scale
    own = tile_of(rings.q, W)
    store_rows(target, dq, own, batch, head, start_m, work.seqlen_q, work.HEAD_DIM)


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "num_heads",
        "group_size",
        "padded_q",
        "tiles",
    ]
)
def backward_q_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_rows,
    delta_rows,
    dq,
    softmax_scale,
    scale_log2,
    lse_factor,
    delta_factor,
    stride_dqb: gl.int64,
    stride_dqh: gl.int64,
    stride_dqs: gl.int64,
    seqlen_q,
    seqlen_k,
    diagonal,
    num_heads,
    group_size,
    padded_q,
    tiles,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    K_STAGES: gl.constexpr,
    V_STAGES: gl.constexpr,
    PREFETCH: gl.constexpr,
    VOLATILE: gl.constexpr,
    RAGGED_K: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """dq of 128 queries of one head. The factors make lse_rows lse * log2(e), delta_rows delta."""
    DTYPE: gl.constexpr = q_desc.dtype
    KV_TILE: gl.constexpr = [1, 1, BLOCK_N, BLOCK_D]
    Q_LAYOUT: gl.constexpr = q_desc.layout
    KV_LAYOUT: gl.constexpr = k_desc.layout
    q_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_D], Q_LAYOUT)
    dout_tiles = gl.allocate_shared_memory(DTYPE, [2, 1, 1, 64, BLOCK_D], Q_LAYOUT)
    rings = QueryRings(
        q_tiles,
        dout_tiles,
        new_barrier(),
        new_barrier(),
        new_ring(DTYPE, KV_TILE, 1, KV_LAYOUT, K_STAGES, 1, 2),
        new_ring(DTYPE, KV_TILE, 1, KV_LAYOUT, V_STAGES, 1, 2),
    )
    fence_async_shared()
    work = Work(
        seqlen_q,
        seqlen_k,
        diagonal,
        num_heads,
        group_size,
        padded_q,
        softmax_scale,
        scale_log2,
        HEAD_DIM,
        RAGGED_K,
        GROUPED,
    )
    target = Target(dq, stride_dqb, stride_dqh, stride_dqs)
    flat_head = gl.program_id(0) // tiles
    tile = gl.program_id(0) % tiles
    start_m = tile * 128
    batch = flat_head // num_heads
    head = flat_head % num_heads
    # the tuples of arguments stand inline: in a named one constexprs become tensors
    gl.warp_specialize(
        [
            (
                consume_keys,
                (
                    work,
                    rings,
                    lse_rows,
                    delta_rows,
                    lse_factor,
                    delta_factor,
                    target,
                    batch,
                    head,
                    start_m,
                    0,
                    BLOCK_N,
                    PREFETCH,
                    VOLATILE,
                ),
            ),
            (
                consume_keys,
                (
                    work,
                    rings,
                    lse_rows,
                    delta_rows,
                    lse_factor,
                    delta_factor,
                    target,
                    batch,
                    head,
                    start_m,
                    1,
                    BLOCK_N,
                    PREFETCH,
                    VOLATILE,
                ),
            ),
            (
                produce_keys,
                (
                    work,
                    rings,
                    q_desc,
                    k_desc,
                    v_desc,
                    dout_desc,
                    batch,
                    head,
                    start_m,
                    BLOCK_N,
                ),
            ),
        ],
        [4, 1],
        [240, 24],
    )


@gluon.jit
def row_offsets(
    tokens,
    heads,
    stride_b,
    stride_h,
    stride_s,
    BLOCK_D: gl.constexpr,
    LAYOUT: gl.constexpr,
):
    """(first row, offsets) of the 64 tokens of one head that this program writes."""
    blocks = (tokens + 63) // 64
    flat_head = gl.program_id(0) // blocks
    start = gl.program_id(0) % blocks * 64
    batch = flat_head // heads
    head = flat_head % heads
    first = batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    rows = (start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))).to(gl.int64) * stride_s
    channels = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    return start, first + (rows[:, None] + channels[None, :])


@gluon.jit(do_not_specialize=["tokens", "heads"])
def copy_rows_kernel(
    source,
    target,
    stride_b,
    stride_h,
    stride_s,
    target_stride_b,
    target_stride_h,
    target_stride_s,
    tokens,
    heads,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """Copy 64 tokens of one head of a tensor with any strides."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    start, offsets = row_offsets(tokens, heads, stride_b, stride_h, stride_s, BLOCK_D, LAYOUT)
    _, targets = row_offsets(
        tokens, heads, target_stride_b, target_stride_h, target_stride_s, BLOCK_D, LAYOUT
    )
    offs_s = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    inside = (offs_s < tokens)[:, None] & (offs_d < HEAD_DIM)[None, :]
    gl.store(target + targets, gl.load(source + offsets, mask=inside), mask=inside)


@gluon.jit(do_not_specialize=["seqlen_q", "num_heads"])
def no_keys_kernel(
    out,
    lse,
    stride_ob,
    stride_oh,
    stride_os,
    seqlen_q,
    num_heads,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """64 rows of one head where seqlen_k is 0: out 0, lse -inf. `lse` may be None."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    start, offsets = row_offsets(
        seqlen_q, num_heads, stride_ob, stride_oh, stride_os, BLOCK_D, LAYOUT
    )
    offs_m = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    inside = (offs_m < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    zeros = gl.zeros([64, BLOCK_D], gl.float32, LAYOUT).to(out.dtype.element_ty)
    gl.store(out + offsets, zeros, mask=inside)
    if lse is not None:
        flat_head = gl.program_id(0) // ((seqlen_q + 63) // 64)
        hidden = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, LAYOUT))
        rows = lse + flat_head.to(gl.int64) * seqlen_q + offs_m
        gl.store(rows, hidden, mask=offs_m < seqlen_q)


LOG2_E = 1.4426950408889634
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
STATISTICS_ROWS = 32  # of a program; of two tensors they are in registers
PADDED_ROWS = 128  # lse_rows and delta_rows of a head are whole tiles of any size
REGISTERS = 168  # of a thread as a kernel starts; consumers trade them with the producer


def steps(tensor):
    """Elements from one entry to the next along each axis but the last. Where an axis has one entry
    only, its stride may be anything: a whole row stands in for it."""
    row = -(-tensor.shape[3] // 8) * 8
    return [tensor.stride(axis) if tensor.shape[axis] > 1 else row for axis in range(3)]


def describable(tensor):
    """Whether a descriptor may name the tensor: 16-byte steps, none of them 0."""
    size = tensor.element_size()
    aligned = all(step > 0 and step * size % 16 == 0 for step in steps(tensor))
    return aligned and tensor.data_ptr() % 16 == 0


def descriptor(tensor, s, h, rows):
    """A descriptor of (batch, heads, tokens, head_dim) in tiles of `rows` tokens of one head.

    Channels between head_dim and the tile's width are loaded as zeros and never stored.
    """
    order = (0, h, s)
    block = [1, 1, rows, triton.next_power_of_2(tensor.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, DTYPES[tensor.dtype])
    shape = [*(tensor.shape[axis] for axis in order), tensor.shape[3]]
    strides = [*(steps(tensor)[axis] for axis in order), 1]
    return TensorDescriptor(tensor, shape, strides, block, layout)


def copied(tensor, s, h, launches, new_workspace):
    """The tensor, or a copy that a descriptor may name, whose making is added to `launches`."""
    if describable(tensor):
        return tensor
    copy = new_workspace(tuple(tensor.shape), tensor.dtype)
    tokens, heads, head_dim = tensor.shape[s], tensor.shape[h], tensor.shape[3]
    arguments = (
        tensor,
        copy,
        *(source.stride(axis) for source in (tensor, copy) for axis in (0, h, s)),
        tokens,
        heads,
        head_dim,
        triton.next_power_of_2(head_dim),
    )
    grid = (tensor.shape[0] * heads * triton.cdiv(tokens, 64),)
    launches.append((copy_rows_kernel, grid, arguments, {"num_warps": 4}))
    return copy


def without_keys(q, out, lse, s, h):
    """The launch for seqlen_k 0."""
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    strides = (out.stride(axis) for axis in (0, h, s))
    block_d = triton.next_power_of_2(head_dim)
    arguments = (out, lse, *strides, seqlen_q, num_heads, head_dim, block_d)
    grid = (batch * num_heads * triton.cdiv(seqlen_q, 64),)
    return [(no_keys_kernel, grid, arguments, {"num_warps": 4})]


def row_descriptor(rows, block):
    """A descriptor of the workspace of lse_rows or delta_rows, in tiles of `block` numbers."""
    layout = gl.NVMMASharedLayout(0, 32, 1)
    return TensorDescriptor(rows, [rows.numel()], [1], [block], layout)


def strides_of(tensor, s, h):
    """Elements between sequences, heads, tokens."""
    return (tensor.stride(axis) for axis in (0, h, s))


def plan(
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

    Of a q, k, v or dout whose strides no descriptor can name (they step by 16 bytes) a copy is made
    first.
    """
    s, h = (1, 2) if layout == "bshd" else (2, 1)  # axes of tokens and heads
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    seqlen_k, num_kv_heads = k.shape[s], k.shape[h]
    if seqlen_k == 0:
        return without_keys(q, dq, None, s, h)
    launches = []
    q, k, v, dout = (copied(tensor, s, h, launches, new_workspace) for tensor in (q, k, v, dout))
    block_m, block_d = knobs["KV_BLOCK_M"], triton.next_power_of_2(head_dim)
    heads, kv_heads = batch * num_heads, batch * num_kv_heads
    padded_q = triton.cdiv(seqlen_q, PADDED_ROWS) * PADDED_ROWS
    # where the scale is 0 (or next to it) no sum can begin at -lse / scale
    bias = knobs["KV_BIAS"] if softmax_scale > 1e-30 else 0
    lse_factor, delta_factor = (-1.0 / softmax_scale, -1.0) if bias else (LOG2_E, 1.0)
    lse_rows, delta_rows = (new_workspace((heads, padded_q), torch.float32) for _ in range(2))
    statistics_arguments = (
        out,
        dout,
        lse,
        dlse,
        lse_rows,
        delta_rows,
        lse_factor,
        delta_factor,
        *strides_of(out, s, h),
        *strides_of(dout, s, h),
        num_heads,
        seqlen_q,
        padded_q,
        STATISTICS_ROWS,
        head_dim,
        block_d,
    )
    scales = (softmax_scale, softmax_scale * LOG2_E)  # exp2 is one instruction
    lengths = (seqlen_q, seqlen_k, seqlen_k - seqlen_q)
    heads_of = (num_heads, num_heads // num_kv_heads, padded_q)
    wide = block_d == 256
    block_n, kv_kernel = (64, backward_kv_roles_kernel) if wide else (128, backward_kv_kernel)
    kv_blocks = triton.cdiv(seqlen_k, block_n)
    kv_arguments = (
        descriptor(q, s, h, block_m),
        descriptor(k, s, h, 64),
        descriptor(v, s, h, 64),
        descriptor(dout, s, h, block_m),
        row_descriptor(lse_rows, block_m),
        row_descriptor(delta_rows, block_m),
        dk,
        dv,
        *scales,
        *strides_of(dk, s, h),
        *strides_of(dv, s, h),
        *lengths,
        *heads_of,
        kv_blocks,
        head_dim,
        block_d,
        block_m,
        bias,
        *(() if wide else (knobs["KV_VOLATILE"],)),
        seqlen_k % block_n != 0,
        num_heads != num_kv_heads,
    )
    dependent = {"num_warps": 4, "launch_pdl": True}  # starts before the launch before it is over
    options = {**dependent, "maxnreg": REGISTERS}
    statistics_grid = (heads * padded_q // STATISTICS_ROWS,)
    launches += [
        (statistics_kernel, statistics_grid, statistics_arguments, {"num_warps": 4}),
        (kv_kernel, (kv_heads * kv_blocks,), kv_arguments, options),
    ]
    q_tiles, q_block_n = triton.cdiv(seqlen_q, 128), knobs["Q_BLOCK_N"]
    q_arguments = (
        descriptor(q, s, h, 64),
        descriptor(k, s, h, q_block_n),
        descriptor(v, s, h, q_block_n),
        descriptor(dout, s, h, 64),
        lse_rows,
        delta_rows,
        dq,
        *scales,
        LOG2_E / lse_factor,
        1.0 / delta_factor,
        *strides_of(dq, s, h),
        *lengths,
        *heads_of,
        q_tiles,
        head_dim,
        block_d,
        q_block_n,
        knobs["Q_K_STAGES"],
        knobs["Q_V_STAGES"],
        knobs["Q_PREFETCH"],
        knobs["Q_VOLATILE"],
        seqlen_k % q_block_n != 0,
        num_heads != num_kv_heads,
    )
    return [*launches, (backward_q_kernel, (heads * q_tiles,), q_arguments, options)]
