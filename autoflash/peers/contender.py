"""Contender: what takes part in a comparison, ready to be called; and why another does not."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoflash.inputs import Inputs
from autoflash.turns import Call


class Unavailable(Exception):
    """A peer that is not installed or cannot do a case; says why."""


@dataclass(frozen=True)
class Contender:
    """One call for each set of inputs; `shape` makes of its result an `out` as our kernels give it.

    That is (batch, seqlen_q, num_heads, head_dim_v) in decode, the problem's layout in prefill. Of
    a backward it is Gradients in that layout.
    """

    calls: list[Call]
    shape: Callable[[Any], Any] = lambda out: out

    def out(self, number: int = 0) -> Any:
        return self.shape(self.calls[number]())


Maker = Callable[[list[Inputs]], Contender]


def told(error: BaseException) -> str:
    """The first line of an error, with its type unless it is a reason of ours."""
    lines = str(error).strip().splitlines() or [""]
    if isinstance(error, Unavailable):
        return lines[0]
    return f"{type(error).__name__}: {lines[0]}"[:200]
