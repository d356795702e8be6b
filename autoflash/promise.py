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
    first: Sequence[Config],
    nearby: Mapping[Config, float],
    resources: Mapping[Config, Resources],
) -> list[Config]:
    """The default (the first candidate), those of `first`, then the others, fastest first.

    Those timed `nearby` come before those of which only the model has an opinion. The order says
    who is tried first, and nothing about who wins.
    """
    default, others = candidates[0], set(candidates[1:])
    known = [config for config in first if config in others]
    unknown = Resources()

    def promise(config: Config) -> tuple[bool, float, Config]:
        if config in nearby:
            return False, nearby[config], config
        told = resources.get(config, unknown)
        return True, predicted_us(problem, config, told, gpu), config

    rest = sorted(others - set(known), key=promise)
    return [default, *known, *rest]


def lost_nearby(
    problem: Problem, times: Mapping[Problem, Mapping[Config, float]]
) -> dict[Config, float]:
    """Each config's time over the best one's, on the nearest of these problems that timed it.

    The problems are of one group; those too far away in size say nothing.
    """
    sizes = match_sizes(problem)
    ranked = []
    for other in times:
        distance = match_distance(sizes, match_sizes(other))
        if other != problem and distance is not None and times[other]:
            ranked.append((distance, other))
    found: dict[Config, float] = {}
    for _, other in sorted(ranked, reverse=True):  # a nearer one has the last word
        best_us = min(times[other].values())
        found |= {config: us / best_us for config, us in times[other].items()}
    return found


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
