"""Winners and trials as flat rows for people, with the columns of the database's views."""

from collections.abc import Iterator, Mapping
from typing import Any

from autoflash.records import Clocks, Decision, Resources, Trial, Winner
from autoflash.runtime.problem import PROBLEM_FIELDS
from autoflash.store.fields import plain_fields, to_plain
from autoflash.store.foreign import foreign_reason
from autoflash.store.knobs import config_object, timed_object, to_json
from autoflash.store.overlay import overlay
from autoflash.store.reading import DECISIONS_SQL, TRIALS_SQL, Row, rows
from autoflash.store.store import Store, shipped_winners
from autoflash.toolchain import Toolchain

GPU_COLUMNS = ("gpu", "arch", "num_sms", "memory_gib", "mig_profile")
WINNER_COLUMNS = (
    *GPU_COLUMNS,
    *plain_fields(Toolchain),
    *PROBLEM_FIELDS,
    *("family", "knobs_json", "default_family", "default_knobs_json"),
    *plain_fields(Decision),
    *("tied_json", "times_json"),
    *plain_fields(Winner),
    *("origin", "foreign"),
)
TRIAL_COLUMNS = (
    *("id", "run_id"),
    *GPU_COLUMNS,
    *plain_fields(Toolchain),
    *PROBLEM_FIELDS,
    *("family", "knobs_json"),
    *plain_fields(Trial),
    *plain_fields(Resources),
    *plain_fields(Clocks),
    *("recorded_at", "foreign"),
)


def winner_rows(store: Store | None, here: Mapping[str, Any]) -> Iterator[Row]:
    """The winners that count (`overlaid_winners`), with their origin and what makes them foreign.

    `origin` is `user` or `shipped`; `foreign` is empty for a row of the machine that `here` is.
    """
    shipped = shipped_winners()
    of_shipped = {id(winner) for winner in shipped}
    for winner in overlay(store.winners() if store else [], shipped):
        row = _flat(winner)
        row["origin"] = "shipped" if id(winner) in of_shipped else "user"
        row["foreign"] = foreign_reason(row, here)
        yield {column: row[column] for column in WINNER_COLUMNS}


def trial_rows(store: Store, here: Mapping[str, Any]) -> Iterator[Row]:
    """Every trial as it stands, in the order they were made, and what makes it foreign."""
    for row in rows(store.conn, TRIALS_SQL + "ORDER BY trials.id"):
        row["foreign"] = foreign_reason(row, here)
        yield {column: row[column] for column in TRIAL_COLUMNS}


def decision_rows(store: Store | None) -> Iterator[Row]:
    """Every decision, oldest first, the shipped ones before the user's; `run_id` None for those."""
    for winner in sorted(shipped_winners(), key=lambda each: each.decided_at):
        yield {**_flat(winner), "run_id": None}
    if store:
        yield from rows(store.conn, DECISIONS_SQL)


def _flat(winner: Winner) -> Row:
    decision = winner.decision
    row: Row = {
        **dict(zip(GPU_COLUMNS, winner.gpu.identity, strict=True)),
        **to_plain(winner.toolchain),
        **to_plain(decision.problem),
        "family": decision.winner.family,
        "knobs_json": to_json(decision.winner.as_dict()),
        "default_family": decision.default.family,
        "default_knobs_json": to_json(decision.default.as_dict()),
        **to_plain(decision),
        "tied_json": to_json([config_object(config) for config in decision.tied]),
        "times_json": to_json([timed_object(timed) for timed in decision.times]),
        **to_plain(winner),
    }
    # as sqlite has them
    return {name: int(value) if isinstance(value, bool) else value for name, value in row.items()}
