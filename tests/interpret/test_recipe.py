"""Calls of a form seen before: not planned again, right on other tensors, nothing kept alive."""

import weakref

import pytest
import torch
from exported_calls import call, load_module, make_tensors
from making import shipped_forwards

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs
from autoflash.problem import Problem

PREFILL = Problem("prefill", "bf16", 1, 4, 2, 64, 40, 70)
PAGED = Problem("decode", "bf16", 3, 4, 2, 64, 1, 130, page_size=16, lengths="ragged")


WINDOW = Problem("prefill", "bf16", 2, 4, 2, 64, 40, 70, window_left=9, bias=True, sinks=True)
CAPPED = Problem("prefill", "fp16", 2, 4, 2, 64, 40, 70, causal=False, softcap=True, alibi=True)
SCALED = {"kv_dtype": "fp8_e4m3", "kv_scales": "head"}
SLIDING = Problem("decode", "bf16", 2, 4, 2, 64, 1, 130, window_left=40, alibi=True, sinks=True)
BIASED = Problem("decode", "bf16", 3, 4, 2, 64, 2, 130, page_size=16, bias=True, sinks=True)
QUANTISED = Problem("decode", "bf16", 3, 4, 2, 64, 2, 130, page_size=16, **SCALED)


@pytest.fixture
def module(tmp_path):
    """The exported module of the shipped winners, as imported for the first time."""
    path = tmp_path / "attention_dispatch.py"
    path.write_text(export(shipped_forwards()).text)
    return load_module(path)


def case_of(problem, seed):
    return {**problem.__dict__, "seed": seed}


def right(module, problem, seed):
    """Whether a call with new tensors is within the error budget."""
    tensors = make_tensors(case_of(problem, seed), "cpu")
    out, lse = call(module, case_of(problem, seed), tensors)
    return Budget(Inputs(problem, **tensors)).judge(out, lse).correct


def forbid_planning(module, monkeypatch):
    def refuse(*_):
        raise AssertionError("planned again")

    monkeypatch.setattr(module, "learn_recipe", refuse)


@pytest.mark.parametrize(
    "problem",
    [PREFILL, PAGED, QUANTISED, WINDOW, CAPPED, SLIDING, BIASED],
    ids=["prefill", "decode", "quantised", "window", "capped", "sliding", "biased"],
)
def test_a_second_call_of_the_form_is_right_on_other_tensors_without_planning(
    module, problem, monkeypatch
):
    assert right(module, problem, seed=1)
    forbid_planning(module, monkeypatch)
    assert right(module, problem, seed=2)
    assert sum(module.coverage().values()) == 2
    with pytest.raises(AssertionError, match="planned again"):
        right(module, Problem(**{**problem.__dict__, "batch": 4}), seed=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
def test_a_second_append_of_the_form_goes_to_its_own_slots_without_planning(
    module, dtype, monkeypatch
):
    scales = {} if dtype == torch.bfloat16 else {"k_scale": 0.5, "v_scale": torch.ones(2)}
    for slots in ([3, 8], [0, 5]):
        k, v = torch.arange(2 * 2 * 2 * 16).view(2, 2, 2, 16).bfloat16() / 4
        caches = [torch.zeros(3, 4, 2, 16).to(dtype) for _ in "kv"]
        module.append_kv(k, v, *caches, torch.tensor(slots), **scales)
        for new, cache, step in zip((k, v), caches, (0.5, 1.0) if scales else (1, 1), strict=True):
            expected = torch.zeros(12, 2, 16)
            expected[slots] = new.float() / step
            if dtype == torch.int8:
                expected = expected.round()
            assert torch.equal(cache.flatten(0, 1).float(), expected.to(dtype).float())
        forbid_planning(module, monkeypatch)
    with pytest.raises(AssertionError, match="planned again"):
        module.append_kv(k[:1], v[:1], *caches, torch.tensor([1]), **scales)


def test_another_alignment_stride_scale_or_out_is_another_form(module):
    tensors = make_tensors(case_of(PREFILL, 1), "cpu")
    q, k, v = (tensors[name] for name in "qkv")
    expected = module.prefill(q, k, v, causal=True)
    unaligned = torch.empty(q.numel() + 1, dtype=q.dtype)[1:].view(q.shape).copy_(q)
    wide = torch.full((*q.shape[:3], 72), float("nan"), dtype=q.dtype)[..., :64].copy_(q)
    for other in (unaligned, wide):
        assert module.form_of(other) != module.form_of(q)
        assert torch.equal(module.prefill(other, k, v, causal=True), expected)
    out = torch.empty_like(wide)
    assert module.prefill(q, k, v, causal=True, out=out) is out
    assert torch.equal(out, expected)
    assert not torch.equal(module.prefill(q, k, v, causal=True, softmax_scale=0.5), expected)
    assert not torch.equal(module.prefill(q, k, v, causal=False), expected)
    assert not torch.equal(module.prefill(q, k, v, causal=True, window=(9, 0)), expected)
    capped = module.prefill(q, k, v, causal=True, softcap=1.0)
    assert not torch.equal(module.prefill(q, k, v, causal=True, softcap=0.5), capped)
    assert torch.equal(module.prefill(q, k, v, causal=True), expected)


def test_what_was_refused_is_refused_again(module):
    tensors = make_tensors(case_of(PREFILL, 1), "cpu")
    q, k, v = (tensors[name] for name in "qkv")
    module.prefill(q, k, v, causal=True)
    for bad in ({"out": q[:, :10]}, {"out": "out"}, {"layout": "sbhd"}, {"window": (4, -2)}):
        for _ in range(2):
            with pytest.raises(ValueError, match=next(iter(bad))):
                module.prefill(q, k, v, causal=True, **bad)


def test_checking_looks_at_lengths_and_pages_on_a_known_form_too(module):
    tensors = make_tensors(case_of(PAGED, 1), "cpu")
    q, lengths, table = tensors["q"], tensors["cache_seqlens"], tensors["block_table"]

    def decode():
        module.decode(q, tensors["k"], tensors["v"], lengths, block_table=table, check=True)

    decode()
    table[1, 0] = 2**30
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is 1073741824, the cache has"):
        decode()
    table[1, 0] = 0
    lengths[2] = -1
    with pytest.raises(ValueError, match="cache_seqlens holds -1"):
        decode()


def test_a_gradient_is_refused_on_a_known_form_too(module):
    tensors = make_tensors(case_of(PREFILL, 1), "cpu")
    q, k, v = (tensors[name] for name in "qkv")
    expected = module.prefill(q, k, v, causal=True)
    q.requires_grad_()
    with pytest.raises(ValueError, match="no backward"):
        module.prefill(q, k, v, causal=True)
    with torch.no_grad():
        assert torch.equal(module.prefill(q, k, v, causal=True), expected)


@pytest.mark.parametrize("problem", [PREFILL, PAGED], ids=lambda p: p.op)
def test_a_call_that_gave_one_tensor_twice_teaches_nothing_about_two(module, problem):
    tensors = make_tensors(case_of(problem, 1), "cpu")
    call(module, case_of(problem, 1), {**tensors, "v": tensors["k"]})
    assert right(module, problem, seed=1)
    assert right(module, problem, seed=2)


@pytest.mark.parametrize("problem", [PREFILL, PAGED, WINDOW], ids=["prefill", "decode", "window"])
def test_no_tensor_of_a_call_is_kept_alive(module, problem):
    tensors = make_tensors(case_of(problem, 1), "cpu")
    call(module, case_of(problem, 1), tensors)
    alive = [weakref.ref(tensor) for tensor in tensors.values()]
    del tensors
    assert [each() for each in alive] == [None] * len(alive)


def test_a_plan_that_names_a_tensor_of_its_own_is_made_for_every_call(module):
    q = torch.ones(3)

    def plan_of_a_view(new_workspace):
        return [("kernel", (1,), (q, q[1:], new_workspace((2,), torch.int32)), {})]

    def plan_of_its_tensors(new_workspace):
        return [("kernel", (1,), (q, new_workspace((2,), torch.int32), 7), {"num_warps": 4})]

    def workspace(shape, dtype):
        return torch.zeros(shape, dtype=dtype)

    assert module.learn_recipe(plan_of_a_view, [q], workspace)[1] is None
    recipe = module.learn_recipe(plan_of_its_tensors, [q], workspace)[1]
    other = torch.zeros(3)
    ((kernel, grid, arguments, options),) = recipe.plan([other], workspace)
    assert (kernel, grid, options) == ("kernel", (1,), {"num_warps": 4})
    assert arguments[0] is other and arguments[1].shape == (2,) and arguments[2] == 7


def test_forms_beyond_the_most_are_forgotten(module, monkeypatch):
    monkeypatch.setattr(module, "MOST_FORMS", 2)
    for batch in (1, 2, 3):
        assert right(module, Problem(**{**PREFILL.__dict__, "batch": batch}), seed=1)
    assert len(module._served) == 1


def test_a_query_without_an_axis_of_tokens_gives_what_one_with_it_gives(module):
    tensors = make_tensors(case_of(PAGED, 1), "cpu")
    q, caches = tensors.pop("q"), tuple(tensors.values())
    assert list(tensors) == ["cache_seqlens", "k", "v", "block_table"]
    lengths, k, v, table = caches

    def decode(q, **more):
        return module.decode(q, k, v, lengths, block_table=table, **more)

    out, lse = decode(q, return_lse=True)
    for _ in range(2):  # planned, then by its recipe
        own = torch.empty_like(q[:, 0])
        assert decode(q[:, 0], out=own) is own and torch.equal(own, out[:, 0])
        flat_out, flat_lse = decode(q[:, 0], return_lse=True)
        assert torch.equal(flat_out, out[:, 0]) and torch.equal(flat_lse, lse[:, :, 0])
