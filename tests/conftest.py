"""Shared by all tests: GPU tests are skipped without a GPU, caches go to a folder of the run."""

import os
from pathlib import Path

import pytest

# A process either interprets kernels or compiles them, so the folders run apart: see the Makefile.
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    import torch

    without_gpu = pytest.mark.skip(reason="needs a GPU")
    for item in items:
        if item.get_closest_marker("gpu") and (INTERPRETING or not torch.cuda.is_available()):
            item.add_marker(without_gpu)


@pytest.fixture(scope="session", autouse=True)
def own_caches(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rendered texts and compiled kernels of the tests never touch the user's caches."""
    folder: Path = tmp_path_factory.getbasetemp()
    os.environ["AUTOFLASH_CACHE"] = str(folder / "autoflash")
    os.environ["TRITON_CACHE_DIR"] = str(folder / "triton")
    os.environ["AUTOFLASH_DB"] = str(folder / "autoflash.db")
