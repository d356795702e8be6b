"""Tables in a terminal: a line for each row as long as that can be, and rows told apart."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from dataclasses import replace
from pathlib import Path

import pytest
from making import decode_of, prefill_of
from typer.testing import CliRunner

from autoflash.cli import app, table
from autoflash.cli.drawing import LEAST, PROBLEM, Column, fit
from autoflash.cli.table import Drawn
from autoflash.problem import briefs, title
from autoflash.store import shipped_winners

ROOT = Path(__file__).parents[2]
ASKED = ["--num-heads", "32", "--head-dim", "128", "--batch", "128", "--seqlen-k", "8192"]
NAMES = ("problem", "us", "knobs")
DECODE = decode_of(batch=64, seqlen_k=1024)


@pytest.fixture
def terminal(monkeypatch, capsys):
    """What a terminal of a width shows of a table; or of a command, whose stdout is caught."""

    def of(width, *asked):
        monkeypatch.setenv("COLUMNS", str(width))
        for module in ("table", "query"):
            there = sys.modules[f"autoflash.cli.{module}"]  # a command has its module's name
            monkeypatch.setattr(there, "on_terminal", lambda: True)
        if callable(asked[0]):
            asked[0](*asked[1:])
            return capsys.readouterr().out
        result = CliRunner().invoke(app, list(asked))
        assert result.exit_code == 0, result.output
        return result.stdout

    return of


def lines_of(shown: str) -> list[str]:
    """The rows, which stand below the rule."""
    return shown[shown.rindex("─") + 1 :].strip("\n").splitlines()


@pytest.fixture
def no_database(monkeypatch, tmp_path):
    monkeypatch.setenv("AUTOFLASH_DB", str(tmp_path / "none.db"))


def test_shipped_winners_are_a_line_each_in_a_real_terminal_of_100_columns(tmp_path):
    own, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
    told = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    told |= {
        "AUTOFLASH_DB": str(tmp_path / "none.db"),
        "TERM": "xterm",
        "NO_COLOR": "1",
        "PYTHONPATH": str(ROOT),
    }
    asked = [sys.executable, "-m", "autoflash", "query", "--op", "decode", *ASKED]
    process = subprocess.Popen(
        asked, stdout=theirs, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=told
    )
    os.close(theirs)
    shown = b""
    try:
        while more := os.read(own, 65536):
            shown += more
    except OSError:  # how Linux says that the other end is closed
        pass
    os.close(own)
    assert process.wait() == 0
    text = re.sub(r"\x1b\[[0-9;]*m|\r", "", shown.decode())
    assert max(map(len, text.splitlines())) == 100
    wanted = [w for w in shipped_winners() if w.decision.problem.batch == 128]
    wanted = [w.decision.problem for w in wanted if w.decision.problem.seqlen_k == 8192]
    wanted = [p for p in wanted if (p.num_heads, p.head_dim) == (32, 128)]
    rows = lines_of(text)
    assert len(rows) == len(wanted) >= 7
    assert len({row[:22] for row in rows}) == len(rows)
    assert "gpu NVIDIA H200" in text and "H200" not in "".join(rows)
    assert all(row.endswith("…") and "BLOCK_N=" in row for row in rows)


@pytest.mark.usefixtures("no_database")
@pytest.mark.parametrize("width", [80, 100, 120])
def test_nine_of_ten_shipped_winners_are_a_line_and_none_are_alike(terminal, width):
    rows = lines_of(terminal(width, "query"))
    count = len(shipped_winners())
    assert count <= len(rows) <= (1.1 if width > 80 else 1.4) * count
    assert max(map(len, rows)) <= width
    heads = [row for row in rows if row[:1] != " " and "  " in row]
    assert len(set(heads)) >= count


@pytest.mark.usefixtures("no_database")
@pytest.mark.parametrize("command", ["explain", "profile"])
def test_lists_of_other_commands_are_a_line_for_each_winner_too(terminal, command):
    rows = lines_of(terminal(120, command, "--op", "decode", "--batch", "1"))
    problems = [winner.decision.problem for winner in shipped_winners()]
    count = sum((p.op, p.batch) == ("decode", 1) for p in problems)
    assert len(rows) == count > 3
    assert [int(row.split()[0]) for row in rows] == list(range(1, count + 1))


def test_what_all_rows_have_alike_is_said_once(terminal):
    drawn = Drawn({name: name for name in ("gpu", *NAMES)}, above=("gpu",))
    problems = DECODE, replace(DECODE, batch=1), replace(DECODE, lengths="ragged")
    rows = [
        ("H200", problem, 7.5, f"BLOCK_N={n} num_warps=4") for n, problem in enumerate(problems)
    ]
    shown = terminal(100, table.print_table, ("gpu", *NAMES), rows, drawn)
    first, letters = shown.splitlines()[:2]
    alike, own = briefs(problems)
    assert own == ["b64", "b1", "b64 ragged"] and "k1024" in alike
    assert first == f"all rows: gpu H200, problem {alike}, knobs num_warps=4"
    assert letters.startswith("problem: b batch, h heads")
    assert [row.split()[0] for row in lines_of(shown)] == ["b64", "b1", "b64"]
    assert "H200" not in "".join(lines_of(shown)) and "num_warps" not in "".join(lines_of(shown))


def test_gpus_that_differ_stay_a_column(terminal):
    drawn = Drawn({"gpu": "gpu", "us": "us"}, above=("gpu",))
    shown = terminal(100, table.print_table, ("gpu", "us"), [("H200", 1.0), ("A100", 2.0)], drawn)
    assert "all rows" not in shown and [row.split()[0] for row in lines_of(shown)] == [
        "H200",
        "A100",
    ]


def test_one_row_alone_says_its_problem_whole(terminal):
    shown = terminal(100, table.print_table, NAMES, [(DECODE, 7.5, "BLOCK_N=64")])
    (row,) = lines_of(shown)
    (brief,) = briefs([DECODE])[1]
    assert row.startswith(brief) and row.rstrip().endswith("BLOCK_N=64")
    assert brief.startswith("decode bf16 b64 h")


def columns(**widths: int) -> list[Column]:
    return [Column(name, ["x" * width], name == "us") for name, width in widths.items()]


def test_knobs_are_cut_before_a_problem_goes_on_below_and_numbers_never():
    named = columns(problem=PROBLEM + 10, us=6, knobs=90)
    assert [each.width for each in fit(named, 200) or []] == [PROBLEM + 10, 6, 90]
    assert [each.width for each in fit(named, 100) or []] == [PROBLEM, 6, 100 - PROBLEM - 6 - 4]
    assert [each.width for each in fit(named, 66) or []][1:] == [6, LEAST]
    assert sum(each.width for each in fit(named, 66) or []) == 66 - 4


def test_what_may_be_spared_goes_where_there_is_no_room_and_its_room_is_used():
    named = columns(problem=PROBLEM + 10, us=6, knobs=90)
    assert fit(named, 58) is None
    kept = fit(named, 58, spare=("knobs",)) or []
    assert [(each.name, each.width) for each in kept] == [("problem", 50), ("us", 6)]


def test_columns_that_are_gone_are_told(terminal, monkeypatch):
    told = []
    monkeypatch.setattr("autoflash.cli.drawing.notice", told.append)
    rows = [(DECODE, 7.5, "BLOCK_N=64 " * 9)]
    drawn = Drawn({name: name for name in NAMES}, spare=("knobs",))
    shown = terminal(50, table.print_table, NAMES, rows, drawn)
    assert "BLOCK_N" not in shown and len(lines_of(shown)) == 1
    assert told == ["knobs: no room in 50 columns"]


def test_a_table_without_room_is_a_block_for_each_row(terminal):
    names = [f"number_{place}" for place in range(30)]
    shown = terminal(80, table.print_table, names, [range(30), range(30)])
    assert shown.count("number_7 ") == 2 and "─" not in shown
    assert shown.splitlines()[0].split() == ["number_0", "0"]


def test_a_name_wider_than_its_numbers_is_broken_where_room_is_short(terminal):
    rows = [(5.0, "x" * 90)]
    assert "roofline_percent" in terminal(120, table.print_table, ("roofline_percent", "t"), rows)
    narrow = terminal(104, table.print_table, ("roofline_percent", "t"), rows)
    assert "roofline_ " in narrow and "percent" in narrow and "x" * 90 in narrow


def test_a_brief_tells_apart_what_a_title_does():
    several = [
        DECODE,
        *(replace(DECODE, page_size=16, pages=pages) for pages in ("permuted", "shared")),
        *(replace(DECODE, kv_dtype="int8", kv_scales=scales) for scales in ("head", "token")),
        replace(DECODE, softcap=True),
        replace(DECODE, window_left=5, mask="q_idx > 3"),
        *(prefill_of(causal=causal, layout=name) for causal in (0, 1) for name in ("bshd", "thd")),
        prefill_of(head_dim=192, head_dim_v=128),
        prefill_of(masked_by="blocks", density=10, mask_block_q=128, mask_block_k=64),
        prefill_of(masked_by="prefix", density=10),
    ]
    assert len({title(problem) for problem in several}) == len(several)
    assert len(set(briefs(several)[1])) == len(several)
    assert briefs(several)[1][-2].endswith("blocks 128x64 10%")
    assert briefs([DECODE, DECODE]) == (briefs([DECODE])[1][0], ["", ""])
