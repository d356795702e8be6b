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


def loops_with(kernel: Any, *names: str) -> list[list[str]]:
    """The instructions of each loop in which all of these occur, the shortest first."""
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
    loops = []
    for end, text in enumerate(instructions):
        target = re.search(r"BRA.*`\((\.L_x_\d+)\)", text)
        if target and labels.get(target[1], end) < end:
            body = instructions[labels[target[1]] : end + 1]
            if all(any(name in each for each in body) for name in names):
                loops.append(body)
    return sorted(loops, key=len)


def counted(body: list[str], *names: str) -> dict[str, int]:
    """How many of the instructions hold each name."""
    return {name: sum(name in each for each in body) for name in names}
