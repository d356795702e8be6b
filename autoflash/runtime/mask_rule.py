"""Rules of custom masks: expressions of b, h, q_idx and kv_idx, parsed and held to what may stand.

Nothing of a rule is ever executed as Python: its syntax tree is walked, and what kernels contain is
written anew from it.
"""

from __future__ import annotations

import ast
import hashlib
from functools import lru_cache

RULE_NAMES = ("b", "h", "q_idx", "kv_idx")  # sequence, query head, query row, key
RULE_CALLS = {"abs": 1, "min": 2, "max": 2}  # with how many arguments
RULE_ARITHMETIC = (ast.Add, ast.Sub, ast.Mult)
RULE_ROUNDED = (ast.FloorDiv, ast.Mod)  # towards minus infinity, as in Python
RULE_BITS = (ast.BitAnd, ast.BitOr, ast.BitXor)
RULE_COMPARISONS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq)
MOST_RULE_CHARACTERS = 1000
INT32_LIMIT = 2**31


@lru_cache(maxsize=256)
def normal_rule(text: str) -> str:
    """The rule in its one spelling. Raises ValueError saying what in it may not stand."""
    if len(text) > MOST_RULE_CHARACTERS:
        raise ValueError(f"mask has more than {MOST_RULE_CHARACTERS} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError(f"mask {text!r} is not an expression") from None
    try:
        kind = _kind_of(tree)
        if kind != "truth":
            raise ValueError("is a number, not true or false")
        return ast.unparse(tree)
    except ValueError as error:
        raise ValueError(f"mask {text!r}: {error}") from None
    except RecursionError:
        raise ValueError(f"mask {text!r} is nested too deeply") from None


def rule_digest(rule: str) -> str:
    """Eight hex digits that name the rule in the names of kernels."""
    return hashlib.sha256(rule.encode()).hexdigest()[:8]


def _kind_of(node: ast.expr) -> str:
    """What an expression is, "number" or "truth". Raises ValueError for what may not stand."""
    told = ast.unparse(node)
    match node:
        case ast.Name(id=name) if name in RULE_NAMES:
            return "number"
        case ast.Name():
            raise ValueError(f"{told} is none of {', '.join(RULE_NAMES)}")
        case ast.Constant(value=int() as value) if type(value) is int:
            if value >= INT32_LIMIT:
                raise ValueError(f"{told} does not fit in 32 bits")
            return "number"
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return _expected("number", operand)
        case ast.UnaryOp(op=ast.Not() | ast.Invert(), operand=operand):
            return _expected("truth", operand)
        case ast.BoolOp(values=values):
            for value in values:
                _expected("truth", value)
            return "truth"
        case ast.Compare(left=left, ops=ops, comparators=others):
            if not all(isinstance(op, RULE_COMPARISONS) for op in ops):
                raise ValueError(f"{told} is no comparison of numbers")
            for operand in (left, *others):
                _expected("number", operand)
            _expect_a_name(node)
            return "truth"
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, RULE_ARITHMETIC):
            _expect_a_name(node)
            _expected("number", left)
            return _expected("number", right)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, RULE_ROUNDED):
            if not (isinstance(right, ast.Constant) and _kind_of(right) and right.value):
                raise ValueError(f"{told} divides by something else than a positive number")
            _expect_a_name(left)
            return _expected("number", left)
        case ast.BinOp(left=left, op=op, right=right) if isinstance(op, RULE_BITS):
            _expect_a_name(node)
            return _expected(_kind_of(left), right)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in RULE_CALLS:
            if len(arguments) != RULE_CALLS[name]:
                raise ValueError(f"{told}: {name} takes {RULE_CALLS[name]}")
            _expect_a_name(node)
            for argument in arguments:
                _expected("number", argument)
            return "number"
    raise ValueError(f"{told} may not stand in a mask")


def _expected(kind: str, node: ast.expr) -> str:
    if _kind_of(node) != kind:
        expected = "a number" if kind == "number" else "true or false"
        raise ValueError(f"{ast.unparse(node)} is not {expected}")
    return kind


def _expect_a_name(node: ast.expr) -> None:
    """Constants alone are no tensors in a kernel, and say nothing."""
    names = (each.id for each in ast.walk(node) if isinstance(each, ast.Name))
    if not any(name in RULE_NAMES for name in names):
        raise ValueError(f"{ast.unparse(node)} names none of {', '.join(RULE_NAMES)}")
