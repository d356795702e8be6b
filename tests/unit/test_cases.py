"""Faults that hit others: each case that must hold is named by a test that would see it."""

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
# A test carries its cases where it is defined: `def test_…(…):  # case B04, case B13`.
CASES = (
    *("B01", "B04", "B05", "B06", "B07", "B13", "B14", "B16", "B17", "B18", "B19", "B21", "B22"),
    *("B23", "B24", "B25", "B26", "B27", "B28", "B29", "B30", "B31", "B35", "B38", "B40", "B42"),
    *("B44", "B45", "B46", "B47", "B48", "B49", "B50", "S03", "S07", "S09", "S10", "S11", "S12"),
)
ON_A_GPU = ("B04", "B05", "B07", "B13", "B14", "B18", "B19", "B21", "B23", "B24", "B25", "B27")
ON_A_GPU += ("B38", "B40", "B44", "B46", "B47", "B50", "S03")


def named_in(*folders: str) -> set[str]:
    """The cases that stand behind a test's definition, which may be of several lines."""
    text = "\n".join(
        path.read_text() for folder in folders for path in (TESTS / folder).glob("test_*.py")
    )
    headers = re.findall(r"^def test_\w+\((?:.|\n)*?\n(?=    \w|    \"\"\")", text, re.MULTILINE)
    comments = (comment for header in headers for comment in re.findall(r"# case (.*)", header))
    return {name for comment in comments for name in re.findall(r"[BS]\d\d", comment)}


def test_every_case_is_named_by_a_test():
    assert named_in("unit", "compile", "interpret", "gpu") == set(CASES)


@pytest.mark.parametrize("case", ON_A_GPU)
def test_a_case_of_kernels_is_named_by_a_test_on_a_gpu(case):
    assert case in named_in("gpu")
