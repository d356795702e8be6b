"""Windows, modifiers, masks, packing, pages: what a caller gives, and what plans take."""

from __future__ import annotations

from types import ModuleType
from typing import Any, NamedTuple

import torch

from .dropping import check_dropout, whole_probability
from .masks import BlockLists, Masks, expanded_lists
from .problem import CHOSEN, NONE, Problem, ProblemError
from .transposed import with_query_lists

BIAS_STEP_LIMIT = 2**23  # elements: within a prefill's tile of 128 by 128 offsets are of 32 bits
MODIFIER_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class Modifiers(NamedTuple):
    """The values of what is on, given as they stand here where it is off."""

    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    page_positions: torch.Tensor | None = None  # of decode
    block_mask: BlockLists | None = None
    document_ids: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    mask: str | None = None
    density: int | None = None
    cache_seqlens: torch.Tensor | None = None  # of prefill over keys in pages, as the next two
    block_table: torch.Tensor | None = None
    kv_layout: str = "nhd"
    dropout_p: float = 0.0
    rng: torch.Tensor | None = None

    @property
    def masks(self) -> Masks:
        return Masks(self.block_mask, self.document_ids, self.prefix_lens, self.mask, self.density)

    @property
    def of_prefill(self) -> dict[str, Any]:
        """As prefill() takes them, by name."""
        return {name: value for name, value in self._asdict().items() if name != "page_positions"}

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Those that a launch names, of which blocks have several."""
        plain = (self.alibi_slopes, self.bias, self.sinks, self.rng)
        plain += (self.cu_seqlens_q, self.cu_seqlens_k)
        if self.block_mask is None and self.document_ids is None and self.prefix_lens is None:
            if self.block_table is not None:
                return (*plain, self.cache_seqlens, self.block_table)
            return plain
        if self.cu_seqlens_q is not None or self.block_table is not None:
            plain += (self.cache_seqlens, self.block_table)  # which have their place, given or not
        blocks = () if self.block_mask is None else self.block_mask.tensors
        return (*plain, *blocks, self.document_ids, self.prefix_lens)

    @property
    def query_tensors(self) -> tuple[torch.Tensor | None, ...]:
        """Those that a backward's launch names too."""
        return () if self.block_mask is None else self.block_mask.query_tensors


NO_MODIFIERS = Modifiers()


def modifier_fields(
    function: str,
    given: Modifiers,
    q: torch.Tensor,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
) -> dict[str, Any]:
    """The fields of Problem that the modifiers fill.

    Raises ProblemError naming the modifier that does not fit.
    """
    left, right = _sides(function, given.window)
    if not 0.0 <= given.softcap < float("inf"):
        raise ProblemError(f"{function}: softcap {given.softcap} is not from 0 upwards")
    for name in ("alibi_slopes", "bias", "sinks"):
        _check_modifier(function, name, getattr(given, name), q)
    slopes, sinks = given.alibi_slopes, given.sinks
    if slopes is not None:
        _expect_dtype(function, "alibi_slopes", slopes, torch.float32)
        _expect_shape(function, "alibi_slopes", slopes, (num_heads,), (batch, num_heads))
    if given.bias is not None:
        _expect_dtype(function, "bias", given.bias, q.dtype)
        _check_bias(function, given.bias, (batch, num_heads, seqlen_q, seqlen_k))
    if sinks is not None:
        _expect_shape(function, "sinks", sinks, (num_heads,))
        if not sinks.is_contiguous():
            raise ProblemError(f"{function}: sinks must be contiguous")
    check_dropout(function, given.dropout_p, given.rng, q)
    return {
        "window_left": left,
        "window_right": right,
        "softcap": given.softcap > 0.0,
        "alibi": slopes is not None,
        "bias": given.bias is not None,
        "sinks": sinks is not None,
        "dropout": given.dropout_p > 0.0,
    }


def modifiers_of(problem: Problem, given: Modifiers) -> Modifiers:
    """What plans take: the problem's window; slopes, bias, blocks with strides along every axis.

    And of dropout the probability that kernels have.
    """
    p, slopes, bias, blocks = problem, given.alibi_slopes, given.bias, given.block_mask
    if slopes is not None:
        slopes = slopes.expand(p.batch, p.num_heads)
    if bias is not None:
        bias = bias.expand(p.batch, p.num_heads, p.seqlen_q, _keys_of_bias(p, bias))
    if blocks is not None:
        alone = blocks._replace(queries=None)
        listed = with_query_lists(p, blocks) if p.op == "backward" else alone
        blocks = expanded_lists(p, listed)
    whole = {"alibi_slopes": slopes, "bias": bias, "block_mask": blocks}
    return given._replace(window=p.window, dropout_p=whole_probability(given.dropout_p), **whole)


def prefill_plan(
    module: ModuleType, problem: Problem, modifiers: Modifiers, *arguments: Any
) -> list[Any]:
    """What a rendered text launches for these arguments of its plan() and `modifiers_of` them."""
    if problem.masked_by == "documents":
        return module.plan_documents(modifiers, *arguments)
    if problem.varlen or problem.paged:
        return module.plan(modifiers, *arguments)
    if problem.windowed or problem.modifiers or problem.masked_by != NONE:
        return module.plan_modified(modifiers, *arguments)
    return module.plan(*arguments)


def backward_plan(
    module: ModuleType,
    problem: Problem,
    modifiers: Modifiers,
    of_modifiers: tuple[torch.Tensor | None, torch.Tensor | None],
    *arguments: Any,
) -> list[Any]:
    """The same for the gradients; `of_modifiers` are dbias, with four axes, and dsinks, or None."""
    modified = problem.varlen or problem.windowed or problem.modifiers
    if modified or problem.masked_by != NONE:
        return module.plan(modifiers, *of_modifiers, *arguments)
    return module.plan(*arguments)


def decode_plan(
    module: ModuleType, problem: Problem, modifiers: Modifiers, *arguments: Any
) -> list[Any]:
    """The same of decode."""
    if problem.windowed or problem.modifiers or problem.pages == CHOSEN or problem.masks:
        return module.plan_modified(modifiers, *arguments)
    return module.plan(*arguments)


def _sides(function: str, window: tuple[int, int]) -> tuple[int, int]:
    sides = tuple(window)
    if len(sides) != 2 or not all(type(side) is int and side >= -1 for side in sides):
        raise ProblemError(
            f"{function}: window {window} is not (keys before, keys after), -1 for unbounded"
        )
    return sides[0], sides[1]


def _check_modifier(function: str, name: str, tensor: torch.Tensor | None, q: torch.Tensor) -> None:
    if tensor is None:
        return
    if tensor.dtype not in MODIFIER_DTYPES:
        raise ProblemError(f"{function}: {name} is {tensor.dtype}, not bf16, fp16 or fp32")
    if tensor.device != q.device:
        raise ProblemError(f"{function}: {name} is on {tensor.device}, q is on {q.device}")
    if torch.is_grad_enabled() and tensor.requires_grad:
        raise ProblemError(
            f"{function}: {name} requires grad and there is no backward yet;"
            " call under torch.no_grad()"
        )


def _expect_dtype(function: str, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        raise ProblemError(f"{function}: {name} is {tensor.dtype}, expected {dtype}")


def _expect_shape(
    function: str, name: str, tensor: torch.Tensor, *allowed: tuple[int, ...]
) -> None:
    if tuple(tensor.shape) not in allowed:
        expected = " or ".join(map(str, allowed))
        raise ProblemError(f"{function}: {name} is {tuple(tensor.shape)}, expected {expected}")


def _check_bias(function: str, bias: torch.Tensor, shape: tuple[int, ...]) -> None:
    sizes = tuple(bias.shape)
    fits = len(sizes) <= 4 and all(
        size in (1, whole) for size, whole in zip(reversed(sizes), reversed(shape))
    )
    if not fits:
        raise ProblemError(f"{function}: bias is {sizes}, which does not broadcast to {shape}")
    steps = bias.expand(shape).stride()[2:]
    if function != "decode" and any(step >= BIAS_STEP_LIMIT for step in steps):
        raise ProblemError(f"{function}: bias has queries or keys {BIAS_STEP_LIMIT} elements apart")


def _keys_of_bias(problem: Problem, bias: torch.Tensor) -> int:
    """How many keys a bias has once it is expanded: of a cache, all that this may hold."""
    if problem.op != "decode" and not problem.paged:
        return problem.seqlen_k
    keys = bias.shape[-1] if bias.dim() else 1
    # what all keys share has a stride of 0, however few of them are expected
    return keys if keys != 1 else max(2, problem.seqlen_k)
