"""Compilers for pools that compile nothing, importable without torch."""

import time
from pathlib import Path

from autoflash.records import Resources


class IdleCompiler:
    def compile(self, *asked: object) -> Resources:
        return Resources(registers=1)


class StuckCompiler:
    def compile(self, *asked: object) -> Resources:
        time.sleep(1000)
        raise AssertionError("nobody kills it")


class NotingCompiler:
    """Begins once the file `go` is there, and writes to `notes` which config it was."""

    def __init__(self, go: Path, notes: Path) -> None:
        self._go, self._notes = go, notes

    def compile(self, problems: object, config: object, *_: object) -> Resources:
        while not self._go.exists():
            time.sleep(0.01)
        with self._notes.open("a") as notes:
            notes.write(f"{config}\n")
        return Resources(registers=1)


def broken_compiler() -> None:
    raise ValueError("no compiler here")
