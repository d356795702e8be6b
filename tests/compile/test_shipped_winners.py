"""What shipped winners serve is of today's kernels, and compiles for the GPU it was measured on."""

import pytest

from autoflash.export import export
from autoflash.families import FAMILIES, why_refused
from autoflash.kernel import compile_candidate
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.store import shipped_winners

WINNERS = shipped_winners()


def binaries() -> list[tuple[str, Problem, object, object]]:
    """One config of each text and head_dim that an export serves; all were measured as they are."""
    found = {}
    for row in export(WINNERS, allow_predicted=True).rows:
        problem, config = row.problem, row.config
        variant = FAMILIES[config.family].variant(problem)
        found.setdefault((row.gpu, variant, problem.head_dim), (problem, config, row.gpu))
    return [(f"{p.op}-{p.head_dim}-{c}", p, c, gpu) for p, c, gpu in found.values()]


BINARIES = binaries()


def test_winners_are_shipped():
    assert WINNERS


@pytest.mark.parametrize(
    ("problem", "config", "gpu"),
    [binary[1:] for binary in BINARIES],
    ids=[binary[0] for binary in BINARIES],
)
def test_what_export_serves_compiles_and_fits(problem, config, gpu):
    resources = compile_candidate(problem, config, gpu)
    assert 0 < resources.smem_bytes <= gpu.smem_per_block
    assert resources.spill_bytes <= FAMILIES[config.family].max_spills


@pytest.mark.parametrize("winner", WINNERS, ids=lambda winner: str(winner.decision.problem))
def test_a_shipped_row_is_of_todays_kernel_and_valid(winner):
    decision = winner.decision
    assert why_refused(decision.problem, decision.winner, winner.gpu) is None
    variant = FAMILIES[decision.winner.family].variant(decision.problem)
    assert render(variant).digest == decision.kernel_digest
    assert decision.source == "measured"
    assert decision.margin_low > 0 or decision.winner == decision.default
