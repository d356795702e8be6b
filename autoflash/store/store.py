"""Store: an open database; the records go in and come out."""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Self

from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.records import Decision, ExportedProblem, Profile, Trial, Winner
from autoflash.store import reading, writing
from autoflash.store.opening import open_for_reading, open_for_writing, told, transaction
from autoflash.store.overlay import overlay
from autoflash.store.paths import default_path, tunedb_dir
from autoflash.store.winners import read_winners
from autoflash.toolchain import Toolchain


class Store:
    """A context manager. Every method that writes has committed when it returns.

    Raises StoreError when the file refuses, ValueError for a value that is not of its field's type.
    """

    def __init__(self, path: Path, conn: sqlite3.Connection) -> None:
        self.path = path
        self.conn = conn

    @classmethod
    def open(cls, path: Path | None = None, readonly: bool = False) -> Self:
        """The database at `path`, by default the user's own; made if need be, unless `readonly`."""
        path = default_path() if path is None else Path(path)
        return cls(path, open_for_reading(path) if readonly else open_for_writing(path))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        self.conn.close()

    def start_run(
        self,
        gpu: Gpu,
        toolchain: Toolchain,
        *,
        seed: int,
        effort: str,
        budget_s: float | None,
        argv: list[str],
        protocol: str,
        locked_clock_mhz: int = 0,
    ) -> int:
        """The id of a new run, which has no outcome until `end_run`.

        `locked_clock_mhz` is 0 where the clocks were left alone.
        """
        with self._writing():
            return writing.add_run(
                self.conn,
                gpu,
                toolchain,
                seed=seed,
                effort=effort,
                budget_s=budget_s,
                argv=argv,
                protocol=protocol,
                locked_clock_mhz=locked_clock_mhz,
            )

    def end_run(self, run_id: int, outcome: str) -> None:
        """Also where Ctrl-C broke off a write, which it can between any two instructions."""
        if self.conn.in_transaction:
            self.conn.rollback()
        with self._writing():
            writing.finish_run(self.conn, run_id, outcome)

    def add_problem(self, run_id: int, problem: Problem, weight: float) -> None:
        with self._writing():
            writing.add_run_problem(self.conn, run_id, problem, weight)

    def add_kernel(self, family: str, variant_name: str, digest: str, text: str) -> None:
        with self._writing():
            writing.add_kernel_text(self.conn, family, variant_name, digest, text)

    def record_trial(self, run_id: int, trial: Trial) -> int:
        """The id of the trial's row."""
        with self._writing():
            return writing.add_trial(self.conn, run_id, trial)

    def record_decision(self, run_id: int, decision: Decision) -> int:
        """The id of the decision's row. Earlier decisions on the problem stay."""
        with self._writing():
            return writing.add_decision(self.conn, run_id, decision)

    def record_export(
        self, module_sha256: str, most_configs: int, exported: Sequence[ExportedProblem]
    ) -> int:
        """The id of the export's row; its problems are stored with it."""
        with self._writing():
            return writing.add_export(self.conn, module_sha256, most_configs, exported)

    def record_profiles(
        self, winner: Winner, toolchain: Toolchain, profiles: Sequence[Profile]
    ) -> None:
        """What the kernels of a winner take, compiled with a toolchain."""
        with self._writing():
            writing.add_profiles(self.conn, winner, toolchain, profiles)

    def trials(
        self,
        gpu: Gpu,
        toolchain: Toolchain,
        problem: Problem | None = None,
        kernel_digest: str | None = None,
    ) -> list[Trial]:
        """The trials of this GPU identity and this very toolchain, oldest first."""
        with told(self.path):
            return reading.trials_of(
                self.conn, str(self.path), gpu, toolchain, problem, kernel_digest
            )

    def winners(self, gpu: Gpu | None = None, problem: Problem | None = None) -> list[Winner]:
        """The latest decision per GPU identity, problem, toolchain and source.

        Those of one GPU and problem follow each other, measured before predicted.
        """
        with told(self.path):
            return reading.winners_of(self.conn, str(self.path), gpu, problem)

    def anytime(self, run_id: int) -> dict[Problem, list[tuple[float, float]]]:
        """For each problem of a run, the seconds since its start and the best time from then on."""
        with told(self.path):
            return reading.anytime_of(self.conn, run_id)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        with told(self.path), transaction(self.conn):
            yield


def load_winners(store: Store, file: Path) -> int:
    """How many winners of `file` were new to the store and are in it now.

    Raises StoreError for a file that cannot be read.
    """
    winners = read_winners(Path(file))
    with told(store.path), transaction(store.conn):
        known = set(reading.winners_of(store.conn, str(store.path), None, None))
        new = [winner for winner in winners if winner not in known]
        writing.add_winners(store.conn, new, str(file))
    return len(new)


def shipped_winners() -> list[Winner]:
    """What was measured and is shipped with autoflash, in `winner_order`."""
    files = sorted((tunedb_dir() / "winners").glob("*.jsonl"))
    return sorted((w for file in files for w in read_winners(file)), key=reading.winner_order)


@contextmanager
def shipped_store() -> Iterator[Store]:
    """The shipped winners as a database, which is gone afterwards."""
    with (
        TemporaryDirectory(prefix="autoflash-") as folder,
        Store.open(Path(folder) / "shipped.db") as store,
    ):
        for file in sorted((tunedb_dir() / "winners").glob("*.jsonl")):
            load_winners(store, file)
        yield store


def overlaid_winners(store: Store | None) -> list[Winner]:
    """The winners that count: for each GPU identity and problem the user's, else the shipped.

    A measured row is never hidden by a predicted one.
    """
    return overlay(store.winners() if store else [], shipped_winners())
