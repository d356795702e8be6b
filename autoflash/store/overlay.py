"""The user's winners laid over the shipped ones."""

from collections.abc import Iterable
from typing import Any

from autoflash.records import Winner
from autoflash.store.reading import winner_order


def overlay(*layers: Iterable[Winner]) -> list[Winner]:
    """For each GPU identity and problem, the rows of one layer and one source, in `winner_order`.

    A measured row hides every predicted one, whichever layer it is of; then the earlier layer
    hides the later. Rows of several toolchains stay side by side.
    """
    best: dict[Any, tuple[tuple[bool, int], list[Winner]]] = {}
    for depth, layer in enumerate(layers):
        for winner in layer:
            key = (winner.gpu.identity, winner.decision.problem)
            rank = (winner.decision.source != "measured", depth)
            held = best.get(key)
            if held is None or rank < held[0]:
                best[key] = (rank, [winner])
            elif rank == held[0]:
                held[1].append(winner)
    return sorted((winner for _, rows in best.values() for winner in rows), key=winner_order)
