"""`autoflash explain`: why a winner won; of several, each in a line."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoflash.cli.filters import AsCsv, Database, Filters, filtered
from autoflash.cli.notices import counted, notice, store_warnings_told
from autoflash.cli.options import AsJson, print_json
from autoflash.cli.table import Drawn, print_rows_as_csv, print_table

if TYPE_CHECKING:
    from autoflash.explain import Explanation, Measured
    from autoflash.records import Winner

SUMMARY = (
    *("number", "gpu", "problem", "family", "knobs", "winner_us", "gain_percent"),
    *("roofline_percent", "limiter", "spill_bytes", "neighbours", "tried", "failed"),
)
DRAWN = Drawn(
    {"n": "number", "gpu": "gpu", "problem": "problem", "family": "family", "us": "winner_us"}
    | {"gain %": "gain_percent", "roof %": "roofline_percent"}
    | {"limiter": "limiter", "knobs": "knobs"},
    above=("gpu", "family", "limiter"),
    spare=("limiter", "knobs"),
)
MOST_RUNNERS_UP = 8


@filtered
def explain(
    filters: Filters,
    number: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Of several winners, this one in full.")
    ] = None,
    db: Database = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Tell why a winner won: its limits, its neighbours, its knobs, and what failed.

    One winner is told in full; several are a line each, to be chosen from by --number. --json has
    all of each. Without the trials, as of a shipped winner, what its final held is told.
    """
    if as_json and as_csv:
        raise typer.BadParameter("--json or --csv, not both")
    found = explained(db, filters, number)
    if as_json:
        print_json([_object(one) for _, one in found])
    elif as_csv:
        print_rows_as_csv(SUMMARY, [_summary(place, one) for place, one in found])
    elif len(found) == 1:
        _print_in_full(found[0][1])
    elif found:
        print_table(SUMMARY, [_summary(place, one) for place, one in found], DRAWN)
        notice("--number N, or filters that leave one winner, tell it in full")
    else:
        notice("no measured winners are what was asked for")


def explained(
    db: Path | None, filters: Filters, number: int | None
) -> "list[tuple[int, Explanation]]":
    """The explanations of the winners that the filters leave, numbered from 1, or one of them.

    Who is left out is noticed. Raises StoreError for a number that none has.
    """
    from autoflash.errors import StoreError
    from autoflash.explain import explanations
    from autoflash.store import Store, users_database

    with store_warnings_told():
        if db is None and users_database() is None:
            notice("you have no database yet: shipped winners only")
            told, left_out = explanations(None, filters.match)
        else:
            with Store.open(db, readonly=True) as store:
                told, left_out = explanations(store, filters.match)
    for reason in left_out:
        notice(f"left out: {reason}")
    found = list(enumerate(told, 1))
    if number is None:
        return found
    if number > len(found):
        raise StoreError(f"--number {number}: {len(found)} winners are what was asked for")
    return found[number - 1 : number]


def _summary(number: int, one: "Explanation") -> tuple[Any, ...]:
    decision = one.winner.decision
    return (
        number,
        one.winner.gpu.name,
        decision.problem,
        decision.winner.family,
        _knobs(decision.winner),
        decision.winner_us,
        round(100 * decision.margin, 1),
        round(one.floor.percent(decision.winner_us), 1),
        one.limits.limiter,
        one.resources.spill_bytes,
        len(one.neighbours),
        one.candidates,
        sum(failure.candidates for failure in one.failures),
    )


def _print_in_full(one: "Explanation") -> None:
    from autoflash.problem import title

    winner, limits, least = one.winner, one.limits, one.floor
    decision, chain = winner.decision, winner.toolchain
    print(f"{title(decision.problem)}, on {winner.gpu.name}")
    print(f"  winner    {decision.winner}: {decision.winner_us:.5g} us")
    print(
        f"            decided {decision_date(winner)}, triton {chain.triton}, torch {chain.torch},"
    )
    print(f"            driver {chain.driver}; {one.candidates} candidates were tried")
    if decision.tied:
        print(f"            tied with {len(decision.tied)}, an earlier winner or the simplest won")
    print(f"  default   {decision.default}: {_gain(one)}")
    if least.floor_us:
        us, bound = decision.winner_us, f"the {least.floor_us:.4g} us that {least.bound} allows"
        rates = f"{least.tflops(us):.4g} TFLOP/s, {least.gbps(us):.4g} GB/s"
        launches = counted(limits.launches, "launch", "launches")
        exponentials = f"{limits.exponentials_us:.4g}" if limits.exponentials_us else "not known"
        print(f"  roofline  {least.percent(us):.1f} % of {bound}: {rates}")
        print(f"  limiter   {limits.limiter}; alone, at the GPU's peak, would take (us)")
        print(
            f"            bytes {limits.bytes_us:.4g}, tensor cores {limits.tensor_us:.4g}, "
            f"exponentials {exponentials}; not overlapped:"
        )
        print(
            f"            {launches} about {limits.launch_us:.4g}, idle "
            f"multiprocessors {limits.idle_us:.4g}, latency and the rest {limits.rest_us:.4g}"
        )
    print(f"  takes     {_takes(one)}")
    _section("best of each family", _timed(one.families))
    _section("runners-up", _timed(one.runners_up[:MOST_RUNNERS_UP]))
    _section(
        "what each knob decides",
        [
            (
                cost.name,
                cost.value,
                round(100 * cost.importance, 1),
                None if cost.loses is None else round(100 * cost.loses, 1),
                "  ".join(f"{value}: {us:.4g}" for value, us in cost.best_us),
            )
            for cost in one.knobs
        ],
        ("knob", "winner's", "importance_percent", "loses_percent", "best us with each value"),
    )
    _section(
        "neighbours: one knob away",
        [
            (
                each.knob,
                each.value,
                each.measured.us if each.measured else None,
                round(100 * each.measured.slower, 1) if each.measured else None,
                each.measured.stage if each.measured else each.failure,
            )
            for each in one.neighbours
        ],
        ("knob", "instead", "us", "slower_percent", "timed in"),
    )
    _section(
        "failed",
        [(f.candidates, f.family, f.status, f.reason) for f in one.failures],
        ("candidates", "family", "status", "reason"),
    )


def decision_date(winner: "Winner") -> str:
    """The day of a decision."""
    return winner.decided_at[:10]


def _gain(one: "Explanation") -> str:
    decision = one.winner.decision
    if decision.winner == decision.default:
        return "it is the winner"
    if not decision.default_us:
        return "it failed"
    low, high = 100 * decision.margin_low, 100 * decision.margin_high
    more = f"{100 * decision.margin:.1f} % more ({low:.1f} to {high:.1f})"
    return f"{decision.default_us:.5g} us, {more}"


def _takes(one: "Explanation") -> str:
    took, fits = one.resources, one.limits.occupancy
    if took.registers is None:
        return "not known: its trials are not here; `autoflash profile` compiles it and tells"
    spills = f"{took.spill_bytes} bytes of spills" if took.spill_bytes else "no spills"
    blocks = "block" if fits.blocks == 1 else "blocks"
    return (
        f"{took.registers} registers, {spills}, {took.smem_bytes} bytes of shared memory: "
        f"{fits.blocks} {blocks} on a\n            multiprocessor, {fits.percent:.0f} % of its "
        f"warps, bound by {fits.binds}; {one.limits.programs} programs"
    )


def _timed(several: "Iterable[Measured]") -> list[tuple[Any, ...]]:
    return [
        (each.config.family, _knobs(each.config), each.us, round(100 * each.slower, 1), each.stage)
        for each in several
    ]


def _section(
    heading: str,
    rows: Sequence[Sequence[Any]],
    names: Sequence[str] = ("family", "knobs", "us", "slower_percent", "timed in"),
) -> None:
    if rows:
        print(f"\n{heading}")
        print_table(names, rows)


def _knobs(config: Any) -> str:
    return " ".join(f"{name}={value}" for name, value in config.knobs)


def _object(one: "Explanation") -> dict[str, Any]:
    """All of an explanation, as JSON has it."""
    from dataclasses import asdict

    from autoflash.problem import title

    def timed(each: "Measured | None") -> dict[str, Any] | None:
        return None if each is None else {**asdict(each), "config": _config(each.config)}

    decision, limits, least = one.winner.decision, one.limits, one.floor
    return {
        "problem": asdict(decision.problem),
        "title": title(decision.problem),
        "gpu": one.winner.gpu.name,
        "toolchain": asdict(one.winner.toolchain),
        "decided_at": one.winner.decided_at,
        "winner": _config(decision.winner),
        "winner_us": decision.winner_us,
        "tied": [_config(config) for config in decision.tied],
        "margin": [decision.margin, decision.margin_low, decision.margin_high],
        "roofline": {**asdict(least), "percent": least.percent(decision.winner_us)},
        "limits": {**asdict(limits), "rest_us": limits.rest_us, "limiter": limits.limiter},
        "resources": asdict(one.resources),
        "default": timed(one.default),
        "families": [timed(each) for each in one.families],
        "runners_up": [timed(each) for each in one.runners_up],
        "neighbours": [
            {**asdict(each), "measured": timed(each.measured)} for each in one.neighbours
        ],
        "knobs": [asdict(cost) for cost in one.knobs],
        "failures": [asdict(failure) for failure in one.failures],
        "candidates": one.candidates,
    }


def _config(config: Any) -> dict[str, Any]:
    return {"family": config.family, "knobs": config.as_dict()}
