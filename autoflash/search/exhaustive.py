"""Exhaustive search: every candidate, in the order of the space."""

from collections.abc import Generator, Mapping, Sequence

from autoflash.config import Config


def exhaustive(
    candidates: Sequence[Config], most: int, seed: int
) -> Generator[list[Config], Mapping[Config, float], None]:
    """All candidates in one batch, whatever `most` and `seed` are."""
    yield list(candidates)
