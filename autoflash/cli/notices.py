"""Notices: what a user should know beside the rows, on stderr in one line each."""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


def notice(text: str) -> None:
    print(f"notice: {text}", file=sys.stderr)


def counted(count: int, noun: str, several: str = "") -> str:
    """`1 row`, `2 rows`; `several` where an s does not make it."""
    return f"{count} {noun if count == 1 else several or f'{noun}s'}"


@contextmanager
def store_warnings_told() -> Iterator[None]:
    """What the store warns of inside is told as `warning:` lines."""
    from autoflash.store import StoreWarning

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", StoreWarning)
        try:
            yield
        finally:
            for each in caught:
                print(f"warning: {each.message}", file=sys.stderr)
