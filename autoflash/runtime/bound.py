"""Bound launches: a recipe's compiled kernels launched for other pointers, past triton's lookup.

For every launch triton looks at type, alignment and value of each argument to find the binary, and
hands all of them through Python to C, which takes the host several times as long as the launch. Of
a recipe only the pointers change, and the form they are of fixes all but where they lie: to launch
the same binaries again it is enough that each is aligned as it was, that the device is the current
one, and that nobody listens to launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Lock
from typing import Any, NamedTuple, cast

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .cuda_launch import CUDA_TENSOR_MAP, CudaLaunch, cuda_launcher, cuda_parameter, map_address
from .recipe import Recipe, Step, with_base

BOUND_TRITON = "3.6."  # whose kernels take the parameters that `_bound_step` lists
BOUND_ALIGNMENT = 16  # bytes, of a pointer that triton compiles for as aligned
WORKSPACE_STEP = 256  # bytes between workspaces that share an allocation
MOST_TENSOR_MAPS = 256  # addresses of one descriptor whose maps are kept
INVALID_CONTEXT = 201  # CUDA's error in a thread that has not used the device yet


class TensorMaps(dict[int, Any]):
    """Where the tensor maps of one descriptor lie, by its tensor's address, encoded when missing.

    Encoding one takes longer than the launch. None where a map is not found.
    """

    def __init__(self, descriptor: Any, encode: Callable[[Any], Any]) -> None:
        super().__init__()
        self._descriptor, self._encode = descriptor, encode
        self._alive: list[Any] = []

    def __missing__(self, pointer: int) -> int | None:
        if len(self) == MOST_TENSOR_MAPS:
            self.clear()
            self._alive.clear()
        tensor_map = self._encode(with_base(self._descriptor, Address(pointer)))
        self._alive.append(tensor_map)
        self[pointer] = map_address(tensor_map)
        return self[pointer]


class Address(NamedTuple):
    """What a descriptor asks of its tensor when a map is made."""

    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


class BoundStep(NamedTuple):
    """One launch, whose parameters are filled in at (place, which pointer)."""

    launch: CudaLaunch
    pointers: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int, TensorMaps], ...]

    def maps_lie_where_expected(self, pointer: int) -> bool:
        return all(known[pointer] is not None for *_, known in self.maps)


class BoundRecipe(NamedTuple):
    """The launches of a recipe on one device, and what they share."""

    steps: tuple[BoundStep, ...]
    used: tuple[int, ...]  # of the call's tensors, those with a pointer; workspaces come after
    workspace_bytes: int
    offsets: tuple[int, ...]
    device: torch.device
    current_stream: Callable[[int], int]
    lock: Lock  # the launches' memory is filled in by one thread at a time

    def launch(self, tensors: Sequence[Any]) -> bool:
        """Launch on the current stream, or say that these kernels may not be: nothing is launched.

        `tensors` are of the form that the recipe was learnt from, but for their alignment.
        """
        pointers = [tensors[which].data_ptr() for which in self.used]
        if self.offsets:
            start = 0
            if self.workspace_bytes:  # the caching allocator orders its reuse by stream
                workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
                start = workspace.data_ptr()
            pointers += [start + offset for offset in self.offsets]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        index = self.device.index
        if bits % BOUND_ALIGNMENT or launches_are_heard() or torch.cuda.current_device() != index:
            return False
        stream, call = self.current_stream(index), cuda_launcher()
        with self.lock:
            for launch, places, maps in self.steps:
                words, addresses = launch.words, launch.places
                for place, which in places:
                    words[place] = pointers[which]
                for place, which, known in maps:
                    addresses[place] = known[pointers[which]]
                launch.config.stream = stream
                error = call(launch.config_at, launch.function, launch.places_at, None)
                if error == INVALID_CONTEXT and launch is self.steps[0].launch:
                    return False
                if error:
                    raise RuntimeError(f"CUDA error {error} at the launch of a bound kernel")
        return True


def bind_recipe(
    recipe: Recipe, compiled: Sequence[Any], tensors: Sequence[Any]
) -> BoundRecipe | None:
    """The recipe's launches of the kernels that were launched for it with these tensors.

    None where something about them is not known: another triton, another vendor, the interpreter,
    clusters, a kernel that wants scratch memory, a parameter of another type. None too where a
    tensor is not aligned: others of the form are not either.
    """
    if not triton.__version__.startswith(BOUND_TRITON) or knobs.runtime.interpret:
        return None
    if knobs.compilation.instrumentation_mode or knobs.runtime.debug:
        return None  # these kernels are compiled for that
    named = [which for step in recipe.steps for _, which in (*step.tensors, *step.descriptors)]
    sizes = [_bytes_of(*workspace) for workspace in recipe.workspaces]
    total = len(recipe.workspaces)
    used = sorted({which for which in named if which < recipe.num_tensors})
    order = {which: place for place, which in enumerate(used)}
    order |= {recipe.num_tensors + number: len(used) + number for number in range(total)}
    if any(tensors[which].data_ptr() % BOUND_ALIGNMENT for which in used):
        return None
    try:
        cuda_launcher()
    except (OSError, AttributeError):  # a driver without that call
        return None
    steps = [_bound_step(*pair, order) for pair in zip(recipe.steps, compiled, strict=True)]
    place = tensors[used[0]].data_ptr() if used else 0
    if not all(step and step.maps_lie_where_expected(place) for step in steps):
        return None
    return BoundRecipe(
        tuple(step for step in steps if step),
        tuple(used),
        sum(sizes),
        tuple(sum(sizes[:number]) for number in range(total)),
        tensors[0].device,
        cast(Any, driver.active).get_current_stream,
        Lock(),
    )


def _bound_step(step: Step, compiled: Any, order: dict[int, int]) -> BoundStep | None:
    """The launch as triton 3.6's launcher makes it; None where it would do more."""
    metadata = getattr(compiled, "metadata", None)
    if getattr(getattr(metadata, "target", None), "backend", None) != "cuda":
        return None
    launcher, kinds = compiled.run, list(compiled.src.signature.values())
    num_warps, num_ctas, shared_bytes = compiled.packed_metadata
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if num_ctas != 1 or launcher.launch_cooperative_grid or 0 in step.grid:
        return None
    if len(step.arguments) != len(kinds):
        return None
    encoders = _encoders(launcher.launch) if step.descriptors else []
    if len(encoders) != len(step.descriptors):
        return None
    tensors, descriptors = dict(step.tensors), dict(step.descriptors)
    parameters: list[tuple[Any, Any]] = []
    pointers, maps = [], []
    for place, (argument, kind) in enumerate(zip(step.arguments, kinds, strict=True)):
        if place in descriptors:
            known = TensorMaps(argument, encoders[len(maps)])
            maps.append((len(parameters), order[descriptors[place]], known))
            parameters.append((CUDA_TENSOR_MAP, None))
            parameters += [("i32", size) for size in argument.shape]
            parameters += [("i64", stride) for stride in argument.strides]
        elif kind != "constexpr":
            if place in tensors:
                pointers.append((len(parameters), order[tensors[place]]))
            parameters.append((kind, argument))
    parameters += [("*i8", None), ("*i8", None)]  # no scratch, and none for profiling
    if not all(isinstance(kind, str) and cuda_parameter(kind) for kind, _ in parameters):
        return None
    shape = (step.grid, num_warps, shared_bytes, bool(launcher.launch_pdl))
    launch = CudaLaunch(compiled.function, *shape, parameters)
    return BoundStep(launch, tuple(pointers), tuple(maps))


def _encoders(launch: Any) -> list[Callable[[Any], Any]]:
    """How triton encodes each descriptor for a kernel, found in what wraps its launcher.

    None where the kernel takes a descriptor apart, or where this is not that wrapper.
    """
    code = getattr(launch, "__code__", None)
    if code is None:
        return []
    cells = [cell.cell_contents for cell in launch.__closure__ or ()]
    held = dict(zip(code.co_freevars, cells, strict=True))
    encode, encodings = launch.__globals__.get("make_tensordesc_arg"), held.get("tensordesc_meta")
    if encode is None or not encodings or not all(encodings):
        return []

    def encoder(encoding: Any) -> Callable[[Any], Any]:
        return lambda descriptor: encode(descriptor, encoding)[0]

    return [encoder(encoding) for encoding in encodings]


def launches_are_heard() -> bool:
    """Whether a profiler waits for launches, or debugging wants other kernels."""
    runtime: Any = knobs.runtime
    try:
        heard = runtime.launch_enter_hook.calls or runtime.launch_exit_hook.calls
    except AttributeError:  # a hook of another kind
        return True
    return bool(heard or runtime.debug)


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a workspace, up to where the next one begins."""
    numbers = 1
    for size in shape:
        numbers *= size
    return -(-numbers * dtype.itemsize // WORKSPACE_STEP) * WORKSPACE_STEP
