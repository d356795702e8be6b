"""Bound launches: a recipe's compiled kernels launched for other pointers, past triton's lookup.

For every launch triton looks at type, alignment and value of each argument to find the binary,
which takes the host longer than the launch. Of a recipe only the pointers change, and the form
they are of fixes all but where they lie: to launch the same binaries again it is enough that each
is aligned as it was, that the device is the current one, and that nobody listens to launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import triton
from triton import knobs
from triton.runtime import driver

from .recipe import Recipe, Step, with_base

BOUND_TRITON = "3.6."  # whose C launcher takes the arguments that `_bound_step` lays out
BOUND_ALIGNMENT = 16  # bytes, of a pointer that triton compiles for as aligned
BOUND_STREAM = 3  # place of the stream among the launcher's arguments
WORKSPACE_STEP = 256  # bytes between workspaces that share an allocation
MOST_TENSOR_MAPS = 256  # addresses of one descriptor whose maps are kept


class TensorMaps:
    """The tensor maps of one descriptor by address: encoding one takes longer than finding it."""

    def __init__(self, descriptor: Any, encode: Callable[[Any], Any]) -> None:
        self._descriptor, self._encode = descriptor, encode
        self._maps: dict[int, Any] = {}

    def at(self, pointer: int) -> Any:
        """The map of a tensor of the descriptor's shape and strides at this address."""
        found = self._maps.get(pointer)
        if found is None:
            if len(self._maps) == MOST_TENSOR_MAPS:
                self._maps.clear()
            found = self._encode(with_base(self._descriptor, Address(pointer)))
            self._maps[pointer] = found
        return found


class Address(NamedTuple):
    """What a descriptor asks of its tensor when a map is made."""

    pointer: int

    def data_ptr(self) -> int:
        return self.pointer


class BoundStep(NamedTuple):
    """One launch: `arguments` are the C launcher's, filled in at (place, which pointer)."""

    launch: Callable[..., Any]
    arguments: list[Any]
    pointers: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int, TensorMaps], ...]


class BoundRecipe(NamedTuple):
    """The launches of a recipe on one device, and what they share."""

    steps: tuple[BoundStep, ...]
    used: tuple[int, ...]  # of the call's tensors, those with a pointer; workspaces come after
    workspace_bytes: int
    offsets: tuple[int, ...]
    device: torch.device

    def launch(self, tensors: Sequence[Any]) -> bool:
        """Launch on the current stream, or say that these kernels may not be: nothing is launched.

        `tensors` are of the form that the recipe was learnt from, but for their alignment.
        """
        pointers = [tensors[which].data_ptr() for which in self.used]
        start = 0
        if self.workspace_bytes:  # the caching allocator orders its reuse by stream
            workspace = torch.empty(self.workspace_bytes, dtype=torch.uint8, device=self.device)
            start = workspace.data_ptr()
        pointers += [start + offset for offset in self.offsets]
        bits = 0
        for pointer in pointers:
            bits |= pointer
        index, active = self.device.index, cast(Any, driver.active)
        if bits % BOUND_ALIGNMENT or _launches_are_heard():
            return False
        if torch.cuda.current_device() != index:
            return False
        stream = active.get_current_stream(index)
        for launch, arguments, places, maps in self.steps:
            filled = arguments.copy()
            filled[BOUND_STREAM] = stream
            for place, which in places:
                filled[place] = pointers[which]
            for place, which, known in maps:
                filled[place] = known.at(pointers[which])
            launch(*filled)
        return True


def bind_recipe(
    recipe: Recipe, compiled: Sequence[Any], tensors: Sequence[Any]
) -> BoundRecipe | None:
    """The recipe's launches of the kernels that were launched for it with these tensors.

    None where something about them is not known: another triton, another vendor, the interpreter,
    a kernel that wants scratch memory, an argument that no parameter is named after. None too where
    a tensor is not aligned: others of the form are not either.
    """
    if not triton.__version__.startswith(BOUND_TRITON) or knobs.runtime.interpret:
        return None
    if knobs.compilation.instrumentation_mode or knobs.runtime.debug:
        return None  # these kernels are compiled for that
    named = [which for step in recipe.steps for _, which in (*step.tensors, *step.descriptors)]
    sizes = [_bytes_of(*workspace) for workspace in recipe.workspaces]
    total = len(recipe.workspaces)
    first_workspace = recipe.num_tensors
    used = sorted({which for which in named if which < first_workspace})
    order = {which: place for place, which in enumerate(used)}
    order |= {first_workspace + number: len(used) + number for number in range(total)}
    if any(tensors[which].data_ptr() % BOUND_ALIGNMENT for which in used):
        return None
    steps = [_bound_step(*pair, order) for pair in zip(recipe.steps, compiled, strict=True)]
    if not all(steps):
        return None
    return BoundRecipe(
        tuple(step for step in steps if step),
        tuple(used),
        sum(sizes),
        tuple(sum(sizes[:number]) for number in range(total)),
        tensors[0].device,
    )


def _bound_step(step: Step, compiled: Any, order: dict[int, int]) -> BoundStep | None:
    """The launch as triton 3.6's CudaLauncher makes it; None where it would do more."""
    metadata = getattr(compiled, "metadata", None)
    if getattr(getattr(metadata, "target", None), "backend", None) != "cuda":
        return None
    launcher = compiled.run
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None
    if len(step.arguments) != len(compiled.src.fn.arg_names):
        return None
    launch, encoders = launcher.launch, ()
    if step.descriptors:
        launch, encoders = _unwrapped(launch)
        if len(encoders) != len(step.descriptors):
            return None
    grid = (*step.grid, 1, 1)[:3]
    scratch, hooks = (None, None), (None, None, None)  # launch metadata, for hooks, with them
    arguments: list[Any] = [*grid, None, compiled.function]
    arguments += [launcher.launch_cooperative_grid, launcher.launch_pdl, *scratch]
    arguments += [compiled.packed_metadata, *hooks]
    pointers, maps = [], []
    tensors, descriptors = dict(step.tensors), dict(step.descriptors)
    for place, argument in enumerate(step.arguments):
        if place in tensors:
            pointers.append((len(arguments), order[tensors[place]]))
        if place not in descriptors:
            arguments.append(argument)
            continue
        known = TensorMaps(argument, encoders[len(maps)])
        maps.append((len(arguments), order[descriptors[place]], known))
        arguments += [None, *argument.shape, *argument.strides]
    return BoundStep(launch, arguments, tuple(pointers), tuple(maps))


def _unwrapped(launch: Any) -> tuple[Any, list[Callable[[Any], Any]]]:
    """The C launcher within the one that encodes descriptors, and how it encodes each of them.

    No encoders where the kernel takes a descriptor apart, or where this is not that wrapper.
    """
    code = getattr(launch, "__code__", None)
    held: dict[str, Any] = {}
    if code is not None:
        cells = [cell.cell_contents for cell in launch.__closure__ or ()]
        held = dict(zip(code.co_freevars, cells, strict=True))
        held["encode"] = launch.__globals__.get("make_tensordesc_arg")
    if not all(held.get(name) for name in ("launcher", "tensordesc_meta", "encode")):
        return launch, []
    encode, encodings = held["encode"], held["tensordesc_meta"]
    if not all(encodings):
        return launch, []

    def encoder(encoding: Any) -> Callable[[Any], Any]:
        return lambda descriptor: encode(descriptor, encoding)[0]

    return held["launcher"], [encoder(encoding) for encoding in encodings]


def _launches_are_heard() -> bool:
    """Whether a profiler waits for launches, or debugging wants other kernels."""
    runtime: Any = knobs.runtime
    return bool(
        getattr(runtime.launch_enter_hook, "calls", True)
        or getattr(runtime.launch_exit_hook, "calls", True)
        or runtime.debug
    )


def _bytes_of(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Of a workspace, up to where the next one begins."""
    numbers = 1
    for size in shape:
        numbers *= size
    return -(-numbers * dtype.itemsize // WORKSPACE_STEP) * WORKSPACE_STEP
