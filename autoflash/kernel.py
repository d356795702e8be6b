"""Kernels: a rendered text loaded, planned, compiled for a GPU type, and its resources read."""

import errno
import math
import os
import re
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache, lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import platformdirs
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler.errors import CompilationError

from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.gradients import Gradients, ModifierGradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.launcher import build_launcher
from autoflash.problem import Problem, Variant
from autoflash.records import Resources
from autoflash.render import Rendered, render
from autoflash.runtime.device import Device
from autoflash.runtime.launch import Launch, compile_plan
from autoflash.runtime.load import load_text
from autoflash.runtime.modifiers import (
    backward_plan,
    decode_plan,
    modifiers_of,
    prefill_plan,
)
from autoflash.runtime.scales import cache_form
from autoflash.whole_file import write_whole

WARP_SIZE = {"nvidia": 32, "amd": 64}

NewWorkspace = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
Result = torch.Tensor | Gradients  # `out`, or of a backward all three
Beside = torch.Tensor | ModifierGradients | None  # `lse`, or of a backward those of its modifiers


class CompileError(Exception):
    """A candidate that does not compile; says where in the rendered text and in which part."""


def cache_dir() -> Path:
    """Where rendered texts are kept while tuning: $AUTOFLASH_CACHE, else the user's cache folder.

    Raises AutoflashError when the folder cannot be made.
    """
    folder = Path(os.environ.get("AUTOFLASH_CACHE") or platformdirs.user_cache_dir("autoflash"))
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise AutoflashError(
            f"cannot make the cache folder {folder}: {error.strerror}; set AUTOFLASH_CACHE"
        ) from None
    return folder


def load(rendered: Rendered) -> ModuleType:
    """The rendered text as a module, from a file that tracebacks and profilers can open."""
    path = cache_dir() / f"{rendered.name}.py"
    try:
        if not path.is_file() or path.read_text() != rendered.text:
            write_whole(path, rendered.text)
    except OSError as error:
        raise AutoflashError(
            f"{path}: cannot be written: {error.strerror}; set AUTOFLASH_CACHE"
        ) from None
    return load_text(str(path), rendered.text)


def machines_fault(error: OSError) -> Exception:
    """What no candidate is to blame for: a full disk, a folder that cannot be written, no memory.

    A candidate must not be recorded as failing for it.
    """
    if error.errno == errno.ENOMEM:
        return MemoryError(str(error))
    where = f"{error.filename}: " if error.filename else ""
    return AutoflashError(f"{where}kernels cannot be compiled: {error.strerror or error}")


def new_outputs(inputs: Inputs, fill: float = float("nan")) -> tuple[torch.Tensor, torch.Tensor]:
    """`out` in the query's layout, contiguous, and `lse`, both filled, to be written by a plan."""
    p = inputs.problem
    shape = (*inputs.q.shape[:-1], p.head_dim_v)
    out = torch.full(shape, fill, dtype=inputs.q.dtype, device=inputs.q.device)
    return out, torch.full(inputs.lse_shape, fill, dtype=torch.float32, device=inputs.q.device)


def new_results(inputs: Inputs, fill: float = float("nan")) -> tuple[Result, Beside]:
    """What a plan writes: `new_outputs`, or the gradients of a backward, contiguous."""
    if inputs.problem.op != "backward":
        return new_outputs(inputs, fill)
    q, k, v = (
        torch.full(t.shape, fill, dtype=t.dtype, device=t.device)
        for t in (inputs.q, inputs.k, inputs.v)
    )
    made = {
        name: torch.full(like.shape, fill, dtype=like.dtype, device=like.device)
        for name, like in modifier_gradients_like(inputs).items()
    }
    return Gradients(q, k, v), ModifierGradients(**made) if made else None


def modifier_gradients_like(inputs: Inputs) -> dict[str, torch.Tensor]:
    """For each of ModifierGradients that the inputs have one whose form it has."""
    found = {}
    if inputs.bias is not None:
        found["dbias"] = inputs.bias.view((1,) * (4 - inputs.bias.dim()) + inputs.bias.shape)
    if inputs.sinks is not None:
        found["dsinks"] = inputs.sinks
    return found


def _poison_of(dtype: torch.dtype) -> float:
    """What no kernel may read and still be right: NaN, or the largest integer."""
    return math.nan if dtype.is_floating_point else torch.iinfo(dtype).max


def plan_of(
    module: ModuleType,
    inputs: Inputs,
    out: Result,
    lse: Beside,
    gpu: Gpu,
    config: Config,
    softmax_scale: float | None = None,
    poison: bool = False,
    new_workspace: NewWorkspace | None = None,
) -> list[Launch]:
    """What a rendered module would launch for these inputs. Launches nothing.

    `out` and `lse` are results as `new_results` makes them. Workspaces are uninitialised, or
    poisoned, or what `new_workspace` gives.
    """
    p = inputs.problem
    scale = p.head_dim**-0.5 if softmax_scale is None else softmax_scale
    device = inputs.q.device

    def plain_workspace(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        workspace = torch.empty(shape, dtype=dtype, device=device)
        return workspace.fill_(_poison_of(dtype)) if poison else workspace

    tail = (gpu.num_sms, config.as_dict(), new_workspace or plain_workspace)
    if p.op == "prefill":
        plain = (inputs.q, inputs.k, inputs.v, out, lse, scale, p.layout, *tail)
        return prefill_plan(module, p, modifiers_of(p, inputs.modifiers), *plain)
    if isinstance(out, Gradients):
        forward = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse)
        given = (*forward, inputs.dout, inputs.dlse, *out, scale, p.layout, *tail)
        of_modifiers = lse if isinstance(lse, ModifierGradients) else ModifierGradients()
        return backward_plan(module, p, modifiers_of(p, inputs.modifiers), of_modifiers, *given)
    scales = (inputs.k_scale, inputs.v_scale) if p.quantised else ()
    return decode_plan(
        module,
        p,
        modifiers_of(p, inputs.modifiers),
        inputs.q,
        cache_form(inputs.k),
        cache_form(inputs.v),
        *scales,
        inputs.cache_seqlens,
        inputs.block_table,
        out,
        lse,
        scale,
        p.kv_layout,
        p.seqlen_k,
        *tail,
    )


def compile_candidate(problem: Problem, config: Config, gpu: Gpu) -> Resources:
    """Compile the config's kernels as the problem would launch them on `gpu`, without a GPU.

    Without `lse`: with it they are others. What is compiled lies in triton's cache afterwards,
    where a launch of the same plan finds it.
    Changes triton's active driver: for processes that only compile. Raises CompileError.
    """
    kernels, workspace_bytes = _compiled(problem, config, gpu, with_lse=False, wide_rows=False)
    reports = [_resources(kernel, gpu) for kernel in kernels]
    return Resources(
        registers=max(registers for registers, _ in reports),
        spill_bytes=max(spills for _, spills in reports),
        smem_bytes=max(kernel.metadata.shared for kernel in kernels),
        launches_per_call=len(kernels),
        workspace_bytes=workspace_bytes,
    )


def kernel_resources(problem: Problem, config: Config, gpu: Gpu) -> list[tuple[Resources, int]]:
    """What each kernel of the problem's plan takes, and its warps, in the plan's order.

    Compiles as `compile_candidate` does, and raises CompileError.
    """
    kernels, _ = _compiled(problem, config, gpu, with_lse=False, wide_rows=False)
    return [
        (Resources(*_resources(kernel, gpu), kernel.metadata.shared), kernel.metadata.num_warps)
        for kernel in kernels
    ]


def precompile(
    problem: Problem, config: Config, gpu: Gpu, with_lse: bool, wide_rows: bool = False
) -> None:
    """The same for the cache alone, with `lse` or without: quick where it is there already.

    `wide_rows` are strides of rows wider than head_dim, for which other kernels are compiled.
    """
    _compiled(problem, config, gpu, with_lse, wide_rows)


def _compiled(
    problem: Problem, config: Config, gpu: Gpu, with_lse: bool, wide_rows: bool
) -> tuple[list[Any], int]:
    """The compiled kernels of the problem's plan and the bytes of its workspaces."""
    compile_only(gpu)
    rendered, module = _loaded(family_of(config.family).variant(problem), gpu.arch)
    inputs = make_inputs(problem, device="meta", poison=False, wide_rows=wide_rows)
    out, lse = new_results(inputs)
    workspaces: list[torch.Tensor] = []

    def workspace(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        workspaces.append(torch.empty(shape, dtype=dtype, device="meta"))
        return workspaces[-1]

    given = (inputs, out, lse if with_lse else None, gpu, config)
    plan = plan_of(module, *given, new_workspace=workspace)
    try:
        kernels = compile_plan(plan)
        for kernel in kernels:
            build_launcher(kernel)
        return kernels, sum(tensor.nbytes for tensor in workspaces)
    except CompilationError as error:
        raise CompileError(_located(error, rendered)) from error
    except MemoryError:
        raise
    except OSError as error:
        raise machines_fault(error) from None
    except Exception as error:  # the compiler raises RuntimeError, MLIR and ptxas errors alike
        raise CompileError(f"{type(error).__name__}: {error}") from error


@cache
def _loaded(variant: Variant, arch: str) -> tuple[Rendered, ModuleType]:
    """The variant's text and a module of it for this `arch` alone.

    A kernel object remembers what it compiled by device number, whatever the target was.
    """
    rendered = render(variant)
    return rendered, load(rendered)


@lru_cache(maxsize=1)
def compile_only(gpu: Gpu | Device) -> GPUTarget:
    """Let triton compile for this GPU, and nothing else; the target."""
    driver: Any = _CompileOnlyDriver(gpu)  # has what a compile asks for, and no more
    triton.runtime.driver.set_active(driver)
    return driver.get_current_target()


class _CompileOnlyDriver:
    """What triton asks of a driver when it compiles and never launches."""

    def __init__(self, gpu: Gpu | Device) -> None:
        if gpu.vendor == "nvidia":
            self._target = GPUTarget("cuda", gpu.capability, WARP_SIZE["nvidia"])
        else:
            self._target = GPUTarget("hip", gpu.arch, WARP_SIZE["amd"])

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")


def _located(error: CompilationError, rendered: Rendered) -> str:
    """The error with its line in the rendered text; triton counts from the function's own start."""
    cause: BaseException = error
    while isinstance(cause.__cause__, CompilationError):
        cause = cause.__cause__
    inner = cause if isinstance(cause, CompilationError) else error
    start = rendered.text.find(inner.src or "\0")
    line = getattr(inner.node, "lineno", None)
    message = str(inner.error_message or inner.__cause__ or inner).strip()
    if start < 0 or line is None:
        return message
    line += rendered.text.count("\n", 0, start)
    return f"{rendered.name}.py:{line} ({rendered.part_at(line)}): {message}"


def _resources(kernel: Any, gpu: Gpu) -> tuple[int, int]:
    """Registers and bytes of spills per thread, as the assembler reports them."""
    if gpu.vendor == "amd":
        text = kernel.asm["amdgcn"]
        registers = re.search(r"\.vgpr_count:\s*(\d+)", text)
        spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", text)
        assert registers and spills, "no register report in the AMD assembly"
        return int(registers[1]), 4 * int(spills[1])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        tool = knobs.nvidia.cuobjdump.path
        report = subprocess.run(
            [tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    usage = re.search(r"REG:(\d+) STACK:(\d+)", report)
    assert usage, f"no register report from cuobjdump: {report!r}"
    return int(usage[1]), int(usage[2])
