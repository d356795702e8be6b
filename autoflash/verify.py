"""Verify: the contract's matrix put to configs or an exported module, in other processes."""

import random
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from threading import Event

import torch

from autoflash.child import Child, ChildError, Failure
from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.families import Family, why_refused
from autoflash.families import space as space_of
from autoflash.findings import Finding, Told
from autoflash.gpu import Gpu
from autoflash.kinds import as_long_as, kind_of, kinds_of
from autoflash.matrix import ALL_TILES, FEW_TILES, Case, cases_of, far_cases_of, tiles_of
from autoflash.problem import Problem
from autoflash.records import Winner
from autoflash.roofline import cache_bytes
from autoflash.subjects import Candidate, Exported, Subject

INTERPRET = {"TRITON_INTERPRET": "1"}  # one process cannot both interpret and compile
TUNED_BYTES = 4 << 30  # of K and V: several processes share the memory
KEPT_BYTES = 1 << 30  # of memory that torch may keep in a process between cases, beside others'
CASE_DEADLINE_S = 300.0  # compiling what is new, on a host whose other cores compile too


@dataclass(frozen=True)
class Unit:
    """Cases of one kind of problem for one subject, which share kernels: one process runs them."""

    told: Told
    cases: tuple[Case, ...]


class Examiner:
    """The service of a verifying process; `device` is cuda or, in an interpreting one, cpu."""

    def __init__(self, device: str, gpu: Gpu, seed: int) -> None:
        self._device, self._gpu, self._seed = device, gpu, seed
        self._subject = cache(self._made)
        # numpy warns of the -inf that the lse of a row without a visible key is
        warnings.simplefilter("ignore")

    def examine(self, told: Told, case: Case) -> str:
        """Why the subject breaks the clause of the case, or "". Raises Failure where it fails."""
        make = partial(case.make, self._seed, self._device)
        subject = self._subject(told)
        with self._failures():
            reason = case.asked.ask(subject, make)
        if self._device == "cuda" and torch.cuda.memory_reserved() > KEPT_BYTES:
            torch.cuda.empty_cache()
        return reason

    def _made(self, told: Told) -> Subject:
        return Candidate(told, self._gpu) if isinstance(told, Config) else Exported(told)

    def _failures(self) -> AbstractContextManager[None]:
        if self._device != "cuda":
            return nullcontext()
        from autoflash.trial import failures

        return failures()


def of_module(
    path: Path, small: bool, tuned: Sequence[Problem] = (), backward: bool = False
) -> list[Unit]:
    """All kinds of problems for an exported module, whose own choice the configs are.

    `tuned` are those at whose own sizes it is asked too, where memory allows. With `backward` it
    is asked for gradients instead, at sizes of no tuned ones.
    """
    tiles, units = FEW_TILES if small else ALL_TILES, []
    forward = [each for each in tuned if each.op != "backward" and not backward]
    light = [problem for problem in forward if cache_bytes(problem) <= TUNED_BYTES]
    units += [Unit(path, (Case("some rows at a tuned size", each),)) for each in light]
    for op in ("backward",) if backward else ("prefill", "decode"):
        # masks beyond windows meet modifiers, and rules are there, only where such were tuned, as
        # are the gradients under any of them, and of packed sequences with a bias
        beyond = _tuned_gradients if op == "backward" else _tuned_masks
        kinds = [kind for kind in kinds_of(op, small) if not beyond(kind)]
        ruled = [p for p in tuned if p.op == op and (beyond(p) if op == "backward" else p.mask)]
        kinds += dict.fromkeys(map(kind_of, ruled))
        for number, kind in enumerate(kinds):
            cases = cases_of(kind, tiles, small, brief=small and number > 0)
            units.append(Unit(path, tuple(cases)))
        units += [] if small else [Unit(path, tuple(far_cases_of(op)))]
    return units


def of_family(family: Family, gpu: Gpu, small: bool, drawn: int, seed: int) -> list[Unit]:
    """All kinds that the family serves, for its default and `drawn` random candidates of each."""
    units, chance = [], random.Random(seed)
    kinds = [p for p in kinds_of(family.op, small) if family.unsupported(p, gpu) is None]
    for number, kind in enumerate(kinds):
        default, busy = family.default(kind, gpu), _busy(kind, gpu)
        others = [config for config, refusal in space_of(family, busy, gpu) if refusal is None]
        chosen = [default, *chance.sample(others, min(drawn, len(others)))]
        for config in dict.fromkeys(chosen):
            units.append(_unit(config, kind, gpu, small, brief=small and number > 0))
    if not small:
        for case in far_cases_of(family.op):
            if family.unsupported(case.problem, gpu) is None:
                units.append(Unit(family.default(case.problem, gpu), (case,)))
    return units


def of_winners(winners: Iterable[Winner], gpu: Gpu, small: bool) -> list[Unit]:
    """Each winner's config on the kind of problem that it won, once where several won alike."""
    kinds = {(w.decision.winner, kind_of(w.decision.problem)): None for w in winners}
    return [_unit(config, kind, gpu, small, brief=small) for config, kind in kinds]


def examined(
    units: Sequence[Unit],
    examiner: Callable[[], Examiner],
    environment: Mapping[str, str] | None = None,
    jobs: int = 1,
    told: Callable[[Finding], None] = lambda finding: None,
) -> list[Finding]:
    """What came of every case, in the order of the units.

    `jobs` processes take one unit after the other, those of most work first. One that a case kills
    or outlasts its deadline is started again for the next case. `told` is called with each finding
    as it is made. Whatever ends this early, as Ctrl-C, waits for the cases that run and for no
    other.
    """
    ended = Event()
    children = [Child(examiner, environment) for _ in range(max(1, min(jobs, len(units))))]
    free = list(children)

    def work(unit: Unit) -> list[Finding]:
        child = free.pop()
        try:
            findings = []
            for case in unit.cases:
                if ended.is_set():
                    break
                findings.append(_finding(child, unit.told, case))
                told(findings[-1])
            return findings
        finally:
            free.append(child)

    try:
        with ThreadPoolExecutor(len(children)) as threads:
            try:
                order = sorted(range(len(units)), key=lambda place: -_work(units[place]))
                of_units = threads.map(work, [units[place] for place in order])
                found = dict(zip(order, of_units, strict=True))
                return [finding for place in sorted(found) for finding in found[place]]
            finally:
                ended.set()
    finally:
        for child in children:
            child.close()


def _work(unit: Unit) -> int:
    """How long the unit takes beside others: most of it is compiling, longer for wider tiles."""
    return sum(case.problem.head_dim for case in unit.cases)


def _tuned_masks(kind: Problem) -> bool:
    """Whether a forward is carried only where one was tuned."""
    beside = kind.modifiers
    if kind.op == "decode":  # whose text of masks has all modifiers but a bias
        beside = kind.bias or kind.quantised or kind.latent
    return bool(kind.mask or (kind.masks and beside))


def _tuned_gradients(kind: Problem) -> bool:
    """Whether a backward is."""
    return bool(kind.masks or (kind.bias and kind.varlen))


def _busy(kind: Problem, gpu: Gpu) -> Problem:
    """The kind at a size at which candidates of every sort make sense."""
    return replace(as_long_as(kind, 4096), batch=gpu.num_sms)


def _finding(child: Child, told: Told, case: Case) -> Finding:
    began = time.monotonic()
    try:
        reason = child.call("examine", told, case, deadline_s=CASE_DEADLINE_S)
    except Failure as failure:
        reason = str(failure)
    except AutoflashError:
        raise  # a file that is no module: of no case's making
    except ChildError as error:  # what the call raised
        reason = str(error).strip().splitlines()[-1]
    return Finding(told, case, reason, time.monotonic() - began)


def _unit(config: Config, kind: Problem, gpu: Gpu, small: bool, brief: bool) -> Unit:
    """The cases that the config can serve: a neighbouring size may be too large for it."""
    cases = cases_of(kind, tiles_of(config), small, brief)
    return Unit(config, tuple(c for c in cases if why_refused(c.problem, config, gpu) is None))
