"""The records: Trial, a measurement; Decision, a verdict; Winner, its result; what is exported."""

from dataclasses import dataclass

from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.problem import Problem
from autoflash.toolchain import Toolchain

STATUSES = ("correct", "constraints", "compile", "runtime", "correctness", "timeout")
STAGES = ("screen", "final", "cross", "predicted")
REGIMES = ("graph", "eager", "none")
SOURCES = ("measured", "predicted")


@dataclass(frozen=True)
class Clocks:
    """What NVML said while a trial ran; None where it does not say."""

    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    throttle_reasons: int | None = None


@dataclass(frozen=True)
class Resources:
    """What one launch of the plan's largest kernel takes, and how many kernels a call launches."""

    registers: int | None = None
    spill_bytes: int | None = None
    smem_bytes: int | None = None
    launches_per_call: int | None = None
    workspace_bytes: int | None = None


@dataclass(frozen=True)
class Trial:
    """One candidate on one problem: what came of it. Times are microseconds per call.

    `stage` says where in the search it was made: `screen` few launches, `final` interleaved with
    the default, `cross` a finalist of another shape of the group, `predicted` never run.
    `regime` is `none` when nothing was timed. `error` holds the reason of every status but
    `correct`. `max_ratio` and `rms_ratio` are errors over the eager computation's error. `seconds`
    is how long its work took. `asked_at` and `compiled_at` say when its binary was asked for and
    when it was there.
    """

    problem: Problem
    config: Config
    kernel_digest: str
    status: str
    stage: str
    source: str = "measured"
    regime: str = "none"
    median_us: float | None = None
    p20_us: float | None = None
    p80_us: float | None = None
    samples: int = 0
    max_ratio: float | None = None
    rms_ratio: float | None = None
    lse_error: float | None = None
    seconds: float = 0.0
    error: str = ""
    asked_at: str = ""  # ISO 8601, UTC, as the next
    compiled_at: str = ""
    resources: Resources = Resources()
    clocks: Clocks = Clocks()


@dataclass(frozen=True)
class Decision:
    """One verdict on one problem.

    `margin` is the default's time over the winner's, minus one, with its 95 % interval; `tied` are
    the configs within half a percent of the winner; `times` holds every config measured in the
    final or the cross timing of this problem, fastest first.
    """

    problem: Problem
    kernel_digest: str
    winner: Config
    winner_us: float
    default: Config
    default_us: float
    margin: float
    margin_low: float
    margin_high: float
    tied: tuple[Config, ...] = ()
    times: tuple[tuple[Config, float], ...] = ()
    regret: float = 0.0
    source: str = "measured"


@dataclass(frozen=True)
class Winner:
    """A decision with where it came from: what `tunedb/winners` and export hold."""

    gpu: Gpu
    toolchain: Toolchain
    decision: Decision
    weight: float = 1.0
    decided_at: str = ""  # ISO 8601, UTC


@dataclass(frozen=True)
class Profile:
    """What one kernel of a config's call takes, and what a profiler saw of it; else None.

    `occupancy_percent` is theoretical: resident warps of those that a multiprocessor can hold. The
    others are means over a launch: warps that were resident, and memory and tensor cores at work.
    """

    kernel: str
    registers: int
    spill_bytes: int
    smem_bytes: int
    warps: int
    programs: int
    occupancy_percent: float
    achieved_percent: float | None = None
    dram_percent: float | None = None
    tensor_percent: float | None = None


@dataclass(frozen=True)
class ExportedProblem:
    """A tuned problem of an exported module, the config that serves it there, and what that loses.

    Regrets are against the problem's best measured time; `unseen_regret` is what it would lose had
    it not been tuned, None where that was not measured.
    """

    gpu: Gpu
    toolchain: Toolchain
    problem: Problem
    config: Config
    source: str
    regret: float
    unseen_regret: float | None = None
