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
#   dq_sums       (batch * num_heads, padded_q / 64, 64 * BLOCK_D) fp32 workspace; zeroed, added to,
#                 converted. 64 rows lie as a warpgroup holds the sums of a product: see add_dq
#   unit          128 keys of a KV head, with all queries of its heads that see any; `turn` counts
#                 those that a program has gone through
#
# Tunable
#   KV_BLOCK_M    queries of a step of dk and dv. A program has 128 keys, 64 of each warpgroup; of
#                 256 channels it has 64 keys, one warpgroup sums dk and the other dv
#   KV_BIAS       sums of q k^T begin at -lse / scale, those of dout v^T at -delta
#   DS_SLOTS      tiles of ds on their way to dq
#   DQ_FIRST      dq is multiplied before dk and dv, and added up under them
#   KV_SLOTS      0: a program for every unit. Else programs take units from a counter, and have so
#                 many slots for K and V: of 2 a unit's are loaded under the one before
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
def opaque_zero(step):
    """Zero, of which neither LLVM nor the assembler knows. As an index of a tile it keeps them from
    holding the tile's descriptors in registers all through a loop."""
    return gl.inline_asm_elementwise(
        "shr.u32 $0, $1, 30;", "=r,r", [step], dtype=gl.int32, is_pure=False, pack=1
    )


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
    dq_sums,
    counter,
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
    """What the consumers begin with, for ROWS rows of one head. Their dq_sums become 0, and so does
    the counter."""
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
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    first = (head.to(gl.int64) * padded_q + start) * BLOCK_D
    sums = dq_sums + first + gl.arange(0, ROWS * BLOCK_D, FLAT)
    gl.store(sums, gl.zeros([ROWS * BLOCK_D], gl.float32, FLAT))
    if counter is not None:
        if gl.program_id(0) == 0:
            gl.store(counter, 0)


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


@aggregate
class UnitRings:
    """What a program of dk and dv shares: tiles of K and V, of queries, of ds, and the units.

    The rows of lse and delta come and go with the tiles of q and of dout.
    """

    k: gl.shared_memory_descriptor
    v: gl.shared_memory_descriptor
    k_ring: Ring  # of the tiles k, two to a slot
    v_ring: Ring
    q: Ring
    dout: Ring
    lse: gl.shared_memory_descriptor
    delta: gl.shared_memory_descriptor
    handed: Ring
    units: Ring

    @gluon.constexpr_function
    def __init__(self, k_ring, v_ring, q, dout, lse, delta, handed, units):
        self.k = k_ring.slots
        self.v = v_ring.slots
        self.k_ring = k_ring
        self.v_ring = v_ring
        self.q = q
        self.dout = dout
        self.lse = lse
        self.delta = delta
        self.handed = handed
        self.units = units


@aggregate
class Units:
    """The units of a launch, 128 keys of a KV head each, in the order in which they are taken."""

    count: gl.tensor
    blocks: gl.tensor
    num_kv_heads: gl.tensor
    kv_heads: gl.tensor
    heads_per_group: gl.tensor
    KV_SLOTS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, count, blocks, num_kv_heads, kv_heads, heads_per_group, KV_SLOTS):
        self.count = count
        self.blocks = blocks
        self.num_kv_heads = num_kv_heads
        self.kv_heads = kv_heads
        self.heads_per_group = heads_per_group
        self.KV_SLOTS = gl.constexpr(KV_SLOTS)


@gluon.jit
def keys_of_unit(
    units,
    unit,
):
    """(KV head counted flat, first key) of a unit.

    From a counter, the last head begins, while the L2 cache holds what the statistics left of it.
    """
    if units.KV_SLOTS == 0:
        # the first keys are seen by the most queries: they start first
        return unit // units.blocks, unit % units.blocks * 128
    else:
        left = units.count - 1 - unit
        return left // units.blocks, left % units.blocks * 128


@gluon.jit
def announce_keys(
    ring,
    turn,
    kv_head,
    start_n,
):
    """Tell the consumers the keys of this program's unit number `turn`; a head below 0: none."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    ring.wait_empty(turn)
    first = 2 * ring.slot(turn)
    ring.slots.index(first).store(gl.full([1], 0, gl.int32, LANE) + kv_head)
    ring.slots.index(first + 1).store(gl.full([1], 0, gl.int32, LANE) + start_n)
    mbarrier.arrive(ring.full.index(ring.slot(turn)), count=1)


@gluon.jit
def announced_keys(
    ring,
    turn,
):
    """(KV head, first key) of this program's unit number `turn`, as the producer announces them."""
    LANES: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    ring.wait_full(turn)
    first = 2 * ring.slot(turn)
    kv_head = gl.max(ring.slots.index(first).load(LANES), 0)
    start_n = gl.max(ring.slots.index(first + 1).load(LANES), 0)
    return kv_head, start_n


@gluon.jit
def opaque_tile(
    rings,
    turn,
    step,
):
    """The first tile of K, as of V, in a unit's slot; the compiler does not know that it stays the
    same all through a loop, see opaque_zero."""
    if rings.k_ring.DEPTH == 1:
        return opaque_zero(step)
    else:
        return gl.inline_asm_elementwise(
            "{ and.b32 $0, $1, 1; shl.b32 $0, $0, 1; }",
            "=r,r",
            [turn],
            dtype=gl.int32,
            is_pure=False,
            pack=1,
        )


@gluon.jit
def load_keys(
    units,
    desc,
    ring,
    turn,
    batch,
    kv_head,
    start_n,
):
    """Load K or V of a unit, 64 keys for each warpgroup, once their slot is empty."""
    slot = ring.slot(turn)
    if units.KV_SLOTS > 0:
        ring.wait_empty(turn)
    full = ring.full.index(slot)
    mbarrier.expect(full, 2 * desc.block_type.nbytes)
    for w in gl.static_range(2):
        at = [batch, kv_head, start_n + w * 64, 0]
        tma_load(desc, at, full, ring.slots.index(2 * slot + w))


@gluon.jit
def load_unit(
    work,
    units,
    rings,
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    kv_head,
    start_n,
    turn,
    first_step,
    BLOCK_M: gl.constexpr,
):
    """Load K and V of a unit, and what each step multiplies with them. The step after its last."""
    start_m, tiles = query_range(work, start_n, 128, BLOCK_M)
    batch = kv_head // units.num_kv_heads
    kv_of_batch = kv_head % units.num_kv_heads
    load_keys(units, k_desc, rings.k_ring, turn, batch, kv_of_batch, start_n)
    step = first_step
    for g in range(heads_of_group(work)):
        head = kv_of_batch * work.group_size + g
        rows = (batch * work.num_heads + head) * work.padded_q
        for j in range(tiles):
            offs = start_m + j * BLOCK_M
            slot = rings.q.slot(step)
            rings.q.wait_empty(step)
            full = rings.q.full.index(slot)
            mbarrier.expect(full, q_desc.block_type.nbytes + BLOCK_M * 4)
            tma_load(q_desc, [batch, head, offs, 0], full, rings.q.slots.index(slot))
            tma_load(lse_desc, [rows + offs], full, rings.lse.index(slot))
            if step == first_step:
                load_keys(units, v_desc, rings.v_ring, turn, batch, kv_of_batch, start_n)
            slot = rings.dout.slot(step)
            rings.dout.wait_empty(step)
            full = rings.dout.full.index(slot)
            mbarrier.expect(full, dout_desc.block_type.nbytes + BLOCK_M * 4)
            tma_load(dout_desc, [batch, head, offs, 0], full, rings.dout.slots.index(slot))
            tma_load(delta_desc, [rows + offs], full, rings.delta.index(slot))
            step += 1
    return step


@gluon.jit
def produce_units(
    work,
    units,
    rings,
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    counter,
    BLOCK_M: gl.constexpr,
):
    """The producer warp: loads what the consumers will need, in the order they will need it."""
    unit = gl.program_id(0)
    if units.KV_SLOTS == 0:
        kv_head, start_n = keys_of_unit(units, unit)
        load_unit(
            work,
            units,
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
            0,
            BLOCK_M,
        )
    else:
        turn = 0
        step = 0
        while unit < units.count:
            kv_head, start_n = keys_of_unit(units, unit)
            announce_keys(rings.units, turn, kv_head, start_n)
            step = load_unit(
                work,
                units,
                rings,
                q_desc,
                k_desc,
                v_desc,
                dout_desc,
                lse_desc,
                delta_desc,
                kv_head,
                start_n,
                turn,
                step,
                BLOCK_M,
            )
            # two steps before the unit's end: early enough to load, late enough to share out evenly
            unit = gl.atomic_add(counter, 1) + gl.num_programs(0)
            turn += 1
        announce_keys(rings.units, turn, -1, 0)


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
    sums,
    due,
    turn,
    dk,
    dv,
    step,
    start_n,
    start_m,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    DQ_FIRST: gl.constexpr,
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
    own_k = tile_of(rings.k, W + opaque_tile(rings, turn, step))
    qk_async = product_of_queries(own_k, q_tile, lse, SCORES, BIAS)
    rings.dout.wait_full(step)
    dout_tile = tile_of(rings.dout.slots, rings.dout.slot(step))
    own_v = tile_of(rings.v, W + opaque_tile(rings, turn, step))
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
    p = gl.exp2(x)
    p_operand = gl.convert_layout(p.to(DTYPE), OPERAND)
    # the branch of a wait keeps the assembler from waiting for dp before the exponentials
    rings.handed.wait_empty(step)
    if BIAS:
        dp = warpgroup_mma_wait(0, deps=[dp_async])
    else:
        delta = rings.delta.index(rings.dout.slot(step)).load(ROW)
        dp = warpgroup_mma_wait(0, deps=[dp_async]) - delta[None, :]
    ds = (p * dp).to(DTYPE)
    hand_ds(rings, ds, step, W)
    ds_operand = gl.convert_layout(ds, OPERAND)
    if DQ_FIRST:
        dq_async = dq_product(rings, turn, step, due, W, BLOCK_M)
        dv_async = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
        dk_async = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
        dq = warpgroup_mma_wait(2, deps=[dq_async])
        release_ds(rings, step, due)
        if due:
            add_dq(sums, dq)
        dv, p_operand = warpgroup_mma_wait(1, deps=[dv_async, p_operand])
        rings.dout.release(step)
        dk, ds_operand = warpgroup_mma_wait(0, deps=[dk_async, ds_operand])
        rings.q.release(step)
    else:
        dv_async = warpgroup_mma(p_operand, dout_tile, dv, is_async=True)
        dk_async = warpgroup_mma(ds_operand, q_tile, dk, is_async=True)
        dq_async = dq_product(rings, turn, step, due, W, BLOCK_M)
        # dq is a product of each warpgroup's keys: two are in flight
        dv, p_operand = warpgroup_mma_wait(3, deps=[dv_async, p_operand])
        rings.dout.release(step)
        dk, ds_operand = warpgroup_mma_wait(2, deps=[dk_async, ds_operand])
        rings.q.release(step)
        dq = warpgroup_mma_wait(0, deps=[dq_async])
        release_ds(rings, step, due)
        if due:
            add_dq(sums, dq)
    return dk, dv


@gluon.jit
def hand_ds(
    rings,
    ds,
    step,
    W: gl.constexpr,
):
    """Hand the step's ds of warpgroup W's keys to both warpgroups; its slot is empty."""
    slot = rings.handed.slot(step)
    rings.handed.slots.index(slot * 2 + W).store(ds)
    fence_async_shared()
    mbarrier.arrive(rings.handed.full.index(slot), count=1)


@gluon.jit
def release_ds(
    rings,
    step,
    due,
):
    """Give back the slot of the step before, if there was one."""
    slot = rings.handed.slot(step - 1 + 2 * rings.handed.DEPTH)
    mbarrier.arrive(rings.handed.empty.index(slot), count=1, pred=due)


@gluon.jit
def dq_product(
    rings,
    turn,
    step,
    due,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """Warpgroup W's share of dq of the step before, in flight: of 64 queries half of the channels,
    of 128 half of the queries. Where no step was before (`due` is false) it is nobody's."""
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    CHANNELS: gl.constexpr = BLOCK_D // 2 if BLOCK_M == 64 else BLOCK_D
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, CHANNELS, 16])
    # slot and phase of the step before, and never negative: a slot of -1 faults although unused
    before = step - 1 + 2 * rings.handed.DEPTH
    slot = rings.handed.slot(before)
    mbarrier.wait(rings.handed.full.index(slot), rings.handed.phase(before), pred=due)
    acc = gl.zeros([64, CHANNELS], gl.float32, LAYOUT)
    for w in gl.static_range(2):
        ds_tile = rings.handed.slots.index(slot * 2 + w)
        k_tile = tile_of(rings.k, w + opaque_tile(rings, turn, step))
        if BLOCK_M == 64:
            k_tile = k_tile.slice(W * CHANNELS, CHANNELS, dim=1)
        else:
            ds_tile = ds_tile.slice(W * 64, 64, dim=1)
        acc = warpgroup_mma(
            ds_tile.permute((1, 0)),
            k_tile,
            acc,
            use_acc=w > 0,
            is_async=True,
        )
    return acc


@gluon.jit
def add_dq(
    sums,
    dq,
):
    """Add a warpgroup's 64 rows to dq_sums from `sums` on, in the order in which it holds them.

    A thread has of every 8 channels 2 of one row and 2 of the row 8 further: 4 neighbours there, so
    that one instruction adds them. Offsets are (channel // 8, row // 16, row % 8, channel % 8 // 2,
    row // 8 % 2, channel % 2) of (channels / 8, 4, 8, 4, 2, 2).
    """
    LAYOUT: gl.constexpr = dq.type.layout
    CHANNELS: gl.constexpr = dq.shape[1]
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT)).to(gl.int64)
    channels = gl.arange(0, CHANNELS, gl.SliceLayout(0, LAYOUT)).to(gl.int64)
    # byte addresses in 64 bits throughout: what a register adds is then part of the instruction
    of_rows = sums.to(gl.int64) + ((rows >> 4) << 9) + ((rows & 7) << 6)
    of_channels = (((channels & 7) >> 1) << 4) + ((channels >> 3) << 11)
    gl.inline_asm_elementwise(
        "{ red.relaxed.gpu.global.add.v4.f32 [$1], {$5, $6, $7, $8}; mov.b32 $0, 0; }",
        "=r,l,l,l,l,f,f,f,f",
        [of_rows[:, None] + of_channels[None, :], dq],
        dtype=gl.int8,
        is_pure=False,
        pack=4,
    )


@gluon.jit(do_not_specialize=["num_heads", "seqlen_q", "padded_q"])
def convert_kernel(
    dq_sums,
    dq,
    softmax_scale,
    stride_dqb: gl.int64,
    stride_dqh: gl.int64,
    stride_dqs: gl.int64,
    num_heads,
    seqlen_q,
    padded_q,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """dq of 64 rows of one head, from their sums in the order of add_dq."""
    FLAT: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    gdc_wait()
    blocks = (seqlen_q + 63) // 64
    head = gl.program_id(0) // blocks
    start = gl.program_id(0) % blocks * 64
    first = (head.to(gl.int64) * padded_q + start) * BLOCK_D
    sums = gl.load(dq_sums + first + gl.arange(0, 64 * BLOCK_D, FLAT))
    sums = gl.reshape(sums, [BLOCK_D // 8, 4, 8, 4, 2, 2])
    sums = gl.reshape(gl.permute(sums, (1, 4, 2, 0, 3, 5)), [64, BLOCK_D])
    rows = gl.convert_layout((sums * softmax_scale).to(dq.dtype.element_ty), LAYOUT)
    offs_m = start + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, LAYOUT))
    batch = (head // num_heads).to(gl.int64)
    q_head = (head % num_heads).to(gl.int64)
    of_rows = batch * stride_dqb + q_head * stride_dqh + offs_m.to(gl.int64) * stride_dqs
    inside = (offs_m < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    gl.store(dq + (of_rows[:, None] + offs_d[None, :]), rows, mask=inside)


@gluon.jit
def skip_queries(
    rings,
    sums,
    due,
    turn,
    step,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
):
    """A step whose queries see none of warpgroup W's keys: its ds is 0, dq of the last is due."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    rings.q.wait_full(step)
    rings.q.release(step)
    rings.dout.wait_full(step)
    rings.dout.release(step)
    rings.handed.wait_empty(step)
    hand_ds(rings, gl.zeros([64, BLOCK_M], rings.k.dtype, SCORES), step, W)
    if due:
        dq_async = dq_product(rings, turn, step, due, W, BLOCK_M)
        dq = warpgroup_mma_wait(0, deps=[dq_async])
        release_ds(rings, step, due)
        add_dq(sums, dq)


@gluon.jit
def consume_unit(
    work,
    units,
    rings,
    dq_sums,
    dk_target,
    dv_target,
    kv_head,
    start_n,
    turn,
    first_step,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    DQ_FIRST: gl.constexpr,
):
    """Warpgroup W: dk and dv of 64 of a unit's 128 keys. The step after the unit's last."""
    BLOCK_D: gl.constexpr = rings.k.shape[4]
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    dk = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    dv = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    start_m, tiles = query_range(work, start_n, 128, BLOCK_M)
    own_n = start_n + W * 64
    batch = kv_head // units.num_kv_heads
    kv_of_batch = kv_head % units.num_kv_heads
    # this warpgroup's share of the sums of the first tile of the group's first head
    head = batch * work.num_heads + kv_of_batch * work.group_size
    of_share = W * 64 * (BLOCK_D // 2 if BLOCK_M == 64 else BLOCK_D)
    first_sums = dq_sums + (head.to(gl.int64) * work.padded_q * BLOCK_D + of_share)
    due_tile = start_m * 0 - 1  # where the sums lie whose dq is due, in elements; below 0: none is
    rings.k_ring.wait_full(turn)
    rings.v_ring.wait_full(turn)
    step = first_step
    for g in range(heads_of_group(work)):
        high = 0
        for j in range(high, tiles):
            dk, dv = add_queries(
                work,
                rings,
                first_sums + due_tile,
                due_tile >= 0,
                turn,
                dk,
                dv,
                step,
                start_n,
                start_m + j * BLOCK_M,
                W,
                BLOCK_M,
                BIAS,
                DQ_FIRST,
                False,
            )
            due_tile = (g * work.padded_q + start_m + j * BLOCK_M) * BLOCK_D
            step += 1
    HEAD_DIM: gl.constexpr = work.HEAD_DIM
    # K is read by both warpgroups, V by its own only
    own_v = tile_of(rings.v, 2 * rings.v_ring.slot(turn) + W)
    dq_async = dq_product(rings, turn, step, True, W, BLOCK_M)
    if units.KV_SLOTS > 0:
        store_rows(dv_target, dv, own_v, batch, kv_of_batch, own_n, work.seqlen_k, HEAD_DIM)
    dq = warpgroup_mma_wait(0, deps=[dq_async])
    if units.KV_SLOTS > 0:
        rings.k_ring.release(turn)
        release_ds(rings, step, True)
    add_dq(first_sums + due_tile, dq)
    dk = dk * work.softmax_scale
    if units.KV_SLOTS == 0:
        store_rows(dv_target, dv, own_v, batch, kv_of_batch, own_n, work.seqlen_k, HEAD_DIM)
    store_rows(dk_target, dk, own_v, batch, kv_of_batch, own_n, work.seqlen_k, HEAD_DIM)
    if units.KV_SLOTS > 0:
        fence_async_shared()  # the tile was written; the next load writes it past the cache
        rings.v_ring.release(turn)
    return step


@gluon.jit
def consume_units(
    work,
    units,
    rings,
    dq_sums,
    dk_target,
    dv_target,
    W: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    DQ_FIRST: gl.constexpr,
):
    """Warpgroup W: 64 of the 128 keys of every unit of this program."""
    if units.KV_SLOTS == 0:
        kv_head, start_n = keys_of_unit(units, gl.program_id(0))
        consume_unit(
            work,
            units,
            rings,
            dq_sums,
            dk_target,
            dv_target,
            kv_head,
            start_n,
            0,
            0,
            W,
            BLOCK_M,
            BIAS,
            DQ_FIRST,
        )
    else:
        turn = 0
        step = 0
        kv_head, start_n = announced_keys(rings.units, turn)
        while kv_head >= 0:
            step = consume_unit(
                work,
                units,
                rings,
                dq_sums,
                dk_target,
                dv_target,
                kv_head,
                start_n,
                turn,
                step,
                W,
                BLOCK_M,
                BIAS,
                DQ_FIRST,
            )
            rings.units.release(turn)
            turn += 1
            kv_head, start_n = announced_keys(rings.units, turn)


@gluon.jit(
    do_not_specialize=[
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "num_heads",
        "group_size",
        "padded_q",
        "blocks",
        "num_kv_heads",
        "kv_heads",
        "heads_per_group",
        "unit_count",
    ]
)
def backward_kv_kernel(
    q_desc,
    k_desc,
    v_desc,
    dout_desc,
    lse_desc,
    delta_desc,
    dq_sums,
    counter,
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
    num_kv_heads,
    kv_heads,
    heads_per_group,
    unit_count,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BIAS: gl.constexpr,
    DS_SLOTS: gl.constexpr,
    DQ_FIRST: gl.constexpr,
    KV_SLOTS: gl.constexpr,
    RAGGED_K: gl.constexpr,
    GROUPED: gl.constexpr,
):
    """dk and dv of 128 keys of one KV head, summed over its query heads; what they add to dq.

    A program takes units until none is left; without KV_SLOTS one, and `counter` may be None.
    """
    DTYPE: gl.constexpr = q_desc.dtype
    Q_TILE: gl.constexpr = [1, 1, BLOCK_M, BLOCK_D]
    Q_LAYOUT: gl.constexpr = q_desc.layout
    KV_LAYOUT: gl.constexpr = k_desc.layout
    KV_TILE: gl.constexpr = [1, 1, 64, BLOCK_D]
    KV_DEPTH: gl.constexpr = 2 if KV_SLOTS == 2 else 1
    UNIT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DS_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, BLOCK_M], DTYPE)
    rings = UnitRings(
        new_ring(DTYPE, KV_TILE, 2, KV_LAYOUT, KV_DEPTH, 1, 2),
        new_ring(DTYPE, KV_TILE, 2, KV_LAYOUT, KV_DEPTH, 1, 2),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        new_ring(DTYPE, Q_TILE, 1, Q_LAYOUT, 2, 1, 2),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], lse_desc.layout),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_M], delta_desc.layout),
        new_ring(DTYPE, [64, BLOCK_M], 2, DS_LAYOUT, DS_SLOTS, 2, 2),
        new_ring(gl.int32, [1], 2, UNIT, 2, 1, 2),
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
    units = Units(unit_count, blocks, num_kv_heads, kv_heads, heads_per_group, KV_SLOTS)
    gdc_wait()
    gdc_launch_dependents()
    # the tuples of arguments stand inline: in a named one constexprs become tensors
    gl.warp_specialize(
        [
            (
                consume_units,
                (
                    work,
                    units,
                    rings,
                    dq_sums,
                    dk_target,
                    dv_target,
                    0,
                    BLOCK_M,
                    BIAS,
                    DQ_FIRST,
                ),
            ),
            (
                consume_units,
                (
                    work,
                    units,
                    rings,
                    dq_sums,
                    dk_target,
                    dv_target,
                    1,
                    BLOCK_M,
                    BIAS,
                    DQ_FIRST,
                ),
            ),
            (
                produce_units,
                (
                    work,
                    units,
                    rings,
                    q_desc,
                    k_desc,
                    v_desc,
                    dout_desc,
                    lse_desc,
                    delta_desc,
                    counter,
                    BLOCK_M,
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
    dq_sums = new_workspace((heads, padded_q // 64, 64 * block_d), torch.float32)
    counter = new_workspace((1,), torch.int32) if knobs["KV_SLOTS"] else None
    statistics_arguments = (
        out,
        dout,
        lse,
        dlse,
        lse_rows,
        delta_rows,
        dq_sums,
        counter,
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
    block_n = 128
    kv_blocks = triton.cdiv(seqlen_k, block_n)
    units = kv_heads * kv_blocks
    heads_per_group = 1
    kv_arguments = (
        descriptor(q, s, h, block_m),
        descriptor(k, s, h, 64),
        descriptor(v, s, h, 64),
        descriptor(dout, s, h, block_m),
        row_descriptor(lse_rows, block_m),
        row_descriptor(delta_rows, block_m),
        dq_sums,
        counter,
        dk,
        dv,
        *scales,
        *strides_of(dk, s, h),
        *strides_of(dv, s, h),
        *lengths,
        *heads_of,
        kv_blocks,
        num_kv_heads,
        kv_heads,
        heads_per_group,
        units,
        head_dim,
        block_d,
        block_m,
        bias,
        knobs["DS_SLOTS"],
        knobs["DQ_FIRST"],
        knobs["KV_SLOTS"],
        seqlen_k % block_n != 0,
        num_heads != num_kv_heads,
    )
    dependent = {"num_warps": 4, "launch_pdl": True}  # starts before the launch before it is over
    options = {**dependent, "maxnreg": REGISTERS}
    statistics_grid = (heads * padded_q // STATISTICS_ROWS,)
    kv_grid = (min(units, num_sms) if knobs["KV_SLOTS"] else units,)  # an SM holds one program
    launches += [
        (statistics_kernel, statistics_grid, statistics_arguments, {"num_warps": 4}),
        (backward_kv_kernel, kv_grid, kv_arguments, options),
    ]
    convert_arguments = (
        dq_sums,
        dq,
        softmax_scale,
        *strides_of(dq, s, h),
        num_heads,
        seqlen_q,
        padded_q,
        head_dim,
        block_d,
    )
    convert_grid = (heads * triton.cdiv(seqlen_q, 64),)
    return [*launches, (convert_kernel, convert_grid, convert_arguments, dependent)]
