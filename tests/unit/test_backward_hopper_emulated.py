"""The Hopper backward without a GPU: its texts on numpy, right for every mask, ring and order.

The emulator runs producer and consumers as threads that meet at the kernel's own barriers.
"""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from gluon_emulator import Machine, Whole
from hypothesis import given, settings
from hypothesis import strategies as st

from autoflash.accuracy import GradientBudget, Verdict
from autoflash.families import backward_hopper, backward_hopper_single
from autoflash.families.family import Family
from autoflash.forward import forward
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import new_results
from autoflash.problem import Problem
from autoflash.reference import reference
from autoflash.render import render

NAN = float("nan")
SPLIT, SINGLE = backward_hopper.FAMILY, backward_hopper_single.FAMILY


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, NAN if dtype.is_floating_point else 9**9, dtype=dtype)


def launch(
    inputs: Inputs,
    family: Family,
    knobs: dict,
    softmax_scale: float,
    break_text: tuple[str, str] | None = None,
    patience_s: float = 60.0,
) -> tuple[Gradients, list[str]]:
    """The gradients by these knobs and the names of the kernels that made them."""
    text = render(family.variant(inputs.problem)).text
    if break_text:
        broken = text.replace(*break_text)
        if broken == text:
            raise LookupError(f"the text does not hold {break_text[0]!r}")
        text = broken
    machine = Machine(patience_s)
    module = machine.module(text)
    gradients, _ = new_results(inputs)
    assert isinstance(gradients, Gradients)
    given = (inputs.q, inputs.k, inputs.v, inputs.out, inputs.lse, inputs.dout, inputs.dlse)
    layout = inputs.problem.layout
    plan = module.plan(*given, *gradients, softmax_scale, layout, 2, knobs, poisoned)
    machine.launch(plan)
    return gradients, [kernel.__name__ for kernel, *_ in plan]


def judged(inputs: Inputs, family: Family, knobs: dict, **how) -> Verdict:
    scale = inputs.problem.head_dim**-0.5
    return GradientBudget(inputs).judge(launch(inputs, family, knobs, scale, **how)[0])


def split_knobs(**knobs) -> dict:
    usual = {
        "KV_BLOCK_M": 64,
        "KV_BIAS": 1,
        "KV_VOLATILE": 1,
        "Q_BLOCK_N": 64,
        "Q_K_STAGES": 2,
        "Q_V_STAGES": 2,
        "Q_PREFETCH": 0,
        "Q_VOLATILE": 0,
    }
    assert set(knobs) <= set(usual) == {knob.name for knob in SPLIT.knobs}
    return {**usual, **knobs}


def single_knobs(**knobs) -> dict:
    usual = {"KV_BLOCK_M": 64, "KV_BIAS": 1, "DS_SLOTS": 2, "DQ_FIRST": 1, "KV_SLOTS": 0}
    assert set(knobs) <= set(usual) == {knob.name for knob in SINGLE.knobs}
    return {**usual, **knobs}


WAYS = {
    "split": (SPLIT, split_knobs()),
    "split_wide": (SPLIT, split_knobs(KV_BLOCK_M=128, Q_BLOCK_N=128, Q_VOLATILE=1, Q_V_STAGES=1)),
    "split_prefetch": (
        SPLIT,
        split_knobs(KV_BIAS=0, KV_VOLATILE=0, Q_PREFETCH=1, Q_K_STAGES=3, Q_V_STAGES=1),
    ),
    "single": (SINGLE, single_knobs()),
    "single_wide": (SINGLE, single_knobs(KV_BLOCK_M=128)),
    "single_late": (SINGLE, single_knobs(KV_BIAS=0, DS_SLOTS=4, DQ_FIRST=0)),
    "units": (SINGLE, single_knobs(KV_SLOTS=2)),
    "units_wide": (SINGLE, single_knobs(KV_BLOCK_M=128, KV_SLOTS=1)),
    "units_of_one_slot": (SINGLE, single_knobs(KV_SLOTS=1)),
    "units_late": (SINGLE, single_knobs(KV_BIAS=0, DS_SLOTS=4, DQ_FIRST=0, KV_SLOTS=2)),
}


def of(seqlen_q: int, seqlen_k: int, causal: bool = True, **changes) -> Problem:
    fields = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 64, "layout": "bshd"}
    fields |= {"seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal, **changes}
    return Problem(op="backward", dtype="fp16", **fields)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k", "causal"), [(200, 333, True), (333, 200, True), (200, 150, False)]
)
def test_every_way_is_right_at_lengths_that_fit_no_tile(way, seqlen_q, seqlen_k, causal):
    assert judged(make_inputs(of(seqlen_q, seqlen_k, causal)), *WAYS[way]).reason == ""


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize(("head_dim", "way"), [(256, "split"), (128, "single"), (96, "split")])
def test_wider_heads_are_right(head_dim, way, causal):
    assert judged(make_inputs(of(70, 130, causal, head_dim=head_dim)), *WAYS[way]).reason == ""


# The diagonal at every place within a tile, rows without a key, keys that end with a tile.
@pytest.mark.parametrize("way", ["single", "single_wide", "split_prefetch"])
@pytest.mark.parametrize(
    ("seqlen_q", "seqlen_k"),
    [(1, 1), (64, 65), (65, 64), (192, 128), (130, 3), (1, 300)],
)
def test_the_diagonal_is_right_wherever_it_meets_a_tile(way, seqlen_q, seqlen_k):
    inputs = make_inputs(of(seqlen_q, seqlen_k, num_heads=1))
    assert judged(inputs, *WAYS[way]).reason == ""


@pytest.mark.parametrize("way", ["single", "split"])
def test_without_a_key_the_gradient_of_q_is_zero(way):
    inputs = make_inputs(of(100, 0, False))
    gradients, kernels = launch(inputs, *WAYS[way], 0.125)
    assert kernels == ["no_keys_kernel"] and not gradients.dq.any()


@pytest.mark.parametrize("way", ["single_wide", "split"])
def test_heads_of_any_ratio_and_channels_past_head_dim(way):  # case B23, case B40, case B46
    inputs = make_inputs(of(66, 100, batch=2, num_heads=7, head_dim=40, layout="bhsd"))
    assert judged(inputs, *WAYS[way]).reason == ""


# Two programs of twelve units and more: rings go on where the unit before left them.
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("way", ["units", "units_wide", "units_late", "units_of_one_slot"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(70, 300), (300, 260), (1, 257)])
def test_programs_that_take_many_units_are_right(way, causal, seqlen_q, seqlen_k):
    problem = of(seqlen_q, seqlen_k, causal, batch=2, num_heads=4, num_kv_heads=2)
    assert judged(make_inputs(problem), *WAYS[way]).reason == ""


@given(
    st.integers(1, 9),
    st.integers(1, 40),
    st.integers(1, 50),
    st.sampled_from([False, True]),
)
@settings(deadline=None)
def test_every_unit_is_taken_once_long_ones_first_within_a_group(blocks, heads, group, causal):
    module = Machine().module(render(SINGLE.variant(of(1, 1, causal))).text)
    units = SimpleNamespace(
        count=Whole(blocks * heads),
        blocks=Whole(blocks),
        kv_heads=Whole(heads),
        heads_per_group=Whole(min(group, heads) if causal else 1),
        KV_SLOTS=2,
    )
    taken = [module.keys_of_unit(units, Whole(unit)) for unit in range(blocks * heads)]
    assert set(taken) == {(head, 128 * block) for head in range(heads) for block in range(blocks)}
    if causal:
        last = [start_n for _, start_n in taken[-units.heads_per_group * blocks :]]
        assert last == sorted(last)


# Rows wider by 8 elements are named by a descriptor as they are, NaN neighbours and all.
@pytest.mark.parametrize(("wide_rows", "copies"), [(8, 0), (1, 4)])
def test_strides_that_no_descriptor_can_name_are_copied(wide_rows, copies):
    inputs = make_inputs(of(130, 100), wide_rows=wide_rows)
    assert inputs.dlse is not None
    for way in ("single", "split"):
        family, knobs = WAYS[way]
        gradients, kernels = launch(inputs, family, knobs, 0.125)
        assert GradientBudget(inputs, 0.125).judge(gradients).reason == ""
        assert kernels.count("copy_rows_kernel") == copies


def followed_by_nan(tensor: torch.Tensor) -> torch.Tensor:
    """The same values (batch, heads, tokens, channels), where NaN tokens follow each head's."""
    batch, heads, tokens, channels = tensor.shape
    storage = tensor.new_full((batch, heads, tokens + 64, channels), NAN)
    storage[:, :, :tokens] = tensor
    return storage[:, :, :tokens]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
@pytest.mark.parametrize("way", ["single", "split"])
def test_what_lies_behind_the_last_token_of_a_head_is_not_read(way, causal):
    plain = make_inputs(of(100, 70, causal, layout="bhsd"))
    names = ("q", "k", "v", "out", "dout")
    spoilt = replace(plain, **{name: followed_by_nan(getattr(plain, name)) for name in names})
    assert judged(spoilt, *WAYS[way]).reason == ""


@pytest.mark.parametrize("way", ["single", "split"])
def test_a_scale_of_zero_leaves_the_mean(way):
    plain = make_inputs(of(100, 100))
    out, lse = reference(plain, 0.0)
    inputs = replace(plain, out=out.to(plain.q.dtype), lse=lse.float())
    gradients, _ = launch(inputs, *WAYS[way], 0.0)
    assert not gradients.dq.any() and not gradients.dk.any()
    assert GradientBudget(inputs, 0.0).judge(gradients).reason == ""


def far_below_zero(problem: Problem) -> Inputs:
    """Inputs whose logits are all near -900, so that a key of zeros would have p of infinity."""
    plain = make_inputs(problem)
    q, k = plain.q.abs() + 10, -plain.k.abs() - 10
    out, lse = forward(problem, q, k, plain.v)
    assert lse.max() < -200
    return replace(plain, q=q, k=k, out=out, lse=lse)


@pytest.mark.parametrize("way", WAYS)
def test_keys_past_the_last_one_count_for_nothing_where_all_logits_are_far_below_zero(  # case B07
    way,
):
    assert judged(far_below_zero(of(70, 100, False)), *WAYS[way]).reason == ""


@pytest.mark.parametrize(
    ("way", "mask"),
    [
        ("single", "    if work.RAGGED_K:\n        x = gl.where((offs_n < work.seqlen_k)[:, None]"),
        ("split", "    if EDGE and work.RAGGED_K:"),
    ],
)
def test_without_the_mask_of_the_last_tile_they_would(way, mask):
    text = (mask, mask.replace("work.RAGGED_K", "False"))
    assert not judged(far_below_zero(of(70, 100, False)), *WAYS[way], break_text=text).correct


# A check that cannot fail is none: each of these faults shows.
FAULTS = {
    "q is given back before it is multiplied": (
        "single",
        "    rings.dout.wait_full(step)\n    dout_tile",
        "    rings.q.release(step)\n    rings.dout.wait_full(step)\n    dout_tile",
    ),
    "ds is given back before dq is multiplied": (
        "single",
        "    slot = rings.handed.slot(before)\n    mbarrier.wait",
        "    slot = rings.handed.slot(before)\n    release_ds(rings, step, due)\n    mbarrier.wait",
    ),
    "dq of the last step is never added": (
        "single",
        "    add_dq(first_sums + due_tile, dq)",
        "    dq = dq",
    ),
    "dq of every tile is added to the first one's": (
        "single",
        "due_tile = (g * work.padded_q + start_m + j * BLOCK_M) * BLOCK_D",
        "due_tile = (g * work.padded_q + start_m) * BLOCK_D",
    ),
    "the last ds of a unit keeps its slot": (
        "units",
        "        release_ds(rings, step, True)\n    add_dq",
        "    add_dq",
    ),
    "dq of a unit goes on in the next one": (
        "units",
        "    due_tile = start_m * 0 - 1",
        "    due_tile = turn - 1",
    ),
    "units are counted from where another call left the counter": (
        "units",
        "            gl.store(counter, 0)",
        "            counter = counter",
    ),
    "the pass does not wait for its sums to be zeroed": (
        "single",
        "    gdc_wait()\n    gdc_launch_dependents()",
        "    gdc_launch_dependents()",
    ),
    "dq is converted before it is added up": ("single", "    gdc_wait()\n    blocks", "    blocks"),
    "a second pass does not wait for dk and dv": ("split", "    gdc_wait()  # dk", "    # dk"),
    "the sums begin unset": ("single", "    gl.store(sums, gl.zeros", "    (sums, gl.zeros"),
    "a query's own key is hidden": (
        "split",
        "last_visible[None, :] >= offs_n",
        "last_visible[None, :] > offs_n",
    ),
    "the diagonal's tiles count as seen by all": (
        "split",
        "VOLATILE,\n                True,",
        "VOLATILE,\n                False,",
    ),
    "keys are given back before they are read again": (
        "split_prefetch",
        "        qk = warpgroup_mma_wait(2, deps=[qk_async])",
        "        qk = warpgroup_mma_wait(2, deps=[qk_async])\n        rings.k.release(step - 1)",
    ),
    "a group's heads are not summed": (
        "split",
        "return work.group_size",
        "return 1",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_text_shows(fault):
    way, *break_text = FAULTS[fault]
    try:
        verdict = judged(
            make_inputs(of(200, 333)), *WAYS[way], break_text=tuple(break_text), patience_s=2.0
        )
    except (AssertionError, RuntimeError):
        return  # a deadlock, or a barrier that too many arrive at
    assert not verdict.correct
