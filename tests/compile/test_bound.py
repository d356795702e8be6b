"""Bound launches give CUDA what triton's own give it, and are made only where all is as it was."""

from inspect import signature
from math import prod

import pytest
import torch
import triton
from fake_calls import (
    LENGTHS,
    append,
    chunks,
    chunks_with_documents,
    chunks_with_prefixes,
    decode,
    decode_with_bias,
    decode_with_blocks,
    decode_with_documents,
    decode_with_modifiers,
    decode_with_prefixes,
    normal,
    packed,
    packed_with_documents,
    packed_with_prefixes,
    prefill,
    prefill_with_dropout,
    prefill_with_sinks,
    told,
)
from fake_launches import TensorMap
from triton import knobs

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
)


@pytest.mark.parametrize(
    "call",
    [
        prefill,
        prefill_with_sinks,
        prefill_with_dropout,
        packed,
        packed_with_prefixes,
        packed_with_documents,
        chunks,
        chunks_with_prefixes,
        chunks_with_documents,
        decode,
        decode_with_modifiers,
        decode_with_bias,
        decode_with_blocks,
        decode_with_documents,
        decode_with_prefixes,
        append,
    ],
)
def test_bound_launches_tell_cuda_what_tritons_own_do(call, driver, new_module, monkeypatch):
    plain, module = new_module(), new_module()
    monkeypatch.setattr(plain, "bind_recipe", lambda *_: None)
    tensors = call(plain)
    expected = told(driver.launched, tensors)
    call(module)
    monkeypatch.setattr(module, "run_plan", None)  # triton's way is closed
    # lists are of an object that anybody may change: no call with them is recalled
    for shortcut in (False,) if call is decode_with_blocks else (False, True):
        driver.launched.clear()
        if shortcut:
            monkeypatch.setattr(module, "served_before", None)
        tensors = call(module)
        assert told(driver.launched, tensors) == expected
    launches = {packed_with_documents: 3, chunks_with_documents: 3, prefill_with_dropout: 2}
    launches[decode_with_blocks] = 3
    combined = 2 if call.__name__.startswith("decode") else 1
    assert len(expected) == launches.get(call, combined)


each_way = pytest.mark.parametrize("bound", ["recalled", "by its form"], indirect=True)


def launches_by_triton(module, call, monkeypatch):
    """Whether the call is launched through triton's lookup."""
    ran, run_plan = [], module.run_plan
    monkeypatch.setattr(module, "run_plan", lambda plan: ran.append(plan) or run_plan(plan))
    call()
    return bool(ran)


def unaligned(tensor):
    return torch.empty(tensor.numel() + 1, dtype=tensor.dtype)[1:].view(tensor.shape)


@each_way
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


@each_way
def test_a_bound_launch_goes_to_the_current_stream(bound, driver):
    for driver.stream in (5, 6):
        prefill(bound)
    assert [launch.stream for launch in driver.launched] == [5, 6]


@each_way
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
    monkeypatch.setattr(module, "recall_module", lambda: None)
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


@each_way
def test_a_listener_debugging_or_another_device_is_launched_by_triton(bound, driver, monkeypatch):
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
    monkeypatch.setattr(driver, "current_context", 6)
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
    (call,) = bound._remembered.values()
    tensors = prefill(bound)
    arguments = signature(bound.prefill).parameters

    def is_repeat(**changes):
        given = {**tensors, "causal": True, **changes}
        return call.matches(tuple(given.get(n, each.default) for n, each in arguments.items()))

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
    assert len(bound._remembered) == 1
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
    assert len(bound._remembered) == 12


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


@each_way
def test_a_thread_without_a_context_is_launched_by_triton(bound, driver, monkeypatch):
    monkeypatch.setattr(driver, "error", 201)
    assert launches_by_triton(bound, lambda: prefill(bound), monkeypatch)


@each_way
def test_an_error_of_cuda_is_raised(bound, driver, monkeypatch):
    monkeypatch.setattr(driver, "error", 719)
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
