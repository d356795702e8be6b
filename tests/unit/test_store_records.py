"""Records in and out of the database: round trips, what resumes, what counts as the winner."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from store_samples import (
    A100,
    H200,
    OLDER,
    PROBLEM,
    TOOLCHAIN,
    config,
    decision,
    exported,
    run,
    trial,
)
from store_strategies import gpus, toolchains, trials

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.store import Store, StoreWarning


@pytest.fixture
def store(tmp_path):
    with Store.open(tmp_path / "autoflash.db") as store:
        yield store


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    with Store.open(tmp_path_factory.mktemp("shared") / "autoflash.db") as store:
        yield store


@settings(deadline=None, max_examples=60)
@given(gpu=gpus, toolchain=toolchains, tried=st.lists(trials(), max_size=3))
def test_trials_come_back_as_they_went_in(shared, gpu, toolchain, tried):
    before = len(shared.trials(gpu, toolchain))
    started = run(shared, gpu, toolchain)
    for each in tried:
        shared.record_trial(started, each)
    assert shared.trials(gpu, toolchain)[before:] == tried


def test_a_search_resumes_with_the_trials_of_its_problem_and_text(store):
    other = replace(PROBLEM, seqlen_k=2048)
    started = run(store)
    kept = trial(us=8.0)
    rows = [kept, trial(other), replace(kept, kernel_digest="d2"), trial(us=None, status="compile")]
    for each in rows:
        store.record_trial(started, each)
    assert store.trials(H200, TOOLCHAIN) == rows
    assert store.trials(H200, TOOLCHAIN, PROBLEM, "d1") == [rows[0], rows[3]]
    assert store.trials(H200, TOOLCHAIN, other) == [rows[1]]
    assert store.trials(H200, TOOLCHAIN, kernel_digest="d2") == [rows[2]]


OTHER_GPUS = {
    "another name": replace(H200, name="NVIDIA H100"),
    "another capability": replace(H200, arch="sm_100"),
    "another SM count": replace(H200, num_sms=114),
    "another memory size": replace(H200, memory_gib=94),
    "a slice of it": replace(H200, mig_profile="1g.18gb"),
}


@pytest.mark.parametrize("gpu", OTHER_GPUS.values(), ids=OTHER_GPUS)
def test_rows_of_another_gpu_type_are_not_this_gpus(store, gpu):  # case B16
    started = run(store, gpu)
    store.record_trial(started, trial())
    store.record_decision(started, decision())
    assert store.trials(H200, TOOLCHAIN) == []
    assert store.winners(H200) == []
    assert [winner.gpu for winner in store.winners()] == [gpu]


def test_a_power_limit_does_not_make_another_gpu(store):
    capped = replace(H200, power_limit_w=500)
    store.record_decision(run(store, capped), decision())
    assert [winner.gpu for winner in store.winners(H200)] == [capped]


@pytest.mark.parametrize("field", ["driver", "cuda", "torch", "triton", "ptxas"])
def test_trials_of_other_versions_are_not_resumed(store, field):  # case B16
    for value in ("1.0", ""):
        store.record_trial(run(store, toolchain=replace(TOOLCHAIN, **{field: value})), trial())
    assert store.trials(H200, TOOLCHAIN) == []


def test_saving_own_rows_leaves_foreign_ones_as_they_were(store):  # case B16
    for gpu, toolchain in ((A100, TOOLCHAIN), (H200, OLDER)):
        store.record_decision(run(store, gpu, toolchain), decision())
    before = store.winners()
    store.record_decision(run(store), decision(us=5.0))
    assert [each for each in store.winners() if each in before] == before
    (own,) = [each for each in store.winners() if each not in before]
    assert (own.gpu, own.toolchain, own.decision.winner_us) == (H200, TOOLCHAIN, 5.0)


def test_winners_hold_their_weight_and_the_latest_decision(store):
    first, second = run(store), run(store)
    store.add_problem(first, PROBLEM, 2.0)
    store.add_problem(second, PROBLEM, 3.0)
    store.record_decision(first, decision(us=7.0))
    store.record_decision(second, decision(us=8.0))
    (winner,) = store.winners()
    assert (winner.decision.winner_us, winner.weight) == (8.0, 3.0)
    assert winner.decided_at.endswith("+00:00")


def test_a_problem_without_a_weight_weighs_one(store):
    store.record_decision(run(store), decision())
    assert store.winners()[0].weight == 1.0


def test_winners_of_one_problem_leave_the_others_out(store):
    other = replace(PROBLEM, batch=2)
    for problem in (PROBLEM, other):
        store.record_decision(run(store), decision(problem))
    assert [winner.decision.problem for winner in store.winners(H200, other)] == [other]


@pytest.mark.parametrize("order", [("measured", "predicted"), ("predicted", "measured")])
def test_a_predicted_decision_never_stands_before_a_measured_one(store, order):
    for source in order:
        store.record_decision(run(store), decision(source=source))
    assert [winner.decision.source for winner in store.winners()] == ["measured", "predicted"]


@pytest.mark.parametrize("changed", [{"dtype": "fp16"}, {"dtype": "fp32"}, {"kv_dtype": "fp16"}])
def test_dtypes_are_part_of_the_key(store, changed):
    shape = {"op": "decode", "batch": 1, "num_heads": 8, "num_kv_heads": 2, "head_dim": 128}
    shape |= {"seqlen_q": 1, "seqlen_k": 64}
    bf16 = Problem(**shape, dtype="bf16")
    other = Problem(**(shape | {"dtype": "bf16"} | changed))
    store.record_decision(run(store), decision(bf16))
    store.record_trial(run(store), trial(bf16))
    assert store.winners(H200, other) == store.trials(H200, TOOLCHAIN, other) == []
    assert len(store.winners(H200, Problem(dtype="bf16", **shape))) == 1


def test_the_leaderboard_keeps_the_best_time_of_each_config(store):  # case B17
    started = run(store)
    for us, place in ((9.0, 0), (7.0, 0), (8.0, 0), (7.5, 1)):
        store.record_trial(started, trial(us=us, place=place))
    store.record_trial(started, trial(us=1.0, status="correctness"))
    store.record_trial(started, trial(us=1.0, regime="eager"))
    store.record_trial(started, trial(us=1.0, stage="predicted", source="predicted"))
    sql = "SELECT place, best_us, trials, knobs_json FROM leaderboard ORDER BY place"
    assert store.conn.execute(sql).fetchall() == [
        (1, 7.0, 3, config(0).to_json()),
        (2, 7.5, 1, config(1).to_json()),
    ]


def test_an_error_that_is_not_a_number_is_kept_as_infinite(store):
    store.record_trial(run(store), trial(max_ratio=float("nan"), status="correctness"))
    assert store.trials(H200, TOOLCHAIN)[0].max_ratio == float("inf")


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"median_us": "7"}, "median_us is '7', not a number"),
        ({"median_us": float("nan")}, "median_us is nan, not a number"),
        ({"samples": 90.5}, "samples is 90.5, not int"),
        ({"error": 90.5}, "error is 90.5, not str"),
        ({"samples": True}, "samples is True, not int"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_before_it_is_bound(store, changed, reason):
    with pytest.raises(ValueError) as refused:
        store.record_trial(run(store), replace(trial(), **changed))
    assert str(refused.value) == reason
    assert store.trials(H200, TOOLCHAIN) == []


def test_what_a_broken_compiler_printed_can_be_stored(store):
    store.record_trial(run(store), trial(us=None, status="compile", error="bad \udcff byte"))
    assert store.trials(H200, TOOLCHAIN)[0].error == "bad \\udcff byte"


def test_a_kernels_text_is_kept_whether_it_comes_before_its_trials_or_after(store):
    store.add_kernel("decode", "decode_paged", "d1", "text one")
    store.record_trial(run(store), trial())
    store.record_trial(run(store), replace(trial(), kernel_digest="d2"))
    store.add_kernel("decode", "decode", "d2", "text two")
    assert store.conn.execute("SELECT variant, digest, text FROM kernels").fetchall() == [
        ("decode_paged", "d1", "text one"),
        ("decode", "d2", "text two"),
    ]


def test_a_run_says_how_it_ended(store):
    started = run(store)
    sql = "SELECT outcome, ended_at = '' FROM runs"
    assert store.conn.execute(sql).fetchone() == ("", 1)
    store.end_run(started, "interrupted")
    assert store.conn.execute(sql).fetchone() == ("interrupted", 0)


def test_a_run_ends_also_where_ctrl_c_broke_off_a_write(store):
    started = run(store)
    store.conn.execute("BEGIN IMMEDIATE")
    store.conn.execute("UPDATE runs SET seed = 99")
    store.end_run(started, "interrupted")
    assert store.conn.execute("SELECT seed, outcome FROM runs").fetchall() == [(0, "interrupted")]


def seed(store, knobs_json):
    """A decision and a trial with these knobs, written by someone else."""
    started = run(store)
    store.record_decision(started, decision(replace(PROBLEM, batch=2)))
    store.record_trial(started, trial(replace(PROBLEM, batch=2)))
    store.record_decision(started, decision(place=5))
    store.record_trial(started, trial(place=5))
    with store.conn:
        sql = "UPDATE configs SET knobs_json = ? WHERE knobs_json = ?"
        assert store.conn.execute(sql, (knobs_json, config(5).to_json())).rowcount == 1


ODD_KNOBS = {
    "an unknown knob": (config().as_dict() | {"BLOCK_Q": 3}, "knob BLOCK_Q of decode is unknown"),
    "no knob": ({}, "is missing"),
    "a NULL": (config().as_dict() | {"num_warps": None}, "knob num_warps of decode is None"),
    "a list": (config().as_dict() | {"num_warps": [4]}, "knob num_warps of decode is [4]"),
    "a boolean": (config().as_dict() | {"num_warps": True}, "knob num_warps of decode is True"),
}


@pytest.mark.parametrize(("knobs", "reason"), ODD_KNOBS.values(), ids=ODD_KNOBS)
def test_a_row_with_knobs_the_family_has_not_is_skipped_with_one_warning(
    store, knobs, reason
):  # case B17
    seed(store, Config("decode", tuple(knobs.items())).to_json())
    for read in (store.winners, lambda: store.trials(H200, TOOLCHAIN)):
        with pytest.warns(StoreWarning) as warned:
            assert len(read()) == 1
        assert len(warned) == 1
        text = str(warned[0].message)
        assert text.startswith(f"{store.path}: 1 row skipped: ") and reason in text


def test_a_row_with_a_value_outside_the_space_is_for_the_predicate_to_judge(store):
    odd = config().as_dict() | {"BLOCK_N": 0}
    seed(store, Config.of("decode", odd).to_json())
    assert 0 in [each.decision.winner["BLOCK_N"] for each in store.winners()]


TAMPERED = {
    "a family of another version": "UPDATE configs SET family = 'decode_2030'",
    "a shape that is none": "UPDATE problems SET num_heads = 3",
    "no name of the GPU": "UPDATE gpus SET name = NULL",
    "no version of triton": "UPDATE toolchains SET triton = NULL",
    "times that are no JSON": "UPDATE decisions SET times_json = 'x'",
    "times that are no list": "UPDATE decisions SET times_json = '3'",
    "tied configs that are none": "UPDATE decisions SET tied_json = '[[]]'",
    "a source that is none": "UPDATE decisions SET source = 'guessed'",
    "no time": "UPDATE decisions SET winner_us = NULL",
}


@pytest.mark.parametrize("sql", TAMPERED.values(), ids=TAMPERED)
def test_a_row_that_no_autoflash_would_write_is_skipped(store, sql):  # case B16
    store.record_decision(run(store), decision())
    conn = store.conn
    # what another program may do to the file: constraints are off for it, NULLs come in
    conn.execute("PRAGMA ignore_check_constraints=ON")
    conn.execute("PRAGMA writable_schema=ON")
    conn.execute(
        "UPDATE sqlite_master SET sql = replace(sql, ' NOT NULL', '') WHERE type = 'table'"
    )
    conn.execute("PRAGMA writable_schema=OFF")
    conn.close()
    with Store.open(store.path) as again:
        again.conn.execute("PRAGMA ignore_check_constraints=ON")
        again.conn.execute(sql)
        with pytest.warns(StoreWarning, match="1 row skipped"):
            assert again.winners() == []


def test_the_anytime_curve_is_of_the_trials_that_were_faster_than_all_before(store):
    started, other = run(store), run(store)
    slower = replace(PROBLEM, batch=2)
    store.record_trial(other, trial(us=5.0))
    for us in (9.0, 12.0, 7.0, 7.0, 6.5):
        store.record_trial(started, trial(us=us))
    store.record_trial(started, trial(slower, us=30.0))
    store.record_trial(started, trial(us=1.0, stage="cross"))
    store.record_trial(started, trial(us=1.0, regime="eager"))
    store.record_trial(started, trial(us=1.0, status="correctness"))
    curves = store.anytime(started)
    assert [us for _, us in curves[PROBLEM]] == [9.0, 7.0, 6.5]
    assert [us for _, us in curves[slower]] == [30.0]
    seconds = [elapsed for elapsed, _ in curves[PROBLEM]]
    assert seconds == sorted(seconds) and 0 <= seconds[0] < 60
    assert [us for _, us in store.anytime(other)[PROBLEM]] == [5.0]


def test_the_timeline_says_for_how_long_a_gpu_waited_for_each_binary(store):
    started = run(store)
    at = "2026-01-01T00:00:{:06.3f}+00:00".format
    asked = {"asked_at": at(1), "seconds": 1.0}
    made = [
        (trial(**asked, compiled_at=at(5)), at(6.5)),  # nothing before it: no word on waiting
        (trial(place=1, **asked, compiled_at=at(6)), at(8)),  # there in time
        (trial(place=2, **asked, compiled_at=at(10.25)), at(11.5)),
        (trial(place=1, stage="final"), at(13)),  # as an autoflash without these columns
    ]
    for each, recorded_at in made:
        row = store.record_trial(started, each)
        store.conn.execute("UPDATE trials SET recorded_at = ? WHERE id = ?", (recorded_at, row))
    store.conn.execute("UPDATE runs SET started_at = ?", (at(0),))
    rows = store.conn.execute(
        "SELECT asked_s, compiled_s, began_s, ended_s, waited_s FROM timeline ORDER BY trial_id"
    ).fetchall()
    assert rows == [
        (1.0, 5.0, 5.5, 6.5, None),
        (1.0, 6.0, 7.0, 8.0, 0.0),
        (1.0, 10.25, 10.5, 11.5, 2.25),
        (None, None, 13.0, 13.0, None),
    ]


def test_a_run_has_a_name_of_its_own_and_the_clock_it_was_locked_to(store):
    run(store)
    asked = {"seed": 0, "effort": "max", "budget_s": None, "argv": [], "protocol": ""}
    store.start_run(H200, TOOLCHAIN, **asked, locked_clock_mhz=1500)
    rows = store.conn.execute("SELECT uid, locked_clock_mhz FROM runs").fetchall()
    assert [clock for _, clock in rows] == [0, 1500] and len({uid for uid, _ in rows}) == 2
    assert all(len(uid) == 32 for uid, _ in rows)


def test_an_export_keeps_what_each_problem_loses_and_would_lose_untuned(store):
    other = replace(PROBLEM, batch=3)
    rows = [exported(), exported(problem=other, regret=0.0, unseen_regret=None)]
    store.record_export("f" * 64, 4, rows)
    store.record_export("e" * 64, 1, rows[:1])
    kept = store.conn.execute(
        "SELECT module_sha256, most_configs, batch, regret, unseen_regret FROM exported_problems "
        "JOIN exports ON exports.id = export_id JOIN problems ON problems.id = problem_id "
        "ORDER BY export_id, batch"
    ).fetchall()
    assert kept == [
        ("f" * 64, 4, PROBLEM.batch, 0.02, 0.5),
        ("f" * 64, 4, 3, 0.0, None),
        ("e" * 64, 1, PROBLEM.batch, 0.02, 0.5),
    ]
    assert all(len(uid) == 32 for (uid,) in store.conn.execute("SELECT uid FROM exports"))
