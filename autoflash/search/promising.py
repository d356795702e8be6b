"""Promising: the first of the candidates, and a seeded sample of the others, at once."""

from collections.abc import Generator, Mapping, Sequence
from random import Random

from autoflash.config import Config

SCATTERED = 3  # one trial in so many is drawn from what does not look promising


def promising(
    candidates: Sequence[Config], most: int, seed: int, starts: int = 1
) -> Generator[list[Config], Mapping[Config, float], None]:
    """One batch of `most`: two thirds in the order of promise, a third from the rest.

    Nothing in it depends on what is measured, so all of it can be compiled ahead.
    """
    first = list(candidates[: most - most // SCATTERED])
    others = sorted(candidates[len(first) :])
    drawn = set(Random(seed).sample(others, min(len(others), most // SCATTERED)))
    yield first + [config for config in candidates[len(first) :] if config in drawn]
