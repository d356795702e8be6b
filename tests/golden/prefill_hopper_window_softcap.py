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


# triton 3.6 calls them copies, later versions loads and stores
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# Prefill attention on Hopper: out = softmax(softmax_scale * q k^T + mask) v. Programs stay on their
# SM and go through many tiles of queries; in each program one warp, the producer, has the tensor
# memory accelerator load q, k and v, and WARPGROUPS warpgroups, the consumers, multiply and sum.
#
# Symbols
#   i, j          query row, key column; the query sits at position p = i + seqlen_k - seqlen_q
#   q, out        (batch, num_heads, seqlen_q, HEAD_DIM), in any order of the first three
#   k, v          (batch, num_kv_heads, seqlen_k, HEAD_DIM), each with strides of its own
#   lse           (batch, num_heads, seqlen_q) fp32, natural logarithm; inside it is base 2
#   tile          BLOCK_M = 64 * WARPGROUPS query rows of one head; each warpgroup has 64 of them
#   block         BLOCK_N keys; a tile walks its blocks from the last visible one down to the first
#   unit          what a program takes at a time: a tile, or with PAIR a long and a short one
#   turn, step    tiles, key blocks that a program has gone through
#   qk, p, acc    scores, exponentials, output sums of a warpgroup; fp32
#   diagonal      seqlen_k - seqlen_q, the position of the first query
#   low, high     query i sees the keys i + low to i + high, of those that there are
#   to_share      scale over softcap; qk becomes the scores' share of softcap, from -1 to 1
#   m_i, l_i      running maximum of the scaled scores (base 2) and sum of exponentials, per row
#
# Tunable
#   WARPGROUPS, BLOCK_N, NUM_STAGES    consumers, keys of a block, blocks of K and of V in flight
#   SCHEDULE      "static": round robin; "early", "late": from a counter, asked at a tile's first or
#                 last block. PAIR: a long and a short causal tile of a head make one unit
#   Q_BUFFERS     tiles of q in flight         Q_IN_REGISTERS  q is read once from shared memory
#   EPILOGUE      "tma": out leaves through the tile of q; "direct": by 16-byte stores
#   PING_PONG     warpgroups take turns in issuing products
#   SPLIT_WAIT    the softmax begins before the product with V is done
#   HEAD_GROUP_MIB   K and V of the heads that run side by side, so that they stay in the L2 cache
# Given by the problem
#   HEAD_DIM      channels; BLOCK_D the power of two that holds them
#   MASKED_BLOCKS 2: a row may see no key of a masked block, or none at all
#   RAGGED_Q      the last tile reaches past seqlen_q
#   ON_DIAGONAL   the diagonal of a tile starts at the first row of a block


@aggregate
class Work:
    """What a launch computes: the same for every program and warpgroup."""

    seqlen_q: gl.tensor
    seqlen_k: gl.tensor
    diagonal: gl.tensor
    low: gl.tensor
    high: gl.tensor
    to_share: gl.tensor
    num_heads: gl.tensor
    group_size: gl.tensor
    heads: gl.tensor
    heads_per_group: gl.tensor
    tiles: gl.tensor
    units_per_head: gl.tensor
    units_per_group: gl.tensor
    units: gl.tensor
    MASKED_BLOCKS: gl.constexpr
    RAGGED_Q: gl.constexpr
    ON_DIAGONAL: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        seqlen_q,
        seqlen_k,
        diagonal,
        low,
        high,
        to_share,
        num_heads,
        group_size,
        heads,
        heads_per_group,
        tiles,
        units_per_head,
        units_per_group,
        units,
        MASKED_BLOCKS,
        RAGGED_Q,
        ON_DIAGONAL,
    ):
        self.seqlen_q = seqlen_q
        self.seqlen_k = seqlen_k
        self.diagonal = diagonal
        self.low = low
        self.high = high
        self.to_share = to_share
        self.num_heads = num_heads
        self.group_size = group_size
        self.heads = heads
        self.heads_per_group = heads_per_group
        self.tiles = tiles
        self.units_per_head = units_per_head
        self.units_per_group = units_per_group
        self.units = units
        self.MASKED_BLOCKS = gl.constexpr(MASKED_BLOCKS)
        self.RAGGED_Q = gl.constexpr(RAGGED_Q)
        self.ON_DIAGONAL = gl.constexpr(ON_DIAGONAL)


@aggregate
class Config:
    """How it is computed: the knobs, of which HEAD_DIM is none."""

    HEAD_DIM: gl.constexpr
    BLOCK_N: gl.constexpr
    WARPGROUPS: gl.constexpr
    SCHEDULE: gl.constexpr
    PAIR: gl.constexpr
    EPILOGUE: gl.constexpr
    Q_IN_REGISTERS: gl.constexpr
    PING_PONG: gl.constexpr
    SPLIT_WAIT: gl.constexpr

    @gluon.constexpr_function
    def __init__(
        self,
        HEAD_DIM,
        BLOCK_N,
        WARPGROUPS,
        SCHEDULE,
        PAIR,
        EPILOGUE,
        Q_IN_REGISTERS,
        PING_PONG,
        SPLIT_WAIT,
    ):
        self.HEAD_DIM = gl.constexpr(HEAD_DIM)
        self.BLOCK_N = gl.constexpr(BLOCK_N)
        self.WARPGROUPS = gl.constexpr(WARPGROUPS)
        self.SCHEDULE = gl.constexpr(SCHEDULE)
        self.PAIR = gl.constexpr(PAIR)
        self.EPILOGUE = gl.constexpr(EPILOGUE)
        self.Q_IN_REGISTERS = gl.constexpr(Q_IN_REGISTERS)
        self.PING_PONG = gl.constexpr(PING_PONG)
        self.SPLIT_WAIT = gl.constexpr(SPLIT_WAIT)


@gluon.jit
def tile_of_unit(
    work,
    config,
    unit,
    half,
):
    """(flat head, first query row, first key block, key blocks) of a unit's tile; `half` is 0.

    Heads are taken in groups whose K and V share the L2 cache. Within a group all heads of one tile
    run before the next tile.
    """
    BLOCK_M: gl.constexpr = 64 * config.WARPGROUPS
    group_first = unit // work.units_per_group * work.heads_per_group
    group_heads = gl.minimum(work.heads_per_group, work.heads - group_first)
    within = unit - group_first * work.units_per_head
    head = group_first + within % group_heads
    tile = within // group_heads
    tile = work.tiles - 1 - tile  # of a causal window the last rows see the most keys
    start_m = tile * BLOCK_M
    first, blocks = key_blocks(work, config, start_m, BLOCK_M)
    return head, start_m, first, blocks


@gluon.jit
def key_blocks(
    work,
    config,
    start_m,
    ROWS: gl.constexpr,
):
    """(first, blocks): those that hold the keys that any of ROWS query rows sees, the first one of
    them below seqlen_q; at least one is walked."""
    first = gl.maximum(start_m + work.low, 0) // config.BLOCK_N
    end = gl.minimum(gl.minimum(start_m + ROWS, work.seqlen_q) + work.high, work.seqlen_k)
    end = gl.maximum(end, 1)  # no key is visible: all of the block is masked
    return first, (end + config.BLOCK_N - 1) // config.BLOCK_N - first


@gluon.jit
def seen_by_all(
    work,
    start_m,
):
    """(from, to): each of 64 query rows from `start_m` on sees the keys from `from` to `to` - 1."""
    seen_from = gl.minimum(start_m + 64, work.seqlen_q) - 1 + work.low
    return seen_from, gl.minimum(start_m + work.high + 1, work.seqlen_k)


@gluon.jit
def static_unit(
    config,
    turn,
):
    """The unit of this program's tile number `turn` where units go round robin."""
    if config.PAIR:
        turn = turn // 2
    return gl.program_id(0) + turn * gl.num_programs(0)


@aggregate
class Ring:
    """Slots of shared memory that the producer fills and the consumers empty, in turn.

    Slot number `step` % DEPTH holds the step's tile between the two barriers of the slot: `full`,
    on which its load arrives, and `empty`, on which every consumer does.
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
    def wait_full(self, step):
        mbarrier.wait(self.full.index(step % self.DEPTH), (step // self.DEPTH) & 1)

    @gluon.jit
    def wait_empty(self, step):
        # in the first round all slots are empty: the phase before the first counts as completed
        mbarrier.wait(self.empty.index(step % self.DEPTH), (step // self.DEPTH) & 1 ^ 1)

    @gluon.jit
    def release(self, step):
        mbarrier.arrive(self.empty.index(step % self.DEPTH), count=1)


@aggregate
class Rings:
    """The rings of a program: tiles of q, blocks of k and of v, and units from a counter."""

    q: Ring
    k: Ring
    v: Ring
    units: Ring

    @gluon.constexpr_function
    def __init__(self, q, k, v, units):
        self.q = q
        self.k = k
        self.v = v
        self.units = units


@gluon.jit
def new_ring(
    DTYPE: gl.constexpr,
    TILE: gl.constexpr,
    TILES_PER_SLOT: gl.constexpr,
    LAYOUT: gl.constexpr,
    DEPTH: gl.constexpr,
    CONSUMERS: gl.constexpr,
):
    """A ring of DEPTH empty slots, each of TILES_PER_SLOT tiles."""
    slots = gl.allocate_shared_memory(DTYPE, slots_shape(DEPTH * TILES_PER_SLOT, TILE), LAYOUT)
    full = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [DEPTH, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(DEPTH):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=CONSUMERS)
    return Ring(slots, full, empty, DEPTH)


@gluon.constexpr_function
def slots_shape(slots, tile):
    return [slots, *tile]


@gluon.constexpr_function
def bar_assembly(op, barrier):
    # 256 threads meet: a warpgroup that waits and the one that arrives
    return f"bar.{op} {barrier}, 256; mov.u32 $0, $1;"


@gluon.jit
def named_barrier(
    operand,
    OP: gl.constexpr,
    BARRIER: gl.constexpr,
):
    """bar.sync or bar.arrive on a hardware barrier; `operand` is any int32 of the moment."""
    gl.inline_asm_elementwise(
        bar_assembly(OP, BARRIER), "=r,r", [operand], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def take_turn(
    config,
    operand,
    W: gl.constexpr,
):
    """Wait until it is warpgroup W's turn to issue products."""
    if config.PING_PONG:
        # barriers 0, 1 and from 2 on, one a partition, are the compiler's: take the last ones
        named_barrier(operand, "sync", 16 - config.WARPGROUPS + W)


@gluon.jit
def pass_turn(
    config,
    operand,
    W: gl.constexpr,
):
    """Give the turn to the warpgroup after W."""
    if config.PING_PONG:
        WARPGROUPS: gl.constexpr = config.WARPGROUPS
        named_barrier(operand, "arrive", 16 - WARPGROUPS + (W + 1) % WARPGROUPS)


@gluon.jit
def load_q(
    q_desc,
    q_ring,
    turn,
    batch,
    head,
    start_m,
    WARPGROUPS: gl.constexpr,
):
    """Load the queries of a tile, 64 rows for each warpgroup, once their slot is empty."""
    slot = turn % q_ring.DEPTH
    q_ring.wait_empty(turn)
    mbarrier.expect(q_ring.full.index(slot), WARPGROUPS * q_desc.block_type.nbytes)
    for w in gl.static_range(WARPGROUPS):
        tma_load(
            q_desc,
            [batch, head, start_m + w * 64, 0],
            q_ring.full.index(slot),
            q_ring.slots.index(slot * WARPGROUPS + w),
        )


@gluon.jit
def load_block(
    desc,
    ring,
    step,
    batch,
    kv_head,
    start_n,
):
    """Load one block of keys or of values once its slot is empty. Past seqlen_k come zeros."""
    slot = step % ring.DEPTH
    ring.wait_empty(step)
    mbarrier.expect(ring.full.index(slot), desc.block_type.nbytes)
    tma_load(desc, [batch, kv_head, start_n, 0], ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def announce_unit(
    unit_ring,
    turn,
    unit,
):
    """Tell the consumers the unit of the tile after `turn`."""
    LANE: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    unit_ring.wait_empty(turn)
    unit_ring.slots.index(turn % unit_ring.DEPTH).store(gl.full([1], 0, gl.int32, LANE) + unit)
    mbarrier.arrive(unit_ring.full.index(turn % unit_ring.DEPTH), count=1)


@gluon.jit
def produce(
    work,
    config,
    rings,
    q_desc,
    k_desc,
    v_desc,
    counter,
):
    """The producer warp: loads what the consumers will need, in the order they will need it."""
    WARPGROUPS: gl.constexpr = config.WARPGROUPS
    turn = 0
    step = 0
    unit = gl.program_id(0)
    next_unit = 0
    while unit < work.units:
        flat_head, start_m, first, blocks = tile_of_unit(work, config, unit, 0)
        batch = flat_head // work.num_heads
        head = flat_head % work.num_heads
        kv_head = head // work.group_size
        for j in range(blocks):
            start_n = (first + blocks - 1 - j) * config.BLOCK_N
            if rings.q.DEPTH > 1:
                if j == 0:
                    load_q(q_desc, rings.q, turn, batch, head, start_m, WARPGROUPS)
            load_block(k_desc, rings.k, step, batch, kv_head, start_n)
            if rings.q.DEPTH == 1:  # the only slot is emptied late: the first keys go before
                if j == 0:
                    load_q(q_desc, rings.q, turn, batch, head, start_m, WARPGROUPS)
            load_block(v_desc, rings.v, step, batch, kv_head, start_n)
            if config.SCHEDULE != "static":
                if j == (0 if config.SCHEDULE == "early" else blocks - 1):
                    next_unit = gl.atomic_add(counter, 1) + gl.num_programs(0)
                    announce_unit(rings.units, turn, next_unit)
            step += 1
        turn += 1
        if config.SCHEDULE == "static":
            unit = static_unit(config, turn)
        else:
            unit = next_unit


# tanh of a thread's scores, in place. Up to 0.8, where scores are that are not near their cap, a
# short polynomial is enough, for which the matrix unit leaves time. A warp branches past the rest;
# a score beyond has the same bits whatever its neighbours are. (The unit for exponentials has a
# tanh too, of 11 bits, which lse would show.)


@gluon.jit
def soft_capped(
    qk,
    to_share,
):
    """tanh of scores times `to_share`, which is scale over softcap: their share of softcap."""
    PER_THREAD: gl.constexpr = qk.shape[1] // 2
    shares = gl.inline_asm_elementwise(
        share_assembly(PER_THREAD),
        share_constraints(PER_THREAD),
        [by_lane(qk), to_share],
        dtype=gl.float32,
        is_pure=False,  # its vote is of all lanes
        pack=PER_THREAD,
    )
    return gl.convert_layout(shares.reshape(qk.shape), qk.type.layout, assert_trivial=True)


@gluon.constexpr_function
def share_assembly(n):
    """A thread's n scores $0 and on, in and out, and to_share from $2n on."""
    lines = ["{", ".reg .pred own, far, near;", ".reg .f32 a, b, c, d, x, z, y, above, below;"]
    for i in range(n):  # four maxima at a time, each of which would wait for the last
        top = "abcd"[i % 4]
        lines += [f"abs.f32 x, ${i};", f"max.f32 {top}, {top}, x;"] if i > 3 else []
        lines += [f"abs.f32 {top}, ${i};"] if i <= 3 else []
    lines += ["max.f32 a, a, b;", "max.f32 c, c, d;", "max.f32 a, a, c;"]
    lines += [f"mul.f32 a, a, ${2 * n};", "setp.gt.f32 own, a, 0.8;"]
    lines += ["vote.sync.any.pred far, own, 0xffffffff;", "not.pred near, far;"]
    lines += ["@!near bra.uni beyond;"]
    for i in range(n):
        lines += [*near_tanh(i, n), f"mov.f32 ${i}, y;"]
    lines += ["beyond:", "@!far bra.uni done;"]
    for i in range(n):
        lines += [*near_tanh(i, n), *far_tanh(), "abs.f32 x, x;", "setp.gt.f32 own, x, 0.8;"]
        lines += [f"selp.f32 ${i}, above, y, own;"]
    return "\n".join([*lines, "done:", "}"])


@gluon.constexpr_function
def near_tanh(i, n):
    """x and its tanh y, within 3 units in the last place up to 0.8."""
    first, *others = (
        "-0.00435529929",
        "0.0190933011",
        "-0.0531143136",
        "0.13321048",
        "-0.333326757",
        "0.99999994",
    )
    steps = [f"fma.rn.f32 y, y, z, {each};" for each in others]
    begin = [f"mul.f32 x, ${i}, ${2 * n};", "mul.f32 z, x, x;", f"mov.f32 y, {first};"]
    return [*begin, *steps, "mul.f32 y, y, x;"]


@gluon.constexpr_function
def far_tanh():
    """`above`, the tanh of any x: a quotient of polynomials (that of Eigen) up to 7.9, from where
    on it is 1 in fp32."""
    odd = (
        "-2.76076847742355e-16",
        "2.00018790482477e-13",
        "-8.60467152213735e-11",
        "5.12229709037114e-08",
        "1.48572235717979e-05",
        "6.37261928875436e-04",
        "4.89352455891786e-03",
    )
    even = (
        "1.19825839466702e-06",
        "1.18534705686654e-04",
        "2.26843463243900e-03",
        "4.89352518554385e-03",
    )
    lines = ["max.f32 z, x, -7.90531110763549805;", "min.f32 z, z, 7.90531110763549805;"]
    lines += ["mul.f32 a, z, z;", f"mov.f32 above, {odd[0]};", f"mov.f32 below, {even[0]};"]
    lines += [f"fma.rn.f32 above, above, a, {each};" for each in odd[1:]]
    lines += [f"fma.rn.f32 below, below, a, {each};" for each in even[1:]]
    lines += ["mul.f32 above, above, z;", "rcp.approx.ftz.f32 below, below;"]
    return [*lines, "mul.f32 above, above, below;"]


@gluon.constexpr_function
def share_constraints(n):
    return ",".join(["=&f"] * n + [str(i) for i in range(n)] + ["f"] * n)


# A softmax that rescales lazily. Sums are taken with a maximum of their rows, m_i, that is replaced
# only where a score exceeds it by more than 8 (base 2): no exponential is above 2^8, and while none
# would be, a warp branches past the multiplications of its sums. Of a row each of the four lanes
# that hold it has, in m_i and l_i (64, 4), its maximum and the sum of the exponentials it holds.


@gluon.jit
def by_lane(x):
    """(64, n) as (64, n / 8, 4, 2), of which axis 2 is the lanes of a row and needs no move."""
    return x.reshape([64, x.shape[1] // 8, 4, 2])


@gluon.jit
def own_maximum(qk):
    """(64, 4): the largest of the scores of a row that each of its lanes holds."""
    return gl.max(gl.max(by_lane(qk), 3), 1)


@gluon.jit
def own_sum(p):
    """(64, 4): the sum of the exponentials of a row that each of its lanes holds."""
    return gl.sum(gl.sum(by_lane(p), 3), 1)


@gluon.jit
def first_softmax(
    qk,
    scale_log2,
    MASKED_BLOCKS: gl.constexpr,
):
    """(p, m_i, l_i) of a tile's first block of scores."""
    row_max = gl.max(qk, 1) * scale_log2
    if MASKED_BLOCKS == 2:
        # a row may see no key of the block; any finite maximum keeps inf - inf away
        row_max = gl.maximum(row_max, -3.0e38)
    p = gl.exp2(qk * scale_log2 - row_max[:, None])  # one multiply-add and one exp2
    l_i = own_sum(p)
    LANES: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    row_max = gl.convert_layout(row_max, LANES, assert_trivial=True)
    m_i, l_i = gl.broadcast(row_max[:, None], l_i)
    return p, m_i, l_i


@gluon.jit
def lazy_softmax(
    qk,
    m_i,
    l_i,
    scale_log2,
):
    """(p, alpha, raised, m_i, l_i) of a further block; alpha is the factor of what was summed
    before, and `raised` whether any row of the warp has another one than 1."""
    # &: results are written while operands are still to be read
    m_i, alpha, raised = gl.inline_asm_elementwise(
        raise_assembly(),
        "=&f,=&f,=&f,=&f,=&r,=&r,f,f,0,1,f,f",
        [own_maximum(qk), m_i, scale_log2],
        dtype=(gl.float32, gl.float32, gl.int32),
        is_pure=False,  # its vote is of all lanes
        pack=2,
    )
    p = gl.exp2(by_lane(qk) * scale_log2 - m_i[:, None, :, None])
    p = gl.convert_layout(p.reshape(qk.shape), qk.type.layout, assert_trivial=True)
    return p, alpha, raised, m_i, l_i * alpha + own_sum(p)


@gluon.constexpr_function
def raise_assembly():
    """A thread's two rows: their maxima $0 and $1, in and out, their factors $2 and $3, whether the
    warp has raised any $4 and $5, their own largest scores $6 and $7, the scale $10."""
    return """{
        .reg .pred raised, second;
        .reg .f32 a, b, x, y;
        neg.f32 x, $0;
        neg.f32 y, $1;
        fma.rn.f32 a, $6, $10, x;
        fma.rn.f32 b, $7, $10, y;
        max.f32 a, a, b;
        setp.gt.f32 raised, a, 8.0;
        vote.sync.any.pred raised, raised, 0xffffffff;
        mov.f32 $2, 1.0;
        mov.f32 $3, 1.0;
        selp.b32 $4, 1, 0, raised;
        mov.b32 $5, $4;
        @!raised bra.uni kept;
        mul.f32 a, $6, $10;
        mul.f32 b, $7, $10;
        shfl.sync.bfly.b32 x, a, 2, 31, 0xffffffff;
        shfl.sync.bfly.b32 y, b, 2, 31, 0xffffffff;
        max.f32 a, a, x;
        max.f32 b, b, y;
        shfl.sync.bfly.b32 x, a, 1, 31, 0xffffffff;
        shfl.sync.bfly.b32 y, b, 1, 31, 0xffffffff;
        max.f32 a, a, x;
        max.f32 b, b, y;
        sub.f32 x, a, $0;
        sub.f32 y, b, $1;
        setp.gt.f32 raised, x, 8.0;
        setp.gt.f32 second, y, 8.0;
        selp.f32 a, a, $0, raised;
        selp.f32 b, b, $1, second;
        sub.f32 x, $0, a;
        sub.f32 y, $1, b;
        ex2.approx.ftz.f32 $2, x;
        ex2.approx.ftz.f32 $3, y;
        mov.f32 $0, a;
        mov.f32 $1, b;
    kept:
    }"""


@gluon.jit
def for_each(
    sums,
    x,
):
    """(64, n / 8, 4, 2): x (64, 4) for each of the sums of a row that its lanes hold."""
    LANES: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(3, sums.type.layout))
    x = gl.convert_layout(x, LANES, assert_trivial=True)
    _, wide = gl.broadcast(sums, x[:, None, :, None])
    return wide


@gluon.jit
def rescaled(
    acc,
    alpha,
    raised,
):
    """acc times its rows' factors, by warps that have raised a maximum alone."""
    PER_THREAD: gl.constexpr = acc.shape[1] // 2
    sums = by_lane(acc)
    sums = gl.inline_asm_elementwise(
        rescale_assembly(PER_THREAD),
        rescale_constraints(PER_THREAD),
        [sums, for_each(sums, alpha), for_each(sums, raised)],
        dtype=gl.float32,
        is_pure=False,
        pack=PER_THREAD,
    )
    return gl.convert_layout(sums.reshape(acc.shape), acc.type.layout, assert_trivial=True)


@gluon.constexpr_function
def rescale_assembly(n):
    """A thread's n sums of two rows, in and out, which lie two and two: $0 and $1 of the first row,
    $2 and $3 of the second one; their factors from $2n on, whether to multiply $3n."""
    lines = [
        "{",
        ".reg .pred raised;",
        f"setp.ne.s32 raised, ${3 * n}, 0;",
        "@!raised bra.uni kept;",
    ]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n)]
    return "\n".join([*lines, "kept:", "}"])


@gluon.constexpr_function
def rescale_constraints(n):
    return ",".join(["=&f"] * n + [str(i) for i in range(n)] + ["f"] * n + ["r"] * n)


@gluon.jit
def carried(
    p,
    WARPGROUPS: gl.constexpr,
    DTYPE: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """The exponentials p (64, n) as they go from a block to the next: rounded, an operand.

    Of three warpgroups the first one would turn the halves of each pair about in every block: they
    carry pairs as int32 (64, n / 2), which are an operand without an instruction.
    """
    if WARPGROUPS == 3:
        low, high = gl.split(p.reshape([64, p.shape[1] // 2, 2]))
        rounded = gl.inline_asm_elementwise(
            pair_assembly(DTYPE), "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        rounded = gl.convert_layout(p.to(DTYPE), OPERAND)
    return rounded


@gluon.constexpr_function
def pair_assembly(dtype):
    return f"cvt.rn.{'bf16' if dtype == gl.bfloat16 else 'f16'}x2.f32 $0, $2, $1;"


@gluon.jit
def operand(
    rounded,
    WARPGROUPS: gl.constexpr,
    DTYPE: gl.constexpr,
    OPERAND: gl.constexpr,
):
    """What was carried as the left side of a product."""
    if WARPGROUPS == 3:
        low = rounded.to(gl.int16).to(DTYPE, bitcast=True)
        high = (rounded >> 16).to(gl.int16).to(DTYPE, bitcast=True)
        p = gl.join(low, high).reshape([64, 2 * rounded.shape[1]])
        p = gl.convert_layout(p, OPERAND, assert_trivial=True)
    else:
        p = rounded
    return p


@gluon.jit
def hide(
    work,
    config,
    qk,
    start_m,
    start_n,
    W: gl.constexpr,
):
    """Scores of warpgroup W's 64 rows from `start_m` on, -inf where a row does not see the key."""
    LAYOUT: gl.constexpr = qk.type.layout
    offs_n = gl.arange(0, config.BLOCK_N, gl.SliceLayout(0, LAYOUT))
    # counted from the block's first key
    offs_m = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    first = offs_m + (start_m + work.low - start_n)
    last = gl.minimum(offs_m + (start_m + work.high - start_n), work.seqlen_k - 1 - start_n)
    seen = (first[:, None] <= offs_n[None, :]) & (offs_n[None, :] <= last[:, None])
    return gl.where(seen, qk, float("-inf"))


@aggregate
class Result:
    """Where out and lse go. `desc` may be None for the direct epilogue, `lse` always."""

    desc: gl.base_value
    out: gl.tensor
    lse: gl.base_value
    stride_ob: gl.tensor
    stride_oh: gl.tensor
    stride_os: gl.tensor
    stride_lh: gl.tensor

    @gluon.constexpr_function
    def __init__(self, desc, out, lse, stride_ob, stride_oh, stride_os, stride_lh):
        self.desc = gl.constexpr(None) if desc is None else desc
        self.out = out
        self.lse = gl.constexpr(None) if lse is None else lse
        self.stride_ob = stride_ob
        self.stride_oh = stride_oh
        self.stride_os = stride_os
        self.stride_lh = stride_lh


@gluon.constexpr_function
def row_layout(columns):
    """(64, columns) over a warpgroup: a warp's rows as the matrix unit leaves them, but 8
    neighbouring columns a thread, which are 16 bytes to store."""
    far = [[0, 1 << bit] for bit in range(5, columns.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0], *far],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]],
        [],
        [64, columns],
    )


@gluon.jit
def store_tile(
    work,
    config,
    result,
    acc,
    m_i,
    l_i,
    flat_head,
    start_m,
    q_tile,
):
    """Write a warpgroup's 64 rows of out and lse; `q_tile` is its tile of q, free by now."""
    ROWS: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
    BLOCK_D: gl.constexpr = acc.shape[1]
    batch = flat_head // work.num_heads
    head = flat_head % work.num_heads
    inverse = gl.convert_layout(1.0 / l_i, ROWS)
    out_tile = acc * inverse[:, None]
    if work.MASKED_BLOCKS == 2:
        out_tile = gl.where(gl.convert_layout(l_i, ROWS)[:, None] == 0.0, 0.0, out_tile)
    out_tile = out_tile.to(q_tile.dtype)
    if config.EPILOGUE == "tma":
        q_tile.reshape([64, BLOCK_D]).store(out_tile)
        fence_async_shared()
        tma_store(result.desc, [batch, head, start_m, 0], q_tile)
    else:
        # shuffles among four lanes, then stores of 16 bytes
        STORED: gl.constexpr = row_layout(BLOCK_D)
        out_tile = gl.convert_layout(out_tile, STORED)
        offs_m = start_m + gl.arange(0, 64, gl.SliceLayout(1, STORED))
        offs_d = gl.arange(0, BLOCK_D, gl.SliceLayout(0, STORED))
        out = (
            result.out
            + batch.to(gl.int64) * result.stride_ob
            + head.to(gl.int64) * result.stride_oh
        )
        inside = (offs_m < work.seqlen_q)[:, None]
        if config.HEAD_DIM != BLOCK_D:
            inside = inside & (offs_d < config.HEAD_DIM)[None, :]
        rows = offs_m.to(gl.int64) * result.stride_os
        gl.store(out + (rows[:, None] + offs_d[None, :]), out_tile, mask=inside)
    if result.lse is not None:
        offs_m = start_m + gl.arange(0, 64, m_i.type.layout)
        lse_log2 = m_i + gl.log2(l_i)  # -inf for a row that sees no key
        lse = result.lse + flat_head.to(gl.int64) * result.stride_lh
        gl.store(lse + offs_m, lse_log2 * 0.6931471805599453, mask=offs_m < work.seqlen_q)  # ln(2)


@gluon.jit
def attend(
    work,
    config,
    rings,
    q_tile,
    start_m,
    first,
    blocks,
    turn,
    step,
    scale_log2,
    W: gl.constexpr,
):
    """(acc, m_i, l_i, step) of warpgroup W's 64 rows after `blocks` key blocks, the last one first.

    They are those from block number `first` on.
    The product of q with the next keys is in flight while V is multiplied with the exponentials.
    """
    MASKED_BLOCKS: gl.constexpr = work.MASKED_BLOCKS
    BLOCK_N: gl.constexpr = config.BLOCK_N
    BLOCK_D: gl.constexpr = q_tile.shape[1]
    QK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_D, 16])
    P: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    if config.Q_IN_REGISTERS:
        q = q_tile.load(gl.DotOperandLayout(0, QK, 2))
    else:
        q = q_tile
    rings.k.wait_full(step)
    take_turn(config, step, W)
    zero = gl.zeros([64, BLOCK_N], gl.float32, QK)
    k_tile = rings.k.slots.index(step % rings.k.DEPTH).reshape([BLOCK_N, BLOCK_D])
    qk_async = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    pass_turn(config, step, W)
    qk = warpgroup_mma_wait(0, deps=[qk_async])
    rings.k.release(step)
    if config.Q_IN_REGISTERS and config.EPILOGUE == "direct":
        rings.q.release(turn)
    qk = soft_capped(qk, work.to_share)
    seen_from, seen_to = seen_by_all(work, start_m)
    start_n = (first + blocks - 1) * BLOCK_N
    qk = hide(work, config, qk, start_m, start_n, W)
    p, m_i, l_i = first_softmax(qk, scale_log2, MASKED_BLOCKS)
    p = carried(p, config.WARPGROUPS, q_tile.dtype, P)
    acc = gl.zeros([64, BLOCK_D], gl.float32, ACC)
    if config.EPILOGUE == "tma" and rings.q.DEPTH > 1:
        # the previous tile's out has left its slot by now
        tma.store_wait(0)
        mbarrier.arrive(rings.q.empty.index((turn + 1) % rings.q.DEPTH), count=1, pred=turn > 0)
    step += 1
    for j in range(1, blocks):
        rings.k.wait_full(step)
        if not config.SPLIT_WAIT:
            rings.v.wait_full(step - 1)
        take_turn(config, step, W)
        zero = gl.zeros([64, BLOCK_N], gl.float32, QK)
        k_tile = rings.k.slots.index(step % rings.k.DEPTH).reshape([BLOCK_N, BLOCK_D])
        qk_async = warpgroup_mma(q, k_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
        if config.SPLIT_WAIT:
            rings.v.wait_full(step - 1)
        v_tile = rings.v.slots.index((step - 1) % rings.v.DEPTH).reshape([BLOCK_N, BLOCK_D])
        left = operand(p, config.WARPGROUPS, q_tile.dtype, P)
        acc_async = warpgroup_mma(left, v_tile, acc, is_async=True)
        pass_turn(config, step, W)
        if config.SPLIT_WAIT:
            qk = warpgroup_mma_wait(1, deps=[qk_async])
            rings.k.release(step)
        else:
            qk, acc, p = warpgroup_mma_wait(0, deps=[qk_async, acc_async, p])
            rings.k.release(step)
            rings.v.release(step - 1)
        qk = soft_capped(qk, work.to_share)
        start_n -= BLOCK_N
        if (start_n < seen_from) | (start_n + BLOCK_N > seen_to):
            qk = hide(work, config, qk, start_m, start_n, W)
        p_new, alpha, raised, m_i, l_i = lazy_softmax(qk, m_i, l_i, scale_log2)
        if config.SPLIT_WAIT:
            acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
            rings.v.release(step - 1)
        acc = rescaled(acc, alpha, raised)
        p = carried(p_new, config.WARPGROUPS, q_tile.dtype, P)
        step += 1
    if not config.Q_IN_REGISTERS and config.EPILOGUE == "direct":
        rings.q.release(turn)
    rings.v.wait_full(step - 1)
    take_turn(config, step, W)
    v_tile = rings.v.slots.index((step - 1) % rings.v.DEPTH).reshape([BLOCK_N, BLOCK_D])
    left = operand(p, config.WARPGROUPS, q_tile.dtype, P)
    acc_async = warpgroup_mma(left, v_tile, acc, is_async=True)
    pass_turn(config, step, W)
    acc, p = warpgroup_mma_wait(0, deps=[acc_async, p])
    rings.v.release(step - 1)
    return acc, gl.max(m_i, 1), gl.sum(l_i, 1), step


@gluon.jit
def skip_blocks(
    config,
    rings,
    step,
    blocks,
    W: gl.constexpr,
):
    """The step after `blocks` key blocks of which the warpgroup sees nothing: just released."""
    for _ in range(blocks):
        take_turn(config, step, W)
        pass_turn(config, step, W)
        rings.k.wait_full(step)
        rings.k.release(step)
        rings.v.wait_full(step)
        rings.v.release(step)
        step += 1
    return step


@gluon.jit
def next_unit_of(
    config,
    rings,
    turn,
):
    """The unit of the tile after number `turn`: counted, or what the producer announces."""
    if config.SCHEDULE == "static":
        unit = static_unit(config, turn + 1)
    else:
        rings.units.wait_full(turn)
        told = rings.units.slots.index(turn % rings.units.DEPTH)
        unit = gl.max(told.load(gl.BlockedLayout([1], [32], [4], [0])), 0)
        rings.units.release(turn)
    return unit


@gluon.jit
def consume(
    work,
    config,
    rings,
    result,
    scale_log2,
    W: gl.constexpr,
):
    """Warpgroup W: rows 64 * W to 64 * W + 63 of every tile of this program."""
    WARPGROUPS: gl.constexpr = config.WARPGROUPS
    BLOCK_D: gl.constexpr = rings.q.slots.shape[4]
    BLOCKS_DIFFER: gl.constexpr = WARPGROUPS > 1
    if W == WARPGROUPS - 1:
        pass_turn(config, work.seqlen_q, W)  # the first turn is the first one's
    turn = 0
    step = 0
    unit = gl.program_id(0)
    while unit < work.units:
        flat_head, tile_start, first, blocks = tile_of_unit(work, config, unit, 0)
        start_m = tile_start + W * 64
        own_first, own_blocks = key_blocks(work, config, start_m, 64)
        own_first = gl.where(start_m < work.seqlen_q, own_first, first)
        own_blocks = gl.where(start_m < work.seqlen_q, own_blocks, 0)
        before = first + blocks - own_first - own_blocks
        rings.q.wait_full(turn)
        if BLOCKS_DIFFER:
            step = skip_blocks(config, rings, step, before, W)
        slot = turn % rings.q.DEPTH
        if own_blocks > 0:
            q_tile = rings.q.slots.index(slot * WARPGROUPS + W)
            acc, m_i, l_i, step = attend(
                work,
                config,
                rings,
                q_tile.reshape([64, BLOCK_D]),
                start_m,
                own_first,
                own_blocks,
                turn,
                step,
                scale_log2,
                W,
            )
            store_tile(work, config, result, acc, m_i, l_i, flat_head, start_m, q_tile)
            if config.EPILOGUE == "tma" and rings.q.DEPTH == 1:
                tma.store_wait(0)
                rings.q.release(turn)
        else:  # no rows in this tile: keep the barriers balanced
            take_turn(config, step, W)
            pass_turn(config, step, W)
            if config.EPILOGUE == "tma" and rings.q.DEPTH > 1:
                tma.store_wait(0)
                mbarrier.arrive(rings.q.empty.index((turn + 1) % rings.q.DEPTH), pred=turn > 0)
            else:
                rings.q.release(turn)
        if BLOCKS_DIFFER:
            step = skip_blocks(config, rings, step, blocks - before - own_blocks, W)
        unit = next_unit_of(config, rings, turn)
        turn += 1
    if W == 0:
        take_turn(config, step, W)  # the turn that nobody takes any more
    if config.EPILOGUE == "tma":
        tma.store_wait(0)


@gluon.jit(
    do_not_specialize=[
        "num_heads",
        "group_size",
        "heads",
        "heads_per_group",
        "tiles",
        "units_per_head",
        "units_per_group",
        "units",
        "seqlen_q",
        "seqlen_k",
        "diagonal",
        "low",
        "high",
        "stride_lh",
    ]
)
def prefill_hopper_kernel(
    low,
    high,
    to_share,
    q_desc,
    k_desc,
    v_desc,
    out_desc,
    out,
    lse,
    counter,
    scale_log2,
    stride_ob: gl.int64,
    stride_oh: gl.int64,
    stride_os: gl.int64,
    stride_lh: gl.int64,
    heads,
    num_heads,
    group_size,
    heads_per_group,
    tiles,
    units_per_head,
    units_per_group,
    units,
    seqlen_q,
    seqlen_k,
    diagonal,
    HEAD_DIM: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
    WARPGROUPS: gl.constexpr,
    SCHEDULE: gl.constexpr,
    PAIR: gl.constexpr,
    Q_BUFFERS: gl.constexpr,
    EPILOGUE: gl.constexpr,
    Q_IN_REGISTERS: gl.constexpr,
    PING_PONG: gl.constexpr,
    SPLIT_WAIT: gl.constexpr,
    MASKED_BLOCKS: gl.constexpr,
    ON_DIAGONAL: gl.constexpr,
    RAGGED_Q: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr,
    PRODUCER_REGISTERS: gl.constexpr,
):
    """A program that takes tiles until none is left. `lse` may be None; `counter` starts at 0 and
    may be None for the static schedule; `out_desc` may be None for the direct epilogue."""
    DTYPE: gl.constexpr = q_desc.dtype
    Q_TILE: gl.constexpr = [1, 1, 64, BLOCK_D]
    KV_TILE: gl.constexpr = [1, 1, BLOCK_N, BLOCK_D]
    Q_LAYOUT: gl.constexpr = q_desc.layout
    KV_LAYOUT: gl.constexpr = k_desc.layout
    UNIT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = Rings(
        new_ring(DTYPE, Q_TILE, WARPGROUPS, Q_LAYOUT, Q_BUFFERS, WARPGROUPS),
        new_ring(DTYPE, KV_TILE, 1, KV_LAYOUT, NUM_STAGES, WARPGROUPS),
        new_ring(DTYPE, KV_TILE, 1, KV_LAYOUT, NUM_STAGES, WARPGROUPS),
        new_ring(gl.int32, [1], 1, UNIT, 2, WARPGROUPS),
    )
    fence_async_shared()
    work = Work(
        seqlen_q,
        seqlen_k,
        diagonal,
        low,
        high,
        to_share,
        num_heads,
        group_size,
        heads,
        heads_per_group,
        tiles,
        units_per_head,
        units_per_group,
        units,
        MASKED_BLOCKS,
        RAGGED_Q,
        ON_DIAGONAL,
    )
    config = Config(
        HEAD_DIM,
        BLOCK_N,
        WARPGROUPS,
        SCHEDULE,
        PAIR,
        EPILOGUE,
        Q_IN_REGISTERS,
        PING_PONG,
        SPLIT_WAIT,
    )
    result = Result(
        out_desc,
        out,
        lse,
        stride_ob,
        stride_oh,
        stride_os,
        stride_lh,
    )
    # the tuples of arguments stand inline: in a named one constexprs become tensors
    if WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (consume, (work, config, rings, result, scale_log2, 0)),
                (produce, (work, config, rings, q_desc, k_desc, v_desc, counter)),
            ],
            [1],
            [PRODUCER_REGISTERS],
        )
    elif WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (consume, (work, config, rings, result, scale_log2, 0)),
                (consume, (work, config, rings, result, scale_log2, 1)),
                (produce, (work, config, rings, q_desc, k_desc, v_desc, counter)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (work, config, rings, result, scale_log2, 0)),
                (consume, (work, config, rings, result, scale_log2, 1)),
                (consume, (work, config, rings, result, scale_log2, 2)),
                (produce, (work, config, rings, q_desc, k_desc, v_desc, counter)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


# What a launch may need beside the attention itself: the counter of a schedule at zero, tensors
# that the tensor memory accelerator can name, and the result where there is no key at all.


@gluon.jit
def zero_counter_kernel(counter):
    """Set the counter that tiles are taken from to zero."""
    gl.store(counter, 0)


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
# registers of a thread: what the kernel starts with, and what consumers trade for; 64 Ki per SM
REGISTERS = {1: (128, 240), 2: (168, 240), 3: (128, 160)}
PRODUCER_REGISTERS = 24


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


def heads_per_group(heads, group_size, seqlen_k, head_dim, element_size, mib):
    """Query heads that run side by side: their K and V fill at most `mib` MiB, or are of one head.

    A power of two of KV heads, so that most groups are full.
    """
    kv_heads = max(1, (mib << 20) // (2 * seqlen_k * head_dim * element_size))
    return min(heads, (1 << (kv_heads.bit_length() - 1)) * group_size)


def masked(seqlen_q, seqlen_k, block_m, block_n):
    """(MASKED_BLOCKS, ON_DIAGONAL) of these lengths and tiles."""
    return 2, False


def plan(q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace):
    """The launches: [(kernel, grid, arguments, options)]. Nothing is read from the device.

    Of a q, k or v whose strides no descriptor can name (they step by 16 bytes) a copy is made
    first; such an `out` is stored directly whatever the knob says.
    """
    s, h = (1, 2) if layout == "bshd" else (2, 1)  # axes of tokens and heads
    batch, seqlen_q, num_heads, head_dim = q.shape[0], q.shape[s], q.shape[h], q.shape[3]
    seqlen_k, num_kv_heads = k.shape[s], k.shape[h]
    if seqlen_k == 0:
        return without_keys(q, out, lse, s, h)
    launches = []
    q, k, v = (copied(tensor, s, h, launches, new_workspace) for tensor in (q, k, v))
    heads, group_size = batch * num_heads, num_heads // num_kv_heads
    warpgroups, block_n = knobs["WARPGROUPS"], knobs["BLOCK_N"]
    block_m = 64 * warpgroups
    tiles = triton.cdiv(seqlen_q, block_m)
    units_per_head = (tiles + 1) // 2 if knobs["PAIR"] else tiles
    units = heads * units_per_head
    grouped = heads_per_group(
        heads, group_size, seqlen_k, head_dim, k.element_size(), knobs["HEAD_GROUP_MIB"]
    )
    counter = None
    if knobs["SCHEDULE"] != "static":
        counter = new_workspace((1,), torch.int32)
        launches.append((zero_counter_kernel, (1,), (counter,), {"num_warps": 1}))
    epilogue = knobs["EPILOGUE"] if describable(out) else "direct"
    entry_registers, consumer_registers = REGISTERS[warpgroups]
    arguments = (
        descriptor(q, s, h, 64),
        descriptor(k, s, h, block_n),
        descriptor(v, s, h, block_n),
        descriptor(out, s, h, 64) if epilogue == "tma" else None,
        out,
        lse,
        counter,
        softmax_scale * LOG2_E,  # exp2 is one instruction: log2(e) goes into the scale
        *(steps(out)[axis] for axis in (0, h, s)),
        seqlen_q,
        heads,
        num_heads,
        group_size,
        grouped,
        tiles,
        units_per_head,
        grouped * units_per_head,
        units,
        seqlen_q,
        seqlen_k,
        seqlen_k - seqlen_q,
        head_dim,
        triton.next_power_of_2(head_dim),
        block_n,
        knobs["num_stages"],
        warpgroups,
        knobs["SCHEDULE"],
        knobs["PAIR"],
        knobs["Q_BUFFERS"],
        epilogue,
        knobs["Q_IN_REGISTERS"],
        knobs["PING_PONG"],
        knobs["SPLIT_WAIT"],
        *masked(seqlen_q, seqlen_k, block_m, block_n),
        seqlen_q % block_m != 0,
        consumer_registers,
        PRODUCER_REGISTERS,
    )
    # a program of one warpgroup leaves room for a second one on its SM
    grid = (min(units, num_sms * (2 if warpgroups == 1 else 1)),)
    options = {"num_warps": 4, "maxnreg": entry_registers}
    return [*launches, (prefill_hopper_kernel, grid, arguments, options)]


def plan_modified(
    modifiers, q, k, v, out, lse, softmax_scale, layout, num_sms, knobs, new_workspace
):
    """The launches of kernels that take `modifiers` beside what plan() is given.

    Of `modifiers` the text reads what it is for: `window` (left, right), -1 unbounded; `softcap`, a
    number; `sinks` (num_heads,).
    """
    scale = modifiers.softcap  # of what soft_capped gives
    plain = plan(q, k, v, out, lse, scale, layout, num_sms, knobs, new_workspace)
    *others, (kernel, grid, arguments, options) = plain
    given = []
    given += bounded(modifiers.window, q, k, layout)
    given.append(softmax_scale / modifiers.softcap)
    if kernel is no_keys_kernel:
        given = []  # it has a use for sinks alone
    return [*others, (kernel, grid, (*given, *arguments), options)]


def bounded(window, q, k, layout):
    """(low, high): query i sees the keys i + low to i + high, of those that there are."""
    s = 1 if layout == "bshd" else 2
    seqlen_q, seqlen_k = q.shape[s], k.shape[s]
    all_keys = seqlen_q + seqlen_k
    left, right = (min(side, all_keys) if side >= 0 else all_keys for side in window)
    return seqlen_k - seqlen_q - left, seqlen_k - seqlen_q + right
