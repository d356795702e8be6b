"""Appending on a GPU: bytes as torch rounds them, large caches, and what decode reads of them."""

from dataclasses import replace

import pytest
import torch
from running import run

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.families.decode import FAMILY
from autoflash.inputs import KV_TORCH_DTYPES, make_inputs
from autoflash.problem import Problem, Variant
from autoflash.quantised import LIMITS
from autoflash.render import render
from autoflash.runtime.append import append_scale, append_switches
from autoflash.runtime.launch import run_plan
from autoflash.runtime.load import load_text

pytestmark = pytest.mark.gpu


def append(k, v, k_cache, v_cache, slots, kv_layout="nhd", k_scale=None, v_scale=None) -> None:
    switches = append_switches(k, v, k_cache, v_cache, slots, kv_layout, k_scale, v_scale)
    rendered = render(Variant("append_kv", "append_kv", **dict.fromkeys(switches, True)))
    module = load_text(f"{rendered.name}.py", rendered.text)
    scales = [append_scale(each, k.shape[1]) for each in (k_scale, v_scale) if each is not None]
    run_plan(module.plan(k, v, k_cache, v_cache, *scales, slots, kv_layout))


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_bytes_are_those_that_torch_rounds_to(kv_dtype: str) -> None:
    dtype = KV_TORCH_DTYPES[kv_dtype]
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, ties, ties.nextafter(every[1:]), ties.nextafter(every[:-1])])
    values = torch.cat([values, torch.randn(2**20) * 200, values.new_zeros(-len(values) % 256)])
    values = values.cuda().view(-1, 1, 256)
    limit = LIMITS[dtype]
    inside = values.clamp(-limit, limit)
    expected = (inside.round() if dtype == torch.int8 else inside).to(dtype)
    k_cache, v_cache = (torch.zeros(len(values), 1, 1, 256, device="cuda").to(dtype) for _ in "kv")
    append(values, values, k_cache, v_cache, torch.arange(len(values), device="cuda"), "nhd", 1, 1)
    assert torch.equal(bits(k_cache[:, 0]), bits(expected))
    assert torch.equal(bits(v_cache[:, 0]), bits(expected))


@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8_e4m3", "int8"])
def test_what_was_appended_in_any_order_is_what_decode_reads(kv_dtype: str, kv_layout: str) -> None:
    gpu = gpus.detect()
    p = Problem(
        *("decode", "bf16", 5, 32, 8, 128, 1, 1000),
        page_size=16,
        kv_layout=kv_layout,
        lengths="ragged",
        kv_dtype=kv_dtype,
        kv_scales="" if kv_dtype == "bf16" else "token",
    )
    inputs = make_inputs(p, device="cuda")
    assert inputs.cache_seqlens is not None and inputs.block_table is not None
    places = [
        inputs.block_table[b, place // 16] * 16 + place % 16
        for b, keys in enumerate(inputs.cache_seqlens.tolist())
        for place in (torch.arange(keys, device="cuda"),)
    ]
    slots = torch.cat(places).long()
    slots = slots[torch.randperm(len(slots), device="cuda")]
    k, v = (torch.randn(len(slots), 8, 128, device="cuda").bfloat16() for _ in "kv")
    scales = (inputs.k_scale, inputs.v_scale) if p.quantised else ()
    append(k, v, inputs.k, inputs.v, slots, kv_layout, *scales)
    for new, cache, scale in ((k, inputs.k, inputs.k_scale), (v, inputs.v, inputs.v_scale)):
        by_slot = (cache.transpose(1, 2) if kv_layout == "hnd" else cache).flatten(0, 1)[slots]
        if scale is None:
            assert torch.equal(by_slot, new)
            continue
        scale = (scale.transpose(1, 2) if kv_layout == "hnd" else scale).flatten(0, 1)[slots]
        largest = new.float().abs().amax(dim=-1)
        limit = torch.full_like(largest, LIMITS[cache.dtype])  # torch multiplies by 1 / a number
        assert torch.equal(scale, largest / limit)
    verdict = Budget(inputs).judge(*run(inputs, FAMILY.default(p, gpu), gpu=gpu))
    assert verdict.correct, verdict.reason


def test_a_slot_whose_place_passes_32_bits_is_written_there() -> None:
    k, v = (torch.randn(2, 8, 128, device="cuda").bfloat16() for _ in "kv")
    cache = torch.zeros(131_080, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    slots = torch.tensor([131_079 * 16 + 5, 131_072 * 16], device="cuda")
    append(k, v, cache, torch.zeros_like(cache), slots)
    assert torch.equal(cache[131_079, 5], k[0]) and torch.equal(cache[131_072, 0], k[1])
    assert cache.count_nonzero() == k.count_nonzero()


def test_a_captured_graph_follows_slots_that_change_in_place() -> None:
    p = Problem("decode", "bf16", 2, 4, 2, 64, 1, 64, page_size=16)
    inputs = make_inputs(p, device="cuda", poison=False)
    inputs = replace(inputs, k=torch.zeros_like(inputs.k), v=torch.zeros_like(inputs.v))
    k, v = (torch.randn(3, 2, 64, device="cuda").bfloat16() for _ in "kv")
    slots = torch.tensor([5, 40, -1], device="cuda")
    append(k, v, inputs.k, inputs.v, slots)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        append(k, v, inputs.k, inputs.v, slots)
    slots.copy_(torch.tensor([-1, 7, 127], device="cuda"))
    graph.replay()
    by_slot = inputs.k.flatten(0, 1)
    assert torch.equal(by_slot[[5, 40, 7, 127]], k[[0, 1, 1, 2]])
