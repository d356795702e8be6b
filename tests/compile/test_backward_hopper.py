"""The Hopper backward compiled for sm_90: nothing spills where the products are, memory fits."""

import re
from dataclasses import replace

import pytest
from assembled import assembler_report, counted, loops_with

from autoflash.config import Config
from autoflash.families import backward_hopper, backward_hopper_single
from autoflash.families.family import Family
from autoflash.gpu import known
from autoflash.kernel import _compiled
from autoflash.problem import Problem
from autoflash.runtime.backward_hopper_validity import (
    backward_hopper_kv_smem_bytes,
    backward_hopper_q_smem_bytes,
)
from autoflash.runtime.hopper_validity import hopper_block_d

H200 = known("NVIDIA_H200")
SPLIT, SINGLE = backward_hopper.FAMILY, backward_hopper_single.FAMILY
SERIALISED = re.compile(r"C75(?:10|12|14|15)")  # what ptxas says when products cannot overlap
SLOW = pytest.mark.slow


def problem(head_dim: int, causal: bool, seqlen: int = 4096) -> Problem:
    return Problem("backward", "bf16", 1, 8, 4, head_dim, seqlen, seqlen, causal=causal)


def compiled(p: Problem, family: Family, wide_rows: bool = False, **knobs: int) -> dict:
    config = Config.of(family.name, family.default(p, H200).as_dict() | knobs)
    kernels, _ = _compiled(p, config, H200, with_lse=False, wide_rows=wide_rows)
    return {kernel.name: kernel for kernel in kernels}


def assert_products_do_not_spill(kernel, loops: list[list[str]], products: int) -> None:
    assert not SERIALISED.search(assembler_report(kernel))
    assert len(loops) == 2  # one of each warpgroup: the shortest, in which nothing is masked
    for body in loops:
        expected = {"HGMMA": products, "LDL": 0, "STL": 0}
        assert counted(body, *expected) == expected


@pytest.mark.parametrize(
    ("head_dim", "causal", "kv_slots"),
    [
        (128, True, 0),
        (128, True, 2),
        pytest.param(64, False, 0, marks=SLOW),
        pytest.param(64, False, 2, marks=SLOW),
        pytest.param(96, False, 2, marks=SLOW),
        pytest.param(128, False, 2, marks=SLOW),
        pytest.param(128, True, 1, marks=SLOW),
    ],
)
def test_the_products_of_a_single_pass_do_not_spill(head_dim, causal, kv_slots):
    p = problem(head_dim, causal)
    if kv_slots:
        p = replace(p, num_kv_heads=p.num_heads)
    knobs = SINGLE.default(p, H200).as_dict() | {"KV_SLOTS": kv_slots}
    if kv_slots == 2:
        knobs["DS_SLOTS"] = 2  # more do not fit beside two slots of 128 channels
    block_m, ds_slots = int(knobs["KV_BLOCK_M"]), int(knobs["DS_SLOTS"])
    kernels = compiled(p, SINGLE, DS_SLOTS=ds_slots, KV_SLOTS=kv_slots)
    assert list(kernels) == ["statistics_kernel", "backward_kv_kernel", "convert_kernel"]
    kernel = kernels["backward_kv_kernel"]
    loops = loops_with(kernel, "HGMMA", "MUFU.EX2")[:2]
    # of each warpgroup: two products over the channels, two over the queries, and half of dq
    block_d = hopper_block_d(p)
    assert_products_do_not_spill(kernel, loops, 2 * (block_d + block_m) // 16 + 8)
    if kv_slots:  # what a unit begins and ends with does not spill either
        assert "0 bytes spill stores, 0 bytes spill loads" in assembler_report(kernel)
    bound = backward_hopper_kv_smem_bytes(p, block_m, ds_slots, kv_slots)
    assert kernel.metadata.shared <= bound <= kernel.metadata.shared + 4096


@pytest.mark.parametrize(
    ("head_dim", "causal"),
    [(256, False), pytest.param(64, True, marks=SLOW), pytest.param(128, True, marks=SLOW)],
)
def test_the_products_of_two_passes_do_not_spill(head_dim, causal):
    p = problem(head_dim, causal)
    knobs = SPLIT.default(p, H200).as_dict()
    block_m, block_n = int(knobs["KV_BLOCK_M"]), int(knobs["Q_BLOCK_N"])
    _, kv, q = compiled(p, SPLIT).values()
    if head_dim == 256:  # a warpgroup has the exponentials, the other one none
        loops, products = loops_with(kv, "HGMMA")[:2], (head_dim + block_m) // 16
    else:
        loops, products = loops_with(kv, "HGMMA", "MUFU.EX2")[:2], 2 * (head_dim + block_m) // 16
    assert_products_do_not_spill(kv, loops, products)
    loops = loops_with(q, "HGMMA", "MUFU.EX2")[:2]
    assert_products_do_not_spill(q, loops, (2 * head_dim + block_n) // 16)
    kv_bound = backward_hopper_kv_smem_bytes(p, block_m, ds_slots=0)
    q_bound = backward_hopper_q_smem_bytes(p, knobs)
    for kernel, bound in ((kv, kv_bound), (q, q_bound)):
        assert kernel.metadata.shared <= bound <= kernel.metadata.shared + 4096


@pytest.mark.parametrize("family", [SINGLE, SPLIT])
def test_launches_overlap_and_each_waits_before_it_reads_what_the_one_before_writes(family):
    kernels = compiled(problem(128, False), family)
    texts = {name: kernel.asm["ptx"] for name, kernel in kernels.items()}
    wait, start_next = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    dependent = [kernel.metadata.launch_pdl for kernel in kernels.values()]
    assert dependent == [False, True, True]
    assert [text.count(wait) for text in texts.values()] == [0, 1, 1]
    assert [text.count(start_next) for text in texts.values()] == [1, 1, 0]
    kv = texts["backward_kv_kernel"]
    assert kv.index(wait) < kv.index(start_next) < kv.index("cp.async.bulk.tensor")
    if family is SINGLE:
        convert = texts["convert_kernel"]
        assert convert.index(wait) < convert.index("ld.global")
    else:  # reads nothing of dk and dv; it only is not over before they are
        q = texts["backward_q_kernel"]
        assert q.index(wait) > q.rindex("cp.async.bulk.tensor")


@SLOW
def test_ragged_lengths_odd_strides_and_other_head_counts_compile():
    p = replace(problem(96, False), dtype="fp16", kv_dtype="fp16", out_dtype="fp16")
    p = replace(p, seqlen_q=1000, seqlen_k=1100)
    assert next(iter(compiled(p, SINGLE, wide_rows=True))) == "copy_rows_kernel"
    usual = compiled(p, SINGLE)
    other = replace(p, seqlen_q=70, seqlen_k=129, num_heads=7, num_kv_heads=1, batch=2)
    assert [k.hash for k in compiled(other, SINGLE).values()] == [k.hash for k in usual.values()]
    assert list(compiled(replace(p, seqlen_k=0), SINGLE)) == ["no_keys_kernel"]
