"""Promise: candidates in the order to try them, by what is known before any is measured."""

from collections.abc import Iterable, Mapping, Sequence

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.model import predicted_us
from autoflash.problem import Problem
from autoflash.records import Resources, Winner
from autoflash.runtime.match import match_distance, match_key, match_sizes

MOST_TRANSFERRED = 6  # winners of other problems that are tried first


def by_promise(
    candidates: Sequence[Config],
    problem: Problem,
    gpu: Gpu,
    transferred: Sequence[Config],
    resources: Mapping[Config, Resources],
) -> list[Config]:
    """The default (the first candidate), those transferred, then the others, fastest first.

    The order says who is tried first, and nothing about who wins.
    """
    default, *others = candidates
    first = [config for config in transferred if config in set(others)]
    unknown = Resources()

    def predicted(config: Config) -> tuple[float, Config]:
        known = resources.get(config, unknown)
        return predicted_us(problem, config, known, gpu), config

    rest = sorted(set(others) - set(first), key=predicted)
    return [default, *first, *rest]


def transferred_to(
    problem: Problem, gpu: Gpu, winners: Iterable[Winner], candidates: Sequence[Config]
) -> list[Config]:
    """Winners of the nearest shapes of the same semantics, then of other GPUs' nearest shapes.

    Measured ones only, and only what is a candidate here; the default needs no transfer.
    """
    key, sizes = match_key(problem), match_sizes(problem)
    ranked = []
    for winner in winners:
        decision = winner.decision
        if decision.source != "measured" or match_key(decision.problem) != key:
            continue
        distance = match_distance(sizes, match_sizes(decision.problem))
        if distance is not None:
            other_gpu = winner.gpu.identity != gpu.identity
            ranked.append((other_gpu, distance, decision.problem, decision.winner))
    possible = set(candidates[1:])
    found = dict.fromkeys(config for *_, config in sorted(ranked) if config in possible)
    return list(found)[:MOST_TRANSFERRED]
