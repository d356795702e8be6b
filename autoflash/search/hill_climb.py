"""Hill climb: from good starts to the neighbours of the best, one knob one step at a time."""

from collections.abc import Generator, Mapping, Sequence
from random import Random

from autoflash.config import Config

SCATTERED = 6  # first trials are one in so many of all, at least FEWEST_SCATTERED
FEWEST_SCATTERED = 4
CLIMBERS = 2  # the best configs whose neighbours are tried next, side by side


def hill_climb(
    candidates: Sequence[Config], most: int, seed: int, starts: int = 1
) -> Generator[list[Config], Mapping[Config, float], None]:
    """The starts and a few random candidates, then neighbours of the best, until `most` are tried.

    At a local optimum random candidates are tried again. What failed is sent back without a time
    and is not climbed from.
    """
    random = Random(seed)
    order = {config: place for place, config in enumerate(candidates)}
    known_good = list(candidates[: min(starts, most)])
    scattered = sorted(candidates[len(known_good) :])
    random.shuffle(scattered)
    batch = known_good + _next(scattered, set(), _few(most), most - len(known_good))
    tried, climbed = set[Config](), set[Config]()
    while batch:
        tried.update(batch)
        times = yield batch
        left = most - len(tried)
        batch = []
        best_first = sorted(times, key=lambda config: (times[config], order[config]))
        for config in best_first[:CLIMBERS]:
            if config not in climbed:
                climbed.add(config)
                batch += [c for c in neighbours(config, candidates) if c not in (*batch, *tried)]
        batch = sorted(batch, key=order.__getitem__)[:left]
        if not batch:
            batch = _next(scattered, tried, _few(most), left)


def neighbours(config: Config, candidates: Sequence[Config]) -> list[Config]:
    """The candidates that differ in one knob, by the smallest step that is a candidate.

    A number steps to the next one up or down, a word to any other word.
    """
    own = config.as_dict()
    found: dict[tuple[str, bool | str], tuple[float, Config]] = {}
    for other in candidates:
        theirs = other.as_dict()
        if other.family != config.family or theirs.keys() != own.keys():
            continue
        differing = [name for name in own if own[name] != theirs[name]]
        if len(differing) != 1:
            continue
        (name,) = differing
        here, there = own[name], theirs[name]
        if isinstance(here, str) or isinstance(there, str):
            found[name, str(there)] = (1.0, other)
            continue
        step = (name, there > here)
        if step not in found or abs(there - here) < found[step][0]:
            found[step] = (abs(there - here), other)
    return [other for _, other in found.values()]


def _few(most: int) -> int:
    return max(FEWEST_SCATTERED, most // SCATTERED)


def _next(scattered: Sequence[Config], tried: set[Config], few: int, left: int) -> list[Config]:
    untried = [config for config in scattered if config not in tried]
    return untried[: max(0, min(few, left))]
