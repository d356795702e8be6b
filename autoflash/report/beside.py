"""Beside: what peers took on the same problems, from the results of benchmarks."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from autoflash.errors import AutoflashError
from autoflash.problem import Problem, ProblemError


@dataclass(frozen=True)
class Beside:
    """One case of a benchmark: times of one interleaved run, in microseconds a call."""

    problem: Problem
    gpu: str
    ours_us: float
    peers_us: Mapping[str, float]
    source: str  # the file's name, and the day

    @property
    def best_peer(self) -> str:
        return min(self.peers_us, key=self.peers_us.__getitem__)

    @property
    def ratio(self) -> float:
        """The best peer's time over ours: above 1, ours is faster."""
        return self.peers_us[self.best_peer] / self.ours_us


def read_results(path: Path) -> tuple[list[Beside], int]:
    """The cases of a results file that have a peer, and how many do not say their problem in full.

    Raises AutoflashError for a file that is no results file.
    """
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        cases, gpu = told["cases"], str(told["device"]["name"])
        source = f"{path.name}, {told.get('date', 'no date')}"
        found = [_beside(case, gpu, source) for case in cases if case.get("peers")]
    except OSError as error:
        raise AutoflashError(f"{path}: cannot be read: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError):
        raise AutoflashError(f"{path}: no results of a benchmark: is not JSON") from None
    except KeyError as error:
        raise AutoflashError(
            f"{path}: no results of a benchmark: lacks `{error.args[0]}`"
        ) from None
    except (ValueError, TypeError, AttributeError):
        raise AutoflashError(f"{path}: no results of a benchmark: its cases are none") from None
    return [one for one in found if one], found.count(None)


def _beside(case: Mapping[str, Any], gpu: str, source: str) -> Beside | None:
    problem = _problem(case["case"])
    if problem is None or case["unit"] != "us":
        return None
    peers = {str(name): float(us) for name, us in case["peers"].items()}
    return Beside(problem, gpu, float(case["ours"]), peers, source)


def _problem(case: Mapping[str, Any]) -> Problem | None:
    """The problem of a case, None where its fields do not say it.

    Benchmarks of prefill say `causal`, those of decode do not; both are in bf16 unless they say.
    """
    known = {field.name for field in fields(Problem)}
    told = {name: value for name, value in case.items() if name in known}
    told.setdefault("op", "prefill" if "causal" in case else "decode")
    told.setdefault("dtype", "bf16")
    if "seqlen" in case:
        told |= {"seqlen_q": case["seqlen"], "seqlen_k": case["seqlen"]}
    if told["op"] == "decode":
        told.setdefault("seqlen_q", 1)
    try:
        return Problem(**told)
    except (TypeError, ProblemError):
        return None
