"""Family: the record each kernel family fills in, the candidates and the texts it spans."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from autoflash.config import Config, Knob, grid
from autoflash.gpu import DEFAULT_TARGET, Gpu, known
from autoflash.problem import Problem, Variant
from autoflash.runtime.problem import CHOSEN, MASKED_BY, MODIFIERS


@dataclass(frozen=True)
class Family:
    """One way to compute an op. The functions are plain functions of the family's own file.

    `unsupported(problem, gpu)` says why the family cannot serve the problem, or None.
    `misfit(problem, knobs, gpu)` says why the knobs cannot serve the problem on the GPU, or None;
    the exported module asks the same function for neighbouring shapes.
    `refusal(problem, config, gpu)` says why the config is no candidate: a misfit, or too slow.
    `default(problem, gpu)` is a config that `refusal` accepts wherever the family is supported.
    `max_spills` is the bytes of register spills per thread above which a candidate is dropped.
    `repeats` says that two runs give the same bits.
    `slow_to_compile` says that a binary takes several seconds rather than about one.
    """

    name: str
    op: str
    parts: tuple[str, ...]
    knobs: tuple[Knob, ...]
    variant: Callable[[Problem], Variant]
    unsupported: Callable[[Problem, Gpu], str | None]
    misfit: Callable[[Problem, Mapping[str, Any], Gpu], str | None]
    refusal: Callable[[Problem, Config, Gpu], str | None]
    default: Callable[[Problem, Gpu], Config]
    max_spills: int = 64
    interpretable: bool = True
    repeats: bool = True
    slow_to_compile: bool = False

    def binary(self, config: Config) -> Config:
        """The config without the knobs that only decide the launch: equal ones compile to one."""
        compiled = {knob.name for knob in self.knobs if knob.compiled}
        return Config.of(self.name, {k: v for k, v in config.knobs if k in compiled})


def space(family: Family, problem: Problem, gpu: Gpu) -> Iterator[tuple[Config, str | None]]:
    """Every config of the family's grid with the reason it is refused, None for a candidate."""
    for config in grid(family.name, family.knobs):
        yield config, family.refusal(problem, config, gpu)


def sample(
    op: str,
    paged: bool = False,
    queries: bool = False,
    varlen: bool = False,
    kv_scales: str = "",
    window: bool = False,
    masked_by: str = "",
    latent: bool = False,
    **switches: Any,
) -> Problem:
    """A small problem with these switches, for asking what does not depend on its shape.

    `switches` are the fields of Problem that are switches themselves.
    """
    return Problem(
        op=op,
        dtype="bf16",
        batch=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=576 if latent else 64,
        seqlen_q=2 if queries else 1,
        seqlen_k=64,
        page_size=16 if paged else 0,
        layout="thd" if varlen else "bshd",
        kv_dtype="int8" if kv_scales else "",
        kv_scales=kv_scales,
        window_left=16 if window else -1,
        masked_by=masked_by,
        density=10 if masked_by else 0,
        mask_block_q=128 if masked_by == "blocks" else 0,
        mask_block_k=128 if masked_by == "blocks" else 0,
        **{"causal": False, "head_dim_v": 512 if latent else 64, **switches},
    )


def samples(family: Family) -> list[Problem]:
    """A small problem for each setting of the switches that the family serves.

    Masks beyond windows stand alone and with causal: with the others they would be texts by the
    hundred, of which each is made where one is tuned. In decode, where one text has them, they
    stand with windows, softcaps, slopes and sinks too. A head_dim of v's own stands alone likewise,
    dropout with windows, packing and a bias too; gradients of packed sequences with a bias never.
    """
    names = ("paged", "queries", "varlen", "causal", "window", *MODIFIERS[:-1])
    every = []
    for on in product((False, True), repeat=len(names)):
        switches = dict(zip(names, on, strict=True))
        packed = switches["varlen"] and family.op == "backward"
        if switches["bias"] and (switches["alibi"] or packed):
            continue  # they exclude each other, or are made where one is tuned
        every += [sample(family.op, kv_scales=s, **switches) for s in ("", "tensor", "token")]
        every += [sample("decode", latent=True, **switches)] if family.op == "decode" else []
    every += [replace(each, pages=CHOSEN) for each in every if each.op == "decode" and each.paged]
    if family.op == "decode":
        every += _masked_steps(every)
    else:
        masks = ({}, {"causal": True}, {"window": True})
        for mask, beside in product(masks, ({}, {"varlen": True}, {"bias": True})):
            dropped: dict[str, Any] = {"dropout": True, **mask, **beside}
            every.append(sample(family.op, **dropped))
    if family.op in ("prefill", "backward"):
        every += [sample(family.op, causal=causal, head_dim_v=32) for causal in (False, True)]
    if family.op == "prefill":
        every += [sample("prefill", causal=True, masked_by=name) for name in MASKED_BY]
        every += [replace(each, head_dim_v=32) for each in every if each.paged]  # of the same texts
        beside = (name for name in MASKED_BY if name != "prefix")  # which is causal beyond it
        every += [sample("prefill", masked_by=name) for name in beside]
        for varlen, paged in ((True, False), (False, True), (True, True)):
            where: dict[str, Any] = {"paged": paged, "varlen": varlen}
            masked = ("prefix", True), ("documents", True), ("documents", False)
            every += [sample("prefill", **where, masked_by=m, causal=c) for m, c in masked]
        blocks: dict[str, Any] = {"paged": True, "masked_by": "blocks"}
        every += [sample("prefill", **blocks, causal=causal) for causal in (True, False)]
    served = [each for each in every if family.unsupported(each, known(DEFAULT_TARGET)) is None]
    return list({each.switches: each for each in served}.values())


def _masked_steps(steps: list[Problem]) -> list[Problem]:
    """Those of them that have masks too, in texts that are not by the dozen."""
    few = [p for p in steps if not (p.bias or p.quantised or p.latent)]
    made = [replace(p, masked_by="documents", density=10) for p in few]
    unwindowed = [p for p in few if not p.windowed]
    several = [p for p in unwindowed if p.seqlen_q > 1]
    made += [replace(p, masked_by="prefix", density=10) for p in several]
    blocks = {"masked_by": "blocks", "density": 10, "mask_block_k": 128}
    return made + [replace(p, **blocks) for p in unwindowed if p.pages != CHOSEN]


def variants(family: Family) -> dict[str, Variant]:
    """Every text of the family by its name."""
    return {variant.name: variant for variant in map(family.variant, samples(family))}
