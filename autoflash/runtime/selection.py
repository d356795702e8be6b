"""Selection: which config serves a problem on a device, and how it was found."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import inf
from types import ModuleType
from typing import Any, NamedTuple

import triton

from .backward_hopper_validity import (
    backward_hopper_default,
    backward_hopper_refusal,
    backward_hopper_single_default,
    backward_hopper_single_refusal,
    backward_hopper_single_unsupported,
    backward_hopper_unsupported,
)
from .backward_validity import (
    backward_default,
    backward_refusal,
    backward_single_default,
    backward_single_refusal,
    backward_single_unsupported,
    backward_unsupported,
)
from .bundle import bundle_kernels_of
from .defaults import decode_default, decode_last_default, prefill_default
from .device import Device
from .hopper_validity import (
    prefill_hopper_default,
    prefill_hopper_refusal,
    prefill_hopper_unsupported,
)
from .latent_validity import (
    decode_latent_default,
    decode_latent_refusal,
    decode_latent_unsupported,
)
from .launch import interpreted
from .load import KernelFiles, load_text
from .match import (
    MatchSizes,
    match_bucket,
    match_distance,
    match_key,
    match_serves,
    match_sizes,
)
from .problem import Problem, ProblemError
from .validity import decode_refusal, decode_unsupported, prefill_refusal, prefill_unsupported

SELECTION_REFUSALS = {
    "prefill": prefill_refusal,
    "prefill_hopper": prefill_hopper_refusal,
    "decode": decode_refusal,
    "decode_last": decode_refusal,
    "decode_latent": decode_latent_refusal,
    "backward": backward_refusal,
    "backward_single": backward_single_refusal,
    "backward_hopper": backward_hopper_refusal,
    "backward_hopper_single": backward_hopper_single_refusal,
}
SELECTION_UNSUPPORTED = {
    "prefill": prefill_unsupported,
    "prefill_hopper": prefill_hopper_unsupported,
    "decode": decode_unsupported,
    "decode_last": decode_unsupported,
    "decode_latent": decode_latent_unsupported,
    "backward": backward_unsupported,
    "backward_single": backward_single_unsupported,
    "backward_hopper": backward_hopper_unsupported,
    "backward_hopper_single": backward_hopper_single_unsupported,
}
SELECTION_DEFAULTS = {
    "prefill": prefill_default,
    "prefill_hopper": prefill_hopper_default,
    "decode": decode_default,
    "decode_last": decode_last_default,
    "decode_latent": decode_latent_default,
    "backward": backward_default,
    "backward_single": backward_single_default,
    "backward_hopper": backward_hopper_default,
    "backward_hopper_single": backward_hopper_single_default,
}
# Gluon has no interpreter
SELECTION_COMPILED_ONLY = ("prefill_hopper", "backward_hopper", "backward_hopper_single")
# By op, whose default serves what no row does, the fastest first, the portable one at last.
SELECTION_FAMILIES = {
    "prefill": ("prefill_hopper", "prefill"),
    "decode": ("decode",),
    "latent decode": ("decode_latent",),
    "backward": ("backward_hopper_single", "backward_hopper", "backward"),
}


INVARIANT_SEQLEN = 4096  # tokens, for which a config is chosen that must not depend on lengths
INVARIANT_SMS = 1  # one program a head, which reads a sequence from its first key to its last


class Row(NamedTuple):
    """One tuned problem: what must match, its sizes, and the config that serves it."""

    key: tuple[Any, ...]
    sizes: MatchSizes
    family: str
    knobs: dict[str, Any]
    regret: float  # what the served config loses against the problem's own winner
    num_kv_heads: int = 1  # of the tuned problem, in whose sizes they are multiplied by its batch


class GpuTable(NamedTuple):
    """The rows measured (or predicted) on one GPU type, with the versions they were made with.

    `reach` is how many doublings away, by op, the default serves better than the nearest row.
    """

    device: Device
    triton: str
    rows: tuple[Row, ...]
    reach: Mapping[str, float] = {}


class Tables(NamedTuple):
    """All an exported module knows: kernel texts by name, names by switches, rows by GPU."""

    texts: Mapping[str, str] | KernelFiles
    names: Mapping[tuple[str, ...], str]  # (family, its switches that are on)
    gpus: tuple[GpuTable, ...]


class Choice(NamedTuple):
    """What serves a problem. `how` is exact, bucket, nearest or default."""

    module: ModuleType
    knobs: dict[str, Any]
    how: str
    family: str
    distance: float  # doublings of size between the problem and the tuned one
    regret: float
    tuned: MatchSizes | None


class Selector:
    """Chooses from tables. One per exported module."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self._noticed: set[str] = set()

    def choose(self, problem: Problem, device: Device) -> Choice:
        """The config for a problem: exact, else same bucket, else nearest, else the default.

        A row is used only where its config is valid for the problem, and so near that the default
        is not better. Raises ProblemError for a
        problem that nothing serves.
        """
        table = self._table(device)
        # what was tuned for others serves where bits must repeat, if those of its family do
        keys = [match_key(problem), match_key(replace(problem, deterministic=False))]
        sizes = match_sizes(problem)
        found: list[tuple[float, Row]] = []
        reach = table.reach.get(problem.op, inf) if table else 0.0
        for row in table.rows if table else ():
            distance = match_distance(sizes, row.sizes) if row.key in keys else None
            if distance is None or distance >= reach or not _runs_here(row.family):
                continue
            if not match_serves(problem, row.sizes, row.knobs):
                continue
            if SELECTION_REFUSALS[row.family](problem, row.knobs, device):
                continue
            found.append((distance, row))
        if not found:
            family = self._default_family(problem, device)
            knobs = SELECTION_DEFAULTS[family](problem, device)
            return self._choice(problem, family, knobs, "default", 0.0, 0.0, None)
        distance, row = min(found, key=lambda pair: (pair[0], keys.index(pair[1].key)))
        how = "nearest"
        if row.sizes == sizes:
            how = "exact"
        elif match_bucket(row.sizes) == match_bucket(sizes):
            how = "bucket"
        return self._choice(problem, row.family, row.knobs, how, distance, row.regret, row.sizes)

    def choose_invariant(self, problem: Problem, device: Device) -> Choice:
        """The same config whatever the batch: what one sequence alone would get.

        Where lengths differ, in decode and of sequences that are packed or in pages, it does not
        depend on these either.
        Decode's is the default; without splits, as `INVARIANT_SMS` has it, bits do not depend on
        them. Raises ProblemError for a problem that nothing serves.
        """
        alone = replace(problem, batch=1)
        if problem.op == "decode":
            alone = replace(alone, seqlen_k=INVARIANT_SEQLEN, lengths="ragged")
            reason = decode_unsupported(alone, device)
            if reason:
                raise ProblemError(f"decode: {reason}")
            knobs = {**decode_default(alone, device), "PROGRAMS_PER_SM": 1}
            return self._choice(problem, "decode", knobs, "default", 0.0, 0.0, None)
        if problem.varlen or problem.paged:
            sizes = {"seqlen_q": INVARIANT_SEQLEN, "seqlen_k": INVARIANT_SEQLEN}
            alone = replace(alone, **sizes, lengths="ragged")
        return self.choose(alone, device)

    def _default_family(self, problem: Problem, device: Device) -> str:
        """The first family that serves the problem on the device and whose text is here."""
        reason = None
        for family in SELECTION_FAMILIES["latent decode" if problem.latent else problem.op]:
            if not _runs_here(family):
                continue
            reason = SELECTION_UNSUPPORTED[family](problem, device)
            if reason is None and (family, *problem.switches) in self.tables.names:
                return family
        reason = reason or f"no kernels for {' with '.join(problem.switches)}: none were tuned"
        raise ProblemError(f"{problem.op}: {reason}")

    def _choice(
        self,
        problem: Problem,
        family: str,
        knobs: dict[str, Any],
        how: str,
        distance: float,
        regret: float,
        tuned: MatchSizes | None,
    ) -> Choice:
        module = self.module(family, problem.switches)
        return Choice(module, dict(knobs), how, family, distance, regret, tuned)

    def module(self, family: str, switches: tuple[str, ...]) -> ModuleType:
        """The kernels of a family with these switches on, loaded."""
        name = self.tables.names[family, *switches]
        texts = self.tables.texts
        file = texts.path(name) if isinstance(texts, KernelFiles) else f"{name}.py"
        return _selection_module(file, texts[name])

    def require_rows(self, device: Device) -> None:
        """Raise LookupError on a GPU without rows."""
        if all(table.device.identity != device.identity for table in self.tables.gpus):
            raise LookupError(
                f"no measurements for {device.identity}; the module knows {self._known()}"
            )

    def _known(self) -> str:
        return ", ".join(table.device.name for table in self.tables.gpus)

    def _table(self, device: Device) -> GpuTable | None:
        own = [table for table in self.tables.gpus if table.device.identity == device.identity]
        same_triton = [table for table in own if table.triton == triton.__version__]
        if own and not same_triton:
            self._notice(
                f"measured with triton {own[0].triton}, this is {triton.__version__}:"
                " the choices are unverified"
            )
        if own:
            return (same_triton or own)[0]
        self._notice(
            f"no measurements for {device.identity}, defaults serve; known: {self._known()}"
        )
        return None

    def _notice(self, text: str) -> None:
        """Warn once a process about each thing."""
        if text not in self._noticed:
            self._noticed.add(text)
            warnings.warn(f"autoflash: {text}", stacklevel=6)  # the caller of prefill or decode


@cache
def _selection_module(file: str, text: str) -> ModuleType:
    module = load_text(file, text)
    bundle_kernels_of(module)
    return module


def _runs_here(family: str) -> bool:
    """Whether this process can run the family's kernels."""
    return family not in SELECTION_COMPILED_ONLY or not interpreted()
