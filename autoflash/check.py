"""Check: is a candidate right? On small problems made to catch it, and at the real size."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, lru_cache
from types import ModuleType
from typing import Any

import torch

from autoflash.accuracy import Judge, Verdict, budget_of
from autoflash.canary import Canaries, sums_of
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.gradients import Gradients, ModifierGradients, key_rows
from autoflash.inputs import Inputs, make_inputs, packed_lengths
from autoflash.kernel import (
    Beside,
    NewWorkspace,
    Result,
    load,
    modifier_gradients_like,
    plan_of,
)
from autoflash.problem import Problem, Variant
from autoflash.reference import Row
from autoflash.render import render
from autoflash.runtime.launch import Launch, run_plan

SAMPLED_ROWS = 64
WHOLE_TILES = 384  # rows or keys: whole tiles of 64, 128 and 192
NARROW = 70  # keys on a side of a window: more than one tile and less than two
MIXED = 40  # percent of the blocks, of the keys of a document or a prefix
REPEATS = 3  # runs at the real size that must agree bit by bit


class Stage(StrEnum):
    """Before what a candidate is checked: its first trial, or a final, which few come to."""

    SCREEN = "screen"
    FINAL = "final"


@dataclass(frozen=True)
class Case:
    """A small problem to check on; `lengths` are the valid tokens of each sequence (decode).

    Of packed sequences they are pairs, of queries and keys. Kernels without `lse` are others: those
    that are timed.
    """

    problem: Problem
    lengths: tuple[int | tuple[int, int], ...] | None = None
    wide_rows: bool = False
    with_lse: bool = True
    stage: Stage = Stage.SCREEN

    @property
    def lengths_told(self) -> str:
        keys = self.problem.seqlen_k if self.lengths is None else list(self.lengths)
        return f"{self.problem.seqlen_q} and {keys}"

    def inputs(self, seed: int, device: str) -> Inputs:
        lengths = None if self.lengths is None else list(self.lengths)
        return make_inputs(self.problem, seed, device, lengths, wide_rows=self.wide_rows)


def cases_of(problem: Problem) -> tuple[Case, ...]:
    """Small problems whose kernels and masks are those of `problem`.

    Their lengths end where its own do in a tile, and elsewhere; they differ between queries and
    keys, leave rows without a visible key and, in decode, are 0 and 1 too; one case has strides of
    wider rows. Windows are narrowed, so that they have edges there.

    Each kernel takes a second to compile. Before its first trial a candidate is checked as it is
    timed, and on cases that between them have every edge; the other kernels follow before a final.
    """
    kv_heads = min(problem.num_kv_heads, 2)
    problem = _narrow(problem)
    small = replace(problem, num_heads=kv_heads * problem.group_size, num_kv_heads=kv_heads)
    if problem.paged and problem.op == "prefill" and not problem.varlen:
        chunk = {"batch": 5, "seqlen_q": 77, "seqlen_k": 512}
        return (
            *_as_timed(replace(small, **chunk), (0, 37, 77, 257, 512)),
            Case(replace(small, batch=2, seqlen_q=300, seqlen_k=385), (300, 385), wide_rows=True),
        )
    if problem.varlen:
        some = ((385, 385), (0, 70), (1, 1), (77, 300), (130, 3), (5, 0))
        return (
            *_as_timed(_packed(small, some), some),
            Case(_packed(small, some[3:5]), some[3:5], wide_rows=True),
        )
    if problem.op != "decode":
        return (
            *_as_timed(_ending_alike(replace(small, batch=2))),
            Case(replace(small, batch=1, seqlen_q=385, seqlen_k=385), stage=Stage.FINAL),
            Case(replace(small, batch=1, seqlen_q=300, seqlen_k=384)),  # whole tiles of keys
            Case(replace(small, batch=1, seqlen_q=77, seqlen_k=300), wide_rows=True),
            Case(replace(small, batch=1, seqlen_q=150, seqlen_k=90)),
        )
    return (
        *_as_timed(replace(small, batch=6, seqlen_k=512), (0, 1, 37, 257, 300, 512)),
        Case(replace(small, batch=2, seqlen_k=385), (385, 130), wide_rows=True),
    )


def small_cases_of(problem: Problem) -> tuple[Case, ...]:
    """The same in fewer and shorter sequences, for an interpreter: all before a first trial."""
    return tuple(replace(case, stage=Stage.SCREEN) for case in _small_cases_of(problem))


def _small_cases_of(problem: Problem) -> tuple[Case, ...]:
    small = replace(_narrow(problem), num_heads=problem.group_size, num_kv_heads=1)
    if problem.paged and problem.op == "prefill" and not problem.varlen:
        chunk = {"batch": 3, "seqlen_q": 40, "seqlen_k": 150}
        return (
            *_as_timed(replace(small, **chunk), (0, 37, 150)),
            Case(replace(small, batch=1, seqlen_q=20, seqlen_k=70), (70,), wide_rows=True),
        )
    if problem.varlen:
        some = ((70, 70), (0, 9), (1, 1), (20, 100), (40, 3))
        return (
            *_as_timed(_packed(small, some), some),
            Case(_packed(small, some[3:]), some[3:], wide_rows=True),
        )
    if problem.op != "decode":
        return (
            *_as_timed(replace(small, batch=1, seqlen_q=150, seqlen_k=150)),
            Case(replace(small, batch=1, seqlen_q=40, seqlen_k=30), wide_rows=True),
        )
    return (
        *_as_timed(replace(small, batch=4, seqlen_k=150), (0, 1, 37, 150)),
        Case(replace(small, batch=1, seqlen_k=70), (70,), wide_rows=True),
    )


def _as_timed(
    problem: Problem, lengths: tuple[int | tuple[int, int], ...] | None = None
) -> tuple[Case, Case]:
    """As trials are, without `lse`, and with it."""
    return (
        Case(problem, lengths, with_lse=False),
        Case(problem, lengths, stage=Stage.FINAL),
    )


def _packed(problem: Problem, lengths: Sequence[tuple[int, int]]) -> Problem:
    """The same for packed sequences of these queries and keys."""
    rows, keys = (max(each) for each in zip(*lengths, strict=True))
    batch = len(lengths)
    return replace(problem, batch=batch, seqlen_q=rows, seqlen_k=keys, lengths="ragged")


def _narrow(problem: Problem) -> Problem:
    """The same with a window, and masks, that hide some keys of short sequences too."""
    left, right = (min(side, NARROW) for side in (problem.window_left, problem.window_right))
    density = MIXED if problem.density else 0
    return replace(problem, window_left=left, window_right=right, density=density)


def _ending_alike(problem: Problem) -> Problem:
    """The same, shorter by whole tiles: how lengths end in a tile decides what is compiled."""
    seqlen_q, seqlen_k = (
        length if length < WHOLE_TILES else WHOLE_TILES + length % WHOLE_TILES
        for length in (problem.seqlen_q, problem.seqlen_k)
    )
    if seqlen_q > seqlen_k and problem.seqlen_q <= problem.seqlen_k:
        seqlen_k += WHOLE_TILES
    if seqlen_q <= seqlen_k and problem.seqlen_q > problem.seqlen_k:
        seqlen_q += WHOLE_TILES
    return replace(problem, seqlen_q=seqlen_q, seqlen_k=seqlen_k)


def plan_for(
    inputs: Inputs,
    config: Config,
    gpu: Gpu,
    out: Result,
    lse: Beside,
    new_workspace: NewWorkspace | None = None,
) -> list[Launch]:
    """The launches of a config on these inputs."""
    module = _module(family_of(config.family).variant(inputs.problem))
    return plan_of(module, inputs, out, lse, gpu, config, new_workspace=new_workspace)


class Checker:
    """Runs candidates on one device, `cuda` or, in an interpreting process, `cpu`.

    Subclasses run other plans, in tests, by overriding `plan`, and choose other `cases`.
    """

    def __init__(self, device: str, gpu: Gpu) -> None:
        self._device, self._gpu = device, gpu

    def plan(
        self,
        inputs: Inputs,
        config: Config,
        out: Result,
        lse: Beside,
        new_workspace: NewWorkspace | None = None,
    ) -> list[Launch]:
        return plan_for(inputs, config, self._gpu, out, lse, new_workspace)

    def cases(self, problem: Problem) -> tuple[Case, ...]:
        return cases_of(problem)

    def check(
        self, problem: Problem, config: Config, seed: int, stage: Stage | None = None
    ) -> Verdict:
        """The worst verdict over the small cases of the stage, or of both.

        Raises Failure when one is not right.
        """
        cases = [case for case in self.cases(problem) if stage in (None, case.stage)]
        verdicts = [self._check_case(case, config, seed) for case in cases]
        return Verdict(
            reason="",
            max_ratio=max(verdict.max_ratio for verdict in verdicts),
            rms_ratio=max(verdict.rms_ratio for verdict in verdicts),
            lse_error=max(verdict.lse_error for verdict in verdicts),
        )

    def check_rows(self, inputs: Inputs, config: Config, rows: list[Row], budget: Judge) -> Verdict:
        """The verdict on some rows of a real problem, after bit-equal repeats.

        `budget` is that of the same inputs and rows.
        """
        sums = sums_of(inputs)
        try:
            out, lse = self.run(inputs, config)
            for _ in range(REPEATS - 1 if family_of(config.family).repeats else 0):
                again = self.run(inputs, config)
                _same_bits(out, again[0], "two runs at the real size")
                _same_bits_beside(lse, again[1], "two runs at the real size")
        finally:  # whatever else is wrong: other candidates are judged on these inputs
            for name, now in sums_of(inputs).items():
                if now != sums[name]:
                    told = f"writes to its input {name} at the real size"
                    raise Failure("correctness", told, fatal=True)
        return _right(budget.judge(*picked(inputs.problem, out, lse, rows)), "at the real size")

    def run(self, inputs: Inputs, config: Config, with_lse: bool = True) -> tuple[Result, Beside]:
        """`out` and `lse` of one launch, or the gradients; all is full of NaN before it.

        Without `lse` a backward is run without the gradients of its modifiers. Raises Failure
        when the candidate wrote around one of them.
        """
        canaries, p = Canaries(self._device), inputs.problem
        lse: Beside = None
        if p.op == "backward":
            named = zip(Gradients._fields, (inputs.q, inputs.k, inputs.v), strict=True)
            out = Gradients(*(canaries.new(name, of.shape, of.dtype) for name, of in named))
            named = modifier_gradients_like(inputs).items() if with_lse else ()
            made = {name: canaries.new(name, like.shape, like.dtype) for name, like in named}
            lse = ModifierGradients(**made) if made else None
        else:
            out = canaries.new("out", (*inputs.q.shape[:-1], p.head_dim_v), inputs.q.dtype)
        if with_lse and p.op != "backward":
            lse = canaries.new("lse", inputs.lse_shape, torch.float32)
        run_plan(self.plan(inputs, config, out, lse, canaries.workspace))
        _kept_to_its_own(canaries)
        return out, lse

    def _check_case(self, case: Case, config: Config, seed: int) -> Verdict:
        given = Canaries(self._device)
        inputs = given.inputs(case.inputs(seed, self._device))

        def run() -> tuple[Result, Beside]:
            result = self.run(inputs, config, case.with_lse)
            _kept_to_its_own(given)
            return result

        out, lse = run()
        again, lse_again = run()
        budget = _budget(case, seed, self._device)
        if family_of(config.family).repeats:
            _same_bits(out, again, "two runs")
            _same_bits_beside(lse, lse_again, "two runs")
        else:
            _right(budget.judge(again, lse_again), "in the second run")
        without = "" if case.with_lse else " and without lse"
        return _right(budget.judge(out, lse), f"with lengths {case.lengths_told}{without}")


@cache
def _module(variant: Variant) -> ModuleType:
    return load(render(variant))


@lru_cache(maxsize=16)
def _budget(case: Case, seed: int, device: str) -> Judge:
    return budget_of(case.inputs(seed, device))


def sample_rows(problem: Problem, seed: int) -> list[Row]:
    """Some (sequence, query head, query) of a problem, its first and its last among them.

    Packed sequences have the lengths that are drawn for the problem.
    """
    p = problem
    drawn = random.Random(seed)
    rows = {(0, 0, 0), (p.batch - 1, p.num_heads - 1, p.seqlen_q - 1)}
    rows |= {
        (drawn.randrange(p.batch), drawn.randrange(p.num_heads), drawn.randrange(p.seqlen_q))
        for _ in range(SAMPLED_ROWS - len(rows))
    }
    if p.varlen:
        queries, keys = packed_lengths(p)
        used = [bool(q and (k or p.op != "backward")) for q, k in zip(queries, keys, strict=True)]
        rows = {(b, h, min(i, queries[b] - 1)) for b, h, i in rows if used[b]}
    return sorted(rows)


def picked(
    problem: Problem, out: Result, lse: Beside, rows: list[Row]
) -> tuple[Any, torch.Tensor | None]:
    """The rows of a result: `out` (rows, head_dim_v) and `lse` (rows,).

    Of gradients those of dq, and the `key_rows` of dk and dv.
    """
    queries, keys = packed_lengths(problem) if problem.varlen else ([], [])
    if isinstance(out, Gradients):
        of_keys = key_rows(problem, rows)
        each = zip(out, (rows, of_keys, of_keys), (queries, keys, keys), strict=True)
        return Gradients(*(_rows_of(problem, *of_one) for of_one in each)), None
    assert not isinstance(lse, ModifierGradients)
    of_out = _rows_of(problem, out, rows, queries)
    if lse is None:
        return of_out, None
    of_lse = lse.transpose(0, 1) if problem.varlen else lse.transpose(1, 2)
    tokens_first = replace(problem, layout="thd" if problem.varlen else "bshd")
    return of_out, _rows_of(tokens_first, of_lse, rows, queries)


def _rows_of(
    problem: Problem, tensor: torch.Tensor, rows: list[Row], lengths: list[int]
) -> torch.Tensor:
    """Rows (sequence, head, token); `lengths` are those of packed sequences."""
    b, h, i = (torch.tensor(index, device=tensor.device) for index in zip(*rows, strict=True))
    if problem.varlen:
        starts = torch.tensor([0, *lengths], device=tensor.device).cumsum(0)
        return tensor[starts[b] + i, h]
    return tensor[b, i, h] if problem.layout == "bshd" else tensor[b, h, i]


def _kept_to_its_own(canaries: Canaries) -> None:
    trespass = canaries.trespass()
    if trespass:
        raise Failure("correctness", trespass)


def _same_bits(one: Result, other: Result, what: str) -> None:
    if isinstance(one, Gradients):
        for name, a, b in zip(Gradients._fields, one, other, strict=True):
            _same_bits(a, b, f"{name} of {what}")
        return
    bits = {2: torch.int16, 4: torch.int32}[one.element_size()]
    assert isinstance(other, torch.Tensor)
    if not torch.equal(one.view(bits), other.view(bits)):
        raise Failure("correctness", f"{what} differ")


def _same_bits_beside(one: Beside, other: Beside, what: str) -> None:
    """Of the gradients of modifiers: `lse` has no bits that `out` has not."""
    if isinstance(one, ModifierGradients) and isinstance(other, ModifierGradients):
        for name, a, b in zip(ModifierGradients._fields, one, other, strict=True):
            if a is not None and b is not None:
                _same_bits(a, b, f"{name} of {what}")


def _right(verdict: Verdict, where: str) -> Verdict:
    if not verdict.correct:
        raise Failure("correctness", f"{verdict.reason} {where}".strip())
    return verdict
