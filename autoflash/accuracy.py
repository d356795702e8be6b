"""The error budget: how far a kernel may be from the fp64 reference, derived and never picked."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoflash.inputs import Inputs
from autoflash.reference import Row, eager, eager_rows, reference, reference_rows

ALLOWED_RATIO = 2.0  # of the error of the independent eager computation
LSE_UNIT = 2.0**-20


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
        unit = torch.finfo(eager_out.dtype).eps / 2
        rms = self.out.pow(2).mean(dim=-1, keepdim=True).sqrt()
        self._empty = rms == 0
        self._rms = rms.masked_fill(self._empty, 1.0)
        self._unit = unit * self.out.abs().amax(dim=-1, keepdim=True) / self._rms
        error = (eager_out.double() - self.out).abs() / self._rms
        self._max, self._mean = error.max().item(), error.pow(2).mean().sqrt().item()
        finite = self.lse.isfinite()
        self._finite = finite
        lse_error = (eager_lse.double() - self.lse).abs()
        self._lse_max = lse_error[finite].max().item() if finite.any() else 0.0

    def judge(self, out: torch.Tensor, lse: torch.Tensor | None) -> Verdict:
        """The verdict on a result; `lse` None is not judged."""
        out = out.double()
        if not out.isfinite().all():
            where = (~out.isfinite()).nonzero()[0].tolist()
            return Verdict(f"out is not finite, first at {where}", 0.0, 0.0, 0.0)
        if (out.masked_fill(~self._empty, 0.0) != 0).any():
            return Verdict("a row with no visible key is not zero", 0.0, 0.0, 0.0)
        error = (out - self.out).abs() / self._rms
        beyond = (error - self._unit).clamp_min(0.0)
        worst, mean = beyond.max().item(), beyond.pow(2).mean().sqrt().item()
        reason = ""
        if worst > ALLOWED_RATIO * self._max:
            where = (beyond == worst).nonzero()[0].tolist()
            reason = f"out is off by {worst:.3g} row RMS at {where}, eager by {self._max:.3g}"
        elif mean > ALLOWED_RATIO * self._mean:
            reason = f"out is off by {mean:.3g} row RMS on average, eager by {self._mean:.3g}"
        lse_error = 0.0
        if lse is not None:
            lse = lse.double()
            off = (lse - self.lse).abs()[self._finite]
            lse_error = off.max().item() if off.numel() else 0.0
            allowed = ALLOWED_RATIO * self._lse_max + LSE_UNIT * self.lse.abs().clamp_min(1.0)
            if not torch.equal(lse == float("-inf"), self.lse == float("-inf")):
                reason = reason or "lse is -inf in other rows than the reference"
            elif lse.isnan().any() or (off > allowed[self._finite]).any():
                reason = reason or f"lse is off by {lse_error:.3g}"
        ratio = max(self._max, 1e-300), max(self._mean, 1e-300)
        return Verdict(reason, worst / ratio[0], mean / ratio[1], lse_error)
