"""prefill_hopper on a Hopper GPU: right at every edge, on any strides, for scores of any spread,
twice the same bits.
"""

from dataclasses import replace
from functools import cache
from types import ModuleType

import pytest
import torch
from ahead import compile_ahead

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.family import space
from autoflash.families.prefill_hopper import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.problem import Problem, Variant, title
from autoflash.render import render
from autoflash.runtime.hopper_validity import prefill_hopper_refusal
from autoflash.runtime.launch import run_plan

pytestmark = pytest.mark.gpu
NAN = float("nan")


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = detect()
    if found.capability != 90:
        pytest.skip(f"needs sm_90, this is {found.arch}")
    return found


@cache
def module_of(variant: Variant) -> ModuleType:
    return load(render(variant))


def run(
    inputs: Inputs,
    config: Config,
    gpu: Gpu,
    out: torch.Tensor | None = None,
    with_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out` and `lse` of one launch; outputs and workspaces are full of NaN before it."""
    own_out, lse = new_outputs(inputs)
    out = own_out if out is None else out
    lse = lse if with_lse else None
    module = module_of(FAMILY.variant(inputs.problem))
    run_plan(plan_of(module, inputs, out, lse, gpu, config, poison=True))
    return out, lse


def config_of(**knobs) -> Config:
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
    return Config.of(FAMILY.name, {**usual, **knobs})


WIDE = {"WARPGROUPS": 3, "num_stages": 3, "Q_IN_REGISTERS": 0, "PING_PONG": 1, "SPLIT_WAIT": 0}
NARROW = {"BLOCK_N": 64, "Q_BUFFERS": 1, "EPILOGUE": "direct", "Q_IN_REGISTERS": 0}
SMALL = {"WARPGROUPS": 1, "BLOCK_N": 64}
DIRECT = {"Q_BUFFERS": 1, "EPILOGUE": "direct"}
PAIRED = {"SCHEDULE": "static", "PAIR": 1}
STATIC = {"SCHEDULE": "static"}

# By channels of a tile: the recommended ways and one of each knob beside them.
WAYS: dict[int, tuple[Config, ...]] = {
    64: (
        config_of(num_stages=3),
        config_of(**WIDE),
        config_of(**{**WIDE, "SCHEDULE": "early", "SPLIT_WAIT": 1}),
        config_of(num_stages=3, WARPGROUPS=1, **DIRECT),
    ),
    128: (
        config_of(**PAIRED, PING_PONG=1),
        config_of(),
        config_of(**STATIC, HEAD_GROUP_MIB=1),
        config_of(**DIRECT),
        config_of(SCHEDULE="early", Q_IN_REGISTERS=0, **DIRECT),
        config_of(**SMALL, **DIRECT),
    ),
    256: (
        config_of(**NARROW, **PAIRED),
        config_of(**NARROW),
        config_of(**{**NARROW, **STATIC, "EPILOGUE": "tma", "PING_PONG": 1}),
    ),
}

EDGES = (
    *((n, n) for n in (1, 63, 64, 65, 127, 128, 129, 1000, 1024)),
    *((77, 300), (300, 77), (130, 3), (1, 1000), (192, 128), (128, 192), (5, 0)),
)


def ways_of(problem: Problem, gpu: Gpu) -> list[Config]:
    """The ways that are right for the problem; a balance below the least is right all the same."""
    block_d = 1 << (problem.head_dim - 1).bit_length()
    ways = []
    for config in WAYS[block_d]:
        reason = prefill_hopper_refusal(problem, config.as_dict(), gpu)
        if reason is None or "simulated" in reason:
            ways.append(config)
    return ways


def prepared(
    problems: list[Problem], gpu: Gpu, with_lse: tuple[bool, ...] = (True,), wide_rows: int = 0
) -> None:
    """Have every way of the problems compiled, side by side."""
    wanted: dict[Config, list[Problem]] = {}
    for problem in problems:
        for config in ways_of(problem, gpu):
            wanted.setdefault(config, []).append(problem)
    compile_ahead(wanted, gpu, with_lse, wide_rows)


def failures_of(inputs: Inputs, configs: list[Config], gpu: Gpu, repeats: int = 2) -> list[str]:
    """Of each config why its result is wrong, or that repeated runs have other bits."""
    budget, failures = Budget(inputs), []
    for config in configs:
        out, lse = run(inputs, config, gpu)
        verdict = budget.judge(out, lse)
        if not verdict.correct:
            failures.append(f"{title(inputs.problem)} {config}: {verdict.reason}")
        again = [run(inputs, config, gpu)[0] for _ in range(repeats)]
        if not all(torch.equal(out.view(torch.int16), each.view(torch.int16)) for each in again):
            failures.append(f"{title(inputs.problem)} {config}: two runs differ")
    return failures


def of(seqlen_q: int, seqlen_k: int, causal: bool, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= changes
    return Problem("prefill", seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, **fields)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_way_is_right_at_every_edge_for_scores_of_any_spread(  # case B06, case B40
    gpu, causal, head_dim
):
    problems = [of(*lengths, causal, head_dim=head_dim) for lengths in EDGES]
    prepared(problems, gpu)
    failures = []
    for problem in problems:
        for factor in (1.0, 12.0):
            inputs = make_inputs(problem, device="cuda")
            inputs.q.mul_(factor)
            failures += failures_of(inputs, ways_of(problem, gpu), gpu)
    assert failures == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("step", [-30.0, 0.1, 7.9, 8.1, 30.0, 500.0])
def test_maxima_that_rise_with_every_64_keys_walked(gpu, step, head_dim):
    """Keys are walked from the last to the first; in base 2, `step` for each 64."""
    problem = of(1000, 1000, False, head_dim=head_dim)
    prepared([problem], gpu)
    inputs = make_inputs(problem, device="cuda")
    height = torch.arange(problem.seqlen_k, device="cuda").flip(0) // 64 * step / 1.4426950408889634
    inputs.q[..., 0] = 16.0
    inputs.k[..., 0] = (height * head_dim**0.5 / 16.0).to(inputs.k.dtype)[:, None]
    assert failures_of(inputs, ways_of(problem, gpu), gpu) == []


def test_a_rows_bits_do_not_depend_on_whether_its_neighbours_maxima_rise(gpu):
    problem = of(300, 1000, False)
    prepared([problem], gpu)
    for config in ways_of(problem, gpu):
        outs = []
        for factor in (1.0, 40.0):
            inputs = make_inputs(problem, device="cuda")
            inputs.q[:, 1::2].mul_(factor)
            outs.append(run(inputs, config, gpu)[0][:, ::2])
        assert torch.equal(*outs), str(config)


# More tiles than programs, with a last round that is partly filled; 40 heads of 7 query heads each.
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_many_tiles_a_program_are_right_and_twice_the_same_bits(gpu, causal, head_dim, dtype):
    problem = of(
        1030, 1030, causal, dtype=dtype, head_dim=head_dim, batch=1, num_heads=70, num_kv_heads=10
    )
    prepared([problem], gpu, with_lse=(True, False))
    inputs = make_inputs(problem, device="cuda")
    assert failures_of(inputs, ways_of(problem, gpu), gpu, repeats=5) == []
    budget = Budget(inputs)
    for config in ways_of(problem, gpu):
        bare, _ = run(inputs, config, gpu, with_lse=False)
        assert budget.judge(bare, None).correct, f"{config}: wrong without lse"


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("wide_rows", [0, 8, 1], ids=["contiguous", "aligned", "unaligned"])
def test_both_layouts_and_rows_of_any_width(gpu, layout, wide_rows):
    """Rows 8 elements wider are named by descriptors as they are, rows 1 wider are copied."""
    problems = [of(200, 333, True, head_dim=d, layout=layout) for d in (64, 72, 128, 192)]
    prepared(problems, gpu, wide_rows=wide_rows)
    for problem in problems:
        inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
        budget = Budget(inputs)
        for config in ways_of(problem, gpu):
            verdict = budget.judge(*run(inputs, config, gpu))
            assert verdict.correct, f"head_dim {problem.head_dim} {config}: {verdict.reason}"


def test_an_out_of_any_strides_is_written_and_nothing_beside_it(gpu):
    problem = of(200, 333, False)
    inputs = make_inputs(problem, device="cuda")
    budget = Budget(inputs)
    for extra in (8, 1):
        storage = torch.full(
            (*inputs.q.shape[:3], 128 + extra), NAN, dtype=inputs.q.dtype, device="cuda"
        )
        out = storage[..., :128]
        for config in ways_of(problem, gpu):
            storage.fill_(NAN)
            _, lse = run(inputs, config, gpu, out=out)
            verdict = budget.judge(out, lse)
            assert verdict.correct, f"{config}: {verdict.reason}"
            assert storage[..., 128:].isnan().all()


def test_keys_of_one_sequence_for_a_whole_batch(gpu):
    """K and V expanded over the batch have a stride of 0, which no descriptor has."""
    problem = of(100, 260, True, batch=3)
    one = make_inputs(replace(problem, batch=1), device="cuda")
    q = make_inputs(problem, seed=1, device="cuda").q
    k, v = (t.expand(3, -1, -1, -1) for t in (one.k, one.v))
    inputs = Inputs(problem, q, k, v)
    verdict = Budget(inputs).judge(*run(inputs, config_of(), gpu))
    assert verdict.correct, verdict.reason


def test_more_than_65535_heads_and_a_result_of_more_than_2_to_the_31_elements(gpu):  # case B14
    problem = of(16, 16, True, batch=10923, num_heads=6, num_kv_heads=6, head_dim=64)
    assert problem.batch * problem.num_heads > 65535
    inputs = make_inputs(problem, device="cuda")
    out, lse = run(inputs, config_of(num_stages=3), gpu)
    last = Inputs(replace(problem, batch=1), inputs.q[-1:], inputs.k[-1:], inputs.v[-1:])
    assert Budget(last).judge(out[-1:], lse[-1:]).correct
    del inputs, out, lse, last
    torch.cuda.empty_cache()
    problem = of(270000, 64, False, batch=1, num_heads=64, num_kv_heads=1)
    inputs = make_inputs(problem, device="cuda")
    assert inputs.q.numel() > 2**31
    for config in (config_of(), config_of(**DIRECT)):
        out, lse = run(inputs, config, gpu)
        rows = slice(problem.seqlen_q - 100, None)
        last = Inputs(replace(problem, seqlen_q=100), inputs.q[:, rows], inputs.k, inputs.v)
        verdict = Budget(last).judge(out[:, rows], lse[..., rows])
        assert verdict.correct, f"{config}: {verdict.reason}"


# Raw scores of -243712 and -566272, far below any score that a finite stand-in for minus infinity
# may be; and as far above. The products are exact, so that only the maximum is on trial.
@pytest.mark.parametrize("sign", [-1.0, 1.0])
@pytest.mark.parametrize(("seqlen_k", "size"), [(3, 544.0), (300, 1264.0)])
def test_logits_of_any_size(gpu, seqlen_k, size, sign):  # case B38
    problem = of(130, seqlen_k, True, num_heads=8, num_kv_heads=1)
    prepared([problem], gpu)
    inputs = make_inputs(problem, device="cuda")
    inputs.k.zero_()
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * size
    assert failures_of(inputs, ways_of(problem, gpu), gpu) == []


def test_with_keys_of_zero_lse_counts_the_keys_that_are_seen(gpu):  # case B50
    for seqlen_q, seqlen_k in ((300, 300), (77, 300), (300, 77)):
        problem = of(seqlen_q, seqlen_k, True)
        inputs = make_inputs(problem, device="cuda")
        inputs.k.zero_()
        rows = torch.arange(seqlen_q, device="cuda") + seqlen_k - seqlen_q + 1
        expected = rows.clamp_min(0).log()
        for config in ways_of(problem, gpu):
            _, lse = run(inputs, config, gpu)
            torch.testing.assert_close(
                lse, expected.expand_as(lse), rtol=0, atol=1e-5, msg=str(config)
            )


def test_a_graph_replays_a_schedule_from_a_counter(gpu):
    problem = of(1000, 1000, True, batch=1, num_heads=40, num_kv_heads=40)
    inputs = make_inputs(problem, device="cuda")
    expected, _ = run(inputs, config_of(), gpu)
    out, lse = new_outputs(inputs)
    module = module_of(FAMILY.variant(problem))
    plan = plan_of(module, inputs, out, lse, gpu, config_of(), poison=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            run_plan(plan)
    for _ in range(3):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, expected)


def test_every_candidate_of_a_problem_is_right_and_twice_the_same_bits(gpu):
    for head_dim, causal in ((64, True), (128, True), (256, False)):
        problem = of(512, 512, causal, head_dim=head_dim, batch=4, num_heads=16, num_kv_heads=8)
        candidates = [config for config, no in space(FAMILY, problem, gpu) if no is None]
        compile_ahead({config: [problem] for config in candidates}, gpu)
        inputs = make_inputs(problem, device="cuda")
        budget = Budget(inputs)
        for config in candidates:
            out, lse = run(inputs, config, gpu)
            verdict = budget.judge(out, lse)
            assert verdict.correct, f"{config}: {verdict.reason}"
            assert torch.equal(out, run(inputs, config, gpu)[0]), str(config)
