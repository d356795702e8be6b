"""Contest: one problem's candidates screened, the finalists timed side by side, one chosen."""

import itertools
import time
from collections.abc import Sequence

from autoflash.aside import good_nearby, wanted_elsewhere
from autoflash.check import Stage
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.decision import (
    FEWEST_ROUNDS,
    Interval,
    choose,
    choose_by_rounds,
    decision_of,
    overlapping,
    spread_interval,
)
from autoflash.effort import TimeLimit
from autoflash.entrants import Entrants, Lab
from autoflash.groups import digest_of
from autoflash.pool import Urgency
from autoflash.problem import Problem
from autoflash.promise import by_promise, lost_nearby, transferred_to
from autoflash.records import Decision, Trial
from autoflash.rounds import SHARPENED, finalists_of, heat, side_by_side, with_times
from autoflash.search import Proposals, likely_next, strategy_for
from autoflash.search.exhaustive import exhaustive
from autoflash.worker import LimitReached

SCREENING_SHARE = 0.65  # of a problem's time, where there is a limit; the rest is the final's
ASIDE = 8  # trials on another shape, before it is seen whether a compiler is done
NEAREST = 2  # winners of the nearest shapes that are tried before any search
GIVE_UP = 2.0  # times the best so far: what a first call exceeds is not timed any further


def proposals_for(lab: Lab, entrants: Entrants, problem: Problem) -> Proposals:
    """What the strategy proposes for a problem; the same for the same seed and what is known."""
    group = entrants.group
    candidates = group.candidates(problem, lab.gpu)
    nearby = _nearby(lab, entrants, problem)
    most = _most(lab, nearby)
    tried = [config for config in candidates if lab.journal.tried(problem, config)]
    if lab.strategy != "exhaustive" and len(tried) >= most:
        return exhaustive(tried, most, lab.seed)  # an earlier run spent this effort
    strategy = strategy_for(lab.strategy, len(candidates), most)
    transferred = transferred_to(problem, lab.gpu, lab.journal.winners, candidates)
    possible = set(candidates)
    fastest = [config for config in sorted(nearby, key=nearby.__getitem__) if config in possible]
    good = dict.fromkeys([*group.defaults(problem, lab.gpu), *transferred])
    good |= dict.fromkeys(fastest[: good_nearby(most)])
    ordered = by_promise(candidates, problem, lab.gpu, list(good), nearby, entrants.resources)
    return strategy(ordered, most, lab.seed, len(good))


def _nearby(lab: Lab, entrants: Entrants, problem: Problem) -> dict[Config, float]:
    """What configs lost on the group's shapes near this one."""
    times = {other: lab.journal.times(other) for other in entrants.group.problems}
    return lost_nearby(problem, times)


def _most(lab: Lab, nearby: dict[Config, float]) -> int:
    """How many are tried: on the first shape of a group more than on those after it.

    They start from what was fast there.
    """
    return lab.effort.max_climbed if nearby else lab.effort.max_candidates


def first_batch(lab: Lab, entrants: Entrants, problem: Problem) -> list[Config]:
    """What will be tried before anything is measured: can be compiled ahead."""
    return next(proposals_for(lab, entrants, problem))


def openings(lab: Lab, entrants: Entrants, problem: Problem) -> list[Config]:
    """What a module may serve the problem with untuned: defaults, winners of the nearest shapes.

    Where the time ends early they are tried before any search: who wins is as fast as they.
    """
    group = entrants.group
    candidates = group.candidates(problem, lab.gpu)
    near = transferred_to(problem, lab.gpu, lab.journal.earlier_winners, candidates)
    return list(dict.fromkeys([*group.defaults(problem, lab.gpu), *near[:NEAREST]]))


class Contest:
    """One problem of a group: first screened, then decided. `limit` is its share of the time."""

    def __init__(self, lab: Lab, entrants: Entrants, problem: Problem, limit: TimeLimit) -> None:
        self._lab, self._entrants, self._problem, self._limit = lab, entrants, problem, limit
        self._default = entrants.group.default(problem, lab.gpu)
        self._screened: dict[Config, Trial] = {}
        self._elsewhere: dict[Problem, Contest] = {}  # those that had trials aside
        self._too_large: set[Problem] = set()
        self._failed = ""  # why the problem itself cannot be made

    def screen(self) -> None:
        """Try what the strategy proposes, and the fastest for longer."""
        try:
            self._search()
            self._sharpen()
        except LimitReached:
            return
        except Failure as failure:
            self._failed = failure.reason

    @property
    def waits(self) -> bool:
        """Whether what its final needs is still being compiled."""
        return not self._failed and self._entrants.must_wait(self._finalists())

    def decide(self) -> tuple[Decision | None, str]:
        """The recorded decision; None, and why, when no candidate was both right and timed."""
        if self._failed:
            return None, self._failed
        try:
            if self._unopened():
                self.time_openings()  # in what is left of the time
            decision = None if self._unopened() else self._earlier() or self._final()
        except LimitReached:
            decision = None if self._unopened() else self._from_screening()
        except Failure as failure:
            return None, failure.reason
        if self._unopened():
            return None, "the budget ended before what may serve it untuned was checked and timed"
        return decision, "" if decision else self._entrants.why_none()

    def time_default(self) -> None:
        """Screen the default alone."""
        self._screen_all([self._default])

    def time_openings(self) -> None:
        """Screen what may serve the problem untuned."""
        self._screen_all(openings(self._lab, self._entrants, self._problem))

    def _screen_all(self, configs: Sequence[Config]) -> None:
        for config in self._entrants.ready(self._problem, configs, self._limit):
            self._screen(config)

    def _unopened(self) -> bool:
        """Whether the time ended before the openings were tried, and no earlier decision stands."""
        if not self._lab.limit.finite or self._standing():
            return False
        left = set(openings(self._lab, self._entrants, self._problem)).difference(self._screened)
        return any(not self._entrants.is_out(self._problem, config) for config in left)

    def _search(self) -> None:
        """Screen what the strategy proposes, after what is known of the openings."""
        lab, problem = self._lab, self._problem
        if lab.limit.finite:
            first = openings(lab, self._entrants, problem)
            self._screen_all([config for config in first if lab.journal.tried(problem, config)])
        proposals = proposals_for(lab, self._entrants, self._problem)
        limit = self._limit.share(1 / SCREENING_SHARE)
        batch, done = next(proposals), 0
        while batch:
            total, waiting = done + len(batch), list(batch)
            for config in self._entrants.ready(self._problem, batch, limit, self._aside):
                before_us = self._best_us()
                waiting.remove(config)
                ahead = itertools.islice(self._entrants.upcoming(self._problem, waiting), 2)
                tried = self._screen(config, list(ahead))
                done += 1
                self._tell(done, total)
                if tried and 2 * done >= total:
                    self._entrants.ask_proofs(self._finalists(), Urgency.SOON)
                if self._best_us() < before_us:
                    self._ask_ahead(config)
                if limit.over:
                    lab.limit.cut = True
                    return
            try:
                batch = proposals.send(self._times())
            except StopIteration:
                return

    def _aside(self) -> bool:
        """A few trials on a later shape, while this one's candidates are compiled; False if none.

        Each change of shapes costs the GPU new buffers.
        """
        lab, entrants = self._lab, self._entrants
        wanted = wanted_elsewhere(lab, entrants, self._problem, self._times())
        fitting = ((p, config) for p, config in wanted if p not in self._too_large)
        few = list(itertools.islice(fitting, ASIDE))
        if not few:
            return False
        other = few[0][0]
        if other not in self._elsewhere:
            self._elsewhere[other] = Contest(lab, entrants, other, self._limit)
        configs = [config for problem, config in few if problem == other]
        try:
            for number, config in enumerate(configs):
                self._elsewhere[other]._screen(config, configs[number + 1 : number + 3])
        except Failure:  # its own contest will tell
            self._too_large.add(other)
        return True

    def _ask_ahead(self, best: Config) -> None:
        """Have compiled what a strategy may propose next, now that this is the best so far."""
        lab, entrants, problem = self._lab, self._entrants, self._problem
        most = _most(lab, _nearby(lab, entrants, problem))
        candidates = entrants.group.candidates(problem, lab.gpu)
        entrants.ask(problem, likely_next(lab.strategy, most, best, candidates), Urgency.SOON)

    def _times(self) -> dict[Config, float]:
        """Microseconds of those screened so far and found right."""
        return {config: trial.median_us or 0.0 for config, trial in self._screened.items()}

    def _best_us(self) -> float:
        """The best time so far, infinite before there is one."""
        return min(self._times().values(), default=float("inf"))

    def _screen(self, config: Config, ahead: Sequence[Config] = ()) -> bool:
        """The lowest rung of a candidate that is right, unless an earlier trial is known.

        `ahead` will be the next ones, it seems. Whether it was tried.
        """
        started = time.monotonic()
        earlier = self._lab.journal.screened(self._problem, config)
        if not self._entrants.admit(self._problem, config):
            return False
        if earlier is not None:
            self._screened[config] = earlier
            return False
        effort = self._lab.effort
        self._time(config, effort.rungs[0], effort.first_cap_us, started, ahead)
        return True

    def _sharpen(self) -> None:
        """The higher rungs: those whose times overlap the best's in turn, at least so many."""
        effort, at_least = self._lab.effort, SHARPENED * self._lab.effort.finalists
        for rung in range(1, len(effort.rungs)):
            near, best_us = overlapping(self._sharpest(), at_least), self._best_us()
            again = [trial for trial in near if not effort.reached(rung, trial.samples, best_us)]
            if again and not self._limit.over:
                self._heat([trial.config for trial in near], effort.samples(rung, best_us))
            at_least = effort.finalists

    def _heat(self, configs: Sequence[Config], rounds: int) -> None:
        entrants, problem = self._entrants, self._problem
        entrants.wait_for(configs, self._limit, self._aside, Stage.SCREEN)
        self._prepare()
        trials = heat(self._lab, entrants, problem, configs, rounds, self._limit)
        self._screened |= {trial.config: trial for trial in trials}
        for config in configs:
            if entrants.is_out(problem, config):
                self._screened.pop(config, None)

    def _sharpest(self) -> list[Trial]:
        """The trials of those sampled in turn, or all where none was: times that compare."""
        every, best_us = list(self._screened.values()), self._best_us()
        reached = self._lab.effort.reached
        return [trial for trial in every if reached(1, trial.samples, best_us)] or every

    def _time(
        self,
        config: Config,
        samples: int,
        cap_us: float,
        started: float,
        ahead: Sequence[Config],
    ) -> None:
        """A trial of so many samples; its work, a check perhaps, began at `started`."""
        lab = self._lab
        self._prepare()
        try:
            give_up_us = GIVE_UP * self._best_us()
            go_on = bool(ahead) and self._entrants.admitted(ahead[0])
            timing = lab.worker.screen(config, samples, cap_us, give_up_us, ahead, go_on)
        except Failure as failure:
            self._screened.pop(config, None)
            seconds = time.monotonic() - started
            self._entrants.fail(self._problem, config, "screen", failure, seconds)
            return
        seconds = time.monotonic() - started
        trial = self._entrants.trial(self._problem, config, "screen", "correct", seconds)
        trial = with_times(trial, "graph", timing.samples_us, timing.clocks)
        self._screened[config] = lab.journal.record(trial)

    def _final(self) -> Decision | None:
        """Interleaved rounds of the finalists and the default; the next best where all fail."""
        lab, problem = self._lab, self._problem
        while self._screened:
            finalists = self._finalists()
            self._entrants.wait_for(finalists, self._limit, self._aside)
            self._prepare()
            about_us, limit = self._screened[finalists[0]].median_us or 0.0, self._limit
            samples = side_by_side(
                lab, self._entrants, problem, finalists, "final", about_us, limit
            )
            if samples and len(next(iter(samples.values()))) < FEWEST_ROUNDS:
                return self._from_screening()
            if samples:
                decision = self._from_rounds(samples)
                fastest = [config for config, _ in decision.times[: lab.effort.finalists]]
                both = list(dict.fromkeys([*fastest, decision.winner, decision.default]))
                time_eager(lab, self._entrants, problem, [c for c in both if c in samples], limit)
                return decision
            for config in finalists:
                self._screened.pop(config, None)
        return None

    def _finalists(self) -> list[Config]:
        """The fastest of the screening, the default unless it failed, an earlier run's winner."""
        ranked = sorted(self._sharpest(), key=lambda t: (t.median_us or 0.0, t.config))
        best_us = (ranked[0].median_us or 0.0) if ranked else 0.0
        most = finalists_of(self._problem, best_us, self._lab.gpu, self._lab.effort)
        finalists = [trial.config for trial in ranked[:most]]
        if self._default in self._screened:
            finalists.append(self._default)
        if ranked and (earlier := self._standing()):
            finalists.append(earlier.winner)
        return list(dict.fromkeys(finalists))

    def _standing(self) -> Decision | None:
        """An earlier decision whose winner nothing speaks against."""
        earlier = self._lab.journal.decided(self._problem)
        if earlier is None or self._entrants.is_out(self._problem, earlier.winner):
            return None
        return earlier

    def _earlier(self) -> Decision | None:
        """An earlier run's decision, where it measured all who would be finalists now."""
        earlier = self._standing()
        if earlier is None:
            return None
        finalists, measured = set(self._finalists()), {config for config, _ in earlier.times}
        return earlier if finalists and finalists <= measured else None

    def _from_rounds(self, samples: dict[Config, list[float]]) -> Decision:
        earlier, resources = self._standing(), self._entrants.resources
        incumbent = earlier.winner if earlier else None
        choice, times = choose_by_rounds(samples, self._default, resources, incumbent)
        digest = digest_of(self._problem, choice.winner)
        decision = decision_of(self._problem, choice, times, self._default, digest)
        return self._lab.journal.decide(decision)

    def _from_screening(self) -> Decision | None:
        """The choice where the time ended before the final: the default, unless plainly beaten.

        An earlier decision stands: it had its final.
        """
        lab, entrants = self._lab, self._entrants
        trials = {
            config: trial
            for config, trial in self._screened.items()
            if entrants.proven(config) and not entrants.is_out(self._problem, config)
        }
        if not trials:
            return None
        if earlier := self._standing():
            return earlier
        times = {config: trial.median_us or 0.0 for config, trial in trials.items()}

        def interval(slower: Config, faster: Config) -> Interval:
            return spread_interval(trials[slower], trials[faster])

        choice = choose(times, interval, self._default, entrants.resources)
        digest = digest_of(self._problem, choice.winner)
        return lab.journal.decide(decision_of(self._problem, choice, times, self._default, digest))

    def _prepare(self) -> None:
        if self._lab.worker.prepared != self._problem:
            self._lab.worker.prepare(self._problem, self._lab.seed)

    def _tell(self, done: int, total: int) -> None:
        best_us = self._best_us() if self._screened else 0.0
        default = self._screened.get(self._default)
        default_us = default.median_us if default and default.median_us else 0.0
        self._lab.progress.candidates(done, total, best_us, default_us)


def time_eager(
    lab: Lab, entrants: Entrants, problem: Problem, configs: Sequence[Config], limit: TimeLimit
) -> None:
    """Configs of a final once more, with the host's launches in their times."""
    for config in configs:
        if limit.over:
            return
        started = time.monotonic()
        try:
            timing = lab.worker.eager(config, lab.effort.eager_calls, lab.effort.first_cap_us)
        except (Failure, LimitReached):
            return  # the decision stands on the graph regime
        seconds = time.monotonic() - started
        trial = entrants.trial(problem, config, "final", "correct", seconds)
        lab.journal.record(with_times(trial, "eager", timing.samples_us, timing.clocks))
