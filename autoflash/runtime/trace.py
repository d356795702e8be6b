"""Trace: which problems were called and how often, as lines of a file that `autoflash` reads."""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

from .device import Device
from .tally import Tally

TRACE_VARIABLE = "AUTOFLASH_TRACE"  # the file that a process adds its calls to when it ends


def trace_text(tallies: Iterable[tuple[Device, Tally]]) -> str:
    """A line of JSON for each problem that was called: GPU, fields, calls, how it was served."""
    lines = []
    for device, tally in tallies:
        name, arch, num_sms, memory_gib, mig_profile = device.identity
        gpu = {"name": name, "arch": arch, "num_sms": num_sms, "memory_gib": memory_gib}
        line = {
            "gpu": {**gpu, "mig_profile": mig_profile},
            "problem": asdict(tally.problem),
            "calls": tally.calls,
            "how": tally.choice.how,
        }
        lines.append(json.dumps(line, sort_keys=True) + "\n")
    return "".join(lines)


def add_to_trace(path: str, text: str) -> None:
    """Add the lines in one write: processes that share the file do not mix theirs."""
    with Path(path).open("a", encoding="ascii") as file:
        file.write(text)


def trace_at_exit(write: Callable[[str], None]) -> None:
    """Have `write` called with the file's name when the process ends, if the variable names one."""
    path = os.environ.get(TRACE_VARIABLE)
    if path:
        atexit.register(write, str(Path(path).resolve()))
