"""What the knobs of prefill_hopper must fulfil on a device, its default, its schedules simulated.

Asked by the family while tuning and again by the exported module for neighbouring shapes.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from heapq import heapreplace
from typing import Any

from .problem import Problem

# A schedule that keeps the SMs less busy than this, as a share of what "late" does, is refused.
HOPPER_LEAST_BALANCE = 0.93
HOPPER_TILE_OVERHEAD = 1  # what a tile costs beside its key blocks, in key blocks
HOPPER_MODIFIERS = ("softcap", "sinks")  # served, as windows are; the rest is the portable family's
HOPPER_SIMULATED_UNITS = 8192  # with more of them every schedule from a counter is even


def prefill_hopper_unsupported(problem: Problem, gpu: Any) -> str | None:
    """Why the Hopper prefill kernels cannot serve the problem on the GPU, or None."""
    p = problem
    if p.op != "prefill":
        return f"serves prefill, not {p.op}"
    if p.paged:
        return "keys in pages are not served"
    if p.varlen:
        return "packed sequences: the portable family's"
    if p.lengths != "equal":
        return "sequences of different lengths are not served"
    others = [name for name in p.modifiers if name not in HOPPER_MODIFIERS] + [*p.masks]
    if others:
        return f"{', '.join(others)}: the portable family's"
    if gpu.vendor != "nvidia" or gpu.capability != 90:
        return f"its products and barriers are of sm_90 alone, this is {gpu.arch}"
    if p.dtype not in ("bf16", "fp16"):
        return f"the products of a warpgroup round {p.dtype}; bf16 and fp16 are served"
    if p.kv_dtype != p.dtype or p.out_dtype != p.dtype:
        return f"kv_dtype {p.kv_dtype} and out_dtype {p.out_dtype} are not both dtype {p.dtype}"
    if p.head_dim_v != p.head_dim:
        return f"head_dim_v {p.head_dim_v} is not head_dim {p.head_dim}"
    if p.head_dim <= 32:
        return f"half of the narrowest tile, 64 channels, lies past head_dim {p.head_dim}"
    return None


def prefill_hopper_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why these knobs cannot serve the problem on the GPU, or None."""
    return (
        prefill_hopper_unsupported(problem, gpu)
        or hopper_tile_refusal(problem, knobs)
        or hopper_memory_refusal(problem, knobs, gpu)
        or hopper_schedule_refusal(problem, knobs, gpu)
    )


def hopper_tile_refusal(problem: Problem, knobs: Mapping[str, Any]) -> str | None:
    """Why no kernel of these knobs is right, or none without a serialised product; None if one."""
    block_d, warpgroups = hopper_block_d(problem), knobs["WARPGROUPS"]
    if knobs["num_stages"] < 2:
        return "one stage waits for itself: the keys are released after the next ones are awaited"
    if warpgroups == 1 and knobs["PING_PONG"]:
        return "a single warpgroup has no one to take turns with"
    # more than the registers hold, the assembler spills and serialises the products (C7512)
    if warpgroups == 3 and (block_d + knobs["BLOCK_N"] > 192 or knobs["Q_IN_REGISTERS"]):
        return "three warpgroups have registers for 192 scores and sums a row and no q"
    if warpgroups == 3 and problem.windowed:
        return "three warpgroups have no registers for the edges of a window"
    if block_d == 256 and (knobs["BLOCK_N"] > 64 or knobs["Q_IN_REGISTERS"]):
        return "256 channels leave registers for 64 scores a row and no q"
    if knobs["PAIR"] and (problem.windowed or not problem.causal):
        return "windows and full attention have no long and short tiles to pair"
    if knobs["PAIR"] and knobs["SCHEDULE"] != "static":
        return "pairs are of the static schedule"
    return None


def hopper_memory_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why a program does not fit the GPU, or None."""
    smem_bytes = prefill_hopper_smem_bytes(problem, knobs)
    if smem_bytes > gpu.smem_per_block:
        return (
            f"{smem_bytes} bytes of shared memory, a block of {gpu.arch} has {gpu.smem_per_block}"
        )
    return None


def hopper_schedule_refusal(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> str | None:
    """Why the knobs' schedule leaves the GPU idle, or None. Tiles of full attention are alike."""
    if problem.window == (-1, -1) or (knobs["SCHEDULE"] == "late" and not knobs["PAIR"]):
        return None
    balance = prefill_hopper_balance(problem, knobs, gpu)
    best = prefill_hopper_balance(problem, {**knobs, "SCHEDULE": "late", "PAIR": 0}, gpu)
    if balance < HOPPER_LEAST_BALANCE * best:
        return f"simulated, its programs are busy {balance:.2f} of the time, of late {best:.2f}"
    return None


def hopper_block_d(problem: Problem) -> int:
    """Channels of a tile, as plan() of the rendered text pads them."""
    return 1 << (problem.head_dim - 1).bit_length()


def prefill_hopper_smem_bytes(problem: Problem, knobs: Mapping[str, Any]) -> int:
    """A bound of the shared memory that a program takes: never less than what is compiled."""
    row = hopper_block_d(problem) * problem.dtype_bytes
    q_ring = knobs["Q_BUFFERS"] * knobs["WARPGROUPS"] * 64 * row
    kv_rings = 2 * knobs["num_stages"] * knobs["BLOCK_N"] * row
    # each warpgroup that stores directly changes hands of its rows through 2 KiB
    shuffled = 2048 * knobs["WARPGROUPS"] if knobs["EPILOGUE"] == "direct" else 0
    barriers = 1024
    return q_ring + kv_rings + shuffled + barriers


def hopper_programs(knobs: Mapping[str, Any], gpu: Any) -> int:
    """Programs that stay on the GPU, as plan() launches them."""
    return gpu.num_sms * (2 if knobs["WARPGROUPS"] == 1 else 1)


def hopper_tiles(problem: Problem, knobs: Mapping[str, Any]) -> int:
    """Tiles of query rows of one head."""
    return -(-problem.seqlen_q // (64 * knobs["WARPGROUPS"]))


def hopper_rounds(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> int:
    """How many tiles a program gets at most; where it is one, schedules do not differ."""
    tiles = problem.batch * problem.num_heads * hopper_tiles(problem, knobs)
    return -(-tiles // hopper_programs(knobs, gpu))


def hopper_heads_per_group(problem: Problem, head_group_mib: int) -> int:
    """Query heads that run side by side, as plan() of the rendered text counts them."""
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * problem.kv_dtype_bytes
    kv_heads = max(1, (head_group_mib << 20) // max(1, kv_bytes))
    grouped = (1 << (kv_heads.bit_length() - 1)) * problem.group_size
    return min(problem.batch * problem.num_heads, grouped)


def hopper_keys_seen(problem: Problem) -> int:
    """How many keys a query sees at most."""
    if -1 in problem.window:
        return problem.seqlen_k
    return min(problem.seqlen_k, sum(problem.window) + 1)


def prefill_hopper_balance(problem: Problem, knobs: Mapping[str, Any], gpu: Any) -> float:
    """The share of the time that the programs are busy on average, until the last one ends."""
    return hopper_balance(
        problem.seqlen_q,
        problem.seqlen_k,
        problem.window,
        64 * knobs["WARPGROUPS"],
        knobs["BLOCK_N"],
        problem.batch * problem.num_heads,
        hopper_heads_per_group(problem, knobs["HEAD_GROUP_MIB"]),
        knobs["SCHEDULE"],
        knobs["PAIR"],
        hopper_programs(knobs, gpu),
    )


@lru_cache(maxsize=1024)
def hopper_balance(
    seqlen_q: int,
    seqlen_k: int,
    window: tuple[int, int],
    block_m: int,
    block_n: int,
    heads: int,
    heads_per_group: int,
    schedule: str,
    pair: int,
    programs: int,
) -> float:
    """The same of plain numbers, by simulating the schedule in key blocks."""
    costs = hopper_tile_costs(seqlen_q, seqlen_k, window, block_m, block_n)
    useful = heads * sum(costs)
    if pair:
        half = (len(costs) + 1) // 2
        costs = [costs[-1 - tile] + costs[tile] for tile in range(half)]
    else:
        costs.reverse()
    # within a group of heads all heads of one tile run before the next tile
    full, rest = divmod(heads, heads_per_group)
    units = [cost for cost in costs for _ in range(heads_per_group)] * full
    units += [cost for cost in costs for _ in range(rest)]
    if schedule == "static":
        longest = max(sum(units[first::programs]) for first in range(programs))
    elif len(units) > HOPPER_SIMULATED_UNITS:
        return 1.0
    elif schedule == "early":
        longest = hopper_early_makespan(units, programs)
    else:
        longest = hopper_late_makespan(units, programs)
    return useful / (programs * longest)


def hopper_tile_costs(
    seqlen_q: int, seqlen_k: int, window: tuple[int, int], block_m: int, block_n: int
) -> list[int]:
    """The cost of each tile of a head, from its first query row to its last, in key blocks.

    `window` is how many keys before and after its position a query sees at most; -1 unbounded.
    """
    left, right = (side if side >= 0 else seqlen_q + seqlen_k for side in window)
    costs = []
    for start in range(0, seqlen_q, block_m):
        first_p = start + seqlen_k - seqlen_q
        last_p = min(start + block_m, seqlen_q) - 1 + seqlen_k - seqlen_q
        first = max(first_p - left, 0) // block_n
        end = max(min(last_p + right + 1, seqlen_k), 1)
        costs.append(-(-end // block_n) - first + HOPPER_TILE_OVERHEAD)
    return costs


def hopper_late_makespan(units: list[int], programs: int) -> int:
    """When the last program ends if each takes the next unit as it ends one."""
    ends = [0] * programs  # equal elements are a heap
    for cost in units:
        heapreplace(ends, ends[0] + cost)
    return max(ends)


def hopper_early_makespan(units: list[int], programs: int) -> int:
    """When the last program ends if each reserves its next unit as it begins one."""
    padded = units + [0] * (2 * programs)
    # (end of the present unit, cost of the reserved one), in the order of ending
    running = sorted(zip(padded[:programs], padded[programs : 2 * programs], strict=True))
    for cost in padded[2 * programs :]:
        end, reserved = running[0]
        heapreplace(running, (end + reserved, cost))
    return max(end + reserved for end, reserved in running)


# H200, by channels of a tile: (WARPGROUPS, BLOCK_N, num_stages, Q_BUFFERS, EPILOGUE,
# Q_IN_REGISTERS, PING_PONG, SPLIT_WAIT, SCHEDULE, PAIR, HEAD_GROUP_MIB) of causal and of full
# attention, each up to a number of keys seen; what won most of such lengths in searches there.
HOPPER_DEFAULTS: dict[tuple[int, bool], tuple[tuple[int, tuple[int | str, ...]], ...]] = {
    (64, True): (
        (2048, (2, 128, 3, 2, "tma", 1, 1, 1, "late", 0, 24)),
        (1 << 62, (3, 128, 3, 1, "direct", 0, 1, 1, "late", 0, 24)),
    ),
    (64, False): ((1 << 62, (3, 128, 3, 2, "tma", 0, 1, 1, "late", 0, 24)),),
    (128, True): (
        (1024, (2, 128, 2, 2, "tma", 1, 1, 1, "static", 1, 1)),
        (2048, (2, 128, 2, 2, "tma", 1, 1, 1, "early", 0, 24)),
        (1 << 62, (2, 128, 2, 2, "tma", 1, 0, 1, "late", 0, 24)),
    ),
    (128, False): ((1 << 62, (2, 128, 2, 2, "tma", 1, 0, 1, "static", 0, 1)),),
    (256, True): (
        (512, (2, 64, 2, 1, "direct", 0, 0, 1, "static", 1, 1)),
        (1 << 62, (2, 64, 2, 1, "direct", 0, 0, 1, "late", 0, 24)),
    ),
    (256, False): (
        (2048, (2, 64, 2, 1, "direct", 0, 1, 1, "static", 0, 1)),
        (1 << 62, (2, 64, 2, 1, "direct", 0, 1, 1, "late", 0, 4)),
    ),
}
# Of windows at 64 channels, where tiles of 192 rows have no registers for their edges. H200, 128
# keys seen: 108 us for what takes the second line 157.
HOPPER_WINDOW_DEFAULTS: tuple[tuple[int, tuple[int | str, ...]], ...] = (
    (256, (1, 64, 3, 2, "tma", 1, 0, 1, "static", 0, 1)),
    (1 << 62, (2, 128, 3, 2, "tma", 1, 1, 1, "late", 0, 24)),
)
HOPPER_KNOBS = (
    "WARPGROUPS",
    "BLOCK_N",
    "num_stages",
    "Q_BUFFERS",
    "EPILOGUE",
    "Q_IN_REGISTERS",
    "PING_PONG",
    "SPLIT_WAIT",
    "SCHEDULE",
    "PAIR",
    "HEAD_GROUP_MIB",
)


def prefill_hopper_default(problem: Problem, gpu: Any) -> dict[str, int | str]:
    """Knobs that prefill_hopper_refusal accepts wherever the problem is served."""
    block_d = hopper_block_d(problem)
    table = HOPPER_DEFAULTS[block_d, problem.causal]
    if problem.windowed and block_d == 64:
        table = HOPPER_WINDOW_DEFAULTS
    keys_seen = hopper_keys_seen(problem)
    values = next(values for keys, values in table if keys_seen <= keys)
    knobs: dict[str, int | str] = dict(zip(HOPPER_KNOBS, values, strict=True))
    if hopper_rounds(problem, knobs, gpu) == 1:
        return {**knobs, "SCHEDULE": "static", "PAIR": 0}
    if prefill_hopper_refusal(problem, knobs, gpu):
        return {**knobs, "SCHEDULE": "late", "PAIR": 0}  # no schedule of these tiles is evener
    return knobs
