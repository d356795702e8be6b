"""The portable prefill family: tiled attention in Triton, loaded by pointers or descriptors."""

from autoflash.config import Config, Knob
from autoflash.families.family import Family
from autoflash.gpu import MIB, Gpu
from autoflash.problem import SWITCHES, Problem, Variant
from autoflash.runtime.defaults import prefill_default
from autoflash.runtime.validity import (
    prefill_blocks_d,
    prefill_fma_products,
    prefill_refusal,
    prefill_unsupported,
    prefill_warpgroup_products,
)

PARTS = (
    "triton_header.py.jinja",
    "prefill/tiles.py.jinja",
    "shared/softcap.py.jinja",
    "shared/dropout.py.jinja",
    "prefill/modifiers.py.jinja",
    "shared/masks.py.jinja",
    "prefill/softmax.py.jinja",
    "prefill/attend.py.jinja",
    "prefill/pages.py.jinja",
    "prefill/attend_pages.py.jinja",
    "prefill/packed.py.jinja",
    "prefill/kernel.py.jinja",
    "prefill/kernel_pages.py.jinja",
    "prefill/plan.py.jinja",
    "prefill/plan_modified.py.jinja",
    "prefill/documents.py.jinja",
    "prefill/plan_packed.py.jinja",
    "prefill/plan_pages.py.jinja",
)

HEAD_GROUP_MIB = Knob("HEAD_GROUP_MIB", (4, 24, 1), compiled=False)
KNOBS = (
    Knob("BLOCK_M", (64, 128, 32, 16)),
    Knob("BLOCK_N", (64, 128, 32, 16)),
    Knob("LOAD", ("descriptor", "pointer")),
    HEAD_GROUP_MIB,
    Knob("num_warps", (4, 8)),
    Knob("num_stages", (2, 3, 4, 1)),
)

USUAL_TILE = 64
WARP_SIZE = {"nvidia": 32, "amd": 64}
# Of a thread's 255 registers: more was seen to spill hundreds of bytes. Products on the ordinary
# cores hold their operands as well.
MAX_LIVE, MAX_LIVE_FMA = 160, 34


ONE_TEXT = ("softcap", "alibi", "sinks", "head_dim_v")  # what all over pages have, on or off


def variant(problem: Problem) -> Variant:
    on = {name: True for name in problem.switches if name in SWITCHES}
    if problem.paged:
        on = {name: True for name in on if name not in ONE_TEXT}
    return Variant("prefill", "prefill", mask=problem.mask, **on)


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("prefill", prefill_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or has no chance to be fast; None for a candidate.

    The default is always a candidate: it is what the others must beat.
    """
    wrong = prefill_refusal(problem, config.as_dict(), gpu)
    if wrong or config == default(problem, gpu):
        return wrong
    return _hopeless(problem, config, gpu)


def heads_per_group(problem: Problem, head_group_mib: int) -> int:
    """The query heads that run side by side, as the template's plan() counts them."""
    kv_bytes = 2 * problem.seqlen_k * problem.head_dim * problem.kv_dtype_bytes
    kv_heads = max(1, head_group_mib * MIB // max(1, kv_bytes))
    return min(problem.batch * problem.num_heads, kv_heads * problem.group_size)


def _hopeless(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config cannot be fast, or None. A neighbouring shape is not held to it."""
    return _tile_hopeless(problem, config, gpu) or _schedule_hopeless(problem, config, gpu)


def _tile_hopeless(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    fma_products = prefill_fma_products(problem, gpu)
    block_m, block_n, num_warps = (int(config[n]) for n in ("BLOCK_M", "BLOCK_N", "num_warps"))
    _, block_dv = prefill_blocks_d(problem)
    if problem.dtype != "fp32" and block_m < USUAL_TILE:
        return f"BLOCK_M {block_m} starves the tensor cores"
    # a tensor-core product of one warp has 16 rows; more warps can only divide wide heads
    if not fma_products and block_dv < 256 and block_m < 16 * num_warps:
        return f"{num_warps} warps have no 16 rows each in BLOCK_M {block_m}"
    warpgroups = prefill_warpgroup_products(problem, gpu)
    if config["LOAD"] == "descriptor" and not warpgroups:
        return "tiles from descriptors spill unless whole warpgroups multiply them"
    live = block_m * (block_dv + block_n) // (num_warps * WARP_SIZE[gpu.vendor])
    limit = MAX_LIVE_FMA if fma_products else MAX_LIVE
    if live > limit:
        return f"a thread holds {live} values of acc and qk, more than {limit}"
    for name, block, seqlen in (
        ("BLOCK_M", block_m, problem.seqlen_q),
        ("BLOCK_N", block_n, problem.seqlen_k),
    ):
        if block // 2 >= max(seqlen, USUAL_TILE):
            return f"half of {name} {block} lies past the {seqlen} tokens"
    # 32 columns are slow there, and triton miscompiled such products (issues 10573, 11366)
    if warpgroups and block_n < USUAL_TILE and block_dv < 256:
        return f"BLOCK_N {block_n} is too narrow for the products of {gpu.arch}"
    return None


def _schedule_hopeless(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    two_stages = config.as_dict() | {"num_stages": 2}
    if config["num_stages"] == 1 and prefill_refusal(problem, two_stages, gpu) is None:
        return "one stage overlaps no load, and two fit"
    mib = int(config["HEAD_GROUP_MIB"])
    grouped = heads_per_group(problem, mib)
    for other in HEAD_GROUP_MIB.values[: HEAD_GROUP_MIB.values.index(mib)]:
        if heads_per_group(problem, int(other)) == grouped:
            return f"groups of {grouped} heads, as with HEAD_GROUP_MIB {other}"
    return None


FAMILY = Family(
    name="prefill",
    op="prefill",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=prefill_unsupported,
    misfit=prefill_refusal,
    refusal=refusal,
    default=default,
    max_spills=256,  # head_dim 256 through pointers spills a little everywhere
)
