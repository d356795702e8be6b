"""Plots: winners under the roofline, and how a search came near to what it found."""

import statistics
from collections.abc import Mapping, Sequence

from autoflash.explain import Explanation
from autoflash.gpu import Gpu
from autoflash.problem import Problem, title
from autoflash.report.chart import Axis, Chart, Point, medians_over
from autoflash.versus import OURS, Versus

MOST_PERCENT = 50.0  # of the anytime plot: what is farther away is drawn at the edge
FIRST_SECONDS = 0.01  # where its axis begins: a trial takes about as long


def roofline(gpu: Gpu, explanations: Sequence[Explanation]) -> str | None:
    """Winners as dots, TFLOP/s over flops per byte, under what the GPU's data sheet allows.

    None for a GPU whose rates are not known.
    """
    if not (gpu.dram_gbps and gpu.tflops_16bit):
        return None
    dots = []
    for one in explanations:
        decision, least = one.winner.decision, one.floor
        intensity = least.flops / least.bytes_moved
        rate = least.tflops(decision.winner_us)
        percent = least.percent(decision.winner_us)
        told = f"{title(decision.problem)}: {decision.winner_us:.5g} us, {rate:.4g} TFLOP/s, "
        dots.append(((intensity, rate), decision.problem.op, f"{told}{percent:.0f} % of the roof"))
    ridge = 1e3 * gpu.tflops_16bit / gpu.dram_gbps
    low, high = min(x for (x, _), _, _ in dots) / 2, max(2 * ridge, *(x for (x, _), _, _ in dots))
    bottom = min(y for (_, y), _, _ in dots) / 2
    x = Axis("flops per byte that must be moved", low, 2 * high, logarithmic=True)
    y = Axis("TFLOP/s", bottom, 2.0 * gpu.tflops_16bit, logarithmic=True)
    chart = Chart(f"Roofline of {gpu.name}", x, y)
    slope = gpu.dram_gbps / 1e3  # TFLOP/s for each flop per byte
    start = max(low, bottom / slope)
    roof = [(start, start * slope), (ridge, float(gpu.tflops_16bit)), (2 * high, gpu.tflops_16bit)]
    chart.line(roof, "roof")
    chart.text((2 * high, float(gpu.tflops_16bit)), f"{gpu.tflops_16bit} TFLOP/s", "end")
    middle = (start * ridge) ** 0.5
    chart.text((middle / 1.3, middle * slope), f"{gpu.dram_gbps} GB/s", "end")
    for point, op, told in dots:
        chart.dot(point, op, told)
    return chart.svg()


def anytime(curves: Mapping[Problem, Sequence[Point]]) -> str | None:
    """How far the best so far was from the last best, in percent, over seconds of each problem.

    A thin line is one problem, the bold one their median. None where nothing was timed.
    """
    relative = []
    for points in curves.values():
        start, last = points[0][0], points[-1][1]
        relative.append([(max(t - start, 0.0), 100 * (us / last - 1)) for t, us in points])
    if not relative:
        return None
    end = max(1.0, *(t for points in relative for t, _ in points))
    x = Axis("seconds since the problem's first time", FIRST_SECONDS, end, logarithmic=True)
    y = Axis("percent slower than the last best", 0.0, MOST_PERCENT)
    chart = Chart("The best time so far of each problem", x, y)
    for points in relative:
        chart.stairs(points, end, "curve")
    chart.stairs(medians_over(relative, statistics.median), end, "median")
    return chart.svg()


# Colours that people who see few of them tell apart (Okabe and Ito).
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
STYLE = (
    "svg{background:#fff} text{font:13px sans-serif;fill:#444} .grid{stroke:#ddd} "
    ".axis,.even{stroke:#444} .even{fill:none;stroke-width:2}"
)


def ratios(several: Sequence[Versus]) -> str:
    """Each peer's time over ours, a dot for each problem, as a file of its own.

    Above 1 ours is faster. Problems stand in the order of the workload.
    """
    dots = [
        ((number, each.median_us / one.figures[OURS].median_us), name, title(one.problem))
        for number, one in enumerate(several, 1)
        if OURS in one.figures
        for name, each in one.figures.items()
        if name != OURS
    ]
    values = [1.0, *(ratio for (_, ratio), _, _ in dots)]
    x = Axis("problem of the workload", 0.0, len(several) + 1.0, room=0.3)
    y = Axis("time over autoflash's", min(values) / 1.2, max(values) * 1.2, logarithmic=True)
    chart = Chart("Times of peers over autoflash's", x, y)
    chart.line([(x.low, 1.0), (x.high, 1.0)], "even")
    names = sorted({name for _, name, _ in dots})
    for point, name, told in dots:
        place = names.index(name)
        chart.dot(point, f"peer{place}", f"{name}, {told}: {point[1]:.2f}")
    chart.legend(names, [f"peer{place}" for place in range(len(names))])
    colours = (f".peer{i}{{fill:{PALETTE[i % len(PALETTE)]}}}" for i in range(len(names)))
    return chart.svg(STYLE + " ".join(colours))
