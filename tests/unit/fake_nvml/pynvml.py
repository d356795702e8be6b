"""A stand-in for NVML: what is asked of the card's clock goes to the file that $FAKE_NVML names."""

import os
from pathlib import Path

NVML_CLOCK_GRAPHICS = 0


class NVMLError(Exception):
    pass


def _note(text):
    with Path(os.environ["FAKE_NVML"]).open("a") as file:
        file.write(text + "\n")


def nvmlInit():
    pass


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid.decode()


def nvmlDeviceGetDefaultApplicationsClock(handle, clock):
    if "no application clock" in handle:
        raise NVMLError("Not Supported")
    return 1500


def nvmlDeviceGetMaxClockInfo(handle, clock):
    return 1980


def nvmlDeviceSetGpuLockedClocks(handle, low, high):
    if "refusing" in handle:
        raise NVMLError("Insufficient Permissions")
    _note(f"locked {low} {high}")


def nvmlDeviceResetGpuLockedClocks(handle):
    _note("reset")
