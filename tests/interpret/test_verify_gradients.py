"""`autoflash verify --backward` in the interpreter: right gradients pass, wrong ones are found."""

import json
from pathlib import Path

import pytest
from making import backward_of, prefill_of, winner_of
from test_verify import autoflash

from autoflash.export import export

pytestmark = pytest.mark.slow
CLAUSES = ("--clause", "order", "--clause", "lse", "--clause", "dead memory")


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("verified") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of()), winner_of(backward_of())]).text)
    return path


def test_a_module_that_carries_a_backward_keeps_the_clauses(module: Path) -> None:
    command = ("verify", "--module", module, "--backward", "--json", *CLAUSES)
    done = autoflash(*command, folder=module.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout)
    assert told["breaches"] == [] and len(told["clauses"]) == 3


def test_a_gradient_of_lse_that_is_lost_is_found(module: Path, tmp_path: Path) -> None:
    text, planted = module.read_text(), tmp_path / "planted.py"
    lost = text.replace(
        "if dlse is not None:\n        of_rows", "if dlse is None:\n        of_rows"
    )
    assert lost != text
    planted.write_text(lost)
    command = ("verify", "--module", planted, "--backward", "--clause", "lse")
    done = autoflash(*command, folder=tmp_path)
    assert done.returncode == 1
    assert "broken: lse: gradients of lse alone" in done.stderr


def test_a_module_without_a_backward_has_no_gradients_to_ask(tmp_path: Path) -> None:
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of())]).text)
    done = autoflash("verify", "--module", path, "--backward", folder=tmp_path)
    assert done.returncode == 1 and "carries no backward" in done.stderr
