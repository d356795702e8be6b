"""prefill() of an exported module with gradients under masks beyond windows."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from exported_calls import load_module
from making import backward_of, prefill_of, winner_of
from test_backward_modifiers import changed
from test_training import CAUSAL, leaves, with_modifiers
from torch.nn.attention.flex_attention import create_block_mask

from autoflash.accuracy import GradientBudget
from autoflash.export import export
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.runtime.masks import block_lists

RULE = "(q_idx - kv_idx) % 3 != 1 or h == 1"
FORWARD_ALONE = "kv_idx % 2 == 0"
PACKED: dict[str, Any] = {"layout": "thd", "lengths": "ragged", "batch": 3}
MASKS: dict[str, dict[str, Any]] = {
    "rule": {"mask": RULE},
    "prefix": {"masked_by": "prefix", "density": 30},
    "documents": {"masked_by": "documents", "density": 40},
    "blocks": {"masked_by": "blocks", "density": 60, "mask_block_q": 16, "mask_block_k": 16},
}
OF_PACKED = ("rule", "prefix", "documents")
MASKS["blocks and a bias"] = {**MASKS["blocks"], "bias": True}

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("exported") / "attention_dispatch.py"
    packed = [MASKS[name] | PACKED for name in OF_PACKED]
    masks = (*MASKS.values(), *packed)
    tuned = [make(**mask) for mask in masks for make in (prefill_of, backward_of)]
    tuned += [prefill_of(mask=FORWARD_ALONE, **more) for more in ({}, PACKED)]
    path.write_text(export([winner_of(p) for p in tuned]).text)
    return load_module(path)


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_gradients_under_a_mask_are_those_of_the_reference(module: Any, mask: dict) -> None:
    """Twice: the second call is launched by the recipe of the first, of other tensors."""
    problem = replace(CAUSAL, **mask)
    for seed in (0, 1):
        inputs = make_inputs(problem, seed, wide_rows=1)
        verdict = GradientBudget(inputs).judge(*with_modifiers(module, inputs))
        assert verdict.correct, verdict.reason


@pytest.mark.parametrize("mask", OF_PACKED)
def test_packed_sequences_have_gradients_under_a_mask(module: Any, mask: str) -> None:
    problem, lengths = replace(CAUSAL, **MASKS[mask] | PACKED), [(9, 20), (0, 3), (20, 33)]
    for seed in (0, 1):
        inputs = make_inputs(problem, seed, lengths=lengths, wide_rows=1)
        verdict = GradientBudget(inputs).judge(*with_modifiers(module, inputs))
        assert verdict.correct, verdict.reason


def call(module: Any, inputs: Inputs, **changed: Any) -> Any:
    given = inputs.modifiers._replace(density=None).of_prefill
    return module.prefill(*leaves(inputs), **{**given, "window": (-1, -1), **changed}, causal=True)


def test_a_block_mask_of_torch_has_the_gradients_with_its_own_lists_by_keys(module: Any) -> None:
    def rule(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:  # causal=True, as call() says it
        return kv_idx <= q_idx + 13

    mask = create_block_mask(rule, None, None, 20, 33, device="cpu", BLOCK_SIZE=16)
    made = make_inputs(replace(CAUSAL, **MASKS["blocks"]))
    inputs = changed(made, block_mask=block_lists(mask))
    tensors = leaves(inputs)
    results = []
    for given in (mask, inputs.block_mask._replace(queries=None)):
        out = module.prefill(*tensors, causal=True, block_mask=given)
        results.append(torch.autograd.grad(out, tensors, inputs.dout))
    assert GradientBudget(inputs).judge(Gradients(*results[0])).correct
    assert all(map(torch.equal, *results))


def test_masks_without_gradients_are_refused_by_name(module: Any) -> None:
    inputs = make_inputs(replace(CAUSAL, mask=RULE))
    with pytest.raises(module.ProblemError, match=r"backward: no kernels for causal with .*: none"):
        call(module, inputs, mask=FORWARD_ALONE)
    ends = torch.tensor([0, 20], dtype=torch.int32)
    packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 20, "max_seqlen_k": 20}
    q, k, v = (t[0, :20].detach().requires_grad_() for t in (inputs.q, inputs.k, inputs.v))
    with pytest.raises(module.ProblemError, match=r"backward: no kernels for causal with varlen "):
        module.prefill(q, k, v, causal=True, mask=FORWARD_ALONE, **packed)
    pages = {"block_table": ends[None], "cache_seqlens": ends[1:]}
    with pytest.raises(module.ProblemError, match="with gradients: block_table is not supported"):
        module.prefill(*leaves(inputs), causal=True, mask=RULE, **pages)
    torch._dynamo.reset()
    compiled = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    for other in ({"out": torch.empty_like(inputs.q)}, pages):
        with pytest.raises(Exception, match="there is no backward yet of such a call in a graph"):
            compiled(*leaves(inputs), causal=True, mask=RULE, **other)


ALONE: dict[str, dict[str, Any]] = {
    "rule": {"mask": FORWARD_ALONE},
    "packed, rule": {"mask": FORWARD_ALONE} | PACKED,
    "packed, bias": {"bias": True} | PACKED,
    "narrow values and sinks": {"head_dim_v": 24, "sinks": True},
}


@pytest.mark.parametrize("fields", ALONE.values(), ids=ALONE)
def test_a_compiled_graph_tells_in_its_forward_what_the_eager_call_does(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    """That nobody tuned its backward, in the same line; who asks for no gradient is served."""
    path = tmp_path / "attention_dispatch.py"
    tuned = [prefill_of(), backward_of(), prefill_of(**fields)]
    path.write_text(export([winner_of(p) for p in tuned]).text)
    module: Any = load_module(path)
    problem = replace(CAUSAL, **fields)
    lengths = [(9, 20), (0, 3), (20, 33)] if problem.varlen else None
    inputs = make_inputs(problem, lengths=lengths, wide_rows=1)
    given = inputs.modifiers.of_prefill | {"window": (-1, -1), "causal": True}
    torch._dynamo.reset()
    compiled = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    told = []
    for prefill in (module.prefill, compiled):
        with pytest.raises(
            module.ProblemError, match=r"backward: no kernels for .*: none"
        ) as error:
            prefill(*leaves(inputs), **given)
        told.append(str(error.value))
    assert told[0] == told[1] and "\n" not in told[0]
    with torch.no_grad():
        expected = module.prefill(*leaves(inputs), **given)
        assert torch.equal(compiled(*leaves(inputs), **given), expected)


IN_GRAPHS = {**MASKS, **{f"packed, {name}": MASKS[name] | PACKED for name in OF_PACKED}}


@pytest.mark.parametrize("mask", IN_GRAPHS.values(), ids=IN_GRAPHS)
def test_a_compiled_graph_has_the_gradients_of_the_eager_call(module: Any, mask: dict) -> None:
    """Twice, with others' values: lists that were turned round for one are not another's."""
    torch._dynamo.reset()
    prefill = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    problem = replace(CAUSAL, **mask)
    lengths = [(9, 20), (0, 3), (20, 33)] if problem.varlen else None
    for seed in (0, 1):
        inputs = make_inputs(problem, seed, lengths=lengths, wide_rows=1)
        found = with_modifiers(SimpleNamespace(prefill=prefill), inputs)
        expected = with_modifiers(module, inputs)
        for one, other in zip((*found[0], *found[1]), (*expected[0], *expected[1]), strict=True):
            assert one is other or torch.equal(one, other)
        assert GradientBudget(inputs).judge(*found).correct


def test_a_graph_takes_the_lists_by_keys_that_a_block_mask_of_torch_has(
    module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None are made, and without gradients the graph is given none."""
    torch._dynamo.reset()
    lists = create_block_mask(lambda b, h, i, j: j <= i + 13, None, None, 20, 33, "cpu", 16)
    made = make_inputs(replace(CAUSAL, **MASKS["blocks"]))
    inputs = changed(made, block_mask=block_lists(lists))
    tensors, given = leaves(inputs), []

    def seen(graph: Any, example: Any) -> Any:
        given.append(len(example))
        return graph

    def made_of(*_: Any) -> Any:
        raise AssertionError("the lists were made")

    monkeypatch.setattr(module, "_made_of", made_of)
    prefill = torch.compile(module.prefill, fullgraph=True, backend="aot_eager")
    out = prefill(*tensors, causal=True, block_mask=lists)
    found = torch.autograd.grad(out, tensors, inputs.dout)
    assert GradientBudget(inputs).judge(Gradients(*found)).correct
    prefill = torch.compile(module.prefill, fullgraph=True, backend=seen)
    with torch.no_grad():
        prefill(*(t.detach() for t in tensors), causal=True, block_mask=lists)
    prefill(*tensors, causal=True, block_mask=lists)
    assert given == [7, 11]  # q, k, v and the lists of queries, then those of keys too


@pytest.mark.parametrize("mask", ["prefix", "blocks"])
def test_torchs_own_check_of_the_operator_with_masks_passes(module: Any, mask: str) -> None:
    inputs = make_inputs(replace(CAUSAL, **MASKS[mask]))
    options: dict[str, Any] = {"causal": True, "prefix_lens": inputs.prefix_lens}
    if (lists := inputs.block_mask) is not None:
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices")
        options |= {name: getattr(lists, name) for name in names}
        options |= {"mask_block_q": 16, "mask_block_k": 16}
    operator = getattr(torch.ops, module.operator_namespace()).prefill_masked.default
    checks = torch.library.opcheck(operator, leaves(inputs), options)
    assert set(checks.values()) == {"SUCCESS"}
