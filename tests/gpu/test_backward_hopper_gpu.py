"""The Hopper backward on a GPU: every candidate at the edges, dead memory, real sizes, repeats."""

from dataclasses import replace

import pytest
import torch
from ahead import compile_ahead, varied
from exported_calls import load_module
from making import CHAIN, winner_of

from autoflash.accuracy import GradientBudget
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import backward_hopper, backward_hopper_single, family_of
from autoflash.forward import forward
from autoflash.gpu import Gpu, detect
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.problem import Problem
from autoflash.reference import reference
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.trial import CudaDevice

pytestmark = pytest.mark.gpu

SPLIT, SINGLE = backward_hopper.FAMILY, backward_hopper_single.FAMILY
EDGES = [(n, n) for n in (1, 64, 65, 128, 385)]
EDGES += [(77, 300), (300, 77), (130, 3), (1, 1000), (5, 0), (640, 1024)]
EACH_WAY = [
    pytest.param(family, head_dim, causal, id=f"{family.name}-{head_dim}-{mask}")
    for family, head_dims in ((SPLIT, (64, 128, 256)), (SINGLE, (64, 128)))
    for head_dim in head_dims
    for mask, causal in (("causal", True), ("full", False))
]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    gpu = detect()
    if gpu.capability != 90:
        pytest.skip(f"{gpu.name} is no sm_90")
    return gpu


def of(seqlen_q: int, seqlen_k: int, causal: bool = True, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal, **changes}
    return Problem("backward", **fields)


def run(inputs: Inputs, config: Config, gpu: Gpu, softmax_scale: float | None = None) -> Gradients:
    """The gradients, from workspaces and results full of NaN."""
    module = load(render(family_of(config.family).variant(inputs.problem)))
    gradients, _ = new_results(inputs)
    run_plan(plan_of(module, inputs, gradients, None, gpu, config, softmax_scale, poison=True))
    assert isinstance(gradients, Gradients)
    return gradients


@pytest.mark.parametrize(("family", "head_dim", "causal"), EACH_WAY)
def test_every_kernel_is_right_at_every_edge_and_repeats_its_bits(  # case B40
    gpu, family, head_dim, causal
):
    shape = {"head_dim": head_dim, "dtype": "bf16" if causal else "fp16"}
    configs = varied(family, of(1000, 1000, causal, **shape), gpu)
    problems = [of(*lengths, causal, **shape) for lengths in EDGES]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    # of the single pass dq alone is added up in no fixed order
    fixed = slice(1 if family is SINGLE else 0, None)
    failures = []
    for problem in problems:
        inputs = make_inputs(problem, device="cuda")
        budget = GradientBudget(inputs)
        for config in configs:
            runs = [run(inputs, config, gpu) for _ in range(3)]
            lengths = f"{problem.seqlen_q}x{problem.seqlen_k}"
            for gradients in (runs[0], runs[2]):
                verdict = budget.judge(gradients)
                if not verdict.correct:
                    failures.append(f"{lengths} {config}: {verdict.reason}")
            for again in runs[1:]:
                if not all(map(torch.equal, runs[0][fixed], again[fixed])):
                    failures.append(f"{lengths} {config}: two runs differ")
    assert failures == []


@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("wide_rows", [8, 1], ids=["aligned", "unaligned"])
def test_both_layouts_rows_of_any_width_and_a_gradient_of_lse(gpu, family, layout, wide_rows):
    for head_dim in (40, 72, 128):
        problem = of(200, 333, head_dim=head_dim, layout=layout)
        inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
        verdict = GradientBudget(inputs).judge(run(inputs, family.default(problem, gpu), gpu))
        assert verdict.correct, f"head_dim {head_dim}: {verdict.reason}"


def followed_by_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values (batch, heads, tokens, channels), where NaN tokens follow each head's."""
    batch, heads, tokens, channels = tensor.shape
    storage = tensor.new_full((batch, heads, tokens + 128, channels), float("nan"))
    storage[:, :, :tokens] = tensor
    return storage[:, :, :tokens]


@pytest.mark.parametrize(("family", "head_dim", "causal"), EACH_WAY)
def test_what_lies_behind_the_last_token_of_a_head_is_not_read(gpu, family, head_dim, causal):
    names = ("q", "k", "v", "out", "dout")
    for lengths in ((300, 461), (461, 300), (100, 100)):
        problem = of(*lengths, causal, head_dim=head_dim, layout="bhsd")
        plain = make_inputs(problem, device="cuda")
        spoilt = {name: followed_by_nan(getattr(plain, name)) for name in names}
        inputs = replace(plain, **spoilt)
        verdict = GradientBudget(plain).judge(run(inputs, family.default(problem, gpu), gpu))
        assert verdict.correct, f"{lengths}: {verdict.reason}"


@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
@pytest.mark.parametrize("heads", [(7, 1), (71, 1), (12, 4)], ids=str)
def test_groups_of_any_size(gpu, family, heads):  # case B23, case B46
    problem = of(300, 300, num_heads=heads[0], num_kv_heads=heads[1])
    inputs = make_inputs(problem, device="cuda")
    verdict = GradientBudget(inputs).judge(run(inputs, family.default(problem, gpu), gpu))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kv_slots", [1, 2])
def test_programs_that_take_many_units_are_right(gpu, kv_slots, head_dim, causal):
    for lengths in ((700, 1000), (1000, 700), (257, 2000)):
        problem = of(*lengths, causal, batch=8, num_heads=32, num_kv_heads=16, head_dim=head_dim)
        knobs = SINGLE.default(problem, gpu).as_dict() | {"DS_SLOTS": 2, "KV_SLOTS": kv_slots}
        config = Config.of(SINGLE.name, knobs)
        inputs = make_inputs(problem, device="cuda")
        budget, runs = GradientBudget(inputs), [run(inputs, config, gpu) for _ in range(3)]
        for gradients in runs:
            verdict = budget.judge(gradients)
            assert verdict.correct, f"{lengths}: {verdict.reason}"
            assert torch.equal(gradients.dk, runs[0].dk) and torch.equal(gradients.dv, runs[0].dv)


@pytest.mark.parametrize(("family", "head_dim", "causal"), EACH_WAY)
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_of_ten_thousand_give_no_nan(gpu, family, head_dim, causal, dtype):  # case B38
    problem = of(300, 300, causal, dtype=dtype, head_dim=head_dim)
    plain = make_inputs(problem, device="cuda")
    # multiples of 10: sums of 256 products are exact in fp32, where 5000 is known to 0.0005
    q, k = (10 * (4 * tensor).round() for tensor in (plain.q, plain.k))
    out, lse = forward(problem, q, k, plain.v)
    assert lse.max() > 5000
    inputs = replace(plain, q=q, k=k, out=out, lse=lse)
    gradients = run(inputs, family.default(problem, gpu), gpu)
    assert all(each.isfinite().all() for each in gradients)
    verdict = GradientBudget(inputs).judge(gradients)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(("family", "head_dim", "causal"), EACH_WAY)
def test_keys_past_the_last_one_count_for_nothing_where_all_logits_are_far_below_zero(  # case B07
    gpu, family, head_dim, causal
):
    problem = of(200, 300, causal, head_dim=head_dim)
    plain = make_inputs(problem, device="cuda")
    q, k = plain.q.abs() + 10, -plain.k.abs() - 10
    out, lse = forward(problem, q, k, plain.v)
    assert lse.max() < -200  # p of a key of zeros would be infinite
    inputs = replace(plain, q=q, k=k, out=out, lse=lse)
    verdict = GradientBudget(inputs).judge(run(inputs, family.default(problem, gpu), gpu))
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
def test_a_scale_of_zero_leaves_the_mean(gpu, family):
    problem = of(200, 300)
    plain = make_inputs(problem, device="cuda")
    out, lse = reference(plain, 0.0)
    inputs = replace(plain, out=out.to(plain.q.dtype), lse=lse.float())
    gradients = run(inputs, family.default(problem, gpu), gpu, softmax_scale=0.0)
    assert not gradients.dq.any() and not gradients.dk.any()
    verdict = GradientBudget(inputs, 0.0).judge(gradients)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize(("family", "head_dim", "causal"), EACH_WAY)
def test_rows_of_a_long_sequence_are_right(gpu, family, head_dim, causal):
    problem = of(16384, 16384, causal, batch=1, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    inputs, rows = make_inputs(problem, device="cuda"), sample_rows(problem, seed=0)
    gradients = run(inputs, family.default(problem, gpu), gpu)
    sampled = picked(problem, gradients, None, rows)[0]
    verdict = GradientBudget(inputs, rows=rows).judge(sampled)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
def test_more_than_65535_heads(gpu, family):  # case B14
    problem = of(16, 16, batch=8200, num_heads=8, num_kv_heads=8, head_dim=64)
    inputs = make_inputs(replace(problem, batch=1), device="cuda")
    many = {
        name: getattr(inputs, name).expand(8200, -1, -1, -1).contiguous()
        for name in ("q", "k", "v", "out", "dout")
    }
    assert inputs.lse is not None
    lse = inputs.lse.expand(8200, -1, -1).contiguous()
    gradients = run(Inputs(problem, **many, lse=lse), family.default(problem, gpu), gpu)
    last = Gradients(*(each[-1:] for each in gradients))
    verdict = GradientBudget(inputs).judge(last)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
def test_the_worker_checks_times_and_checks_again_at_the_real_size(gpu, family):  # case B27
    problem = of(1024, 1024)
    device, config = CudaDevice(), family.default(problem, gpu)
    assert device.check(problem, config, 0).correct
    device.prepare(problem, 0)
    timing = device.screen(config, 4, 1e5, 1e9)
    assert len(timing.samples_us) == 4 and min(timing.samples_us) > 0
    assert device.check_full(config, 0).correct
    device.release()


@pytest.mark.filterwarnings("ignore:autoflash")
@pytest.mark.parametrize("family", [SPLIT, SINGLE], ids=lambda each: each.name)
def test_autograd_of_an_exported_module_is_right_call_after_call(gpu, family, tmp_path):
    problem = of(1000, 900, layout="bhsd")
    tuned = replace(problem, op="prefill")
    winners = [
        winner_of(tuned, gpu=gpu, chain=CHAIN),
        winner_of(problem, family.default(problem, gpu), gpu=gpu, chain=CHAIN),
    ]
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(winners).text)
    module = load_module(path)
    call = {"causal": True, "layout": "bhsd", "return_lse": True}
    for seed in range(3):  # planned, then launched again by its recipe, for other tensors
        inputs = make_inputs(problem, seed, device="cuda", wide_rows=8)
        tensors = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
        out, lse = module.prefill(*tensors, **call)
        given = (inputs.dout, inputs.dlse)
        gradients = Gradients(*torch.autograd.grad((out, lse), tensors, given))
        verdict = GradientBudget(inputs).judge(gradients)
        assert verdict.correct, f"call {seed}: {verdict.reason}"
