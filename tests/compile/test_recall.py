"""A recalled call is the one that was made before, or is left to the way by its form."""

from math import log

import pytest
import torch
import triton
from fake_calls import normal, packed, prefill

pytestmark = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="only triton 3.6's kernels are bound"
)


def decode_call():
    caches = [normal(8, 16, 2, 64), normal(8, 16, 2, 64)]
    lengths = torch.tensor([30, 9], dtype=torch.int32)
    return [normal(2, 4, 64), *caches, lengths, torch.arange(8).view(2, 4)]


@pytest.fixture
def recalled_only(bound, monkeypatch):
    """Ends the way by a call's form, so that what comes next is recalled or fails."""
    return lambda: monkeypatch.setattr(bound, "served_before", None)


@pytest.mark.parametrize("lse", [False, True])
@pytest.mark.parametrize("seqlen_q", [0, 3])  # 0: q has no axis of queries
def test_results_are_made_anew_where_the_call_gives_none(
    bound, driver, recalled_only, lse, seqlen_q
):
    q, *read, table = decode_call()
    q = normal(2, seqlen_q, 4, 64) if seqlen_q else q
    calls = [bound.decode(q, *read, block_table=table, return_lse=lse) for _ in range(2)]
    recalled_only()
    driver.launched.clear()
    last = bound.decode(q, *read, block_table=table, return_lse=lse)
    results = [each if lse else (each,) for each in (*calls, last)]
    for made in zip(*results, strict=True):
        assert len({(each.shape, each.stride(), each.dtype) for each in made}) == 1
        assert len({each.data_ptr() for each in made}) == 3
    parameters = [value for launch in driver.launched for value in launch.parameters]
    assert all(each.data_ptr() in parameters for each in results[-1])
    assert results[-1][0].shape == q.shape


def test_a_tensor_given_twice_is_not_taken_for_two_nor_two_for_one(bound, driver):
    tensors = prefill(bound)
    calls = [{**tensors, "v": tensors["k"]}] * 3 + [tensors] * 2
    for call in calls:
        driver.launched.clear()
        bound.prefill(**call, causal=True)
        maps = [each.pointer for each in driver.launched[0].parameters if hasattr(each, "pointer")]
        assert maps[:3] == [call[name].data_ptr() for name in "qkv"]


def test_packed_calls_whose_starts_were_one_tensor_may_have_two(bound, driver):
    other = {"cu_seqlens_k": torch.tensor([0, 20, 70], dtype=torch.int64)}
    for more in ({}, {}, {}, other, other, other, {}):
        driver.launched.clear()
        tensors = packed(bound, **more)
        starts = [tensors[name].data_ptr() for name in ("cu_seqlens_q", "cu_seqlens_k")]
        assert driver.launched[0].parameters[:2] == starts
    forms = [form for form in bound._served if form[0] == "packed"]
    assert len(forms) == 2  # numbers of 64 bits are for another kernel


def test_the_last_calls_are_recalled_and_others_are_as_right(bound, driver, monkeypatch):
    scales = [0.5 + number / 64 for number in range(20)]
    tensors = prefill(bound)
    for _ in range(2):
        for scale in scales:
            bound.prefill(**tensors, causal=True, softmax_scale=scale)
    by_form, served_before = [], bound.served_before
    monkeypatch.setattr(
        bound, "served_before", lambda form: by_form.append(1) or served_before(form)
    )
    for scale in reversed(scales):
        driver.launched.clear()
        bound.prefill(**tensors, causal=True, softmax_scale=scale)
        (launch,) = driver.launched
        (told,) = (value for value in launch.parameters if type(value) is float)
        assert told == pytest.approx(scale / log(2))  # for exp2
    assert len(by_form) == 4
    for scale in scales[:3] * 2:  # the ones found last stay
        bound.prefill(**tensors, causal=True, softmax_scale=scale)
    assert len(by_form) == 4


def test_numbers_of_another_type_are_another_call(bound):
    (call,) = bound._remembered.values()
    names = list(bound.signature(bound.prefill).parameters)
    given = {name: each.default for name, each in bound.signature(bound.prefill).parameters.items()}
    values = tuple({**given, **prefill(bound), "causal": True}.values())
    assert call.matches(values)
    for name, value in (("causal", 1), ("softcap", 0), ("window", [-1, -1]), ("out", None)):
        other = list(values)
        other[names.index(name)] = value
        assert not call.matches(tuple(other)), name
    assert not call.matches(values[:-1])


def test_a_call_made_while_another_is_launched_does_not_touch_it(bound, driver):
    within = []

    def launch_once():
        if not within:
            within.append(None)
            within[0] = prefill(bound)

    driver.before_launch = launch_once
    outer = prefill(bound)
    names = {tensor.data_ptr(): name for name, tensor in {**within[0]}.items()}
    inner, own = driver.launched
    for launch, tensors in ((inner, within[0]), (own, outer)):
        maps = [each.pointer for each in launch.parameters if hasattr(each, "pointer")]
        assert maps[:3] == [tensors[name].data_ptr() for name in "qkv"], names


def test_what_is_installed_anew_is_not_recalled(bound, monkeypatch):
    bound.configure(strict=False)
    asked, served_before = [], bound.served_before
    monkeypatch.setattr(bound, "served_before", lambda form: asked.append(1) or served_before(form))
    prefill(bound)
    assert asked
