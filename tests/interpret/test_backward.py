"""The portable backward families in the interpreter: masks, heads, channels, strides, numbers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from autoflash import gpu as gpus
from autoflash.accuracy import GradientBudget
from autoflash.check import sample_rows
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.families.backward import FAMILY
from autoflash.forward import forward
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.predict import InterpretedDevice
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.launch import run_plan

H200 = gpus.known("NVIDIA_H200")

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in matmul"),
]

KV = {"KV_BLOCK_M": 32, "KV_BLOCK_N": 64, "KV_WARPS": 4, "KV_STAGES": 2}
Q = {"Q_BLOCK_M": 64, "Q_BLOCK_N": 32, "Q_WARPS": 4, "Q_STAGES": 2}


def config(**changed: int | str) -> Config:
    """Of dq by a kernel of its own."""
    return Config.of("backward", {**KV, **Q, "LOAD": "pointer", **changed})


def single(**changed: int | str) -> Config:
    """Of dq by atomic adds."""
    return Config.of("backward_single", {**KV, "LOAD": "pointer", **changed})


OTHER_KV = {"KV_BLOCK_M": 64, "KV_BLOCK_N": 16, "LOAD": "descriptor"}
OTHER_TILES = config(**OTHER_KV, Q_BLOCK_M=16, Q_BLOCK_N=64)
WAYS = (config(), single(LOAD="descriptor"))
every_way = pytest.mark.parametrize("way", WAYS, ids=["split", "single"])


def problem(seqlen_q: int, seqlen_k: int, **changed: Any) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 16, "causal": True, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("backward", **(fields | changed))


def run(inputs: Inputs, chosen: Config, into: Gradients | None = None) -> Gradients:
    """The gradients of the config's kernels; NaN before, as are the workspaces."""
    module = load(render(family_of(chosen.family).variant(inputs.problem)))
    own, _ = new_results(inputs)
    assert isinstance(own, Gradients)
    gradients = into or own
    run_plan(plan_of(module, inputs, gradients, None, H200, chosen, poison=True))
    return gradients


def assert_right(inputs: Inputs, chosen: Config) -> Gradients:
    gradients = run(inputs, chosen)
    verdict = GradientBudget(inputs).judge(gradients)
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"
    return gradients


def same_bits(one: Gradients, other: Gradients) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# Lengths at both sides of the edges of tiles of 16, 32 and 64, equal and not.
EDGES = [
    (1, 1),
    (1, 129),
    (33, 31),
    (63, 65),
    (64, 64),
    (65, 1),
    (96, 160),
    (130, 97),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", EDGES, ids=str)
def test_lengths_around_the_edges_of_a_tile_are_right(
    lengths: tuple[int, int], causal: bool
) -> None:
    inputs = make_inputs(problem(*lengths, causal=causal))
    for way in (*WAYS, OTHER_TILES):
        assert_right(inputs, way)


@every_way
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(130, 3), (17, 0)])
def test_rows_without_a_visible_key_have_no_gradient(
    seqlen_q: int, seqlen_k: int, way: Config
) -> None:
    inputs = make_inputs(problem(seqlen_q, seqlen_k, dtype="bf16", layout="bhsd"), wide_rows=1)
    assert inputs.dlse is not None and inputs.lse is not None
    inputs.dlse[inputs.lse.isinf()] = float("nan")  # of what has no derivative anything may come
    gradients = run(inputs, way)
    assert (gradients.dq[:, :, : seqlen_q - seqlen_k] == 0).all()
    clean = replace(inputs, dlse=inputs.dlse.nan_to_num())
    assert GradientBudget(clean).judge(gradients).correct


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "way"),
    [(71, 1, config()), (15, 5, config()), (15, 5, single())],
    ids=["71 of 1", "15 of 5", "15 of 5, single"],
)
def test_dk_and_dv_are_summed_over_the_query_heads_of_their_group(  # case B23, case B46
    num_heads: int, num_kv_heads: int, way: Config
) -> None:
    assert_right(make_inputs(problem(9, 20, num_heads=num_heads, num_kv_heads=num_kv_heads)), way)


@pytest.mark.parametrize("head_dim", [40, 80, 256])
def test_head_dims_are_right_and_their_neighbours_in_wider_rows_are_not_read(  # case B40
    head_dim: int,
) -> None:
    inputs = make_inputs(problem(33, 70, head_dim=head_dim), wide_rows=8)
    assert inputs.dout is not None and inputs.dout.stride(2) == head_dim + 8
    for way in (config(), config(LOAD="descriptor"), single()):
        assert_right(inputs, way)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_types_and_layouts_are_right(dtype: str, layout: str) -> None:
    inputs = make_inputs(problem(70, 100, dtype=dtype, layout=layout, batch=2), wide_rows=1)
    assert_right(inputs, config(LOAD="descriptor"))  # which odd rows do not allow
    assert_right(replace(inputs, dlse=None), single(LOAD="descriptor"))


@pytest.mark.parametrize("viewed", ["q", "k", "v", "out", "dout"])
def test_one_tensor_alone_may_be_a_transposed_view(viewed: str) -> None:
    plain = make_inputs(problem(62, 62, num_kv_heads=2, layout="bhsd"))
    tensor = getattr(plain, viewed)
    view = tensor.transpose(1, 2).contiguous().transpose(1, 2)
    assert view.stride() != tensor.stride()
    assert same_bits(run(plain, config()), run(replace(plain, **{viewed: view}), config()))


def test_gradients_may_be_parts_of_wider_rows_whose_rest_stays_as_it_was() -> None:
    inputs = make_inputs(problem(33, 40, head_dim=40))
    rows = [torch.full((*t.shape[:3], 64), float("nan"), dtype=t.dtype) for t in run_of(inputs)]
    into = Gradients(*(row[..., :40] for row in rows))
    assert same_bits(run(inputs, config(), into), run(inputs, config()))
    assert all(row[..., 40:].isnan().all() for row in rows)


def run_of(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    """The tensors that have gradients."""
    return inputs.q, inputs.k, inputs.v


@pytest.mark.parametrize("causal", [True, False])
def test_logits_far_from_zero_keep_their_weights(causal: bool) -> None:  # case B38
    inputs = make_inputs(problem(37, 37, head_dim=64, dtype="bf16", causal=causal), scale=40.0)
    gradients = assert_right(inputs, config())
    assert all(gradient.isfinite().all() for gradient in gradients)


def test_keys_past_the_end_do_not_count_where_all_scores_are_far_below_zero() -> None:  # case B07
    """A key of zeros has the score 0, whose exponential beside theirs is infinite."""
    inputs = make_inputs(problem(37, 37, dtype="bf16", causal=False))
    inputs.q[..., 0], inputs.k[..., 0] = 200, -200
    assert inputs.out is not None and inputs.lse is not None
    out, lse = forward(inputs.problem, inputs.q, inputs.k, inputs.v)
    assert lse.max() < -9000
    for way in WAYS:
        assert_right(replace(inputs, out=out, lse=lse), way)


@pytest.mark.parametrize("load", ["pointer", "descriptor"])
def test_each_launch_of_a_single_pass_begins_with_sums_of_zero(load: str) -> None:  # case B27
    """As the calls of a graph, which are planned once, and as the first one after tuning."""
    inputs = make_inputs(problem(40, 70))
    module = load_single(inputs)
    gradients, _ = new_results(inputs)
    plan = plan_of(module, inputs, gradients, None, H200, single(LOAD=load), poison=True)
    run_plan(plan)
    first = Gradients(*(each.clone() for each in gradients))
    run_plan(plan)
    assert same_bits(first, gradients)
    assert GradientBudget(inputs).judge(first).correct


def load_single(inputs: Inputs) -> Any:
    return load(render(family_of("backward_single").variant(inputs.problem)))


def test_more_than_65535_heads_are_one_dimension_of_every_grid() -> None:  # case B14
    p = problem(130, 130, batch=40_000)
    inputs = make_inputs(p, device="meta")
    module = load(render(FAMILY.variant(p)))
    plan = plan_of(module, inputs, *new_results(inputs), H200, config())
    assert [grid for _, grid, _, _ in plan] == [(6 * 80_000,), (3 * 40_000,), (3 * 80_000,)]
    plan = plan_of(load_single(inputs), inputs, *new_results(inputs), H200, single())
    assert [grid for _, grid, _, _ in plan] == [(5 * 80_000,), (3 * 40_000,), (5 * 80_000,)]


WITHIN_A_TILE, FROM_TILE_TO_TILE = (9, 2**28), (65, 2**25)
FAR = [(name, *WITHIN_A_TILE) for name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")]
FAR += [(name, *FROM_TILE_TO_TILE) for name in ("q", "k", "dq", "dk")]


@pytest.mark.parametrize(("name", "tokens", "stride"), FAR)
def test_elements_beyond_two_to_the_31_are_addressed(
    name: str, tokens: int, stride: int, tmp_path: Path
) -> None:
    """The last token lies 2**31 elements on, which 32 bits cannot name."""
    plain = make_inputs(problem(tokens, tokens, num_heads=1))
    expected, reach = run(plain, config()), tokens * stride
    # A sparse file of twice the reach, the tensor in its middle: a wrapped address is still ours.
    file = str(tmp_path / "sparse")
    storage = torch.from_file(file, shared=True, size=2 * reach, dtype=torch.float16)
    far = storage.as_strided((1, tokens, 1, 16), (16, stride, 16, 1), reach)
    if name in Gradients._fields:
        got = run(plain, config(), run(plain, config())._replace(**{name: far}))
    else:
        far.copy_(getattr(plain, name))
        got = run(replace(plain, **{name: far}), config())
    assert same_bits(got, expected)


@triton.jit
def add_kernel(tensor):
    tl.store(tensor, tl.load(tensor) + 1.0)


@triton.jit
def nudge_kernel(tensor):
    """One rounding unit of fp16 up."""
    value = tl.load(tensor).to(tl.float32)
    tl.store(tensor, value * 1.001)


class Planted(InterpretedDevice):
    """Gives the candidate other inputs than it is judged by, or launches more than its plan."""

    def __init__(self, change=lambda inputs: inputs, after=lambda inputs, gradients: []) -> None:
        super().__init__(H200)
        self._change, self._after = change, after

    def plan(self, inputs, config, out, lse, new_workspace=None):
        plan = super().plan(self._change(inputs), config, out, lse, new_workspace)
        return plan + self._after(inputs, out)


CHECKED = problem(100, 100, causal=False)


@every_way
def test_a_right_candidate_passes_its_check(way: Config) -> None:
    verdict = Planted().check(CHECKED, way, 0)
    assert verdict.correct and verdict.max_ratio <= 2 and verdict.rms_ratio <= 2


def lose_a_query(inputs: Inputs) -> Inputs:
    assert inputs.dout is not None
    return replace(inputs, dout=inputs.dout.clone().index_fill_(1, torch.tensor([7]), 0.0))


def lose_a_key(inputs: Inputs) -> Inputs:
    return replace(inputs, k=inputs.k.clone().index_fill_(1, torch.tensor([7]), 0.0))


def lose_the_gradient_of_lse(inputs: Inputs) -> Inputs:
    return replace(inputs, dlse=None)


@pytest.mark.parametrize("change", [lose_a_query, lose_a_key, lose_the_gradient_of_lse])
def test_a_candidate_that_is_wrong_is_rejected(change: Any) -> None:
    with pytest.raises(Failure, match=r"correctness: d[qkv] is off by"):
        Planted(change).check(CHECKED, config(), 0)


@pytest.mark.parametrize("name", Gradients._fields)
def test_two_runs_whose_gradients_differ_in_one_bit_are_rejected(name: str) -> None:
    runs = []

    def every_other(inputs: Inputs, gradients: Gradients) -> list[Any]:
        runs.append(inputs)
        gradient = getattr(gradients, name)
        return [] if len(runs) % 2 else [(add_kernel, (1,), (gradient,), {})]

    with pytest.raises(Failure, match=f"{name} of two runs differ"):
        Planted(after=every_other).check(CHECKED, config(), 0)


def test_a_single_pass_may_differ_in_bits_but_is_right_every_time() -> None:
    runs = []

    def every_other(inputs: Inputs, gradients: Gradients) -> list[Any]:
        runs.append(inputs)
        return [] if len(runs) % 2 else [(kernel, (1,), (gradients.dq,), {})]

    kernel = nudge_kernel
    assert Planted(after=every_other).check(CHECKED, single(), 0).correct
    with pytest.raises(Failure, match="dq of two runs differ"):
        Planted(after=every_other).check(CHECKED, config(), 0)
    runs.clear()
    kernel = add_kernel
    with pytest.raises(Failure, match=r"dq is off .* in the second run"):
        Planted(after=every_other).check(CHECKED, single(), 0)


@pytest.mark.parametrize("name", ["out", "lse", "dout"])
def test_a_write_to_what_the_forward_left_is_rejected(name: str) -> None:
    def write(inputs: Inputs, gradients: Gradients) -> list[Any]:
        return [(add_kernel, (1,), (getattr(inputs, name),), {})]

    with pytest.raises(Failure, match=f"writes to its input {name}"):
        Planted(after=write).check(CHECKED, config(), 0)


def test_rows_of_a_real_problem_are_judged_after_repeats() -> None:
    inputs, rows = make_inputs(CHECKED), sample_rows(CHECKED, 0)
    budget = GradientBudget(inputs, rows=rows)
    assert Planted().check_rows(inputs, config(), rows, budget).correct
    with pytest.raises(Failure, match="at the real size"):
        Planted(lose_a_key).check_rows(inputs, config(), rows, budget)
