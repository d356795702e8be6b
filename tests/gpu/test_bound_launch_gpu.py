"""Bound launches on a GPU: the bits that triton's own launches give, wherever a call may come from.

The module is that of the shipped winners; of the two in each test one never binds.
"""

import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import pytest
import torch
import triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
    ),
]

NUMBERS = count()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env={**os.environ, "AUTOFLASH_DB": f"{path}.db"})
    return path


def imported(path):
    spec = importlib.util.spec_from_file_location(f"bound_dispatch_{next(NUMBERS)}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(path):
    return imported(path)


@pytest.fixture
def plain(path):
    module = imported(path)
    module.bind_recipe = lambda *_: None
    return module


def normal(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda").to(dtype)


def prefill(head_dim, seqlen_q=512, seqlen_k=512, **more):
    """Calls of prefill with new tensors each time, as keywords."""

    def make():
        q = normal(1, seqlen_q, 8, head_dim)
        k, v = (normal(1, seqlen_k, 2, head_dim) for _ in "kv")
        return {"q": q, "k": k, "v": v, "causal": True, **more}

    return "prefill", make


def packed(**more):
    def make():
        starts = torch.tensor([0, 30, 530, 1000], device="cuda", dtype=torch.int32)
        q, k, v = normal(1000, 8, 128), normal(1000, 2, 128), normal(1000, 2, 128)
        both = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        sizes = {"max_seqlen_q": 500, "max_seqlen_k": 500, "layout": "thd"}
        return {"q": q, "k": k, "v": v, "causal": True, **both, **sizes, **more}

    return "prefill", make


def decode(batch, keys, paged=True, **more):
    def make():
        q = normal(batch, 32, 128)
        lengths = torch.randint(1, keys, (batch,), device="cuda", dtype=torch.int32)
        call = {"q": q, "cache_seqlens": lengths, "return_lse": True, **more}
        if not paged:
            return {
                **call,
                **{name: normal(batch, keys, 8, 128) for name in ("k_cache", "v_cache")},
            }
        pages = batch * keys // 16
        table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(batch, -1)
        caches = {name: normal(pages, 16, 8, 128) for name in ("k_cache", "v_cache")}
        return {**call, **caches, "block_table": table}

    return "decode", make


def chunks(packed=False, **more):
    def make():
        lengths = torch.randint(100, 800, (3,), device="cuda", dtype=torch.int32)
        table = torch.randperm(150, device="cuda", dtype=torch.int32).view(3, 50)
        k, v = (normal(150, 16, 2, 128) for _ in "kv")
        q = normal(300, 8, 128) if packed else normal(3, 100, 8, 128)
        call = {"k": k, "v": v, "cache_seqlens": lengths, "block_table": table, "causal": True}
        if packed:
            starts = torch.tensor([0, 1, 200, 300], device="cuda", dtype=torch.int32)
            call |= {"cu_seqlens_q": starts, "max_seqlen_q": 199}
        return {"q": q, **call, **more}

    return "prefill", make


CALLS = [
    prefill(128),
    prefill(64, return_lse=True),
    prefill(128, 77, 300),
    prefill(128, window=(63, 0)),
    prefill(64, softcap=20.0),
    packed(return_lse=True),
    chunks(return_lse=True),
    chunks(packed=True, window=(90, 0)),
    decode(8, 1024),
    decode(1, 32768),
    decode(3, 777, paged=False),
    decode(200, 512),
]


def results(module, function, call):
    result = getattr(module, function)(**call)
    return result if isinstance(result, tuple) else (result,)


def equal(ours, theirs):
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize(("function", "make"), CALLS)
def test_bound_launches_give_the_bits_of_tritons_own(function, make, module, plain):
    for number in range(5):
        call = make()
        assert equal(results(module, function, call), results(plain, function, call)), number
    assert [served.bound is not None for served in module._served.values()] == [True]
    assert len(module._remembered) == 1


def test_appending_is_bound_too(module, plain):
    for dtype, scales in ((torch.bfloat16, {}), (torch.float8_e4m3fn, {"k_scale": 0.5})):
        for _ in range(4):
            k, v = normal(7, 8, 128), normal(7, 8, 128)
            slots = torch.randperm(64, device="cuda")[:7]
            caches = [torch.zeros(4, 16, 8, 128, device="cuda").to(dtype) for _ in range(4)]
            scaled = {**scales, "v_scale": torch.rand(8, device="cuda") + 1} if scales else {}
            module.append_kv(k, v, *caches[:2], slots, **scaled)
            plain.append_kv(k, v, *caches[2:], slots, **scaled)
            for ours, theirs in zip(caches[:2], caches[2:], strict=True):
                assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
    assert all(served.bound for served in module._served.values())


def test_a_misaligned_tensor_after_aligned_ones_is_right(module, plain):  # case S10
    _, make = prefill(128)
    for _ in range(3):
        results(module, "prefill", make())
    for name in ("q", "k", "v"):
        call = make()
        rows = call[name].shape[1] * call[name].shape[2]
        flat = torch.empty(rows * 128 + 1, device="cuda", dtype=torch.bfloat16)[1:]
        call[name] = flat.view(call[name].shape).copy_(call[name])
        assert equal(results(module, "prefill", call), results(plain, "prefill", call))
        wide = torch.empty(1, call[name].shape[1], 1953, device="cuda", dtype=torch.bfloat16)
        view = wide[..., : call[name].shape[2] * 128].unflatten(-1, (-1, 128))
        call[name] = view.copy_(call[name])
        assert equal(results(module, "prefill", call), results(plain, "prefill", call))


def test_other_streams_and_threads_are_served(module, plain):
    function, make = decode(8, 1024)
    calls = [make() for _ in range(24)]
    expected = [results(plain, function, call) for call in calls]
    results(module, function, calls[0])
    torch.cuda.synchronize()

    def on_a_stream(call):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            result = results(module, function, call)
        stream.synchronize()
        return result

    with ThreadPoolExecutor(6) as pool:
        for ours, theirs in zip(pool.map(on_a_stream, calls), expected, strict=True):
            assert equal(ours, theirs)


def test_a_bound_call_is_captured_and_its_replay_follows_what_it_reads(module, plain):
    function, make = decode(8, 1024)
    call = make()
    for _ in range(3):
        results(module, function, call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results(module, function, call)
    for _ in range(3):
        for name, tensor in make().items():
            if isinstance(tensor, torch.Tensor):
                call[name].copy_(tensor)
        graph.replay()
        assert equal(captured, results(plain, function, call))


def test_modes_of_autograd_change_no_bit(module, plain):
    function, make = prefill(128)
    call = make()
    expected = results(plain, function, call)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for _ in range(3):
            with mode():
                assert equal(results(module, function, call), expected)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_each_device_has_launches_of_its_own(module, plain):
    function, make = prefill(128)
    for _ in range(3):
        call = make()
        expected = results(plain, function, call)
        there = {
            name: each.to("cuda:1") if isinstance(each, torch.Tensor) else each
            for name, each in call.items()
        }
        (first,) = results(module, function, there)  # while device 0 is the current one
        with torch.cuda.device(1):
            (second,) = results(module, function, there)
        assert equal(results(module, function, call), expected)
        assert equal((first.to("cuda:0"), second.to("cuda:0")), (*expected, *expected))
