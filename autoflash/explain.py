"""Explain: why a winner won, from the trials of its problem."""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log
from typing import Any

from autoflash.config import Config, KnobValue
from autoflash.errors import UnsupportedError
from autoflash.families import why_refused
from autoflash.limits import Limits, limits
from autoflash.problem import title
from autoflash.records import Clocks, Resources, Trial, Winner
from autoflash.roofline import Floor, floor
from autoflash.runtime.problem import PROBLEM_FIELDS
from autoflash.store import Store, overlaid_winners
from autoflash.store.fields import to_plain
from autoflash.store.reading import Row


@dataclass(frozen=True)
class Measured:
    """A config's time. `stage` `final` is of the rounds interleaved with the winner's.

    `slower` is its time over the winner's of the same stage, minus one.
    """

    config: Config
    us: float
    slower: float
    stage: str


@dataclass(frozen=True)
class Neighbour:
    """A config that differs from the winner in one knob. `measured` is None where it failed."""

    knob: str
    value: KnobValue
    measured: Measured | None
    failure: str = ""


@dataclass(frozen=True)
class KnobCost:
    """What one knob decides among the configs of the winner's family that were timed.

    `best_us` is the best time with each value. `loses` is what the best config without the
    winner's value loses against the best of all, None where no other was timed. `importance` is
    the share of the variance of log time between the knob's values (the main effect of a
    functional ANOVA, on the configs that the search chose to try).
    """

    name: str
    value: KnobValue
    best_us: tuple[tuple[KnobValue, float], ...]
    loses: float | None
    importance: float


@dataclass(frozen=True)
class Failure:
    """Candidates that failed alike; `example` is the first one's error in full."""

    family: str
    status: str
    reason: str
    candidates: int
    example: str


@dataclass(frozen=True)
class Explanation:
    """A winner with what it was measured beside. Empty parts: the trials are not here."""

    winner: Winner
    floor: Floor
    limits: Limits
    resources: Resources
    default: Measured | None
    runners_up: tuple[Measured, ...]
    families: tuple[Measured, ...]  # the best of each family
    neighbours: tuple[Neighbour, ...]
    knobs: tuple[KnobCost, ...]
    failures: tuple[Failure, ...]
    candidates: int  # that were tried


def explain(winner: Winner, trials: Sequence[Trial] = ()) -> Explanation:
    """The explanation of a winner by the trials of its problem on its GPU and toolchain.

    Of each family the trials of its newest text count. Where there are no trials, the times that
    the decision itself holds are used. Raises UnsupportedError for a winner that its family, as it
    is now, refuses.
    """
    decision = winner.decision
    reason = why_refused(decision.problem, decision.winner, winner.gpu)
    if reason:
        raise UnsupportedError(f"{title(decision.problem)}: {decision.winner}: {reason}")
    counted = _of_newest_texts(trials)
    screened = best_times(counted)
    finals = dict(decision.times) or {decision.winner: decision.winner_us}
    screen_us = screened.get(decision.winner)

    def measured(config: Config) -> Measured | None:
        if config in finals:
            us, beside, stage = finals[config], decision.winner_us, "final"
        elif config in screened and screen_us:
            us, beside, stage = screened[config], screen_us, "screen"
        else:
            return None
        return Measured(config, us, us / beside - 1, stage)

    everything = [one for each in {**screened, **finals} if (one := measured(each))]
    # what was interleaved with the winner says more than what was timed at another moment
    ordered = sorted(everything, key=lambda one: (one.stage != "final", one.slower, one.config))
    fastest: dict[str, Measured] = {}
    for one in ordered:
        fastest.setdefault(one.config.family, one)
    resources, clocks = _taken(decision.winner, counted)
    return Explanation(
        winner=winner,
        floor=floor(decision.problem, winner.gpu),
        limits=limits(
            decision.problem,
            decision.winner,
            winner.gpu,
            decision.winner_us,
            resources,
            clocks.sm_clock_mhz,
        ),
        resources=resources,
        default=measured(decision.default),
        runners_up=tuple(one for one in ordered if one.config != decision.winner),
        families=tuple(fastest.values()),
        neighbours=tuple(_neighbours(decision.winner, measured, counted, finals)),
        knobs=tuple(knob_costs(decision.winner, screened or finals)),
        failures=tuple(failures(counted)),
        candidates=len({trial.config for trial in counted}) or len(finals),
    )


def explanations(
    store: Store | None, keep: Callable[[Row], bool]
) -> tuple[list[Explanation], list[str]]:
    """Of the measured winners that count and that `keep` keeps, in order; and who is left out.

    `keep` sees the fields of the problem, the GPU's name as `gpu`, and the winner's `family`. Left
    out with the reason is a winner that the families refuse as they are now.
    """
    told, left_out = [], []
    for winner in overlaid_winners(store):
        decision = winner.decision
        row = {**to_plain(decision.problem), "gpu": winner.gpu.name}
        if decision.source != "measured" or not keep(row | {"family": decision.winner.family}):
            continue
        trials = store.trials(winner.gpu, winner.toolchain, decision.problem) if store else []
        try:
            told.append(explain(winner, trials))
        except UnsupportedError as error:
            left_out.append(str(error))
    return told, left_out


def best_times(trials: Iterable[Trial]) -> dict[Config, float]:
    """The best time of each config in the screening, whose trials all configs have alike."""
    times: dict[Config, float] = {}
    for trial in trials:
        if trial.status == "correct" and trial.regime == "graph" and trial.stage == "screen":
            assert trial.median_us is not None, "a correct trial without a time"
            times[trial.config] = min(trial.median_us, times.get(trial.config, trial.median_us))
    return times


def knob_costs(winner: Config, times: Mapping[Config, float]) -> list[KnobCost]:
    """What each knob of the winner's family decides, the most important first.

    Knobs of which one value was timed decide nothing and are left out.
    """
    own = {config: us for config, us in times.items() if config.family == winner.family}
    costs = []
    for name, value in winner.knobs:
        groups: dict[KnobValue, list[float]] = defaultdict(list)
        for config, us in own.items():
            groups[config[name]].append(us)
        if len(groups) < 2:
            continue
        best = {each: min(group) for each, group in groups.items()}
        others = [us for each, us in best.items() if each != value]
        costs.append(
            KnobCost(
                name,
                value,
                tuple(sorted(best.items(), key=lambda item: item[1])),
                min(others) / min(best.values()) - 1 if others else None,
                _share_between([[log(us) for us in group] for group in groups.values()]),
            )
        )
    return sorted(costs, key=lambda cost: (-cost.importance, cost.name))


def failures(trials: Iterable[Trial]) -> list[Failure]:
    """Failed candidates grouped by family, status and reason, the most frequent first."""
    failed: dict[Config, Trial] = {}
    for trial in trials:  # what failed once and was right when it was tried again is no failure
        if trial.status != "correct":
            failed[trial.config] = trial
        else:
            failed.pop(trial.config, None)
    groups: dict[tuple[str, str, str], list[Trial]] = defaultdict(list)
    for trial in failed.values():
        groups[trial.config.family, trial.status, alike(trial.error)].append(trial)
    found = [Failure(*key, len(group), group[0].error) for key, group in groups.items()]
    return sorted(found, key=lambda failure: (-failure.candidates, failure.family, failure.reason))


def grouped_failures(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The same over flat rows of trials, of any problems: a row for each group.

    `candidates` counts configs with the problem they failed on, `problems` the problems.
    """
    failed: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        problem = tuple(row[name] for name in PROBLEM_FIELDS)
        key = (row["gpu"], row["triton"], problem, row["family"], row["knobs_json"])
        if row["status"] != "correct":
            failed[key] = row
        else:
            failed.pop(key, None)
    groups: dict[tuple[str, ...], list[tuple[Any, Mapping[str, Any]]]] = defaultdict(list)
    for (gpu, _, problem, family, _), row in failed.items():
        groups[gpu, family, row["status"], alike(row["error"])].append((problem, row))
    found = [
        {
            **dict(zip(("gpu", "family", "status", "reason"), key, strict=True)),
            "candidates": len(group),
            "problems": len({problem for problem, _ in group}),
            "example": group[0][1]["error"],
        }
        for key, group in groups.items()
    ]
    return sorted(found, key=lambda row: (-row["candidates"], row["gpu"], row["reason"]))


def alike(error: str) -> str:
    """What errors of one cause have in common: the first line, its numbers left open."""
    first = (error.strip().splitlines() or [""])[0]
    return re.sub(r"\d+(\.\d+)?", "#", first)


def _share_between(groups: list[list[float]]) -> float:
    """The share of the variance of all that lies between the groups' means."""
    everything = [x for group in groups for x in group]
    mean = sum(everything) / len(everything)
    total = sum((x - mean) ** 2 for x in everything)
    between = sum(len(group) * (sum(group) / len(group) - mean) ** 2 for group in groups)
    return between / total if total else 0.0


def _of_newest_texts(trials: Sequence[Trial]) -> list[Trial]:
    """The trials of each family's newest text; they come oldest first."""
    newest = {trial.config.family: trial.kernel_digest for trial in trials}
    return [trial for trial in trials if trial.kernel_digest == newest[trial.config.family]]


def _taken(config: Config, trials: Sequence[Trial]) -> tuple[Resources, Clocks]:
    """What the config's last timed trial took, and the clocks under it."""
    for trial in reversed(trials):
        if trial.config == config and trial.regime == "graph":
            return trial.resources, trial.clocks
    return Resources(), Clocks()


def _neighbours(
    winner: Config,
    measured: Callable[[Config], Measured | None],
    trials: Sequence[Trial],
    finals: Iterable[Config],
) -> list[Neighbour]:
    """The configs tried that are one knob away, by knob, the cheapest first."""
    failed = {trial.config: trial for trial in trials if trial.status != "correct"}
    own = winner.as_dict()
    found = []
    for config in dict.fromkeys([*(trial.config for trial in trials), *finals]):
        if config.family != winner.family:
            continue
        differing = [name for name, value in config.knobs if own.get(name) != value]
        if len(differing) == 1:
            one = measured(config)
            trial = failed.get(config)
            why = f"{trial.status}: {trial.error}" if trial and not one else ""
            found.append(Neighbour(differing[0], config[differing[0]], one, why))
    worst = float("inf")
    return sorted(
        found, key=lambda n: (n.knob, n.measured.slower if n.measured else worst, str(n.value))
    )
