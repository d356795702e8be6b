"""Cross timing: the finalists of every shape of a group on its other shapes, for the portfolio."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from autoflash.child import Failure
from autoflash.config import Config
from autoflash.entrants import Entrants, Lab
from autoflash.families import why_refused
from autoflash.records import Decision
from autoflash.rounds import side_by_side
from autoflash.worker import LimitReached


def cross(lab: Lab, entrants: Entrants, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions with the times of one another's finalists added, as far as time allows.

    A time is the winner's, times the ratio to the winner in the same rounds.
    """
    return [crossed(lab, entrants, decision, decisions) for decision in decisions]


def crossed(
    lab: Lab, entrants: Entrants, decision: Decision, decisions: Sequence[Decision]
) -> Decision:
    """One of them; `decision` is the same one where nothing was added."""
    others = _others(lab, entrants, decision, decisions)
    if not others or lab.limit.over:
        return decision
    problem, rounds = decision.problem, lab.effort.cross_rounds
    configs = [decision.winner, *others]
    try:
        lab.worker.prepare(problem, lab.seed)
        samples = side_by_side(lab, entrants, problem, configs, "cross", rounds, lab.limit)
    except (Failure, LimitReached):
        return decision
    beside = samples.pop(decision.winner, [])
    if not beside:
        return decision
    added = {
        config: decision.winner_us * median(a / b for a, b in zip(taken, beside, strict=True))
        for config, taken in samples.items()
    }
    times = sorted({**added, **dict(decision.times)}.items(), key=lambda item: (item[1], item[0]))
    return lab.journal.decide(replace(decision, times=tuple(times)))


def _others(
    lab: Lab, entrants: Entrants, decision: Decision, decisions: Sequence[Decision]
) -> list[Config]:
    """Configs of the other shapes' finals that this shape has no time of: winners first."""
    winners = Counter(other.winner for other in decisions)
    finalists = Counter(config for other in decisions for config, _ in other.times)
    known = {config for config, _ in decision.times}
    valid = {
        config
        for config in finalists
        if config not in known
        and not entrants.is_out(decision.problem, config)
        and why_refused(decision.problem, config, lab.gpu) is None
    }
    ranked = sorted(valid, key=lambda config: (-winners[config], -finalists[config], config))
    return ranked[: lab.effort.cross_candidates]
