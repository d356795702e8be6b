"""Aside: what a GPU may try on a group's later shapes while compilers hold up the one at hand."""

from collections.abc import Iterator, Mapping

from autoflash.config import Config
from autoflash.effort import Effort
from autoflash.entrants import Entrants, Lab
from autoflash.families import why_refused
from autoflash.problem import Problem
from autoflash.search import strategy_for
from autoflash.search.exhaustive import exhaustive

GOOD_NEARBY = 3  # one in so many of the trials is for what was fastest on a shape nearby


def good_nearby(most: int) -> int:
    """How many of a shape's trials are for what was fastest nearby, of `most`."""
    return most // GOOD_NEARBY


def wanted_elsewhere(
    lab: Lab, entrants: Entrants, problem: Problem, times: Mapping[Config, float]
) -> Iterator[tuple[Problem, Config]]:
    """Trials that the shapes after this one will ask for, as far as can be told, fastest first.

    A shape of few candidates will try them all. Others start from the defaults and from what was
    fastest nearby: of this shape's trials so far, the share is taken that they will want of all of
    them. Only who is known to be right is among them.
    """
    group = entrants.group
    fastest = sorted(times, key=lambda config: (times[config], config))
    trials = min(lab.effort.max_candidates, len(group.candidates(problem, lab.gpu)))
    some = fastest[: _wanted(lab.effort, len(times), trials)]
    problems = group.problems
    for other in problems[problems.index(problem) + 1 :]:
        if lab.journal.decided(other) is not None:
            continue
        defaults = filter(entrants.admitted, group.defaults(other, lab.gpu))
        wanted = fastest if _tries_all(lab, entrants, other) else [*defaults, *some]
        for config in dict.fromkeys(wanted):
            if lab.journal.tried(other, config) or entrants.is_out(other, config):
                continue
            if why_refused(other, config, lab.gpu) is None:
                yield other, config


def _tries_all(lab: Lab, entrants: Entrants, problem: Problem) -> bool:
    candidates = len(entrants.group.candidates(problem, lab.gpu))
    return strategy_for(lab.strategy, candidates, lab.effort.max_climbed) is exhaustive


def _wanted(effort: Effort, timed: int, trials: int) -> int:
    """How many of those timed so far, of so many trials in the end."""
    share = min(1.0, good_nearby(effort.max_climbed) / trials)
    return 1 + int(share * timed) if timed else 0
