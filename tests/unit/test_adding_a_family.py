"""docs/adding-a-family.md, followed to the letter, gives a copy of the project a working family."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "adding-a-family.md").read_text()
COPIED = ("autoflash", "templates", "tunedb", "tests", "pyproject.toml")
WHOLE = re.compile(r"^`([\w/.]+)`:\n\n```python\n(.*?)```$", flags=re.MULTILINE | re.DOTALL)
EDIT = re.compile(r"^In `([\w/.]+)`|^```diff\n(.*?)```$", flags=re.MULTILINE | re.DOTALL)

COMPILED = """
from autoflash.families import family_of
from autoflash.gpu import known
from autoflash.kernel import compile_candidate
from autoflash.problem import Problem
problem = Problem("prefill", "bf16", 1, 4, 2, 64, 256, 256)
gpu, family = known("NVIDIA_H200"), family_of("simple")
taken = compile_candidate(problem, family.default(problem, gpu), gpu)
print(taken.spill_bytes, taken.smem_bytes <= gpu.smem_per_block, taken.launches_per_call)
"""

EXPORTED = """
import sys
from making import prefill_of, winner_of, H200
from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.families import FAMILIES
from autoflash.inputs import make_inputs
from autoflash.runtime import selection
for table in ("REFUSALS", "UNSUPPORTED", "DEFAULTS"):
    assert set(getattr(selection, f"SELECTION_{table}")) >= set(FAMILIES), table
problem = prefill_of(seqlen_q=40, seqlen_k=40)
config = FAMILIES["simple"].default(problem, H200)
open("dispatch.py", "w").write(export([winner_of(problem, config)]).text)
sys.path.insert(0, ".")
import dispatch
inputs = make_inputs(problem)
call = {"causal": True, "return_lse": True}
result = dispatch.prefill(inputs.q, inputs.k, inputs.v, **call)
served = dispatch.explain(dispatch.prefill, inputs.q, inputs.k, inputs.v, **call)
print(Budget(inputs).judge(*result).correct, served["family"])
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> Path:
    """A copy of the project in which every block of the page has been carried out."""
    folder = tmp_path_factory.mktemp("project")
    for name in COPIED:
        source = ROOT / name
        ignore = shutil.ignore_patterns("__pycache__")
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=ignore)
        else:
            shutil.copy(source, folder / name)
    files = WHOLE.findall(PAGE)
    assert len(files) == 5
    for name, text in files:
        assert not (folder / name).exists(), f"{name} is there already"
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    file = ""
    for name, lines in EDIT.findall(PAGE):
        if name:
            file = folder / name
            continue
        old, new = (
            "\n".join(line[1:] for line in lines.splitlines() if line[0] == sign) for sign in "-+"
        )
        before = file.read_text()
        assert before.count(old) == 1, f"{file.name}: {old!r} is there {before.count(old)} times"
        file.write_text(before.replace(old, new))
    return folder


def run(project: Path, *command: str, **variables: str) -> str:
    """What a command prints in the copy."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(project),
        "AUTOFLASH_CACHE": str(project / "cache"),
        **variables,
    }
    environment.pop("PYTEST_ADDOPTS", None)
    done = subprocess.run(
        [sys.executable, *command], cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_its_text_is_rendered_and_its_candidates_are_listed(project):
    text = run(project, "-m", "autoflash", "render", "--variant", "simple_causal")
    assert "def simple_kernel(" in text and "last key that a query sees" in text
    listed = run(
        project, "-m", "autoflash", "space", "--op", "prefill", "--seqlen-k", "512", "--json"
    )
    found = json.loads(listed)[0]["families"]
    assert "prefill" in found and len(found["simple"]["candidates"]) > 5
    assert any("16 rows each" in reason for reason in found["simple"]["refused"])


def test_it_is_right_in_the_interpreter(project):
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/interpret/test_simple.py")
    assert "2 passed" in run(project, *test, "-o", "addopts=", TRITON_INTERPRET="1")


def test_the_exported_module_serves_with_it(project):
    paths = {"PYTHONPATH": f"{project}:{project / 'tests' / 'unit'}", "TRITON_INTERPRET": "1"}
    assert run(project, "-c", EXPORTED, **paths).split() == ["True", "simple"]


def test_it_compiles_within_its_bound(project):
    assert run(project, "-c", COMPILED, TRITON_INTERPRET="0").split() == ["0", "True", "1"]


def test_the_rules_of_layers_and_of_exported_code_hold(project):
    test = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/unit/test_layers.py")
    shutil.copytree(ROOT / "docs", project / "docs", dirs_exist_ok=True)
    assert " passed" in run(project, *test, "-o", "addopts=", "-k", "simple or exported")
