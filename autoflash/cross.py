"""Cross timing: the finalists of every shape of a group on its other shapes, for the portfolio."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from autoflash.child import Failure
from autoflash.config import Config
from autoflash.contest import time_eager
from autoflash.decision import FEWEST_ROUNDS, TIE, choose_by_rounds, paired_interval
from autoflash.entrants import Entrants, Lab
from autoflash.families import why_refused
from autoflash.groups import digest_of
from autoflash.records import Decision
from autoflash.rounds import Samples, side_by_side
from autoflash.worker import LimitReached


def cross(lab: Lab, entrants: Entrants, decisions: Sequence[Decision]) -> list[Decision]:
    """The decisions with the times of one another's finalists added, as far as time allows.

    A time is the winner's, times the ratio to the winner in the same rounds.
    """
    return [crossed(lab, entrants, decision, decisions) for decision in decisions]


def crossed(
    lab: Lab, entrants: Entrants, decision: Decision, decisions: Sequence[Decision]
) -> Decision:
    """One of them; `decision` is the same one where nothing was added.

    A config that is clearly faster than the winner meets it and the default once more, for as many
    rounds as a final has, and takes its place where it is still clearly faster.
    """
    others = _others(lab, entrants, decision, decisions)
    if not others or lab.limit.over:
        return decision
    samples = _beside(lab, entrants, decision, others, "cross")
    if samples is None:
        return decision
    added = lab.journal.decide(replace(decision, times=_times(decision, samples)))
    challengers = [c for c in samples if _clearly_slower(samples, decision.winner, c)]
    return _challenged(lab, entrants, added, challengers) if challengers else added


def _challenged(
    lab: Lab, entrants: Entrants, decision: Decision, challengers: Sequence[Config]
) -> Decision:
    """The decision after a final of the winner, the default and the challengers."""
    configs = [config for config in (decision.default, *challengers) if config != decision.winner]
    samples = _beside(lab, entrants, decision, configs, "final")
    if samples is None or len(samples[decision.winner]) < FEWEST_ROUNDS:
        return decision
    default = decision.default
    if default not in samples and default in dict(decision.times):
        return decision  # no winner without its margin over the default

    choice, _ = choose_by_rounds(samples, default, entrants.resources)
    if not _clearly_slower(samples, decision.winner, choice.winner):
        return decision
    times = _times(decision, samples)
    winner_us = dict(times)[choice.winner]
    time_eager(lab, entrants, decision.problem, [choice.winner], lab.limit)
    return lab.journal.decide(
        replace(
            decision,
            kernel_digest=digest_of(decision.problem, choice.winner),
            winner=choice.winner,
            winner_us=winner_us,
            default_us=dict(times).get(default, 0.0),
            margin=choice.margin.value,
            margin_low=choice.margin.low,
            margin_high=choice.margin.high,
            tied=choice.tied,
            times=times,
            regret=winner_us / times[0][1] - 1,
        )
    )


def _beside(
    lab: Lab,
    entrants: Entrants,
    decision: Decision,
    configs: Sequence[Config],
    stage: str,
) -> Samples | None:
    """Samples of the winner and the configs, round by round; None without the winner's."""
    problem, about_us = decision.problem, decision.winner_us
    together = [decision.winner, *configs]
    try:
        lab.worker.prepare(problem, lab.seed)
        samples = side_by_side(lab, entrants, problem, together, stage, about_us, lab.limit)
    except (Failure, LimitReached):
        return None
    return samples if samples.get(decision.winner) else None


def _times(decision: Decision, samples: Samples) -> tuple[tuple[Config, float], ...]:
    """The decision's times and those of the samples, by their ratio to the winner's."""
    beside = samples[decision.winner]
    added = {
        config: decision.winner_us * median(a / b for a, b in zip(taken, beside, strict=False))
        for config, taken in samples.items()
    }
    times = {**dict(decision.times), **added}
    return tuple(sorted(times.items(), key=lambda item: (item[1], item[0])))


def _clearly_slower(samples: Samples, slower: Config, faster: Config) -> bool:
    interval = paired_interval(samples[slower], samples[faster])
    return interval.low > 0 and interval.value > TIE


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
