"""The error budget: how far a kernel may be from the fp64 reference, derived and never picked."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from autoflash.gradients import (
    Gradients,
    ModifierGradients,
    eager_gradient_rows,
    eager_gradients,
    eager_modifier_gradients,
    reference_gradient_rows,
    reference_gradients,
    reference_modifier_gradients,
    sink_terms,
)
from autoflash.inputs import Inputs
from autoflash.reference import Row, eager, eager_rows, reference, reference_rows

ALLOWED_RATIO = 2.0  # of the error of the independent eager computation
LSE_UNIT = 2.0**-20
# Of a tensor's largest row: below the rounding unit of fp32 a row is as good as zero.
LEAST_SIZE = 2.0**-24
# The least normal number of fp32: exponentials below it may be zero, as exp2 of a GPU gives them.
LEAST_NORMAL = 2.0**-126
# Of the largest score. A backward makes scores again, in another order than the forward did, and
# takes the lse from them that fp32 holds: a unit of the last place for each of the three.
SCORES_UNIT = 3 * 2.0**-23


@dataclass(frozen=True)
class Verdict:
    """`reason` is empty when the result is within budget. Ratios are to the eager error."""

    reason: str
    max_ratio: float
    rms_ratio: float
    lse_error: float

    @property
    def correct(self) -> bool:
        return not self.reason


class Yardstick:
    """One tensor of a reference, and how far the eager computation is from it, row by row.

    An error is divided by the row's `size`; a row of size 0 must be zero itself. One rounding unit
    of the row's largest element is free, or of its size where that is more, as where terms cancel.
    `error` is that of the eager computation where it is not the difference of the two.
    """

    def __init__(
        self,
        name: str,
        exact: torch.Tensor,
        eager: torch.Tensor,
        size: torch.Tensor,
        size_name: str,
        error: torch.Tensor | None = None,
        free: torch.Tensor | float = 0.0,
    ) -> None:
        self.name, self._exact, self._size_name = name, exact, size_name
        self._empty = size == 0
        self._size = size.masked_fill(self._empty, 1.0)
        rounding = torch.finfo(eager.dtype).eps / 2
        largest = exact.abs().amax(dim=-1, keepdim=True)
        self._unit = rounding * (largest / self._size).clamp_min(1.0) + free / self._size
        error = ((eager.double() - exact).abs() if error is None else error) / self._size
        self._max, self._mean = error.max().item(), error.pow(2).mean().sqrt().item()

    def judge(self, result: torch.Tensor) -> Verdict:
        result = result.double()
        if not result.isfinite().all():
            where = (~result.isfinite()).nonzero()[0].tolist()
            return Verdict(f"{self.name} is not finite, first at {where}", 0.0, 0.0, 0.0)
        if (result.masked_fill(~self._empty, 0.0) != 0).any():
            return Verdict("a row with no visible key is not zero", 0.0, 0.0, 0.0)
        error = (result - self._exact).abs() / self._size
        beyond = (error - self._unit).clamp_min(0.0)
        worst, mean = beyond.max().item(), beyond.pow(2).mean().sqrt().item()
        reason = ""
        if worst > ALLOWED_RATIO * self._max:
            where = (beyond == worst).nonzero()[0].tolist()
            reason = self._told(worst, f"at {where}", self._max)
        elif mean > ALLOWED_RATIO * self._mean:
            reason = self._told(mean, "on average", self._mean)
        ratio = max(self._max, 1e-300), max(self._mean, 1e-300)
        return Verdict(reason, worst / ratio[0], mean / ratio[1], 0.0)

    def _told(self, off: float, where: str, allowed: float) -> str:
        sizes = f"{off:.3g} {self._size_name} {where}"
        return f"{self.name} is off by {sizes}, eager by {allowed:.3g}"


class Budget:
    """The reference of some inputs and the error the independent eager computation makes on them.

    Made once for the inputs and asked for every candidate. With `rows` it is that of these rows
    alone, and judges an `out` of (rows, head_dim_v) and an `lse` of (rows,).
    """

    def __init__(
        self,
        inputs: Inputs,
        softmax_scale: float | None = None,
        rows: Sequence[Row] | None = None,
    ) -> None:
        if rows is None:
            self.out, self.lse = reference(inputs, softmax_scale)
            eager_out, eager_lse = eager(inputs, softmax_scale)
        else:
            self.out, self.lse = reference_rows(inputs, rows, softmax_scale)
            eager_out, eager_lse = eager_rows(inputs, rows, softmax_scale)
        rms = self.out.pow(2).mean(dim=-1, keepdim=True).sqrt()
        free = _underflow(inputs, rms)
        self._out = Yardstick("out", self.out, eager_out, rms, "row RMS", free=free)
        finite = self.lse.isfinite()
        self._finite = finite
        lse_error = (eager_lse.double() - self.lse).abs()
        self._lse_max = lse_error[finite].max().item() if finite.any() else 0.0

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None) -> Verdict:
        """The verdict on a result; `lse` None is not judged."""
        verdict = self._out.judge(out)
        reason, lse_error = verdict.reason, 0.0
        if lse is not None:
            lse = lse.double()
            off = (lse - self.lse).abs()[self._finite]
            lse_error = off.max().item() if off.numel() else 0.0
            allowed = ALLOWED_RATIO * self._lse_max + LSE_UNIT * self.lse.abs().clamp_min(1.0)
            if not torch.equal(lse == float("-inf"), self.lse == float("-inf")):
                reason = reason or "lse is -inf in other rows than the reference"
            elif lse.isnan().any() or (off > allowed[self._finite]).any():
                reason = reason or f"lse is off by {lse_error:.3g}"
        return Verdict(reason, verdict.max_ratio, verdict.rms_ratio, lse_error)


class GradientBudget:
    """The same for a backward: judges Gradients, whole or with `rows` the rows of `key_rows`.

    Of modifiers it judges gradients that are whole, and none where it is asked for `rows`.
    """

    def __init__(
        self,
        inputs: Inputs,
        softmax_scale: float | None = None,
        rows: Sequence[Row] | None = None,
    ) -> None:
        if rows is None:
            exact, sizes = reference_gradients(inputs, softmax_scale)
            rounded, lse = eager_gradients(inputs, softmax_scale), eager(inputs, softmax_scale)[1]
        else:
            exact, sizes = reference_gradient_rows(inputs, rows, softmax_scale)
            rounded, lse = eager_gradient_rows(inputs, rows, softmax_scale), inputs.lse
        named = zip(Gradients._fields, exact, rounded, sizes, strict=True)
        unsure = SCORES_UNIT * _largest(lse)
        self._yardsticks = [
            Yardstick(name, one, eager_one, _felt(_of_row(size)), "row sizes", free=unsure * size)
            for name, one, eager_one, size in named
            if one.numel()
        ]
        if rows is None and (inputs.bias is not None or inputs.sinks is not None):
            self._yardsticks += _of_modifiers(inputs, softmax_scale, unsure)

    def judge(self, gradients: Gradients, of_modifiers: ModifierGradients | None = None) -> Verdict:
        """The verdict on the gradients given; the first that is wrong gives the reason."""
        given = gradients._asdict() | (of_modifiers or ModifierGradients())._asdict()
        judged = [
            yardstick.judge(_rows(given[yardstick.name]))
            for yardstick in self._yardsticks
            if given[yardstick.name] is not None
        ]
        return Verdict(
            reason=next((verdict.reason for verdict in judged if verdict.reason), ""),
            max_ratio=max(verdict.max_ratio for verdict in judged),
            rms_ratio=max(verdict.rms_ratio for verdict in judged),
            lse_error=0.0,
        )


def _of_modifiers(inputs: Inputs, softmax_scale: float | None, unsure: float) -> list[Yardstick]:
    """What judges dbias and dsinks, of those that there are; `unsure` of each size is free.

    A row of dbias is one of keys, each number of dsinks its own.

    Of the few numbers of dsinks the eager error may be small by chance: the errors of all terms
    that each sums count, without their signs.
    """
    exact, sizes = reference_modifier_gradients(inputs, softmax_scale)
    rounded, found = eager_modifier_gradients(inputs, softmax_scale), []
    for name, one, eager_one, size in zip(exact._fields, exact, rounded, sizes, strict=True):
        if one is None or eager_one is None or size is None or not one.numel():
            continue
        error = None
        if name == "dsinks":
            forwards = (reference(inputs, softmax_scale), eager(inputs, softmax_scale))
            terms = [sink_terms(replace(inputs, out=out, lse=lse))[0] for out, lse in forwards]
            error = (terms[1].double() - terms[0]).abs().sum(dim=1, keepdim=True)
        of_rows = (_rows(one), _rows(eager_one), _felt(_of_row(_rows(size))))
        found.append(Yardstick(name, *of_rows, "row sizes", error, unsure * _rows(size)))
    return found


class Judge(Protocol):
    """A Budget or a GradientBudget, of the two results that the op's plan writes."""

    def judge(self, out: Any, beside: Any, /) -> Verdict: ...


def budget_of(inputs: Inputs, rows: Sequence[Row] | None = None) -> Judge:
    """What judges the results of the inputs' op."""
    kind = GradientBudget if inputs.problem.op == "backward" else Budget
    return kind(inputs, rows=rows)


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """Each number of a vector, such as dsinks, as a row of its own."""
    return tensor[:, None] if tensor.dim() == 1 else tensor


def _underflow(inputs: Inputs, sizes: torch.Tensor) -> float:
    """What all exponentials of a row together give where fp32 has no normal number for them."""
    if not (sizes[sizes > 0] < LEAST_NORMAL**0.5).any():
        return 0.0  # nothing beside such rows, and a large cache needs no pass for them
    values = (inputs.sequence(b)[2] for b in range(inputs.problem.batch))
    return LEAST_NORMAL * inputs.problem.seqlen_k * max(map(_largest, values))


def _largest(tensor: torch.Tensor | None) -> float:
    """Of what is finite; 0 where nothing is."""
    if tensor is None or not tensor.numel():
        return 0.0
    return tensor.masked_fill(~tensor.isfinite(), 0.0).abs().max().item()


def _of_row(size: torch.Tensor) -> torch.Tensor:
    """One size for each row, of those of its numbers."""
    return size.pow(2).mean(dim=-1, keepdim=True).sqrt()


def _felt(size: torch.Tensor) -> torch.Tensor:
    """Sizes of rows, none that is not zero below what fp32 can tell from zero beside the largest.

    P of such a row underflows in the kernel and in the eager computation alike.
    """
    least = LEAST_SIZE * size.amax()
    return torch.where(size > 0, (size**2 + least**2).sqrt(), size)
