"""What the benchmarks share: processes that compile ahead of the timing."""

import importlib
import os
from functools import partial
from pathlib import Path

import pytest


@pytest.fixture
def harness(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("harness")


def test_a_job_that_raises_or_kills_its_process_takes_no_other_along(harness, tmp_path, capfd):
    made = [tmp_path / f"made-{number}" for number in range(4)]
    jobs = {path.name: partial(os.mkdir, path) for path in made}
    first, *rest = jobs.items()
    dies = {"dies": partial(os._exit, 3), "raises": partial(int, "no number")}
    harness.run_ahead(dict([first]) | dies | dict(rest), 2)
    assert all(path.is_dir() for path in made)
    told = capfd.readouterr().err
    assert "not run ahead: dies: BrokenProcessPool" in told
    assert "not run ahead: raises: ValueError" in told and told.count("not run ahead") == 2


def test_without_processes_nothing_is_run(harness, tmp_path):
    harness.run_ahead({"made": partial(os.mkdir, tmp_path / "made")}, 0)
    assert not (tmp_path / "made").exists()
