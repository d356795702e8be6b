"""Findings: what came of the cases of a verification, by clause, for people and for machines."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from autoflash.child import OUT_OF_GPU_MEMORY
from autoflash.config import Config
from autoflash.matrix import Case
from autoflash.probes import CLAUSES

Told = Config | Path  # of what is verified: a config of a family, or an exported module


@dataclass(frozen=True)
class Finding:
    """What came of one case: `reason` is empty where the contract is kept."""

    told: Told
    case: Case
    reason: str
    seconds: float

    @property
    def left_out(self) -> bool:
        """Whether the case says nothing, for want of memory."""
        return OUT_OF_GPU_MEMORY in self.reason

    @property
    def broken(self) -> bool:
        return bool(self.reason) and not self.left_out


def broken(findings: Sequence[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.broken]


def by_clause(findings: Sequence[Finding]) -> list[tuple[str, int, int, int]]:
    """(clause, cases, how many of them broken, how many left out), in the contract's order."""
    rows = []
    for clause in CLAUSES:
        own = [finding for finding in findings if finding.case.clause == clause]
        left_out = sum(finding.left_out for finding in own)
        if own:
            rows.append((clause, len(own), len(broken(own)), left_out))
    return rows


def junit(findings: Sequence[Finding]) -> str:
    """A JUnit report: a suite for each clause, a test case for each case."""
    root = ElementTree.Element("testsuites", name="autoflash verify")
    for clause, cases, failures, skipped in by_clause(findings):
        counts = {"tests": str(cases), "failures": str(failures), "skipped": str(skipped)}
        suite = ElementTree.SubElement(root, "testsuite", {"name": clause, **counts})
        for finding in findings:
            if finding.case.clause != clause:
                continue
            told = {"name": finding.case.name, "classname": str(finding.told)}
            told["time"] = f"{finding.seconds:.3f}"
            case = ElementTree.SubElement(suite, "testcase", told)
            if finding.reason:
                kind = "skipped" if finding.left_out else "failure"
                ElementTree.SubElement(case, kind, message=finding.reason)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"
