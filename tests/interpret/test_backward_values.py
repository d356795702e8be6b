"""The portable backward of values that have other channels than keys, in the interpreter."""

from typing import Any

import pytest
from test_backward import WAYS, assert_right, config, every_way, run, single

from autoflash import gpu as gpus
from autoflash.accuracy import GradientBudget
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.inputs import make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan

H200 = gpus.known("NVIDIA_H200")

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

WIDTHS = [(24, 40), (40, 24)]


def problem(head_dim: int, head_dim_v: int, **changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"seqlen_q": 40, "seqlen_k": 70, "head_dim": head_dim, "head_dim_v": head_dim_v}
    return Problem("backward", **(fields | changed))


ON: list[dict[str, Any]] = [
    {"causal": False, "dtype": "fp32"},
    {"layout": "bhsd", "dtype": "bf16", "batch": 2, "num_kv_heads": 2},
    {"seqlen_q": 70, "seqlen_k": 37},  # rows without keys
    {"window_left": 20, "softcap": True, "alibi": True},
    {"masked_by": "documents", "density": 30},
    {"masked_by": "blocks", "density": 50, "mask_block_q": 64, "mask_block_k": 64, "seqlen_q": 70},
    {"masked_by": "prefix", "density": 30, "causal": True},
    {"mask": "q_idx % 3 != kv_idx % 5"},
    {"dropout": True},
    {"layout": "thd", "lengths": "ragged", "batch": 3},
    {"layout": "thd", "lengths": "ragged", "batch": 3, "window_left": 20, "dropout": True},
]


@pytest.mark.parametrize("widths", WIDTHS, ids=str)
@pytest.mark.parametrize("on", ON, ids=str)
def test_gradients_of_values_narrower_or_wider_than_keys_are_right(
    on: dict[str, Any], widths: tuple[int, int]
) -> None:
    inputs = make_inputs(problem(*widths, **on), wide_rows=8)  # neighbours are no numbers
    for way in (config(LOAD="descriptor"), single()):
        assert_right(inputs, way)


@every_way
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_biases_and_sinks_have_their_gradients_too(way: Config, widths: tuple[int, int]) -> None:
    inputs = make_inputs(problem(*widths, bias=True, sinks=True, softcap=True))
    module = load(render(family_of(way.family).variant(inputs.problem)))
    gradients, of_modifiers = new_results(inputs)
    run_plan(plan_of(module, inputs, gradients, of_modifiers, H200, way, poison=True))
    verdict = GradientBudget(inputs).judge(gradients, of_modifiers)
    assert verdict.correct, verdict.reason


@every_way
def test_rows_without_a_visible_key_have_no_gradient(way: Config) -> None:
    gradients = run(make_inputs(problem(24, 40, seqlen_q=70, seqlen_k=3)), way)
    assert (gradients.dq[:, :67] == 0).all()
    no_keys = run(make_inputs(problem(24, 40, seqlen_q=17, seqlen_k=0)), way)
    assert (no_keys.dq == 0).all() and no_keys.dk.numel() == no_keys.dv.numel() == 0


def test_widths_of_deepseek_are_right_by_the_defaults() -> None:
    p = problem(192, 128, batch=1, num_heads=1, num_kv_heads=1, seqlen_q=9, seqlen_k=33)
    inputs = make_inputs(p)
    for way in WAYS:
        assert_right(inputs, family_of(way.family).default(p, H200))


@every_way
def test_the_tuners_own_check_passes(way: Config) -> None:
    p = problem(40, 24)
    assert InterpretedDevice(H200).check(p, family_of(way.family).default(p, H200), 0).correct
