"""The portable prefill family on a GPU: every candidate at every edge, any strides, any size."""

from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead
from running import run

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.family import space
from autoflash.families.prefill import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu

EDGES = [(n, n) for n in (1, 63, 64, 65, 127, 128, 129, 1000)]
EDGES += [(77, 300), (300, 77), (130, 3), (1, 1000), (192, 128), (5, 0)]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(seqlen_q: int, seqlen_k: int, causal: bool, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= changes
    return Problem("prefill", seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, **fields)


def binaries(problem: Problem, gpu: Gpu) -> list[Config]:
    """The candidates of the problem, one of each binary."""
    candidates = [config for config, reason in space(FAMILY, problem, gpu) if reason is None]
    return list({FAMILY.binary(config): config for config in candidates}.values())


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_every_candidate_is_right_at_every_edge_and_repeats_its_bits(  # case B06, case B40
    gpu, dtype, causal, head_dim
):
    configs = binaries(of(1000, 1000, causal, dtype=dtype, head_dim=head_dim), gpu)
    problems = [of(*lengths, causal, dtype=dtype, head_dim=head_dim) for lengths in EDGES]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        inputs = make_inputs(problem, device="cuda")
        budget = Budget(inputs)
        for config in configs:
            out, lse = run(inputs, config, gpu=gpu)
            verdict = budget.judge(out, lse)
            lengths = f"{problem.seqlen_q}x{problem.seqlen_k}"
            if not verdict.correct:
                failures.append(f"{lengths} {config}: {verdict.reason}")
            if not torch.equal(out, run(inputs, config, gpu=gpu)[0]):
                failures.append(f"{lengths} {config}: two runs differ")
    assert failures == []


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("wide_rows", [0, 8, 1], ids=["contiguous", "aligned", "unaligned"])
def test_both_layouts_and_rows_of_any_width(gpu, layout, wide_rows):
    for head_dim in (64, 72, 128):
        problem = of(200, 333, True, head_dim=head_dim, layout=layout)
        configs = binaries(problem, gpu)
        compile_ahead({config: [problem] for config in configs}, gpu, wide_rows=wide_rows)
        inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
        budget = Budget(inputs)
        for config in configs:
            verdict = budget.judge(*run(inputs, config, gpu=gpu))
            assert verdict.correct, f"head_dim {head_dim} {config}: {verdict.reason}"


def test_keys_of_one_sequence_for_a_whole_batch(gpu):
    """K and V expanded over the batch have a stride of 0, which no descriptor has."""
    problem = of(100, 260, True, batch=3)
    one = make_inputs(replace(problem, batch=1), device="cuda")
    q = make_inputs(problem, seed=1, device="cuda").q
    k, v = (t.expand(3, -1, -1, -1) for t in (one.k, one.v))
    inputs = Inputs(problem, q, k, v)
    verdict = Budget(inputs).judge(*run(inputs, FAMILY.default(problem, gpu), gpu=gpu))
    assert verdict.correct, verdict.reason


def test_more_than_65535_heads_and_a_result_of_more_than_2_to_the_31_elements(gpu):  # case B14
    problem = of(16, 16, True, batch=10923, num_heads=6, num_kv_heads=6, head_dim=64)
    assert problem.batch * problem.num_heads > 65535
    inputs = make_inputs(problem, device="cuda")
    out, lse = run(inputs, FAMILY.default(problem, gpu), gpu=gpu)
    last = Inputs(replace(problem, batch=1), inputs.q[-1:], inputs.k[-1:], inputs.v[-1:])
    assert Budget(last).judge(out[-1:], lse[-1:]).correct
    del inputs, out, lse, last
    torch.cuda.empty_cache()
    problem = of(270000, 64, False, batch=1, num_heads=64, num_kv_heads=1)
    inputs = make_inputs(problem, device="cuda")
    assert inputs.q.numel() > 2**31
    default = FAMILY.default(problem, gpu)
    for load in ("descriptor", "pointer") if gpu.capability >= 90 else ("pointer",):
        config = Config.of("prefill", {**default.as_dict(), "LOAD": load})
        out, lse = run(inputs, config, gpu=gpu)
        rows = slice(problem.seqlen_q - 100, None)
        last = Inputs(replace(problem, seqlen_q=100), inputs.q[:, rows], inputs.k, inputs.v)
        verdict = Budget(last).judge(out[:, rows], lse[..., rows])
        assert verdict.correct, f"{config}: {verdict.reason}"
