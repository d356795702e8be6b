"""`autoflash coverage`: what share of recorded calls and of their time has a config of its own."""

from pathlib import Path
from typing import Annotated

import typer

from autoflash.cli.options import AsJson, print_json
from autoflash.cli.table import print_table


def coverage(
    trace: Annotated[
        Path, typer.Argument(metavar="TRACE", help="A file that an exported module wrote.")
    ],
    worst: Annotated[
        int, typer.Option(min=0, help="So many of the problems that may lose most time are listed.")
    ] = 10,
    as_json: AsJson = False,
) -> None:
    """Say what share of recorded calls was served by a config tuned for it, or near it, or not.

    A module writes its calls with write_trace(), or when its process ends with AUTOFLASH_TRACE=FILE
    in the environment. Shares of time are by the roofline: a call counts the least time it can
    take. What is listed is what `autoflash tune --from-trace TRACE` tunes first.
    """
    from dataclasses import asdict

    from autoflash.problem import title
    from autoflash.trace import load_trace, shares

    traced = load_trace(trace)
    told = shares(traced)
    untuned = [one for one in traced if one.how != "exact"]
    untuned = sorted(untuned, key=lambda one: -one.floor_us)[:worst]
    listed = [
        {
            "gpu": one.gpu[0],
            "problem": title(one.problem),
            "calls": one.calls,
            "how": one.how,
            "least_ms": round(one.floor_us / 1e3, 3),
        }
        for one in untuned
    ]
    if as_json:
        print_json({"shares": [asdict(each) for each in told], "first": listed})
        return
    print_table(
        ["how", "problems", "calls", "calls_percent", "time_percent"],
        [
            [
                each.how,
                each.problems,
                each.calls,
                round(100 * each.calls_share, 1),
                round(100 * each.time_share, 1),
            ]
            for each in told
        ],
    )
    if listed:
        print()
        print_table(list(listed[0]), [list(each.values()) for each in listed])
