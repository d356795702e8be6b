"""The overhead benchmark without a GPU: what is called, how often, and who is left out."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autoflash.inputs import make_inputs
from autoflash.runtime.schemas import DECODE_LEFT_OUT, PREFILL_LEFT_OUT

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def overhead(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    return importlib.import_module("overhead")


def small(problem):
    sizes = {"seqlen_q": min(problem.seqlen_q, 8), "seqlen_k": 32, "num_heads": 4}
    return make_inputs(replace(problem, num_kv_heads=1, head_dim=16, head_dim_v=16, **sizes))


@pytest.mark.parametrize("op", ["prefill", "decode"])
def test_each_way_calls_the_modules_function_with_out_or_without(overhead, op):
    asked = []
    module = SimpleNamespace(**{op: lambda *tensors, **more: asked.append((tensors, more))})
    inputs = small(overhead.PREFILL if op == "prefill" else overhead.DECODE)
    ways = {"prefill": overhead.prefill_calls, "decode": overhead.decode_calls}[op](module)
    for way in ("out given", "direct"):
        ways[way](inputs)()
        tensors, more = asked[-1]
        assert (more.get("out") is not None) == (way == "out given")
        if more.get("out") is not None:
            assert more["out"].shape == tensors[0].shape
    assert len(asked) == 2


def test_the_operators_are_given_what_the_functions_are(overhead, monkeypatch):
    asked = {}

    def operator(name):
        return SimpleNamespace(default=lambda *given: asked.update({name: given}))

    operators = SimpleNamespace(prefill=operator("prefill"), decode=operator("decode"))
    monkeypatch.setattr(torch.ops, "overhead_test", operators, raising=False)
    module = SimpleNamespace(operator_namespace=lambda: "overhead_test")
    overhead.prefill_calls(module)["operator"](small(overhead.PREFILL))()
    overhead.decode_calls(module)["operator"](small(overhead.DECODE))()
    prefill, decode = (
        dict(zip(options, asked[name][place:], strict=False))
        for name, place, options in (
            ("prefill", 3, PREFILL_LEFT_OUT),
            ("decode", 4, DECODE_LEFT_OUT),
        )
    )
    assert prefill == {"causal": True}
    assert list(decode) == ["block_table", "max_seqlen_k"] and decode["max_seqlen_k"] == 32


def test_every_contender_is_called_as_often_in_turn(overhead, monkeypatch):
    monkeypatch.setattr(overhead, "ROUNDS", 4)
    called = []
    calls = {name: lambda name=name: called.append(name) for name in ("autoflash", "peer")}
    times = overhead.host_times(calls)
    rounds = overhead.ROUNDS + overhead.UNTIMED
    assert [called.count(name) for name in calls] == [rounds * overhead.CALLS] * 2
    assert set(times) == set(calls) and min(times.values()) > 0
    turns = called[:: overhead.CALLS]
    assert turns.count("autoflash") == rounds and turns[-2:] != turns[-4:-2]


def test_each_way_stands_beside_the_same_times_of_the_peers(overhead):
    times = {"out given": 6.0, "direct": 8.0, "sdpa": 16.0}
    given, direct = overhead.cases_of("prefill", times, {"out given": 1, "direct": 2}, {})
    assert given["case"] == {"op": "prefill", "way": "out given", "launches": 1}
    assert (given["ours"], direct["ours"], direct["case"]["launches"]) == (6.0, 8.0, 2)
    assert given["peers"] == direct["peers"] == {"sdpa": 16.0} and direct["ratio"] == 2.0


def test_nothing_is_timed_once_a_profiler_has_listened(overhead, monkeypatch):
    order = []

    def noting(name, result):
        return lambda *_, **__: order.append(name) or result

    stubs = {"load_module": SimpleNamespace(operator_namespace=str), "make_inputs": None}
    stubs |= {name: {} for name in ("prefill_makers", "decode_makers", "peer_versions")}
    stubs |= {name: {"direct": lambda one: None} for name in ("prefill_calls", "decode_calls")}
    stubs |= {"host_times": {"direct": 1.0}, "launches_of": 1, "write_results": ""}
    for name, result in stubs.items():
        monkeypatch.setattr(overhead, name, noting(name, result))
    has_kernel = "_dispatch_has_kernel_for_dispatch_key"
    monkeypatch.setattr(torch._C, has_kernel, lambda *_: False)
    monkeypatch.setattr("sys.argv", ["overhead.py"])
    overhead.main()
    measured = [name for name in order if name in ("host_times", "launches_of")]
    assert measured == ["host_times"] * 2 + ["launches_of"] * 2


def test_a_peer_that_raises_is_left_out_with_the_reason(overhead):
    def missing(inputs):
        raise ModuleNotFoundError("No module named 'flashinfer'")

    calls, left_out = overhead.admitted({"flashinfer": missing, "here": lambda one: dict}, None)
    assert set(calls) == {"here"}
    assert left_out == {"flashinfer": "ModuleNotFoundError: No module named 'flashinfer'"}


def test_sdpa_gets_heads_first(overhead):
    inputs = small(overhead.PREFILL)
    call = overhead.prefill_makers()["sdpa"](inputs)
    out = call()
    assert out.shape == inputs.q.transpose(1, 2).shape and torch.isfinite(out).all()
