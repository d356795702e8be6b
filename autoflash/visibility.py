"""Visibility: which keys a query sees under every mask, as the contract defines it."""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autoflash.mask import visible
from autoflash.problem import Problem
from autoflash.runtime.masks import BlockLists, Masks

Values = Mapping[str, torch.Tensor]

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


def seen_keys(
    problem: Problem,
    masks: Masks,
    b: int,
    heads: range,
    rows: torch.Tensor,
    keys: int,
    queries: int,
    columns: slice | torch.Tensor = slice(None),
) -> torch.Tensor:
    """(heads or 1, rows, columns) booleans: which of its keys some rows of sequence `b` see.

    `columns` are which of its `keys` are asked about.
    """
    p = problem
    seen = visible(p, rows, keys, queries)[None, :, columns]
    columns = torch.arange(keys, device=rows.device)[columns]
    if masks.prefix_lens is not None:
        seen = seen | (columns < masks.prefix_lens[b])
    if masks.document_ids is not None and keys:
        ids, position = masks.document_ids[b], rows + keys - queries
        same = ids[position.clamp_min(0)][:, None] == ids[columns]
        seen = seen & same & (position >= 0)[:, None]
    if p.mask:
        head = torch.tensor(list(heads), dtype=torch.int32, device=rows.device)[:, None, None]
        values = {
            "b": torch.tensor(b, dtype=torch.int32, device=rows.device),
            "h": head,
            "q_idx": rows.int()[:, None],
            "kv_idx": columns.int(),
        }
        seen = seen & in_torch(p.mask, values)
    if masks.block_mask is not None:
        there, whole = _blocks_there(p, masks.block_mask, b, heads, rows, columns, keys)
        seen = whole | (there & seen)
    return seen


def in_torch(rule: str, values: Values) -> torch.Tensor:
    """Where a rule holds, for int32 tensors that broadcast; numbers are of 32 bits there too."""
    return _evaluated(ast.parse(rule, mode="eval").body, values)


def _blocks_there(
    problem: Problem,
    lists: BlockLists,
    b: int,
    heads: range,
    rows: torch.Tensor,
    columns: torch.Tensor,
    keys: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(heads, rows, columns): whether a pair is in a listed block, and in one that is whole."""
    p, found = problem, []
    for counts, indices in (lists[:2], lists[2:4]):
        there = torch.zeros(len(heads), len(rows), len(columns), dtype=torch.bool).to(rows.device)
        if counts is not None and indices is not None:
            of_rows, of_keys = rows // p.mask_block_q, columns // p.mask_block_k
            for n, head in enumerate(heads):
                number, listed = (_of_head(each, b, head)[of_rows] for each in (counts, indices))
                there[n] = _listed(number, listed, -(-keys // p.mask_block_k))[:, of_keys]
        found.append(there)
    return found[0], found[1]


def _of_head(tensor: torch.Tensor, b: int, head: int) -> torch.Tensor:
    """Of a tensor whose axes of sequences and heads may be 1."""
    of_sequence = tensor[min(b, len(tensor) - 1)]
    return of_sequence[min(head, len(of_sequence) - 1)]


def _listed(number: torch.Tensor, listed: torch.Tensor, blocks: int) -> torch.Tensor:
    """(rows, blocks): which blocks are among the first `number` that are listed for each row."""
    live = torch.arange(listed.shape[1], device=listed.device) < number[:, None]
    live &= listed < blocks  # a cache's lists may be of more keys than a sequence has
    there = torch.zeros(len(listed), blocks + 1, dtype=torch.bool, device=listed.device)
    # what does not count goes to a column of its own
    places = torch.where(live, listed, blocks).long()
    return there.scatter_(1, places, torch.ones_like(places, dtype=torch.bool))[:, :blocks]


def _evaluated(node: ast.expr, values: Values) -> Any:
    match node:
        case ast.Name(id=name):
            return values[name]
        case ast.Constant(value=value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_evaluated(operand, values)
        case ast.UnaryOp(operand=operand):
            return ~_evaluated(operand, values)
        case ast.BoolOp(op=op, values=each):
            truths = [_evaluated(value, values) for value in each]
            join = torch.logical_and if isinstance(op, ast.And) else torch.logical_or
            result = truths[0]
            for truth in truths[1:]:
                result = join(result, truth)
            return result
        case ast.Compare(left=left, ops=ops, comparators=others):
            operands = [_evaluated(operand, values) for operand in (left, *others)]
            pairs = zip(ops, operands, operands[1:])
            truths = [torch.as_tensor(OPERATORS[type(op)](a, b)) for op, a, b in pairs]
            result = truths[0]
            for truth in truths[1:]:
                result = result & truth
            return result
        case ast.BinOp(left=left, op=op, right=right):
            return OPERATORS[type(op)](_evaluated(left, values), _evaluated(right, values))
        case ast.Call(func=ast.Name(id=name), args=arguments):
            given = [_evaluated(argument, values) for argument in arguments]
            if name == "abs":
                return given[0].abs()
            of_both = torch.minimum if name == "min" else torch.maximum
            return of_both(*(torch.as_tensor(each, dtype=torch.int32) for each in given))
    raise AssertionError(ast.dump(node))
