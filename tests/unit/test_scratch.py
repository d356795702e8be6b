"""The scratch cache: one search, one folder; emptied when it is done, kept when it was stopped."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from fake_device import FakeCompiler, FakeDevice
from test_tune import PROBLEM, workload

from autoflash.errors import AutoflashError
from autoflash.scratch import scratch_cache
from autoflash.tune import Machine, tune


@pytest.fixture(autouse=True)
def caches(tmp_path, monkeypatch):
    monkeypatch.setenv("AUTOFLASH_CACHE", str(tmp_path / "autoflash"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "users"))
    return tmp_path


def scratch(done=True):
    return scratch_cache(lambda: done)


def folder_of(environment):
    return Path(environment["TRITON_CACHE_DIR"])


def fill(folder):
    """A kernel and a launcher, as triton leaves them."""
    for entry, name in (("K1", "prefill_kernel.cubin"), ("L1", "__triton_launcher.so")):
        (folder / entry).mkdir()
        (folder / entry / name).touch()


def test_searches_at_one_time_have_folders_of_their_own_and_later_ones_the_first():
    with scratch() as one, scratch() as other:
        assert folder_of(one) != folder_of(other)
    with scratch() as again:
        assert folder_of(again) == folder_of(one)


def test_a_search_that_is_done_leaves_no_kernel_and_only_the_launchers():
    with scratch() as environment:
        fill(folder_of(environment))
    assert [path.name for path in folder_of(environment).iterdir()] == ["L1"]


def test_one_that_was_stopped_or_cut_short_leaves_all_to_the_next():
    with pytest.raises(KeyboardInterrupt), scratch() as environment:
        fill(folder_of(environment))
        raise KeyboardInterrupt
    with scratch(done=False) as environment:
        assert sorted(path.name for path in folder_of(environment).iterdir()) == ["K1", "L1"]
    with scratch() as environment:
        assert sorted(path.name for path in folder_of(environment).iterdir()) == ["K1", "L1"]
    assert [path.name for path in folder_of(environment).iterdir()] == ["L1"]


def test_a_killed_search_holds_its_folder_no_longer():
    script = (
        "from autoflash.scratch import scratch_cache\n"
        "with scratch_cache(lambda: True) as environment:\n"
        "    print(environment['TRITON_CACHE_DIR'], flush=True)\n"
        "    input()\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    holder = subprocess.Popen(
        [sys.executable, "-c", script],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    held = Path(holder.stdout.readline().strip())
    with scratch() as meanwhile:
        assert folder_of(meanwhile) != held
    holder.kill()
    holder.communicate()
    with scratch() as after:
        assert folder_of(after) == held


def test_where_no_folder_can_be_made_a_line_says_so(caches):
    (caches / "autoflash").mkdir()
    (caches / "autoflash" / "triton").touch()
    with pytest.raises(AutoflashError, match=r"triton: no cache of kernels.*set AUTOFLASH_CACHE"):
        scratch().__enter__()


class Caching:
    """Leaves a file where triton would."""

    def __init__(self, *of_fake):
        super().__init__(*of_fake)
        kernel = Path(os.environ["TRITON_CACHE_DIR"]) / type(self).__name__
        kernel.mkdir(exist_ok=True)
        Path(
            os.environ["NOTES"], f"{type(self).__name__} {kernel.parent}".replace("/", "_")
        ).touch()


class CachingDevice(Caching, FakeDevice):
    pass


class CachingCompiler(Caching, FakeCompiler):
    pass


def test_compilers_and_gpu_of_a_search_share_a_cache_of_which_nothing_is_left_unless_asked(
    caches, monkeypatch
):
    monkeypatch.setenv("NOTES", str(caches / "notes"))
    (caches / "notes").mkdir()
    machine = Machine(partial(CachingDevice), partial(CachingCompiler), compile_processes=1)
    tune(workload(PROBLEM), db=caches / "tune.db", effort="quick", machine=machine)
    used = caches / "autoflash" / "triton" / "0"
    noted = sorted(path.name for path in (caches / "notes").iterdir())
    mangled = str(used).replace("/", "_")
    assert noted == [f"CachingCompiler {mangled}", f"CachingDevice {mangled}"]
    assert list(used.iterdir()) == [] and not (caches / "users").exists()
    again = {"db": caches / "again.db", "effort": "quick", "machine": machine}
    tune(workload(PROBLEM), **again, keep_kernels=True)
    assert len(list(used.iterdir())) == 2
