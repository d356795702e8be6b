"""The space of prefill_hopper: the measured bests, what is refused and why, schedules simulated."""

from dataclasses import replace
from types import ModuleType

import pytest
from gluon_emulator import Machine
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash import families
from autoflash.config import Config
from autoflash.families.family import space
from autoflash.families.prefill_hopper import FAMILY
from autoflash.gpu import KNOWN, known
from autoflash.problem import Problem, title
from autoflash.render import render
from autoflash.runtime.hopper_validity import (
    hopper_balance,
    hopper_heads_per_group,
    hopper_tile_costs,
    prefill_hopper_balance,
    prefill_hopper_refusal,
)

H200 = known("NVIDIA_H200")
KNOB_NAMES = tuple(knob.name for knob in FAMILY.knobs)
GRID_LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)


def grid_problem(head_dim: int, causal: bool, seqlen: int) -> Problem:
    """A point of the benchmark's grid: 16384 tokens, 2048 channels of heads."""
    heads = 2048 // head_dim
    batch = 16384 // seqlen
    return Problem("prefill", "bf16", batch, heads, heads, head_dim, seqlen, seqlen, causal=causal)


def config_of(**knobs) -> Config:
    """A config, by default that of head_dim 128 with the counter."""
    usual = {
        "WARPGROUPS": 2,
        "BLOCK_N": 128,
        "num_stages": 2,
        "SCHEDULE": "late",
        "PAIR": 0,
        "Q_BUFFERS": 2,
        "EPILOGUE": "tma",
        "Q_IN_REGISTERS": 1,
        "PING_PONG": 0,
        "SPLIT_WAIT": 1,
        "HEAD_GROUP_MIB": 4,
    }
    assert set(knobs) <= set(KNOB_NAMES) == set(usual)
    return Config.of("prefill_hopper", {**usual, **knobs})


D64 = {"num_stages": 3}
D64_WIDE = {"num_stages": 3, "WARPGROUPS": 3, "Q_IN_REGISTERS": 0, "PING_PONG": 1}
DIRECT = {"EPILOGUE": "direct", "Q_BUFFERS": 1}
D256 = {"BLOCK_N": 64, "Q_BUFFERS": 1, "EPILOGUE": "direct", "Q_IN_REGISTERS": 0}
D256_STATIC = {**D256, "SCHEDULE": "static", "HEAD_GROUP_MIB": 1}
PAIRED = {"SCHEDULE": "static", "PAIR": 1}

# (head_dim, causal, lengths, knobs): what won most of the lengths in searches on an H200, and who
# serves lengths near them
MEASURED_BEST = [
    (128, True, (512, 1024), {**PAIRED, "PING_PONG": 1, "HEAD_GROUP_MIB": 1}),
    (128, True, (2048,), {"SCHEDULE": "early", "PING_PONG": 1, "HEAD_GROUP_MIB": 24}),
    (128, True, (4096, 8192, 16384), {"HEAD_GROUP_MIB": 24}),
    (128, False, GRID_LENGTHS, {"SCHEDULE": "static", "HEAD_GROUP_MIB": 1}),
    (64, True, (512, 1024, 2048), {**D64, "PING_PONG": 1, "HEAD_GROUP_MIB": 24}),
    (64, True, (4096, 8192, 16384), {**D64_WIDE, **DIRECT, "HEAD_GROUP_MIB": 24}),
    (64, False, GRID_LENGTHS, {**D64_WIDE, "HEAD_GROUP_MIB": 24}),
    (256, True, (512,), {**D256_STATIC, "PAIR": 1}),
    (256, True, (1024, 2048, 4096, 8192, 16384), {**D256, "HEAD_GROUP_MIB": 24}),
    (256, False, (512, 1024, 2048), {**D256_STATIC, "PING_PONG": 1}),
    (256, False, (4096, 8192, 16384), {**D256, "PING_PONG": 1}),
]


@pytest.mark.parametrize(("head_dim", "causal", "lengths", "knobs"), MEASURED_BEST)
def test_the_measured_bests_are_candidates_and_the_defaults(head_dim, causal, lengths, knobs):
    for seqlen in lengths:
        problem, config = grid_problem(head_dim, causal, seqlen), config_of(**knobs)
        assert FAMILY.refusal(problem, config, H200) is None
        assert FAMILY.default(problem, H200) == config


SHORT_AND_ODD = [
    Problem("prefill", "bf16", 1, 32, 8, 128, 512, 512),
    Problem("prefill", "bf16", 1, 64, 8, 128, 4096, 4096),
    Problem("prefill", "bf16", 1, 32, 8, 128, 512, 32768),
    Problem("prefill", "fp16", 1, 28, 4, 128, 1000, 1000),
    Problem("prefill", "bf16", 1, 8, 8, 96, 130, 3),
    Problem("prefill", "bf16", 3, 6, 6, 192, 1, 300, causal=False),
]
MODIFIED = [
    Problem("prefill", "bf16", 1, 16, 16, 128, 32768, 32768, window_left=4095),
    Problem("prefill", "bf16", 1, 16, 8, 256, 8192, 8192, window_left=4095, softcap=True),
    Problem("prefill", "bf16", 1, 64, 8, 64, 8192, 8192, window_left=127, sinks=True),
    Problem("prefill", "bf16", 4, 64, 8, 64, 8192, 8192, sinks=True),
    Problem("prefill", "bf16", 1, 8, 8, 64, 4096, 4096, False, window_left=99, window_right=99),
    Problem("prefill", "bf16", 1, 32, 8, 128, 512, 512, window_left=100),
]


@pytest.mark.parametrize(
    "problem",
    [grid_problem(d, c, n) for d in (64, 128, 256) for c in (True, False) for n in (512, 16384)]
    + SHORT_AND_ODD
    + MODIFIED,
    ids=title,
)
def test_the_space_is_small_enough_to_be_searched_whole(problem):
    candidates = [config for config, reason in space(FAMILY, problem, H200) if reason is None]
    assert 1 <= len(candidates) <= 200
    assert FAMILY.default(problem, H200) in candidates


@given(
    dtype=st.sampled_from(["bf16", "fp16"]),
    batch=st.integers(1, 70),
    kv_heads=st.integers(1, 9),
    group_size=st.integers(1, 9),
    head_dim=st.integers(5, 32).map(lambda eighth: 8 * eighth),
    seqlen_q=st.integers(1, 5000),
    seqlen_k=st.integers(0, 5000),
    causal=st.booleans(),
    left=st.integers(-1, 5000) | st.just(-1),
    right=st.integers(-1, 5000) | st.just(-1),
    on=st.sets(st.sampled_from(["softcap", "sinks"])),
)
@settings(max_examples=150, deadline=None)
def test_the_default_serves_every_supported_problem(
    dtype, batch, kv_heads, group_size, head_dim, seqlen_q, seqlen_k, causal, left, right, on
):
    heads = kv_heads * group_size
    sizes = (dtype, batch, heads, kv_heads, head_dim, seqlen_q, seqlen_k)
    sides = {"causal": causal, "window_left": left, "window_right": right}
    problem = Problem("prefill", *sizes, **sides, **dict.fromkeys(on, True))
    assert FAMILY.unsupported(problem, H200) is None
    default = FAMILY.default(problem, H200)
    assert prefill_hopper_refusal(problem, default.as_dict(), H200) is None
    for knob in FAMILY.knobs:
        assert default[knob.name] in knob.values


USUAL = grid_problem(128, True, 4096)


@pytest.mark.parametrize(
    ("problem", "gpu", "words"),
    [
        (replace(USUAL, dtype="fp32", kv_dtype="fp32", out_dtype="fp32"), H200, "fp32"),
        (replace(USUAL, kv_dtype="fp16"), H200, "kv_dtype fp16"),
        (replace(USUAL, head_dim=32, head_dim_v=32), H200, "head_dim 32"),
        (replace(USUAL, head_dim_v=64), H200, "head_dim_v 64"),
        (replace(USUAL, page_size=16), H200, "pages"),
        (replace(USUAL, lengths="ragged"), H200, "different lengths"),
        (replace(USUAL, window_left=128, alibi=True), H200, "alibi: the portable family"),
        (replace(USUAL, softcap=True, bias=True), H200, "bias: the portable family"),
        (replace(USUAL, masked_by="documents", density=9), H200, "documents: the portable family"),
        (replace(USUAL, layout="thd", window_left=128), H200, "packed sequences: the portable"),
        (replace(USUAL, op="decode", seqlen_q=1), H200, "not decode"),
        (USUAL, known("NVIDIA A100-SXM4-80GB"), "sm_80"),
        (USUAL, known("NVIDIA B200"), "sm_100"),
        (USUAL, known("AMD Instinct MI300X"), "gfx942"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_the_reason(problem, gpu, words):
    assert words in FAMILY.unsupported(problem, gpu)
    assert words in FAMILY.refusal(problem, config_of(), gpu)


def test_every_hopper_gpu_is_served_and_no_other():
    served = {gpu.arch for gpu in KNOWN.values() if FAMILY.unsupported(USUAL, gpu) is None}
    assert served == {"sm_90"}


@pytest.mark.parametrize(
    "on", [{"window_left": 5}, {"softcap": True}, {"sinks": True, "window_right": 5}], ids=str
)
def test_windows_softcap_and_sinks_are_served_alone_and_together(on):
    every = {"causal": False, "window_left": 5, "softcap": True, "sinks": True, **on}
    for switches in (on, every):
        problem = replace(USUAL, **switches)
        assert FAMILY.unsupported(problem, H200) is None
        assert FAMILY.variant(problem).switches == problem.switches


FULL = replace(USUAL, causal=False)
WINDOW = replace(USUAL, window_left=1000)
NARROW_WINDOW = replace(USUAL, window_left=127)
WIDE_WINDOW = replace(grid_problem(64, True, 4096), window_left=1000)


@pytest.mark.parametrize(
    ("problem", "knobs", "words"),
    [
        (USUAL, {"num_stages": 1}, "one stage"),
        (USUAL, {"WARPGROUPS": 1, "PING_PONG": 1}, "take turns"),
        (USUAL, {"WARPGROUPS": 3, "Q_IN_REGISTERS": 0}, "192 scores and sums"),
        (grid_problem(64, True, 4096), {**D64_WIDE, "Q_IN_REGISTERS": 1}, "and no q"),
        (grid_problem(256, True, 4096), {**D256, "Q_IN_REGISTERS": 1}, "256 channels"),
        (grid_problem(256, True, 4096), {**D256, "BLOCK_N": 128}, "256 channels"),
        (FULL, PAIRED, "no long and short tiles"),
        (WINDOW, PAIRED, "no long and short tiles"),
        (WIDE_WINDOW, D64_WIDE, "edges of a window"),
        (USUAL, {"PAIR": 1}, "static schedule"),
        (USUAL, {"num_stages": 3}, "bytes of shared memory"),
        (grid_problem(256, True, 16384), {**D256, "SCHEDULE": "early"}, "simulated"),
        (grid_problem(128, True, 16384), {"SCHEDULE": "static"}, "simulated"),
    ],
)
def test_knobs_that_would_be_wrong_or_idle_are_refused_with_the_reason(problem, knobs, words):
    """By the part of the predicate that dispatch asks too."""
    assert words in prefill_hopper_refusal(problem, config_of(**knobs).as_dict(), H200)


@pytest.mark.parametrize(
    ("problem", "knobs", "words"),
    [
        (replace(USUAL, seqlen_q=64), {}, "half of 128 query rows"),
        (USUAL, {"BLOCK_N": 64}, "BLOCK_N 64"),
        (WINDOW, {"BLOCK_N": 64, "num_stages": 3}, "BLOCK_N 64"),
        (NARROW_WINDOW, {"BLOCK_N": 64, "num_stages": 3}, None),
        (NARROW_WINDOW, {"BLOCK_N": 64}, "num_stages 2"),
        (replace(USUAL, seqlen_q=127, seqlen_k=127), {"BLOCK_N": 64}, "BLOCK_N 64"),
        (USUAL, {"WARPGROUPS": 3, "BLOCK_N": 64, "Q_IN_REGISTERS": 0}, "at 64 channels"),
        (grid_problem(64, True, 4096), {"num_stages": 2}, "num_stages 2"),
        (USUAL, {"Q_BUFFERS": 1}, "one buffer of q"),
        (USUAL, {"EPILOGUE": "direct"}, "one buffer of q"),
        (USUAL, {"SPLIT_WAIT": 0}, "one wait"),
        (replace(USUAL, seqlen_q=384, seqlen_k=384), PAIRED, "twice"),
        (replace(USUAL, batch=1, num_heads=2, num_kv_heads=2, seqlen_q=256), {}, "one tile"),
        (USUAL, {"HEAD_GROUP_MIB": 1}, "late schedule"),
        (grid_problem(128, True, 16384), {"HEAD_GROUP_MIB": 48}, None),
        (grid_problem(256, True, 16384), {**D256, "HEAD_GROUP_MIB": 48}, "late schedule"),
        (grid_problem(64, True, 4096), {"WARPGROUPS": 1, **D64}, "64 query rows at a time"),
    ],
)
def test_knobs_without_a_chance_are_refused_while_tuning_alone(problem, knobs, words):
    config = config_of(**knobs)
    reason = FAMILY.refusal(problem, config, H200)
    assert reason is None if words is None else words in reason
    assert prefill_hopper_refusal(problem, config.as_dict(), H200) is None


CAUSAL = (-1, 0)  # as a window


# One head of four causal tiles of 128 rows and keys, 1 to 4 blocks and 1 for the tile itself, on
# two programs. Static: 5 + 3 and 4 + 2. Pairs: 7 and 7. Late: 5 + 2 and 4 + 3. Early: the first
# reserves the 3, the second the 2.
@pytest.mark.parametrize(
    ("schedule", "pair", "busy"),
    [("static", 0, 14 / 16), ("static", 1, 1.0), ("late", 0, 1.0), ("early", 0, 14 / 16)],
)
def test_the_simulated_balance_is_that_counted_by_hand(schedule, pair, busy):
    busy_of = hopper_balance(512, 512, CAUSAL, 128, 128, 1, 1, schedule, pair, 2)
    assert busy_of == pytest.approx(busy)


# The same with a window of 129 keys: 1, 2, 2 and 2 blocks. Static: 3 + 3 and 3 + 2.
@pytest.mark.parametrize(("schedule", "busy"), [("static", 11 / 12), ("late", 11 / 12)])
def test_tiles_of_a_window_are_nearly_alike(schedule, busy):
    busy_of = hopper_balance(512, 512, (128, 0), 128, 128, 1, 1, schedule, 0, 2)
    assert busy_of == pytest.approx(busy)
    assert hopper_tile_costs(512, 512, (128, 0), 128, 128) == [2, 3, 3, 3]
    assert hopper_tile_costs(512, 512, (-1, 0), 128, 128) == [2, 3, 4, 5]
    assert hopper_tile_costs(512, 512, (128, 128), 128, 128) == [3, 4, 4, 3]
    assert hopper_tile_costs(512, 512, (-1, -1), 128, 128) == [5, 5, 5, 5]


def test_a_middle_tile_that_a_pair_computes_twice_is_lost_time():
    # three tiles of 2, 3 and 4: the pairs are 6 and, for the middle one, 6
    assert hopper_balance(384, 384, CAUSAL, 128, 128, 1, 1, "static", 1, 1) == pytest.approx(9 / 12)


def test_a_counter_asked_late_is_never_less_even_than_one_asked_early():
    for seqlen in GRID_LENGTHS:
        problem = grid_problem(256, True, seqlen)
        late, early = (
            prefill_hopper_balance(problem, config_of(**D256, SCHEDULE=s).as_dict(), H200)
            for s in ("late", "early")
        )
        assert early <= late


@pytest.fixture(scope="module")
def causal_text() -> ModuleType:
    """The rendered causal text, for its host functions."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.FAMILIES, FAMILY.name, FAMILY)
        return Machine().module(render(FAMILY.variant(USUAL)).text)


@given(
    batch=st.integers(1, 9),
    kv_heads=st.integers(1, 9),
    group_size=st.integers(1, 9),
    seqlen_k=st.integers(1, 70000),
    mib=st.sampled_from([1, 4, 24, 48]),
)
@settings(deadline=None)
def test_the_predicate_groups_heads_as_the_plan_does(
    causal_text, batch, kv_heads, group_size, seqlen_k, mib
):
    problem = replace(
        USUAL,
        batch=batch,
        num_heads=kv_heads * group_size,
        num_kv_heads=kv_heads,
        seqlen_k=seqlen_k,
    )
    planned = causal_text.heads_per_group(
        batch * problem.num_heads, group_size, seqlen_k, 128, 2, mib
    )
    assert hopper_heads_per_group(problem, mib) == planned
