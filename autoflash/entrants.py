"""Entrants: the candidates of one group, each compiled and checked once.

Before it is timed, a candidate is checked on some of the small cases, for which half of its kernels
are compiled; on the rest before it comes to a final. A search that may choose who was in no final,
for its time is limited or it only predicts, has all of them checked at first.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from copy import copy
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from threading import RLock
from typing import Self

from autoflash.accuracy import Verdict
from autoflash.check import Stage
from autoflash.child import KILLED, OUT_OF_GPU_MEMORY, Failure
from autoflash.config import Config
from autoflash.effort import Effort, TimeLimit
from autoflash.families import family_of, why_refused
from autoflash.gpu import Gpu
from autoflash.groups import Group, digest_of
from autoflash.journal import Journal
from autoflash.pool import Pool, Urgency, refused
from autoflash.problem import Problem
from autoflash.progress import Progress
from autoflash.records import Resources, Trial
from autoflash.worker import Worker

# What a shape's size, or the host's memory at that moment, may have caused.
OF_ONE_SHAPE = (OUT_OF_GPU_MEMORY, KILLED)


@dataclass(frozen=True)
class Lab:
    """What a search works with."""

    worker: Worker
    pool: Pool
    journal: Journal
    gpu: Gpu
    effort: Effort
    limit: TimeLimit
    seed: int
    strategy: str
    progress: Progress
    source: str = "measured"


@dataclass
class Binary:
    """What configs that differ in their launch alone share; when it was asked for and compiled."""

    future: Future[Resources]
    asked_at: str
    compiled_at: str = ""

    @property
    def compiled(self) -> bool:
        done = self.future.done() and not self.future.cancelled()
        return done and self.future.exception() is None

    def note_end(self, _: Future[Resources]) -> None:
        self.compiled_at = _now()


class Entrants:
    """Who may be timed in a group.

    A candidate that failed once is out for all its problems; for one alone where the failure says
    nothing about the others.
    """

    def __init__(self, lab: Lab, group: Group) -> None:
        self._lab, self.group = lab, group
        self._asked: dict[Config, Binary] = {}
        self._binaries: dict[Config, Binary] = {}
        chooses_unproven = lab.limit.finite or lab.source != "measured"
        self._first = None if chooses_unproven else Stage.SCREEN
        self._verdicts: dict[Config, Verdict] = {}
        self._proofs: dict[Config, Future[Resources]] = {}
        self._proven: set[Config] = set()
        self.resources: dict[Config, Resources] = {}
        self.failed: dict[Config, Trial] = {}
        self._failed_here: dict[tuple[Problem, Config], Trial] = {}
        self._asking = RLock()
        self._turns: defaultdict[Config, RLock] = defaultdict(RLock)

    def on(self, lab: Lab) -> Self:
        """The same entrants tried on another GPU of the type: what one finds out, all know."""
        twin = copy(self)
        twin._lab = lab
        return twin

    def ask(
        self, problem: Problem, configs: Sequence[Config], urgency: Urgency = Urgency.AHEAD
    ) -> None:
        """Have those compiled that no earlier trial on this very problem speaks for."""
        with self._asking:
            for config in configs:
                self._recall(config)
                if not self._lab.journal.tried(problem, config):
                    self._ask(config, urgency)
                    self.ask_proofs([config], Urgency.PERHAPS)

    def ready(
        self,
        problem: Problem,
        configs: Sequence[Config],
        limit: TimeLimit,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> Iterator[Config]:
        """The configs as their compiling ends, those that need none first, until the limit.

        While none is compiled, `meanwhile` does something short, until it finds nothing to do.
        """
        self.ask(problem, configs, Urgency.NOW)
        tried = {config for config in configs if self._lab.journal.tried(problem, config)}
        yield from (config for config in configs if config in tried)
        yield from self._compiled_of([c for c in configs if c not in tried], limit, meanwhile)

    def wait_for(
        self,
        configs: Sequence[Config],
        limit: TimeLimit,
        meanwhile: Callable[[], bool] = lambda: False,
        stage: Stage = Stage.FINAL,
    ) -> None:
        """Wait until they are compiled for the stage, those too that an earlier run tried.

        `meanwhile` as of `ready`.
        """
        with self._asking:
            for config in configs:
                self._recall(config)
                self._ask(config, Urgency.NOW)
        if stage == Stage.FINAL:
            self.ask_proofs(configs, Urgency.NOW)
        for _ in self._compiled_of(configs, limit, meanwhile):
            continue
        if stage == Stage.FINAL:
            asked = ((config, self._proofs.get(_binary_of(config))) for config in configs)
            proofs = {config: proof for config, proof in asked if proof is not None}
            for _ in _ending(proofs, limit, meanwhile):
                continue

    def must_wait(self, configs: Sequence[Config]) -> bool:
        """Whether `wait_for` would wait for compilers before a final of these."""
        futures = [self._asked[c].future if c in self._asked else None for c in configs]
        if self._first is not None:
            futures += [self._proofs.get(_binary_of(config)) for config in configs]
        return any(future is None or not future.done() for future in futures)

    def ask_proofs(self, configs: Sequence[Config], urgency: Urgency) -> None:
        """Have compiled what they are checked with before a final."""
        if self._first is None:
            return
        with self._asking:
            for config in configs:
                binary = _binary_of(config)
                if binary in self._proofs:
                    self._lab.pool.hurry(self._proofs[binary], urgency)
                elif config not in self.failed:
                    self._proofs[binary] = self._submit(config, urgency, Stage.FINAL)

    def _ask(self, config: Config, urgency: Urgency) -> None:
        if config in self._asked:
            self._lab.pool.hurry(self._asked[config].future, urgency)
        elif config not in self.failed:
            self._asked[config] = self._binary(config, urgency)

    def _recall(self, config: Config) -> None:
        """What earlier trials on any problem of the group say of the config."""
        if config in self._verdicts or config in self.failed:
            return
        for trial in self._lab.journal.of_group(self.group.problems, config):
            if trial.status != "correct":
                self._out(trial)
            elif config not in self._verdicts:
                self.resources[config] = trial.resources
                self._verdicts[config] = _verdict_of(trial)

    def _compiled_of(
        self,
        configs: Sequence[Config],
        limit: TimeLimit,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> Iterator[Config]:
        futures = {c: self._asked[c].future for c in configs if c in self._asked}
        yield from (config for config in configs if config not in futures)
        yield from _ending(futures, limit, meanwhile)

    def _binary(self, config: Config, urgency: Urgency) -> Binary:
        """The config's binary, asked for if nobody did yet."""
        compiled = _binary_of(config)
        known = self._binaries.get(compiled)
        if known is not None:
            self._lab.pool.hurry(known.future, urgency)
            return known
        asked_at = _now()
        future = self._submit(config, urgency, self._first)
        binary = self._binaries[compiled] = Binary(future, asked_at)
        future.add_done_callback(binary.note_end)
        return binary

    def _submit(self, config: Config, urgency: Urgency, stage: Stage | None) -> Future[Resources]:
        gpu = self._lab.gpu
        problems = [p for p in self.group.problems if why_refused(p, config, gpu) is None]
        return self._lab.pool.submit(problems, config, gpu, urgency, stage)

    def upcoming(self, problem: Problem, configs: Sequence[Config]) -> Iterator[Config]:
        """Those that may be timed, as far as compiling tells, in the order of `ready`."""
        for config in configs:
            binary = self._asked.get(config)
            if binary is not None and binary.compiled and not self.is_out(problem, config):
                yield config

    def admitted(self, config: Config) -> bool:
        """Whether it is known to be right, so that nothing but its time is left to find out."""
        return config in self.resources and config in self._verdicts

    def is_out(self, problem: Problem, config: Config) -> bool:
        """Whether an earlier failure speaks against trying the config on this problem."""
        return config in self.failed or (problem, config) in self._failed_here

    def compiled(self, problem: Problem, config: Config) -> bool:
        """Whether the config compiled and fits; a failure is recorded as a trial."""
        with self._turn(config):
            return self._compiled(problem, config)

    def _compiled(self, problem: Problem, config: Config) -> bool:
        if self.is_out(problem, config):
            return False
        if config in self.resources:
            return True
        started = time.monotonic()
        try:
            self.resources[config] = self._asked[config].future.result()
            reason = refused(self.resources[config], config, self._lab.gpu)
            if reason:
                raise Failure("constraints", reason)
        except Failure as failure:
            self.fail(problem, config, "screen", failure, time.monotonic() - started)
            return False
        return True

    def admit(self, problem: Problem, config: Config) -> bool:
        """Whether the config compiled and may be timed; a failure is recorded as a trial."""
        with self._turn(config):
            return self._admit(problem, config)

    def _admit(self, problem: Problem, config: Config) -> bool:
        if not self.compiled(problem, config):
            return False
        if config in self._verdicts:
            return True
        started = time.monotonic()
        try:
            lab = self._lab
            self._verdicts[config] = lab.worker.check(problem, config, lab.seed, self._first)
        except Failure as failure:
            self.fail(problem, config, "screen", failure, time.monotonic() - started)
            return False
        return True

    def proven(self, config: Config) -> bool:
        """Whether it was found right on all small cases."""
        return config in self._verdicts if self._first is None else config in self._proven

    def prove(self, problem: Problem, config: Config, stage: str) -> bool:
        """Whether the config, once asked to be proven, is right on all small cases.

        A failure is recorded as a trial of this stage.
        """
        with self._turn(config):
            return self._prove(problem, config, stage)

    def _prove(self, problem: Problem, config: Config, stage: str) -> bool:
        if self.is_out(problem, config):
            return False
        if self._first is None or config in self._proven:
            return True
        started = time.monotonic()
        try:
            self._proofs[_binary_of(config)].result()
            self._lab.worker.check(problem, config, self._lab.seed, Stage.FINAL)
        except Failure as failure:
            self.fail(problem, config, stage, failure, time.monotonic() - started)
            return False
        self._proven.add(config)
        return True

    def fail(
        self, problem: Problem, config: Config, stage: str, failure: Failure, seconds: float
    ) -> None:
        """Record what a candidate did wrong; it is not tried again."""
        trial = self.trial(problem, config, stage, failure.status, seconds)
        self._out(self._lab.journal.record(replace(trial, error=failure.reason)))

    def _out(self, failed: Trial) -> None:
        if failed.error.startswith(OF_ONE_SHAPE):
            self._failed_here[failed.problem, failed.config] = failed
        else:
            self.failed[failed.config] = failed

    def trial(
        self,
        problem: Problem,
        config: Config,
        stage: str,
        status: str,
        seconds: float,
        verdict: Verdict | None = None,
    ) -> Trial:
        """A trial of this config without times; `verdict` replaces that of the group's check."""
        verdict = verdict or self._verdicts.get(config)
        binary = self._asked.get(config)
        return Trial(
            problem,
            config,
            digest_of(problem, config),
            status,
            stage if self._lab.source == "measured" else "predicted",
            self._lab.source,
            max_ratio=verdict.max_ratio if verdict else None,
            rms_ratio=verdict.rms_ratio if verdict else None,
            lse_error=verdict.lse_error if verdict else None,
            seconds=seconds,
            asked_at=binary.asked_at if binary else "",
            compiled_at=binary.compiled_at if binary else "",
            resources=self.resources.get(config, Resources()),
        )

    def _turn(self, config: Config) -> RLock:
        """Held by the one GPU that finds out about the config while the others wait."""
        with self._asking:
            return self._turns[config]

    def why_none(self) -> str:
        """Why a problem of the group has no decision."""
        failed = [*self.failed.values(), *self._failed_here.values()]
        if self._lab.limit.over or not failed:
            return "the budget ended before a candidate was checked and timed"
        first = failed[0]
        return f"every candidate failed, first {first.config}: {first.status}: {first.error}"


def _binary_of(config: Config) -> Config:
    return family_of(config.family).binary(config)


def _ending(
    compiling: Mapping[Config, Future[Resources]], limit: TimeLimit, meanwhile: Callable[[], bool]
) -> Iterator[Config]:
    """Each as its compiling ends, until the limit; `meanwhile` as of `Entrants.ready`."""
    waiting = dict(compiling)
    while waiting and not limit.over:
        ended = next((config for config, future in waiting.items() if future.done()), None)
        if ended is not None:
            del waiting[ended]
            yield ended
        elif not meanwhile():  # a limit without end is no argument for wait()
            wait(waiting.values(), min(limit.left_s, 3600.0), FIRST_COMPLETED)


def _verdict_of(trial: Trial) -> Verdict:
    return Verdict("", trial.max_ratio or 0.0, trial.rms_ratio or 0.0, trial.lse_error or 0.0)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
