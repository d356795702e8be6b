"""Profile: what the kernels of a call take, by the compiler and, where there is one, by ncu.

`python -m autoflash.profile` is what ncu watches: it makes the call that stdin describes.
"""

import csv
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace

from autoflash.check import plan_for
from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.inputs import make_inputs
from autoflash.kernel import kernel_resources, new_results
from autoflash.occupancy import occupancy
from autoflash.problem import Problem
from autoflash.records import Profile

# Field of Profile, and the metric of ncu that it is.
METRICS = {
    "achieved_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "tensor_percent": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
}
CALLS = 3  # the first one compiles, or warms what is cached
NCU_SECONDS = 300.0


class NotProfiled(Exception):
    """Why ncu gave nothing; what the compiler says is there all the same."""


def profile(problem: Problem, config: Config, gpu: Gpu) -> list[Profile]:
    """What each kernel of a call takes on `gpu`, which need not be here, in the plan's order.

    For processes that only compile. Raises CompileError.
    """
    inputs = make_inputs(problem, device="meta", poison=False)
    out, _ = new_results(inputs)
    launches = plan_for(inputs, config, gpu, out, None)
    taken = kernel_resources(problem, config, gpu)
    found = []
    for (kernel, grid, _, _), (resources, warps) in zip(launches, taken, strict=True):
        programs = 1
        for extent in grid:
            programs *= extent
        found.append(
            Profile(
                kernel=kernel.__name__,
                registers=resources.registers or 0,
                spill_bytes=resources.spill_bytes or 0,
                smem_bytes=resources.smem_bytes or 0,
                warps=warps,
                programs=programs,
                occupancy_percent=occupancy(resources, warps, gpu).percent,
            )
        )
    return found


def watched(
    profiles: Iterable[Profile], problem: Problem, config: Config, ncu: str | None = None
) -> list[Profile]:
    """The same with what ncu sees of a call on the GPU that is here, in a process of its own.

    Raises NotProfiled with the reason where it is not installed, may not, or sees nothing.
    """
    tool = ncu or shutil.which("ncu")
    if tool is None:
        raise NotProfiled("ncu is not installed")
    profiles = list(profiles)
    names = "|".join(re.escape(each.kernel) for each in profiles)
    command = [tool, "--csv", "--page", "raw", "--metrics", ",".join(METRICS.values())]
    command += ["--kernel-name", f"regex:^({names})$", sys.executable, "-m", "autoflash.profile"]
    call = {"problem": asdict(problem), "family": config.family, "knobs": config.as_dict()}
    try:
        done = subprocess.run(
            command, input=json.dumps(call), capture_output=True, text=True, timeout=NCU_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotProfiled(f"ncu: {error}") from None
    rows = _rows(done.stdout)
    if not rows:
        told = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        reasons = [line for line in told if "ERR" in line or "rror" in line] or told[-1:]
        raise NotProfiled(f"ncu: {reasons[0].strip() if reasons else 'it printed nothing'}")
    return [_seen(each, rows) for each in profiles]


def _rows(text: str) -> dict[str, dict[str, str]]:
    """The last row of each kernel of ncu's CSV, which stands among what else is printed."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    rows = csv.DictReader(lines)
    # the row after the names holds units, and no kernel
    return {row["Kernel Name"]: row for row in rows if row.get("Kernel Name")}


def _seen(profile: Profile, rows: dict[str, dict[str, str]]) -> Profile:
    row = rows.get(profile.kernel, {})
    return replace(profile, **{field: _number(row.get(name)) for field, name in METRICS.items()})


def _number(text: str | None) -> float | None:
    """A figure of ncu's; None where a GPU lacks the metric."""
    try:
        return float((text or "").replace(",", ""))
    except ValueError:
        return None


def main() -> None:
    """Make the call that stdin describes, on the GPU that is here."""
    import torch

    from autoflash.gpu import detect
    from autoflash.runtime.launch import run_plan

    call = json.load(sys.stdin)
    problem = Problem(**call["problem"])
    inputs = make_inputs(problem, device="cuda", poison=False)
    out, _ = new_results(inputs)
    config = Config.of(call["family"], call["knobs"])
    for _ in range(CALLS):
        run_plan(plan_for(inputs, config, detect(), out, None))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
