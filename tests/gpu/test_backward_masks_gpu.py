"""The backward on a GPU under masks beyond windows: rules, prefixes, documents and blocks."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from ahead import compile_ahead
from exported_calls import load_module
from making import CHAIN, prefill_of, winner_of
from test_backward_modifiers_gpu import BOTH, FAMILY, bits_differ, of, run

from autoflash.accuracy import GradientBudget
from autoflash.check import picked, sample_rows
from autoflash.export import export
from autoflash.families.family import space
from autoflash.forward import forward
from autoflash.gpu import Gpu, detect
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kinds import RULE
from autoflash.problem import Problem
from autoflash.runtime.masks import BlockLists

pytestmark = pytest.mark.gpu

BLOCKS: dict[str, Any] = {"masked_by": "blocks", "mask_block_q": 128, "mask_block_k": 128}
BLOCKS |= {"density": 40}
DOCUMENTS: dict[str, Any] = {"masked_by": "documents", "density": 30}
KINDS: dict[str, dict[str, Any]] = {
    "rule": {"mask": RULE},
    "rule and a bias": {"mask": RULE, "bias": True, "causal": False},
    "prefix": {"masked_by": "prefix", "density": 30},
    "documents": {**DOCUMENTS, "causal": False},
    "documents in a window": {**DOCUMENTS, "window_left": 65},
    "blocks": {**BLOCKS, "causal": False},
    "blocks and a rule": {**BLOCKS, "mask": RULE, "softcap": True, "sinks": True},
    "blocks and a bias": {**BLOCKS, "bias": True},
}
PACKED: dict[str, dict[str, Any]] = {
    "packed, rule": {"mask": RULE, "sinks": True},
    "packed, rule in a window": {"mask": RULE, "window_left": 65, "softcap": True},
    "packed, prefix": {"masked_by": "prefix", "density": 30, "alibi": True},
    "packed, documents": DOCUMENTS,
    "packed, documents in a window": {**DOCUMENTS, "window_left": 65, "sinks": True},
    "packed, documents and a bias": {**DOCUMENTS, "bias": True, "causal": False},
    "packed, documents and a rule": {**DOCUMENTS, "mask": RULE, "alibi": True},
    "packed, documents of narrow values": {**DOCUMENTS, "head_dim_v": 64, "dropout": True},
    "packed, bias": {"bias": True, "sinks": True},
    "packed, bias and a rule": {"bias": True, "mask": RULE, "causal": False},
}
DRAWN = 1  # candidates beside the default


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return detect()


@pytest.mark.parametrize("kind", KINDS)
def test_candidates_are_right_at_edges_and_repeat_their_bits(gpu: Gpu, kind: str) -> None:
    problems = [of(*lengths, **KINDS[kind]) for lengths in ((385, 385), (77, 300), (300, 77))]
    made = [make_inputs(problem, device="cuda", wide_rows=8) for problem in problems]
    assert wrong_candidates(gpu, of(1000, 1000, **KINDS[kind]), made) == []


@pytest.mark.parametrize("kind", PACKED)
def test_candidates_of_packed_sequences_are_right_and_repeat_their_bits(gpu, kind: str) -> None:
    lengths = ((385, 385), (0, 70), (1, 1), (77, 300), (130, 3), (5, 0))
    problem = of(385, 385, layout="thd", batch=6, lengths="ragged", **PACKED[kind])
    made = make_inputs(problem, device="cuda", lengths=lengths, wide_rows=8)
    assert wrong_candidates(gpu, problem, [made]) == []


def wrong_candidates(gpu: Gpu, usual: Problem, made: list[Inputs]) -> list[str]:
    """What of some candidates for a problem is beyond the budget, or does not repeat its bits."""
    configs = []
    for family in BOTH:
        judged = [config for config, reason in space(family, usual, gpu) if reason is None]
        default, chance = family.default(usual, gpu), random.Random(0)
        configs += {default, *chance.sample(judged, min(DRAWN, len(judged)))}
    problems = [inputs.problem for inputs in made]
    compile_ahead(dict.fromkeys(configs, problems), gpu)
    failures = []
    for inputs in made:
        budget, rows = GradientBudget(inputs), inputs.problem.seqlen_q
        for config in configs:
            found, again = run(inputs, config, gpu), run(inputs, config, gpu)
            for verdict in (budget.judge(*found), budget.judge(*again)):
                if not verdict.correct:
                    failures.append(f"{rows} {config}: {verdict.reason}")
            if config.family == FAMILY.name and bits_differ(found, again):
                failures.append(f"{rows} {config}: two runs differ")
    return failures


@pytest.mark.parametrize("kind", ["prefix", "documents", "blocks and a rule"])
def test_rows_of_a_long_sequence_are_right(gpu: Gpu, kind: str) -> None:
    problem = of(8192, 8192, **{"num_heads": 4, "num_kv_heads": 2, **KINDS[kind]})
    inputs, rows = make_inputs(problem, device="cuda"), sample_rows(problem, seed=0)
    budget = GradientBudget(inputs, rows=rows)
    for family in BOTH:
        found = run(inputs, family.default(problem, gpu), gpu)
        verdict = budget.judge(*picked(problem, *found, rows))
        assert verdict.correct, f"{family.name}: {verdict.reason}"


TUNED = ["rule", "prefix", "documents", "blocks", "packed, prefix", "packed, documents"]


def tuned_of(kind: str, seqlen: int, **packing: Any) -> Problem:
    masked = KINDS[kind] if kind in KINDS else {**PACKED[kind], "layout": "thd", **packing}
    return of(seqlen, seqlen, **masked)


def inputs_of(kind: str) -> Inputs:
    problem = tuned_of(kind, 300, batch=4, lengths="ragged")
    lengths = ((300, 300), (0, 70), (77, 200), (5, 0)) if problem.varlen else None
    return make_inputs(problem, device="cuda", lengths=lengths, wide_rows=8)


@pytest.fixture(scope="module")
def module(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Any:
    tuned = [tuned_of(kind, 512) for kind in TUNED]
    tuned = [p for each in tuned for p in (replace(each, op="prefill"), each)]
    winners = [winner_of(p, gpu=gpu, chain=CHAIN) for p in (prefill_of(), *tuned)]
    path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    path.write_text(export(winners).text)
    return load_module(path)


def call_of(inputs: Inputs) -> dict[str, Any]:
    given = inputs.modifiers._replace(window=(-1, -1)).of_prefill
    return {**given, "causal": inputs.problem.causal, "return_lse": True}


def copied(lists: BlockLists) -> BlockLists:
    """Lists that nobody has seen, so that those by keys are made of them."""
    names = BlockLists._fields[:4]
    return lists._replace(**{name: getattr(lists, name).clone() for name in names})


@pytest.mark.filterwarnings("ignore:autoflash")
@pytest.mark.parametrize("kind", TUNED)
def test_autograd_of_an_exported_module_never_waits_and_repeats_its_bits(module, kind) -> None:
    inputs = inputs_of(kind)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    runs = []
    for deterministic in (False, False, True):
        call = call_of(inputs) | {"deterministic": deterministic}
        if inputs.block_mask is not None:
            call["block_mask"] = copied(inputs.block_mask)
        torch.cuda.synchronize()
        if runs:  # kernels are loaded, which waits
            torch.cuda.set_sync_debug_mode("error")
        try:
            results = module.prefill(*leaves, **call)
            found = torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        runs.append(Gradients(*found))
    for found in runs:
        verdict = GradientBudget(inputs).judge(found)
        assert verdict.correct, verdict.reason
        assert all(torch.equal(a, b) for a, b in zip(found, runs[0], strict=True))


@pytest.mark.filterwarnings("ignore:autoflash")
@pytest.mark.parametrize("kind", TUNED)
def test_a_graph_of_inductor_has_the_gradients_of_the_eager_call(module, kind) -> None:
    inputs = inputs_of(kind)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    call = call_of(inputs) | {"deterministic": True}
    compiled = torch.compile(lambda *qkv: module.prefill(*qkv, **call), fullgraph=True)
    for _ in range(2):
        found, expected = (
            torch.autograd.grad(attend(*leaves), leaves, (inputs.dout, inputs.dlse))
            for attend in (compiled, lambda *qkv: module.prefill(*qkv, **call))
        )
        assert all(map(torch.equal, found, expected))
        verdict = GradientBudget(inputs).judge(Gradients(*found))
        assert verdict.correct, verdict.reason


@pytest.mark.filterwarnings("ignore:autoflash")
def test_a_graph_of_inductor_tells_in_its_forward_that_no_backward_was_tuned(gpu, tmp_path) -> None:
    path, rule = tmp_path / "attention_dispatch.py", {"mask": RULE}
    tuned = (of(512, 512), *(replace(of(512, 512, **on), op="prefill") for on in ({}, rule)))
    path.write_text(export([winner_of(p, gpu=gpu, chain=CHAIN) for p in tuned]).text)
    module = load_module(path)
    inputs = make_inputs(of(300, 300, **rule), device="cuda")
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]
    compiled = torch.compile(lambda *qkv: module.prefill(*qkv, **call_of(inputs)), fullgraph=True)
    with pytest.raises(module.ProblemError, match=r"backward: no kernels for causal with .*: none"):
        compiled(*leaves)
    with torch.no_grad():
        assert torch.isfinite(compiled(*leaves)[0]).all()


@pytest.mark.filterwarnings("ignore:autoflash")
def test_a_captured_step_follows_lists_that_change_in_place(module) -> None:
    inputs = make_inputs(of(300, 300, **KINDS["blocks"]), device="cuda", wide_rows=8)
    leaves = [t.detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v)]

    def step() -> Any:
        results = module.prefill(*leaves, **call_of(inputs))
        return torch.autograd.grad(results, leaves, (inputs.dout, inputs.dlse))

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    assert inputs.block_mask is not None
    for changed in (False, True):
        if changed:
            inputs.block_mask.kv_num_blocks[:, :, 0] = 0
        graph.replay()
        torch.cuda.synchronize()
        out, lse = forward(inputs.problem, inputs.q, inputs.k, inputs.v, inputs.modifiers)
        verdict = GradientBudget(replace(inputs, out=out, lse=lse)).judge(Gradients(*found))
        assert verdict.correct, f"changed: {changed}, {verdict.reason}"
