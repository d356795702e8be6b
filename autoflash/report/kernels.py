"""Kernels: the texts that won, with the configs they won with and what those take."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from autoflash.explain import Explanation
from autoflash.families import family_of
from autoflash.render import render


@dataclass(frozen=True)
class Winning:
    """A config that won. What it takes is of the problem where it takes most registers.

    `occupancy` is in words; where the trials are not here the others are None and it is empty.
    """

    knobs: str
    problems: int
    registers: int | None
    spill_bytes: int | None
    smem_bytes: int | None
    occupancy: str


@dataclass(frozen=True)
class Kernel:
    """A text that won; `source` is empty where the families render another one now."""

    name: str
    digest: str
    winners: tuple[Winning, ...]
    source: str

    @property
    def problems(self) -> int:
        return sum(winning.problems for winning in self.winners)

    @property
    def spills(self) -> bool:
        return any(winning.spill_bytes for winning in self.winners)


def kernels(explanations: Sequence[Explanation]) -> list[Kernel]:
    """The texts that won, those of most problems first."""
    groups: dict[tuple[str, str], list[Explanation]] = defaultdict(list)
    for one in explanations:
        decision = one.winner.decision
        variant = family_of(decision.winner.family).variant(decision.problem)
        groups[variant.name, decision.kernel_digest].append(one)
    found = []
    for (name, digest), several in groups.items():
        decision = several[0].winner.decision
        text = render(family_of(decision.winner.family).variant(decision.problem))
        source = text.text if text.digest == digest else ""
        found.append(Kernel(name, digest, _winning(several), source))
    return sorted(found, key=lambda kernel: (-kernel.problems, kernel.name))


def _winning(explanations: Sequence[Explanation]) -> tuple[Winning, ...]:
    by_config: dict[str, list[Explanation]] = defaultdict(list)
    for one in explanations:
        knobs = " ".join(f"{name}={value}" for name, value in one.winner.decision.winner.knobs)
        by_config[knobs].append(one)
    found = []
    for knobs, several in by_config.items():
        heaviest = max(several, key=lambda one: one.resources.registers or 0)
        took, fits = heaviest.resources, heaviest.limits.occupancy
        told = f"{fits.blocks} a multiprocessor, {fits.percent:.0f} % of its warps ({fits.binds})"
        known = took.registers is not None
        found.append(
            Winning(
                knobs,
                len(several),
                took.registers,
                max((one.resources.spill_bytes or 0) for one in several) if known else None,
                took.smem_bytes,
                told if known else "",
            )
        )
    return tuple(sorted(found, key=lambda winning: (-winning.problems, winning.knobs)))
