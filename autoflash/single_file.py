"""Joining runtime/ into one text: sibling imports dropped, the others hoisted, bodies unchanged."""

import ast
from collections.abc import Mapping
from graphlib import TopologicalSorter
from pathlib import Path

RUNTIME = Path(__file__).resolve().parent / "runtime"


def runtime_files() -> list[Path]:
    """The files of runtime/ that the public functions reach, each after those it imports from."""
    graph: dict[str, list[str]] = {}
    reached = ["dispatch", "merging", "transformers_attention", "warm"]
    while reached:
        stem = reached.pop()
        if stem not in graph:
            graph[stem] = sorted(_siblings((RUNTIME / f"{stem}.py").read_text()))
            reached += graph[stem]
    in_order = TopologicalSorter({stem: graph[stem] for stem in sorted(graph)}).static_order()
    return [RUNTIME / f"{stem}.py" for stem in in_order]


def joined_runtime() -> tuple[str, str]:
    """The hoisted imports and the joined bodies of runtime/, in import order."""
    modules: dict[str, set[str]] = {}
    plain: set[str] = set()
    bodies = []
    for path in runtime_files():
        text = path.read_text()
        for node in _imports(text):
            if isinstance(node, ast.Import):
                plain.update(ast.unparse(ast.Import([alias])) for alias in node.names)
            elif node.level == 0 and node.module != "__future__":
                names = modules.setdefault(node.module or "", set())
                names.update(ast.unparse(alias) for alias in node.names)
        bodies.append(body(text))
    hoisted = [*sorted(plain), *_from_lines(modules)]
    return "\n".join(hoisted) + "\n", "\n\n\n".join(bodies) + "\n"


def body(text: str) -> str:
    """A file without its docstring and its imports, which all stand at the top."""
    last = max(node.end_lineno or 0 for node in _imports(text))
    return "\n".join(text.splitlines()[last:]).strip("\n")


def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [n for n in ast.parse(text).body if isinstance(n, ast.Import | ast.ImportFrom)]


def _siblings(text: str) -> set[str]:
    return {
        node.module
        for node in _imports(text)
        if isinstance(node, ast.ImportFrom) and node.level == 1 and node.module
    }


def _from_lines(modules: Mapping[str, set[str]]) -> list[str]:
    return [
        f"from {module} import {', '.join(sorted(modules[module]))}" for module in sorted(modules)
    ]
