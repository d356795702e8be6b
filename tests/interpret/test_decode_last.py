"""Cut sequences merged by the program that ends last: as the family with a second kernel does."""

from dataclasses import replace

import pytest
import torch
from decoding import H200, check, config, decode, problem, same_bits

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.decode_last import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.render import render
from autoflash.runtime.launch import run_plan


def last(schedule: str = "split", swap: int = 0, block_n: int = 32) -> Config:
    knobs = config(schedule, swap, block_n).as_dict()
    return Config.of("decode_last", {k: v for k, v in knobs.items() if k != "COMBINE_WARPS"})


every_config = pytest.mark.parametrize(
    "config",
    [last(schedule, swap) for schedule in ("split", "group") for swap in (0, 1)],
    ids=["split", "split-swapped", "group", "group-swapped"],
)
each_schedule = pytest.mark.parametrize(
    "config", [last("split"), last("group")], ids=["split", "group"]
)


@every_config
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_ragged_pages_match_the_reference(config: Config, dtype: str) -> None:
    p = problem(5, 6, 2, dtype=dtype, page_size=16)
    check(make_inputs(p, lengths=[100, 1, 0, 37, 64]), config, splits=3)


@pytest.mark.parametrize("splits", [1, 2, 7, 16])
@each_schedule
def test_any_number_of_parts_is_merged(config: Config, splits: int) -> None:  # case B19
    p = problem(7, 2, seqlen_k=520, page_size=16)
    inputs = make_inputs(p, lengths=[0, 1, 2, 5, 64, 65, 520])
    check(inputs, Config.of("decode_last", {**config.as_dict(), "BLOCK_N": 16}), splits)


@each_schedule
@pytest.mark.parametrize(
    "fields",
    [
        {"seqlen_q": 3},
        {"seqlen_q": 5, "head_dim": 256, "num_heads": 16, "num_kv_heads": 2},  # 40 rows, 32 fit
        {"kv_dtype": "fp8_e4m3", "kv_scales": "head", "head_dim": 32},
        {"kv_dtype": "int8", "kv_scales": "token", "head_dim": 40, "seqlen_q": 2},
        {"page_size": 0, "kv_layout": "hnd"},
        {"num_heads": 71, "page_size": 3},
    ],
    ids=str,
)
def test_every_kind_of_cache_and_query_is_merged(config: Config, fields: dict) -> None:
    p = problem(3, **{"page_size": 16, "seqlen_k": 150, **fields})
    check(make_inputs(p, lengths=[150, 33, 2]), config, splits=4)


@each_schedule
def test_out_is_the_same_without_lse(config: Config) -> None:
    inputs = make_inputs(problem(2, page_size=16), lengths=[100, 40])
    with_lse, _ = decode(inputs, config)
    without, lse = decode(inputs, config, with_lse=False)
    assert lse is None and torch.equal(with_lse, without)


@each_schedule
def test_counters_are_cleared_before_every_launch(config: Config) -> None:
    """The same plan again, with lengths that cut the batch otherwise each time."""
    p = problem(3, 2, 2, page_size=16)
    held = make_inputs(p, lengths=[100, 64, 33])
    out, lse = new_outputs(held)
    plan = planned(held, out, lse, 18, config)
    assert [kernel.fn.__name__ for kernel, *_ in plan] == ["clear", "decode"]
    for lengths in ([100, 64, 33], [100, 64, 33], [1, 100, 97], [64, 2, 0]):
        after = make_inputs(p, lengths=lengths)
        for name in ("k", "v", "cache_seqlens", "block_table"):
            getattr(held, name).copy_(getattr(after, name))
        run_plan(plan)
        fresh = new_outputs(held)
        run_plan(planned(held, *fresh, 18, config))
        assert same_bits((out, lse), fresh)
        verdict = Budget(replace(after, q=held.q)).judge(out, lse)
        assert verdict.correct, verdict.reason


def planned(inputs: Inputs, out, lse, num_sms: int, config: Config) -> list:
    module = load(render(FAMILY.variant(inputs.problem)))
    return plan_of(module, inputs, out, lse, replace(H200, num_sms=num_sms), config, poison=True)


def test_where_nothing_is_cut_there_is_nothing_to_clear() -> None:
    inputs = make_inputs(problem(3, 2, 2, page_size=16), lengths=[100, 64, 33])
    plan = planned(inputs, *new_outputs(inputs), 1, last())
    assert [kernel.fn.__name__ for kernel, *_ in plan] == ["decode"]
