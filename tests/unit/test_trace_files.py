"""Traces of calls: read with every mistake told, tuned by the time they take, told by shares."""

import dataclasses
import json
import sys

import pytest
from making import H200, decode_of, prefill_of

from autoflash.cli import main
from autoflash.errors import TraceError
from autoflash.trace import load_trace, shares, traced_workload

GPU = dict(
    zip(("name", "arch", "num_sms", "memory_gib", "mig_profile"), H200.identity, strict=True)
)
SHORT, LONG = prefill_of(seqlen_q=128, seqlen_k=128), prefill_of(seqlen_q=8192, seqlen_k=8192)
STEP = decode_of(page_size=16)


def line(problem, calls, how, **gpu):
    fields = {"gpu": {**GPU, **gpu}, "problem": dataclasses.asdict(problem)}
    return json.dumps({**fields, "calls": calls, "how": how}) + "\n"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "calls.jsonl"
    path.write_text(
        line(SHORT, 900, "nearest")
        + line(STEP, 50, "exact")
        + line(LONG, 20, "default")
        + line(SHORT, 30, "bucket")  # of another process
    )
    return path


def test_calls_of_several_processes_add_up_and_the_last_says_how(path):
    traced = {one.problem: one for one in load_trace(path)}
    assert (traced[SHORT].calls, traced[SHORT].how) == (930, "bucket")
    assert len(traced) == 3


def test_what_takes_the_most_time_is_tuned_first_and_what_is_tuned_already_last(path):
    workload = traced_workload(path, load_trace(path))
    assert workload.problems == ((LONG, 20.0), (SHORT, 930.0), (STEP, 50.0))
    assert workload.name == "calls"
    path.write_text(line(LONG, 900, "exact") + line(SHORT, 1, "nearest"))
    workload = traced_workload(path, load_trace(path))
    assert [problem for problem, _ in workload.problems] == [SHORT, LONG]


def test_a_gpu_is_tuned_for_its_own_calls_where_it_has_some(path):
    path.write_text(path.read_text() + line(LONG, 7, "exact", name="NVIDIA B200", num_sms=148))
    traced = load_trace(path)
    assert dict(traced_workload(path, traced, H200).problems)[LONG] == 20
    other = dataclasses.replace(H200, name="NVIDIA A10")
    assert dict(traced_workload(path, traced, other).problems)[LONG] == 27


def test_shares_are_of_calls_and_of_the_least_time_they_take(path):
    by_how = {each.how: each for each in shares(load_trace(path))}
    assert [by_how[how].calls for how in ("exact", "bucket", "nearest", "default")] == [
        50,
        930,
        0,
        20,
    ]
    assert by_how["bucket"].calls_share == 0.93
    assert by_how["default"].time_share > by_how["bucket"].time_share > 0
    assert sum(each.time_share for each in by_how.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda one: one.update(calls=0), "calls 0 is not a positive number"),
        (lambda one: one.update(calls=True), "calls True is not a positive number"),
        (lambda one: one.update(how="luck"), "how 'luck' is none of exact, bucket, nearest, de"),
        (lambda one: one.pop("gpu"), "lacks 'gpu'"),
        (lambda one: one["problem"].pop("batch"), "lacks 'batch'"),
        (lambda one: one["problem"].update(batch="two"), "problem: batch 'two' is not int"),
        (lambda one: one["problem"].update(batch=0), "batch 0 is not positive"),
        (lambda one: one["problem"].update(era=5), "problem has era, which this version does not"),
    ],
)
def test_a_line_that_is_none_is_told_with_its_number(path, change, reason):
    one = json.loads(line(SHORT, 1, "exact"))
    change(one)
    path.write_text(line(LONG, 1, "exact") + json.dumps(one))
    with pytest.raises(TraceError, match=rf"calls\.jsonl:2: {reason}"):
        load_trace(path)


@pytest.mark.parametrize("text", ["", "\n", "[]", "{", "calls: 3"])
def test_a_file_that_is_no_trace_is_refused(path, text):
    path.write_text(text)
    with pytest.raises(TraceError, match=r"calls\.jsonl: no calls|calls\.jsonl:1: "):
        load_trace(path)
    with pytest.raises(TraceError, match="cannot read"):
        load_trace(path.parent)


def run(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["autoflash", *map(str, words)])
    main()


def test_coverage_prints_shares_and_what_to_tune_first(path, monkeypatch, capsys):
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "coverage", path, "--json", "--worst", "1")
    told = json.loads(capsys.readouterr().out)
    assert {each["how"]: each["calls"] for each in told["shares"]}["exact"] == 50
    assert [each["calls"] for each in told["first"]] == [20]
    with pytest.raises(SystemExit, match="0"):
        run(monkeypatch, "coverage", path)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["how", "problems", "calls", "calls_percent", "time_percent"]
    assert lines[2].split()[:4] == ["bucket", "1", "930", "93"]


def test_tune_takes_a_trace_in_place_of_a_workload(path, monkeypatch, capsys):
    asked = []

    def tune(workload, **options):
        asked.append(workload)
        raise TraceError("asked")

    monkeypatch.setattr("autoflash.tune.tune", tune)
    with pytest.raises(SystemExit):
        run(monkeypatch, "tune", "--from-trace", path)
    assert [problem for problem, _ in asked[0].problems] == [LONG, SHORT, STEP]
    for words in ((), ("a.yaml", "--from-trace", path)):
        with pytest.raises(SystemExit, match="2"):
            run(monkeypatch, "tune", *words)
        assert "give either a workload or --from-trace" in capsys.readouterr().err
