"""The decode benchmark without a GPU: who takes part, whose time counts, and what is told."""

import importlib
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from making import decode_of
from torch.nn.attention import SDPBackend

from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import decode as decode_peers
from autoflash.peers.contender import Contender
from autoflash.problem import Problem
from autoflash.reference import eager
from autoflash.turns import Times
from autoflash.workload import load_workload

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def peers(monkeypatch, scripts) -> ModuleType:
    monkeypatch.setitem(sys.modules, "read_floor", ModuleType("read_floor"))  # it holds a kernel
    sys.modules["read_floor"].fastest_readers = lambda inputs, num_sms: []
    return importlib.import_module("decode_peers")


@pytest.fixture
def decode(peers) -> ModuleType:
    return importlib.import_module("decode")


def small(**changes) -> Problem:
    return decode_of(**{"batch": 3, "seqlen_k": 64, "page_size": 16, **changes})


def inputs_of(problem: Problem, sets: int = 2) -> list[Inputs]:
    return [make_inputs(problem, seed) for seed in range(sets)]


def attention(q, k, v) -> torch.Tensor:
    """Of the last tokens of a sequence, (tokens, heads, d) each: every query up to its own key."""
    rows, keys = len(q), len(k)
    visible = torch.arange(keys)[None] <= torch.arange(rows)[:, None] + keys - rows
    heads_first = (t.transpose(0, 1)[None].float() for t in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = F.scaled_dot_product_attention(*heads_first, attn_mask=visible, enable_gqa=gqa)
    return out[0].transpose(0, 1).to(torch.bfloat16)


def over_pages(q, k, v, starts_q, lengths, pages_of, scales=(1.0, 1.0)) -> torch.Tensor:
    """Attention over caches that are nhd by strides; `pages_of(b)` are the ids of a sequence."""
    outs = []
    for b, keys in enumerate(lengths.tolist()):
        ids = pages_of(b)[: -(-keys // k.shape[1])].long()
        stored = (cache.float()[ids].flatten(0, 1)[:keys] for cache in (k, v))
        one_k, one_v = (each * scale for each, scale in zip(stored, scales, strict=True))
        outs.append(attention(q[starts_q[b] : starts_q[b + 1]].bfloat16(), one_k, one_v))
    return torch.cat(outs)


class FakeWrapper:
    """FlashInfer's wrappers: what is planned and run is what their documentation says."""

    def __init__(self, workspace, layout, use_tensor_cores=None):
        assert workspace.dtype == torch.uint8
        self.hnd = {"NHD": False, "HND": True}[layout]

    def run(self, q, caches, k_scale=1.0, v_scale=1.0):
        k, v = (cache.transpose(1, 2) if self.hnd else cache for cache in caches)
        pages = [self.indices[a:b] for a, b in zip(self.indptr, self.indptr[1:], strict=False)]
        full = torch.tensor([len(ids) - 1 for ids in pages]) * self.page_size
        assert k.shape[1] == self.page_size and q.dtype == self.q_type and k.dtype == self.kv_type
        lengths = full + self.last
        return over_pages(q, k, v, self.starts, lengths, pages.__getitem__, (k_scale, v_scale))

    def keep(self, indptr, indices, last, page_size, q_data_type, kv_data_type):
        self.indptr, self.indices, self.last, self.page_size = indptr, indices, last, page_size
        self.q_type, self.kv_type = q_data_type, kv_data_type
        assert indptr.dtype == indices.dtype == last.dtype == torch.int32


class FakeDecode(FakeWrapper):
    def plan(self, indptr, indices, last, heads, kv_heads, head_dim, page_size, **types):
        self.keep(indptr, indices, last, page_size, **types)
        self.starts = range(len(indptr))


class FakePrefill(FakeWrapper):
    def plan(
        self,
        qo_indptr,
        indptr,
        indices,
        last,
        heads,
        kv_heads,
        head_dim,
        page_size,
        *,
        causal,
        **types,
    ):
        assert causal
        self.keep(indptr, indices, last, page_size, **types)
        self.starts = qo_indptr.tolist()


def fake_libraries(monkeypatch) -> None:
    """Stand-ins with the arguments of the libraries; each computes from what it is given."""

    def three(q, k, v, *, max_seqlen_q, cu_seqlens_q, max_seqlen_k, seqused_k, block_table, **rest):
        scales = (1.0, 1.0)
        if k.dtype == torch.float8_e4m3fn:
            assert q.dtype == k.dtype and (rest.pop("q_descale") == 1).all()
            scales = rest.pop("k_descale")[0, 0], rest.pop("v_descale")[0, 0]
        assert rest == {"causal": True, "fa_version": 3}
        assert max_seqlen_q == cu_seqlens_q[1] and max_seqlen_k >= seqused_k.max()
        assert cu_seqlens_q.dtype == torch.int32
        return over_pages(q, k, v, cu_seqlens_q, seqused_k, block_table.__getitem__, scales)

    def four(q, k, v, *, cu_seqlens_q, seqused_k, page_table, causal):
        assert causal
        return over_pages(q, k, v, cu_seqlens_q, seqused_k, page_table.__getitem__), None

    def unified(
        q,
        k,
        v,
        out,
        cu_seqlens_q,
        max_seqlen_q,
        seqused_k,
        max_seqlen_k,
        softmax_scale,
        causal,
        window_size,
        block_table,
        softcap,
        q_descale,
        k_descale,
        v_descale,
        seq_threshold_3D=None,
        num_par_softmax_segments=None,
        softmax_segm_output=None,
        softmax_segm_max=None,
        softmax_segm_expsum=None,
    ):
        assert (causal, window_size, softcap, q_descale) == (True, (-1, -1), 0.0, None)
        assert softmax_scale == q.shape[2] ** -0.5 and seq_threshold_3D == 128 // k.shape[2]
        rows = softmax_segm_output.shape[:3]
        assert rows == softmax_segm_max.shape == softmax_segm_expsum.shape
        assert rows[1:] == (q.shape[1], num_par_softmax_segments) and rows[0] >= len(q)
        scales = (1.0, 1.0)
        if k_descale is not None:
            assert k_descale.shape == v_descale.shape == (len(seqused_k), k.shape[2])
            scales = k_descale[0, 0], v_descale[0, 0]
        out.copy_(over_pages(q, k, v, cu_seqlens_q, seqused_k, block_table.__getitem__, scales))

    held = {
        "flashinfer": {
            "BatchDecodeWithPagedKVCacheWrapper": FakeDecode,
            "BatchPrefillWithPagedKVCacheWrapper": FakePrefill,
        },
        "vllm.vllm_flash_attn.flash_attn_interface": {"flash_attn_varlen_func": three},
        "flash_attn.cute.interface": {"flash_attn_varlen_func": four},
        "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": unified},
    }
    for name, functions in held.items():
        parts = name.split(".")
        for count in range(1, len(parts)):
            monkeypatch.setitem(sys.modules, ".".join(parts[:count]), ModuleType(name))
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)


def exported() -> ModuleType:
    """An exported module whose decode() is the eager computation."""

    def decode(q, k, v, cache_seqlens, *, block_table, kv_layout, k_scale, v_scale, **hints):
        one = next(one for one in known if one.k is k)
        assert (q.dim() == 3) == (one.problem.seqlen_q == 1)
        assert kv_layout == one.problem.kv_layout and k_scale is one.k_scale
        assert hints == {"max_seqlen_k": 64, "lengths": one.problem.lengths, **pages(one)}
        out = eager(one)[0]
        return out[:, 0] if q.dim() == 3 else out

    def pages(one):
        return {"pages": one.problem.pages} if one.problem.paged else {}

    known: list[Inputs] = []
    module = ModuleType("exported")
    module.decode, module.known = decode, known
    return module


PAGED_ALONE = ("flashinfer", "flash_attention_3", "flash_attention_4", "vllm_triton")


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        ({}, ("cudnn",)),
        ({"lengths": "ragged", "batch": 8}, ("cudnn",)),
        ({"page_size": 0}, ()),
        ({"page_size": 0, "kv_layout": "hnd"}, PAGED_ALONE),
        ({"kv_layout": "hnd", "page_size": 32, "lengths": "ragged"}, ("cudnn",)),
        ({"seqlen_q": 4, "lengths": "ragged"}, ("cudnn",)),
        ({"kv_dtype": "fp8_e4m3"}, ("cudnn", "flash_attention_4")),
        ({"kv_dtype": "fp8_e4m3", "seqlen_q": 2}, ("cudnn", "flash_attention_4")),
    ],
    ids=str,
)
def test_every_peer_is_called_so_that_its_result_is_right(
    monkeypatch, decode, peers, changes, absent
):
    fake_libraries(monkeypatch)
    # cuDNN needs a GPU
    monkeypatch.setitem(
        peers.PEERS, "cudnn", lambda inputs: decode_peers.sdpa(SDPBackend.MATH, inputs)
    )
    problem, module = small(**changes), exported()
    inputs = inputs_of(problem)
    module.known += inputs
    makers = decode.makers_of(module, problem, list(peers.PEERS), hints=True)
    contenders, left_out, imprecise, errors = decode.admitted("case", inputs, makers)
    assert set(left_out) == set(absent), left_out
    assert set(contenders) == set(errors) == {"autoflash", *peers.PEERS} - set(absent)
    # queries that are rounded to fp8 show in the error
    assert set(imprecise) == ({"flash_attention_3"} if problem.quantised else set())
    for contender in contenders.values():  # and every set of inputs has a call of its own
        assert len(contender.calls) == 2
        assert not torch.equal(contender.out(0), contender.out(1))


def test_a_cache_that_a_peer_does_not_read_leaves_it_out_with_the_reason(
    monkeypatch, decode, peers
):
    fake_libraries(monkeypatch)
    for changes, reasons in (
        ({"kv_dtype": "int8"}, {"flashinfer": "no int8", "flash_attention_3": "no int8"}),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": "token"}, {"vllm_triton": "no scale for each"}),
        ({"kv_dtype": "fp8_e4m3", "kv_scales": "head"}, {"flashinfer": "one scale for all of K"}),
    ):
        inputs, module = inputs_of(small(**changes)), exported()
        module.known += inputs
        makers = decode.makers_of(module, small(**changes), list(peers.PEERS), hints=True)
        _, left_out, _, _ = decode.admitted("case", inputs, makers)
        for peer, reason in reasons.items():
            assert reason in left_out[peer]


def test_the_benchmark_ends_when_autoflash_is_wrong(decode):
    inputs = inputs_of(small())

    def wrong(inputs):
        return Contender([lambda: inputs[0].q * 0.5], lambda out: out)

    with pytest.raises(SystemExit, match="the case: autoflash: out is off by"):
        decode.admitted("the case", inputs, {"autoflash": wrong})

    def nothing(inputs):
        return Contender([lambda: inputs[0].q * float("nan")], lambda out: out)

    right = Contender([lambda: eager(inputs[0])[0]], lambda out: out)
    makers = {"autoflash": lambda inputs: right, "nothing": nothing}
    _, left_out, _, _ = decode.admitted("the case", inputs, makers)
    assert left_out == {"nothing": "wrong: out is not finite"}


def times_of(**medians: float) -> dict:
    return {
        name: Times("graph", [us, us, 1.1 * us, 0.9 * us, us], [1600])
        for name, us in medians.items()
    }


def test_a_read_and_a_less_precise_peer_stand_beside_and_are_no_peers(decode):
    times = times_of(autoflash=10.0, flashinfer=11.0, flash_attention_3=6.0, read=9.0)
    imprecise = {"flash_attention_3": "out is off"}
    served = {"how": "exact"}
    result = decode.result_of("name", small(), times, {"cudnn": "why"}, imprecise, served=served)
    assert (result["ratio"], result["peers"]) == (1.1, {"flashinfer": 11.0})
    assert result["imprecise"] == {"flash_attention_3": [6.0, "out is off"]}
    assert (result["read_us"], result["of_read_percent"]) == (9.0, 90.0)
    assert result["ratio_interval"]["peer"] == "flashinfer"
    assert result["unavailable"] == {"cudnn": "why"}
    alone = times_of(autoflash=10.0)
    assert decode.result_of("name", small(), alone, {}, {})["ratio"] is None


def test_a_cliff_is_a_point_slower_than_one_with_more_work(decode):
    def point(batch: int, keys: int, us: float, **changes) -> dict:
        case = {"batch": batch, "seqlen_k": keys, "lengths": "equal", **changes}
        return {"case": {"name": f"{batch} {keys}", **case}, "ours": us}

    smooth = [point(1, 64, 10), point(1, 128, 10), point(2, 64, 9.5), point(2, 128, 20)]
    assert decode.cliffs(smooth) == []
    steep = [*smooth, point(4, 128, 15), point(8, 64, 1, lengths="ragged")]
    assert decode.cliffs(steep) == ["2 128 20 us, 4 128 15 us"]


def test_the_summary_names_the_worst_case_of_each_workload(decode):
    def result(workload: str, name: str, ratio: float | None, batch: int) -> dict:
        case = {"name": name, "batch": batch, "seqlen_k": 1}
        return {"workload": workload, "case": case, "ratio": ratio, "ours": 1.0}

    results = [result("one", "a", 1.0, 1), result("one", "b", 4.0, 2)]
    results += [result("two", "c", 0.5, 3), result("two", "d", None, 4)]
    summary = decode.summary_of(results)
    assert summary["one"]["geometric_mean"] == 2.0
    assert (summary["two"]["cases"], summary["two"]["worst_case"]) == (1, "c")


def test_the_cases_have_names_of_their_own_and_cover_what_decode_must_show(decode):
    problems = [p for path in decode.WORKLOADS for p, _ in load_workload(path).problems]
    names = {decode.name_of(p): p for p in problems}
    assert len(names) == len(set(problems))
    assert len(load_workload(decode.WORKLOADS[0]).problems) == 20
    assert {0, 1, 16, 64, 128} <= {p.page_size for p in problems}
    assert {"nhd", "hnd"} == {p.kv_layout for p in problems}
    assert {"fp8_e4m3", "int8", "bf16"} == {p.kv_dtype for p in problems}
    assert {"permuted", "contiguous", "shared"} <= {p.pages for p in problems}
    assert {1, 4, 16} == {p.seqlen_q for p in problems}
    assert max(p.batch for p in problems) == 256
    assert max(p.seqlen_k for p in problems) == 131072
    for p in problems:  # what a quantised case or one of several queries is compared with
        plain = replace(p, kv_dtype="", kv_scales="", seqlen_q=1)
        assert plain in problems or p.batch in (1, 8)
