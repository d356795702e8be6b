"""Family: the record each kernel family fills in, and the space of candidates it spans."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from autoflash.config import Config, Knob, grid
from autoflash.gpu import Gpu
from autoflash.problem import Problem, Variant


@dataclass(frozen=True)
class Family:
    """One way to compute an op. The functions are plain functions of the family's own file.

    `unsupported(problem, gpu)` says why the family cannot serve the problem, or None.
    `refusal(problem, config, gpu)` is the one validity predicate: why the config cannot serve the
    problem on the GPU, or None; search, store, export and tests all ask it.
    `default(problem, gpu)` is a config that `refusal` accepts wherever the family is supported.
    `max_spills` is the bytes of register spills per thread above which a candidate is dropped.
    """

    name: str
    op: str
    parts: tuple[str, ...]
    knobs: tuple[Knob, ...]
    variant: Callable[[Problem], Variant]
    unsupported: Callable[[Problem, Gpu], str | None]
    refusal: Callable[[Problem, Config, Gpu], str | None]
    default: Callable[[Problem, Gpu], Config]
    max_spills: int = 64
    interpretable: bool = True


def space(family: Family, problem: Problem, gpu: Gpu) -> Iterator[tuple[Config, str | None]]:
    """Every config of the family's grid with the reason it is refused, None for a candidate."""
    for config in grid(family.name, family.knobs):
        yield config, family.refusal(problem, config, gpu)
