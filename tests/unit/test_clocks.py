"""Clocks: locked where the driver allows it, given back on every way out."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from autoflash.clocks import clock_locked

FAKE = str(Path(__file__).with_name("fake_nvml"))


@pytest.fixture
def notes(tmp_path, monkeypatch):
    """The file of what was asked of a card that NVML's stand-in has."""
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("FAKE_NVML", str(tmp_path / "notes"))
    return tmp_path / "notes"


def test_a_clock_is_locked_inside_and_reset_after(notes):
    with clock_locked("card") as lock:
        assert (lock.mhz, lock.why) == (1500, "")
        assert notes.read_text() == "locked 1500 1500\n"
    assert notes.read_text().endswith("reset\n")


def test_a_card_without_an_application_clock_is_locked_at_its_highest(notes):
    with clock_locked("no application clock") as lock:
        assert lock.mhz == 1980


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_an_exception_gives_the_clock_back(notes, error):
    with pytest.raises(error), clock_locked("card"):
        raise error
    assert notes.read_text().endswith("reset\n")


def test_a_driver_that_refuses_says_why_and_nothing_is_reset(notes):
    with clock_locked("refusing") as lock:
        assert (lock.mhz, lock.why) == (0, "Insufficient Permissions")
    assert not notes.exists()


SCRIPT = """
import os, signal, time
from autoflash.clocks import clock_locked
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
with clock_locked("card") as lock:
    print(lock.mhz, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_killed_process_gives_the_clock_back(notes, number):
    path = os.pathsep.join(path for path in sys.path if path)
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "1500\n"
    os.killpg(process.pid, number)
    process.communicate(timeout=60)
    end = time.monotonic() + 10
    while not notes.read_text().endswith("reset\n") and time.monotonic() < end:
        time.sleep(0.02)
    assert notes.read_text() == "locked 1500 1500\nreset\n"
