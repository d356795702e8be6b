"""Telemetry: what NVML says of a card while it works: clocks, power, temperature, brakes."""

from typing import Any

from autoflash.records import Clocks

# NVML's nvmlClocksEventReasons: hardware slowdown, software thermal, hardware thermal, hardware
# power brake. The software power cap (4) is normal under load and is only recorded.
BRAKES = 0x08 | 0x20 | 0x40 | 0x80


class Telemetry:
    """Reads one card; says None for everything where NVML is not installed or refuses."""

    def __init__(self, uuid: str) -> None:
        self._nvml, self._handle = card_handle(uuid)

    def braked(self) -> bool:
        """Whether the card is slowed by heat or by its power supply just now."""
        reasons = self._read("nvmlDeviceGetCurrentClocksThrottleReasons")
        return bool((reasons or 0) & BRAKES)

    def clocks(self) -> Clocks:
        """All readings, now."""
        if self._nvml is None:
            return Clocks()
        milliwatts = self._read("nvmlDeviceGetPowerUsage")
        return Clocks(
            sm_clock_mhz=self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM),
            memory_clock_mhz=self._read("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_MEM),
            power_w=None if milliwatts is None else milliwatts / 1000,
            temperature_c=self._read("nvmlDeviceGetTemperature", self._nvml.NVML_TEMPERATURE_GPU),
            throttle_reasons=self._read("nvmlDeviceGetCurrentClocksThrottleReasons"),
        )

    def _read(self, query: str, *arguments: int) -> int | None:
        if self._nvml is None:
            return None
        try:
            return getattr(self._nvml, query)(self._handle, *arguments)
        except self._nvml.NVMLError:  # not every card answers every question
            return None


def card_handle(uuid: str) -> tuple[Any, Any]:
    """The NVML module and the card's handle, None without them."""
    try:
        import pynvml
    except ImportError:
        return None, None
    try:
        pynvml.nvmlInit()
        return pynvml, pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except pynvml.NVMLError:
        return None, None
