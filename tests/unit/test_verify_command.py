"""Verification: the matrix asks about every clause, and what came of it is told as it was."""

import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from making import decode_of, prefill_of, winner_of

from autoflash.cli.verify import jobs_of
from autoflash.config import Config
from autoflash.export import export
from autoflash.families import FAMILIES, serving, why_refused
from autoflash.findings import Finding, broken, by_clause, junit
from autoflash.gpu import known
from autoflash.gradient_probes import GRADIENT_PROBES
from autoflash.kinds import kinds_of
from autoflash.matrix import Case, cases_of, far_cases_of
from autoflash.probes import CLAUSES, PROBES
from autoflash.roofline import cache_bytes
from autoflash.runtime.match import match_key, match_sizes
from autoflash.store import shipped_winners
from autoflash.subjects import exported_module, tuned_problems
from autoflash.verify import Unit, examined, of_family, of_module, of_winners

H200 = known("NVIDIA_H200")
OPS = ("prefill", "decode")


def cases(units):
    return [case for unit in units for case in unit.cases]


@pytest.mark.parametrize("small", [True, False])
def test_every_clause_is_asked_about_in_both_ops(small):
    for op in OPS:
        asked = {c.clause for c in cases(of_module(Path("m.py"), small)) if c.problem.op == op}
        assert asked == set(CLAUSES) - ({"lse"} - asked)
    assert {probe.clause for probe in PROBES.values()} == set(CLAUSES)


@pytest.mark.parametrize("small", [True, False])
def test_gradients_are_asked_about_under_every_clause_but_addresses(small):
    asked = cases(of_module(Path("m.py"), small, backward=True))
    assert {case.problem.op for case in asked} == {"backward"}
    assert {case.clause for case in asked} == set(CLAUSES) - {"addresses"}
    assert small or {case.probe for case in asked} == set(GRADIENT_PROBES)
    assert len(asked) < 50 if small else len(asked) > 1000


def test_the_whole_matrix_has_thousands_of_cases_and_the_small_one_few():
    whole, small = (cases(of_module(Path("m.py"), small)) for small in (False, True))
    assert len(whole) > 3000 and len(small) < 300
    assert {case.probe for case in whole} == set(PROBES) - {"some rows at a tuned size"}


@pytest.mark.parametrize("small", [True, False])
@pytest.mark.parametrize("op", [*OPS, "backward"])
def test_every_kind_is_one_that_is_served(op, small):
    for kind in kinds_of(op, small):
        assert serving(kind, H200)
    switches = {kind.switches for kind in kinds_of(op, small=False)}
    assert {kind.switches for kind in kinds_of(op, small=True)} <= switches


@pytest.mark.parametrize("small", [True, False])
def test_gradients_are_asked_of_values_of_another_width(small):
    kinds = [kind for kind in kinds_of("backward", small) if "head_dim_v" in kind.switches]
    asked = {(kind.head_dim, kind.head_dim_v) for kind in kinds}
    assert asked == ({(24, 40)} if small else {(192, 128), (64, 96), (40, 256)})
    for kind in kinds:
        assert [family.name for family in serving(kind, H200)] == ["backward", "backward_single"]


def test_lengths_lie_on_both_sides_of_every_tile_and_page():
    prefill = cases_of(prefill_of(), (32, 64), small=False)
    lengths = {(c.problem.seqlen_q, c.problem.seqlen_k) for c in prefill}
    for edge in (31, 32, 33, 63, 64, 65):
        assert (edge, edge) in lengths
    decode = cases_of(decode_of(page_size=48), (32,), small=False)
    (counted,) = [c.lengths for c in decode if c.probe == "visible keys are counted"]
    assert {0, 1, 31, 32, 33, 47, 48, 49, 63, 64, 65} <= set(counted or ())


def test_far_cases_have_more_programs_than_an_axis_of_a_grid():
    for op in OPS:
        for case in far_cases_of(op):
            assert case.problem.batch * case.problem.num_heads > 65_535


@pytest.mark.parametrize("name", ["prefill", "decode", "decode_last", "backward_single"])
def test_a_family_is_asked_with_its_default_and_with_candidates(name):
    units = of_family(FAMILIES[name], H200, small=True, drawn=2, seed=0)
    kinds = len(kinds_of(FAMILIES[name].op, small=True))
    assert kinds < len(units) <= 3 * kinds
    for unit in units:
        assert isinstance(unit.told, Config)
        assert all(why_refused(c.problem, unit.told, H200) is None for c in unit.cases)


def test_winners_that_won_alike_are_asked_once():
    longer = [winner_of(prefill_of(seqlen_k=n)) for n in (512, 1024)]
    (unit,) = of_winners(longer, H200, small=False)
    assert unit.told == longer[0].decision.winner and unit.cases
    assert len(of_winners([*longer, winner_of(decode_of())], H200, small=False)) == 2


def test_a_module_is_asked_at_the_sizes_that_its_rows_were_tuned_for(tmp_path):
    module_path = tmp_path / "attention_dispatch.py"
    winners = [winner for winner in shipped_winners() if winner.gpu.name == H200.name]
    module_path.write_text(export(winners).text)
    module = exported_module(module_path)
    tuned = tuned_problems(module, H200.name)
    (table,) = module.installed().tables.gpus
    rows = [(row.key, tuple(row.sizes)) for row in table.rows]
    assert {(match_key(p), tuple(match_sizes(p))) for p in tuned} == set(rows)
    assert tuned_problems(module, "another GPU") == []
    asked = [c for c in cases(of_module(module_path, False, tuned)) if c.problem in tuned]
    assert 0 < len(asked) < len(tuned) and max(map(cache_bytes, tuned)) > 4 << 30


def test_a_module_is_asked_about_the_rules_that_it_was_tuned_with_and_no_others():
    ruled = [
        decode_of(mask="kv_idx > h", page_size=16),
        prefill_of(mask="kv_idx > b", softcap=True),
    ]
    for op, one in zip(("decode", "prefill"), ruled, strict=True):
        asked = [c for c in cases(of_module(Path("m.py"), True, ruled)) if c.problem.op == op]
        assert {case.problem.mask for case in asked} == {"", one.mask}
        probes = {case.probe for case in asked if case.problem.mask}
        assert {"visible keys are counted", "rows without keys"} <= probes
    assert not any(case.problem.mask for case in cases(of_module(Path("m.py"), False)))


def findings():
    kept, wrong, starved = (
        Case("random values", prefill_of()),
        Case("wide rows", replace(prefill_of(), causal=False)),
        Case("random values", decode_of(), (3,)),
    )
    told = Path("m.py")
    return [
        Finding(told, kept, "", 0.5),
        Finding(told, wrong, "correctness: off & far", 0.25),
        Finding(told, starved, "runtime: out of GPU memory: 9 GiB", 0.1),
    ]


def test_findings_are_counted_by_clause():
    assert by_clause(findings()) == [("strides", 1, 1, 0), ("numbers", 2, 0, 1)]
    assert [finding.case.probe for finding in broken(findings())] == ["wide rows"]


def test_a_junit_report_has_a_suite_for_each_clause():
    root = ElementTree.fromstring(junit(findings()).encode())
    suites = {suite.get("name"): suite for suite in root}
    assert list(suites) == ["strides", "numbers"]
    assert (suites["strides"].get("failures"), suites["numbers"].get("skipped")) == ("1", "1")
    (failure,) = root.findall(".//failure")
    assert failure.get("message") == "correctness: off & far"
    assert len(root.findall(".//testcase")) == 3


def test_a_name_tells_problem_and_lengths():
    name = findings()[2].case.name
    assert name.startswith("random values: decode bf16") and name.endswith("lengths [3]")
    assert json.dumps(name)


class Agreeing:
    """An examiner that finds nothing."""

    def examine(self, told, case):
        return ""


def test_an_interruption_waits_for_the_cases_that_run_and_for_no_other():
    kind = kinds_of("prefill", small=True)[0]
    unit = Unit(Path("m.py"), tuple(cases_of(kind, (64,), small=True)))
    seen = []

    def told(finding):
        seen.append(finding)
        if len(seen) == 2:
            raise KeyboardInterrupt

    assert len(examined([unit] * 4, Agreeing)) == 4 * len(unit.cases)
    with pytest.raises(KeyboardInterrupt):
        examined([unit] * 4, Agreeing, told=told)
    assert len(seen) < len(unit.cases)  # nor is the unit that had begun gone through


def test_units_of_most_work_are_begun_first_and_told_of_in_their_own_order():
    kind = kinds_of("prefill", small=True)[0]
    cases = tuple(cases_of(kind, (64,), small=True))
    wide = replace(cases[0], problem=replace(kind, head_dim=256, head_dim_v=256))
    units = [Unit(Path(name), made) for name, made in zip("abc", (cases[:2], cases[:3], (wide,)))]
    begun = []
    found = examined(units, Agreeing, told=lambda finding: begun.append(finding.told.name))
    assert 256 > 3 * kind.head_dim > 2 * kind.head_dim
    assert begun == ["c", "b", "b", "b", "a", "a"]
    assert [finding.told.name for finding in found] == ["a", "a", "b", "b", "b", "c"]


@pytest.mark.parametrize(
    ("cores", "memory_gib", "on_gpu", "jobs"),
    [
        (16, 141, True, 16),
        (64, 141, True, 16),
        (32, 24, True, 6),
        (4, 2, True, 1),
        (2, 2, False, 2),
    ],
)
def test_processes_are_as_many_as_cores_compile_and_a_gpu_has_memory_for(
    monkeypatch, cores, memory_gib, on_gpu, jobs
):
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    assert jobs_of(replace(H200, memory_gib=memory_gib), on_gpu) == jobs
