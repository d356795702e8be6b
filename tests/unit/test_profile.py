"""Profiling a winner: what ncu prints is read, what it lacks is said, and all is stored."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from making import CHAIN, H200, candidates, decode_of, prefill_of, winner_of
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.errors import StoreError
from autoflash.profile import NotProfiled, watched
from autoflash.records import Profile, Resources, Trial
from autoflash.store import Store
from autoflash.store.merging import merge

PROBLEM = decode_of(batch=8, seqlen_k=2048)
CONFIG = candidates(PROBLEM)[0]
KERNEL = Profile("decode", 142, 0, 104448, 4, 128, 12.5)
COMBINE = Profile("combine", 56, 24, 1024, 2, 32, 56.25)

REPORT = """\
==PROF== Connected to process 7
"ID","Process ID","Kernel Name","dram__throughput.avg.pct_of_peak_sustained_elapsed",\
"sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",\
"sm__warps_active.avg.pct_of_peak_sustained_active"
"","","","%","%","%"
"0","7","decode","11.5","1.5","99"
"1","7","combine","3","n/a","21.5"
"2","7","decode","81.25","2.5","11.75"
==PROF== Disconnected from process 7
"""


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """Puts a program called ncu on the path, and gives its folder, where it keeps its input."""

    def install(prints: str, status: int = 0) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "report").write_text(prints)
        tool = folder / "ncu"
        tool.write_text(
            f'#!/bin/sh\necho "$@" > {folder}/arguments\ncat > {folder}/call\n'
            f"cat {folder}/report\nexit {status}\n"
        )
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return folder

    return install


def test_the_last_launch_of_each_kernel_is_what_ncu_says(ncu):
    folder = ncu(REPORT)
    decode, combine = watched([KERNEL, COMBINE], PROBLEM, CONFIG)
    assert (decode.achieved_percent, decode.dram_percent, decode.tensor_percent) == (
        11.75,
        81.25,
        2.5,
    )
    assert (combine.achieved_percent, combine.tensor_percent) == (21.5, None)
    assert replace(decode, achieved_percent=None, dram_percent=None, tensor_percent=None) == KERNEL
    assert "regex:^(decode|combine)$" in (folder / "arguments").read_text()
    call = json.loads((folder / "call").read_text())
    assert call["knobs"] == CONFIG.as_dict() and call["problem"]["seqlen_k"] == 2048


NOTHING = {
    "not allowed": (
        "==PROF== Connected\n==ERROR== ERR_NVGPUCTRPERM - no permission\n",
        "ncu: ==ERROR== ERR_NVGPUCTRPERM - no permission",
    ),
    "no kernels": ("==WARNING== No kernels were profiled.\n", "No kernels were profiled."),
    "nothing": ("", "ncu: it printed nothing"),
}


@pytest.mark.parametrize(("prints", "reason"), NOTHING.values(), ids=NOTHING)
def test_why_ncu_saw_nothing_is_told(ncu, prints, reason):
    ncu(prints, status=1)
    with pytest.raises(NotProfiled) as told:
        watched([KERNEL], PROBLEM, CONFIG)
    assert str(told.value).endswith(reason)


def test_without_ncu_that_is_the_reason(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NotProfiled, match="ncu is not installed"):
        watched([KERNEL], PROBLEM, CONFIG)


@pytest.fixture
def db(tmp_path, monkeypatch):
    """Two winners, one with its trial; compiling gives two kernels, one of which spills."""
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")
    monkeypatch.setattr("autoflash.profile.profile", lambda *_: [KERNEL, COMBINE])
    monkeypatch.setattr("autoflash.toolchain.detect_toolchain", lambda: CHAIN)
    monkeypatch.setattr("autoflash.gpu.cuda_available", lambda: False)
    path = tmp_path / "profiled.db"
    winner = winner_of(PROBLEM, CONFIG)
    told = {"seed": 0, "effort": "quick", "budget_s": None, "argv": [], "protocol": "graph"}
    with Store.open(path) as store:
        run = store.start_run(H200, CHAIN, **told)
        took = Resources(142, 8, 104448, 2)
        timed = {"status": "correct", "stage": "screen", "regime": "graph", "median_us": 9.0}
        digest = winner.decision.kernel_digest
        store.record_trial(run, Trial(PROBLEM, CONFIG, digest, resources=took, **timed))
        store.record_decision(run, winner.decision)
        store.record_decision(run, winner_of(prefill_of()).decision)
    return path


def ask(*args):
    return CliRunner().invoke(app, ["profile", *map(str, args)])


def stored(path):
    with Store.open(path, readonly=True) as store:
        sql = (
            "SELECT kernel, registers, spill_bytes, occupancy_percent, dram_percent, batch "
            "FROM profiles JOIN problems ON problems.id = problem_id ORDER BY profiles.rowid"
        )
        return store.conn.execute(sql).fetchall()


def test_one_winner_is_compiled_told_and_stored(db):
    result = ask("--db", db, "--op", "decode", "--json")
    decode, combine = json.loads(result.stdout)
    assert (decode["registers"], decode["achieved_percent"]) == (142, None)
    assert combine["spill_bytes"] == 24
    assert "notice: not profiled: no GPU is here\n" in result.stderr
    assert "notice: combine spills 24 bytes a thread\n" in result.stderr
    assert stored(db) == [("decode", 142, 0, 12.5, None, 8), ("combine", 56, 24, 56.25, None, 8)]


def test_profiles_of_a_database_come_along_when_it_is_merged(db, tmp_path):
    ask("--db", db, "--op", "decode")
    for _ in range(2):
        merge([db], tmp_path / "merged.db")
    assert stored(tmp_path / "merged.db") == stored(db) and len(stored(db)) == 2


def test_several_winners_are_a_line_each_as_their_trials_recorded_them(db):
    result = ask("--db", db, "--csv")
    header, decode, prefill = result.stdout.splitlines()
    assert header.startswith("number,gpu,problem") and "as recorded" in result.stderr
    assert ",142,8,104448,12.5,shared memory," in decode
    assert ",,,,,," in prefill
    assert stored(db) == []
    assert ask("--db", db, "--number", 1, "--csv").stdout.splitlines()[1].startswith("decode,142")


def test_a_database_that_nobody_may_write_is_told(db, monkeypatch):
    def refused(*_):
        raise StoreError("it is read-only")

    monkeypatch.setattr(Store, "record_profiles", refused)
    result = ask("--db", db, "--op", "decode")
    assert result.exit_code == 0
    assert "notice: the profile is not recorded: it is read-only\n" in result.stderr


def test_what_is_not_there_is_one_line(db):
    assert str(ask("--db", db, "--number", 3).exception).startswith("--number 3: 2 winners")
    nothing = "notice: no measured winners are what was asked for\n"
    assert ask("--db", db, "--batch", 99).stderr == nothing
    assert ask("--json", "--csv").exit_code == 2
