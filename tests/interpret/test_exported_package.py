"""An exported package: each kernel in a file of its own, and the results of the one module."""

import importlib.util
import inspect
import sys
from pathlib import Path

import pytest
from exported_calls import wrong_results
from making import decode_of, prefill_of, winner_of

from autoflash.errors import ExportError
from autoflash.export import export, write_module
from autoflash.problem import Problem
from autoflash.subjects import exported_module

EXPORT = export([winner_of(prefill_of()), winner_of(decode_of(page_size=16))])
PROBLEMS = [
    Problem("prefill", "bf16", 1, 4, 2, 64, 40, 70),
    Problem("decode", "bf16", 2, 4, 2, 64, 1, 40, page_size=16, lengths="ragged"),
]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    return write_module(EXPORT, tmp_path / "attention")


def test_a_package_is_right_where_autoflash_cannot_be_imported(package, tmp_path):
    assert package == tmp_path / "attention" / "__init__.py"
    assert wrong_results(package, PROBLEMS, tmp_path, "cpu") == []


def test_a_kernels_source_is_its_own_file(package):
    sys.modules.pop("attention_dispatch", None)
    module = exported_module(package.parent)
    kernels = module.installed().module("merge", ())
    path = Path(kernels.__file__)
    assert path.parent == package.parent / "kernels" and path.is_file()
    assert inspect.getsource(kernels.plan) in path.read_text()


def test_the_files_are_the_texts_of_the_module(package, tmp_path):
    files = {path.stem: path.read_text() for path in (package.parent / "kernels").iterdir()}
    found = importlib.util.spec_from_file_location("one", write_module(EXPORT, tmp_path / "one.py"))
    module = importlib.util.module_from_spec(found)
    sys.modules["one"] = module
    found.loader.exec_module(module)
    assert files == dict(module.installed().tables.texts)


def test_a_package_of_other_kernels_has_operators_of_its_own():
    other = export([winner_of(prefill_of(causal=False)), winner_of(decode_of(page_size=16))])
    assert EXPORT.package_text.splitlines()[-1] != other.package_text.splitlines()[-1]
    assert EXPORT.package_text.splitlines()[-1] != EXPORT.text.splitlines()[-1]


def test_an_earlier_package_is_replaced_and_another_folder_is_left_alone(package, tmp_path):
    (package.parent / "kernels" / "left_over.py").write_text("")
    package.write_text(package.read_text().replace("autoflash 0.1.0;", "autoflash 0.0.9;"))
    write_module(EXPORT, package.parent)
    assert not (package.parent / "kernels" / "left_over.py").exists()
    other = tmp_path / "mine"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(ExportError, match="mine: exists and is no package that"):
        write_module(EXPORT, other)
    assert [path.name for path in other.iterdir()] == ["thesis.txt"]
    with pytest.raises(ExportError, match=r"must end in \.py, or be a folder's"):
        write_module(EXPORT, tmp_path / "module.txt")
