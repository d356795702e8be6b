"""The prefill family for Hopper, in Gluon: a producer warp, 1 to 3 consumer warpgroups, wgmma.

Sums are rescaled only where their maximum is exceeded by much.
"""

from functools import lru_cache

from autoflash.config import Config, Knob
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import SWITCHES, Problem, Variant
from autoflash.runtime.hopper_validity import (
    hopper_block_d,
    hopper_heads_per_group,
    hopper_keys_seen,
    hopper_rounds,
    hopper_tiles,
    prefill_hopper_default,
    prefill_hopper_refusal,
    prefill_hopper_smem_bytes,
    prefill_hopper_unsupported,
)

PARTS = (
    "gluon_header.py.jinja",
    "shared/gluon_copies.py.jinja",
    "prefill_hopper/schedule.py.jinja",
    "prefill_hopper/rings.py.jinja",
    "prefill_hopper/producer.py.jinja",
    "prefill_hopper/softcap.py.jinja",
    "prefill_hopper/softmax.py.jinja",
    "prefill_hopper/scores.py.jinja",
    "prefill_hopper/store.py.jinja",
    "prefill_hopper/consumer.py.jinja",
    "prefill_hopper/kernel.py.jinja",
    "prefill_hopper/counter.py.jinja",
    "prefill_hopper/rows.py.jinja",
    "prefill_hopper/numbers.py.jinja",
    "prefill_hopper/descriptors.py.jinja",
    "prefill_hopper/plan.py.jinja",
    "prefill_hopper/plan_modified.py.jinja",
)

KNOBS = (
    Knob("WARPGROUPS", (2, 3, 1)),
    Knob("BLOCK_N", (128, 64)),
    Knob("num_stages", (2, 3)),
    Knob("SCHEDULE", ("late", "static", "early")),
    Knob("PAIR", (0, 1)),
    Knob("Q_BUFFERS", (2, 1)),
    Knob("EPILOGUE", ("tma", "direct")),
    Knob("Q_IN_REGISTERS", (1, 0)),
    Knob("PING_PONG", (0, 1)),
    Knob("SPLIT_WAIT", (1, 0)),
    Knob("HEAD_GROUP_MIB", (4, 24, 1, 48), compiled=False),
)

# By schedule: what was seen to pay, best first. A counter keeps more heads in flight.
HEAD_GROUPS = {"static": (1, 4), "early": (24, 4, 48), "late": (24, 4, 48)}
NARROW_WINDOW = 512  # keys, of which the edges of blocks of 128 are a large part
RESERVED_BYTES = 1024  # of shared memory, which the driver keeps for each program


def variant(problem: Problem) -> Variant:
    on = {name: True for name in problem.switches if name in SWITCHES}
    return Variant(family="prefill_hopper", op="prefill", **on)


@lru_cache
def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("prefill_hopper", prefill_hopper_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or has no chance to be fast; None for a candidate.

    The default is always a candidate: it is what the others must beat.
    """
    wrong = prefill_hopper_unsupported(problem, gpu)
    if wrong:
        return wrong
    if config == default(problem, gpu):
        return None
    # what is quick to see comes first: a schedule is simulated for the rest only
    return _hopeless(problem, config, gpu) or prefill_hopper_refusal(problem, config.as_dict(), gpu)


def _hopeless(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config cannot be fast, or None. A neighbouring shape is not held to it."""
    knobs = config.as_dict()
    return (
        _tile_hopeless(problem, knobs, gpu)
        or _flow_hopeless(problem, knobs)
        or _schedule_hopeless(problem, knobs, gpu)
    )


def _tile_hopeless(problem: Problem, knobs: dict, gpu: Gpu) -> str | None:
    """Of the tiles and the rings."""
    block_d, warpgroups = hopper_block_d(problem), knobs["WARPGROUPS"]
    if warpgroups > 1 and 32 * warpgroups >= problem.seqlen_q:
        return f"half of {64 * warpgroups} query rows lie past the {problem.seqlen_q}"
    if warpgroups == 3 and block_d > 64:
        return "three warpgroups pay at 64 channels"
    small_tile = warpgroups == 1 and block_d >= 128
    usual_n = 64 if block_d == 256 or small_tile else 128
    few_keys = problem.windowed and hopper_keys_seen(problem) <= NARROW_WINDOW
    narrow_blocks = knobs["BLOCK_N"] == 64 and few_keys
    if knobs["BLOCK_N"] != usual_n and not narrow_blocks:
        # H200, head_dim 128 causal: 64 keys lose 2 to 13 % with two warpgroups
        return f"BLOCK_N {knobs['BLOCK_N']} where {usual_n} is faster"
    stages = 3 if block_d == 64 or (block_d == 128 and knobs["BLOCK_N"] == 64) else 2
    if not small_tile and knobs["num_stages"] != stages:
        return (
            f"num_stages {knobs['num_stages']} where as many as fit are {5 - knobs['num_stages']}"
        )
    smem_bytes = prefill_hopper_smem_bytes(problem, knobs) + RESERVED_BYTES
    if warpgroups == 1 and problem.seqlen_q > 64 and 2 * smem_bytes > gpu.smem_per_sm:
        return "one warpgroup to an SM: its products wait for its softmax"
    two = {**knobs, "WARPGROUPS": 2}
    fills = hopper_rounds(problem, two, gpu) > 4
    if warpgroups == 1 and block_d == 64 and fills and not narrow_blocks:
        return "64 query rows at a time where tiles of 128 fill the GPU"
    return None


def _flow_hopeless(problem: Problem, knobs: dict) -> str | None:
    """Of the way of q in, of out, and of the products between."""
    buffers, direct = knobs["Q_BUFFERS"], knobs["EPILOGUE"] == "direct"
    if hopper_block_d(problem) < 256 and (buffers == 1) != direct:
        return "one buffer of q goes with direct stores, two with stores through q's tile"
    waits_once = not knobs["SPLIT_WAIT"]
    if waits_once and (knobs["WARPGROUPS"] < 3 or not knobs["PING_PONG"]):
        return "one wait for both products pays for three warpgroups that take turns"
    return None


def _schedule_hopeless(problem: Problem, knobs: dict, gpu: Gpu) -> str | None:
    """Of the order of the tiles."""
    schedule, mib = knobs["SCHEDULE"], knobs["HEAD_GROUP_MIB"]
    many_heads_pay = problem.causal and hopper_block_d(problem) == 128
    if knobs["PAIR"] and hopper_tiles(problem, knobs) % 2:
        return "the middle tile would be computed twice"
    if schedule != "static" and hopper_rounds(problem, knobs, gpu) == 1:
        return "every program has one tile, the counter has nothing to say"
    if mib not in HEAD_GROUPS[schedule] or (mib == 48 and not many_heads_pay):
        return f"groups of {mib} MiB do not suit the {schedule} schedule"
    grouped = hopper_heads_per_group(problem, mib)
    for other in HEAD_GROUPS[schedule][: HEAD_GROUPS[schedule].index(mib)]:
        if hopper_heads_per_group(problem, other) == grouped:
            return f"groups of {grouped} heads, as with HEAD_GROUP_MIB {other}"
    return None


FAMILY = Family(
    name="prefill_hopper",
    op="prefill",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=prefill_hopper_unsupported,
    misfit=prefill_hopper_refusal,
    refusal=refusal,
    default=default,
    interpretable=False,
    slow_to_compile=True,
)
