"""Exhaustive search: every candidate, in the order given."""

from collections.abc import Generator, Mapping, Sequence

from autoflash.config import Config


def exhaustive(
    candidates: Sequence[Config], most: int, seed: int, starts: int = 1
) -> Generator[list[Config], Mapping[Config, float], None]:
    """All candidates in one batch, whatever `most`, `seed` and `starts` are."""
    yield list(candidates)
