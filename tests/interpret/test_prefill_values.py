"""Prefill whose values have other channels than queries and keys, in the interpreter."""

from types import ModuleType
from typing import Any

import pytest
import torch
from running import run
from test_prefill import LOADS, config

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.families.prefill import FAMILY
from autoflash.inputs import make_inputs
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module

H200 = gpus.known("NVIDIA_H200")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def problem(head_dim: int, head_dim_v: int, **changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 2, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"seqlen_q": 70, "seqlen_k": 100, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return Problem("prefill", **(fields | changed))


ON: list[dict[str, Any]] = [
    {"causal": False},
    {"window_left": 20, "sinks": True},
    {"softcap": True, "bias": True},
    {"masked_by": "documents", "density": 30},
    {"masked_by": "blocks", "density": 50, "mask_block_q": 64, "mask_block_k": 32},
    {"layout": "bhsd", "dtype": "bf16"},
    {"layout": "thd", "lengths": "ragged"},
]


@pytest.mark.parametrize("widths", [(48, 32), (32, 16), (24, 64), (16, 40)], ids=str)
@pytest.mark.parametrize("on", ON, ids=str)
def test_values_may_be_narrower_or_wider_than_keys(
    on: dict[str, Any], widths: tuple[int, int]
) -> None:
    for kind in LOADS:
        inputs = make_inputs(problem(*widths, **on), wide_rows=8)
        verdict = Budget(inputs).judge(*run(inputs, config(LOAD=kind)))
        assert verdict.correct, f"{inputs.problem}, {kind}: {verdict.reason}"


def test_the_tuners_own_check_passes() -> None:
    p = problem(48, 32)
    assert InterpretedDevice(H200).check(p, FAMILY.default(p, H200), 0).correct


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("values") / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text)
    return exported_module(path)


@pytest.mark.parametrize("causal", [False, True])
def test_the_exported_module_serves_them(exported: ModuleType, causal: bool) -> None:
    for seed in (0, 1):
        inputs = make_inputs(problem(48, 32, causal=causal), seed)
        options = {"causal": causal, "return_lse": True}
        out, lse = exported.prefill(inputs.q, inputs.k, inputs.v, **options)
        assert out.shape == (2, 70, 2, 32)
        verdict = Budget(inputs).judge(out, lse)
        assert verdict.correct, verdict.reason
    with pytest.raises(exported.ProblemError, match="head_dim_v 20 is not a multiple of 8"):
        exported.prefill(inputs.q, inputs.k, inputs.v[..., :20].contiguous(), causal=causal)
    narrow = torch.empty(2, 70, 2, 48, dtype=torch.float16)
    with pytest.raises(exported.ProblemError, match=r"out must be \(2, 70, 2, 32\)"):
        exported.prefill(inputs.q, inputs.k, inputs.v, out=narrow)
