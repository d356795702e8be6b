"""The backward on a GPU: every candidate at the edges, real sizes, the exported module, memory."""

import gc
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
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.trial import CudaDevice

pytestmark = pytest.mark.gpu

EDGES = [(n, n) for n in (1, 64, 65, 128, 385)]
EDGES += [(77, 300), (300, 77), (130, 3), (1, 1000), (5, 0)]


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


def of(seqlen_q: int, seqlen_k: int, causal: bool = True, **changes) -> Problem:
    fields = {"dtype": "bf16", "batch": 2, "num_heads": 6, "num_kv_heads": 3, "head_dim": 128}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal, **changes}
    return Problem("backward", **fields)


def run(inputs: Inputs, config: Config, gpu: Gpu) -> Gradients:
    module = load(render(family_of(config.family).variant(inputs.problem)))
    gradients, _ = new_results(inputs)
    run_plan(plan_of(module, inputs, gradients, None, gpu, config, poison=True))
    return gradients


def parts(problem: Problem, gpu: Gpu) -> list[Config]:
    """Candidates in which each candidate for one of the two kernels occurs; all single passes."""
    candidates = [config for config, reason in space(FAMILY, problem, gpu) if reason is None]
    chosen, seen = [], set()
    for config in candidates:
        kernels = {(part, config["LOAD"], *_knobs(config, part)) for part in ("KV_", "Q_")}
        if not kernels <= seen:
            seen |= kernels
            chosen.append(config)
    singles = space(backward_single.FAMILY, problem, gpu)
    return [*chosen, *(config for config, reason in singles if reason is None)]


def _knobs(config: Config, part: str) -> list:
    return [value for name, value in config.knobs if name.startswith(part)]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp16", 40), ("fp32", 64)],
)
def test_every_kernel_is_right_at_every_edge_and_repeats_its_bits(  # case B40
    gpu, dtype, causal, head_dim
):
    configs = parts(of(1000, 1000, causal, dtype=dtype, head_dim=head_dim), gpu)
    problems = [of(*lengths, causal, dtype=dtype, head_dim=head_dim) for lengths in EDGES]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        inputs = make_inputs(problem, device="cuda")
        budget = GradientBudget(inputs)
        for config in configs:
            gradients, again = run(inputs, config, gpu), run(inputs, config, gpu)
            lengths = f"{problem.seqlen_q}x{problem.seqlen_k}"
            for verdict in (budget.judge(gradients), budget.judge(again)):
                if not verdict.correct:
                    failures.append(f"{lengths} {config}: {verdict.reason}")
            if config.family == FAMILY.name and not all(
                torch.equal(a, b) for a, b in zip(gradients, again, strict=True)
            ):
                failures.append(f"{lengths} {config}: two runs differ")
    assert failures == []


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
@pytest.mark.parametrize("wide_rows", [8, 1], ids=["aligned", "unaligned"])
def test_both_layouts_rows_of_any_width_and_a_gradient_of_lse(gpu, layout, wide_rows):
    for head_dim in (72, 128):
        problem = of(200, 333, head_dim=head_dim, layout=layout)
        inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
        budget = GradientBudget(inputs)
        for family in (FAMILY, backward_single.FAMILY):
            verdict = budget.judge(run(inputs, family.default(problem, gpu), gpu))
            assert verdict.correct, f"{family.name}, head_dim {head_dim}: {verdict.reason}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("widths", [(192, 128), (64, 96), (40, 256)], ids=str)
def test_values_of_another_width_are_right_at_every_edge_by_every_kernel(gpu, widths, causal):
    fields = {"head_dim": widths[0], "head_dim_v": widths[1]}
    configs = parts(of(1000, 1000, causal, **fields), gpu)
    problems = [of(*lengths, causal, **fields) for lengths in ((1, 1), (130, 3), (200, 333))]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for problem in problems:
        for wide_rows in (8, 1):
            inputs = make_inputs(problem, device="cuda", wide_rows=wide_rows)
            budget = GradientBudget(inputs)
            for config in configs if wide_rows == 8 else configs[:1]:
                verdict = budget.judge(run(inputs, config, gpu))
                if not verdict.correct:
                    failures.append(f"{problem.seqlen_q}, {config}: {verdict.reason}")
    assert failures == []


each_family = pytest.mark.parametrize(
    "family", [FAMILY, backward_single.FAMILY], ids=lambda each: each.name
)


@each_family
@pytest.mark.parametrize("heads", [(7, 1), (71, 1), (12, 4)], ids=str)
def test_groups_of_any_size(gpu, family, heads):  # case B23, case B46
    problem = of(300, 300, num_heads=heads[0], num_kv_heads=heads[1])
    inputs = make_inputs(problem, device="cuda")
    verdict = GradientBudget(inputs).judge(run(inputs, family.default(problem, gpu), gpu))
    assert verdict.correct, verdict.reason


@each_family
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_keys_past_the_last_one_count_for_nothing_where_all_logits_are_far_below_zero(  # case B07
    gpu, family, causal
):
    for lengths in ((65, 65), (100, 100), (1, 128), (1, 1)):
        problem = of(*lengths, causal, head_dim=64)
        plain = make_inputs(problem, device="cuda")
        q, k = plain.q.abs() + 10, -plain.k.abs() - 10
        out, lse = forward(problem, q, k, plain.v)
        assert lse.max() < -200  # p of a key of zeros would be infinite
        inputs = replace(plain, q=q, k=k, out=out, lse=lse)
        verdict = GradientBudget(inputs).judge(run(inputs, family.default(problem, gpu), gpu))
        assert verdict.correct, f"{lengths}: {verdict.reason}"


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_logits_of_ten_thousand_give_no_nan(gpu, dtype, causal):  # case B38
    problem = of(300, 300, causal, dtype=dtype)
    plain = make_inputs(problem, device="cuda")
    q, k = 40 * plain.q, 40 * plain.k
    out, lse = forward(problem, q, k, plain.v)
    assert lse.max() > 5000
    inputs = replace(plain, q=q, k=k, out=out, lse=lse)
    gradients = run(inputs, FAMILY.default(problem, gpu), gpu)
    assert all(each.isfinite().all() for each in gradients)
    verdict = GradientBudget(inputs).judge(gradients)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_of_a_long_sequence_are_right(gpu, head_dim):
    problem = of(16384, 16384, batch=1, num_heads=4, num_kv_heads=2, head_dim=head_dim)
    inputs, rows = make_inputs(problem, device="cuda"), sample_rows(problem, seed=0)
    budget = GradientBudget(inputs, rows=rows)
    for family in (FAMILY, backward_single.FAMILY):
        gradients = run(inputs, family.default(problem, gpu), gpu)
        verdict = budget.judge(picked(problem, gradients, None, rows)[0])
        assert verdict.correct, f"{family.name}: {verdict.reason}"


def test_more_than_65535_heads(gpu):  # case B14
    problem = of(16, 16, batch=8200, num_heads=8, num_kv_heads=8, head_dim=64)
    inputs = make_inputs(replace(problem, batch=1), device="cuda")
    many = {
        name: getattr(inputs, name).expand(8200, -1, -1, -1).contiguous()
        for name in ("q", "k", "v", "out", "dout")
    }
    lse = inputs.lse.expand(8200, -1, -1).contiguous()
    gradients = run(Inputs(problem, **many, lse=lse), FAMILY.default(problem, gpu), gpu)
    one = run(inputs, FAMILY.default(inputs.problem, gpu), gpu)
    assert all(torch.equal(a[-1:], b) for a, b in zip(gradients, one, strict=True))


@each_family
def test_the_worker_checks_times_and_checks_again_at_the_real_size(gpu, family):  # case B27
    problem = of(1024, 1024)
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
@pytest.mark.parametrize(
    "problem", [of(1000, 1000), of(130, 77, False, layout="bhsd")], ids=["causal", "full"]
)
def test_autograd_of_the_exported_module_is_right_and_bitwise_repeatable(module, problem):
    inputs = make_inputs(problem, device="cuda", wide_rows=8)
    tensors = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    call = {"causal": problem.causal, "layout": problem.layout, "return_lse": True}
    given = (inputs.dout, inputs.dlse)
    runs = [
        Gradients(*torch.autograd.grad(module.prefill(*tensors, **call), tensors, given))
        for _ in range(2)
    ]
    verdict = GradientBudget(inputs).judge(runs[0])
    assert verdict.correct, verdict.reason
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.filterwarnings("ignore:autoflash")
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_deterministic_gradients_repeat_while_another_stream_loads_the_gpu(  # case B47
    module, causal
):
    inputs = make_inputs(of(1024, 1024, causal, num_heads=16, num_kv_heads=2), device="cuda")
    tensors = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    load, aside = torch.randn(4096, 4096, device="cuda"), torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    first = None
    for _ in range(50):
        with torch.cuda.stream(aside):
            load.mm(load)
        out = module.prefill(*tensors, causal=causal, deterministic=True)
        found = torch.autograd.grad(out, tensors, inputs.dout)
        first = found if first is None else first
        assert all(map(torch.equal, found, first))
    aside.synchronize()


@pytest.mark.filterwarnings("ignore:autoflash")
def test_memory_beside_the_tensors_grows_with_the_length_and_not_its_square(module):
    beside = []
    for tokens in (8192, 16384, 32768):
        q, k, v = (
            torch.randn(1, tokens, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            for _ in range(3)
        )
        out = module.prefill(q, k, v, causal=True)
        dout = torch.randn_like(out)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        gradients = torch.autograd.grad(out, (q, k, v), dout)
        beside.append(torch.cuda.max_memory_allocated() - before)
        del q, k, v, out, dout, gradients
        gc.collect()  # what triton's compiling left goes now, not while the next length is measured
    assert beside[0] > 0
    assert beside[1] <= 2.1 * beside[0] and beside[2] <= 2.1 * beside[1]
