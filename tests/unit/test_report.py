"""The report: one file that needs no other, with what was measured in it, and nothing made up."""

import json
import re
import statistics
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import escape
from html.parser import HTMLParser

import pytest
from making import CHAIN, H200, candidates, decode_of, prefill_of, winner_of
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.errors import AutoflashError, StoreError
from autoflash.explain import explain
from autoflash.families import family_of
from autoflash.records import Clocks, Resources, Trial
from autoflash.render import render
from autoflash.report import page, read_results
from autoflash.report.chart import HEIGHT, LEFT, RIGHT, TOP, WIDTH, Axis, Chart, medians_over
from autoflash.report.heat_map import heat_map, kind
from autoflash.report.kernels import kernels
from autoflash.report.page import machines, peer_maps
from autoflash.report.plots import anytime, roofline
from autoflash.runtime.problem import Problem
from autoflash.store import Store

DECODE = decode_of(batch=8, num_heads=32, num_kv_heads=8, head_dim=128, seqlen_k=8192)
VOID = {"meta", "!doctype"}
SPILLS = Resources(registers=255, spill_bytes=48, smem_bytes=65536, launches_per_call=2)


@pytest.fixture
def db(tmp_path, monkeypatch):
    """Two winners on an H200, one of them with its trials, of a run with an odd command."""
    monkeypatch.setattr("autoflash.store.store.tunedb_dir", lambda: tmp_path / "tunedb")
    path = tmp_path / "report.db"
    best, second, failed, *_ = candidates(DECODE)
    with Store.open(path) as store:
        told = {"effort": "quick", "budget_s": None, "protocol": "graph"}
        run = store.start_run(H200, CHAIN, seed=7, argv=["tune", "<b>.yaml"], **told)
        winner = winner_of(DECODE, best, winner_us=60.0, default_us=66.0, margin=0.1)
        digest = winner.decision.kernel_digest
        warm = Clocks(sm_clock_mhz=1980, power_w=600.0, temperature_c=60)
        timed = {"status": "correct", "stage": "screen", "regime": "graph", "resources": SPILLS}
        for config, us in ((second, 80.0), (best, 60.0)):
            store.record_trial(
                run, Trial(DECODE, config, digest, median_us=us, clocks=warm, **timed)
            )
        no = {"status": "compile", "stage": "screen", "error": "no <dot> of 3"}
        store.record_trial(run, Trial(DECODE, failed, digest, **no))
        store.record_decision(run, winner.decision)
        store.record_decision(run, winner_of(prefill_of(batch=2)).decision)
        store.end_run(run, "finished")
    return path


def ask(*args):
    return CliRunner().invoke(app, ["report", *map(str, args)])


@pytest.fixture
def written(db, tmp_path) -> str:
    output = tmp_path / "report.html"
    result = ask("--db", db, "-o", output, "--results", results_file(tmp_path))
    assert result.exception is None, result.output
    assert result.stderr.endswith("2 winners, 1 run, 2 beside peers\n") and result.stdout == ""
    return output.read_text()


def results_file(folder, **changes):
    """A results file of two whole cases, one without a peer and one that lacks fields."""
    told = {"batch": 8, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
    decode = {**told, "seqlen_q": 1, "seqlen_k": 8192, "page_size": 0, "lengths": "equal"}
    prefill = {**told, "seqlen": 512, "causal": True}
    peers = {"cudnn": 90.0, "flash": 75.0}
    cases = [
        {"case": decode, "unit": "us", "ours": 60.0, "peers": peers},
        {"case": prefill, "unit": "us", "ours": 100.0, "peers": {"flash": 80.0}},
        {"case": {**prefill, "batch": 1}, "unit": "us", "ours": 1.0, "peers": {}},
        {"case": {"name": "1 32/8 1024"}, "unit": "us", "ours": 1.0, "peers": peers},
    ]
    file = folder / "results.json"
    told = {"device": {"name": "NVIDIA H200"}, "date": "2026-11-29", "cases": cases, **changes}
    file.write_text(json.dumps(told))
    return file


class Tags(HTMLParser):
    """Holds a page to closing what it opens, and collects what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.links: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "data")]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_refers_to_nothing_outside_it(written):
    tags = Tags()
    tags.feed(written)
    assert tags.open == [] and tags.links == ["#words"] and 'id="words"' in written
    assert not {"script", "link", "img", "iframe"} & set(tags.seen)
    assert not re.search(r"url\(|@import|https?:", written.split("</style>")[0])
    for name in re.findall(r"var\((--\w+)", written):
        assert f"{name}:" in written, name


def test_the_page_holds_what_was_measured(written):
    for part in (
        "NVIDIA H200",
        "triton 3.6.0",
        "decode bf16, heads 32/8, head_dim 128, contiguous",
        "60\n93 %",  # of the 55.9 us that its bytes take
        "the default takes 66 us",
        "no &lt;dot&gt; of #",
        "spills 48 bytes",
        "autoflash tune &lt;b&gt;.yaml",
        "seed 7",
        "1980 to 1980 MHz",
        "best peer / autoflash",
        "1.25",
        "0.80",
    ):
        assert part in written, part
    text = render(family_of("decode").variant(DECODE)).text
    assert escape(text).splitlines()[30] in written


def test_every_drawing_is_xml_with_a_name(written):
    drawings = re.findall(r"<svg.*?</svg>", written, flags=re.DOTALL)
    assert len(drawings) == 2
    for drawing in drawings:
        assert ET.fromstring(drawing).get("aria-label")


def test_winners_without_trials_are_told_without_what_is_not_known():
    one = explain(winner_of(prefill_of()))
    text = page([one], [], [], "2026-11-29")
    assert "The searches" not in text and "Beside other" not in text and "What failed" not in text
    (kernel,) = kernels([one])
    assert kernel.winners[0].registers is None and kernel.winners[0].occupancy == ""
    assert not kernel.spills


def test_a_text_that_is_no_longer_rendered_is_not_shown_as_if_it_were():
    (kernel,) = kernels([explain(winner_of(prefill_of(), kernel_digest="0123456789ab"))])
    assert kernel.source == "" and kernel.digest == "0123456789ab"
    text = page([explain(winner_of(prefill_of(), kernel_digest="0123456789ab"))], [], [], "x")
    assert "another text than the one that was measured (0123456789ab)" in text


def test_each_gpu_and_toolchain_has_a_part_of_its_own():
    newer = replace(CHAIN, triton="3.7.0")
    several = [winner_of(prefill_of()), winner_of(decode_of()), winner_of(decode_of(), chain=newer)]
    found = machines([explain(each) for each in several])
    assert [len(machine.winners) for machine in found] == [2, 1]
    assert "triton 3.7.0" in found[1].toolchain


def test_a_winner_lies_in_the_roofline_at_its_intensity_and_rate():
    one = explain(winner_of(DECODE, winner_us=100.0))
    drawing = ET.fromstring(roofline(H200, [one]))
    (dot,) = [each for each in drawing if each.tag == "circle"]
    assert dot.get("class") == "decode" and "56 % of the roof" in dot[0].text
    (roof,) = [each for each in drawing if each.get("class") == "roof"]
    points = [tuple(map(float, pair.split(","))) for pair in roof.get("points").split()]
    assert len(points) == 3 and points[1][1] == points[2][1] < points[0][1]
    (x0, y0), (x1, y1), _ = points
    on_the_roof = y0 + (float(dot.get("cx")) - x0) / (x1 - x0) * (y1 - y0)
    assert float(dot.get("cy")) > on_the_roof  # y grows downwards
    assert roofline(replace(H200, dram_gbps=0), [one]) is None


def test_an_axis_places_values_and_ticks_at_round_ones():
    linear = Axis("", 0.0, 50.0)
    assert [linear.place(v) for v in (-5, 0, 25, 50, 99)] == [0, 0, 0.5, 1, 1]
    assert linear.ticks() == [0, 10, 20, 30, 40, 50]
    logarithmic = Axis("", 0.5, 2000.0, logarithmic=True)
    assert logarithmic.ticks() == [1, 10, 100, 1000]
    assert Axis("", 0.0, 50.0, room=0.2).place(50.0) == 0.8
    assert Axis("", 0.8, 3.0, logarithmic=True).ticks() == [1, 2]
    assert logarithmic.place(0.5) == 0 and logarithmic.place((0.5 * 2000) ** 0.5) == pytest.approx(
        0.5
    )


def test_marks_lie_between_the_axes_and_text_is_escaped():
    chart = Chart("a < b", Axis("x", 0, 1), Axis("y", 0, 1))
    chart.dot((2.0, 2.0), "dot", "<told>")
    chart.stairs([(0.0, 1.0), (0.5, 0.0)], 1.0, "line")
    drawing = ET.fromstring(chart.svg())
    (dot,) = [each for each in drawing if each.tag == "circle"]
    assert (float(dot.get("cx")), float(dot.get("cy"))) == (WIDTH - RIGHT, TOP)
    assert dot[0].text == "<told>" and drawing.get("aria-label") == "a < b"
    (line,) = [each for each in drawing if each.get("class") == "line"]
    corners = [tuple(map(float, pair.split(","))) for pair in line.get("points").split()]
    assert [y for _, y in corners] == [TOP, TOP, HEIGHT - 48, HEIGHT - 48]
    assert (
        corners[0][0] == LEFT and corners[1][0] == corners[2][0] and corners[3][0] == WIDTH - RIGHT
    )


def test_the_median_changes_where_a_curve_does():
    curves = [[(0.0, 9.0), (2.0, 1.0)], [(0.0, 5.0)], [(1.0, 7.0)]]
    assert medians_over(curves, statistics.median) == [(0.0, 7.0), (1.0, 7.0), (2.0, 5.0)]


def test_anytime_is_relative_to_the_last_best():
    drawing = ET.fromstring(anytime({DECODE: [(5.0, 20.0), (6.0, 10.0)]}))
    curve, median = [each for each in drawing if each.get("class") in ("curve", "median")]
    assert curve.get("points") == median.get("points")
    heights = [float(pair.split(",")[1]) for pair in curve.get("points").split()]
    assert heights[0] == TOP and heights[-1] == HEIGHT - 48  # 100 percent is beyond the edge
    assert anytime({}) is None


def test_a_heat_map_has_a_cell_for_each_shape_and_none_where_nothing_was_measured():
    values = [
        (decode_of(batch=8, seqlen_k=1024), 10.0, "ten", "why"),
        (decode_of(batch=1, seqlen_k=2048), 30.0, "thirty", ""),
        (decode_of(batch=1, seqlen_k=1024), 99.0, "much", ""),
    ]
    found = heat_map("caption", values, 10.0, 50.0)
    assert found.lengths == ("1024", "2048")
    (one, cells), (eight, others) = found.rows
    assert (one, eight) == (1, 8)
    assert [(cell.text, cell.heat) for cell in cells] == [("much", 100), ("thirty", 50)]
    assert (others[0].text, others[0].heat, others[0].told) == ("ten", 0, "why")
    assert others[1].text == ""


def test_shapes_of_one_kind_share_a_map():
    chunk = prefill_of(seqlen_q=16, seqlen_k=512)
    assert kind(chunk) == kind(prefill_of()) == "prefill bf16 causal, heads 8/2, head_dim 64"
    assert heat_map("", [(chunk, 1.0, "1", "")], 0, 1).lengths == ("16 of 512",)
    tokens = decode_of(seqlen_q=4)
    assert kind(tokens) != kind(decode_of()) == kind(decode_of(batch=3, seqlen_k=9))
    assert kind(decode_of(page_size=16)) != kind(decode_of())


def test_results_of_a_benchmark_stand_beside_their_problem(tmp_path):
    found, incomplete = read_results(results_file(tmp_path))
    assert incomplete == 1
    decode, prefill = found
    assert decode.problem == DECODE and (decode.best_peer, decode.ratio) == ("flash", 1.25)
    assert isinstance(prefill.problem, Problem) and prefill.ratio == 0.8
    maps = peer_maps(found)
    ours, peer, ratio = maps["decode bf16, heads 32/8, head_dim 128, contiguous, on NVIDIA H200"]
    assert [one.rows[0][1][0].text for one in (ours, peer, ratio)] == ["60", "75\nflash", "1.25"]
    assert ratio.rows[0][1][0].heat == 100  # the best of all; at worst 0.8 is the palest
    (_, _, worse) = maps["prefill bf16 causal, heads 32/8, head_dim 128, on NVIDIA H200"]
    assert (worse.rows[0][1][0].text, worse.rows[0][1][0].heat) == ("0.80", 0)


WRONG_RESULTS = {
    "no json": (b"{", "is not JSON"),
    "no text": (b"\x89PNG\r\n" + bytes(range(128, 256)) * 40, "is not JSON"),
    "a list": (b"[]", "its cases are none"),
    "no cases": (b"{}", "lacks `cases`"),
    "no device": (b'{"cases": []}', "lacks `device`"),
    "a case without peers' times": (
        b'{"cases": [{"peers": {"x": 1}}], "device": {"name": "H200"}}',
        "lacks `case`",
    ),
}


@pytest.mark.parametrize(("content", "why"), WRONG_RESULTS.values(), ids=WRONG_RESULTS)
def test_a_file_that_holds_no_results_is_one_line(db, tmp_path, content, why):
    file = tmp_path / "wrong.json"
    file.write_bytes(content)
    result = ask("--db", db, "-o", tmp_path / "x.html", "--results", file)
    assert isinstance(result.exception, AutoflashError)
    assert str(result.exception) == f"{file}: no results of a benchmark: {why}"
    assert not (tmp_path / "x.html").exists()


def test_what_cannot_be_done_is_one_line(db, tmp_path):
    nothing = ask("--db", db, "--gpu", "A100", "-o", tmp_path / "x.html").exception
    assert isinstance(nothing, StoreError) and "there is nothing to report" in str(nothing)
    nowhere = ask("--db", db, "-o", tmp_path / "no" / "x.html").exception
    assert str(nowhere) == f"cannot write {tmp_path}/no/x.html: No such file or directory"
    missing = ask("--db", db, "--results", tmp_path / "none.json").exception
    assert str(missing) == f"{tmp_path}/none.json: cannot be read: No such file or directory"
