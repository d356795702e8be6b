"""The whole matrix of the contract on a GPU, of a module of the shipped winners; minutes."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.timeout(3000)
def test_an_exported_module_keeps_every_clause_in_thousands_of_cases(tmp_path):
    module = tmp_path / "attention_dispatch.py"
    environment = {**os.environ, "AUTOFLASH_DB": str(tmp_path / "none.db")}
    for arguments in (["export", "-o", module], ["verify", "--module", module]):
        command = [sys.executable, "-m", "autoflash", *map(str, arguments)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-5000:]
    assert " 0 broken" in done.stderr.splitlines()[-1]
