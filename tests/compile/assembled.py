"""What the assembler says of a compiled kernel for sm_90, and the loops of what it made."""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from triton import knobs


def assembler_report(kernel: Any) -> str:
    """What ptxas says of the kernel: registers, spills, warnings."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(kernel.asm["ptx"])
        command = [knobs.nvidia.ptxas.path, "-v", "-arch=sm_90a", str(path)]
        done = subprocess.run(
            [*command, "-o", f"{folder}/kernel.cubin"], capture_output=True, text=True, check=True
        )
    return done.stderr


def loops_with(kernel: Any, *names: str, unskipped: bool = False) -> list[list[str]]:
    """The instructions of each loop in which all of these occur, the shortest first.

    `unskipped` are those that no branch inside the loop jumps over.
    """
    targets, instructions = _branches(kernel)
    loops = []
    for end, start in targets.items():
        body = instructions[start : end + 1]
        if start < end and all(any(name in each for each in body) for name in names):
            within = [(at, to) for at, to in targets.items() if start <= at < to <= end]
            skipped = {place for at, to in within for place in range(at + 1, to)}
            loops.append((len(body), start, end, skipped if unskipped else set()))
    return [
        [instructions[place] for place in range(start, end + 1) if place not in skipped]
        for _, start, end, skipped in sorted(loops, key=lambda loop: loop[0])
    ]


def _branches(kernel: Any) -> tuple[dict[int, int], list[str]]:
    """Where each branch leads to, by place, and the instructions of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = knobs.nvidia.nvdisasm.path
        listing = subprocess.run(
            [tool, "-c", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    labels, instructions = {}, []
    for line in listing.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            instructions.append(instruction[1])
    targets = {}
    for place, text in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if target and target[1] in labels:
            targets[place] = labels[target[1]]
    return targets, instructions


def counted(body: list[str], *names: str) -> dict[str, int]:
    """How many of the instructions hold each name."""
    return {name: sum(name in each for each in body) for name in names}
