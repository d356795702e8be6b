"""Decode on a GPU: candidates, large caches and batches, graphs, calls back to back."""

from dataclasses import replace

import pytest
import torch
from ahead import compiling, varied
from running import run

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families import decode_last, family_of
from autoflash.families.decode import FAMILY
from autoflash.families.family import Family
from autoflash.inputs import POISON_PAGE, Inputs, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.runtime.load import load_text

pytestmark = pytest.mark.gpu

LENGTHS = [0, 1, 2, 5, 64, 65, 4096]


@pytest.fixture(scope="module")
def gpu() -> gpus.Gpu:
    return gpus.detect()


def problem(batch: int, **changed: int | str) -> Problem:
    fields = {"op": "decode", "dtype": "bf16", "batch": batch, "num_heads": 8, "num_kv_heads": 2}
    fields |= {"head_dim": 128, "seqlen_q": 1, "seqlen_k": 4096, "page_size": 16}
    return Problem(**(fields | changed))  # pyright: ignore[reportArgumentType]


def schedules(p: Problem, gpu: gpus.Gpu) -> list[Config]:
    """The default configs of this problem under both schedules, merged by a kernel or without."""
    return [
        Config.of(family.name, {**family.default(p, gpu).as_dict(), "SCHEDULE": name})
        for family in (FAMILY, decode_last.FAMILY)
        for name in ("split", "group")
    ]


def candidates(p: Problem, gpu: gpus.Gpu) -> list[Config]:
    """Some of the problem's candidates; those that merge without a kernel, of small batches too."""
    chosen = varied(FAMILY, p, gpu)
    last = [
        Config.of("decode_last", {k: v for k, v in config.knobs if k != "COMBINE_WARPS"})
        for config in chosen
        if config["COMBINE_WARPS"] == 4
    ]
    return compiling([*chosen, *last], p, gpu)


def same_bits(a: tuple[torch.Tensor, ...], b: tuple[torch.Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"page_size": 0},
        {"page_size": 1, "kv_layout": "hnd"},
        {"page_size": 48, "head_dim": 64, "dtype": "fp16"},
        {"head_dim": 256, "num_heads": 16, "num_kv_heads": 1},
        {"head_dim": 80, "num_heads": 14},
        {"head_dim": 64, "num_heads": 71, "num_kv_heads": 1},
        {"dtype": "fp32", "head_dim": 64},
        {"seqlen_q": 4},
        {"seqlen_q": 16, "num_heads": 16, "page_size": 64, "kv_layout": "hnd"},
        {"seqlen_q": 3, "page_size": 0, "head_dim": 64, "num_heads": 14},
        {"kv_dtype": "fp8_e4m3"},
        {"kv_dtype": "fp8_e4m3", "kv_scales": "token", "page_size": 1, "seqlen_q": 4},
        {"kv_dtype": "int8", "kv_scales": "head", "page_size": 64, "kv_layout": "hnd"},
        {"kv_dtype": "int8", "kv_scales": "token", "page_size": 0, "dtype": "fp16"},
        {"kv_dtype": "fp8_e4m3", "head_dim": 256, "num_heads": 16, "num_kv_heads": 1},
        {"kv_dtype": "int8", "head_dim": 80, "num_heads": 14, "seqlen_q": 16},
        {"window_left": 127, "sinks": True, "head_dim": 64, "num_heads": 16},
        {"window_left": 1000, "softcap": True, "head_dim": 256, "num_heads": 4},
        {"window_left": 63, "softcap": True, "alibi": True, "sinks": True, "seqlen_q": 4},
        {"alibi": True, "sinks": True, "dtype": "fp32", "page_size": 0},
        {"pages": "chosen"},
        {"pages": "chosen", "page_size": 64, "window_left": 900, "alibi": True, "seqlen_q": 3},
        {"window_left": 65, "softcap": True, "sinks": True, "kv_dtype": "fp8_e4m3"},
        {"alibi": True, "kv_dtype": "int8", "kv_scales": "token", "seqlen_q": 3},
    ],
    ids=str,
)
def test_candidates_are_right_and_repeat_their_bits(  # case B23, case B24
    changed: dict[str, int | str], gpu: gpus.Gpu
) -> None:
    p = problem(len(LENGTHS), **changed)
    inputs = make_inputs(p, device="cuda", lengths=LENGTHS)
    budget = Budget(inputs)
    for config in candidates(p, gpu):
        result = run(inputs, config, gpu=gpu)
        verdict = budget.judge(*result)
        assert verdict.correct, f"{config}: {verdict.reason}"
        assert same_bits(result, run(inputs, config, gpu=gpu)), config


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_bytes_widened_by_instructions_are_those_widened_by_hand(
    kv_dtype: str, gpu: gpus.Gpu
) -> None:
    """Every byte, in every place of a word, in K and in V; by hand is what other GPUs do."""
    p = problem(1, num_heads=128, num_kv_heads=1, seqlen_k=256, page_size=0, kv_dtype=kv_dtype)
    inputs = make_inputs(p, device="cuda")
    places = torch.arange(256, device="cuda")[:, None] + torch.arange(128, device="cuda")
    every = places.remainder(256).to(torch.uint8)
    every[(every & 0x7F) == 0x7F] = 0  # the bytes that are no number in fp8
    cache = every.view(1, 256, 1, 128).view(inputs.k.dtype)
    inputs = replace(inputs, k=cache, v=cache.flip(1))
    config = FAMILY.default(p, gpu)
    budget = Budget(inputs)
    results = []
    for asked, answer in (("", ""), ("is_cuda()", "is_hip()"), ("geq(8, 9)", "geq(99, 9)")):
        text = render(FAMILY.variant(p)).text
        assert asked in text
        module = load_text(f"widened_{len(results)}.py", text.replace(asked, answer or asked))
        out, lse = new_outputs(inputs)
        run_plan(plan_of(module, inputs, out, lse, gpu, config))
        verdict = budget.judge(out, lse)
        assert verdict.correct, verdict.reason
        results.append((out, lse))
    assert same_bits(results[0], results[1]) and same_bits(results[0], results[2])


@pytest.mark.parametrize("kv_dtype", ["fp8_e4m3", "int8"])
def test_scales_other_than_one_count_as_numbers_and_as_tensors(  # case S03
    kv_dtype: str, gpu: gpus.Gpu
) -> None:
    p = problem(len(LENGTHS), kv_dtype=kv_dtype)
    inputs = make_inputs(p, device="cuda", lengths=LENGTHS)
    k_scale, v_scale = (torch.full((p.batch, 2), step, device="cuda") for step in (0.25, 0.5))
    scaled = replace(inputs, k_scale=k_scale, v_scale=v_scale)
    budget = Budget(scaled, softmax_scale=0.01)
    for config in schedules(p, gpu):
        result = run(scaled, config, gpu=gpu, softmax_scale=0.01)
        verdict = budget.judge(*result)
        assert verdict.correct, verdict.reason
        as_numbers = replace(inputs, k_scale=0.25, v_scale=0.5)
        assert same_bits(run(as_numbers, config, gpu=gpu, softmax_scale=0.01), result)


@pytest.mark.parametrize("splits", [1, 2, 7, 8, 16, 32])
def test_any_number_of_splits_is_right_with_fewer_tiles_than_splits(  # case B19
    splits: int, gpu: gpus.Gpu
) -> None:
    p = problem(len(LENGTHS))
    inputs = make_inputs(p, device="cuda", lengths=LENGTHS)
    budget = Budget(inputs)
    for config in schedules(p, gpu):
        programs = splits * 2 * (p.batch if config["SCHEDULE"] == "split" else 1)
        config = Config.of(config.family, {**config.as_dict(), "PROGRAMS_PER_SM": 1})
        verdict = budget.judge(*run(inputs, config, gpu=replace(gpu, num_sms=programs)))
        assert verdict.correct, verdict.reason


def test_page_ids_whose_offset_passes_32_bits_are_read_where_they_are(  # case B05
    gpu: gpus.Gpu,
) -> None:
    p = problem(1, num_kv_heads=8, seqlen_k=40)
    few = make_inputs(p, device="cuda", poison=False)
    cache = torch.empty(131_080, 16, 8, 128, dtype=torch.bfloat16, device="cuda")  # 4.3 GB
    ids = torch.tensor([[131_072, 3, 131_079]], dtype=torch.int32, device="cuda")
    assert few.block_table is not None
    cache[ids.long()] = few.k[few.block_table.long()]
    for config in schedules(p, gpu):
        near = run(replace(few, v=few.k), config, gpu=gpu)
        far = run(replace(few, k=cache, v=cache, block_table=ids), config, gpu=gpu)
        assert same_bits(near, far)


def test_more_sequences_than_a_grid_axis_holds_are_all_right(gpu: gpus.Gpu) -> None:  # case B14
    batch = 65_537
    p = problem(batch, num_kv_heads=1, head_dim=64, seqlen_k=1)
    one = make_inputs(replace(p, batch=1), device="cuda")
    inputs = Inputs(
        p,
        torch.randn(batch, 1, 8, 64, device="cuda").bfloat16(),
        one.k,
        one.v,
        torch.ones(batch, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, 1, dtype=torch.int32, device="cuda"),
    )
    out, lse = run(inputs, FAMILY.default(p, gpu), gpu=gpu)
    assert torch.equal(out, one.v[0, 0, 0].expand_as(out))  # one key: its value
    scores = inputs.q[:, 0].float() @ one.k[0, 0, 0].float() * 64**-0.5
    torch.testing.assert_close(lse[..., 0], scores, rtol=2**-18, atol=2**-18)


@pytest.mark.parametrize("page_size", [0, 16, 64])
@pytest.mark.parametrize("fill", [float("nan"), float("inf")])
def test_dead_slots_change_no_bit(page_size: int, fill: float, gpu: gpus.Gpu) -> None:  # case B04
    p = problem(4, num_kv_heads=8, head_dim=64, seqlen_k=128, page_size=page_size)
    poisoned = make_inputs(p, device="cuda", lengths=[32, 64, 96, 48])
    clean, filled = (
        replace(poisoned, k=poisoned.k.nan_to_num(nan=value), v=poisoned.v.nan_to_num(nan=value))
        for value in (0.0, fill)
    )
    for config in schedules(p, gpu):
        assert same_bits(run(clean, config, gpu=gpu), run(filled, config, gpu=gpu))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_dead_table_entries_change_no_bit(  # case B13
    index_dtype: torch.dtype, gpu: gpus.Gpu
) -> None:
    p = problem(3, seqlen_k=257, page_size=64)
    inputs = make_inputs(p, device="cuda", lengths=[257, 64, 1])
    table = inputs.block_table
    assert table is not None
    no_number = torch.full_like(inputs.k[:1], float("nan"))
    k, v = (torch.cat([cache, no_number]) for cache in (inputs.k, inputs.v))
    inputs = replace(inputs, k=k, v=v)
    for config in schedules(p, gpu):
        config = Config.of(config.family, {**config.as_dict(), "BLOCK_N": 128, "num_stages": 2})
        plain = run(inputs, config, gpu=gpu)
        for entry in (-1, POISON_PAGE - 1, len(k) - 1):
            filled = table.where(table != POISON_PAGE, entry).to(index_dtype)
            assert same_bits(run(replace(inputs, block_table=filled), config, gpu=gpu), plain)


def test_a_captured_graph_follows_lengths_and_tables_that_change_in_place(  # case B21
    gpu: gpus.Gpu,
) -> None:
    p = problem(4)
    before = make_inputs(p, device="cuda", lengths=[4096, 100, 0, 3000])
    after = make_inputs(p, device="cuda", lengths=[1, 4096, 700, 0], seed=1)
    for config in schedules(p, gpu):
        module = load(render(family_of(config.family).variant(p)))
        held = Inputs(p, *(t.clone() for t in (before.q, before.k, before.v)))
        assert before.cache_seqlens is not None and before.block_table is not None
        held = replace(
            held,
            cache_seqlens=before.cache_seqlens.clone(),
            block_table=before.block_table.clone(),
        )
        out, lse = new_outputs(held)
        plan = plan_of(module, held, out, lse, gpu, config)
        run_plan(plan)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run_plan(plan)
        for name in ("q", "k", "v", "cache_seqlens", "block_table"):
            getattr(held, name).copy_(getattr(after, name))
        graph.replay()
        assert same_bits((out, lse), run(after, config, gpu=gpu))


@pytest.mark.parametrize("schedule", ["split", "group"])
@pytest.mark.parametrize("family", [FAMILY, decode_last.FAMILY], ids=lambda family: family.name)
def test_calls_back_to_back_may_share_a_workspace(
    family: Family, schedule: str, gpu: gpus.Gpu
) -> None:
    """With dependent launch a kernel starts while the one before it still runs."""
    p = problem(4)
    module = load(render(family.variant(p)))
    several = [
        make_inputs(p, device="cuda", lengths=[4096 - i, 1000, 17 * i, 3000], seed=i)
        for i in range(8)
    ]
    config = Config.of(family.name, {**family.default(p, gpu).as_dict(), "SCHEDULE": schedule})
    expected = [run(inputs, config, gpu=gpu) for inputs in several]
    workspaces: dict[tuple[int, ...], torch.Tensor] = {}

    def shared(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return workspaces.setdefault(shape, torch.empty(shape, dtype=dtype, device="cuda"))

    outputs = [new_outputs(inputs) for inputs in several]
    plans = [
        module.plan(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.cache_seqlens,
            inputs.block_table,
            out,
            lse,
            p.head_dim**-0.5,
            p.kv_layout,
            p.seqlen_k,
            gpu.num_sms,
            config.as_dict(),
            shared,
        )
        for inputs, (out, lse) in zip(several, outputs, strict=True)
    ]
    for _ in range(20):
        for plan in plans:
            run_plan(plan)
    assert len(workspaces) == (2 if family is FAMILY else 3)
    for result, wanted in zip(outputs, expected, strict=True):
        assert same_bits(result, wanted)
