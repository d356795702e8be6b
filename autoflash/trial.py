"""Trial on a GPU: one candidate at a time through check and timing, in the worker's process."""

import contextlib
import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from triton.compiler.errors import CompilationError
from triton.runtime.errors import OutOfResources, PTXASError

from autoflash.accuracy import Judge, Verdict, budget_of
from autoflash.bench import (
    BOUND_AGAIN_CYCLES,
    CALL_LEAD_CYCLES,
    GPU_CLOCK,
    GRAPH_LEAD_CYCLES,
    PATIENT_LEAD_CYCLES,
    CallGraph,
    Pace,
    Replays,
    Timing,
    calls_in_graph,
    eager_samples,
    event_us,
    graph_cap_us,
    sampled,
    sets_needed,
)
from autoflash.check import Checker, Stage, sample_rows
from autoflash.child import OUT_OF_GPU_MEMORY, Failure
from autoflash.config import Config
from autoflash.gpu import Gpu, detect
from autoflash.inputs import Inputs, lengths_of, make_inputs
from autoflash.kernel import Result, machines_fault, new_results
from autoflash.problem import Problem
from autoflash.records import Clocks
from autoflash.runtime.bound import BoundRecipe, bind_recipe
from autoflash.runtime.launch import compile_plan, run_plan
from autoflash.runtime.recipe import Recipe, learn_recipe
from autoflash.telemetry import Telemetry
from autoflash.toolchain import Toolchain, detect_toolchain

BUDGETS_KEPT = 64
GRAPHS_KEPT = 16  # the finalists of the last screening are among so many
CACHED_SHARE = 0.2  # of the card's memory that torch may hold beside a problem's buffers
DROP_SLACK_US = 20.0  # a lone call finds cold caches and gaps between its launches


class Ready(NamedTuple):
    """How a config's calls are launched: as the exported module would where they can be bound."""

    recipe: Recipe | None
    bound: BoundRecipe | None


class CudaDevice(Checker):
    """The service of the worker process: see `worker.Device` for what each method promises.

    Timing runs a candidate many times on the same tensors and restores none of them. It may, for
    all of them are this process's own: a user's tensors are never here, a check makes outputs of
    its own, and a candidate that changes what it must only read is rejected before it is timed.
    """

    def __init__(self, index: int = 0) -> None:
        torch.cuda.set_device(index)
        super().__init__("cuda", detect(index))
        uuid = torch.cuda.get_device_properties(index).uuid
        self._uuid = str(uuid)
        self._telemetry = Telemetry(self._uuid)
        self._sets: list[tuple[Inputs, Result]] = []
        self._armed: dict[Config, Replays] = {}
        self._readied: dict[Config, Ready] = {}
        self._captured: dict[Config, CallGraph] = {}  # the latest ones
        self._prepared: tuple[Problem, int] | None = None
        # of rows of a prepared problem, which is prepared again when its group is timed
        self._budgets: dict[tuple[object, ...], Judge] = {}

    def hello(self) -> tuple[Gpu, Toolchain]:
        return self._gpu, detect_toolchain()

    def uuid(self) -> str:
        return self._uuid

    def gpu_s(self) -> float:
        return GPU_CLOCK.seconds

    def check(
        self, problem: Problem, config: Config, seed: int, stage: Stage | None = None
    ) -> Verdict:
        with failures(), GPU_CLOCK.counting():
            return super().check(problem, config, seed, stage)

    def prepare(self, problem: Problem, seed: int) -> None:
        self.release()
        self._prepared = (problem, seed)
        # every set has the lengths of the problem's own roofline, or those of another replay
        lengths = lengths_of(problem)
        with failures(), GPU_CLOCK.counting():
            while not self._sets or len(self._sets) < self._sets_wanted():
                number = seed * 1000 + len(self._sets)
                inputs = make_inputs(problem, number, "cuda", lengths, poison=False)
                self._sets.append((inputs, new_results(inputs)[0]))
            torch.cuda.synchronize()

    def release(self) -> None:
        self._armed.clear()
        self._captured.clear()
        self._readied.clear()
        self._sets.clear()
        # what is cached is handed out again at once; to free it and ask for it anew stops the GPU
        if torch.cuda.memory_reserved() > CACHED_SHARE * torch.cuda.mem_get_info()[1]:
            torch.cuda.empty_cache()

    def screen(
        self,
        config: Config,
        samples: int,
        cap_us: float,
        give_up_us: float,
        ahead: Config | None = None,
    ) -> Timing:
        with failures():
            call_us = self._first_us(config)
            give_up_us += DROP_SLACK_US
            if call_us > give_up_us:  # caches were cold, or the host late: that drops nobody
                call_us = event_us(lambda: self._call(config, 1), self._again_cycles(config))
            if call_us > give_up_us:
                return Timing((call_us,), self._telemetry.clocks(), dropped=True)
            if call_us > cap_us:  # beside which the host's part in it is nothing
                return Timing((call_us,), self._telemetry.clocks())
            graph_us = graph_cap_us(cap_us, samples)
            graph = self._captured.get(config) or self._graph(config, call_us, graph_us)
            if graph.calls > 1:
                call_us = graph.sample()  # warms caches and clock, and measures without the host
            affordable = int(cap_us / max(call_us * graph.calls, 1.0)) - 1
            each = Replays.of(graph, call_us)
            clocks: list[Clocks] = []

            def meanwhile() -> None:
                clocks.append(self._telemetry.clocks())
                if ahead is not None:
                    with contextlib.suppress(Exception):  # its own turn will tell
                        self._make_ready(ahead, call_us, graph_us)

            taken = sampled([each] * max(1, min(samples, affordable)), meanwhile)
            return Timing(tuple(taken), clocks[0])

    def check_full(self, config: Config, seed: int) -> Verdict:
        with failures(), GPU_CLOCK.counting():
            inputs = self._sets[0][0]
            rows = sample_rows(inputs.problem, seed)
            key = (self._prepared, seed)
            if key not in self._budgets:
                if len(self._budgets) == BUDGETS_KEPT:
                    self._budgets.clear()
                self._budgets[key] = budget_of(inputs, rows)
            return self.check_rows(inputs, config, rows, self._budgets[key])

    def arm(self, config: Config, pace: Pace) -> None:
        with failures():
            call_us = self._first_us(config)
            graph = self._graph(config, call_us, pace.timed_us)
            if graph.calls > 1:
                call_us = graph.sample()
            self._armed[config] = Replays.of(graph, call_us, pace if pace.lead_us else None)

    def sample(self, rounds: Sequence[Sequence[Config]]) -> list[tuple[list[float], bool]]:
        with failures():
            return [self._round([self._armed[config] for config in each]) for each in rounds]

    def _round(self, graphs: Sequence[Replays]) -> tuple[list[float], bool]:
        braked: list[bool] = []
        return sampled(graphs, lambda: braked.append(self._telemetry.braked())), braked[0]

    def disarm(self) -> Clocks:
        self._armed.clear()
        return self._telemetry.clocks()

    def eager(self, config: Config, calls: int, cap_us: float) -> Timing:
        with failures():
            affordable = max(1, int(cap_us / self._first_us(config)))
            with GPU_CLOCK.counting():
                taken = eager_samples(lambda i: self._call(config, i), min(calls, affordable))
            return Timing(taken, self._telemetry.clocks())

    def _sets_wanted(self) -> int:
        inputs, out = self._sets[0]
        tensors = [inputs.q, inputs.k, inputs.v]
        tensors += [out] if isinstance(out, torch.Tensor) else [inputs.out, inputs.dout, *out]
        set_bytes = sum(t.untyped_storage().nbytes() for t in tensors)
        free_bytes, _ = torch.cuda.mem_get_info()
        return sets_needed(set_bytes, self._gpu.l2_bytes, free_bytes + set_bytes * len(self._sets))

    def _first_us(self, config: Config) -> float:
        """Microseconds of a lone call, of kernels that are loaded."""
        ready = self._ready(config)
        if ready.bound is None:
            self._call(config, 0)  # loads them
            return event_us(lambda: self._call(config, 1), CALL_LEAD_CYCLES)
        return event_us(lambda: self._call(config, 1), GRAPH_LEAD_CYCLES)

    def _again_cycles(self, config: Config) -> int:
        """For how long the GPU waits for a call that took suspiciously long."""
        return PATIENT_LEAD_CYCLES if self._ready(config).bound is None else BOUND_AGAIN_CYCLES

    def _call(self, config: Config, i: int) -> None:
        """Launch a config on one of the sets."""
        tensors = self._tensors(i)
        ready = self._ready(config)
        if ready.bound is not None and ready.bound.launch(tensors):
            return
        if ready.recipe is not None:
            run_plan(ready.recipe.plan(tensors, _workspace))
            return
        inputs, out = self._sets[i % len(self._sets)]
        run_plan(self.plan(inputs, config, out, None))

    def _ready(self, config: Config) -> Ready:
        """The config planned and, where its kernels can be bound, loaded; nothing is launched.

        The sets are alike: what is planned for one serves them all.
        """
        if config not in self._readied:
            inputs, out = self._sets[0]
            tensors = self._tensors(0)
            plan, recipe = learn_recipe(
                lambda noted: self.plan(inputs, config, out, None, noted), tensors, _workspace
            )
            bound = recipe and bind_recipe(recipe, compile_plan(plan), tensors)
            self._readied[config] = Ready(recipe, bound)
        return self._readied[config]

    def _make_ready(self, ahead: Config, like_us: float, cap_us: float) -> None:
        """Have all there that needs no GPU; its graph is made as if a call took `like_us`.

        Who is twice as slow or more is not replayed at all.
        """
        if self._ready(ahead).bound is not None and ahead not in self._captured:
            self._graph(ahead, like_us, cap_us)

    def _tensors(self, i: int) -> list[torch.Tensor]:
        """What a plan on one of the sets names."""
        inputs, out = self._sets[i % len(self._sets)]
        written = (out,) if isinstance(out, torch.Tensor) else out
        given = (*vars(inputs).values(), *written)
        return [each for each in given if isinstance(each, torch.Tensor)]

    def _graph(self, config: Config, call_us: float, cap_us: float) -> CallGraph:
        """A graph of as many calls as the cap allows, the one last captured if it has as many."""
        calls = calls_in_graph(call_us, len(self._sets), cap_us)
        graph = self._captured.pop(config, None)
        if graph is None or graph.calls != calls:
            graph = CallGraph(lambda i: self._call(config, i), calls)
        self._captured[config] = graph
        if len(self._captured) > GRAPHS_KEPT:
            del self._captured[next(iter(self._captured))]
        return graph


def _workspace(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="cuda")


@contextlib.contextmanager
def failures() -> Iterator[None]:
    """What a candidate's compiling, launching or computing raises, as a Failure.

    Whatever a planted or miscompiled kernel does arrives here as an exception of torch or triton;
    a Failure is fatal when the device no longer answers afterwards.
    """
    try:
        yield
        torch.cuda.synchronize()  # an illegal access is told by the next call that waits
    except Failure:
        raise
    except OutOfResources as error:
        raise Failure("constraints", str(error)) from None
    except (CompilationError, PTXASError) as error:
        raise Failure("compile", f"{type(error).__name__}: {error}") from None
    except OSError as error:  # triton's cache on a full disk
        raise machines_fault(error) from None
    except torch.cuda.OutOfMemoryError as error:
        gc.collect()
        torch.cuda.empty_cache()
        first_line = str(error).splitlines()[0]
        raise Failure("runtime", f"{OUT_OF_GPU_MEMORY}: {first_line}") from None
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        reason = f"{type(error).__name__}: {first_line}"
        raise Failure("runtime", reason, fatal=not _answers()) from None


def _answers() -> bool:
    """Whether the device still works: an illegal access makes every later call fail."""
    try:
        torch.cuda.synchronize()
        torch.zeros(1, device="cuda").item()
    except Exception:
        return False
    return True
