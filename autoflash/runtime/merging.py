"""Merging: the arguments of merge(), checked, and in the one form that its plan takes."""

from __future__ import annotations

import torch

from .arguments import ARGUMENT_DTYPES
from .problem import LAYOUTS, ProblemError

MERGE_AXES = {  # of an output, and of its lse, by layout and number of dimensions
    ("bshd", 4): ("bshd", "bhs"),
    ("bshd", 3): ("bhd", "bh"),  # of a decode whose queries have no axis of tokens
    ("bhsd", 4): ("bhsd", "bhs"),
    ("thd", 3): ("shd", "hs"),
}


def check_parts(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    layout: str,
) -> None:
    """Raise ProblemError naming the argument of merge() that does not fit."""
    if layout not in LAYOUTS:
        raise ProblemError(f"merge: layout {layout!r} is none of {', '.join(LAYOUTS)}")
    if (layout, out_a.dim()) not in MERGE_AXES:
        raise ProblemError(f"merge: out_a has {out_a.dim()} dimensions in layout {layout}")
    if out_a.dtype not in ARGUMENT_DTYPES:
        raise ProblemError(f"merge: out_a is {out_a.dtype}, not bf16, fp16 or fp32")
    axes, lse_axes = MERGE_AXES[layout, out_a.dim()]
    lse_shape = tuple(out_a.shape[axes.index(axis)] for axis in lse_axes)
    for name, tensor, dtype, shape in (
        ("out_b", out_b, out_a.dtype, tuple(out_a.shape)),
        ("lse_a", lse_a, torch.float32, lse_shape),
        ("lse_b", lse_b, torch.float32, lse_shape),
    ):
        if tensor.dtype != dtype:
            raise ProblemError(f"merge: {name} is {tensor.dtype}, expected {dtype}")
        if tuple(tensor.shape) != shape:
            raise ProblemError(f"merge: {name} is {tuple(tensor.shape)}, expected {shape}")
        if tensor.device != out_a.device:
            raise ProblemError(f"merge: {name} is on {tensor.device}, out_a on {out_a.device}")
    for name, tensor in (("out_a", out_a), ("out_b", out_b)):
        if tensor.numel() and tensor.stride(-1) != 1:
            raise ProblemError(f"merge: {name}'s last dimension must be contiguous")
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if torch.is_grad_enabled() and tensor.requires_grad:
            raise ProblemError(f"merge: {name} requires grad; call under torch.no_grad()")


def merge_forms(
    out: torch.Tensor, lse: torch.Tensor, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Views (batch, seqlen, num_heads, head_dim) and (batch, num_heads, seqlen) of a result."""
    if layout == "bhsd":
        return out.transpose(1, 2), lse
    if layout == "thd":
        return out.unsqueeze(0), lse.unsqueeze(0)
    if out.dim() == 3:
        return out.unsqueeze(1), lse.unsqueeze(2)
    return out, lse
