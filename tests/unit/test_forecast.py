"""The forecast: what a search would try and how long, with nothing started and nothing written."""

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest
from fake_device import GPU, TOOLCHAIN
from test_tune import DECODE, LONGER, PROBLEM, QUICK, binary, tried, workload

from autoflash import child
from autoflash.effort import EFFORTS
from autoflash.forecast import forecasts
from autoflash.groups import digest_of, groups_of
from autoflash.problem import Problem
from autoflash.records import Trial
from autoflash.store import Store
from autoflash.tune import options_for


@pytest.fixture(autouse=True)
def nothing_starts(monkeypatch):
    def refuse(*_):
        raise AssertionError("a process was started")

    monkeypatch.setattr(child.Child, "_start", refuse)


@pytest.fixture
def db(tmp_path):
    return tmp_path / "tune.db"


def told(db, *problems, gpus=1, **options):
    asked = options_for(**{"effort": "quick", "strategy": "random", **options})
    return forecasts(workload(*problems), GPU, TOOLCHAIN, asked, db, gpus)


def known(db, configs, seconds_each=0.0, effort="quick"):
    """The database of a run that screened these configs of PROBLEM."""
    with Store.open(db) as store:
        run = store.start_run(
            GPU, TOOLCHAIN, seed=0, effort=effort, budget_s=None, argv=[], protocol=""
        )
        for config in configs:
            digest = digest_of(PROBLEM, config)
            store.record_trial(
                run,
                Trial(
                    *(PROBLEM, config, digest, "correct", "screen", "measured", "graph", 100.0),
                ),
            )
        started = datetime(2026, 1, 1, tzinfo=UTC)
        ended = started + timedelta(seconds=seconds_each * len(configs))
        store.conn.execute("UPDATE runs SET started_at = ?", (started.isoformat(),))
        store.conn.execute("UPDATE trials SET recorded_at = ?", (ended.isoformat(),))


def test_without_a_database_everything_is_new_and_none_is_made(db):
    (one,) = told(db, PROBLEM)
    (group,), _ = groups_of([PROBLEM], GPU)
    assert one.candidates == len(group.candidates(PROBLEM, GPU))
    assert (one.tried, one.known, one.from_roofline) == (len(tried()), 0, True)
    assert one.compiles == len({binary(config) for config in tried()}) and one.seconds > 0
    assert not db.exists() and not list(db.parent.iterdir())


def test_what_earlier_trials_told_is_neither_compiled_nor_timed_again(db):
    configs = tried()
    known(db, configs[:5])
    before = db.read_bytes()
    (one,) = told(db, PROBLEM)
    assert db.read_bytes() == before
    assert (one.tried, one.known) == (len(configs), 5)
    assert one.compiles == len({binary(config) for config in configs[5:]})
    known(db, configs)
    (nothing,) = told(db, PROBLEM)
    assert (nothing.known, nothing.compiles, nothing.seconds) == (len(configs), 0, 0.0)


def test_shapes_of_a_group_share_their_compiles(db):
    first, second = told(db, PROBLEM, LONGER)
    on_longer = tried(LONGER, most=EFFORTS["quick"].max_climbed)
    both = {binary(config) for config in [*tried(), *on_longer]}
    assert first.compiles and first.compiles + second.compiles == len(both)


def test_the_time_is_by_the_pace_of_earlier_runs_of_the_same_effort(db):
    known(db, tried()[:10], seconds_each=2.0)
    (decode,) = told(db, DECODE)
    assert not decode.from_roofline
    assert decode.seconds == pytest.approx(2.0 * decode.tried, rel=1e-4)
    assert told(db, DECODE, effort="max")[0].from_roofline
    assert told(db, DECODE, gpus=4)[0].seconds == pytest.approx(decode.seconds / 4)


def test_a_longer_problem_takes_longer_by_the_roofline(db):
    long = replace(PROBLEM, batch=16, num_heads=32, num_kv_heads=32, seqlen_q=16384, seqlen_k=16384)
    short, longer = told(db, PROBLEM, long)
    assert longer.seconds > 2 * short.seconds


def test_a_problem_that_no_family_serves_is_told_with_the_reason(db):
    odd = Problem("prefill", "bf16", 1, 4, 4, 128, 512, 512, deterministic=True, head_dim_v=20)
    served, refused = told(db, PROBLEM, odd)
    assert served.tried <= QUICK and refused.problem == odd
    assert refused.why and (refused.tried, refused.seconds) == (0, 0.0)


@pytest.mark.parametrize("seqlen", [512, 16384])
def test_the_rounds_of_led_finals_count_where_there_are_some(db, monkeypatch, seqlen):
    problem = replace(PROBLEM, num_heads=32, num_kv_heads=32, seqlen_q=seqlen, seqlen_k=seqlen)
    (before,) = told(db, problem)
    more = replace(EFFORTS["quick"], led_rounds=10 * EFFORTS["quick"].led_rounds)
    monkeypatch.setitem(EFFORTS, "quick", more)
    (after,) = told(db, problem)
    assert (after.seconds > before.seconds) == (seqlen == 16384)
