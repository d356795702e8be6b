"""Team: the GPUs of one type, to which the problems of a run are dealt as they become free."""

import math
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Condition

from autoflash.child import Failure
from autoflash.contest import Contest
from autoflash.cross import crossed
from autoflash.desk import Desk, Stopped
from autoflash.entrants import Entrants, Lab
from autoflash.errors import DeviceError
from autoflash.groups import Group
from autoflash.problem import Problem
from autoflash.records import Decision
from autoflash.worker import LimitReached


@dataclass(frozen=True)
class Task:
    """What to do on one GPU: `default`, `openings`, `contest` or `cross`, of a group's problem."""

    kind: str
    group: int
    problem: Problem


class Team:
    """What its GPUs share: one run, one journal, and what is found out of each candidate.

    Each GPU's thread calls `work`. A GPU that is lost gives its problem back to the others.
    """

    def __init__(self, labs: Sequence[Lab], groups: Sequence[Group], desk: Desk) -> None:
        self.labs, self._desk = list(labs), desk
        self._entrants = [Entrants(labs[0], group) for group in groups]
        self._groups = groups
        self._problems = sum(len(group.problems) for group in groups)
        self._in_hand = 0
        self._alive = len(labs)
        self._changed = Condition()
        self.decided: dict[Problem, Decision] = {}
        self.undecided: dict[Problem, str] = {}
        self.lost: list[str] = []  # why each GPU that was lost was
        self._half = self.labs[0].limit.share(2)  # of the time, for openings
        self._waiting: deque[Task] = deque(self._dealt())

    @property
    def pairs(self) -> list[tuple[Entrants, Problem]]:
        """Every problem with the entrants of its group, as they are dealt."""
        return [(e, problem) for e in self._entrants for problem in e.group.problems]

    def work(self, lab: Lab) -> None:
        """Do one task after another until none is left to any GPU of the team.

        Raises Stopped once the desk is closed. A GPU that cannot be started again is told of and
        ends its thread's work; its task is another's.
        """
        entrants = [each.on(lab) for each in self._entrants]
        try:
            while True:
                with self._taken() as task:
                    if task is None:
                        return
                    self._do(task, lab, entrants[task.group])
        except DeviceError as error:
            with self._changed:
                self.lost.append(str(error))
                self._alive -= 1
                others = self._alive
            lab.progress.notice(f"{error}; the others go on without it" if others else str(error))

    def end(self) -> None:
        """Once no GPU works any more: what no GPU is left for is undecided, and why."""
        for task in self._waiting:
            if task.kind == "contest" and not self._alive:
                self.undecided[task.problem] = f"its GPUs were lost: {self.lost[0]}"

    def in_order(self) -> tuple[list[Decision], list[tuple[Problem, str]]]:
        """The decisions, and the problems without one, as the groups have them."""
        problems = [problem for group in self._groups for problem in group.problems]
        decisions = [self.decided[p] for p in problems if p in self.decided]
        return decisions, [(p, self.undecided[p]) for p in problems if p in self.undecided]

    def _dealt(self) -> Iterator[Task]:
        # where the time ends early, what may serve untuned is an answer
        kinds = ("default", "openings", "contest") if self.labs[0].limit.finite else ("contest",)
        for kind in kinds:
            for number, group in enumerate(self._groups):
                for problem in group.problems:
                    yield Task(kind, number, problem)

    @contextmanager
    def _taken(self) -> Iterator[Task | None]:
        """The next task; None when none is left and none in hand can bring another."""
        with self._changed:
            while not self._waiting and self._in_hand:
                self._changed.wait()
            if self._desk.closed:
                raise Stopped
            task = self._waiting.popleft() if self._waiting else None
            self._in_hand += task is not None
        try:
            yield task
        except DeviceError:
            with self._changed:
                if task is not None:
                    self._waiting.appendleft(task)
            raise
        finally:
            with self._changed:
                self._in_hand -= task is not None
                self._changed.notify_all()

    def _do(self, task: Task, lab: Lab, entrants: Entrants) -> None:
        if task.kind in ("default", "openings"):
            with suppress(LimitReached, Failure):  # the problem's own contest will tell
                if task.kind == "default":
                    Contest(lab, entrants, task.problem, lab.limit).time_default()
                else:
                    Contest(lab, entrants, task.problem, self._half).time_openings()
        elif task.kind == "contest":
            self._decide(task, lab, entrants)
        else:
            own = self._of_group(task.group)
            self.decided[task.problem] = crossed(lab, entrants, self.decided[task.problem], own)

    def _decide(self, task: Task, lab: Lab, entrants: Entrants) -> None:
        with self._changed:
            left = 1 + sum(other.kind == "contest" for other in self._waiting)
            number = self._problems - left + 1
        lab.progress.begin(task.problem, number, self._problems)
        share = math.ceil(left / self._alive)
        contest = Contest(lab, entrants, task.problem, lab.limit.share(share))
        contest.screen()
        decision, why = contest.decide()
        if self._desk.closed:  # then it was stopped and came to no end of its own
            raise Stopped
        lab.progress.decided(task.problem, decision, why)
        with self._changed:
            if decision:
                self.decided[task.problem] = decision
            else:
                self.undecided[task.problem] = why
            self._cross_if_complete(task.group, lab)

    def _cross_if_complete(self, number: int, lab: Lab) -> None:
        """The finalists of a group's shapes on its other shapes, once all of them are known."""
        problems = self._groups[number].problems
        known = [p for p in problems if p in self.decided or p in self.undecided]
        if len(known) == len(problems) and lab.effort.cross_rounds:
            own = self._of_group(number)
            self._waiting.extend(Task("cross", number, each.problem) for each in own)

    def _of_group(self, number: int) -> list[Decision]:
        problems = self._groups[number].problems
        return [self.decided[problem] for problem in problems if problem in self.decided]
