"""Merging: the exported merge() of two partial results into one."""

from __future__ import annotations

import torch

from .argument_types import refuse_types
from .arguments import ARGUMENT_DTYPES
from .installed import device_for, installed
from .operators import merge_traced
from .problem import LAYOUTS, ProblemError
from .served import launch_plan

MERGE_AXES = {  # of an output, and of its lse, by layout and number of dimensions
    ("bshd", 4): ("bshd", "bhs"),
    ("bshd", 3): ("bhd", "bh"),  # of a decode whose queries have no axis of tokens
    ("bhsd", 4): ("bhsd", "bhs"),
    ("thd", 3): ("shd", "hs"),
}


def merge(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    layout: str = "bshd",
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result (out, lse) over all keys, of the results over two parts of them.

    The parts are as prefill() and decode() give them, in the same layout and type, and so is what
    comes of them; 3-D outputs are decode()'s, with layout "thd" those of packed sequences. Rows
    that saw no key in a part, whose lse is -inf, take the other's. A sink must have counted in one
    part only. Raises ProblemError naming an argument that does not fit.
    """
    if torch.compiler.is_compiling():
        return merge_traced(out_a, lse_a, out_b, lse_b, layout)
    refuse_types("merge", (out_a, lse_a, out_b, lse_b, layout))
    check_parts(out_a, lse_a, out_b, lse_b, layout)
    device_for(out_a)
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    if out.numel():
        results = ((out_a, lse_a), (out_b, lse_b), (out, lse))
        forms = [form for each in results for form in merge_forms(*each, layout)]
        launch_plan(installed().module("merge", ()).plan(*forms), out_a)
    return out, lse


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
