"""A GPU's identity and limits, as torch's properties give them, here and in the exported module."""

from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

from autoflash.errors import DeviceError
from autoflash.gpu import Gpu, from_properties, known
from autoflash.runtime.device import Device, device_at


def properties(**changes) -> SimpleNamespace:
    h200 = {
        "name": "NVIDIA H200",
        "major": 9,
        "minor": 0,
        "gcnArchName": "NVIDIA H200",  # what torch for CUDA puts there
        "multi_processor_count": 132,
        "total_memory": 140 * 2**30 - 2**25,
        "L2_cache_size": 60 * 2**20,
        "shared_memory_per_block_optin": 227 * 1024,
        "shared_memory_per_multiprocessor": 228 * 1024,
        "regs_per_multiprocessor": 65536,
        "max_threads_per_multi_processor": 2048,
    }
    return SimpleNamespace(**{**h200, **changes})


def runtime_device(monkeypatch, found: SimpleNamespace) -> Device:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: found)
    device_at.cache_clear()
    try:
        return device_at(0)
    finally:
        device_at.cache_clear()


CASES = [
    (properties(), ("NVIDIA H200", "sm_90", 132, 140, ""), "nvidia", 90),
    (properties(major=10), ("NVIDIA H200", "sm_100", 132, 140, ""), "nvidia", 100),
    (
        properties(name="NVIDIA H200 MIG 1g.18gb", multi_processor_count=16),
        ("NVIDIA H200", "sm_90", 16, 140, "1g.18gb"),
        "nvidia",
        90,
    ),
    (
        properties(name="AMD Instinct MI300X", gcnArchName="gfx942:sramecc+:xnack-"),
        ("AMD Instinct MI300X", "gfx942", 132, 140, ""),
        "amd",
        0,
    ),
]


@pytest.mark.parametrize(("found", "identity", "vendor", "capability"), CASES)
def test_tuner_and_module_see_the_same_gpu(monkeypatch, found, identity, vendor, capability):
    gpu, device = from_properties(found), runtime_device(monkeypatch, found)
    assert gpu.identity == device.identity == identity
    assert (
        (gpu.vendor, gpu.capability) == (device.vendor, device.capability) == (vendor, capability)
    )
    assert {name: getattr(gpu, name) for name in Device._fields} == device._asdict()


def test_a_device_has_the_fields_of_a_gpu_by_the_same_names():
    assert set(Device._fields) <= {field.name for field in fields(Gpu)}


def test_a_detected_h200_is_the_known_one():
    assert from_properties(properties()) == known("NVIDIA_H200")


def test_peak_rates_are_not_taken_from_a_gpu_that_only_shares_the_name():
    assert from_properties(properties(major=8)).dram_gbps == 0


def test_an_unknown_gpu_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        DeviceError, match=r"no GPU called 'H300' is known; known are .*NVIDIA_H200"
    ):
        known("H300")
