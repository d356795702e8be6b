"""Progress: one line a problem, and above a terminal's live line the same."""

from dataclasses import replace
from io import StringIO

import pytest
from fake_device import GPU
from rich.console import Console

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.progress import Lines, LiveView, outcome, progress_for, progress_for_each
from autoflash.records import Decision

PROBLEM = Problem("prefill", "bf16", 4, 32, 8, 128, 8192, 8192)
DEFAULT, WINNER = (Config.of("prefill", {"BLOCK_M": block}) for block in (64, 128))
DECISION = Decision(PROBLEM, "digest", WINNER, 4000.0, DEFAULT, 5000.0, 0.25, 0.24, 0.26)


def test_an_outcome_names_time_roofline_and_the_beaten_default():
    assert outcome(DECISION, GPU) == "4000.0 us, 56 % of roofline, default 5000.0 us (+25.0 %)"


@pytest.mark.parametrize(
    ("decision", "said"),
    [
        (replace(DECISION, winner=DEFAULT), "the default stays"),
        (replace(DECISION, default_us=0.0), "the default failed"),
    ],
)
def test_an_outcome_says_what_became_of_the_default(decision, said):
    assert outcome(decision, GPU).endswith(said)


def test_a_predicted_outcome_names_no_time():
    assert " us" not in outcome(replace(DECISION, source="predicted"), GPU)


def test_lines_are_numbered_and_tell_why_a_problem_is_undecided(capsys):
    lines = Lines(GPU)
    lines.begin(PROBLEM, 2, 7)
    lines.candidates(3, 9, 1.0, 2.0)
    lines.decided(PROBLEM, None, "every candidate failed")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("[2/7] prefill") and line.endswith("undecided: every candidate failed")


def test_the_live_line_shows_candidates_best_default_and_time_left():
    written = StringIO()
    console = Console(file=written, force_terminal=True, width=200)
    view = LiveView(GPU, console, budget_s=600.0)
    view.begin(PROBLEM, 1, 2)
    view.candidates(12, 60, 4000.0, 5000.0)
    line = view.line().plain
    view.decided(PROBLEM, DECISION)
    view.close()
    assert "12/60 candidates" in line and line.endswith("left")
    assert "best 4000.0 us (56 % of roofline)" in line and "default 5000.0 us" in line
    assert "[1/2] prefill" in written.getvalue()


def test_no_live_view_where_stderr_is_no_terminal():
    assert type(progress_for(GPU, None)) is Lines


def test_several_gpus_have_a_live_line_each_under_one_another():
    written = StringIO()
    console = Console(file=written, force_terminal=True, width=200)
    first = LiveView(GPU, console, None, "GPU 0")
    second = LiveView(GPU, console, None, "GPU 3", beside=first)
    first.begin(PROBLEM, 1, 2)
    second.begin(PROBLEM, 2, 2)
    shown = first.lines().renderables
    second.decided(PROBLEM, DECISION)
    for view in (first, second):
        view.close()
    assert [line.plain[:11] for line in shown] == ["GPU 0 [1/2]", "GPU 3 [2/2]"]
    assert "GPU 3 [2/2] prefill" in written.getvalue()


def test_lines_of_several_gpus_name_theirs(capsys):
    for view, number in zip(
        progress_for_each([("GPU 0", GPU), ("GPU 3", GPU)], None), (1, 2), strict=True
    ):
        view.begin(PROBLEM, number, 2)
        view.decided(PROBLEM, DECISION)
    told = [line[:11] for line in capsys.readouterr().err.splitlines()]
    assert told == ["GPU 0 [1/2]", "GPU 3 [2/2]"]
