"""Bound launches give CUDA what triton's own give it, and are made only where all is as it was."""

import importlib.util
import sys
from itertools import count
from math import prod

import pytest
import torch
import triton
from fake_launches import FakeLaunches, TensorMap
from triton import knobs

from autoflash.export import export
from autoflash.gpu import known
from autoflash.runtime.device import Device
from autoflash.store import shipped_winners

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
)

H200 = known("NVIDIA_H200")
NUMBERS = count()
LENGTHS = torch.tensor([900, 70], dtype=torch.int32)


@pytest.fixture(scope="module")
def text():
    return export(shipped_winners()).text


@pytest.fixture
def driver(monkeypatch):
    """The launches of this test, on the device that CPU tensors are on."""
    driver = FakeLaunches(H200)
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr("torch.cuda.current_device", lambda: None)
    return driver


@pytest.fixture
def new_module(text, tmp_path, monkeypatch, driver):
    """A maker of modules that nobody called, which take the CPU for an H200."""

    def make():
        path = tmp_path / "attention_dispatch.py"
        path.write_text(text)
        spec = importlib.util.spec_from_file_location(f"bound_{next(NUMBERS)}", path)
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        h200 = module.Device(**{name: getattr(H200, name) for name in Device._fields})
        monkeypatch.setattr(module, "device_of", lambda tensor, interpreted_as: h200)
        monkeypatch.setattr(module, "cuda_launcher", lambda: driver.cuda_launch)
        monkeypatch.setattr(module, "map_address", driver.map_address)
        return module

    return make


def normal(*shape):
    return torch.randn(shape).bfloat16()


def prefill(module, **more):
    q, k, v = normal(1, 64, 2, 64), normal(1, 64, 1, 64), normal(1, 64, 1, 64)
    tensors = {"q": q, "k": k, "v": v, "out": torch.empty_like(q), **more}
    module.prefill(**tensors, causal=True)
    return tensors


def prefill_with_sinks(module):
    return prefill(module, sinks=normal(2))


def decode(module, **more):
    q = normal(2, 1, 4, 64)
    caches = {"k_cache": normal(2, 4096, 2, 64), "v_cache": normal(2, 4096, 2, 64)}
    tensors = {"q": q, **caches, "cache_seqlens": LENGTHS.clone(), "out": torch.empty_like(q)}
    module.decode(**{**tensors, **more})
    return {**tensors, **more}


def append(module):
    caches = {name: torch.zeros(3, 4, 2, 32, dtype=torch.float8_e4m3fn) for name in ("k_c", "v_c")}
    tensors = {"k": normal(2, 2, 32), "v": normal(2, 2, 32), **caches, "slots": torch.arange(2)}
    module.append_kv(*tensors.values(), k_scale=0.5, v_scale=0.25)
    return tensors


def told(launched, tensors):
    """The launches with names in place of where the call's tensors lie."""
    names = {tensor.data_ptr(): name for name, tensor in tensors.items()}

    def name(argument):
        if isinstance(argument, TensorMap):
            return argument._replace(pointer=names[argument.pointer])
        is_place = type(argument) is int and argument > 2**32
        return names.get(argument, "workspace") if is_place else argument

    return [each._replace(parameters=[*map(name, each.parameters)]) for each in launched]


@pytest.mark.parametrize("call", [prefill, prefill_with_sinks, decode, append])
def test_bound_launches_tell_cuda_what_tritons_own_do(call, driver, new_module, monkeypatch):
    plain, module = new_module(), new_module()
    monkeypatch.setattr(plain, "bind_recipe", lambda *_: None)
    tensors = call(plain)
    expected = told(driver.launched, tensors)
    call(module)
    monkeypatch.setattr(module, "run_plan", None)  # triton's way is closed
    for shortcut in (False, True):
        driver.launched.clear()
        if shortcut:
            monkeypatch.setattr(module, "served_before", None)
        tensors = call(module)
        assert told(driver.launched, tensors) == expected
    assert len(expected) == (2 if call is decode else 1)


@pytest.fixture
def bound(driver, new_module):
    """A module that was called, so that prefill(module) is a bound launch."""
    module = new_module()
    prefill(module)
    prefill(module)
    driver.launched.clear()
    return module


def launches_by_triton(module, call, monkeypatch):
    """Whether the call is launched through triton's lookup."""
    ran, run_plan = [], module.run_plan
    monkeypatch.setattr(module, "run_plan", lambda plan: ran.append(plan) or run_plan(plan))
    call()
    return bool(ran)


def unaligned(tensor):
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


def test_bound_calls_are_counted_and_explained(bound):
    tensors = prefill(bound)
    before = sum(bound.coverage().values())
    told = bound.explain(bound.prefill, **tensors, causal=True)
    assert (told["how"], told["problem"].seqlen_k) == ("default", 64)
    assert sum(bound.coverage().values()) == before + 1
    slots = torch.arange(64)
    caches = [normal(4, 16, 1, 64) for _ in "kv"]
    with pytest.raises(ValueError, match="neither prefill nor decode"):
        bound.explain(bound.append_kv, tensors["k"][0], tensors["v"][0], *caches, slots)


def test_checking_looks_at_the_device_before_a_bound_launch_too(driver, new_module):
    module = new_module()
    for _ in range(3):
        decode(module, check=True)
    decode(module)
    driver.launched.clear()
    with pytest.raises(ValueError, match="cache_seqlens holds -5"):
        decode(module, check=True, cache_seqlens=LENGTHS - 75)
    assert driver.launched == []


def test_a_bound_launch_goes_to_the_current_stream(bound, driver):
    for driver.stream in (5, 6):
        prefill(bound)
    assert [launch.stream for launch in driver.launched] == [5, 6]


@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_a_tensor_that_is_not_aligned_as_it_was_is_launched_by_triton(bound, name, monkeypatch):
    tensor = unaligned(prefill(bound)[name])

    def call():
        prefill(bound, **{name: tensor})

    assert launches_by_triton(bound, call, monkeypatch)
    assert launches_by_triton(bound, call, monkeypatch)
    assert not launches_by_triton(bound, lambda: prefill(bound), monkeypatch)
    assert [served.bound is None for served in bound._served.values()] == [False, True]


def test_a_workspace_that_is_not_aligned_is_launched_by_triton(driver, new_module, monkeypatch):
    module = new_module()
    decode(module)
    assert not launches_by_triton(module, lambda: decode(module), monkeypatch)
    empty = torch.empty

    def misplaced(*shape, dtype=None, device=None):
        if dtype == torch.uint8:
            return empty(shape[0] + 4, dtype=dtype)[4:]
        return empty(*shape, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", misplaced)
    assert launches_by_triton(module, lambda: decode(module), monkeypatch)


def test_workspaces_that_share_an_allocation_do_not_overlap(driver, new_module):
    module = new_module()
    decode(module)
    (served,) = module._served.values()
    sizes = [prod(shape) * dtype.itemsize for shape, dtype in served.recipe.workspaces]
    ends = [*served.bound.offsets[1:], served.bound.workspace_bytes]
    for offset, size, end in zip(served.bound.offsets, sizes, ends, strict=True):
        assert offset % 16 == 0 and offset + size <= end


def test_a_listener_debugging_or_another_device_is_launched_by_triton(bound, monkeypatch):
    def call():
        prefill(bound)

    heard = []
    for hooks in (knobs.runtime.launch_enter_hook, knobs.runtime.launch_exit_hook):
        hooks.add(heard.append)
        assert launches_by_triton(bound, call, monkeypatch)
        hooks.remove(heard.append)
        assert not launches_by_triton(bound, call, monkeypatch)
    with knobs.runtime.scope():
        knobs.runtime.launch_enter_hook = None
        assert launches_by_triton(bound, call, monkeypatch)
    with knobs.runtime.scope():
        knobs.runtime.debug = True
        assert launches_by_triton(bound, call, monkeypatch)
    assert not launches_by_triton(bound, call, monkeypatch)
    monkeypatch.setattr("torch.cuda.current_device", lambda: 1)
    assert launches_by_triton(bound, call, monkeypatch)


@pytest.mark.parametrize(
    "unknown",
    [
        lambda compiled, patch: patch.setattr("triton.__version__", "3.7.1"),
        lambda compiled, patch: patch.setattr(knobs.compilation, "instrumentation_mode", "on"),
        lambda compiled, patch: patch.setattr(knobs.runtime, "debug", True),
        lambda compiled, patch: patch.setattr(knobs.runtime, "interpret", True),
        lambda compiled, patch: patch.setattr(compiled._run, "global_scratch_size", 8),
        lambda compiled, patch: patch.setattr(compiled._run, "profile_scratch_size", 8),
        lambda compiled, patch: patch.setattr(compiled._run, "launch", print),
        lambda compiled, patch: patch.setattr(compiled._run, "launch_cooperative_grid", True),
        lambda compiled, patch: patch.setattr(compiled, "packed_metadata", (4, 2, 0)),
        lambda compiled, patch: patch.setitem(compiled.src.signature, "more", "i32"),
        lambda compiled, patch: patch.setitem(compiled.src.signature, "out", "fp16"),
        lambda compiled, patch: patch.setattr(compiled, "metadata", None),
    ],
    ids=[
        *("triton", "instrumented", "debug", "interpreter"),
        *("scratch", "profile", "launcher", "cooperative", "cluster", "names", "type", "metadata"),
    ],
)
def test_what_is_not_known_is_not_bound(bound, unknown, monkeypatch):
    (served,) = bound._served.values()
    tensors = (*prefill(bound).values(), None, None, None, None)
    compiled = bound.run_plan(served.recipe.plan(tensors, None))
    assert bound.bind_recipe(served.recipe, compiled, tensors) is not None
    unknown(compiled[0], monkeypatch)
    assert bound.bind_recipe(served.recipe, compiled, tensors) is None


def test_tensors_of_another_form_are_not_taken_for_the_last_calls(bound):
    """Each of what triton compiles for, and of what a plan reads, is told apart."""
    (key,) = bound._repeats
    tensors = prefill(bound)

    def is_repeat(**changes):
        return bound.repeated(key, tuple({**tensors, **changes}.values())) is not None

    q, k = tensors["q"], tensors["k"]
    assert is_repeat() and is_repeat(q=torch.empty_like(q))
    assert not is_repeat(q=q.half())
    assert not is_repeat(q=normal(1, 65, 2, 64)) and not is_repeat(k=normal(2, 64, 1, 64))
    assert not is_repeat(q=normal(1, 64, 2, 72)[..., :64])
    assert not is_repeat(k=normal(1, 64, 1, 128)[..., ::2])
    assert not is_repeat(v=k.to("meta"))
    assert not is_repeat(q=q.clone().requires_grad_())
    assert not is_repeat(q=torch.nn.Parameter(q, requires_grad=False))


def test_other_values_and_other_tensors_given_are_another_key(bound):
    assert len(bound._repeats) == 1
    tensors = prefill(bound)
    out, mask = tensors.pop("out"), {"causal": True}
    for other in (
        {"causal": False},
        {**mask, "layout": "bhsd"},
        {**mask, "return_lse": True},
        {**mask, "softmax_scale": 0.5},
        {**mask, "softcap": 9.0},
        {**mask, "window": (9, 0)},
        {**mask, "window": (9, 3)},
        {**mask, "sinks": normal(2)},
        {**mask, "bias": normal(64, 64)},
        {**mask, "alibi_slopes": torch.ones(2)},
    ):
        bound.prefill(**tensors, **other, out=out)
        bound.prefill(**tensors, **other, out=out)
    bound.prefill(**tensors, causal=True)
    bound.prefill(**tensors, causal=True)
    assert len(bound._repeats) == 12


def test_a_call_in_inference_mode_is_bound_too(bound, monkeypatch):
    with torch.inference_mode():
        prefill(bound)  # by its form
        monkeypatch.setattr(bound, "served_before", None)
        prefill(bound)


def test_a_gradient_that_may_be_asked_for_is_looked_at_on_every_call(driver, new_module):
    module = new_module()
    with torch.no_grad():
        for _ in range(3):
            tensors = prefill(module, q=normal(1, 64, 2, 64).requires_grad_())
    with pytest.raises(ValueError, match="no backward"):
        prefill(module, **tensors)


def test_a_map_is_encoded_once_for_an_address(bound, driver, monkeypatch):
    tensors = prefill(bound)
    known = len(driver.maps)
    for _ in range(3):
        prefill(bound, **tensors)
    assert len(driver.maps) == known
    monkeypatch.setattr(bound, "MOST_TENSOR_MAPS", 1)
    prefill(bound, **tensors)
    others = prefill(bound)
    parameters = driver.launched[-1].parameters
    maps = [argument.pointer for argument in parameters if isinstance(argument, TensorMap)]
    assert maps[:3] == [others[name].data_ptr() for name in ("q", "k", "v")]


def test_a_thread_without_a_context_is_launched_by_triton(bound, monkeypatch):
    monkeypatch.setattr(bound, "cuda_launcher", lambda: lambda *_: 201)
    assert launches_by_triton(bound, lambda: prefill(bound), monkeypatch)


def test_an_error_of_cuda_is_raised(bound, monkeypatch):
    monkeypatch.setattr(bound, "cuda_launcher", lambda: lambda *_: 719)
    with pytest.raises(RuntimeError, match="CUDA error 719"):
        prefill(bound)


def test_without_cudas_launch_call_or_where_a_map_is_not_found_nothing_is_bound(
    new_module, monkeypatch
):
    module = new_module()
    monkeypatch.setattr(module, "map_address", lambda tensor_map: None)
    prefill(module)
    assert [served.bound for served in module._served.values()] == [None]

    def missing():
        raise OSError("libcuda.so.1: cannot open shared object file")

    module = new_module()
    monkeypatch.setattr(module, "cuda_launcher", missing)
    prefill(module)
    assert [served.bound for served in module._served.values()] == [None]
