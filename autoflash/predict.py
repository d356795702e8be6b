"""Predict: a choice without a GPU, from compiled resources and the roofline; never a time.

Only the order that the model gives matters; what it says is stored as `predicted` and never as a
measurement.
"""

from collections.abc import Sequence

from autoflash.check import Case, Checker, small_cases_of
from autoflash.config import Config
from autoflash.entrants import Entrants, Lab
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.groups import Group, digest_of
from autoflash.model import predicted_us
from autoflash.problem import Problem
from autoflash.records import Decision
from autoflash.search.random import random
from autoflash.toolchain import Toolchain, detect_toolchain
from autoflash.worker import Deadlines, LimitReached

INTERPRET = {"TRITON_INTERPRET": "1"}  # one process cannot both interpret and compile
INTERPRETER_DEADLINES = Deadlines(check_s=300.0)
CHECKED = 3  # best predicted candidates tried in the interpreter before the default is taken
CLEARLY = 0.05  # what a prediction must promise over the default; the model is no better than that


class InterpretedDevice(Checker):
    """The service of the process that checks numerics in triton's interpreter, on the CPU."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__("cpu", gpu)

    def hello(self) -> tuple[Gpu, Toolchain]:
        return self._gpu, detect_toolchain()

    def cases(self, problem: Problem) -> tuple[Case, ...]:
        return small_cases_of(problem)


def predict(
    lab: Lab, all_entrants: Sequence[Entrants]
) -> tuple[list[Decision], list[tuple[Problem, str]]]:
    """A predicted decision for every problem whose choice is right in the interpreter."""
    pairs = [(entrants, p) for entrants in all_entrants for p in entrants.group.problems]
    for entrants, problem in pairs:
        entrants.ask(problem, [entrants.group.default(problem, lab.gpu)])
    for entrants, problem in pairs:
        entrants.ask(problem, _candidates(lab, entrants.group, problem))
    decisions, undecided = [], []
    for number, (entrants, problem) in enumerate(pairs, 1):
        lab.progress.begin(problem, number, len(pairs))
        try:
            decision = _choice(lab, entrants, problem)
        except LimitReached:
            decision = None
        why = "" if decision else entrants.why_none()
        lab.progress.decided(problem, decision, why)
        if decision:
            decisions.append(lab.journal.decide(decision))
        else:
            undecided.append((problem, why))
    return decisions, undecided


def _choice(lab: Lab, entrants: Entrants, problem: Problem) -> Decision | None:
    """The best predicted config that is right, unless it promises little over a right default."""
    default = entrants.group.default(problem, lab.gpu)
    batch = _candidates(lab, entrants.group, problem)
    predictions: dict[Config, float] = {}
    for done, config in enumerate(entrants.ready(problem, batch, lab.limit), 1):
        if entrants.compiled(problem, config):
            resources = entrants.resources[config]
            predictions[config] = predicted_us(problem, config, resources, lab.gpu)
        lab.progress.candidates(done, len(batch), 0.0, 0.0)
    ranked = sorted(predictions, key=lambda config: (predictions[config], config))
    promised = predictions.get(default, float("inf")) / (1 + CLEARLY)
    better = [config for config in ranked if predictions[config] < promised][:CHECKED]
    for config in [*better, default, *ranked[:CHECKED]]:
        if config in predictions and entrants.admit(problem, config):
            trial = entrants.trial(problem, config, "predicted", "correct", 0.0)
            lab.journal.record(trial)
            return _decision(problem, config, default, predictions)
    return None


def _candidates(lab: Lab, group: Group, problem: Problem) -> list[Config]:
    """Those whose numerics can be checked here, all or as many as the effort allows.

    What was not checked is not chosen, and no strategy could learn from what was not timed.
    """
    candidates = group.candidates(problem, lab.gpu)
    checkable = [config for config in candidates if family_of(config.family).interpretable]
    return next(random(checkable, lab.effort.max_candidates, lab.seed))


def _decision(
    problem: Problem, winner: Config, default: Config, predictions: dict[Config, float]
) -> Decision:
    default_us = predictions.get(default, 0.0)
    margin = default_us / predictions[winner] - 1 if default_us else 0.0
    return Decision(
        problem=problem,
        kernel_digest=digest_of(problem, winner),
        winner=winner,
        winner_us=predictions[winner],
        default=default,
        default_us=default_us,
        margin=margin,
        margin_low=margin,
        margin_high=margin,
        source="predicted",
    )
