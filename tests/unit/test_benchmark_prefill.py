"""The prefill benchmark without a GPU: who takes part, whose time counts, and what is told."""

import importlib
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from making import CHAIN, H200, prefill_of
from torch.nn.attention import SDPBackend
from torch.nn.attention import flex_attention as torch_flex

from autoflash import turns
from autoflash.config import Config
from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import prefill as prefill_peers
from autoflash.peers.contender import Contender
from autoflash.problem import Problem

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def harness() -> ModuleType:
    return importlib.import_module("harness")


@pytest.fixture
def peers() -> ModuleType:
    return importlib.import_module("prefill_peers")


@pytest.fixture
def prefill() -> ModuleType:
    return importlib.import_module("prefill")


def small(**changes) -> Problem:
    shape = {"seqlen_q": 96, "seqlen_k": 96, "causal": True}
    return prefill_of(layout="bhsd", **shape | changes)


def inputs_of(problem: Problem, sets: int = 2) -> list[Inputs]:
    return [make_inputs(problem, seed) for seed in range(sets)]


def right(inputs: list[Inputs]):
    return prefill_peers.sdpa(SDPBackend.MATH, inputs)


def attention(q, k, v, causal: bool) -> torch.Tensor:
    """Of (batch, heads, tokens, head_dim)."""
    return F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_peer_is_called_so_that_its_result_is_right(monkeypatch, prefill, causal, layout):
    """The libraries are stand-ins with the same arguments; each computes from what it is given."""

    def varlen(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, cu_seqlens_k, **rest):
        assert rest == {"causal": causal, "fa_version": 3}
        assert (max_seqlen_q, max_seqlen_k) == (96, 96)
        outs = []
        for b in range(len(cu_seqlens_q) - 1):
            rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
            keys = slice(cu_seqlens_k[b], cu_seqlens_k[b + 1])
            one = (t.transpose(0, 1)[None] for t in (q[rows], k[keys], v[keys]))
            outs.append(attention(*one, causal)[0].transpose(0, 1))
        return torch.cat(outs)

    def cute(q, k, v, causal):
        out = attention(*(t.transpose(1, 2) for t in (q, k, v)), causal)
        return out.transpose(1, 2), None

    three, four = ModuleType("three"), ModuleType("four")
    three.flash_attn_varlen_func, four.flash_attn_func = varlen, cute
    for name in ("vllm", "vllm.vllm_flash_attn", "flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.vllm_flash_attn.flash_attn_interface", three)
    monkeypatch.setitem(sys.modules, "flash_attn.cute.interface", four)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    module = ModuleType("exported")
    module.prefill = lambda q, k, v, causal, layout: (
        attention(q, k, v, causal)
        if layout == "bhsd"
        else attention(*(t.transpose(1, 2) for t in (q, k, v)), causal).transpose(1, 2)
    )
    problem = prefill_of(batch=2, seqlen_q=96, seqlen_k=96, causal=causal, layout=layout)
    makers = prefill.makers_of(module, Config.of("prefill", {}), H200)
    del makers["portable"], makers["cudnn"], makers["flash"]  # these need a GPU
    makers["math"] = lambda inputs: right(inputs)
    contenders, left_out, errors = prefill.admitted("case", inputs_of(problem), makers)
    assert left_out == {}
    assert (
        set(contenders)
        == set(errors)
        == {
            "autoflash",
            "flex_attention",
            "flash_attention_3",
            "flash_attention_4",
            "math",
        }
    )
    for contender in contenders.values():  # and every set of inputs has a call of its own
        outs = [contender.out(number) for number in range(2)]
        assert len(contender.calls) == 2 and not torch.equal(*outs)


def test_a_peer_that_is_missing_or_wrong_is_named_and_not_timed(prefill):
    def missing(inputs):
        raise ImportError("No module named 'vllm'\nand more")

    def wrong(inputs):
        made = right(inputs)
        return Contender([lambda: made.calls[0]() * 1.1], made.shape)

    def shuffled(inputs):
        made = right(inputs)
        return Contender(made.calls, lambda out: out.transpose(1, 2))

    makers = {
        "autoflash": lambda inputs: right(inputs),
        "missing": missing,
        "wrong": wrong,
        "shuffled": shuffled,
    }
    contenders, left_out, errors = prefill.admitted("case", inputs_of(small()), makers)
    assert set(contenders) == {"autoflash"}
    assert left_out["missing"] == "ImportError: No module named 'vllm'"
    assert left_out["wrong"].startswith("wrong: out is off by")
    assert set(left_out) == {"missing", "wrong", "shuffled"}
    assert set(errors) == {"autoflash", "wrong"}


def test_the_benchmark_ends_when_autoflash_is_wrong(prefill):
    def wrong(inputs):
        return Contender([lambda: torch.zeros_like(inputs[0].q)])

    with pytest.raises(SystemExit, match="96 causal 96: autoflash: wrong: out is off by"):
        prefill.admitted("96 causal 96", inputs_of(small()), {"autoflash": wrong})


def test_of_a_long_output_rows_are_judged_and_all_of_it_must_be_finite(monkeypatch, prefill):
    monkeypatch.setattr(prefill, "WHOLE_SEQLEN", 64)
    problem = small(num_heads=16)  # 1536 rows, of which 64 are judged
    inputs = inputs_of(problem)
    judge = prefill.referee(inputs[0])
    out = right(inputs).calls[0]()
    assert judge(out).correct
    judged = prefill.sample_rows(problem, 0)
    other = next((0, h, i) for h in range(16) for i in range(96) if (0, h, i) not in judged)
    for row, fault, reason in (
        (judged[5], 1.1, "out is off by"),
        (other, float("nan"), "out is not finite"),
    ):
        faulty = out.clone()
        faulty[row] *= fault
        assert judge(faulty).reason.startswith(reason)


def test_a_causal_mask_aligned_top_left_is_no_peer_where_lengths_differ():
    problem = prefill_of(seqlen_q=64, seqlen_k=96, causal=True, layout="bhsd")
    with pytest.raises(Exception, match="aligned top-left"):
        right(inputs_of(problem))


def times_of(**medians: float) -> dict:
    return {
        name: turns.Times("graph", [us, us, 1.1 * us, 0.9 * us, us], [1600])
        for name, us in medians.items()
    }


def test_the_portable_family_is_no_peer_and_stands_beside_flex_attention(prefill):
    times = times_of(autoflash=10.0, portable=9.0, cudnn=11.0, flex_attention=18.0)
    result = prefill.result_of("name", small(), H200, times, {"flash": "why"})
    assert result["ratio"] == 1.1
    assert result["peers"] == {"cudnn": 11.0, "flex_attention": 18.0}
    assert (result["portable"], result["portable_over_flex"]) == (9.0, 2.0)
    assert result["unavailable"] == {"flash": "why"}
    assert set(result["tflops"]) == set(times)
    without = prefill.result_of("n", small(), H200, times_of(autoflash=1.0, flex=2.0), {})
    assert (without["portable"], without["portable_over_flex"]) == (None, None)


def test_the_interval_of_a_ratio_is_of_paired_rounds(prefill):
    """The clock halves every other round, for both alike."""
    drift = [1.0, 2.0] * 5
    times = {
        name: turns.Times("graph", [us * each for each in drift])
        for name, us in {"autoflash": 10.0, "cudnn": 11.0, "flash": 30.0}.items()
    }
    result = prefill.result_of("name", small(), H200, times, {})
    assert result["ratio_interval"] == {"peer": "cudnn", "low": 1.1, "high": 1.1}
    alone = prefill.result_of("name", small(), H200, {"autoflash": times["autoflash"]}, {})
    assert (alone["ratio"], alone["ratio_interval"]) == (None, None)


def test_the_summary_keeps_grid_and_grouped_heads_apart_and_names_the_worst(prefill):
    def result(name: str, kv_heads: int, us: float, peer: float, portable: float) -> dict:
        times = times_of(autoflash=us, cudnn=peer, flex_attention=peer, portable=portable)
        return prefill.result_of(name, small(num_kv_heads=kv_heads), H200, times, {})

    summary = prefill.summary_of(
        [result("a", 8, 10, 20, 40), result("b", 8, 10, 5, 5), result("c", 2, 10, 12, 24)]
    )
    assert summary["grid"] == {
        "cases": 2,
        "geometric_mean": 1.0,
        "worst": 0.5,
        "worst_case": "b",
    }
    assert summary["grouped_heads"]["geometric_mean"] == 1.2
    assert (summary["portable_over_flex"]["worst"], summary["portable_over_flex"]["cases"]) == (
        0.5,
        3,
    )


def test_all_portable_candidates_are_timed_alone_and_the_best_of_them_in_turn(monkeypatch, prefill):
    problem = small()
    configs = prefill.portable_configs(problem, H200)
    assert prefill.PORTABLE.default(problem, H200) in configs and len(configs) > prefill.RACED
    slow_alone = dict(zip(configs, range(len(configs), 0, -1), strict=True))
    calls_of = lambda config, gpu, inputs: SimpleNamespace(calls=[config])  # noqa: E731
    monkeypatch.setattr(prefill, "portable", calls_of)
    monkeypatch.setattr(prefill, "alone_us", lambda calls: slow_alone[calls[0]])

    def in_turn(raced, gpu_us):
        assert set(raced) == {str(config) for config in configs[-prefill.RACED :]}
        times = {str(config): float(place) for place, config in enumerate(configs[::-1])}
        return times_of(**{each: 9.0 - times[each] for each in raced})

    monkeypatch.setattr(prefill, "interleaved", in_turn)
    assert prefill.fastest(inputs_of(problem), configs, H200) == configs[-prefill.RACED]


def test_a_portable_config_that_fails_is_not_raced(monkeypatch, prefill):
    def fails():
        raise RuntimeError("does not fit")

    assert prefill.alone_us([fails]) == float("inf")
    problem = small()
    monkeypatch.setattr(prefill, "interleaved", None)
    default = prefill.PORTABLE.default(problem, H200)  # nothing can be launched without a GPU
    assert prefill.fastest(inputs_of(problem), [default], H200) == default


def test_a_binary_is_compiled_ahead_for_the_first_problem_that_needs_it(prefill):
    one, longer = small(), small(seqlen_q=256, seqlen_k=256)
    configs, seen = prefill.portable_configs(one, H200), set()
    first = prefill.new_binaries(one, configs, seen)
    assert len({prefill.PORTABLE.binary(config) for config in first}) == len(first)
    assert prefill.new_binaries(longer, configs, seen) == []
    assert prefill.new_binaries(small(causal=False), configs, seen) == first


def test_the_workload_is_the_grid_and_the_grouped_heads_and_names_tell_them_apart(prefill):
    problems = [p for p, _ in prefill.load_workload(prefill.WORKLOAD).problems]
    grid = [p for p in problems if p.group_size == 1]
    assert {(p.head_dim, p.causal, p.seqlen_q) for p in grid} == {
        (head_dim, causal, 512 << doubled)
        for head_dim in (64, 128, 256)
        for causal in (True, False)
        for doubled in range(6)
    }
    assert all(p.batch * p.seqlen_q == 16384 for p in grid)
    assert all(p.num_heads * p.head_dim == 2048 for p in grid)
    grouped = [p for p in problems if p.group_size > 1]
    assert {(p.batch, p.num_heads, p.num_kv_heads, p.seqlen_q) for p in grouped} == {
        (1, 32, 8, 512),
        (1, 32, 8, 2048),
        (1, 32, 8, 8192),
        (1, 32, 8, 32768),
        (1, 64, 8, 4096),
    }
    assert all(p.causal and p.head_dim == 128 for p in grouped)
    assert all(p.dtype == "bf16" and p.seqlen_q == p.seqlen_k for p in problems)
    assert len({prefill.name_of(p) for p in problems}) == len(problems) == 41


def test_results_say_the_device_the_versions_and_the_command(tmp_path, monkeypatch, harness):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    monkeypatch.setattr(harness, "detect", lambda: H200)
    monkeypatch.setattr(harness, "detect_toolchain", lambda: CHAIN)
    monkeypatch.setattr(sys, "argv", ["/where/benchmarks/prefill.py", "--cases", "128 causal"])
    case = harness.case_result({"name": "a"}, {"autoflash": 10.0, "cudnn": 12.0}, {})
    path = harness.write_results("prefill", [case], {"vllm": "0.22"}, summary={"worst": 1})
    written = json.loads(path.read_text())
    assert path.name == "prefill-NVIDIA_H200.json"
    assert written["command"] == "python benchmarks/prefill.py --cases '128 causal'"
    assert written["device"]["name"] == "NVIDIA H200"
    assert written["versions"] == {
        "driver": "580.1",
        "torch": "2.11.0",
        "triton": "3.6.0",
        "vllm": "0.22",
    }
    assert (written["cases"], written["summary"]) == ([case], {"worst": 1})
    assert case["ratio"] == 1.2


EXPORTED = """
import torch.nn.functional as F


def prefill(q, k, v, *, causal, layout):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def explain(call):
    call()
    return {"how": "exact", "family": "prefill", "knobs": {"BLOCK_M": 64}, "regret": 0.0}
"""
WORKLOAD = """
model: {dtype: bf16, num_heads: 2, num_kv_heads: 2, head_dim: 32}
prefill:
  - {seqlen_q: [64, 96], layout: bhsd}
"""


def test_a_run_goes_from_the_module_to_the_results(tmp_path, monkeypatch, prefill, harness, capsys):
    """The GPU, the clock and the peers that need one are made up; the rest is as it is run."""
    module, workload = tmp_path / "exported_by_test.py", tmp_path / "two.yaml"
    module.write_text(EXPORTED)
    workload.write_text(WORKLOAD)
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    for script in (prefill, harness):
        monkeypatch.setattr(script, "detect", lambda: H200)
    monkeypatch.setattr(prefill, "make_inputs", lambda problem, seed, _: make_inputs(problem, seed))

    def no_compiler(function, dynamic):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", no_compiler)

    def timed(contenders, gpu_us, pace):
        assert (gpu_us, pace) == (50_000, turns.STEADY)
        assert all(len(calls) == 64 for calls in contenders.values())  # tiny inputs, large L2
        return times_of(**dict.fromkeys(contenders, 10.0))

    monkeypatch.setattr(prefill, "interleaved", timed)
    arguments = ["--module", str(module), "--workload", str(workload), "--processes", "0"]
    monkeypatch.setattr(sys, "argv", ["benchmarks/prefill.py", *arguments, "--gpu-ms", "50"])
    prefill.main()
    written = json.loads((tmp_path / "prefill-NVIDIA_H200.json").read_text())
    assert [case["case"]["name"] for case in written["cases"]] == ["32 causal 64", "32 causal 96"]
    for case in written["cases"]:
        assert case["ours"] == 10.0
        assert case["portable_config"]["candidates"] > 1
        assert set(case["unavailable"]) == {"portable", *prefill.PEERS} - set(case["peers"])
        assert case["served"] == {"how": "exact", "family": "prefill", "knobs": {"BLOCK_M": 64}}
    assert "flash_attention_4 is left out: ModuleNotFoundError" in capsys.readouterr().out
