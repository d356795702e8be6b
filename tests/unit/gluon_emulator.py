"""Gluon on numpy: a rendered text runs as plain Python, a thread for every partition of a program.

Triton cannot interpret Gluon. This runs its control flow, barriers, masks and addresses, so that
deadlocks and races show without a GPU. What is asynchronous happens as late (products, stores) or
as early (loads) as the barriers allow: a slot that is given back too soon gives wrong numbers.
Layouts, fences and instructions are not looked at.
"""

import re
import threading
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import ptx_emulator
import torch


class Whole(int):
    """An integer of a kernel: division truncates."""

    def to(self, _: Any) -> "Whole":
        return self

    def __floordiv__(self, other: Any) -> "Whole":
        return Whole(int(self) // int(other) if self >= 0 else -(-int(self) // int(other)))

    def __mod__(self, other: Any) -> "Whole":
        return self - self // other * other


def _whole_operator(name: str) -> Any:
    def operator(self: Whole, other: Any) -> Any:
        result = getattr(int, name)(int(self), other)
        return Whole(result) if isinstance(result, int) else result

    return operator


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "and", "xor", "rshift"):
    setattr(Whole, f"__{_name}__", _whole_operator(f"__{_name}__"))


class Array(np.ndarray):
    """A tensor of registers."""

    type = SimpleNamespace(layout=None)

    def to(self, dtype: Any, bitcast: bool = False) -> "Array":
        return self.view(dtype) if bitcast else self.astype(dtype).view(Array)


def array(values: Any) -> Array:
    return np.asarray(values).view(Array)


class Pointer:
    """A place in, or places of, a flat tensor."""

    def __init__(self, memory: np.ndarray, offset: Any = 0) -> None:
        self.memory, self.offset = memory, offset
        self.dtype = SimpleNamespace(element_ty=memory.dtype)

    def __add__(self, offset: Any) -> "Pointer":
        return Pointer(self.memory, self.offset + offset)

    def to(self, _: Any) -> "Address":
        return Address(self.memory, self.offset * self.memory.itemsize)


class Address:
    """A pointer as a number of bytes."""

    def __init__(self, memory: np.ndarray, places: Any) -> None:
        self.memory, self.places = memory, places

    def __add__(self, places: Any) -> "Address":
        return Address(self.memory, self.places + getattr(places, "places", places))

    def __getitem__(self, axes: Any) -> "Address":
        return Address(self.memory, self.places[axes])


class Shared:
    """Shared memory: an array, or the barriers in it."""

    def __init__(self, memory: np.ndarray) -> None:
        self.memory, self.shape, self.dtype = memory, memory.shape, memory.dtype

    def index(self, i: int) -> "Shared":
        assert 0 <= i < self.shape[0]
        return Shared(self.memory[i])

    def reshape(self, shape: list[int]) -> "Shared":
        return Shared(self.memory.reshape(shape))

    def permute(self, order: tuple[int, ...]) -> "Shared":
        return Shared(self.memory.transpose(order))

    def slice(self, start: int, length: int, dim: int) -> "Shared":
        return Shared(self.memory[(slice(None),) * dim + (slice(start, start + length),)])

    def load(self, _: Any) -> Array:
        return array(self.memory.copy())

    def store(self, value: np.ndarray) -> None:
        self.memory[...] = value


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived and the expected bytes have."""

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phases = 0

    def settle(self) -> None:
        assert self.pending >= 0, "more arrivals than the barrier counts"
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


class Descriptor:
    """A host descriptor of a strided tensor."""

    def __init__(self, base: torch.Tensor, shape: list, strides: list, block: list, layout: Any):
        assert all(size > 0 for size in shape) and strides[-1] == 1
        assert base.data_ptr() % 16 == 0
        assert all(stride * base.element_size() % 16 == 0 for stride in strides[:-1])
        self.tensor = torch.as_strided(base, shape, strides).numpy()
        self.shape, self.block, self.layout, self.dtype = shape, block, layout, self.tensor.dtype
        nbytes = int(np.prod(block)) * self.dtype.itemsize
        self.block_type = SimpleNamespace(nbytes=nbytes)

    def window(self, start: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        """What of the tensor and of the tile the block at `start` is inside the tensor."""
        ends = [
            max(0, min(size, at + b))
            for size, at, b in zip(self.shape, start, self.block, strict=True)
        ]
        inside = tuple(slice(at, end) for at, end in zip(start, ends, strict=True))
        tile = tuple(slice(0, max(0, s.stop - s.start)) for s in inside)
        return inside, tile


class Launch:
    """A kernel's programs: who `let` the next launch start, waits for that before, has ended."""

    def __init__(self, programs: int, before: "Launch | None") -> None:
        self.programs, self.before = programs, before
        self.after: Launch | None = None
        self.let: set[int] = set()
        self.waiting: set[int] = set()
        self.ended: set[int] = set()

    @property
    def over(self) -> bool:
        return len(self.ended) == self.programs

    @property
    def before_is_over(self) -> bool:
        return self.before is None or (self.before.over and self.before.before_is_over)

    @property
    def at_rest(self) -> bool:
        """Whether no program goes on before the launch before is over."""
        return len(self.ended | self.waiting) == self.programs


class Machine:
    """The fakes that a text is run with.

    A wait that takes longer than `patience_s` is a deadlock.
    """

    def __init__(self, patience_s: float = 60.0) -> None:
        self.patience_s = patience_s
        self.changed = threading.Condition()
        self.here = threading.local()
        self.failure: BaseException | None = None
        self.jumps: set[bool] = set()  # whether warps took the branches of inline assembly

    # waiting and arriving -----------------------------------------------------------------

    def until(self, what: str, ready: Any) -> None:
        with self.changed:
            done = self.changed.wait_for(lambda: ready() or self.failure, self.patience_s)
            if self.failure:
                raise RuntimeError("another partition failed")
            assert done, f"deadlock: {what}"

    def wait(self, barrier: Shared, phase: int, pred: bool = True) -> None:
        state = barrier.memory[0]
        assert phase in (0, 1)
        if pred:
            self.until(f"phase {phase} of a barrier", lambda: state.phases % 2 != phase)

    def init(self, barrier: Shared, count: int) -> None:
        state = barrier.memory[0]
        state.count = state.pending = count

    def arrive(self, barrier: Shared, count: int = 1, pred: bool = True) -> None:
        if pred:
            self._settle(barrier, count, 0)

    def expect(self, barrier: Shared, nbytes: int) -> None:
        self._settle(barrier, 1, nbytes)

    def _settle(self, barrier: Shared, arrivals: int, nbytes: int) -> None:
        with self.changed:
            state = barrier.memory[0]
            state.pending -= arrivals
            state.bytes += nbytes
            state.settle()
            self.changed.notify_all()

    def assembly(
        self, text: str, constraints: str, operands: list, dtype: Any, pack: int, **_: Any
    ) -> Any:
        if text.startswith("{ and.b32 $0, $1, 1; shl.b32 $0, $0, 1; }"):
            return (operands[0] & 1) * 2
        if text.startswith("shr.u32"):
            return operands[0] >> 30
        if text.startswith("cvt.rn.f16x2.f32 $0, $2, $1"):
            return array(np.stack(operands, axis=-1).astype(np.float16).view(np.int32)[..., 0])
        if text.startswith("ex2.approx"):
            return array(np.exp2(operands[0]))
        if "red.relaxed.gpu.global.add.v4.f32" in text:
            self.add_fragments(*operands)
        elif found := re.match(r"bar\.(sync|arrive) (\d+), 256;", text):
            self.meet(found[1], int(found[2]))
        elif text.startswith("{"):
            dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
            results, jumps = ptx_emulator.run(text, constraints, operands, dtypes, pack)
            self.jumps |= jumps
            arrays = [array(each) for each in results]
            return arrays if isinstance(dtype, tuple) else arrays[0]
        else:
            raise NotImplementedError(text)
        return None

    def meet(self, op: str, number: int) -> None:
        with self.changed:
            state = self.here.program.named.setdefault(number, {"threads": 0, "rounds": 0})
            state["threads"] += 128
            rounds = state["rounds"]
            if state["threads"] == 256:
                state["threads"], state["rounds"] = 0, rounds + 1
                self.changed.notify_all()
        if op == "sync":
            self.until(f"named barrier {number}", lambda: state["rounds"] > rounds)

    def add_fragments(self, first: Address, values: Array) -> None:
        """Adds of four: to what a thread has at (i, j), (i, j + 1), (i + 8, j), (i + 8, j + 1), at
        the places after the first one's address."""
        i, j = np.indices(values.shape)
        of_four = i // 8 % 2 * 2 + j % 2
        leading = first.places[i - i // 8 % 2 * 8, j - j % 2]
        assert (leading % 16 == 0).all()
        with self.changed:
            np.add.at(first.memory, leading // first.memory.itemsize + of_four, values)

    # the copy engine and the matrix unit -----------------------------------------------------

    def load_tile(self, desc: Descriptor, start: list, barrier: Shared, slot: Shared) -> None:
        inside, tile = desc.window(start)
        with self.changed:
            slot.memory[...] = 0
            slot.memory[tile] = desc.tensor[inside]
        self._settle(barrier, 0, -desc.block_type.nbytes)

    def store_tile(self, desc: Descriptor, start: list, slot: Shared) -> None:
        self.here.stores.append((desc, start, slot))

    def store_wait(self, pending: int) -> None:
        assert pending == 0
        for desc, start, slot in self.here.stores:
            inside, tile = desc.window(start)
            with self.changed:
                desc.tensor[inside] = slot.memory[tile]
        self.here.stores = []

    def product(self, a: Any, b: Shared, acc: Array, use_acc: bool = True, **_: Any) -> Any:
        def evaluate() -> Array:
            with self.changed:
                left = a.memory if isinstance(a, Shared) else a
                product = left.astype(np.float32) @ b.memory.astype(np.float32)
            begun = acc() if callable(acc) else acc
            return array(begun + product if use_acc else product)

        return evaluate

    def product_wait(self, pending: int, deps: list) -> Any:
        assert 0 <= pending < 4
        values = [dep() if callable(dep) else dep for dep in deps]
        return values[0] if len(values) == 1 else tuple(values)

    # memory ------------------------------------------------------------------------------------

    def store(self, pointer: Pointer, value: Any, mask: Any = True) -> None:
        offset, value, mask = np.broadcast_arrays(pointer.offset, value, mask)
        assert (offset[mask] >= 0).all()
        with self.changed:
            pointer.memory[offset[mask]] = value[mask]

    def load(self, pointer: Pointer, mask: Any = True, other: float = 0.0) -> Array:
        offset, mask = np.broadcast_arrays(pointer.offset, mask)
        values = np.full(offset.shape, other, pointer.memory.dtype)
        values[mask] = pointer.memory[offset[mask]]
        return array(values)

    def atomic_add(self, pointer: Pointer, value: int) -> Whole:
        with self.changed:
            before = Whole(pointer.memory[pointer.offset])
            pointer.memory[pointer.offset] += value
        return before

    def allocate(self, dtype: Any, shape: list, _: Any) -> Shared:
        if dtype is not np.int64:
            fill = np.nan if np.issubdtype(dtype, np.floating) else -1
            return Shared(np.full(shape, fill, dtype))
        barriers = np.empty(shape, object)
        for place in np.ndindex(*shape):
            barriers[place] = Barrier()
        return Shared(barriers)

    # programs and partitions ---------------------------------------------------------------------

    def partitions(self, functions: list, *_: Any) -> None:
        program = self.here.program

        def run(function: Any, arguments: tuple) -> None:
            self.here.program, self.here.stores = program, []
            try:
                with np.errstate(all="ignore"):  # of hidden rows; a thread begins with warnings
                    function(*arguments)
                assert not self.here.stores, "a store is not waited for"
            except BaseException as failure:
                with self.changed:
                    self.failure = self.failure or failure
                    self.changed.notify_all()

        threads = [threading.Thread(target=run, args=each) for each in functions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        left = [state for state in program.named.values() if state["threads"]]
        assert self.failure or not left, "named barriers are left half full"

    def launch(self, plan: Sequence[tuple[Any, tuple[int], tuple, dict]]) -> None:
        """Launches in order, a dependent one as early as the one before lets it."""
        threads: list[threading.Thread] = []
        before = None
        for kernel, grid, arguments, options in plan:
            this = Launch(grid[0], before)
            self._await_turn(this, options.get("launch_pdl", False))
            for number in range(grid[0]):
                given = (this, kernel, arguments, number)
                threads.append(threading.Thread(target=self._run, args=given))
                threads[-1].start()
            before = this
        for thread in threads:
            thread.join()
        if self.failure:
            raise self.failure

    def _await_turn(self, launch: Launch, dependent: bool) -> None:
        before = launch.before
        if before is None:
            return
        if dependent:
            self.until("leave to start", lambda: len(before.let) == before.programs)
            before.after = launch
        else:
            self.until("the end of a launch", lambda: launch.before_is_over)

    def _run(self, launch: Launch, kernel: Any, arguments: tuple, number: int) -> None:
        numbers = {"number": number, "grid": launch.programs}
        self.here.program = SimpleNamespace(**numbers, named={}, launch=launch)
        try:
            kernel(*map(self.argument, arguments))
        except BaseException as failure:
            self.failure = self.failure or failure
        with self.changed:
            launch.let.add(number)
            launch.ended.add(number)
            if launch.over and not launch.before_is_over:
                self.failure = self.failure or AssertionError("over before the launch before it")
            self.changed.notify_all()

    def launch_dependents(self) -> None:
        """The next launch may start; it goes first, as far as it comes without this one's end."""
        launch = self.here.program.launch
        with self.changed:
            launch.let.add(self.here.program.number)
            self.changed.notify_all()
        self.until("the next launch", lambda: launch.after is not None and launch.after.at_rest)

    def wait_for_launch_before(self) -> None:
        launch = self.here.program.launch
        with self.changed:
            launch.waiting.add(self.here.program.number)
            self.changed.notify_all()
        self.until("the launch before", lambda: launch.before_is_over)

    def argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            storage = value.as_strided(
                (value.untyped_storage().nbytes() // value.element_size(),), (1,), 0
            )
            return Pointer(storage.numpy(), Whole(value.storage_offset()))
        return Whole(value) if type(value) is int else value

    def module(self, text: str) -> ModuleType:
        """The text as a module whose kernels are plain functions."""
        body = re.sub(r"^(import|from) .*\n", "", text, flags=re.MULTILINE)
        module = ModuleType("emulated")
        module.__dict__.update(_fakes(self))
        exec(compile(body, "emulated", "exec", dont_inherit=True), module.__dict__)
        return module


class _Layout:
    """Any layout."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    @staticmethod
    def get_default_for(*_: Any) -> "_Layout":
        return _Layout()


def _jit(function: Any = None, **_: Any) -> Any:
    return function if function is not None else _jit


def _where(condition: Any, yes: Any, no: Any) -> Any:
    if np.ndim(condition) == 0:
        return yes if condition else no
    return array(np.where(condition, yes, no).astype(np.result_type(yes, no)))


def _least(x: Any, y: Any) -> Any:
    return array(np.minimum(x, y)) if np.ndim(x) else Whole(min(x, y))


def _most(x: Any, y: Any) -> Any:
    return array(np.maximum(x, y, dtype=np.float32)) if np.ndim(x) else Whole(max(x, y))


def _reduced(values: Array, axis: int, reduce: Any) -> Any:
    result = reduce(values, axis)
    return array(result) if result.ndim else Whole(result)


def _fakes(machine: Machine) -> dict[str, Any]:
    gl = SimpleNamespace(
        constexpr=lambda value: value,
        tensor=None,
        base_value=None,
        shared_memory_descriptor=None,
        int8=np.int8,
        int16=np.int16,
        int32=np.int32,
        int64=np.int64,
        float32=np.float32,
        float16=np.float16,
        bfloat16=None,
        NVMMASharedLayout=_Layout,
        NVMMADistributedLayout=_Layout,
        DotOperandLayout=_Layout,
        SliceLayout=_Layout,
        BlockedLayout=_Layout,
        DistributedLinearLayout=_Layout,
        SwizzledSharedLayout=_Layout,
        static_range=range,
        minimum=_least,
        maximum=_most,
        where=_where,
        max=lambda values, axis: _reduced(values, axis, np.max),
        sum=lambda values, axis: _reduced(values, axis, np.sum),
        exp2=lambda x: array(np.exp2(x)),
        log2=lambda x: array(np.log2(x)),
        arange=lambda first, end, _: array(np.arange(first, end)),
        zeros=lambda shape, dtype, _: array(np.zeros(shape, dtype)),
        full=lambda shape, value, dtype, _: array(np.full(shape, value, dtype)),
        convert_layout=lambda values, _, assert_trivial=False: values,
        broadcast=np.broadcast_arrays,
        reshape=np.reshape,
        split=lambda values: (array(values[..., 0]), array(values[..., 1])),
        join=lambda low, high: array(np.stack([low, high], axis=-1)),
        permute=np.transpose,
        program_id=lambda _: Whole(machine.here.program.number),
        num_programs=lambda _: Whole(machine.here.program.grid),
        allocate_shared_memory=machine.allocate,
        inline_asm_elementwise=machine.assembly,
        warp_specialize=machine.partitions,
        store=machine.store,
        load=machine.load,
        atomic_add=machine.atomic_add,
    )
    return {
        "torch": torch,
        "triton": SimpleNamespace(
            cdiv=lambda x, y: -(-x // y), next_power_of_2=lambda x: 1 << (x - 1).bit_length()
        ),
        "gluon": SimpleNamespace(jit=_jit, constexpr_function=_jit),
        "gl": gl,
        "aggregate": _jit,
        "fence_async_shared": lambda: None,
        "gdc_wait": machine.wait_for_launch_before,
        "gdc_launch_dependents": machine.launch_dependents,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=_Layout,
            init=machine.init,
            wait=machine.wait,
            arrive=machine.arrive,
            expect=machine.expect,
        ),
        "tma": SimpleNamespace(
            async_load=machine.load_tile,
            async_store=machine.store_tile,
            store_wait=machine.store_wait,
        ),
        "warpgroup_mma": machine.product,
        "warpgroup_mma_wait": machine.product_wait,
        "TensorDescriptor": Descriptor,
    }
