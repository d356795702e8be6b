"""The documents say what is true: commands, options, make targets, files and examples."""

import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from autoflash import __version__
from autoflash.workload import DecodeEntry, Model, PrefillEntry, load_workload

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def load_tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE = load_tool("cli_reference")
MEASURED = load_tool("measured_tables")
COMMANDS = dict(REFERENCE.commands())


def test_the_command_reference_is_what_make_docs_writes():
    assert REFERENCE.REFERENCE.read_text() == REFERENCE.reference()


@pytest.mark.parametrize("page", MEASURED.PAGES, ids=lambda page: page.name)
def test_tables_of_figures_are_those_that_make_docs_writes_from_the_results(page):
    text = page.read_text()
    shown = [found[0] for found in MEASURED.TABLE.finditer(text)]
    assert shown and all(table.count("|") > 20 for table in shown)
    assert text == MEASURED.filled(text)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_says_what_it_does_in_a_sentence(name):
    first = (COMMANDS[name].help or "").strip().split("\n\n")[0]
    assert first.endswith(".")


def shell_lines(text: str) -> list[str]:
    """The lines of a document's examples that start with `autoflash`."""
    return re.findall(r"^    (autoflash .*)$", text, flags=re.MULTILINE)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_examples_call_commands_that_exist_with_options_they_have(path):
    for line in shell_lines(path.read_text()):
        words = shlex.split(line, comments=True)[1:]
        found = [name for name in COMMANDS if words[: len(name.split())] == name.split()]
        assert found, line
        options = [word for word in words if word.startswith("-")]
        assert set(options) <= set(REFERENCE.options(COMMANDS[found[0]])), line


def test_the_readme_shows_the_main_commands():
    shown = {line.split()[1] for line in shell_lines((ROOT / "README.md").read_text())}
    assert {"tune", "query", "export", "render", "space", "doctor"} <= shown


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_make_targets_that_are_named_exist(path):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = re.findall(r"(?:`|^    )make ([a-z-]+)", path.read_text(), flags=re.MULTILINE)
    assert set(named) <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_are_named_exist(path):
    text = path.read_text()
    names = re.findall(r"`((?:docs|examples|tests|tunedb|templates)/[\w./-]*)`", text)
    made = re.findall(r"^`(\S+)`:\n\n```", text, flags=re.MULTILINE)  # by who follows the page
    missing = [name for name in names if not (ROOT / name).exists() and name not in made]
    assert not missing


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_workloads_that_are_shown_load(path, tmp_path):
    for block in re.findall(r"```yaml\n(.*?)```", path.read_text(), flags=re.DOTALL):
        file = tmp_path / "shown.yaml"
        file.write_text(block)
        assert load_workload(file).problems


def test_the_expansion_that_is_described_is_the_one_that_is_made(tmp_path):
    text = (ROOT / "docs" / "workloads.md").read_text()
    (block,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "shown.yaml"
    file.write_text(block)
    ops = [problem.op for problem, _ in load_workload(file).problems]
    assert f"are {ops.count('prefill')} and {ops.count('decode')} problems" in " ".join(
        text.split()
    )


def test_every_key_of_a_workload_is_described():
    text = (ROOT / "docs" / "workloads.md").read_text()
    for entry in (Model, PrefillEntry, DecodeEntry):
        for key in entry.model_fields:
            assert f"`{key}`" in text or f"  {key}:" in text


def test_the_newest_change_is_of_this_version():
    versions = re.findall(r"^## (\S+?),? ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert versions[0] == __version__


def test_workloads_of_benchmarks_and_examples_are_yaml_that_loads():
    files = [*(ROOT / "examples").glob("*.yaml"), *(ROOT / "benchmarks").rglob("*.yaml")]
    assert files
    for file in files:
        assert yaml.safe_load(file.read_text())
        assert load_workload(file).problems
