"""Predict: a choice without a GPU, from compiled resources and the roofline; never a time.

The model is simple and says so. A call takes at least its flops and its bytes. Flops are stretched
by tiles that reach past the problem and by the last wave of programs, which leaves multiprocessors
idle; both are stretched where too few warps and stages are resident to hide latency, and by spills.
Only the order it gives matters; what it says is stored as `predicted` and never as a measurement.
"""

import math
from collections.abc import Sequence

from autoflash.check import Case, Checker, plan_for, small_cases_of
from autoflash.config import Config
from autoflash.entrants import Entrants, Lab
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.groups import Group, digest_of
from autoflash.inputs import make_inputs
from autoflash.kernel import new_outputs
from autoflash.problem import Problem
from autoflash.records import Decision, Resources
from autoflash.roofline import floor
from autoflash.search.random import random
from autoflash.toolchain import Toolchain, detect_toolchain
from autoflash.worker import Deadlines, LimitReached

INTERPRET = {"TRITON_INTERPRET": "1"}  # one process cannot both interpret and compile
INTERPRETER_DEADLINES = Deadlines(check_s=300.0)
CHECKED = 3  # best predicted candidates tried in the interpreter before the default is taken
CLEARLY = 0.05  # what a prediction must promise over the default; the model is no better than that

RESERVED_SMEM = 1024  # of each block, by the driver
MOST_BLOCKS_PER_SM = 32
HALF_HIDING = 8.0  # resident warps times stages in flight that reach half the peak; a guess
LAUNCH_US = 1.0  # of one more kernel in a CUDA graph
SPILL_COST = 1 / 256  # of the time, per spilled byte


class InterpretedDevice(Checker):
    """The service of the process that checks numerics in triton's interpreter, on the CPU."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__("cpu", gpu)

    def hello(self) -> tuple[Gpu, Toolchain]:
        return self._gpu, detect_toolchain()

    def cases(self, problem: Problem) -> tuple[Case, ...]:
        return small_cases_of(problem)


def predict(
    lab: Lab, all_entrants: Sequence[Entrants]
) -> tuple[list[Decision], list[tuple[Problem, str]]]:
    """A predicted decision for every problem whose choice is right in the interpreter."""
    pairs = [(entrants, p) for entrants in all_entrants for p in entrants.group.problems]
    for entrants, problem in pairs:
        entrants.ask([entrants.group.default(problem, lab.gpu)])
    for entrants, problem in pairs:
        entrants.ask(_candidates(lab, entrants.group, problem))
    decisions, undecided = [], []
    for number, (entrants, problem) in enumerate(pairs, 1):
        lab.progress.begin(problem, number, len(pairs))
        try:
            decision = _choice(lab, entrants, problem)
        except LimitReached:
            decision = None
        why = "" if decision else entrants.why_none()
        lab.progress.decided(problem, decision, why)
        if decision:
            decisions.append(lab.journal.decide(decision))
        else:
            undecided.append((problem, why))
    return decisions, undecided


def predicted_us(problem: Problem, config: Config, resources: Resources, gpu: Gpu) -> float:
    """The model's figure for one call. Its order means something, its size little."""
    inputs = make_inputs(problem, device="meta", poison=False)
    out, _ = new_outputs(inputs)
    launches = plan_for(inputs, config, gpu, out, None)
    _, grid, _, options = max(launches, key=lambda launch: math.prod(launch[1]))
    programs = math.prod(grid)
    warps, stages = options.get("num_warps", 4), options.get("num_stages", 2)
    in_flight = _resident_blocks(resources, warps, gpu) * warps * stages
    hiding = in_flight / (in_flight + HALF_HIDING)
    least = floor(problem, gpu)
    flop_rate = (gpu.tflops_16bit or 1) * (1e6 if problem.dtype != "fp32" else 1e6 / 16)
    compute_us = least.flops / flop_rate * _padding(problem, config) / _reuse(config)
    # the multiprocessor with most programs ends last
    compute_us *= math.ceil(programs / gpu.num_sms) * gpu.num_sms / programs
    memory_us = least.bytes_moved / (gpu.dram_gbps or 1) / 1e3
    memory_us /= min(1.0, programs / gpu.num_sms)
    spilled = 1 + SPILL_COST * (resources.spill_bytes or 0)
    return max(compute_us, memory_us) / hiding * spilled + LAUNCH_US * len(launches)


def _choice(lab: Lab, entrants: Entrants, problem: Problem) -> Decision | None:
    """The best predicted config that is right, unless it promises little over a right default."""
    default = entrants.group.default(problem, lab.gpu)
    batch = _candidates(lab, entrants.group, problem)
    predictions: dict[Config, float] = {}
    for done, config in enumerate(entrants.ready(batch, lab.limit), 1):
        if entrants.compiled(problem, config):
            resources = entrants.resources[config]
            predictions[config] = predicted_us(problem, config, resources, lab.gpu)
        lab.progress.candidates(done, len(batch), 0.0, 0.0)
    ranked = sorted(predictions, key=lambda config: (predictions[config], config))
    promised = predictions.get(default, float("inf")) / (1 + CLEARLY)
    better = [config for config in ranked if predictions[config] < promised][:CHECKED]
    for config in [*better, default, *ranked[:CHECKED]]:
        if config in predictions and entrants.admit(problem, config):
            trial = entrants.trial(problem, config, "predicted", "correct", 0.0)
            lab.journal.record(trial)
            return _decision(problem, config, default, predictions)
    return None


def _candidates(lab: Lab, group: Group, problem: Problem) -> list[Config]:
    """Those whose numerics can be checked here, all or as many as the effort allows.

    What was not checked is not chosen, and no strategy could learn from what was not timed.
    """
    candidates = group.candidates(problem, lab.gpu)
    checkable = [config for config in candidates if family_of(config.family).interpretable]
    return next(random(checkable, lab.effort.max_candidates, lab.seed))


def _decision(
    problem: Problem, winner: Config, default: Config, predictions: dict[Config, float]
) -> Decision:
    default_us = predictions.get(default, 0.0)
    margin = default_us / predictions[winner] - 1 if default_us else 0.0
    return Decision(
        problem=problem,
        kernel_digest=digest_of(problem, winner),
        winner=winner,
        winner_us=predictions[winner],
        default=default,
        default_us=default_us,
        margin=margin,
        margin_low=margin,
        margin_high=margin,
        source="predicted",
    )


def _resident_blocks(resources: Resources, warps: int, gpu: Gpu) -> int:
    """Blocks that fit on a multiprocessor at once."""
    threads = 32 * warps
    registers = math.ceil((resources.registers or 128) / 8) * 8  # they are dealt by eights
    return max(
        1,
        min(
            gpu.registers_per_sm // (registers * threads),
            gpu.smem_per_sm // ((resources.smem_bytes or 0) + RESERVED_SMEM),
            gpu.threads_per_sm // threads,
            MOST_BLOCKS_PER_SM,
        ),
    )


def _padding(problem: Problem, config: Config) -> float:
    """Score elements computed over those that are visible."""
    knobs = config.as_dict()
    rows = problem.seqlen_q if problem.op == "prefill" else problem.group_size * problem.seqlen_q
    block_m, block_n = (int(knobs.get(name, 1)) for name in ("BLOCK_M", "BLOCK_N"))
    keys = max(problem.seqlen_k, 1)
    padded = math.ceil(rows / block_m) * block_m / rows * math.ceil(keys / block_n) * block_n / keys
    diagonal = (block_m + block_n) / 2 / keys if problem.causal else 0.0
    return padded * (1 + diagonal)


def _reuse(config: Config) -> float:
    """Share of the peak that a tile's shape allows: products per element loaded, softened."""
    knobs = config.as_dict()
    block_m, block_n = (int(knobs.get(name, 64)) for name in ("BLOCK_M", "BLOCK_N"))
    products = block_m * block_n / (block_m + block_n)
    return products / (products + 16)
