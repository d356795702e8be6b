"""Rows that cannot be used are skipped, all of a reading with one warning."""

import warnings
from collections.abc import Callable, Iterable
from typing import TypeVar

Row = TypeVar("Row")
Record = TypeVar("Record")


class StoreWarning(UserWarning):
    """Something in a database or a winners file was left out; the text says what and why."""


def readable(rows: Iterable[Row], read: Callable[[Row], Record], where: str) -> list[Record]:
    """What `read` makes of each row; a row it refuses with ValueError is skipped."""
    records, refusals = [], []
    for row in rows:
        try:
            records.append(read(row))
        except ValueError as error:
            refusals.append(str(error))
    if refusals:
        count = f"{len(refusals)} row{'s' if len(refusals) > 1 else ''}"
        warnings.warn(f"{where}: {count} skipped: {refusals[0]}", StoreWarning, stacklevel=3)
    return records
