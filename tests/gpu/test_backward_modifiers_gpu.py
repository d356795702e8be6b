"""The backward on a GPU under windows, softcap, ALiBi, biases, sinks, and of packed sequences."""

import random
from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead
from exported_calls import load_module
from making import CHAIN, prefill_of, winner_of

from autoflash.accuracy import GradientBudget
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import backward_single, family_of
from autoflash.families.backward import FAMILY
from autoflash.families.family import space
from autoflash.forward import forward
from autoflash.gpu import Gpu, detect
from autoflash.gradients import Gradients, ModifierGradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.trial import CudaDevice

pytestmark = pytest.mark.gpu

BOTH = (FAMILY, backward_single.FAMILY)
KINDS = {
    "window": {"window_left": 99, "causal": False, "window_right": 40},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias": {"bias": True, "causal": False},
    "sinks": {"sinks": True},
    "all but alibi": {"window_left": 99, "softcap": True, "bias": True, "sinks": True},
    "packed": {"layout": "thd"},
    "packed, all": {
        "layout": "thd",
        "window_left": 99,
        "softcap": True,
        "alibi": True,
        "sinks": True,
    },
}
SOME = [(385, 385), (0, 70), (1, 1), (77, 300), (130, 3), (5, 0)]  # of packed sequences
DRAWN = 1  # candidates beside the default


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(seqlen_q: int, seqlen_k: int, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, **changes}
    return Problem("backward", **fields)


def inputs_of(problem: Problem, **options) -> Inputs:
    if not problem.varlen:
        return make_inputs(problem, device="cuda", **options)
    packed = replace(problem, batch=len(SOME), lengths="ragged")
    return make_inputs(packed, device="cuda", lengths=SOME, **options)


def run(inputs: Inputs, config: Config, gpu: Gpu):
    module = load(render(family_of(config.family).variant(inputs.problem)))
    gradients, beside = new_results(inputs)
    run_plan(plan_of(module, inputs, gradients, beside, gpu, config, poison=True))
    return gradients, beside or ModifierGradients()


def bits_differ(one, other) -> bool:
    pairs = zip((*one[0], *one[1]), (*other[0], *other[1]), strict=True)
    return any(a is not None and not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim"),
    [
        *((kind, "bf16", 128) for kind in KINDS),
        *(
            (kind, dtype, head_dim)
            for kind in ("all but alibi", "packed, all")
            for dtype, head_dim in [("fp16", 64), ("bf16", 256), ("fp32", 64), ("bf16", 40)]
        ),
    ],
)
def test_candidates_are_right_at_edges_and_repeat_their_bits(  # case B18, case B44
    gpu, kind, dtype, head_dim
):
    fields = {**KINDS[kind], "dtype": dtype, "head_dim": head_dim}
    problems = [of(385, 385, **fields), of(77, 300, **fields), of(300, 77, **fields)]
    problems = problems[:1] if problems[0].varlen else problems
    configs = []
    for family in BOTH:
        usual = of(1000, 1000, **fields)
        judged = [config for config, reason in space(family, usual, gpu) if reason is None]
        default, chance = family.default(usual, gpu), random.Random(0)
        configs += {default, *chance.sample(judged, min(DRAWN, len(judged)))}
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        inputs = inputs_of(problem, wide_rows=8)
        budget = GradientBudget(inputs)
        for config in configs:
            found, again = run(inputs, config, gpu), run(inputs, config, gpu)
            for verdict in (budget.judge(*found), budget.judge(*again)):
                if not verdict.correct:
                    failures.append(f"{problem.seqlen_q} {config}: {verdict.reason}")
            if config.family == FAMILY.name and bits_differ(found, again):
                failures.append(f"{problem.seqlen_q} {config}: two runs differ")
    assert failures == []


SHAPES = [(2, 6, 200, 333), (1, 6, 200, 333), (2, 1, 200, 1), (1, 1, 1, 333), (6, 1, 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_gradient_of_a_bias_is_summed_over_all_that_shares_it(gpu, dtype, shape):
    made = make_inputs(of(200, 333, bias=True, causal=False, dtype=dtype), device="cuda")
    changed = replace(made, bias=torch.randn(shape, device="cuda").to(made.q.dtype))
    out, lse = forward(changed.problem, changed.q, changed.k, changed.v, changed.modifiers)
    inputs = replace(changed, out=out, lse=lse)
    for family in BOTH:
        found = run(inputs, family.default(inputs.problem, gpu), gpu)
        verdict = GradientBudget(inputs).judge(*found)
        assert verdict.correct, f"{family.name}: {verdict.reason}"


@pytest.mark.parametrize("kind", ["window", "softcap", "alibi", "sinks", "packed, all"])
def test_rows_of_a_long_sequence_are_right(gpu, kind):
    sizes = {"batch": 2, "num_heads": 4, "num_kv_heads": 2}
    problem = of(8192, 8192, **{**sizes, **KINDS[kind]})
    if problem.varlen:
        problem = replace(problem, lengths="ragged")
    inputs, rows = make_inputs(problem, device="cuda"), sample_rows(problem, seed=0)
    budget = GradientBudget(inputs, rows=rows)
    for family in BOTH:
        found = run(inputs, family.default(problem, gpu), gpu)
        verdict = budget.judge(*picked(problem, *found, rows))
        assert verdict.correct, f"{family.name}: {verdict.reason}"


def test_what_one_packed_sequence_holds_changes_no_bit_of_another(gpu):
    lengths = [(100, 100), (200, 300), (90, 33)]
    problem = of(200, 300, layout="thd", lengths="ragged", batch=3)
    inputs = make_inputs(problem, device="cuda", lengths=lengths)
    noise = {}
    for name, (low, high) in {n: (100, 400 if n in "kv" else 300) for n in "qkv"}.items():
        noise[name] = getattr(inputs, name).clone()
        noise[name][:low] = noise[name][high:] = float("nan")
    for name in ("out", "dout"):
        noise[name] = getattr(inputs, name).clone()
        noise[name][:100] = noise[name][300:] = float("nan")
    for family in BOTH:
        config = family.default(problem, gpu)
        expected, found = run(inputs, config, gpu)[0], run(replace(inputs, **noise), config, gpu)[0]
        for name, one, other in zip(Gradients._fields, found, expected, strict=True):
            span = slice(100, 300 if name == "dq" else 400)
            if family.repeats or name != "dq":
                assert torch.equal(one[span], other[span]), f"{family.name}: {name}"
            assert one[span].isfinite().all(), f"{family.name}: {name}"


def test_many_short_sequences_of_more_tiles_than_65535(gpu):  # case B14
    batch = 70_000
    problem = of(1, 1, layout="thd", batch=batch, num_heads=2, num_kv_heads=1, head_dim=64)
    inputs = make_inputs(problem, device="cuda")
    for family in BOTH:
        gradients, _ = run(inputs, family.default(problem, gpu), gpu)
        # of one key P is 1, and dP - delta is 0 but for rounding
        assert torch.equal(gradients.dv, inputs.dout.float().sum(1, keepdim=True).bfloat16())
        assert gradients.dq.isfinite().all() and gradients.dk.isfinite().all()


@pytest.mark.parametrize("kind", ["all but alibi", "packed"])
@pytest.mark.parametrize("family", BOTH, ids=lambda family: family.name)
def test_the_worker_checks_times_and_checks_again_at_the_real_size(gpu, family, kind):
    problem = of(1024, 1024, **KINDS[kind])
    device, config = CudaDevice(), family.default(problem, gpu)
    assert device.check(problem, config, 0).correct
    device.prepare(problem, 0)
    timing = device.screen(config, 4, 1e5, 1e9)
    assert len(timing.samples_us) == 4 and min(timing.samples_us) > 0
    assert device.check_full(config, 0).correct
    device.release()


@pytest.fixture(scope="module")
def module(gpu, tmp_path_factory):
    """A module that carries a backward, exported for this GPU."""
    winners = [winner_of(p, gpu=gpu, chain=CHAIN) for p in (prefill_of(), of(512, 512))]
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(winners).text)
    return load_module(path)


@pytest.mark.filterwarnings("ignore:autoflash")
@pytest.mark.parametrize("kind", KINDS)
def test_autograd_of_the_exported_module_is_right_and_repeats_its_bits(module, kind):
    """Three calls: planned, launched by the recipe, and asked for bits that repeat."""
    inputs = inputs_of(of(300, 300, **KINDS[kind]), wide_rows=8)
    p, given = inputs.problem, (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    q, k, v, bias, sinks = (None if t is None else t.detach().requires_grad_() for t in given)
    wanted = [t for t in (q, k, v, bias, sinks) if t is not None]
    modifiers = inputs.modifiers._replace(bias=bias, sinks=sinks).of_prefill
    call = {**modifiers, "causal": p.causal, "layout": p.layout, "return_lse": True}
    runs = []
    for deterministic in (False, False, True):
        results = module.prefill(q, k, v, **call, deterministic=deterministic)
        runs.append(list(torch.autograd.grad(results, wanted, (inputs.dout, inputs.dlse))))
    for found in runs:
        beside = [
            None if t is None else found[3:].pop(0 if t is bias else -1) for t in (bias, sinks)
        ]
        verdict = GradientBudget(inputs).judge(Gradients(*found[:3]), ModifierGradients(*beside))
        assert verdict.correct, verdict.reason
        assert all(torch.equal(a, b) for a, b in zip(found, runs[0], strict=True))


@pytest.mark.filterwarnings("ignore:autoflash")
def test_inductor_compiles_a_layer_and_its_backward_with_the_same_bits(module):
    inputs = make_inputs(of(300, 300, bias=True, sinks=True), device="cuda")
    given = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.sinks)
    leaves = [t.detach().requires_grad_() for t in given]

    def layer(q, k, v, bias, sinks):
        return module.prefill(q, k, v, causal=True, bias=bias, sinks=sinks)

    compiled = torch.compile(layer, fullgraph=True)
    found, expected = (
        torch.autograd.grad(each(*leaves), leaves, inputs.dout) for each in (compiled, layer)
    )
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
