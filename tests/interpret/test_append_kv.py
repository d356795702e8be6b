"""Appending in the interpreter: the right slots and nothing else, bytes to the nearest."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from decoding import NAN

from autoflash.accuracy import Budget
from autoflash.inputs import Inputs
from autoflash.problem import Problem, Variant
from autoflash.quantised import LIMITS
from autoflash.render import render
from autoflash.runtime.append import append_scale, append_switches
from autoflash.runtime.launch import run_plan
from autoflash.runtime.load import load_text

FP8, INT8 = torch.float8_e4m3fn, torch.int8
each_type = pytest.mark.parametrize("dtype", [FP8, INT8], ids=["fp8", "int8"])


def append(k, v, k_cache, v_cache, slots, kv_layout="nhd", k_scale=None, v_scale=None) -> None:
    switches = append_switches(k, v, k_cache, v_cache, slots, kv_layout, k_scale, v_scale)
    rendered = render(Variant("append_kv", "append_kv", **dict.fromkeys(switches, True)))
    module = load_text(f"{rendered.name}.py", rendered.text)
    scales = [append_scale(each, k.shape[1]) for each in (k_scale, v_scale) if each is not None]
    run_plan(module.plan(k, v, k_cache, v_cache, *scales, slots, kv_layout))


def tokens(count: int, heads: int, head_dim: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(count, heads, head_dim, generator=generator).to(dtype) for _ in "kv"]


def caches(*shape: int, dtype=torch.bfloat16) -> list[torch.Tensor]:
    """Full of what no test writes: NaN, and bytes of all ones."""
    if dtype.itemsize == 1:
        return [torch.full(shape, 0xFF, dtype=torch.uint8).view(dtype) for _ in "kv"]
    return [torch.full(shape, NAN, dtype=dtype) for _ in "kv"]


def in_slots(cache: torch.Tensor, kv_layout: str = "nhd") -> torch.Tensor:
    """The cache, or scales of its shape, by slot."""
    return (cache.transpose(1, 2) if kv_layout == "hnd" else cache).flatten(0, 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def steps(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What torch stores for values at a scale."""
    limit = LIMITS[dtype]
    inside = (values.float() / scale).clamp(-limit, limit)
    return (inside.round() if dtype == INT8 else inside).to(dtype)


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_each_token_goes_to_its_slot_and_no_other_slot_changes(
    page_size: int, kv_layout: str, index_dtype: torch.dtype
) -> None:
    k, v = tokens(6, 3, 40)
    shape = (30, page_size, 3, 40) if kv_layout == "nhd" else (30, 3, page_size, 40)
    k_cache, v_cache = caches(*shape)
    end = 30 * page_size
    slots = torch.tensor([end - 1, 7, -1, 0, end, -(2**31)], dtype=index_dtype)
    append(k, v, k_cache, v_cache, slots, kv_layout)
    for new, cache in ((k, k_cache), (v, v_cache)):
        by_slot = in_slots(cache, kv_layout)
        assert torch.equal(by_slot[[end - 1, 7, 0]], new[[0, 1, 3]])
        untouched = torch.ones(end, dtype=torch.bool)
        untouched[[end - 1, 7, 0]] = False
        assert by_slot[untouched].isnan().all()


def test_strided_tokens_and_caches_are_written_where_they_are() -> None:
    k, v = tokens(4, 2, 32)
    qkv = torch.full((4, 2, 3, 32), NAN, dtype=torch.bfloat16)  # as a projection gives them
    qkv[:, :, 1], qkv[:, :, 2] = k, v
    interleaved = torch.full((5, 2, 16, 2, 40), NAN, dtype=torch.bfloat16)
    k_cache, v_cache = interleaved[:, 0, ..., :32], interleaved[:, 1, ..., :32]
    spread = torch.tensor([[70, 99], [3, 99], [-1, 99], [79, 99]])
    append(qkv[:, :, 1], qkv[:, :, 2], k_cache, v_cache, spread[:, 0])
    for new, cache in ((k, k_cache), (v, v_cache)):
        assert torch.equal(in_slots(cache)[[70, 3, 79]], new[[0, 1, 3]])
    assert interleaved.isfinite().sum() == 2 * 3 * 2 * 32


def test_a_slot_whose_place_passes_32_bits_is_written_there() -> None:
    k, v = tokens(2, 8, 128, torch.float16)
    cache = torch.zeros(131_080, 16, 8, 128, dtype=torch.float16)  # 4.3 GB, of which 2 pages count
    append(k, v, cache, torch.zeros_like(cache), torch.tensor([131_079 * 16 + 5, 131_072 * 16]))
    assert torch.equal(cache[131_079, 5], k[0]) and torch.equal(cache[131_072, 0], k[1])


@each_type
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16, torch.float32])
def test_bytes_are_those_that_torch_rounds_to(dtype: torch.dtype, source: torch.dtype) -> None:
    k, v = tokens(5, 3, 64, source)
    k_cache, v_cache = caches(2, 8, 3, 64, dtype=dtype)
    slots = torch.tensor([15, 0, 3, 9, 8])
    heads = torch.tensor([0.01, 0.02, 0.04])
    spread = torch.full((3, 2), NAN)
    spread[:, 1] = heads.flip(0)
    for scales in ((heads, 0.03), (torch.tensor(0.03), spread[:, 1])):
        append(k, v, k_cache, v_cache, slots, k_scale=scales[0], v_scale=scales[1])
        for new, cache, scale in zip((k, v), (k_cache, v_cache), scales, strict=True):
            step = torch.as_tensor(scale).reshape(-1, 1)
            assert torch.equal(bits(in_slots(cache)[slots]), bits(steps(new, step, dtype)))


@each_type
def test_every_value_between_two_bytes_goes_to_the_nearer_one(dtype: torch.dtype) -> None:
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()].sort().values
    ties = (every[1:] + every[:-1]) / 2
    values = torch.cat([every, ties, ties.nextafter(every[1:]), ties.nextafter(every[:-1])])
    beyond = torch.tensor([1e4, -1e4, 1e38, float("inf"), -float("inf")])
    values = torch.cat([values, beyond])
    values = torch.cat([values, values.new_zeros(-len(values) % 256)]).view(-1, 1, 256)
    cache, other = caches(len(values), 1, 1, 256, dtype=dtype)
    one = {"k_scale": 1.0, "v_scale": 1.0}
    append(values, values, cache, other, torch.arange(len(values)), **one)
    assert torch.equal(bits(cache[:, 0]), bits(steps(values, torch.tensor(1.0), dtype)))


def test_what_is_no_number_stays_none() -> None:
    values = torch.ones(1, 1, 32)
    values[0, 0, 5] = NAN
    cache, other = caches(1, 1, 1, 32, dtype=FP8)
    append(values, values, cache, other, torch.tensor([0]), k_scale=1.0, v_scale=1.0)
    assert cache.float().isnan()[0, 0, 0].nonzero().tolist() == [[5]]
    cache, other = caches(2, 1, 1, 32, dtype=INT8)  # which has no NaN: the scale has
    scales = [torch.zeros(2, 1, 1) for _ in "kv"]
    append(values, values, cache, other, torch.tensor([1]), "nhd", *scales)
    assert scales[0][1].isnan().all() and (scales[0][0] == 0).all()


@each_type
@pytest.mark.parametrize("kv_layout", ["nhd", "hnd"])
def test_a_head_of_a_token_gets_the_scale_of_its_largest(
    dtype: torch.dtype, kv_layout: str
) -> None:
    k, v = tokens(5, 3, 40)
    k[2, 1] = 0.0
    shape = (4, 8, 3) if kv_layout == "nhd" else (4, 3, 8)
    k_cache, v_cache = caches(*shape, 40, dtype=dtype)
    k_scale, v_scale = torch.full(shape, NAN), torch.full(shape, NAN)
    slots = torch.tensor([31, 0, 13, -1, 8])
    append(k, v, k_cache, v_cache, slots, kv_layout, k_scale, v_scale)
    written = torch.tensor([0, 1, 2, 4])
    for new, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        largest = new[written].float().abs().amax(dim=-1)
        stored_scale = in_slots(scale, kv_layout)[slots[written]]
        assert torch.equal(stored_scale, largest / LIMITS[dtype])
        step = stored_scale.where(stored_scale > 0, 1.0)[..., None]
        stored = in_slots(cache, kv_layout)[slots[written]]
        assert torch.equal(bits(stored), bits(steps(new[written], step, dtype)))
        assert in_slots(scale, kv_layout).isfinite().sum() == 4 * 3


@pytest.mark.parametrize("kv_dtype", ["bf16", "fp8", "int8"])
def test_the_exported_module_decodes_what_it_has_appended(tmp_path, kv_dtype: str) -> None:
    path = tmp_path / "attention_dispatch.py"
    environment = {**os.environ, "AUTOFLASH_DB": str(tmp_path / "none.db")}
    command = [sys.executable, "-m", "autoflash", "export", "-o", str(path)]
    subprocess.run(command, check=True, env=environment, capture_output=True)
    found = importlib.util.spec_from_file_location("appended_dispatch", path)
    module = importlib.util.module_from_spec(found)
    sys.modules["appended_dispatch"] = module
    found.loader.exec_module(module)

    k, v = tokens(21, 2, 64)  # the last one alone, as a decode step has it
    dtype = {"bf16": torch.bfloat16, "fp8": FP8, "int8": INT8}[kv_dtype]
    k_cache, v_cache = caches(8, 4, 2, 64, dtype=dtype)
    scales = {}
    if kv_dtype != "bf16":
        scales = {name: torch.full((8, 4, 2), NAN) for name in ("k_scale", "v_scale")}
    table = torch.tensor([[7, 0, 5, 2, 3, 1]], dtype=torch.int32)
    places = torch.arange(21)
    slots = table[0, places // 4].long() * 4 + places % 4
    module.append_kv(k[:20], v[:20], k_cache, v_cache, slots[:20], **scales)
    module.append_kv(k[20:], v[20:], k_cache, v_cache, slots[20:], **scales)
    module.append_kv(k[:0], v[:0], k_cache, v_cache, slots[:0], **scales)
    kind = {"bf16": "bf16", "fp8": "fp8_e4m3", "int8": "int8"}[kv_dtype]
    scaled = "" if kind == "bf16" else "token"
    p = Problem("decode", "bf16", 1, 4, 2, 64, 1, 24, page_size=4, kv_dtype=kind, kv_scales=scaled)
    q = torch.randn(1, 1, 4, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    inputs = Inputs(p, q, k_cache, v_cache, torch.tensor([21]), table, **scales)
    for new, stored in zip((k, v), inputs.sequence(0)[1:], strict=True):
        expected = new.double()
        if scaled:
            scale = new.float().abs().amax(dim=-1, keepdim=True) / LIMITS[dtype]
            expected = steps(new, scale, dtype).double() * scale.double()
        assert torch.equal(stored.transpose(0, 1).double(), expected)
    result = module.decode(
        q, k_cache, v_cache, inputs.cache_seqlens, block_table=table, return_lse=True, **scales
    )
    verdict = Budget(inputs).judge(*result)
    assert verdict.correct, verdict.reason
