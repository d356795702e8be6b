"""Trace: the calls that exported modules served, read back, to be tuned and to be told."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autoflash.errors import DeviceError, TraceError
from autoflash.gpu import DEFAULT_TARGET, Gpu, known
from autoflash.problem import Problem, ProblemError
from autoflash.roofline import floor
from autoflash.workload import MAX_PROBLEMS, Workload

HOW = ("exact", "bucket", "nearest", "default")  # from a config of its own to one of nobody's
IDENTITY = ("name", "arch", "num_sms", "memory_gib", "mig_profile")


@dataclass(frozen=True)
class Traced:
    """The calls that posed one problem on one GPU type; `how` they were served at last."""

    problem: Problem
    gpu: tuple[str | int, ...]  # a Gpu's identity
    calls: int
    how: str

    @property
    def floor_us(self) -> float:
        """The least time that the calls took, by the GPU's rates, or by the default target's."""
        try:
            gpu = known(str(self.gpu[0]))
        except DeviceError:
            gpu = known(DEFAULT_TARGET)
        return self.calls * floor(self.problem, gpu).floor_us


@dataclass(frozen=True)
class Share:
    """What part of the calls, and of their time by the roofline, was served in one way."""

    how: str
    problems: int
    calls: int
    calls_share: float
    time_share: float


def load_trace(path: Path) -> list[Traced]:
    """The problems of a trace, each once a GPU type. Raises TraceError: file, line, reason."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise TraceError(f"cannot read {path}: {reason}") from None
    found: dict[tuple[Problem, tuple[str | int, ...]], Traced] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            one = _traced(json.loads(line))
        except (ValueError, TypeError, KeyError, ProblemError) as error:
            reason = f"lacks {error}" if isinstance(error, KeyError) else error
            raise TraceError(f"{path.name}:{number}: {reason}") from None
        before = found.get((one.problem, one.gpu))
        calls = one.calls + (before.calls if before else 0)
        found[one.problem, one.gpu] = Traced(one.problem, one.gpu, calls, one.how)
    if not found:
        raise TraceError(f"{path.name}: no calls are recorded")
    return list(found.values())


def traced_workload(path: Path, traced: Sequence[Traced], gpu: Gpu | None = None) -> Workload:
    """The problems called, each weighing its calls, those first that take the most time.

    What has a config of its own comes last. With `gpu` only its calls count, unless it has none.
    """
    own = [one for one in traced if gpu is not None and one.gpu == gpu.identity]
    weights: dict[Problem, float] = {}
    ordered = sorted(own or traced, key=lambda one: (one.how == "exact", -one.floor_us))
    for one in ordered:
        weights[one.problem] = weights.get(one.problem, 0.0) + one.calls
    return Workload(path.stem, tuple(list(weights.items())[:MAX_PROBLEMS]))


def shares(traced: Sequence[Traced]) -> list[Share]:
    """By how they were served: parts of the calls, and of the time they take at least."""
    calls = sum(one.calls for one in traced)
    time_us = sum(one.floor_us for one in traced) or 1.0
    told = []
    for how in HOW:
        these = [one for one in traced if one.how == how]
        some = sum(one.calls for one in these)
        share_us = sum(one.floor_us for one in these) / time_us
        told.append(Share(how, len(these), some, some / calls, share_us))
    return told


def _traced(line: Any) -> Traced:
    """Raises ValueError, TypeError, KeyError or ProblemError where it is no line of a trace."""
    if not isinstance(line, Mapping):
        raise TypeError("it is not an object")
    given = line["problem"]
    unknown = sorted(set(given) - {field.name for field in fields(Problem)})
    if unknown:
        raise ValueError(f"problem has {', '.join(unknown)}, which this version does not know")
    for field in fields(Problem):
        value = given[field.name]
        if type(value).__name__ != field.type:
            raise ValueError(f"problem: {field.name} {value!r} is not {field.type}")
    calls, how = line["calls"], line["how"]
    if type(calls) is not int or calls < 1:
        raise ValueError(f"calls {calls!r} is not a positive number")
    if how not in HOW:
        raise ValueError(f"how {how!r} is none of {', '.join(HOW)}")
    return Traced(Problem(**given), tuple(line["gpu"][name] for name in IDENTITY), calls, how)
