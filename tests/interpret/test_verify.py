"""`autoflash verify` in the interpreter: a right module passes, what is planted is found."""

import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from autoflash.accuracy import Budget
from autoflash.inputs import make_inputs
from autoflash.kinds import kinds_of
from autoflash.matrix import Case
from autoflash.probes import ADDRESSES_32, PROBES, judged
from autoflash.problem import Problem


def autoflash(*arguments: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "AUTOFLASH_DB": str(folder / "none.db")}
    command = [sys.executable, "-m", "autoflash", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verified")
    path = folder / "attention_dispatch.py"
    assert autoflash("export", "-o", path, folder=folder).returncode == 0
    return path


def test_an_exported_module_keeps_every_clause(module: Path) -> None:
    done = autoflash("verify", "--module", module, "--json", folder=module.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["breaches"] == [] and {row["broken"] for row in told["clauses"]} == {0}
    assert len(told["clauses"]) == 8
    assert "0 broken" in done.stderr


def test_a_broken_kernel_is_found_with_its_clause(module: Path, tmp_path: Path) -> None:
    text, planted = module.read_text(), tmp_path / "planted.py"
    in_base_2 = text.replace("lse_log2 * 0.6931471805599453", "lse_log2")
    assert in_base_2 != text
    planted.write_text(in_base_2)
    report = tmp_path / "report.xml"
    command = ("verify", "--module", planted, "--clause", "lse", "--junit", report)
    done = autoflash(*command, folder=tmp_path)
    assert done.returncode == 1
    assert "broken: lse: lse is the natural logarithm: prefill" in done.stderr
    failures = ElementTree.parse(report).findall(".//failure")
    assert failures and all("lse is off" in failure.get("message", "") for failure in failures)


CRASHING = """
import os
def prefill(q, *arguments, **keywords):
    if q.shape[-1] == 40:
        os.abort()
    raise IndexError("planted")
def decode(*arguments, **keywords): raise IndexError("planted")
def coverage(): pass
"""


def test_a_case_that_kills_its_process_is_a_breach_and_the_others_go_on(tmp_path: Path) -> None:
    module = tmp_path / "crashing.py"
    module.write_text(CRASHING)
    command = ("verify", "--module", module, "--clause", "order", "--json", "--jobs", "1")
    done = autoflash(*command, folder=tmp_path)
    assert done.returncode == 1
    reasons = {breach["reason"] for breach in json.loads(done.stdout)["breaches"]}
    assert reasons == {"runtime: its process died of SIGABRT", "IndexError: planted"}


def test_a_file_that_is_no_exported_module_is_the_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    done = autoflash("verify", "--module", tmp_path / "empty.py", folder=tmp_path)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("error: ")


class Far:
    """Right, and it saw keys and values whose last token begins beyond 32 bits."""

    far = False

    def run(self, inputs, softmax_scale=None, with_lse=True):
        p, budget = inputs.problem, Budget(inputs, softmax_scale)
        assert inputs.k.shape[-1] == p.head_dim and inputs.v.shape[-1] == p.head_dim_v
        tensors = (inputs.k, inputs.v)
        self.far |= all(t.stride(1) * (p.seqlen_k - 1) >= ADDRESSES_32 for t in tensors)
        return budget.out.to(inputs.q.dtype), budget.lse.float()


@pytest.mark.parametrize("widths", [(40, 40), (24, 40), (40, 24)], ids=str)
def test_keys_beyond_32_bits_are_asked_of_values_of_another_width_too(widths) -> None:
    subject, probe = Far(), "keys beyond 32 bits"
    problem = Problem("prefill", "bf16", 1, 2, 1, widths[0], 9, 20, head_dim_v=widths[1])
    case = Case(probe, problem)
    assert PROBES[probe].ask(subject, lambda **more: case.make(0, "cpu", **more)) == ""
    assert subject.far


class Trespasser:
    """Right, but it leaves a mark in its input."""

    def run(self, inputs, softmax_scale=None, with_lse=True):
        budget = Budget(inputs, softmax_scale)
        inputs.k.view(-1)[0] += 1
        return budget.out.to(inputs.q.dtype), budget.lse.float()


def test_a_subject_that_writes_to_its_inputs_is_found() -> None:
    inputs = make_inputs(kinds_of("prefill", small=True)[1])
    assert judged(Trespasser(), inputs) == "writes to its input k"
