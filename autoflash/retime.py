"""Retime: winners, runners-up and defaults timed again, to see what an upgrade has changed."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from autoflash.bench import Pace
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.decision import choose_by_rounds
from autoflash.effort import EFFORTS, Effort
from autoflash.families import serving, why_refused
from autoflash.gpu import Gpu
from autoflash.groups import digest_of
from autoflash.problem import Problem
from autoflash.records import Winner
from autoflash.rounds import pace_of_final, rounds_of
from autoflash.toolchain import Toolchain
from autoflash.worker import Worker

RUNNERS_UP = 3  # the fastest beside the winner
STATES = ("current", "unverified", "stale")


@dataclass(frozen=True)
class Retimed:
    """A winner's problem timed again. Times are microseconds per call, the fastest first.

    `state` is what the row was worth before: `current`, of this toolchain; `unverified`, of another
    toolchain; `stale`, of another text of its kernels. `best` is who wins now, the old winner if it
    is tied with the fastest; None where nobody was right. `failed` are those that are out, and why.
    """

    problem: Problem
    state: str
    winner: Config
    winner_us: float
    best: Config | None
    times: tuple[tuple[Config, float], ...] = ()
    failed: tuple[tuple[Config, str], ...] = field(default=())

    @property
    def inverted(self) -> bool:
        """Whether another config wins now."""
        return self.best != self.winner

    @property
    def now_us(self) -> float | None:
        """What the old winner takes now, None if it is out."""
        return dict(self.times).get(self.winner)


def retime(
    winners: Sequence[Winner],
    gpu: Gpu,
    toolchain: Toolchain,
    worker: Worker,
    seed: int = 0,
    effort: Effort = EFFORTS["standard"],
    told: Callable[[Retimed], None] = lambda retimed: None,
) -> list[Retimed]:
    """Each winner's problem timed again, by interleaved rounds of those that are still right.

    `told` is called with each as it is done. Nothing is stored.
    """
    found = []
    for winner in winners:
        found.append(_retimed(winner, gpu, toolchain, worker, seed, effort))
        told(found[-1])
    return found


def state_of(winner: Winner, gpu: Gpu, toolchain: Toolchain) -> str:
    """What the row is worth on this toolchain; see Retimed."""
    decision = winner.decision
    if why_refused(decision.problem, decision.winner, gpu):
        return "stale"
    if decision.kernel_digest != digest_of(decision.problem, decision.winner):
        return "stale"
    return "current" if winner.toolchain == toolchain else "unverified"


def entrants_of(winner: Winner, gpu: Gpu) -> list[Config]:
    """The winner, the fastest beside it, and the defaults of then and of now."""
    decision = winner.decision
    ranked = [config for config, _ in sorted(decision.times, key=lambda timed: timed[1])]
    beside = [config for config in ranked if config != decision.winner][:RUNNERS_UP]
    default = serving(decision.problem, gpu)[0].default(decision.problem, gpu)
    return list(dict.fromkeys([decision.winner, *beside, decision.default, default]))


def _retimed(
    winner: Winner, gpu: Gpu, toolchain: Toolchain, worker: Worker, seed: int, effort: Effort
) -> Retimed:
    problem, failed = winner.decision.problem, {}
    rounds, pace = pace_of_final(problem, winner.decision.winner_us, gpu, effort)
    armed = list(_armed(winner, gpu, worker, seed, pace, failed))
    samples = _rounds(armed, worker, seed, rounds, pace, failed)
    best, times = None, {}
    if samples:
        default = serving(problem, gpu)[0].default(problem, gpu)
        choice, times = choose_by_rounds(samples, default, {}, winner.decision.winner)
        best = choice.winner
    return Retimed(
        problem,
        state_of(winner, gpu, toolchain),
        winner.decision.winner,
        winner.decision.winner_us,
        best,
        tuple(sorted(times.items(), key=lambda timed: timed[1])),
        tuple(failed.items()),
    )


def _armed(
    winner: Winner,
    gpu: Gpu,
    worker: Worker,
    seed: int,
    pace: Pace,
    failed: dict[Config, str],
) -> Iterator[Config]:
    """The entrants that are right, ready to be sampled; the others go to `failed`."""
    problem = winner.decision.problem
    try:
        worker.prepare(problem, seed)
    except Failure as failure:  # no memory for the problem
        failed |= dict.fromkeys(entrants_of(winner, gpu), str(failure))
        return
    for config in entrants_of(winner, gpu):
        if reason := why_refused(problem, config, gpu):
            failed[config] = reason
            continue
        try:
            worker.check(problem, config, seed)
            worker.check_full(config, seed)
            worker.arm(config, pace)
        except Failure as failure:
            failed[config] = str(failure)
        else:
            yield config


def _rounds(
    configs: list[Config],
    worker: Worker,
    seed: int,
    rounds: int,
    pace: Pace,
    failed: dict[Config, str],
) -> dict[Config, list[float]]:
    """Sample i of each config from round i, in random order each; who fails is out."""
    samples: dict[Config, list[float]] = {config: [] for config in configs}
    order = random.Random(seed)
    for _ in range(rounds):
        one_round = order.sample(sorted(samples), len(samples))
        rows, failing = rounds_of(worker, [one_round], pace)
        for config, failure in failing.items():
            failed[config] = str(failure)
            del samples[config]
        for config in samples:
            samples[config] += [row[config] for row in rows]
    worker.disarm()
    return samples
