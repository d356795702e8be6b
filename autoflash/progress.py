"""Progress: what a search says while it runs, on stderr: a live view, or one line a problem."""

import sys
import time
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from autoflash.gpu import Gpu
from autoflash.problem import Problem, title
from autoflash.records import Decision
from autoflash.roofline import floor


class Progress(Protocol):
    """What a search tells as it goes."""

    def notice(self, text: str) -> None:
        """A line that stays."""
        ...

    def begin(self, problem: Problem, number: int, problems: int) -> None: ...

    def candidates(self, done: int, total: int, best_us: float, default_us: float) -> None:
        """Of the problem begun last; 0 where there is no time yet."""
        ...

    def decided(self, problem: Problem, decision: Decision | None, why: str = "") -> None:
        """`why` there is no decision, where there is none."""
        ...

    def close(self) -> None: ...


def outcome(decision: Decision, gpu: Gpu) -> str:
    """A decision in a few words."""
    if decision.source == "predicted":
        return f"predicted {decision.winner}"
    percent = floor(decision.problem, gpu).percent(decision.winner_us)
    share = f", {percent:.0f} % of roofline" if percent else ""
    text = f"{decision.winner_us:.1f} us{share}"
    if decision.winner == decision.default:
        return f"{text}, the default stays"
    if not decision.default_us:
        return f"{text}, the default failed"
    return f"{text}, default {decision.default_us:.1f} us ({100 * decision.margin:+.1f} %)"


class Lines:
    """One plain line a problem, for files and pipes; `name` is the GPU's, of several."""

    def __init__(self, gpu: Gpu, name: str = "") -> None:
        self._gpu, self._name = gpu, f"{name} " if name else ""
        self._numbered = ""

    def notice(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def begin(self, problem: Problem, number: int, problems: int) -> None:
        self._numbered = f"{self._name}[{number}/{problems}]"

    def candidates(self, done: int, total: int, best_us: float, default_us: float) -> None:
        pass

    def decided(self, problem: Problem, decision: Decision | None, why: str = "") -> None:
        said = outcome(decision, self._gpu) if decision else f"undecided: {why}"
        self.notice(f"{self._numbered} {title(problem)}: {said}")

    def close(self) -> None:
        pass


class LiveView(Lines):
    """The same lines above a live one: candidates done, best so far, default, time left.

    `beside` is the view of another GPU, under whose live line this one's is to stand.
    """

    def __init__(
        self,
        gpu: Gpu,
        console: Console,
        budget_s: float | None,
        name: str = "",
        beside: "LiveView | None" = None,
    ) -> None:
        super().__init__(gpu, name)
        self._console, self._budget_s = console, budget_s
        self._started = time.monotonic()
        self._problem, self._number, self._problems = "", 0, 1
        self._counts = (0, 0, 0.0, 0.0)
        self._percent = 0.0
        self._share = 0.0  # of the problems, done
        if beside is not None:
            self._views, self._live = beside._views, beside._live
            self._views.append(self)
            return
        self._views = [self]
        self._live = Live(
            get_renderable=self.lines, console=console, refresh_per_second=4, transient=True
        )
        self._live.start()

    def notice(self, text: str) -> None:
        self._console.print(Text(text))

    def begin(self, problem: Problem, number: int, problems: int) -> None:
        super().begin(problem, number, problems)
        self._shape, self._problem = problem, title(problem)
        self._number, self._problems = number, problems
        self._counts, self._percent = (0, 0, 0.0, 0.0), 0.0

    def candidates(self, done: int, total: int, best_us: float, default_us: float) -> None:
        self._counts = (done, total, best_us, default_us)
        self._percent = floor(self._shape, self._gpu).percent(best_us) if best_us else 0.0

    def close(self) -> None:
        self._live.stop()

    def line(self) -> Text:
        """The live line, now."""
        done, total, best_us, default_us = self._counts
        parts = [f"{self._numbered} {self._problem}", f"{done}/{total} candidates"]
        if best_us:
            parts.append(f"best {best_us:.1f} us ({self._percent:.0f} % of roofline)")
        if default_us:
            parts.append(f"default {default_us:.1f} us")
        parts.append(f"{_clock(self._left_s(done, total))} left")
        return Text("  ".join(parts), overflow="ellipsis", no_wrap=True)

    def lines(self) -> Group:
        """The live lines of all the GPUs, now."""
        return Group(*(view.line() for view in self._views))

    def _left_s(self, done: int, total: int) -> float:
        """Seconds left at the pace so far, never more than the budget leaves."""
        elapsed = time.monotonic() - self._started
        share = (max(self._number - 1, 0) + done / max(total, 1)) / self._problems
        self._share = max(share, self._share)  # each problem is begun again for its final
        left = elapsed / self._share - elapsed if self._share > 0 else float("inf")
        return min(left, float("inf") if self._budget_s is None else self._budget_s - elapsed)


def progress_for(gpu: Gpu, budget_s: float | None) -> Progress:
    """The live view where stderr is a terminal, else lines."""
    console = Console(stderr=True)
    return LiveView(gpu, console, budget_s) if console.is_terminal else Lines(gpu)


def progress_for_each(
    named: Sequence[tuple[str, Gpu]], budget_s: float | None
) -> Sequence[Progress]:
    """The same for each of several GPUs, which have a name each."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return [Lines(gpu, name) for name, gpu in named]
    views: list[LiveView] = []
    for name, gpu in named:
        views.append(LiveView(gpu, console, budget_s, name, views[0] if views else None))
    return views


def _clock(seconds: float) -> str:
    if seconds == float("inf"):
        return "?"
    minutes, rest = divmod(max(0, round(seconds)), 60)
    return f"{minutes}:{rest:02d}"
