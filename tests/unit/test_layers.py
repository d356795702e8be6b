"""Layers: what may import what, how long a file may be, and what the exported code may hold."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "autoflash"
MODULES = sorted(PACKAGE.rglob("*.py"))
RUNTIME = sorted((PACKAGE / "runtime").glob("*.py"))
PARTS = sorted((ROOT / "templates").rglob("*.jinja"))
MOST_LINES = 400

TABLE = ROOT / "docs" / "how-it-works.md"


def modules_in_order() -> list[str]:
    """The modules of the documented table of layers, lowest first."""
    rows = re.findall(r"^\| \d+ \| (.*) \|$", TABLE.read_text(), flags=re.MULTILINE)
    return [name for row in rows for name in re.findall(r"`(\w+)`", row)]


ORDER = modules_in_order()


def owner(path: Path) -> str:
    """The module or package of autoflash that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """The modules and packages of autoflash that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = [name.split(".")[1:] for name in names if name.split(".")[0] == "autoflash"]
    # `from autoflash import __version__` is of the package itself
    return {rest[0] if rest and rest[0] in ORDER else "__init__" for rest in ours}


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_imports_only_what_stands_before_it(path):
    own = owner(path)
    assert own in ORDER, f"{own} stands in no layer of {TABLE}"
    assert imported(path) - {own} <= set(ORDER[: ORDER.index(own)])


def test_the_table_of_layers_names_every_module_once():
    assert sorted(ORDER) == sorted({owner(path) for path in MODULES})


@pytest.mark.parametrize("path", MODULES + PARTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_short_enough_to_be_read_at_once(path):
    assert len(path.read_text().splitlines()) < MOST_LINES


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_a_module_says_in_its_first_line_what_it_owns(path):
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    assert docstring.split("\n\n")[0].endswith(".")


def test_no_file_is_a_drawer_for_everything():
    drawers = {"utils", "util", "common", "helpers", "misc", "base"}
    assert not [path for path in MODULES if path.stem in drawers]


def top_level_names(tree: ast.Module) -> list[str]:
    names = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.append(node.name)
        elif isinstance(node, ast.Assign):
            names += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.append(node.target.id)
    return names


def test_names_of_the_exported_code_are_unique_across_its_files():
    seen: dict[str, str] = {}
    for path in RUNTIME:
        for name in top_level_names(ast.parse(path.read_text())):
            assert name not in seen, f"{path.name} and {seen.get(name)} both define {name}"
            seen[name] = path.name


# What a file of the exported code may import inside a function, and why.
LATE_IMPORTS = {
    "interpreter.py": {
        "numpy",  # torch can do without it
        "triton.language",  # a process that compiles needs none of this, and starts sooner
        "triton.runtime",
    },
    "transformers_attention.py": {"transformers"},  # of those alone whose models attend by it
}


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_the_exported_code_imports_at_the_top_siblings_torch_and_triton(path):
    tree = ast.parse(path.read_text())
    late = LATE_IMPORTS.get(path.name, set())
    for node in ast.walk(tree):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        if isinstance(node, ast.ImportFrom) and node.level:
            assert node.level == 1 and node in tree.body and node.module
            assert all(alias.asname is None for alias in node.names)
            continue
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names = names or [alias.name for alias in node.names]
        if node not in tree.body:
            assert set(names) <= late, f"{names} imported inside a function"
            continue
        allowed = {*sys.stdlib_module_names, "torch", "triton"}
        assert {name.split(".")[0] for name in names} <= allowed


@pytest.mark.parametrize("path", RUNTIME, ids=lambda path: path.name)
def test_the_exported_code_shares_its_future_and_does_nothing_when_imported(path):
    tree = ast.parse(path.read_text())
    statements = [node for node in tree.body if not isinstance(node, ast.Import)]
    if any(isinstance(node, ast.FunctionDef | ast.ClassDef) for node in statements):
        future = [n for n in statements if isinstance(n, ast.ImportFrom) and not n.level]
        futures = [n for n in future if n.module == "__future__"]
        assert [alias.name for n in futures for alias in n.names] == ["annotations"]
    calm = (ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in statements:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        assert is_text or isinstance(node, calm), f"line {node.lineno} runs when imported"


def test_no_two_test_files_share_a_name():
    """pytest imports them by their names: `python -m pytest` collects all folders at once."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len(set(names)) > 50
