"""Dropout on a GPU: the host's masks bit for bit, results and gradients, seeds, graphs."""

import random
from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead
from drawn_masks import masks_differ
from exported_calls import load_module
from making import CHAIN, prefill_of, winner_of

from autoflash.accuracy import Budget, GradientBudget, budget_of
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import backward, backward_single, prefill
from autoflash.families.family import Family, space
from autoflash.gpu import Gpu, detect
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.problem import Problem
from autoflash.subjects import Candidate
from autoflash.trial import CudaDevice

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:autoflash")]

FAMILIES = (prefill.FAMILY, backward.FAMILY, backward_single.FAMILY)
KINDS = {
    "causal": {},
    "window, bias": {"causal": False, "window_left": 37, "window_right": 20, "bias": True},
    "packed": {"layout": "thd"},
}
SOME = [(120, 128), (0, 70), (1, 1), (77, 100), (128, 3), (5, 0)]  # of packed sequences
DRAWN = 3  # candidates beside the default


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(op: str, seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "dropout": True, **changes}
    return Problem(op, **fields)


def inputs_of(problem: Problem, **options) -> Inputs:
    if not problem.varlen:
        return make_inputs(problem, device="cuda", **options)
    packed = replace(problem, batch=len(SOME), lengths="ragged")
    return make_inputs(packed, device="cuda", lengths=SOME, **options)


def some_candidates(family: Family, gpu: Gpu, **changes) -> list[Config]:
    usual = of(family.op, 1000, 1000, **changes)
    judged = [config for config, reason in space(family, usual, gpu) if reason is None]
    drawn = random.Random(0).sample(judged, min(DRAWN, len(judged)))
    return list(dict.fromkeys([family.default(usual, gpu), *drawn]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_tile_draws_the_mask_of_the_host(gpu, family, kind):
    heads = {"num_heads": 3, **KINDS[kind]}
    configs = some_candidates(family, gpu, **heads)
    problems = [of(family.op, 120, 128, **heads)]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    inputs = inputs_of(of("prefill", 120, 128, **heads))
    assert [masks_differ(inputs, config, gpu) for config in configs] == [""] * len(configs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "head_dim"), [("bf16", 128), ("fp16", 64), ("bf16", 256), ("fp32", 64), ("bf16", 40)]
)
def test_results_and_gradients_are_right_at_edges(gpu, kind, dtype, head_dim):
    fields = {**KINDS[kind], "dtype": dtype, "head_dim": head_dim}
    failures = []
    for family in FAMILIES:
        problems = [of(family.op, *sizes, **fields) for sizes in ((385, 385), (77, 300), (300, 77))]
        problems = problems[:1] if problems[0].varlen else problems
        config = family.default(of(family.op, 1000, 1000, **fields), gpu)
        compile_ahead({config: problems}, gpu)
        for problem in problems:
            inputs = inputs_of(problem, wide_rows=8)
            verdict = budget_of(inputs).judge(*Candidate(config, gpu).run(inputs))
            if not verdict.correct:
                failures.append(f"{problem.seqlen_q} {config}: {verdict.reason}")
    assert failures == []


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_rows_of_a_long_sequence_are_right_and_the_worker_times_it(gpu, family):
    problem = of(family.op, 8192, 8192, num_heads=4, num_kv_heads=2)
    inputs, rows = make_inputs(problem, device="cuda"), sample_rows(problem, seed=0)
    config = family.default(problem, gpu)
    found = Candidate(config, gpu).run(inputs)
    verdict = budget_of(inputs, rows).judge(*picked(problem, *found, rows))
    assert verdict.correct, verdict.reason
    device, usual = CudaDevice(), of(family.op, 1024, 1024)
    assert device.check(usual, config, 0).correct
    device.prepare(usual, 0)
    assert min(device.screen(config, 4, 1e5, 1e9).samples_us) > 0
    device.release()


@pytest.fixture(scope="module")
def module(gpu, tmp_path_factory):
    """A module that carries a backward, exported for this GPU."""
    winners = [winner_of(p, gpu=gpu, chain=CHAIN) for p in (prefill_of(), of("backward", 512, 512))]
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(winners).text)
    return load_module(path)


def called(module, inputs: Inputs, **call):
    p = inputs.problem
    call = {**inputs.modifiers.of_prefill, "causal": p.causal, "layout": p.layout, **call}
    return module.prefill(inputs.q, inputs.k, inputs.v, return_lse=True, **call)


@pytest.mark.parametrize("kind", KINDS)
def test_autograd_of_the_exported_module_has_the_mask_of_its_forward(module, kind):
    """Four calls: planned, launched by the recipe, recalled, each under a seed of its own."""
    for seed in range(4):
        inputs = inputs_of(of("backward", 128, 128, **KINDS[kind]), seed=seed)
        leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out, lse = called(module, replace(inputs, **dict(zip("qkv", leaves, strict=True))))
        prompt = replace(inputs, problem=replace(inputs.problem, op="prefill"))
        verdict = Budget(prompt).judge(out.detach(), lse.detach())
        assert verdict.correct, verdict.reason
        found = Gradients(*torch.autograd.grad(out, leaves, inputs.dout))
        verdict = GradientBudget(inputs).judge(found)
        assert verdict.correct, verdict.reason


@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_repeated_calls_take_the_rng_that_each_is_given(module, kind):
    """In another order the second time, by then recalled."""
    inputs = inputs_of(of("prefill", 128, 128, **KINDS[kind]))
    rngs = [torch.tensor([seed, seed >> 1], device="cuda") for seed in range(6)]
    expected = [called(module, inputs, rng=rng) for rng in rngs]
    assert not torch.equal(expected[0][0], expected[1][0])
    for rng, results in reversed(list(zip(rngs, expected, strict=True))):
        again = called(module, inputs, rng=rng)
        assert all(torch.equal(a, b) for a, b in zip(again, results, strict=True))


def test_a_drawn_rng_follows_the_gpus_generator_and_waits_for_nothing(module):
    inputs = inputs_of(of("prefill", 128, 128))
    drawn = []
    for seed in (3, 3, 4):
        torch.cuda.manual_seed(seed)
        drawn.append([called(module, inputs, rng=None)[0] for _ in range(4)])
    assert all(torch.equal(a, b) for a, b in zip(drawn[0], drawn[1], strict=True))
    assert len({out.sum().item() for out in drawn[0]}) == 4
    assert not torch.equal(drawn[0][0], drawn[2][0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        called(module, inputs, rng=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_each_replay_of_a_graph_draws_others(module):
    inputs = inputs_of(of("prefill", 128, 128))
    called(module, inputs, rng=None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, _ = called(module, inputs, rng=None)
    results = []
    for _ in range(3):
        graph.replay()
        results.append(out.clone())
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[1], results[2])


def test_without_dropout_the_plain_kernels_are_launched(module):
    inputs = inputs_of(of("prefill", 128, 128))
    expected = module.prefill(inputs.q, inputs.k, inputs.v, causal=True)
    assert torch.equal(called(module, inputs, dropout_p=0.0)[0], expected)
