"""Breaks autoflash by each patch of tests/mutations and requires the test that it names to fail.

A patch is a diff below two lines: `Test: FILE::NAME`, the test that must fail, and `Breaks: CLAUSE`
with the words of docs/contract.md. The tests must pass before anything is broken.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MUTATIONS = ROOT / "tests" / "mutations"
COPIED = ("autoflash", "templates", "tests", "tunedb", "tools", "pyproject.toml")
DEADLINE_S = 600.0


@dataclass(frozen=True)
class Mutation:
    """One way to break autoflash: the patch, the test that must see it, the clause it breaks."""

    path: Path
    test: str
    clause: str

    @property
    def name(self) -> str:
        return self.path.stem


def mutations() -> list[Mutation]:
    """Every patch, by name. Raises ValueError for one that does not say what it must."""
    found = []
    for path in sorted(MUTATIONS.glob("*.patch")):
        told = re.match(r"Test: (\S+::\S+)\nBreaks: (.+)\n", path.read_text())
        if told is None:
            raise ValueError(f"{path}: does not begin with Test: and Breaks:")
        found.append(Mutation(path, told[1], told[2]))
    return found


def patch(root: Path, path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Apply a patch to a tree, or with options only check it, or take it back."""
    command = ["git", "apply", *options, str(path)]
    # a tree inside a repository would be patched relative to that, and silently not at all
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)


def copy_of(root: Path, folder: Path) -> Path:
    """What the tests need of the tree, in the folder."""
    for name in COPIED:
        source = root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
            shutil.copytree(source, folder / name, ignore=ignored)
        else:
            shutil.copy(source, folder / name)
    return folder


def run_tests(root: Path, tests: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """The tests in a process of their own, interpreted where they are of tests/interpret."""
    interpreted = all(test.startswith("tests/interpret/") for test in tests)
    environment = {**os.environ, "PYTHONPATH": str(root), "TRITON_INTERPRET": str(int(interpreted))}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    deadline_s = DEADLINE_S * len(tests)
    return subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True, timeout=deadline_s
    )


def survives(mutation: Mutation) -> str:
    """Why the mutation was not caught, or ""."""
    with tempfile.TemporaryDirectory() as folder:
        root = copy_of(ROOT, Path(folder))
        applied = patch(root, mutation.path)
        if applied.returncode:
            return f"does not apply: {applied.stderr.strip()}"
        try:
            done = run_tests(root, [mutation.test])
        except subprocess.TimeoutExpired as late:  # which is not to fail
            return f"{mutation.test} does not end within {late.timeout:.0f} s"
    # 1 is a test that failed; a kernel that reads where it must not may end the process
    if done.returncode == 1 or done.returncode < 0:
        return ""
    return f"{mutation.test} ends with {done.returncode}: {done.stdout.strip()[-300:]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of patches; all without any")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    chosen = [m for m in mutations() if not arguments.names or m.name in arguments.names]
    for interpreted in (True, False):
        tests = [m.test for m in chosen if m.test.startswith("tests/interpret/") == interpreted]
        if tests:
            done = run_tests(ROOT, sorted(set(tests)))
            if done.returncode:
                told = (done.stdout + done.stderr)[-3000:]
                sys.exit(f"the tests fail before anything is broken:\n{told}")
    survivors = 0
    with ThreadPoolExecutor(arguments.jobs) as threads:
        for mutation, reason in zip(chosen, threads.map(survives, chosen), strict=True):
            survivors += bool(reason)
            print(f"{'SURVIVES' if reason else 'caught'}  {mutation.name}  {reason}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutations caught")
    sys.exit(1 if survivors or not chosen else 0)


if __name__ == "__main__":
    main()
