"""Explaining a winner: what it is compared with, what its knobs decide, what failed, what binds."""

import csv
import io
import json
import math
from dataclasses import replace

import pytest
from making import CHAIN, H200, candidates, decode_of, prefill_of, winner_of
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.config import Config
from autoflash.errors import StoreError, UnsupportedError
from autoflash.explain import alike, explain, failures, grouped_failures, knob_costs
from autoflash.gpu import known
from autoflash.limits import limits
from autoflash.occupancy import occupancy
from autoflash.records import Clocks, Resources, Trial
from autoflash.roofline import floor
from autoflash.store import Store
from autoflash.store.rows import trial_rows

PROBLEM = decode_of(batch=8, num_heads=32, num_kv_heads=8, head_dim=128, seqlen_k=8192)
WINNER, *OTHERS = candidates(PROBLEM)
ONE_KNOB_AWAY = [config for config in OTHERS if sum(config[k] != v for k, v in WINNER.knobs) == 1]
FAR = next(c for c in OTHERS if sum(c[k] != v for k, v in WINNER.knobs) > 2)
TAKES = Resources(registers=128, spill_bytes=0, smem_bytes=65536, launches_per_call=2)


def trial(config: Config, us: float | None = None, **fields) -> Trial:
    timed = {"status": "correct", "regime": "graph"} if us else {}
    told = {"stage": "screen", "resources": TAKES, "kernel_digest": "new", "problem": PROBLEM}
    return Trial(config=config, median_us=us, **(told | timed | fields))


def decided(**changes):
    near = ONE_KNOB_AWAY[0]
    told = {"winner_us": 20.0, "default_us": 25.0, "times": ((WINNER, 20.0), (near, 22.0))}
    return winner_of(PROBLEM, WINNER, **(told | changes))


def told_by_a_search():
    """The winner at 20 us, one knob away 10 and 50 percent slower and a failure, others far off."""
    near, farther, failed, *_ = ONE_KNOB_AWAY
    return [
        trial(WINNER, 18.0, kernel_digest="old"),
        trial(WINNER, 16.0, clocks=Clocks(sm_clock_mhz=1980)),
        trial(near, 99.0),
        trial(farther, 24.0),
        trial(failed, status="compile", error="line 12: no"),
        trial(FAR, 15.0),
    ]


def test_a_neighbour_is_compared_with_the_winner_of_its_own_stage():
    one = explain(decided(), told_by_a_search())
    near, farther, failed, *_ = ONE_KNOB_AWAY
    found = {
        each.measured.config if each.measured else each.failure: each for each in one.neighbours
    }
    assert set(found) == {near, farther, "compile: line 12: no"}
    assert found[near].measured.stage == "final" and found[near].measured.slower == 22 / 20 - 1
    assert (
        found[farther].measured.stage == "screen" and found[farther].measured.slower == 24 / 16 - 1
    )
    assert near[found[near].knob] == found[near].value != WINNER[found[near].knob]
    assert failed[found["compile: line 12: no"].knob] == found["compile: line 12: no"].value


def test_what_was_interleaved_with_the_winner_stands_before_what_was_only_screened():
    runners = explain(decided(), told_by_a_search()).runners_up
    assert [one.stage for one in runners] == ["final", "screen", "screen"]
    assert runners[1].slower == 15 / 16 - 1 and runners[2].slower == 24 / 16 - 1


def test_trials_of_an_older_text_do_not_count():
    trials = told_by_a_search()
    assert explain(decided(), trials).candidates == 5
    old = [replace(each, kernel_digest="older") for each in trials[1:]]
    assert explain(decided(), [*old, trial(WINNER, 16.0)]).candidates == 1


def test_without_trials_the_final_is_told():
    one = explain(decided())
    assert [each.config for each in one.runners_up] == [ONE_KNOB_AWAY[0]]
    assert len(one.neighbours) == 1 and one.neighbours[0].measured.stage == "final"
    assert one.resources.registers is None and one.candidates == 2


def test_a_winner_that_the_family_refuses_now_is_not_explained():
    wrong = Config.of("decode", WINNER.as_dict() | {"BLOCK_N": 7})
    with pytest.raises(UnsupportedError, match="BLOCK_N"):
        explain(winner_of(PROBLEM, wrong))


def test_a_knob_that_decides_all_has_all_importance_and_the_loss_of_its_other_value():
    by_stages = {1: 10.0, 2: 20.0}
    times = {
        Config.of("decode", {"stages": stages, "noise": noise, "fixed": 1}): us
        for stages, us in by_stages.items()
        for noise in (1, 2)
    }
    stages, noise = knob_costs(Config.of("decode", {"stages": 1, "noise": 1, "fixed": 1}), times)
    assert (stages.name, noise.name) == ("stages", "noise")
    assert stages.importance == pytest.approx(1) and noise.importance == pytest.approx(0)
    assert stages.loses == 1.0 and noise.loses == 0.0
    assert stages.best_us == ((1, 10.0), (2, 20.0))


def test_two_knobs_share_the_variance_by_their_effects():
    factors = {("a", 1): 1, ("a", 2): math.e**2, ("b", 1): 1, ("b", 2): math.e}
    times = {
        Config.of("decode", {"a": a, "b": b}): 10 * factors["a", a] * factors["b", b]
        for a in (1, 2)
        for b in (1, 2)
    }
    costs = {each.name: each.importance for each in knob_costs(next(iter(times)), times)}
    assert costs == pytest.approx({"a": 0.8, "b": 0.2})  # squares of effects 2 and 1


def test_failures_of_one_cause_are_one_group_whatever_their_numbers():
    trials = [
        trial(WINNER, status="constraints", error="spills 312 bytes, 256 allowed"),
        trial(FAR, status="constraints", error="spills 1.5 bytes, 256 allowed\nmore"),
        trial(OTHERS[0], status="timeout", error="60 s"),
        trial(OTHERS[1], status="timeout", error="60 s"),
        trial(OTHERS[1], 9.0),
    ]
    first, second = failures(trials)
    assert (first.status, first.candidates) == ("constraints", 2)
    assert first.reason == "spills # bytes, # allowed" == alike(first.example)
    assert (second.status, second.candidates) == ("timeout", 1)


def test_the_roof_is_the_longest_of_what_overlaps_and_the_limiter_the_largest_part():
    least = floor(PROBLEM, H200)
    near_roof = limits(PROBLEM, WINNER, H200, least.floor_us * 1.1, TAKES, 1980)
    assert near_roof.roof == ("bytes", least.bytes_moved / H200.dram_gbps / 1e3)
    assert near_roof.limiter == "bytes"
    assert limits(PROBLEM, WINNER, H200, least.floor_us * 9, TAKES).limiter == "latency"
    tiny = replace(PROBLEM, batch=1, seqlen_k=16)
    assert limits(tiny, WINNER, H200, 2.0, TAKES).limiter == "launch"
    unknown = replace(H200, dram_gbps=0, tflops_16bit=0)
    assert limits(PROBLEM, WINNER, unknown, 20.0, TAKES).limiter == ""


def test_exponentials_bind_where_a_head_is_narrow():
    narrow = prefill_of(batch=8, head_dim=16, seqlen_q=4096, seqlen_k=4096)
    config = candidates(narrow)[0]
    found = limits(narrow, config, H200, 500.0, TAKES, 1980)
    pairs = 8 * 8 * 4096 * 4097 / 2
    assert found.roof[0] == "exponentials"
    assert found.exponentials_us >= pairs / (132 * 16 * 1980)


@pytest.mark.parametrize(
    ("slug", "mhz"),
    [("NVIDIA_A100_SXM4_80GB", 1410), ("NVIDIA_A10", 1695), ("NVIDIA_H200", 1830)],
)
def test_where_no_clock_was_measured_exponentials_are_counted_at_the_vendors(slug, mhz):
    """Of winners whose trials are not here, as of those that are shipped."""
    gpu = known(slug)
    config = candidates(PROBLEM)[0]
    told, measured = (limits(PROBLEM, config, gpu, 20.0, TAKES, clock) for clock in (None, mhz))
    assert told.exponentials_us == pytest.approx(measured.exponentials_us, rel=0.001)
    unknown = replace(gpu, tflops_16bit=0)
    assert limits(PROBLEM, config, unknown, 20.0, TAKES).exponentials_us == 0.0


def test_occupancy_is_bound_by_what_runs_out_first():
    many = occupancy(Resources(registers=33, smem_bytes=0), 4, H200)
    assert (many.blocks, many.binds) == (65536 // (40 * 128), "registers")
    smem = occupancy(Resources(registers=32, smem_bytes=100_000), 4, H200)
    assert (smem.blocks, smem.binds) == (2, "shared memory")
    threads = occupancy(Resources(registers=16, smem_bytes=0), 32, H200)
    assert (threads.blocks, threads.binds, threads.percent) == (2, "threads", 100.0)
    assert occupancy(Resources(registers=255, smem_bytes=0), 32, H200).blocks == 1


@pytest.fixture
def db(tmp_path, monkeypatch):
    """A search of the problem, and a second problem's winner without trials."""
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")
    path = tmp_path / "explained.db"
    with Store.open(path) as store:
        told = {"seed": 0, "effort": "quick", "budget_s": None, "argv": [], "protocol": "graph"}
        run = store.start_run(H200, CHAIN, **told)
        for each in told_by_a_search():
            store.record_trial(run, each)
        store.record_decision(run, decided(margin=0.25, tied=(FAR,)).decision)
        store.record_decision(run, winner_of(prefill_of()).decision)
        store.record_decision(run, winner_of(decode_of(), source="predicted").decision)
    return path


def ask(*args):
    return CliRunner().invoke(app, ["explain", *map(str, args)])


def test_one_winner_is_told_in_full(db):
    text = ask("--db", db, "--op", "decode").stdout
    assert text.startswith("decode bf16, batch 8, heads 32/8, head_dim 128, 8192 keys, contiguous")
    for part in (
        f"winner    {WINNER}: 20 us",
        "25 us, 25.0 % more",
        "tied with 1, an earlier winner or the simplest won",
        "% of the 55.95 us that memory allows",
        "limiter   bytes",
        "128 registers, no spills, 65536 bytes of shared memory: 3 blocks",
        "best of each family",
        "what each knob decides",
        "neighbours: one knob away",
        "compile: line 12: no",
        "line #: no",
    ):
        assert part in text


def test_several_winners_are_a_line_each_and_predicted_ones_are_none(db):
    result = ask("--db", db)
    assert len(result.stdout.splitlines()) == 3
    assert "--number N" in result.stderr
    assert ask("--db", db, "--number", 1).stdout == ask("--db", db, "--op", "decode").stdout
    rows = list(csv.DictReader(io.StringIO(ask("--db", db, "--csv").stdout)))
    assert rows[0]["limiter"] == "bytes" and rows[0]["gain_percent"] == "25.0"
    assert [row["failed"] for row in rows] == ["1", "0"]


def test_json_has_all_of_each(db):
    decode, prefill = json.loads(ask("--db", db, "--json").stdout)
    assert decode["limits"]["limiter"] == "bytes" and decode["winner"]["knobs"] == WINNER.as_dict()
    assert {each["failure"] for each in decode["neighbours"]} == {"", "compile: line 12: no"}
    assert [each["knobs"] for each in decode["tied"]] == [FAR.as_dict()] and prefill["tied"] == []
    assert decode["failures"][0]["candidates"] == 1 and prefill["failures"] == []
    assert prefill["default"]["us"] == 10.0 and prefill["default"]["slower"] == 0.0


def test_what_is_not_there_is_one_line(db, tmp_path):
    nothing = "notice: no measured winners are what was asked for\n"
    assert ask("--db", db, "--batch", 99).stderr == nothing
    wrong = ask("--db", db, "--number", 3)
    assert isinstance(wrong.exception, StoreError)
    assert str(wrong.exception) == "--number 3: 2 winners are what was asked for"
    assert "no such database" in str(ask("--db", tmp_path / "no.db").exception)


@pytest.mark.parametrize("args", [["--json", "--csv"], ["--number", "0"], ["--op", "forward"]])
def test_wrong_usage_ends_with_2(args):
    assert ask(*args).exit_code == 2


def test_rows_of_trials_are_grouped_over_problems(db):
    with Store.open(db) as store:
        more = replace(told_by_a_search()[4], problem=replace(PROBLEM, batch=4))
        store.record_trial(1, replace(more, error="line 7: no"))
        mended = replace(more, problem=replace(PROBLEM, batch=2))
        store.record_trial(1, mended)
        store.record_trial(1, trial(mended.config, 9.0, problem=mended.problem))
        (row,) = grouped_failures(trial_rows(store, {}))
    assert (row["reason"], row["candidates"], row["problems"]) == ("line #: no", 2, 2)


def test_of_a_shipped_winner_exponentials_are_told_and_who_tells_what_it_takes(
    monkeypatch, tmp_path
):
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "none.db"))
    which = ("--op", "decode", "--paged", "--batch", 1, "--seqlen-k", 16384, "--num-heads", 32)
    told = CliRunner().invoke(app, ["explain", *map(str, which)])
    assert told.exit_code == 0 and "roofline" in told.output
    assert "exponentials 0." in told.output
    assert "takes     not known: its trials are not here; `autoflash profile`" in told.output
