"""Packed sequences in the interpreter: any lengths, none of them known to the host."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from running import run
from test_prefill import LOADS, config

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.config import Config
from autoflash.export import export
from autoflash.families.prefill import FAMILY
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.modifiers import Modifiers
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module

H200 = gpus.known("NVIDIA_H200")
NAN = float("nan")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")

# queries and keys: around tiles of 64 and 32, none at all on either side, one of many
RAGGED = [(0, 5), (64, 64), (1, 1), (65, 33), (5, 0), (0, 0), (31, 100), (3, 130), (0, 7)]


def problem(lengths: list[tuple[int, int]], **changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}
    rows, keys = (max(each) for each in zip(*lengths, strict=True))
    sizes = {"batch": len(lengths), "seqlen_q": rows, "seqlen_k": keys}
    return Problem("prefill", **{**fields, **sizes, "layout": "thd", "lengths": "ragged"} | changed)


def packed(lengths: list[tuple[int, int]] = RAGGED, **changed: Any) -> Inputs:
    return make_inputs(problem(lengths, **changed), lengths=lengths)


def assert_right(inputs: Inputs, chosen: Config) -> None:
    verdict = Budget(inputs).judge(*run(inputs, chosen))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


MODIFIED = [
    {"causal": True},
    {"causal": False},
    {"causal": True, "window_left": 20},
    {"causal": False, "window_left": 9, "window_right": 30, "sinks": True},
    {"causal": True, "softcap": True, "alibi": True},
]


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("modified", MODIFIED, ids=str)
def test_sequences_of_any_lengths_are_right_under_any_mask(  # case B18
    modified: dict, kind: str
) -> None:
    assert_right(packed(**modified), config(LOAD=kind))


@pytest.mark.parametrize("tile", [(16, 16), (128, 64), (32, 128)], ids=str)
def test_tiles_of_any_size_begin_with_each_sequence(tile: tuple[int, int]) -> None:
    assert_right(packed(), config(BLOCK_M=tile[0], BLOCK_N=tile[1]))


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("heads", [(6, 2), (7, 1)], ids=str)
def test_types_and_grouped_heads_are_right(dtype: str, heads: tuple[int, int]) -> None:
    fields = {"dtype": dtype, "num_heads": heads[0], "num_kv_heads": heads[1], "head_dim": 40}
    assert_right(packed(RAGGED[3:8], **fields), config())


@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_have_the_bits_of_each_alone(causal: bool) -> None:
    inputs = packed(causal=causal)
    out, lse = run(inputs, config())
    assert lse is not None and inputs.cu_seqlens_q is not None
    for b, (rows, keys) in enumerate(RAGGED):
        if not rows:
            continue
        q, k, v = (t.transpose(0, 1)[None].contiguous() for t in inputs.sequence(b))
        sizes = {"batch": 1, "seqlen_q": rows, "seqlen_k": keys, "lengths": "equal"}
        alone = replace(inputs.problem, layout="bshd", **sizes)
        expected, expected_lse = run(Inputs(alone, q, k, v), config())
        assert expected_lse is not None
        span = slice(*inputs.cu_seqlens_q[b : b + 2].tolist())
        assert torch.equal(out[span], expected[0])
        assert torch.equal(lse[:, span], expected_lse[0])


def test_queries_without_keys_are_zero_and_their_lse_minus_infinity() -> None:  # case B06
    inputs = packed()
    out, lse = run(inputs, config())
    assert lse is not None and inputs.cu_seqlens_q is not None
    span = slice(*inputs.cu_seqlens_q[4:6].tolist())  # 5 queries, no key
    assert (out[span] == 0).all() and (lse[:, span] == -math.inf).all()


@pytest.mark.parametrize("kind", LOADS)
def test_what_one_sequence_holds_changes_no_bit_of_the_others(kind: str) -> None:
    inputs = packed()
    out, lse = run(inputs, config(LOAD=kind))
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    rows, keys = (slice(*cu[6:8].tolist()) for cu in (inputs.cu_seqlens_q, inputs.cu_seqlens_k))
    spoilt = [t.clone() for t in (inputs.q, inputs.k, inputs.v)]
    for tensor, span in zip(spoilt, (rows, keys, keys), strict=True):
        tensor[span] = NAN
    q, k, v = spoilt
    other, other_lse = run(replace(inputs, q=q, k=k, v=v), config(LOAD=kind))
    assert lse is not None and other_lse is not None
    others = torch.ones(len(out), dtype=torch.bool)
    others[rows] = False
    assert torch.equal(out[others], other[others])
    assert torch.equal(lse[:, others], other_lse[:, others])
    assert other[rows].isnan().any()


def test_rows_past_the_last_sequence_are_not_written() -> None:
    inputs = packed()
    longer = replace(inputs, q=torch.nn.functional.pad(inputs.q, (0, 0, 0, 0, 0, 70)))
    out, lse = run(longer, config())
    assert lse is not None and out[len(inputs.q) :].isnan().all()
    assert lse[:, len(inputs.q) :].isnan().all()
    assert torch.equal(out[: len(inputs.q)], run(inputs, config())[0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_where_sequences_begin_may_be_told_in_either_type(dtype: torch.dtype) -> None:
    inputs = packed()
    assert inputs.cu_seqlens_q is not None and inputs.cu_seqlens_k is not None
    ends = {n: getattr(inputs, n).to(dtype) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    assert torch.equal(run(replace(inputs, **ends), config())[0], run(inputs, config())[0])


def test_equal_keys_make_lse_the_log_of_how_many_are_seen() -> None:  # case B50
    inputs = packed(dtype="fp32", causal=True)
    _, lse = run(replace(inputs, k=inputs.k * 0), config())
    assert lse is not None
    counts = [max(0, i + 1 + keys - rows) for rows, keys in RAGGED for i in range(rows)]
    expected = torch.tensor([math.log(n) if n else -math.inf for n in counts])
    torch.testing.assert_close(lse, expected.expand(2, -1), rtol=2**-20, atol=2**-20)


def plan(inputs: Inputs, chosen: Config) -> tuple:
    module = load(render(FAMILY.variant(inputs.problem)))
    (launch,) = plan_of(module, inputs, *new_outputs(inputs), H200, chosen)
    return launch


def test_many_short_sequences_are_one_dimension_of_the_grid() -> None:  # case B14
    """Sequences of one token, of which there are more than two axes of a grid hold."""
    many = replace(problem([(1, 1)] * 65_600, num_heads=1), lengths="equal")
    inputs = make_inputs(many)
    _, grid, _, _ = plan(inputs, config(BLOCK_M=16))
    assert grid == (65_600 // 16 + 65_600,)
    few = make_inputs(replace(many, batch=60))
    out, lse = run(few, config(BLOCK_M=16))
    rows = sample_rows(few.problem, 0)
    verdict = Budget(few, rows=rows).judge(*picked(few.problem, out, lse, rows))
    assert verdict.correct, verdict.reason
    assert torch.equal(out, few.v)


def test_programs_are_those_of_the_tokens_and_not_of_the_longest() -> None:
    inputs = packed([(1000, 1000), *[(3, 3)] * 20])
    _, grid, _, _ = plan(inputs, config(BLOCK_M=64))
    assert grid[0] <= 2 * (1060 // 64 + 21)


def test_the_tuners_own_check_passes() -> None:
    p = problem([(70, 70)] * 3, causal=True)
    assert InterpretedDevice(H200).check(p, FAMILY.default(p, H200), 0).correct


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("packed") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    packing = dict(zip(Modifiers._fields[5:9], inputs.modifiers[5:9], strict=True))
    arguments = {"causal": inputs.problem.causal, "return_lse": True, **packing, **changed}
    return module.prefill(inputs.q, inputs.k, inputs.v, **arguments)


def test_the_exported_module_serves_packed_sequences(exported: ModuleType) -> None:
    for lengths, bias in ((RAGGED, False), (RAGGED[:5], False), (RAGGED, True), (RAGGED, True)):
        inputs = packed(lengths, causal=True, bias=bias)
        verdict = Budget(inputs).judge(*call(exported, inputs, bias=inputs.bias))
        assert verdict.correct, verdict.reason


def test_lengths_of_one_size_class_are_served_by_one_choice(exported: ModuleType) -> None:
    before = sum(exported.coverage().values())
    for longest in (65, 70, 128):
        out, _ = call(exported, packed(), max_seqlen_q=longest)
        assert torch.equal(out, call(exported, packed())[0])
        told = exported.explain(call, exported, packed(), max_seqlen_q=longest)
        assert told["problem"].seqlen_q == 128 and told["problem"].batch == 16
    assert sum(exported.coverage().values()) == before + 9


def test_where_there_are_no_queries_at_all_nothing_is_launched(  # case B18
    exported: ModuleType,
) -> None:
    inputs = packed([(0, 5), (0, 0)], seqlen_q=1)
    out, lse = call(exported, inputs)
    assert out.shape == (0, 2, 16) and lse.shape == (2, 0)
    none = torch.zeros(1, dtype=torch.int32)
    nobody = {"cu_seqlens_q": none, "cu_seqlens_k": none, "max_seqlen_q": 0, "max_seqlen_k": 0}
    assert call(exported, inputs, **nobody)[0].shape == (0, 2, 16)


def test_checking_is_asked_for_by_name(exported: ModuleType) -> None:
    inputs = packed()
    call(exported, inputs, check=True)
    with pytest.raises(exported.ProblemError, match="has a sequence of 65 tokens"):
        call(exported, inputs, check=True, max_seqlen_q=64)
