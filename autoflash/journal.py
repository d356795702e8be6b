"""Journal: every trial committed as it is made, and what earlier runs left need not be repeated."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Protocol

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.groups import digest_of, rendered_for
from autoflash.problem import Problem
from autoflash.records import Decision, Trial, Winner
from autoflash.store import shipped_winners
from autoflash.store.overlay import overlay
from autoflash.toolchain import Toolchain


class Database(Protocol):
    """What a journal asks of the store."""

    def add_kernel(self, family: str, variant_name: str, digest: str, text: str) -> None: ...

    def record_trial(self, run_id: int, trial: Trial) -> int: ...

    def record_decision(self, run_id: int, decision: Decision) -> int: ...

    def trials(self, gpu: Gpu, toolchain: Toolchain) -> list[Trial]: ...

    def winners(self, gpu: Gpu | None = None) -> list[Winner]: ...


class Journal:
    """The trials and decisions of this GPU and toolchain whose kernel text is today's."""

    def __init__(self, store: Database, run_id: int, gpu: Gpu, toolchain: Toolchain) -> None:
        self._store, self._run_id = store, run_id
        self._gpu, self._toolchain = gpu, toolchain
        self._screened: dict[tuple[Problem, Config], Trial] = {}
        self._times: defaultdict[Problem, dict[Config, float]] = defaultdict(dict)
        self._decided: dict[Problem, Decision] = {}
        self._texts: set[str] = set()
        self._made: set[tuple[Problem, Config]] = set()
        self._taken: set[tuple[Problem, Config]] = set()
        self.trials = 0  # made in this run
        for trial in store.trials(gpu, toolchain):
            if trial.kernel_digest == digest_of(trial.problem, trial.config):
                self._keep(trial)
        own = store.winners()
        # of every GPU and problem as the run began: the database's over the shipped ones
        self.earlier_winners = overlay(own, shipped_winners())
        for winner in own:
            if winner.gpu.identity != gpu.identity:
                continue
            decision = winner.decision
            current = decision.kernel_digest == digest_of(decision.problem, decision.winner)
            if winner.toolchain == toolchain and decision.source == "measured" and current:
                self._decided[decision.problem] = decision

    @property
    def reused(self) -> int:
        """How many candidates of earlier runs were taken as they are instead of tried again."""
        return len(self._taken - self._made)

    @property
    def known(self) -> int:
        """How many screened candidates there are, of this run and of earlier ones."""
        return len(self._screened)

    @property
    def winners(self) -> list[Winner]:
        """The earlier ones and this run's."""
        decided = list(self._decided.values())  # at once: other threads decide meanwhile
        return [
            *self.earlier_winners,
            *(Winner(self._gpu, self._toolchain, each) for each in decided),
        ]

    def tried(self, problem: Problem, config: Config) -> bool:
        """Whether an earlier trial speaks for the config on the problem."""
        return (problem, config) in self._screened

    def record(self, trial: Trial) -> Trial:
        """Commit the trial; its kernel text is stored with the first of its kind."""
        if trial.kernel_digest not in self._texts:
            rendered = rendered_for(trial.problem, trial.config)
            self._store.add_kernel(
                trial.config.family, rendered.variant.name, rendered.digest, rendered.text
            )
            self._texts.add(trial.kernel_digest)
        self._store.record_trial(self._run_id, trial)
        self.trials += 1
        if trial.stage == "screen":
            self._made.add((trial.problem, trial.config))
        self._keep(trial)
        return trial

    def decide(self, decision: Decision) -> Decision:
        self._store.record_decision(self._run_id, decision)
        if decision.source == "measured":
            self._decided[decision.problem] = decision
        return decision

    def screened(self, problem: Problem, config: Config) -> Trial | None:
        """The latest trial of the config on the problem, whatever came of it."""
        trial = self._screened.get((problem, config))
        if trial is not None:
            self._taken.add((problem, config))
        return trial

    def of_group(self, problems: Iterable[Problem], config: Config) -> list[Trial]:
        """The trials of the config on any of the problems."""
        found = (self._screened.get((problem, config)) for problem in problems)
        return [trial for trial in found if trial is not None]

    def times(self, problem: Problem) -> dict[Config, float]:
        """Microseconds of the configs screened on the problem and found right."""
        return dict(self._times[problem])

    def decided(self, problem: Problem) -> Decision | None:
        """The latest measured decision on the problem."""
        return self._decided.get(problem)

    def _keep(self, trial: Trial) -> None:
        """A failure in any stage, and times of the screening, speak for the config."""
        if trial.source != "measured" or trial.regime == "eager":
            return
        if trial.stage == "screen" or trial.status != "correct":
            self._screened[trial.problem, trial.config] = trial
            if trial.median_us is not None:
                self._times[trial.problem][trial.config] = trial.median_us
