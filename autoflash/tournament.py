"""Tournament: every problem's contest on one GPU, group by group."""

from collections.abc import Iterator, Sequence

from autoflash.ahead import compiled_ahead
from autoflash.child import Failure
from autoflash.contest import Contest
from autoflash.cross import cross
from autoflash.entrants import Entrants, Lab
from autoflash.problem import Problem
from autoflash.records import Decision
from autoflash.worker import LimitReached


def hold(
    lab: Lab, all_entrants: Sequence[Entrants]
) -> tuple[list[Decision], list[tuple[Problem, str]]]:
    """Every problem's contest, group by group; then each group's finalists on its other shapes."""
    pairs = [(entrants, p) for entrants in all_entrants for p in entrants.group.problems]
    with compiled_ahead(lab, pairs):
        if lab.limit.finite:
            _open(lab, pairs)
        return _contests(lab, all_entrants, len(pairs))


def _contests(
    lab: Lab, all_entrants: Sequence[Entrants], problems: int
) -> tuple[list[Decision], list[tuple[Problem, str]]]:
    decisions: list[Decision] = []
    undecided: list[tuple[Problem, str]] = []
    for entrants in all_entrants:
        of_group: list[Decision] = []
        group = entrants.group.problems
        # all are screened before the first final: meanwhile what finals need is compiled; but where
        # the time ends early, some are decided
        for together in [(p,) for p in group] if lab.limit.finite else [group]:
            first = len(decisions) + len(undecided) + len(of_group) + 1
            for problem, decision, why in _decided(lab, entrants, together, first, problems):
                if decision:
                    of_group.append(decision)
                else:
                    undecided.append((problem, why))
        of_group.sort(key=lambda decision: group.index(decision.problem))
        decisions += cross(lab, entrants, of_group) if lab.effort.cross_rounds else of_group
    return decisions, undecided


def _decided(
    lab: Lab, entrants: Entrants, together: Sequence[Problem], first: int, problems: int
) -> Iterator[tuple[Problem, Decision | None, str]]:
    """Each with its decision, or why there is none; `first` is the number of the first problem."""
    numbered = list(enumerate(together, first))
    contests = {}
    for number, problem in numbered:
        lab.progress.begin(problem, number, problems)
        share = lab.limit.share(problems - number + 1)
        contests[problem] = Contest(lab, entrants, problem, share)
        contests[problem].screen()
    while numbered:
        # compilers may be at work for one while another's final is held
        ready = (each for each in numbered if not contests[each[1]].waits)
        number, problem = next(ready, numbered[0])
        numbered.remove((number, problem))
        lab.progress.begin(problem, number, problems)
        decision, why = contests[problem].decide()
        lab.progress.decided(problem, decision, why)
        yield problem, decision, why


def _open(lab: Lab, pairs: Sequence[tuple[Entrants, Problem]]) -> None:
    """Before any search: every problem's default, then in half of the time its openings."""
    half = lab.limit.share(2)
    for limit, time in ((lab.limit, Contest.time_default), (half, Contest.time_openings)):
        for entrants, problem in pairs:
            try:
                time(Contest(lab, entrants, problem, limit))
            except LimitReached:
                return
            except Failure:  # the problem's own contest will tell
                continue
