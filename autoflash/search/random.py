"""Random search: a seeded sample of the candidates, the default always among them."""

from collections.abc import Generator, Mapping, Sequence
from random import Random

from autoflash.config import Config


def random(
    candidates: Sequence[Config], most: int, seed: int
) -> Generator[list[Config], Mapping[Config, float], None]:
    """The first candidate (the default) and `most` - 1 others drawn without repeats."""
    first, *others = candidates
    drawn = Random(seed).sample(others, min(len(others), most - 1))
    yield [first, *drawn]
