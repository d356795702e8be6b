"""Numerics in triton's interpreter: skipped unless the process was started with it on."""

import os

import pytest


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        return
    compiled = pytest.mark.skip(reason="set TRITON_INTERPRET=1 before starting pytest")
    for item in items:
        if "interpret" in item.path.parts:
            item.add_marker(compiled)
