"""Clocks: a card's clock held at one rate while a search runs, given back however it ends."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from autoflash.telemetry import card_handle

GUARD = "import sys; from autoflash.clocks import guard; guard(sys.argv[1])"
START_DEADLINE_S = 30.0


@dataclass(frozen=True)
class ClockLock:
    """`mhz` is 0 where the driver refused, and `why` its reason."""

    mhz: int = 0
    why: str = ""


@contextmanager
def clock_locked(uuid: str) -> Iterator[ClockLock]:
    """The card's clock locked, if the driver allows it, until the end of the block.

    A process of its own holds the lock and gives it back once this one has closed the pipe to it,
    which also a killed process does.
    """
    guarding = subprocess.Popen(
        [sys.executable, "-c", GUARD, uuid],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process
    )
    assert guarding.stdin and guarding.stdout
    try:
        said = guarding.stdout.readline()
        yield ClockLock(**json.loads(said)) if said else ClockLock(why="its process ended at once")
    finally:
        guarding.stdin.close()
        guarding.wait(START_DEADLINE_S)
        guarding.stdout.close()


def guard(uuid: str) -> None:
    """The guarding process: lock, say so, wait for the parent's end of the pipe, unlock."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    nvml, handle = card_handle(uuid)
    if nvml is None:
        print(json.dumps({"why": "NVML is not installed or does not know the card"}), flush=True)
        return
    try:
        mhz = _steady_mhz(nvml, handle)
        nvml.nvmlDeviceSetGpuLockedClocks(handle, mhz, mhz)
    except nvml.NVMLError as error:
        print(json.dumps({"why": str(error)}), flush=True)
        return
    try:
        print(json.dumps({"mhz": mhz}), flush=True)
        sys.stdin.read()
    finally:
        nvml.nvmlDeviceResetGpuLockedClocks(handle)


def _steady_mhz(nvml: Any, handle: Any) -> int:
    """The rate the vendor runs applications at, else the highest."""
    graphics = nvml.NVML_CLOCK_GRAPHICS
    try:
        return nvml.nvmlDeviceGetDefaultApplicationsClock(handle, graphics)
    except nvml.NVMLError:
        return nvml.nvmlDeviceGetMaxClockInfo(handle, graphics)
