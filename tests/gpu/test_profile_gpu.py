"""Profiling on a GPU: the call that ncu watches can be made, and ncu, where it may, sees it."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest

from autoflash.families import family_of
from autoflash.gpu import detect
from autoflash.problem import Problem
from autoflash.profile import NotProfiled, watched
from autoflash.records import Profile

pytestmark = pytest.mark.gpu

PROBLEM = Problem("decode", "bf16", 8, 32, 8, 128, 1, 8192, page_size=16)


def test_the_call_that_is_watched_can_be_made():
    config = family_of("decode").default(PROBLEM, detect())
    call = {"problem": asdict(PROBLEM), "family": config.family, "knobs": config.as_dict()}
    done = subprocess.run(
        [sys.executable, "-m", "autoflash.profile"],
        input=json.dumps(call),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not installed")
def test_ncu_sees_the_kernels_at_work():
    config = family_of("decode").default(PROBLEM, detect())
    compiled = [Profile("decode", 128, 0, 1024, 4, 128, 50.0)]
    try:
        (seen,) = watched(compiled, PROBLEM, config)
    except NotProfiled as reason:
        pytest.skip(str(reason))  # counters are for root alone on many machines
    assert seen.achieved_percent and 0 < seen.achieved_percent <= 100
    assert seen.dram_percent and 0 < seen.dram_percent <= 100
