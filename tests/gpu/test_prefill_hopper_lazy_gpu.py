"""prefill_hopper_lazy on a Hopper GPU: right however a row's maximum rises, twice the same bits."""

import pytest
import torch
from ahead import compile_ahead
from test_prefill_hopper_gpu import of, run, ways_of

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.prefill_hopper_lazy import FAMILY
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem

pytestmark = pytest.mark.gpu
# every kind of mask: none, one block, two, rows without a key; those of all lengths are the plain
# family's
LENGTHS = ((1000, 1000), (1024, 1024), (77, 300), (300, 77))


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    found = detect()
    if found.capability != 90:
        pytest.skip(f"needs sm_90, this is {found.arch}")
    return found


def lazy_ways(problems: list[Problem], gpu: Gpu) -> dict[Problem, list[Config]]:
    """The ways of each, compiled."""
    ways = {
        p: [Config.of(FAMILY.name, config.as_dict()) for config in ways_of(p, gpu)]
        for p in problems
    }
    wanted: dict[Config, list[Problem]] = {}
    for problem, configs in ways.items():
        for config in configs:
            wanted.setdefault(config, []).append(problem)
    compile_ahead(wanted, gpu)
    return ways


def wrong(inputs: Inputs, config: Config, gpu: Gpu, budget: Budget) -> str:
    """Why the result is wrong, or that three are not the same; empty where all is well."""
    out, lse = run(inputs, config, gpu)
    repeats = [run(inputs, config, gpu)[0] for _ in range(2)]
    if not all(torch.equal(out.view(torch.int16), r.view(torch.int16)) for r in repeats):
        return f"{config}: two runs differ"
    verdict = budget.judge(out, lse)
    return "" if verdict.correct else f"{config}: {verdict.reason}"


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_every_way_is_right_for_scores_of_any_spread(gpu, causal, head_dim):
    ways = lazy_ways([of(*lengths, causal, head_dim=head_dim) for lengths in LENGTHS], gpu)
    failures = []
    for problem, configs in ways.items():
        for factor in (1.0, 12.0):
            inputs = make_inputs(problem, device="cuda")
            inputs.q.mul_(factor)
            budget = Budget(inputs)
            failures += [wrong(inputs, config, gpu, budget) for config in configs]
    assert [failure for failure in failures if failure] == []


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("step", [-30.0, 0.1, 7.9, 8.1, 30.0, 500.0])
def test_maxima_that_rise_with_every_64_keys_walked(gpu, step, head_dim):
    """Keys are walked from the last to the first; in base 2, `step` for each 64."""
    problem = of(1000, 1000, False, head_dim=head_dim)
    (configs,) = lazy_ways([problem], gpu).values()
    inputs = make_inputs(problem, device="cuda")
    height = torch.arange(problem.seqlen_k, device="cuda").flip(0) // 64 * step / 1.4426950408889634
    inputs.q[..., 0] = 16.0
    inputs.k[..., 0] = (height * head_dim**0.5 / 16.0).to(inputs.k.dtype)[:, None]
    budget = Budget(inputs)
    failures = [wrong(inputs, config, gpu, budget) for config in configs]
    assert [failure for failure in failures if failure] == []


@pytest.mark.parametrize("sign", [-1.0, 1.0])
def test_logits_of_any_size(gpu, sign):
    problem = of(130, 300, True, num_heads=8, num_kv_heads=1)
    (configs,) = lazy_ways([problem], gpu).values()
    inputs = make_inputs(problem, device="cuda")
    inputs.k.zero_()
    inputs.q[..., 0], inputs.k[..., 0] = 448.0, sign * 1264.0
    budget = Budget(inputs)
    failures = [wrong(inputs, config, gpu, budget) for config in configs]
    assert [failure for failure in failures if failure] == []


def test_a_rows_bits_do_not_depend_on_whether_its_neighbours_maxima_rise(gpu):
    problem = of(300, 1000, False)
    (configs,) = lazy_ways([problem], gpu).values()
    for config in configs:
        outs = []
        for factor in (1.0, 40.0):
            inputs = make_inputs(problem, device="cuda")
            inputs.q[:, 1::2].mul_(factor)
            outs.append(run(inputs, config, gpu)[0][:, ::2])
        assert torch.equal(*outs), str(config)
