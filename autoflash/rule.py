"""Rule: a custom mask's expression as the text of a kernel."""

import ast

CALLS = {"abs": "tl.abs", "min": "tl.minimum", "max": "tl.maximum"}
# Triton divides towards zero.
ROUNDED = {ast.FloorDiv: "floor_quotient", ast.Mod: "floor_remainder"}


def in_triton(rule: str) -> str:
    """The rule as an expression of Triton, of scalars b and h and tensors q_idx and kv_idx."""
    return ast.unparse(_ToTriton().visit(ast.parse(rule, mode="eval").body))


class _ToTriton(ast.NodeTransformer):
    """Operators of truths become those of bits, and what Triton rounds otherwise a function."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        op = ast.BitAnd() if isinstance(node.op, ast.And) else ast.BitOr()
        return _joined(op, [self.visit(value) for value in node.values])

    def visit_Compare(self, node: ast.Compare) -> ast.expr:
        operands = [self.visit(operand) for operand in (node.left, *node.comparators)]
        pairs = zip(operands, node.ops, operands[1:])
        return _joined(ast.BitAnd(), [ast.Compare(a, [op], [b]) for a, op, b in pairs])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        op = ast.Invert() if isinstance(node.op, ast.Not) else node.op
        return ast.UnaryOp(op, self.visit(node.operand))

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        left, right = self.visit(node.left), self.visit(node.right)
        name = ROUNDED.get(type(node.op))
        if name is not None:
            return ast.Call(ast.Name(name), [left, right], [])
        return ast.BinOp(left, node.op, right)

    def visit_Call(self, node: ast.Call) -> ast.expr:
        assert isinstance(node.func, ast.Name)
        arguments = [self.visit(argument) for argument in node.args]
        return ast.Call(ast.Name(CALLS[node.func.id]), arguments, [])


def _joined(op: ast.operator, values: list[ast.expr]) -> ast.expr:
    first, *others = values
    for value in others:
        first = ast.BinOp(first, op, value)
    return first
