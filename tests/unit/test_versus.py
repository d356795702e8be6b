"""`autoflash bench` without a GPU: who takes part, whose time counts, what is written."""

import json
import sys
import xml.etree.ElementTree as ET
from functools import partial
from types import ModuleType

import pytest
import torch.nn.functional as F
from making import H200, backward_of, decode_of, prefill_of
from typer.testing import CliRunner

from autoflash.cli import app
from autoflash.cli.bench import load_exported, makers_of
from autoflash.errors import AutoflashError, DeviceError, WorkloadError
from autoflash.gauges import Gauged
from autoflash.gradients import eager_gradients
from autoflash.inputs import make_inputs
from autoflash.peers import PEERS
from autoflash.peers.contender import Contender, Unavailable
from autoflash.reference import eager
from autoflash.report import read_results
from autoflash.report.plots import ratios
from autoflash.turns import Times
from autoflash.versus import case_of, summary_of, versus

SMALL = decode_of(batch=2, seqlen_k=64, page_size=16)
CHUNK = prefill_of(batch=2, seqlen_q=32, seqlen_k=32)
COSTS = Gauged(9.0, 20.0, None, 2, 4096)
DRIFT = (1.0, 1.1, 0.9, 1.2, 1.0)


def costs(contenders):
    return dict.fromkeys(contenders, COSTS)


def right(inputs):
    return Contender([lambda one=one: eager(one)[0] for one in inputs])


def off(inputs):
    return Contender([lambda one=one: eager(one)[0] * 1.5 for one in inputs])


def not_finite(inputs):
    return Contender([lambda one=one: one.q * float("nan") for one in inputs])


def missing(inputs):
    raise ImportError("No module named 'peer'\nand more")


def unable(inputs):
    raise Unavailable("it reads no such cache")


def timed(**medians):
    """Times that drift together, of those who were admitted."""

    def time_all(calls):
        return {name: Times("graph", [medians[name] * d for d in DRIFT]) for name in calls}

    return time_all


def compared(problem=SMALL, makers=None, **medians):
    makers = makers or {"autoflash": right, "one": right, "other": right}
    told = {"autoflash": 10.0, "one": 12.0, "other": 15.0, **medians}
    return versus(problem, 3.0, H200, makers, timed(**told), costs, device="cpu")


@pytest.fixture(autouse=True)
def few_sets(monkeypatch):
    monkeypatch.setattr("autoflash.versus.buffer_sets", lambda *_: 2)


@pytest.mark.parametrize("problem", [SMALL, CHUNK], ids=["decode", "prefill"])
def test_the_ratio_is_of_the_best_peer_and_its_interval_of_paired_rounds(problem):
    one = compared(problem)
    assert (one.best_peer, one.ratio) == ("one", pytest.approx(1.2))
    # all drift together: without pairing the interval would be as wide as the drift
    assert (one.ratio_low, one.ratio_high) == (pytest.approx(1.2), pytest.approx(1.2))
    assert one.figures["autoflash"].p80_us > one.figures["autoflash"].median_us == 10.0
    assert one.figures["other"].gauged == COSTS and one.left_out == one.imprecise == {}


def test_who_cannot_take_part_is_named_with_the_reason():
    makers = {"autoflash": right, "a": missing, "b": unable, "c": not_finite, "d": right}
    one = compared(makers=makers, d=30.0)
    assert one.left_out == {
        "a": "ImportError: No module named 'peer'",
        "b": "it reads no such cache",
        "c": "wrong: out is not finite",
    }
    assert set(one.figures) == {"autoflash", "d"} and one.ratio == pytest.approx(3.0)


def test_a_peer_beyond_the_error_budget_is_timed_and_not_counted():
    one = compared(makers={"autoflash": right, "quick": off, "one": right}, quick=1.0)
    assert set(one.figures) == {"autoflash", "quick", "one"} and one.best_peer == "one"
    assert one.imprecise["quick"].startswith("out is off by")
    case = case_of(one, H200)
    assert set(case["peers"]) == {"one"} and "quick" in case["figures"]


def test_ours_must_be_right_and_peers_are_timed_without_it():
    one = compared(makers={"autoflash": off, "one": right})
    assert one.left_out["autoflash"].startswith("wrong: out is off by")
    assert one.ratio is None and set(one.figures) == {"one"}
    assert case_of(one, H200)["ours"] is None
    alone = compared(makers={"autoflash": right})
    assert (alone.ratio, alone.best_peer) == (None, "")


def test_of_a_large_output_rows_are_judged_and_all_of_it_must_be_finite(monkeypatch):
    monkeypatch.setattr("autoflash.versus.WHOLE_SCORES", 1)

    def one_nan(inputs):
        outs = [eager(one)[0] for one in inputs]
        outs[0][1, 3, 5] = float("nan")
        return Contender([lambda out=out: out for out in outs])

    makers = {"autoflash": right, "off": off, "hole": one_nan}
    one = compared(CHUNK, makers=makers, off=1.0, hole=1.0)
    assert set(one.figures) == {"autoflash", "off"} and set(one.imprecise) == {"off"}
    assert one.left_out == {"hole": "wrong: out is not finite"}


def test_on_modified_problems_each_peer_has_a_reason_of_its_own():
    windowed = prefill_of(seqlen_q=32, seqlen_k=32, window_left=4, softcap=True)
    makers = {"autoflash": right, "math": PEERS["prefill"]["math"], "one": right}
    one = compared(windowed, makers)
    assert one.left_out == {"math": "it has no windows and no softcap"}
    assert set(one.figures) == {"autoflash", "one"} and one.ratio == pytest.approx(1.2)


def prefill(*tensors, causal, layout):
    """A module's prefill that has gradients."""
    q, k, v = tensors if layout == "bhsd" else (each.transpose(1, 2) for each in tensors)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
    return out if layout == "bhsd" else out.transpose(1, 2)


@pytest.mark.parametrize("sampled", [False, True], ids=["whole", "rows"])
def test_gradients_are_judged_and_timed_beside_those_of_peers(monkeypatch, sampled):
    if sampled:
        monkeypatch.setattr("autoflash.versus.WHOLE_SCORES", 1)

    def wrong(inputs):
        made = PEERS["backward"]["math"](inputs)
        return Contender([lambda: [2 * each for each in made.calls[0]()]], made.shape)

    def hole(inputs):
        made = PEERS["backward"]["math"](inputs)
        dq, dk, dv = made.calls[0]()
        dk[0, 0, 0, 0] = float("nan")
        return Contender([lambda: (dq, dk, dv)], made.shape)

    problem = backward_of(batch=2, seqlen_q=32, seqlen_k=32, head_dim=32)
    makers = makers_of(module_of(prefill), problem, ["math", "flashinfer"])
    makers |= {"wrong": wrong, "hole": hole}
    one = compared(problem, makers, math=12.0, wrong=1.0)
    assert one.left_out == {
        "flashinfer": "it has no adapter for backward",
        "hole": "wrong: dk is not finite",
    }
    assert set(one.figures) == {"autoflash", "math", "wrong"} and set(one.imprecise) == {"wrong"}
    assert (one.best_peer, one.ratio) == ("math", pytest.approx(1.2))
    assert one.imprecise["wrong"].startswith("dq is off by")
    case = case_of(one, H200)
    assert set(case["peers"]) == {"math"} and case["figures"]["autoflash"]["tflops"] > 0


def test_every_set_of_inputs_has_the_same_lengths():
    seen = []

    def spy(inputs):
        for one in inputs:
            ends = one.cu_seqlens_k if one.problem.varlen else one.cache_seqlens
            seen.append(ends.tolist())
        return right(inputs)

    packed = prefill_of(batch=8, seqlen_q=64, seqlen_k=64, layout="thd", lengths="ragged")
    for problem in (decode_of(batch=8, seqlen_k=64, lengths="ragged"), packed):
        one = compared(problem, makers={"autoflash": spy})
        first, second = seen
        assert first == second and "autoflash" in one.figures
        seen.clear()


def module_of(function):
    """An exported module whose functions are `function`; it notes their arguments."""
    module = ModuleType("exported")
    module.prefill = module.decode = function
    return module


def test_ours_is_called_with_what_the_problem_has():
    calls = []

    def call(*tensors, **keywords):
        calls.append(keywords)
        return tensors[0]

    full = prefill_of(seqlen_q=16, seqlen_k=32, causal=False, window_left=7, sinks=True)
    packed = prefill_of(batch=3, seqlen_q=16, seqlen_k=16, layout="thd", lengths="ragged")
    for problem in (CHUNK, full, SMALL, packed):
        inputs = [make_inputs(problem)]
        made = makers_of(module_of(call), problem, [])["autoflash"](inputs)
        assert made.out().shape == inputs[0].q.shape
    plain, windowed, decode, varlen = calls
    assert plain == {"causal": True, "layout": "bshd"}
    assert windowed["window"] == (7, -1) and windowed["sinks"].shape == (8,)
    assert set(windowed) == {"causal", "layout", "window", "sinks"}
    assert varlen["cu_seqlens_q"].shape == varlen["cu_seqlens_k"].shape == (4,)
    assert (varlen["max_seqlen_q"], varlen["max_seqlen_k"], varlen["layout"]) == (16, 16, "thd")
    assert (decode["max_seqlen_k"], decode["lengths"], decode["pages"]) == (64, "equal", "permuted")


def test_a_peer_without_an_adapter_for_the_op_says_so():
    makers = makers_of(module_of(None), SMALL, ["xformers"])
    assert list(makers) == ["autoflash", "xformers"]
    with pytest.raises(Unavailable, match="it has no adapter for decode"):
        makers["xformers"]([])
    assert {"cudnn", "flashinfer", "vllm_triton"} < set(makers_of(module_of(None), SMALL, None))


def test_the_plot_has_a_dot_for_each_peer_of_each_problem():
    drawing = ET.fromstring(ratios([compared(), compared(CHUNK)]))
    told = [each.text for each in drawing.iter() if each.tag.endswith("title")]
    assert sum(text.startswith("one, ") and text.endswith(": 1.20") for text in told) == 2
    assert sum(text.startswith("other, ") for text in told) == 2
    shown = [each.text for each in drawing.iter() if each.tag.endswith("text")]
    assert "one" in shown and "other" in shown  # the legend
    ET.fromstring(ratios([]))


@pytest.fixture
def bench(monkeypatch, tmp_path):
    """The command on a machine whose GPU and peers are stand-ins."""
    module = tmp_path / "attention_dispatch.py"
    module.write_text("def prefill(*a, **k): return None\ndef decode(*a, **k): return None\n")
    workload = tmp_path / "w.yaml"
    workload.write_text(
        "model: {num_heads: 8, num_kv_heads: 2, head_dim: 64, dtype: bf16}\n"
        "prefill: [{seqlen_q: 32, weight: 2}]\ndecode: [{seqlen_k: 64}]\n"
    )
    monkeypatch.setattr("autoflash.gpu.detect", lambda: H200)
    monkeypatch.setattr("autoflash.versus.make_inputs", lambda p, *_, **__: make_inputs(p))
    monkeypatch.setattr("autoflash.peers.ours.prefill", lambda module, inputs: right(inputs))
    monkeypatch.setattr("autoflash.peers.ours.decode", lambda module, hints, inputs: right(inputs))
    for op in ("prefill", "decode", "backward"):
        monkeypatch.setitem(sys.modules["autoflash.peers"].PEERS, op, {"one": right, "b": missing})
    monkeypatch.setattr(
        "autoflash.turns.interleaved",
        lambda calls, gpu_us, pace, captured: timed(autoflash=10.0, one=12.0)(calls),
    )
    monkeypatch.setattr("autoflash.gauges.gauged", lambda calls, seconds: costs(calls))

    def ask(*args):
        arguments = ["bench", workload, "--module", module, *args]
        return CliRunner().invoke(app, list(map(str, arguments)))

    return ask


def test_a_table_has_a_row_for_each_contender_and_the_reasons_beside(bench):
    result = bench()
    assert result.exit_code == 0, result.output
    header, *rows = result.stdout.splitlines()
    assert header.split()[:4] == ["problem", "contender", "us", "p20_us"]
    assert [("autoflash" in row, "  one  " in row) for row in rows] == [
        (True, False),
        (False, True),
    ] * 2
    assert result.stderr.count("b is left out: ImportError: No module named 'peer'") == 2
    assert (
        "notice: prefill: best peer / autoflash 1.200, worst 1.200, of 1 problems" in result.stderr
    )


def test_the_results_file_is_one_that_the_report_reads(bench, tmp_path):
    file, plot = tmp_path / "results.json", tmp_path / "plot.svg"
    result = bench("-o", file, "--plot", plot, "--json", "--against", "one")
    told = json.loads(file.read_text())
    assert json.loads(result.stdout)["cases"] == told["cases"]
    assert told["device"]["name"] == H200.name and told["command"].startswith("autoflash")
    assert told["summary"]["decode"]["worst"] == pytest.approx(1.2)
    case = told["cases"][0]
    assert case["weight"] == 2 and case["figures"]["one"]["launches"] == 2
    assert case["figures"]["autoflash"]["percent_of_roofline"] > 0
    beside, incomplete = read_results(file)
    assert (len(beside), incomplete) == (2, 0) and beside[0].ratio == pytest.approx(1.2)
    assert beside[0].problem == prefill_of(seqlen_q=32, seqlen_k=32)
    ET.fromstring(plot.read_text())


def test_a_backward_is_timed_without_graphs(bench, monkeypatch, tmp_path):
    def differentiated(make, layout, inputs):
        return Contender([lambda: eager_gradients(inputs[0])])

    told = []

    def interleaved(calls, gpu_us, pace, captured):
        told.append(captured)
        return timed(autoflash=10.0, one=12.0)(calls)

    monkeypatch.setattr("autoflash.turns.interleaved", interleaved)
    monkeypatch.setattr("autoflash.peers.backward.differentiated", differentiated)
    makers = {"one": partial(differentiated, None, None)}
    monkeypatch.setitem(sys.modules["autoflash.peers"].PEERS, "backward", makers)
    (tmp_path / "w.yaml").write_text(
        "model: {num_heads: 2, num_kv_heads: 2, head_dim: 32, dtype: bf16}\n"
        "prefill: [{seqlen_q: 32, training: true}]\n"
    )
    result = bench()
    assert result.exit_code == 0, result.output
    assert told == [True, False]
    assert "notice: backward: best peer / autoflash 1.200" in result.stderr


def test_csv_has_plain_values(bench):
    lines = bench("--csv", "--against", "one").stdout.splitlines()
    assert len(lines) == 5 and lines[1].endswith(",1.2") and lines[2].endswith(",")
    decode = bench("--csv", "--against", "one", "--op", "decode").stdout.splitlines()
    assert decode == [lines[0], *lines[3:]]


def test_what_cannot_be_done_is_one_line(bench, monkeypatch, tmp_path):
    nowhere = tmp_path / "no" / "results.json"
    assert (
        str(bench("-o", nowhere).exception) == f"cannot write {nowhere}: No such file or directory"
    )
    for text, reason in (("x = 1", "it lacks prefill and decode"), (None, "autoflash export")):
        module = tmp_path / "other.py"
        module.write_text(text) if text else module.unlink()
        with pytest.raises(AutoflashError, match=reason):
            load_exported(module)

    def no_gpu():
        raise DeviceError("torch sees no GPU on this machine")

    monkeypatch.setattr("autoflash.gpu.detect", no_gpu)
    monkeypatch.setattr("autoflash.peers.peer_versions", lambda: {"vllm": "0.9", "xformers": "1"})
    without = bench()
    assert isinstance(without.exception, DeviceError)
    told = "notice: peers installed here: vllm 0.9, xformers 1, and those of torch itself\n"
    assert told in without.stderr
    missing_file = CliRunner().invoke(app, ["bench", str(tmp_path / "no.yaml")])
    assert isinstance(missing_file.exception, WorkloadError)


@pytest.mark.parametrize("args", [["--json", "--csv"], ["--against", "nobody"], ["--gpu-ms", "0"]])
def test_wrong_usage_ends_with_2(bench, args):
    assert bench(*args).exit_code == 2


def test_a_summary_needs_a_ratio():
    assert summary_of([compared(makers={"autoflash": right})]) == {}
