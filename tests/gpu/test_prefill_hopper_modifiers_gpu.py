"""Windows, softcap and sinks of prefill_hopper on a Hopper GPU: every edge in every way."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from ahead import compile_ahead, varied
from test_prefill_hopper_gpu import (
    DIRECT,
    SMALL,
    STATIC,
    WAYS,
    config_of,
    failures_of,
    gpu,
    of,
    run,
)

from autoflash.accuracy import Budget
from autoflash.check import sample_rows
from autoflash.config import Config
from autoflash.families.prefill_hopper import FAMILY
from autoflash.gpu import Gpu
from autoflash.inputs import make_inputs
from autoflash.problem import Problem, title
from autoflash.runtime.hopper_validity import prefill_hopper_refusal

pytestmark = pytest.mark.gpu
__all__ = ["gpu"]  # the fixture
NAN = float("nan")

SIDES = (0, 1, 63, 64, 65, 127, 128, 129)
# Beside those of the plain kernels: turns without pairs, narrow blocks.
MORE_WAYS = {
    64: (
        config_of(num_stages=3, PING_PONG=1),
        config_of(num_stages=3, BLOCK_N=64, SCHEDULE="early", **DIRECT),
        config_of(num_stages=3, **SMALL),
    ),
    128: (
        config_of(PING_PONG=1, **STATIC),
        config_of(num_stages=3, BLOCK_N=64),
    ),
    256: (),
}
LENGTHS = ((385, 385), (129, 300), (300, 77), (130, 3), (1, 300), (128, 512))


def ways_of(problem: Problem, gpu: Gpu) -> list[Config]:
    """The ways that are right for the problem; a balance below the least is right all the same."""
    block_d = 1 << (problem.head_dim - 1).bit_length()
    ways = (*WAYS[block_d], *MORE_WAYS[block_d])
    reasons = [prefill_hopper_refusal(problem, way.as_dict(), gpu) or "" for way in ways]
    return [way for way, no in zip(ways, reasons, strict=True) if not no or "simulated" in no]


def two_ways_of(problem: Problem, gpu: Gpu) -> list[Config]:
    """The default and another way, for what the ways do alike."""
    default = FAMILY.default(problem, gpu)
    return [default, next(way for way in ways_of(problem, gpu) if way != default)]


def prepared(problems: list[Problem], gpu: Gpu, ways=two_ways_of, **options) -> None:
    """Have these ways of the problems compiled, side by side."""
    wanted: dict[Config, list[Problem]] = {}
    for problem in problems:
        for config in ways(problem, gpu):
            wanted.setdefault(config, []).append(problem)
    compile_ahead(wanted, gpu, **options)


def sides_of(seqlen: int) -> list[tuple[int, int]]:
    """Windows that end at, before and after the edges of tiles, on one side or both."""
    before = [(left, 0) for left in SIDES]
    after = [(-1, right) for right in SIDES[1:]]
    both = [(left, right) for left, right in product(SIDES[1::2], SIDES[2::2])]
    return [*before, *after, *both, (seqlen - 2, seqlen - 2)]


def windowed(seqlen_q: int, seqlen_k: int, sides: tuple[int, int], **changes) -> Problem:
    left, right = sides
    return of(seqlen_q, seqlen_k, right == 0, window_left=left, window_right=right, **changes)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_both_edges_of_a_window_are_right_wherever_they_meet_a_block(  # case B22, case B42
    gpu, head_dim
):
    """Counted too: with keys of zero `lse` is the logarithm of how many a query sees."""
    problems = [
        windowed(*lengths, sides, head_dim=head_dim)
        for lengths in LENGTHS
        for sides in sides_of(max(lengths))
    ]
    kernels = [windowed(*lengths, (64, 0), head_dim=head_dim) for lengths in LENGTHS]
    prepared(kernels, gpu, ways_of)
    failures = []
    for problem in problems:
        ways = ways_of(problem, gpu)
        inputs = make_inputs(problem, device="cuda")
        failures += failures_of(inputs, ways, gpu, repeats=1)
        inputs.k.zero_()
        expected = seen_keys(problem).log()
        for config in ways:
            _, lse = run(inputs, config, gpu)
            if not torch.allclose(lse, expected.expand_as(lse), rtol=0, atol=1e-5):
                failures.append(f"{title(problem)} {config}: other keys are counted")
    assert failures == []


def seen_keys(problem: Problem) -> torch.Tensor:
    """How many keys each query sees, counted in whole numbers."""
    left, right = (side if side >= 0 else 1 << 20 for side in problem.window)
    position = torch.arange(problem.seqlen_q, device="cuda") + problem.seqlen_k - problem.seqlen_q
    last = (position + right).clamp(max=problem.seqlen_k - 1)
    return (last - (position - left).clamp(min=0) + 1).clamp(min=0)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 70])
def test_a_softcap_is_right_near_it_and_far_beyond(gpu, head_dim, window_left):  # case B44
    on = {"head_dim": head_dim, "softcap": True, "window_left": window_left}
    problems = [of(*lengths, True, **on) for lengths in LENGTHS[:3]]
    prepared(problems, gpu)
    failures = []
    # of random scores: few, some or all are farther than the polynomial reaches
    for problem, factor, softcap in product(problems, (1.0, 12.0, 300.0), (2.0, 50.0)):
        inputs = replace(make_inputs(problem, device="cuda"), softcap=softcap)
        inputs.q.mul_(factor)
        failures += failures_of(inputs, two_ways_of(problem, gpu), gpu, repeats=1)
    assert failures == []


def test_a_rows_bits_do_not_depend_on_whether_its_neighbours_are_near_their_softcap(gpu):
    problem = of(300, 1000, False, softcap=True)
    prepared([problem], gpu)
    for config in two_ways_of(problem, gpu):
        outs = []
        for factor in (0.1, 40.0):
            inputs = make_inputs(problem, device="cuda")
            inputs.q[:, 1::2].mul_(factor)
            outs.append(run(inputs, config, gpu)[0][:, ::2])
        assert torch.equal(*outs), str(config)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("window_left", [-1, 70])
def test_sinks_of_any_size_count_once_and_stand_for_rows_without_keys(  # case B29
    gpu, head_dim, window_left
):
    problems = [
        of(*lengths, True, head_dim=head_dim, sinks=True, window_left=window_left)
        for lengths in (*LENGTHS, (5, 0))
    ]
    prepared(problems, gpu)
    failures = []
    for problem, size in product(problems, (0.0, 1.0, 80.0, -80.0)):
        inputs = make_inputs(problem, device="cuda")
        inputs.sinks.add_(size) if size else inputs.sinks.zero_()
        failures += failures_of(inputs, two_ways_of(problem, gpu), gpu, repeats=1)
    for dtype in (torch.bfloat16, torch.float16):
        inputs = make_inputs(problems[0], device="cuda")
        inputs = replace(inputs, sinks=inputs.sinks.to(dtype))
        failures += failures_of(inputs, two_ways_of(problems[0], gpu), gpu, repeats=1)
    assert failures == []


# More tiles than programs, with a last round that is partly filled; 10 heads of 7 query heads each.
ON = {
    "window": {"window_left": 200},
    "gemma": {"window_left": 511, "softcap": True},
    "gpt-oss": {"window_left": 127, "sinks": True},
    "both sides": {"window_left": 70, "window_right": 300, "softcap": True, "sinks": True},
}


@pytest.mark.parametrize("on", ON.values(), ids=ON)
@pytest.mark.parametrize(("head_dim", "dtype"), [(64, "bf16"), (128, "fp16"), (256, "bf16")])
def test_many_tiles_a_program_are_right_and_twice_the_same_bits(gpu, head_dim, dtype, on):
    shape = {"head_dim": head_dim, "dtype": dtype, "batch": 1, "num_heads": 70, "num_kv_heads": 10}
    problem = of(1030, 1030, "window_right" not in on, **shape, **on)
    prepared([problem], gpu, with_lse=(True, False))
    inputs = make_inputs(problem, device="cuda")
    ways = two_ways_of(problem, gpu)
    assert failures_of(inputs, ways, gpu, repeats=5) == []
    budget = Budget(inputs)
    for config in ways:
        bare, _ = run(inputs, config, gpu, with_lse=False)
        assert budget.judge(bare, None).correct, f"{config}: wrong without lse"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("wide_rows", [0, 8, 1], ids=["contiguous", "aligned", "unaligned"])
def test_both_layouts_and_rows_of_any_width(gpu, layout, wide_rows):
    on = {"softcap": True, "sinks": True, "layout": layout}
    problems = [windowed(200, 333, (70, 0), head_dim=d, **on) for d in (64, 96, 128, 192)]
    prepared(problems, gpu, wide_rows=wide_rows)
    for problem in problems:
        inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
        budget = Budget(inputs)
        for config in two_ways_of(problem, gpu):
            verdict = budget.judge(*run(inputs, config, gpu))
            assert verdict.correct, f"head_dim {problem.head_dim} {config}: {verdict.reason}"


def test_blocks_outside_the_windows_of_a_tile_are_not_read(gpu):
    """The last 128 queries over 32768 keys; blocks before all windows NaN, and after."""
    for left, right in ((127, 0), (4095, 0), (300, 200)):
        problem = windowed(128, 32768, (left, right), batch=1)
        late = windowed(32768, 32768, (left, right), batch=1)
        prepared([problem], gpu, ways_of)
        inputs = make_inputs(problem, device="cuda")
        first = (32768 - 128 - left) // 128 * 128
        for config in ways_of(problem, gpu):
            out, lse = run(inputs, config, gpu)
            k, v = inputs.k.clone(), inputs.v.clone()
            k[:, :first] = v[:, :first] = NAN
            again, lse_again = run(replace(inputs, k=k, v=v), config, gpu)
            assert torch.equal(out, again) and torch.equal(lse, lse_again), str(config)
        # of as many queries as keys the first tiles see none of the last blocks
        inputs = make_inputs(late, device="cuda")
        config = FAMILY.default(late, gpu)
        out, _ = run(inputs, config, gpu)
        inputs.k[:, 16384:] = inputs.v[:, 16384:] = NAN
        again, _ = run(inputs, config, gpu)
        rows = (16384 - right) // 128 * 128
        assert torch.equal(out[:, :rows], again[:, :rows])


@pytest.mark.parametrize(
    "on",
    [
        {"window_left": 4095},
        {"window_left": 4095, "softcap": True, "head_dim": 256},
        {"window_left": 127, "sinks": True, "head_dim": 64},
    ],
    ids=str,
)
def test_rows_of_a_long_prompt_are_right(gpu, on):
    problem = of(16384, 16384, True, batch=1, **on)
    prepared([problem], gpu)
    inputs = make_inputs(problem, device="cuda")
    rows = sample_rows(problem, seed=0)
    b, h, i = torch.tensor(rows, device="cuda").T
    budget = Budget(inputs, rows=rows)
    for config in two_ways_of(problem, gpu):
        out, lse = run(inputs, config, gpu)
        verdict = budget.judge(out[b, i, h], lse[b, h, i])
        assert verdict.correct, f"{config}: {verdict.reason}"


def test_candidates_of_a_problem_are_right_and_twice_the_same_bits(gpu):
    for on in ({"head_dim": 64, "window_left": 100, "sinks": True}, {"window_left": 300}):
        problem = of(512, 512, True, batch=4, num_heads=16, num_kv_heads=8, **on)
        candidates = varied(FAMILY, problem, gpu)
        compile_ahead({config: [problem] for config in candidates}, gpu)
        assert failures_of(make_inputs(problem, device="cuda"), candidates, gpu, repeats=1) == []
