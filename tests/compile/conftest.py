"""An exported module whose launches go into a list, for tests of what CUDA is told."""

import ctypes
import importlib.util
import sys
from itertools import count

import pytest
import triton
from fake_calls import prefill
from fake_launches import FakeLaunches
from making import shipped_forwards

from autoflash.export import export
from autoflash.gpu import known
from autoflash.runtime.device import Device

H200 = known("NVIDIA_H200")
NUMBERS = count()


@pytest.fixture(scope="session")
def text():
    return export(shipped_forwards()).text


@pytest.fixture
def driver(monkeypatch):
    """The launches of this test, on the device that CPU tensors are on."""
    driver = FakeLaunches(H200)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr("torch.cuda.current_device", lambda: None)
    return driver


@pytest.fixture
def new_module(text, tmp_path, monkeypatch, driver):
    """A maker of modules that nobody called, which take the CPU for an H200."""

    def make():
        path = tmp_path / "attention_dispatch.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"bound_{next(NUMBERS)}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        h200 = module.Device(**{name: getattr(H200, name) for name in Device._fields})
        monkeypatch.setattr(module, "device_of", lambda tensor, interpreted_as: h200)
        launch = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(driver.cuda_launch)
        context = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p))(driver.context)
        monkeypatch.setattr(module, "cuda_launcher", lambda: launch)
        monkeypatch.setattr(module, "cuda_context", lambda: context)
        monkeypatch.setattr(module, "map_address", driver.map_address)
        return module

    return make


@pytest.fixture
def bound(driver, new_module, monkeypatch, request):
    """A module that was called: prefill(module) is recalled, or is a bound launch by its form."""
    module = new_module()
    if getattr(request, "param", None) == "by its form":
        monkeypatch.setattr(module, "recall_module", lambda: None)
    prefill(module)
    prefill(module)
    driver.launched.clear()
    return module
