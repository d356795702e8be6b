"""Winners as files: one JSON object a line, sorted, the same bytes for the same winners."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoflash.errors import StoreError
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import SOURCES, Decision, Winner
from autoflash.store.fields import from_plain, to_plain
from autoflash.store.knobs import (
    config_object,
    objects,
    read_config_object,
    read_timed_object,
    timed_object,
    to_json,
)
from autoflash.store.reading import one_of, winner_order
from autoflash.store.skipping import readable
from autoflash.toolchain import Toolchain
from autoflash.whole_file import write_whole

# What a line holds beside the numbers of its decision.
RECORDS = ("gpu", "toolchain", "problem", "winner", "default", "tied", "times")


def dump_winners(winners: Iterable[Winner], folder: Path) -> list[Path]:
    """Writes `<folder>/<GPU>.jsonl`, one a GPU name, and gives their paths.

    Rows already in such a file stay, unless a row of the same GPU identity, problem, toolchain and
    source replaces them. Raises StoreError for a folder that cannot be written.
    """
    by_slug: dict[str, list[Winner]] = {}
    for winner in winners:
        by_slug.setdefault(winner.gpu.slug, []).append(winner)
    paths = []
    for slug, own in sorted(by_slug.items()):
        path = folder / f"{slug}.jsonl"
        there = read_winners(path) if path.is_file() else []
        rows = {_key(winner): winner for winner in [*there, *own]}
        _write(path, "".join(lines(rows.values())))
        paths.append(path)
    return paths


def lines(winners: Iterable[Winner]) -> list[str]:
    """A line for each winner, in `winner_order`."""
    return [to_json(_to_object(winner)) + "\n" for winner in sorted(winners, key=winner_order)]


def read_winners(path: Path) -> list[Winner]:
    """The winners of a file; rows this version cannot use are skipped with one warning.

    Raises StoreError for a file that cannot be read, and for a line that is not JSON.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append((number, json.loads(line)))
            except ValueError as error:
                raise StoreError(f"{path}: line {number}: not JSON: {error}") from None
    return readable(found, _read_line, str(path))


def _key(winner: Winner) -> tuple[Any, ...]:
    decision = winner.decision
    return (winner.gpu.identity, decision.problem, winner.toolchain, decision.source)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise StoreError(f"{path}: cannot be written: {error.strerror}") from None


def _to_object(winner: Winner) -> dict[str, Any]:
    decision = winner.decision
    return {
        "gpu": to_plain(winner.gpu),
        "toolchain": to_plain(winner.toolchain),
        "problem": to_plain(decision.problem),
        "winner": config_object(decision.winner),
        "default": config_object(decision.default),
        "tied": [config_object(config) for config in decision.tied],
        "times": [timed_object(timed) for timed in decision.times],
        **to_plain(decision),
        **to_plain(winner),
    }


def _read_line(numbered: tuple[int, Any]) -> Winner:
    number, value = numbered
    try:
        return _from_object(value)
    except ValueError as error:
        raise ValueError(f"line {number}: {error}") from None


def _from_object(value: Any) -> Winner:
    if not isinstance(value, dict):
        raise ValueError(f"{value!r} is not an object")
    for name in RECORDS:
        if name not in value:
            raise ValueError(f"{name} is missing")
    for name in ("gpu", "toolchain", "problem"):
        if not isinstance(value[name], dict):
            raise ValueError(f"{name} is {value[name]!r}, not an object")
    plain = {name: part for name, part in value.items() if name not in RECORDS}
    outer = {name: plain.pop(name) for name in ("weight", "decided_at") if name in plain}
    decision = from_plain(
        Decision,
        plain,
        problem=from_plain(Problem, value["problem"]),
        winner=read_config_object(value["winner"]),
        default=read_config_object(value["default"]),
        tied=tuple(read_config_object(config) for config in objects(value["tied"])),
        times=tuple(read_timed_object(timed) for timed in objects(value["times"])),
    )
    one_of("source", decision.source, SOURCES)
    return from_plain(
        Winner,
        outer,
        gpu=from_plain(Gpu, value["gpu"]),
        toolchain=from_plain(Toolchain, value["toolchain"]),
        decision=decision,
    )
