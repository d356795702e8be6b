"""What is traced into graphs is written as the oldest torch that is supported can trace it."""

import ast
from pathlib import Path

import pytest

RUNTIME = Path(__file__).parents[2] / "autoflash" / "runtime"
# what prefill() and decode() call in a graph before an operator is called
TRACED = ("dispatch", "operators", "arguments", "masks")


@pytest.mark.parametrize("name", TRACED)
def test_no_tuple_that_may_hold_tensors_is_compared_whole(name):
    """torch 2.11 asks a tensor whether it equals None, and gets no answer."""
    tree = ast.parse((RUNTIME / f"{name}.py").read_text())
    compared = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        for side in (node.left, *node.comparators)
        if isinstance(side, ast.BinOp) and isinstance(side.left, ast.Tuple)
    ]
    assert compared == []


@pytest.mark.parametrize("name", TRACED)
def test_no_list_is_taken_for_a_truth_value_by_name(name):
    """torch 2.11 cannot trace bool() of a list."""
    tree = ast.parse((RUNTIME / f"{name}.py").read_text())
    lists = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, (ast.List, ast.ListComp))
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    taken = [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "bool"
        if ast.unparse(node.args[0]) in lists
    ]
    assert taken == []
