"""The mutations apply to what is here, and name tests and clauses that there are."""

import re
import subprocess

import pytest
from test_docs import ROOT, load_tool

from autoflash.probes import CLAUSES

MUTATE = load_tool("mutate")
MUTATIONS = MUTATE.mutations()


def test_there_are_at_least_twenty_and_some_for_every_clause():
    """Whether a call waits no result tells, so that `verify` has no probe for it."""
    assert len(MUTATIONS) >= 20
    assert {mutation.clause for mutation in MUTATIONS} == {*CLAUSES, "call time"}


def test_every_patch_applies_alone():
    """`make mutate` runs the tests; a patch that no longer applies would break nothing."""
    for mutation in MUTATIONS:
        done = MUTATE.patch(ROOT, mutation.path, "--check")
        assert done.returncode == 0, f"{mutation.name}: {done.stderr}"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_a_mutation_names_a_test_that_there_is(mutation):
    file, _, name = mutation.test.partition("::")
    assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), flags=re.MULTILINE)


def test_a_patch_that_does_not_apply_or_is_not_caught_survives(tmp_path, monkeypatch):
    known = MUTATIONS[0]
    stale = tmp_path / "stale.patch"
    stale.write_text(known.path.read_text().replace("\n-", "\n-no such line "))
    assert "does not apply" in MUTATE.survives(MUTATE.Mutation(stale, known.test, known.clause))
    for status, caught in ((0, False), (1, True), (4, False), (-11, True)):
        done = subprocess.CompletedProcess([], status, stdout="", stderr="")
        monkeypatch.setattr(MUTATE, "run_tests", lambda root, tests, done=done: done)
        assert (MUTATE.survives(known) == "") is caught
