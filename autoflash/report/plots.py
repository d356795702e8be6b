"""Plots: winners under the roofline, and how a search came near to what it found."""

import statistics
from collections.abc import Mapping, Sequence

from autoflash.explain import Explanation
from autoflash.gpu import Gpu
from autoflash.problem import Problem, title
from autoflash.report.chart import Axis, Chart, Point, medians_over

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
