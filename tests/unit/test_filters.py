"""Filters of problems by what their kernels do, shared by query, explain and profile."""

import json
from dataclasses import replace

import pytest
import typer
from store_samples import PROBLEM, decision, run
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.cli.filters import FILTERS
from autoflash.problem import Problem
from autoflash.store import Store

COMMANDS = vars(typer.main.get_command(app))["commands"]
PREFILL = Problem("prefill", "fp16", 4, 16, 16, 64, 512, 512)
PAGED = replace(PROBLEM, batch=8, page_size=16)
# One for each filter.
FURTHER = {
    "full": replace(PREFILL, causal=False),
    "window": replace(PREFILL, window_left=5),
    "softcap": replace(PREFILL, softcap=True),
    "alibi": replace(PREFILL, alibi=True),
    "bias": replace(PREFILL, bias=True),
    "sinks": replace(PREFILL, sinks=True),
    "layout": replace(PREFILL, layout="bhsd"),
    "lengths": replace(PAGED, lengths="ragged"),
    "page size": replace(PAGED, page_size=64),
    "kv dtype": replace(PAGED, kv_dtype="int8"),
}


@pytest.fixture(autouse=True)
def nothing_is_shipped(monkeypatch, tmp_path):
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")


def ask(command, *args):
    result = CliRunner().invoke(app, [command, *map(str, args)])
    assert result.exit_code == 0, result.output
    return result.stdout


ONLY = {
    "full": (["--full"], ["--causal"]),
    "window": (["--window"], ["--no-window"]),
    "softcap": (["--softcap"], ["--no-softcap"]),
    "alibi": (["--alibi"], ["--no-alibi"]),
    "bias": (["--bias"], ["--no-bias"]),
    "sinks": (["--sinks"], ["--no-sinks"]),
    "layout": (["--layout", "bhsd"], ["--layout", "bshd"]),
    "lengths": (["--lengths", "ragged"], ["--lengths", "equal"]),
    "page size": (["--page-size", 64], ["--page-size", 16]),
    "kv dtype": (["--kv-dtype", "int8"], ["--kv-dtype", "bf16"]),
}


@pytest.mark.parametrize("name", ONLY)
def test_a_filter_keeps_the_one_winner_that_it_tells_and_its_opposite_the_others(tmp_path, name):
    path = tmp_path / "further.db"
    with Store.open(path) as store:
        started = run(store)
        for place, problem in enumerate(FURTHER.values(), 1):
            store.record_decision(started, decision(problem, us=float(place)))
    own = float(list(FURTHER).index(name) + 1)
    kept, others = (
        [row["winner_us"] for row in json.loads(ask("query", "--db", path, *args, "--json"))]
        for args in ONLY[name]
    )
    assert kept == [own] and others and own not in others


@pytest.mark.parametrize("command", ["query", "explain", "profile"])
def test_every_filter_is_an_option_of_each_command_that_asks_about_winners(command):
    options = {option for each in COMMANDS[command].params for option in each.opts}
    assert {f"--{name.replace('_', '-')}" for name in FILTERS} <= options


def test_the_table_tells_apart_problems_of_equal_shapes(tmp_path):
    path = tmp_path / "further.db"
    with Store.open(path) as store:
        for problem in FURTHER.values():
            store.record_decision(run(store), decision(problem, us=7.0))
    lines = ask("query", "--db", path).splitlines()[1:]
    assert len(set(lines)) == len(lines) == len(FURTHER)
    assert any("int8 with scales per tensor" in line for line in lines)
