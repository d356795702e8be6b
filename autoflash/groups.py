"""Group: problems whose kernels are the same, so that one compile and one check serve them all."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from autoflash.config import Config
from autoflash.errors import UnsupportedError
from autoflash.families import Family, family_of, serving, space
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.render import Rendered, render


@dataclass(frozen=True)
class Group:
    """Problems that differ in lengths, batch and head counts only, and the families serving them.

    The first family is the portable one; its default is what every other candidate must beat.
    """

    problems: tuple[Problem, ...]
    families: tuple[Family, ...]

    def slow_to_compile(self) -> bool:
        return any(family.slow_to_compile for family in self.families)

    def default(self, problem: Problem, gpu: Gpu) -> Config:
        return self.families[0].default(problem, gpu)

    def defaults(self, problem: Problem, gpu: Gpu) -> list[Config]:
        """That of every family, the portable one's first."""
        return [family.default(problem, gpu) for family in self.families]

    def candidates(self, problem: Problem, gpu: Gpu) -> list[Config]:
        """Every config valid for the problem: the default, the other defaults, then the spaces."""
        return list(_candidates(self.families, problem, gpu))


def groups_of(
    problems: Sequence[Problem], gpu: Gpu
) -> tuple[list[Group], list[tuple[Problem, str]]]:
    """The groups in the order they are tried, and the problems no family serves, why.

    What is slow to compile comes after the rest: while that is tried, it is compiled.
    """
    members: dict[Problem, list[Problem]] = {}
    families: dict[Problem, tuple[Family, ...]] = {}
    refused = []
    for problem in problems:
        try:
            served = tuple(serving(problem, gpu))
        except UnsupportedError as error:
            refused.append((problem, str(error)))
            continue
        kernels = _kernels_of(problem)
        members.setdefault(kernels, []).append(problem)
        families[kernels] = served
    groups = [Group(tuple(members[key]), families[key]) for key in members]
    return sorted(groups, key=Group.slow_to_compile), refused


def rendered_for(problem: Problem, config: Config) -> Rendered:
    """The text that the config's kernels are in."""
    return render(family_of(config.family).variant(problem))


def digest_of(problem: Problem, config: Config) -> str:
    return rendered_for(problem, config).digest


@cache
def _candidates(families: tuple[Family, ...], problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    found = [family.default(problem, gpu) for family in families]
    for family in families:
        found += [config for config, refusal in space(family, problem, gpu) if refusal is None]
    return tuple(dict.fromkeys(found))


def _kernels_of(problem: Problem) -> Problem:
    """The problem with everything that does not decide its kernels put to one value."""
    p = problem
    return replace(
        p,
        batch=1,
        num_heads=p.group_size,
        num_kv_heads=1,
        seqlen_q=p.seqlen_q if p.op == "decode" else 1,
        seqlen_k=1,
        lengths="equal",
        pages="",
        window_left=min(p.window_left, 0),  # bounded or not
        window_right=min(p.window_right, 1),  # 0 would be causal
        density=min(p.density, 1),
    )
