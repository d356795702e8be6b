"""The portable backward family: statistics, then dk and dv by tiles of keys and dq by queries."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from autoflash.config import Config, Knob
from autoflash.families.family import Family
from autoflash.gpu import Gpu
from autoflash.problem import SWITCHES, Problem, Variant
from autoflash.runtime.backward_validity import (
    backward_default,
    backward_refusal,
    backward_unsupported,
)
from autoflash.runtime.validity import (
    prefill_blocks_d,
    prefill_fma_products,
    prefill_warpgroup_products,
)

PARTS = (
    "triton_header.py.jinja",
    "backward/tiles.py.jinja",
    "shared/softcap.py.jinja",
    "shared/dropout.py.jinja",
    "prefill/modifiers.py.jinja",
    "shared/masks.py.jinja",
    "prefill/packed.py.jinja",
    "backward/scores.py.jinja",
    "backward/statistics.py.jinja",
    "backward/add_queries.py.jinja",
    "backward/keys.py.jinja",
    "backward/add_keys.py.jinja",
    "backward/queries.py.jinja",
    "backward/bias.py.jinja",
    "backward/bias_scores.py.jinja",
    "backward/sinks.py.jinja",
    "backward/documents.py.jinja",
    "backward/sources.py.jinja",
    "backward/plan.py.jinja",
)

KNOBS = (
    Knob("KV_BLOCK_M", (64, 128, 32, 16)),
    Knob("KV_BLOCK_N", (64, 128, 32, 16)),
    Knob("KV_WARPS", (4, 8)),
    Knob("KV_STAGES", (2, 1)),
    Knob("Q_BLOCK_M", (64, 128, 32, 16)),
    Knob("Q_BLOCK_N", (64, 128, 32, 16)),
    Knob("Q_WARPS", (4, 8)),
    Knob("Q_STAGES", (2, 3, 1)),
    Knob("LOAD", ("descriptor", "pointer")),
)


USUAL_TILE = 64
WARP_SIZE = {"nvidia": 32, "amd": 64}
# Of a thread's 255 registers, the sums and the scores of a tile: more was seen to spill hundreds of
# bytes. Products on the ordinary cores hold their operands as well.
MAX_LIVE, MAX_LIVE_FMA = 192, 36


def variant(problem: Problem) -> Variant:
    on = {name: True for name in problem.switches if name in SWITCHES}
    return Variant("backward", "backward", mask=problem.mask, **on)


def default(problem: Problem, gpu: Gpu) -> Config:
    return Config.of("backward", backward_default(problem, gpu))


def refusal(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why the config is wrong for the problem, or has no chance to be fast; None for a candidate.

    The default is always a candidate: it is what the others must beat.
    """
    knobs = config.as_dict()
    wrong = backward_refusal(problem, knobs, gpu)
    if wrong or knobs == backward_default(problem, gpu):
        return wrong
    sums = prefill_blocks_d(problem)[:1]
    of_queries = Part("Q", "BLOCK_M", problem.seqlen_q, "BLOCK_N", problem.seqlen_k, sums)
    return (
        hopeless_load(problem, knobs, gpu)
        or hopeless(problem, knobs, gpu, keys_part(problem), backward_refusal)
        or hopeless(problem, knobs, gpu, of_queries, backward_refusal)
    )


def hopeless_load(problem: Problem, knobs: Mapping[str, Any], gpu: Gpu) -> str | None:
    if knobs["LOAD"] == "descriptor" and not prefill_warpgroup_products(problem, gpu):
        return "tiles from descriptors spill unless whole warpgroups multiply them"
    return None


class Part(NamedTuple):
    """One of the two kernels: tiles of `own` rows meet those of `step`.

    The rows are the first axis of all its products; `sums` are the channels of those it adds up.
    """

    name: str
    own: str
    own_seqlen: int
    step: str
    step_seqlen: int
    sums: tuple[int, ...]


def keys_part(problem: Problem) -> Part:
    """The kernel of dk and dv."""
    sums = prefill_blocks_d(problem)
    return Part("KV", "BLOCK_N", problem.seqlen_k, "BLOCK_M", problem.seqlen_q, sums)


def hopeless(
    problem: Problem,
    knobs: Mapping[str, Any],
    gpu: Gpu,
    part: Part,
    misfit: Callable[[Problem, Mapping[str, Any], Gpu], str | None],
) -> str | None:
    """Why one of the kernels cannot be fast, or None. A neighbouring shape is not held to it."""
    fma_products = prefill_fma_products(problem, gpu)
    warpgroups = prefill_warpgroup_products(problem, gpu)
    own_name, step_name = f"{part.name}_{part.own}", f"{part.name}_{part.step}"
    own, step, num_warps = knobs[own_name], knobs[step_name], knobs[f"{part.name}_WARPS"]
    widest = max(prefill_blocks_d(problem))
    least = 16 if fma_products else USUAL_TILE if warpgroups else 32
    for name, block in ((own_name, own), (step_name, step)):
        if block < (32 if warpgroups and name == step_name and widest == 256 else least):
            return f"{name} {block} is too narrow for the products of {gpu.arch}"
    # a tensor-core product of one warp has 16 rows; more warps can only divide wide heads
    if not fma_products and min(part.sums) < 128 and own < 16 * num_warps:
        return f"{num_warps} warps have no 16 rows each in {own_name} {own}"
    live = own * (sum(part.sums) + 2 * step) // (num_warps * WARP_SIZE[gpu.vendor])
    limit = MAX_LIVE_FMA if fma_products else MAX_LIVE
    if live > limit:
        return f"a thread of {part.name} holds {live} values of sums and scores, more than {limit}"
    lengths = ((own_name, own, part.own_seqlen), (step_name, step, part.step_seqlen))
    for name, block, seqlen in lengths:
        if block // 2 >= max(seqlen, USUAL_TILE):
            return f"half of {name} {block} lies past the {seqlen} tokens"
    stages = f"{part.name}_STAGES"
    if knobs[stages] == 1 and misfit(problem, {**knobs, stages: 2}, gpu) is None:
        return f"one stage of {part.name} overlaps no load, and two fit"
    return None


FAMILY = Family(
    name="backward",
    op="backward",
    parts=PARTS,
    knobs=KNOBS,
    variant=variant,
    unsupported=backward_unsupported,
    misfit=backward_refusal,
    refusal=refusal,
    default=default,
    max_spills=256,  # of fp32 and of head_dim 256, as in prefill
)
