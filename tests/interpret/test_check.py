"""Checking a candidate: what is planted wrong is found, and what is merely different is not."""

from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl

from autoflash.accuracy import Budget
from autoflash.check import picked, sample_rows
from autoflash.child import Failure
from autoflash.families import serving
from autoflash.gpu import known
from autoflash.inputs import make_inputs
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem

GPU = known("NVIDIA_H200")
PREFILL = Problem("prefill", "fp16", 1, 4, 2, 32, 256, 256, causal=False)
DECODE = Problem("decode", "fp16", 2, 4, 2, 32, 1, 128, page_size=16)
TILE = 64


@triton.jit
def add_kernel(tensor):
    tl.store(tensor, tl.load(tensor) + 1.0)


@triton.jit
def copy_kernel(source, out):
    tl.store(out, tl.load(source))


@triton.jit
def write_kernel(tensor, at):
    tl.store(tensor + at, 1.0)


def drop_last_key(inputs):
    keys = inputs.problem.seqlen_k - 1
    shorter = replace(inputs.problem, seqlen_k=keys)
    return replace(inputs, problem=shorter, k=inputs.k[:, :keys], v=inputs.v[:, :keys])


def forget_last_partial_tile(inputs):
    """Wrong on lengths that no tile divides, right on all others."""
    v = inputs.v.clone()
    whole = inputs.problem.seqlen_k // TILE * TILE
    v[:, whole:] = 0
    return replace(inputs, v=v)


def other_order(inputs):
    """Right, but summed from the other end."""
    return replace(inputs, k=inputs.k.flip(1), v=inputs.v.flip(1))


def one_length_short(inputs):
    assert inputs.cache_seqlens is not None
    return replace(inputs, cache_seqlens=(inputs.cache_seqlens - 1).clamp_min(0))


class Planted(InterpretedDevice):
    """Gives the candidate other inputs than it is judged by, or launches something else."""

    def __init__(self, change=lambda inputs: inputs, launches=None):
        super().__init__(GPU)
        self._change, self._launches = change, launches

    def plan(self, inputs, config, out, lse, new_workspace=None):
        plan = super().plan(self._change(inputs), config, out, lse, new_workspace)
        return plan if self._launches is None else self._launches(plan, inputs, out, lse)


def default_of(problem):
    return serving(problem, GPU)[0].default(problem, GPU)


def check(device, problem=PREFILL):
    return device.check(problem, default_of(problem), 0)


@pytest.mark.parametrize("problem", [PREFILL, replace(PREFILL, causal=True), DECODE])
def test_a_right_candidate_passes_with_its_errors_known(problem):
    verdict = check(Planted(), problem)
    assert verdict.correct and verdict.max_ratio <= 2 and verdict.rms_ratio <= 2


@pytest.mark.parametrize("change", [drop_last_key, forget_last_partial_tile])
def test_a_candidate_that_is_wrong_at_the_end_of_the_keys_is_rejected(change):  # case B28
    with pytest.raises(Failure, match="out is off") as failure:
        check(Planted(change))
    assert failure.value.status == "correctness"


def test_a_decode_that_misses_the_newest_token_is_rejected():
    with pytest.raises(Failure, match="correctness"):
        check(Planted(one_length_short), DECODE)


def test_another_order_of_summation_passes():  # case B28
    assert check(Planted(other_order)).correct


def test_outputs_that_are_never_written_are_seen():
    with pytest.raises(Failure, match="out is not finite"):
        check(Planted(launches=lambda plan, inputs, out, lse: []))


def test_two_runs_that_differ_in_one_bit_are_rejected():
    runs = []

    def every_other(plan, inputs, out, lse):
        runs.append(plan)
        return plan if len(runs) % 2 else [*plan, (add_kernel, (1,), (out,), {})]

    with pytest.raises(Failure, match="two runs differ"):
        check(Planted(launches=every_other))


def test_a_candidate_that_writes_to_its_inputs_is_rejected():
    def write(plan, inputs, out, lse):  # after its own result, which is right
        return [*plan, (add_kernel, (1,), (inputs.v[0, 0, 0, -1:],), {})]

    with pytest.raises(Failure, match="writes to its input v"):
        check(Planted(launches=write))


def workspace_of(plan, *known):
    """A tensor of a plan that is neither input nor output."""
    pointers = {tensor.data_ptr() for tensor in known if tensor is not None}
    tensors = [x for _, _, arguments, _ in plan for x in arguments if torch.is_tensor(x)]
    return next(tensor for tensor in tensors if tensor.data_ptr() not in pointers)


@pytest.mark.parametrize("name", ["out", "lse", "q", "v", "block_table", "workspace 1"])
@pytest.mark.parametrize("side", ["before the start", "past the end"])
def test_a_write_out_of_bounds_that_faults_nowhere_is_told_with_tensor_and_side(name, side):
    def write(plan, inputs, out, lse):
        if name in ("out", "lse"):
            tensor = {"out": out, "lse": lse}[name]
            if tensor is None:  # the candidate as it is timed
                return plan
        elif name == "workspace 1":
            known = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens, inputs.block_table)
            tensor = workspace_of(plan, *known, out, lse)
        else:
            tensor = getattr(inputs, name)
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
        at = -1 if side == "before the start" else last + 1
        return [*plan, (write_kernel, (1,), (tensor, at), {})]

    with pytest.raises(Failure, match=f"^correctness: writes {side} of {name}$"):
        check(Planted(launches=write), DECODE)


@pytest.mark.parametrize("name", ["q", "k", "v", "cache_seqlens", "block_table"])
def test_a_write_to_any_input_is_rejected(name):
    def write(plan, inputs, out, lse):
        return [*plan, (add_kernel, (1,), (getattr(inputs, name),), {})]

    with pytest.raises(Failure, match=f"^correctness: writes to its input {name}$"):
        check(Planted(launches=write), DECODE)


def test_a_write_between_wide_rows_is_rejected():
    def write(plan, inputs, out, lse):
        head_dim = inputs.q.shape[-1]
        wide = inputs.q.stride(2) > head_dim
        return [*plan, (write_kernel, (1,), (inputs.q, head_dim), {})] if wide else plan

    with pytest.raises(Failure, match="writes to its input q"):
        check(Planted(launches=write))


def test_a_workspace_that_is_read_before_it_is_written_shows():
    def read(plan, inputs, out, lse):
        known = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens, inputs.block_table, out, lse)
        return [(copy_kernel, (1,), (workspace_of(plan, *known), out), {}), *plan[1:]]

    with pytest.raises(Failure, match="out is not finite"):
        check(Planted(launches=read), DECODE)


def test_an_input_changed_at_the_real_size_costs_the_process_that_holds_it():
    def write(plan, inputs, out, lse):
        return [*plan, (add_kernel, (1,), (inputs.v,), {})]

    inputs = make_inputs(PREFILL, poison=False)
    rows = sample_rows(PREFILL, 0)
    budget = Budget(inputs, rows=rows)
    with pytest.raises(Failure, match="writes to its input v at the real size") as failure:
        Planted(launches=write).check_rows(inputs, default_of(PREFILL), rows, budget)
    assert failure.value.fatal


def test_a_wrong_lse_beside_a_right_out_is_rejected():
    def shift(plan, inputs, out, lse):
        return plan if lse is None else [*plan, (add_kernel, (1,), (lse,), {})]

    with pytest.raises(Failure, match="lse is off by 1"):
        check(Planted(launches=shift))


def test_the_kernel_without_lse_is_checked_too():
    def wrong_without(plan, inputs, out, lse):
        return plan if lse is not None else [*plan, (add_kernel, (1,), (out,), {})]

    with pytest.raises(Failure, match="without lse"):
        check(Planted(launches=wrong_without))


def test_rows_of_a_real_problem_are_judged_after_repeats():
    inputs = make_inputs(PREFILL, poison=False)
    rows = sample_rows(PREFILL, 0)
    budget = Budget(inputs, rows=rows)
    config = default_of(PREFILL)
    assert Planted().check_rows(inputs, config, rows, budget).correct
    with pytest.raises(Failure, match="at the real size"):
        Planted(drop_last_key).check_rows(inputs, config, rows, budget)


def test_picked_rows_are_those_of_the_sampled_indices():
    problem = replace(PREFILL, layout="bhsd")
    out = torch.arange(4 * 256 * 32).view(1, 4, 256, 32)
    rows = [(0, 1, 7), (0, 3, 255)]
    taken, _ = picked(problem, out, None, rows)
    assert torch.equal(taken, torch.stack([out[0, 1, 7], out[0, 3, 255]]))
