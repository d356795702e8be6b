"""The run-time files join into one text whose bodies are theirs, byte for byte."""

import ast
import sys

from autoflash.families import FAMILIES
from autoflash.single_file import body, joined_runtime, runtime_files


def test_every_file_comes_after_those_it_imports():
    seen = set()
    for path in runtime_files():
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                assert node.module in seen, f"{path.name} comes before {node.module}"
        seen.add(path.stem)
    assert {"dispatch", "problem", "interpreter", "validity"} <= seen


def test_what_dispatch_does_not_reach_is_not_exported():
    """A family that is not registered costs the module nothing."""
    reached = {path.stem for path in runtime_files()}
    assert ("hopper_validity" in reached) == ("prefill_hopper" in FAMILIES)


def test_bodies_are_unchanged():
    _, bodies = joined_runtime()
    for path in runtime_files():
        text = path.read_text()
        assert body(text) in text
        assert body(text) in bodies


def test_nothing_but_imports_and_the_docstring_is_dropped():
    for path in runtime_files():
        whole, kept = ast.parse(path.read_text()), ast.parse(body(path.read_text()))
        dropped = whole.body[: len(whole.body) - len(kept.body)]
        assert [ast.dump(node) for node in whole.body[len(dropped) :]] == [
            ast.dump(node) for node in kept.body
        ]
        assert all(
            isinstance(node, ast.Import | ast.ImportFrom)
            or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
            for node in dropped
        )


def test_top_level_names_are_unique_across_files():
    owners: dict[str, str] = {}
    for path in runtime_files():
        for node in ast.parse(body(path.read_text())).body:
            for name in _defined(node):
                assert name not in owners, f"{name} in {path.name} and {owners[name]}"
                owners[name] = path.name


def test_the_joined_text_needs_the_standard_library_torch_and_triton_only():
    imports, _ = joined_runtime()
    roots = set()
    for node in ast.parse(imports).body:
        names = [node.module] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
        roots |= {name.split(".")[0] for name in names}
    assert roots <= {*sys.stdlib_module_names, "torch", "triton"}


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]
