"""Random search: a seeded sample of the candidates, the default always among them."""

from collections.abc import Generator, Mapping, Sequence
from random import Random

from autoflash.config import Config


def random(
    candidates: Sequence[Config], most: int, seed: int, starts: int = 1
) -> Generator[list[Config], Mapping[Config, float], None]:
    """The first candidate (the default) and `most` - 1 others, the same in whatever order given."""
    first, *others = candidates
    drawn = set(Random(seed).sample(sorted(others), min(len(others), most - 1)))
    yield [first, *(config for config in others if config in drawn)]
