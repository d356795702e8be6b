"""Chart: axes and marks as inline SVG, coloured by the page's own style, light or dark."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

WIDTH, HEIGHT = 560, 360  # of the view box; narrow, so that its text can be read on a phone
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48
FEW_DECADES = 3  # of a logarithmic axis, which then has ticks between the powers of ten too


@dataclass(frozen=True)
class Axis:
    """What an axis shows, from `low` to `high`; on a logarithmic one both are positive.

    A `room` beyond is left without ticks, for a legend: its share of the axis.
    """

    label: str
    low: float
    high: float
    logarithmic: bool = False
    room: float = 0.0

    def place(self, value: float) -> float:
        """Where a value lies between the axis' ends, 0 to 1; what is beyond lies at the end."""
        value = min(max(value, self.low), self.high)
        if self.logarithmic:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return share * (1 - self.room)

    def ticks(self) -> list[float]:
        """Round values from end to end, about five."""
        if self.logarithmic:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            steps = (1,) if last - first > FEW_DECADES else (1, 2, 5)
            every = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            return [value for value in every if self.low <= value <= self.high]
        rough = (self.high - self.low) / 5
        unit = 10 ** math.floor(math.log10(rough))
        step = next(unit * each for each in (1, 2, 5, 10) if unit * each >= rough)
        first = math.ceil(self.low / step)
        return [step * n for n in range(first, math.floor(self.high / step + 1e-9) + 1)]


@dataclass
class Chart:
    """Marks are drawn in the order in which they are added."""

    title: str
    x: Axis
    y: Axis
    _marks: list[str] = field(default_factory=list)

    def line(self, points: Iterable[Point], style: str) -> None:
        """A line through the points; `style` is a class of the page's style sheet."""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(self._at, points))
        self._marks.append(f'<polyline class="{style}" points="{path}"/>')

    def stairs(self, points: Sequence[Point], end: float, style: str) -> None:
        """What a quantity was from each point on, to `end`."""
        corners: list[Point] = []
        for x, y in points:
            corners += [(x, corners[-1][1]), (x, y)] if corners else [(x, y)]
        self.line([*corners, (end, points[-1][1])], style)

    def dot(self, point: Point, style: str, told: str) -> None:
        """A dot that tells what it is when it is pointed at."""
        x, y = self._at(point)
        mark = f'<circle class="{style}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">'
        self._marks.append(f"{mark}<title>{escape(told)}</title></circle>")

    def text(self, point: Point, text: str, anchor: str = "start") -> None:
        x, y = self._at(point)
        self._marks.append(_text(x, y - 6, text, anchor))

    def legend(self, names: Sequence[str], styles: Sequence[str]) -> None:
        """The names in the room right of the plot, each behind a dot of its style."""
        left = LEFT + (1 - self.x.room) * (WIDTH - LEFT - RIGHT) + 16
        for place, (name, style) in enumerate(zip(names, styles, strict=True)):
            y = TOP + 12 + 22 * place
            self._marks.append(f'<circle class="{style}" cx="{left:.1f}" cy="{y}" r="4.5"/>')
            self._marks.append(_text(left + 10, y + 4, name, "start"))

    def svg(self, style: str = "") -> str:
        """The chart as one element, named by its title for those who do not see it.

        A file of its own brings the `style` that a page would have.
        """
        view = f'viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self.title)}"'
        parts = [*self._grid(), *self._marks]
        if style:
            view += ' xmlns="http://www.w3.org/2000/svg"'
            parts.insert(0, f"<style>{style}</style>")
        return f'<svg class="chart" {view}>{"".join(parts)}</svg>'

    def _at(self, point: Point) -> Point:
        x = LEFT + self.x.place(point[0]) * (WIDTH - LEFT - RIGHT)
        return x, HEIGHT - BOTTOM - self.y.place(point[1]) * (HEIGHT - TOP - BOTTOM)

    def _grid(self) -> Iterable[str]:
        right, bottom = self._at((self.x.high, self.y.low))
        for value in self.x.ticks():
            x, _ = self._at((value, self.y.low))
            yield _line(x, TOP, x, bottom, "grid")
            yield _text(x, bottom + 18, number(value), "middle")
        for value in self.y.ticks():
            _, y = self._at((self.x.low, value))
            yield _line(LEFT, y, right, y, "grid")
            yield _text(LEFT - 8, y + 4, number(value), "end")
        yield _line(LEFT, bottom, right, bottom, "axis")
        yield _line(LEFT, TOP, LEFT, bottom, "axis")
        yield _text((LEFT + right) / 2, HEIGHT - 8, self.x.label, "middle")
        middle = (TOP + bottom) / 2
        turned = f'transform="rotate(-90 14 {middle:.0f})"'
        yield _text(14, middle, self.y.label, "middle", turned)


def medians_over(
    curves: Sequence[Sequence[Point]], median: Callable[[Iterable[float]], float]
) -> list[Point]:
    """The median, at each moment at which one changes, of curves that each stand until they do."""
    moments = sorted({x for curve in curves for x, _ in curve})
    found = []
    for moment in moments:
        values = [[y for x, y in curve if x <= moment] for curve in curves]
        found.append((moment, median(reached[-1] for reached in values if reached)))
    return found


def number(value: float) -> str:
    """A number for people: 0.5, 12, 1500, 20k."""
    if abs(value) >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:.4g}"


def _line(x1: float, y1: float, x2: float, y2: float, style: str) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, more: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" {more}'
    return f"<text {place}>{escape(text)}</text>"
