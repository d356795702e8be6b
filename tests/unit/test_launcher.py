"""Launchers are built ahead where there is a driver to link them with."""

from types import SimpleNamespace

import pytest
from triton.backends.nvidia import driver

from autoflash import launcher


def kernel(backend="cuda"):
    target = SimpleNamespace(backend=backend)
    return SimpleNamespace(src="source", metadata=SimpleNamespace(target=target))


@pytest.fixture
def built(monkeypatch):
    launcher._driver_is_installed.cache_clear()
    monkeypatch.setattr(driver, "libcuda_dirs", lambda: ["/usr/lib"])
    made = []
    monkeypatch.setattr(driver, "CudaLauncher", lambda src, metadata: made.append(src))
    yield made
    launcher._driver_is_installed.cache_clear()


def test_a_kernel_of_a_gpu_with_a_driver_has_its_launcher_built(built):
    launcher.build_launcher(kernel())
    assert built == ["source"]


def test_other_vendors_kernels_and_machines_without_a_driver_build_none(built, monkeypatch):
    launcher.build_launcher(kernel("hip"))

    def missing():
        raise AssertionError("libcuda.so cannot found!")

    monkeypatch.setattr(driver, "libcuda_dirs", missing)
    launcher._driver_is_installed.cache_clear()
    launcher.build_launcher(kernel())
    assert built == []


def test_a_launcher_that_cannot_be_built_fails_no_candidate(built, monkeypatch):
    def broken(src, metadata):
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(driver, "CudaLauncher", broken)
    launcher.build_launcher(kernel())
