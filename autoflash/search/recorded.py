"""Recorded: a table of measured times that strategies can be replayed on without a GPU."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Any

from autoflash.config import Config
from autoflash.problem import Problem
from autoflash.records import Decision, Resources, Trial

FEWEST_SAMPLES = 3  # one launch alone may hold the host's time, and says nothing of its spread
FEWEST_CONFIGS = 30  # a smaller table cannot tell strategies apart
# p80 - p20 of a normal distribution, in standard deviations
NORMAL_FIFTHS = 1.683
COLUMNS = ("median_us", "p20_us", "p80_us", "samples", "registers", "spill_bytes", "smem_bytes")


@dataclass(frozen=True)
class Timed:
    """What was measured of one config: microseconds a call, and what its kernel takes."""

    median_us: float
    p20_us: float
    p80_us: float
    samples: int
    resources: Resources

    def draw(self, random: Random, count: int) -> list[float]:
        """Samples as they may have been: around the median, as wide as the measured spread."""
        sigma = (self.p80_us - self.p20_us) / NORMAL_FIFTHS
        lowest = 0.5 * self.median_us  # no noise makes a kernel this fast
        return [max(lowest, random.gauss(self.median_us, sigma)) for _ in range(count)]


@dataclass(frozen=True)
class Recorded:
    """One problem's measured configs, the default first."""

    problem: Problem
    timed: Mapping[Config, Timed]

    @property
    def default(self) -> Config:
        return next(iter(self.timed))

    @property
    def best_us(self) -> float:
        return min(timed.median_us for timed in self.timed.values())

    def loss(self, config: Config) -> float:
        """The config's recorded time over the best's, minus one."""
        return self.timed[config].median_us / self.best_us - 1


def recorded_from(trials: Iterable[Trial], decisions: Mapping[Problem, Decision]) -> list[Recorded]:
    """The problems of which enough configs were timed well, each with its default first.

    Of several trials of a config the interleaved one counts, else that with most samples.
    """
    kept: dict[Problem, dict[Config, Trial]] = {}
    for trial in trials:
        if trial.regime != "graph" or trial.median_us is None or trial.samples < FEWEST_SAMPLES:
            continue
        of_problem = kept.setdefault(trial.problem, {})
        held = of_problem.get(trial.config)
        if held is None or _weight(trial) >= _weight(held):
            of_problem[trial.config] = trial
    found = []
    for problem, of_problem in sorted(kept.items()):
        default = decisions[problem].default if problem in decisions else None
        if len(of_problem) < FEWEST_CONFIGS or default not in of_problem:
            continue
        ordered = sorted(of_problem, key=lambda config: (config != default, config))
        found.append(Recorded(problem, {c: _timed(of_problem[c]) for c in ordered}))
    return found


def write_table(path: Path, recorded: Sequence[Recorded], provenance: Mapping[str, Any]) -> None:
    """The provenance in the first line, then a line for each problem."""
    lines = [json.dumps(dict(provenance), sort_keys=True)]
    lines += [json.dumps(_line(each), separators=(",", ":")) for each in recorded]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read_table(path: Path) -> list[Recorded]:
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    return [_from_line(json.loads(line)) for line in lines]


def _weight(trial: Trial) -> tuple[bool, int]:
    return (trial.stage == "final", trial.samples)


def _timed(trial: Trial) -> Timed:
    median, p20, p80 = trial.median_us, trial.p20_us, trial.p80_us
    assert median and p20 and p80, "a trial without times"
    return Timed(median, p20, p80, trial.samples, trial.resources)


def _line(recorded: Recorded) -> dict[str, Any]:
    """Configs of one family share the names of their knobs."""
    families: dict[str, Any] = {}
    for place, (config, timed) in enumerate(recorded.timed.items()):
        names = [name for name, _ in config.knobs]
        family = families.setdefault(config.family, {"knobs": names, "rows": []})
        numbers = [round(us, 3) for us in (timed.median_us, timed.p20_us, timed.p80_us)]
        taken = timed.resources
        resources = [timed.samples, taken.registers, taken.spill_bytes, taken.smem_bytes]
        values = [value for _, value in config.knobs]
        family["rows"].append([place, *values, *numbers, *resources])
    return {"problem": asdict(recorded.problem), "families": families}


def _from_line(line: Mapping[str, Any]) -> Recorded:
    placed: list[tuple[int, Config, Timed]] = []
    for family, table in line["families"].items():
        names = table["knobs"]
        for place, *row in table["rows"]:
            config = Config.of(family, dict(zip(names, row, strict=False)))
            measured = dict(zip(COLUMNS, row[len(names) :], strict=True))
            resources = Resources(
                *(measured.pop(name) for name in ("registers", "spill_bytes", "smem_bytes"))
            )
            placed.append((place, config, Timed(**measured, resources=resources)))
    placed.sort(key=lambda each: each[0])
    return Recorded(Problem(**line["problem"]), {config: timed for _, config, timed in placed})
