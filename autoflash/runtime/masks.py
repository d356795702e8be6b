"""Masks beyond windows: blocks, documents, prefixes and rules as a caller gives them, checked."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .mask_rule import normal_rule
from .problem import UNTOLD_DENSITY, Problem, ProblemError


class QueryLists(NamedTuple):
    """The blocks of queries for each block of keys, named and made as in torch's BlockMask."""

    q_num_blocks: torch.Tensor | None
    q_indices: torch.Tensor | None
    full_q_num_blocks: torch.Tensor | None
    full_q_indices: torch.Tensor | None


class BlockLists(NamedTuple):
    """The blocks of keys for each block of queries, named as in torch's BlockMask, which does too.

    The numbers are int32 (batch, num_heads, rows), the indices int32 (batch, num_heads, rows,
    columns), of which the first so many count; batch and num_heads may be 1. Full blocks are seen
    whole. BLOCK_SIZE is in queries and keys. `queries`, the same by blocks of keys, are for a
    backward.
    """

    kv_num_blocks: torch.Tensor
    kv_indices: torch.Tensor
    full_kv_num_blocks: torch.Tensor | None
    full_kv_indices: torch.Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: Any = None
    queries: QueryLists | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        return tuple(self[:4])

    @property
    def query_tensors(self) -> tuple[torch.Tensor | None, ...]:
        return () if self.queries is None else tuple(self.queries)

    @property
    def rule(self) -> str:
        """The name of torch's function for blocks that are seen in part, "" of one that hides none.

        A BlockMask without one has a function too, that is always true.
        """
        name = getattr(self.mask_mod, "__name__", "") if self.mask_mod is not None else ""
        return "" if name == "noop_mask" else name


class Masks(NamedTuple):
    """What a caller gives of masks beyond windows; `mask` is a rule, `density` in percent."""

    block_mask: BlockLists | None = None
    document_ids: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None
    mask: str | None = None
    density: int | None = None


def block_lists(block_mask: Any, function: str = "prefill") -> BlockLists:
    """What of a BlockMask is used. Raises ProblemError for what is none."""
    try:
        lists = BlockLists(*(getattr(block_mask, name) for name in BlockLists._fields[:6]))
    except AttributeError as error:
        raise ProblemError(f"{function}: block_mask is no BlockMask: {error}") from None
    return lists._replace(queries=query_lists(block_mask))


def query_lists(block_mask: Any) -> QueryLists:
    """The lists by blocks of keys that a BlockMask has, or lists as an operator is given them."""
    own = getattr(block_mask, "queries", None)
    if own is not None:
        return own
    return QueryLists(*(getattr(block_mask, name, None) for name in QueryLists._fields))


def any_given(arguments: tuple[Any, ...]) -> bool:
    """Whether any is not None. Graphs of torch 2.11 compare no tuples of tensors."""
    for each in arguments:  # noqa: SIM110
        if each is not None:
            return True
    return False


FLAT_MASKS = (  # as operators take them
    *BlockLists._fields[:4],
    *("mask_block_q", "mask_block_k", "document_ids", "prefix_lens", "mask", "density"),
)


def flat_masks(causal: bool, block_mask: Any, *others: Any) -> tuple[Any, ...]:
    """The values of FLAT_MASKS. Raises ProblemError for a `block_mask` that is none."""
    return (*flat_blocks("prefill", block_mask, causal or others[2] is not None), *others)


def flat_blocks(function: str, block_mask: Any, told: bool) -> tuple[Any, ...]:
    """The values of the first six of FLAT_MASKS. Raises ProblemError as flat_masks() does.

    `told` says that a rule of the mask is given in another way too.
    """
    if block_mask is None:
        return (None, None, None, None, 0, 0)
    lists = block_lists(block_mask, function)
    _refuse_a_rule_of_torch(function, lists, told)
    return (*lists.tensors, *lists.BLOCK_SIZE)


def mask_fields(
    function: str,
    q: torch.Tensor,
    batch: int,
    num_heads: int,
    seqlen_q: int,
    seqlen_k: int,
    causal: bool,
    masks: Masks,
) -> dict[str, Any]:
    """The fields of Problem that the masks fill. Raises ProblemError naming what does not fit."""
    block_mask, document_ids, prefix_lens, mask, density = masks
    given = {"blocks": block_mask, "documents": document_ids, "prefix": prefix_lens}
    on = [name for name, value in given.items() if value is not None]
    if len(on) > 1:
        raise ProblemError(f"{function}: {' and '.join(on)} exclude each other")
    if not on and mask is None:
        if density is not None:
            raise ProblemError(f"{function}: density {density} is of a mask, and none is given")
        return {}
    if density is not None and not (type(density) is int and 1 <= density <= 100):
        raise ProblemError(f"{function}: density {density!r} is not from 1 to 100 percent")
    fields: dict[str, Any] = {"mask": rule_of(function, mask)}
    if not on:
        return fields
    fields |= {"masked_by": on[0], "density": UNTOLD_DENSITY if density is None else density}
    if document_ids is not None:
        _expect_ints(function, "document_ids", document_ids, q, ((batch, seqlen_k),))
    if prefix_lens is not None:
        _expect_ints(function, "prefix_lens", prefix_lens, q, ((batch,),))
    if block_mask is not None:
        _check_lists(function, block_mask, q, batch, num_heads, seqlen_q)
        told = mask is not None or (causal and function != "decode")  # which is causal unasked
        _refuse_a_rule_of_torch(function, block_mask, told)
        fields |= dict(zip(("mask_block_q", "mask_block_k"), block_mask.BLOCK_SIZE, strict=True))
    return fields


def rule_of(function: str, mask: str | None) -> str:
    """The rule as Problem has it, "" where there is none. Raises ProblemError for what is none."""
    if mask is None:
        return ""
    if not isinstance(mask, str):
        raise ProblemError(f"{function}: mask must be an expression, given {type(mask).__name__}")
    try:
        return normal_rule(mask)
    except ValueError as error:
        raise ProblemError(f"{function}: {error}") from None


def expanded_lists(problem: Problem, lists: BlockLists) -> BlockLists:
    """The same with a stride for every sequence and head."""
    heads = (problem.batch, problem.num_heads)

    def of_heads(*tensors: torch.Tensor | None) -> list[Any]:
        return [None if each is None else each.expand(*heads, *each.shape[2:]) for each in tensors]

    whole = BlockLists(*of_heads(*lists.tensors), BLOCK_SIZE=lists.BLOCK_SIZE)
    if lists.queries is None:
        return whole
    return whole._replace(queries=QueryLists(*of_heads(*lists.queries)))


def check_lists(problem: Problem, lists: BlockLists, keys: int) -> None:
    """Raise ProblemError for a block that there is not among so many keys. Waits for the device."""
    blocks = -(-keys // problem.mask_block_k)
    for counts, indices, name in (
        (lists.kv_num_blocks, lists.kv_indices, "kv_indices"),
        (lists.full_kv_num_blocks, lists.full_kv_indices, "full_kv_indices"),
    ):
        if counts is None or indices is None:
            continue
        used = torch.arange(indices.shape[3], device=indices.device) < counts[..., None]
        bad = used & ((indices < 0) | (indices >= blocks))
        wrong = int(counts.max()) if counts.numel() else 0
        if wrong > indices.shape[3] or bool((counts < 0).any()):
            of = f"{wrong} of {indices.shape[3]} {name}"
            raise ProblemError(f"{problem.op}: block_mask counts {of}")
        if bool(bad.any()):
            place = bad.nonzero()[0].tolist()
            value = int(indices[tuple(place)])
            raise ProblemError(
                f"{problem.op}: {name}{place} is {value}, there are blocks 0..{blocks - 1}"
            )


def _refuse_a_rule_of_torch(function: str, lists: BlockLists, told: bool) -> None:
    """Raise ProblemError for a mask_mod unless its rule is `told` in another way too."""
    if lists.rule and not told:
        instead = "or as causal"
        if function == "decode":
            instead = "or, where it is no more than causal, give a block_mask without one"
        raise ProblemError(
            f"{function}: block_mask has the mask_mod {lists.rule}, which no kernel can call: give"
            f" it as mask, an expression, {instead}"
        )


def _check_lists(
    function: str, lists: BlockLists, q: torch.Tensor, batch: int, num_heads: int, seqlen_q: int
) -> None:
    sizes = lists.BLOCK_SIZE
    numbers = isinstance(sizes, tuple) and all(type(size) is int and size > 0 for size in sizes)
    if not numbers or len(sizes) != 2:
        raise ProblemError(f"{function}: block_mask has the BLOCK_SIZE {sizes!r}")
    if function == "decode" and sizes[0] < seqlen_q:
        told = f"the {seqlen_q} query tokens of a step are of one"
        raise ProblemError(f"decode: block_mask has blocks of {sizes[0]} queries, {told}")
    rows = -(-seqlen_q // sizes[0])
    if (lists.full_kv_num_blocks is None) != (lists.full_kv_indices is None):
        raise ProblemError(f"{function}: block_mask has only one of both lists of full blocks")
    for name, tensor in zip(BlockLists._fields[:4], lists[:4]):
        if tensor is None:
            continue
        columns = (tensor.shape[3],) if name.endswith("indices") and tensor.dim() == 4 else ()
        allowed = [(b, h, rows, *columns) for b in {1, batch} for h in {1, num_heads}]
        _expect_ints(function, f"block_mask's {name}", tensor, q, tuple(sorted(allowed)))
        if not tensor.is_contiguous():
            raise ProblemError(f"{function}: block_mask's {name} must be contiguous")
    shapes = [tuple(each.shape) for each in lists[:4] if each is not None]
    if len({shape[:3] for shape in shapes}) > 1 or len(set(shapes)) > 2:
        raise ProblemError(f"{function}: block_mask's lists are of different shapes: {shapes}")


def _expect_ints(
    function: str,
    name: str,
    tensor: torch.Tensor,
    q: torch.Tensor,
    shapes: tuple[tuple[int, ...], ...],
) -> None:
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.int32:
        told = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ProblemError(f"{function}: {name} is {told}, expected torch.int32")
    if tensor.device != q.device:
        raise ProblemError(f"{function}: {name} is on {tensor.device}, q is on {q.device}")
    if tuple(tensor.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        raise ProblemError(f"{function}: {name} is {tuple(tensor.shape)}, expected {expected}")
    if tensor.numel() and tensor.stride(-1) != 1:
        raise ProblemError(f"{function}: {name}'s last dimension must be contiguous")
