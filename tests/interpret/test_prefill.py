"""The portable prefill family in the interpreter: masks, heads, channels, strides, numbers, lse."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from running import run
from triton.tools.tensor_descriptor import TensorDescriptor

from autoflash import gpu as gpus
from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.families.prefill import FAMILY, heads_per_group
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import load, new_outputs, plan_of
from autoflash.problem import Problem
from autoflash.render import render

H200 = gpus.known("NVIDIA_H200")
LOADS = ("pointer", "descriptor")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = pytest.mark.filterwarnings("ignore:divide by zero encountered in log2")


def config(**changed: int | str) -> Config:
    knobs: dict[str, int | str] = {
        "BLOCK_M": 64,
        "BLOCK_N": 32,
        "LOAD": "pointer",
        "HEAD_GROUP_MIB": 4,
        "num_warps": 4,
        "num_stages": 2,
    }
    return Config.of("prefill", knobs | changed)


def problem(seqlen_q: int, seqlen_k: int, **changed: int | str | bool) -> Problem:
    fields: dict[str, Any] = {"dtype": "fp16", "batch": 1, "num_heads": 2, "num_kv_heads": 1}
    fields |= {"head_dim": 16, "causal": True, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k}
    return Problem("prefill", **(fields | changed))


def assert_right(inputs: Inputs, chosen: Config, softmax_scale: float | None = None) -> None:
    verdict = Budget(inputs, softmax_scale).judge(*run(inputs, chosen, softmax_scale=softmax_scale))
    assert verdict.correct, f"{inputs.problem}, {chosen}: {verdict.reason}"


def in_wider_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as the first channels of rows 8 elements wider, the others NaN."""
    rows = tensor.new_full((*tensor.shape[:3], tensor.shape[3] + 8), float("nan"))
    return rows[..., : tensor.shape[3]].copy_(tensor)


def launch_of(inputs: Inputs, chosen: Config) -> tuple:
    p = inputs.problem
    module = load(render(FAMILY.variant(p)))
    (launch,) = plan_of(module, inputs, *new_outputs(inputs), H200, chosen)
    return launch


# Lengths at both sides of a tile's edge, and every pair of them once with the other mask.
EDGES = [
    (1, 1),
    (1, 129),
    (15, 17),
    (16, 64),
    (17, 15),
    (63, 65),
    (64, 64),
    (65, 63),
    (65, 1),
    (127, 129),
    (128, 128),
    (129, 32),
]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", EDGES, ids=str)
def test_lengths_around_the_edges_of_a_tile_are_right(
    lengths: tuple[int, int], causal: bool
) -> None:
    inputs = make_inputs(problem(*lengths, causal=causal))
    for kind in LOADS:
        assert_right(inputs, config(LOAD=kind))


@pytest.mark.parametrize("lengths", [(40, 100), (100, 40), (70, 70), (65, 64)], ids=str)
@pytest.mark.parametrize("block_n", [32, 64])
def test_causal_rows_count_the_keys_up_to_their_own_position(
    lengths: tuple[int, int], block_n: int
) -> None:
    """K = 0 gives every visible key the same weight: lse is the log of their number."""
    seqlen_q, seqlen_k = lengths
    inputs = make_inputs(problem(seqlen_q, seqlen_k, dtype="fp32"))
    v = torch.zeros_like(inputs.v)
    v[..., 0], v[..., 1] = 1.0, torch.arange(seqlen_k)[None, :, None]
    probe = replace(inputs, k=torch.zeros_like(inputs.k), v=v)
    out, lse = run(probe, config(BLOCK_N=block_n))
    assert lse is not None
    last = torch.arange(seqlen_q) + seqlen_k - seqlen_q  # the last key each row sees
    counted, twice_the_mean = lse.exp().round(), (2 * out[..., 1]).round()
    assert torch.equal(counted, (last + 1).clamp_min(0).expand_as(counted).float())
    assert torch.equal(twice_the_mean, last.clamp_min(0)[None, :, None].expand(1, -1, 2).float())
    assert torch.equal(out[..., 0].round(), (last >= 0).float()[None, :, None].expand(1, -1, 2))


@pytest.mark.parametrize("kind", LOADS)
def test_rows_without_a_visible_key_are_zero_and_their_lse_minus_infinity(  # case B06
    kind: str,
) -> None:
    inputs = make_inputs(problem(130, 3, dtype="bf16", num_heads=4, head_dim=64))
    out, lse = run(inputs, config(LOAD=kind))
    assert lse is not None
    assert (out[:, :127] == 0).all() and (lse[..., :127] == float("-inf")).all()
    verdict = Budget(inputs).judge(out, lse)
    assert verdict.correct, verdict.reason


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", LOADS)
def test_no_keys_at_all_give_zero_and_minus_infinity(causal: bool, kind: str) -> None:
    out, lse = run(make_inputs(problem(17, 0, causal=causal)), config(LOAD=kind))
    assert lse is not None
    assert (out == 0).all() and (lse == float("-inf")).all()


@pytest.mark.parametrize("heads", [(28, 4), (6, 1), (15, 5), (71, 1)], ids=str)
def test_each_query_head_reads_the_kv_head_of_its_group_and_its_own_query(  # case B23
    heads: tuple[int, int],
) -> None:
    num_heads, num_kv_heads = heads
    inputs = make_inputs(problem(9, 20, num_heads=num_heads, num_kv_heads=num_kv_heads))
    out, lse = run(inputs, config())
    verdict = Budget(inputs).judge(out, lse)  # its reference repeats the KV heads
    assert verdict.correct, verdict.reason
    changed = replace(inputs, q=inputs.q.clone())
    changed.q[:, :, 1] += 1.0
    others = [head for head in range(num_heads) if head != 1]
    again, _ = run(changed, config())
    assert torch.equal(again[:, :, others], out[:, :, others])
    assert not torch.equal(again[:, :, 1], out[:, :, 1])


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("head_dim", [16, 40, 72, 80, 96, 160, 192, 256])
def test_head_dims_are_right_and_their_neighbours_in_wider_rows_are_not_read(  # case B40
    head_dim: int, kind: str
) -> None:
    plain = make_inputs(problem(33, 100, head_dim=head_dim))  # full tiles and a part
    wide = replace(plain, **{name: in_wider_rows(getattr(plain, name)) for name in "qkv"})
    assert_right(wide, config(LOAD=kind))


def test_the_output_may_be_part_of_a_wider_row_whose_rest_stays_as_it_was() -> None:
    inputs = make_inputs(problem(33, 33, head_dim=40))
    rows = torch.full((1, 33, 2, 64), float("nan"), dtype=torch.float16)
    out, _ = run(inputs, config(), out=rows[..., :40])
    assert torch.equal(out, run(inputs, config())[0])
    assert rows[..., 40:].isnan().all()


@pytest.mark.parametrize("kind", LOADS)
@pytest.mark.parametrize("seqlen", [62, 64])
@pytest.mark.parametrize("viewed", ["q", "k", "v"])
def test_one_tensor_alone_may_be_a_transposed_view(  # case B49
    viewed: str, seqlen: int, kind: str
) -> None:
    plain = make_inputs(problem(seqlen, seqlen, num_heads=2, num_kv_heads=2, layout="bhsd"))
    tokens_first = getattr(plain, viewed).transpose(1, 2).contiguous()
    view = replace(plain, **{viewed: tokens_first.transpose(1, 2)})
    out, _ = run(plain, config(LOAD=kind))
    assert torch.equal(out, run(view, config(LOAD=kind))[0])


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_tensor_that_no_descriptor_can_name_is_loaded_by_pointers(name: str) -> None:  # case B49
    plain = make_inputs(problem(20, 20, batch=2, num_kv_heads=2))
    tensor = getattr(plain, name)
    storage = torch.empty(tensor.numel() + 1, dtype=tensor.dtype)
    offset_by_one = storage[1:].view(tensor.shape).copy_(tensor)
    odd_rows = torch.empty(*tensor.shape[:3], 17, dtype=tensor.dtype)[..., :16].copy_(tensor)
    expanded = tensor[:1].expand_as(tensor)
    copied = expanded.contiguous()
    for view, same in ((offset_by_one, tensor), (odd_rows, tensor), (expanded, copied)):
        case, chosen = replace(plain, **{name: view}), config(LOAD="descriptor")
        _, _, arguments, _ = launch_of(case, chosen)
        assert not any(isinstance(argument, TensorDescriptor) for argument in arguments)
        expected, _ = run(replace(plain, **{name: same}), config())
        assert torch.equal(run(case, chosen)[0], expected)


def test_aligned_tensors_are_loaded_through_descriptors_when_asked() -> None:
    _, _, arguments, _ = launch_of(make_inputs(problem(20, 20)), config(LOAD="descriptor"))
    assert sum(isinstance(argument, TensorDescriptor) for argument in arguments) == 3


@pytest.mark.parametrize(
    ("dtype", "q", "k"), [("bf16", 448, -544), ("bf16", 448, 544), ("fp16", 200, 200)]
)
@pytest.mark.parametrize("causal", [True, False])
def test_logits_far_from_zero_keep_their_weights(  # case B38
    dtype: str, q: float, k: float, causal: bool
) -> None:
    p = problem(37, 37, dtype=dtype, num_heads=8, head_dim=128, causal=causal)
    inputs = make_inputs(p)
    inputs.q[..., 0], inputs.k[..., 0] = q, k
    for softmax_scale in (None, 1.0):  # below -50000 also in base 2
        assert_right(inputs, config(), softmax_scale)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_types_and_layouts_are_right(dtype: str, layout: str) -> None:
    p = problem(70, 100, dtype=dtype, layout=layout, batch=2)
    for kind in LOADS:
        assert_right(make_inputs(p), config(LOAD=kind))


@pytest.mark.parametrize("softmax_scale", [0.0, 0.01, 3.0])
def test_the_softmax_scale_is_an_argument(softmax_scale: float) -> None:
    assert_right(make_inputs(problem(40, 70)), config(), softmax_scale)


@pytest.mark.parametrize("seqlen_k", [1, 5, 64, 150])
def test_lse_of_equal_keys_is_the_natural_logarithm_of_their_number(  # case B50
    seqlen_k: int,
) -> None:
    inputs = make_inputs(problem(3, seqlen_k, causal=False))
    zero_keys = replace(inputs, k=torch.zeros_like(inputs.k))
    _, lse = run(zero_keys, config())
    assert lse is not None and lse.dtype == torch.float32
    assert torch.equal(lse.double().exp().round(), torch.full((1, 2, 3), float(seqlen_k)).double())
    verdict = Budget(zero_keys).judge(*run(zero_keys, config()))
    assert verdict.correct, verdict.reason


def test_two_parts_of_the_keys_merged_by_lse_are_the_whole() -> None:  # case B50
    whole = make_inputs(problem(20, 90, dtype="fp32", causal=False))
    parts = []
    for keys in (slice(0, 60), slice(60, 90)):
        p = replace(whole.problem, seqlen_k=keys.stop - keys.start)
        parts.append(run(Inputs(p, whole.q, whole.k[:, keys], whole.v[:, keys]), config()))
    (out_a, lse_a), (out_b, lse_b) = parts
    assert lse_a is not None and lse_b is not None
    lse = torch.logaddexp(lse_a, lse_b)
    weight_a, weight_b = ((part - lse).exp().transpose(1, 2)[..., None] for part in (lse_a, lse_b))
    verdict = Budget(whole).judge(out_a * weight_a + out_b * weight_b, lse)
    assert verdict.correct, verdict.reason


def test_the_output_is_the_same_without_lse() -> None:
    inputs = make_inputs(problem(40, 40))
    out, lse = run(inputs, config(), with_lse=False)
    assert lse is None
    assert torch.equal(out, run(inputs, config())[0])


@pytest.mark.parametrize("causal", [True, False])
def test_every_tile_runs_once_however_heads_are_grouped(causal: bool) -> None:
    # K and V of a head are 0.5 MiB: groups of two heads, the last one alone, or all in one
    p = problem(65, 1024, causal=causal, num_heads=3, num_kv_heads=3, head_dim=128)
    inputs = make_inputs(p)
    grouped = [run(inputs, config(BLOCK_N=128, HEAD_GROUP_MIB=mib)) for mib in (1, 24)]
    (out, lse), (expected_out, expected_lse) = grouped
    assert out.isfinite().all()
    assert torch.equal(out, expected_out)
    assert lse is not None and expected_lse is not None and torch.equal(lse, expected_lse)


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(8, 2), (7, 7)])
@pytest.mark.parametrize("seqlen_k", [0, 100, 3000, 60_000])
def test_the_family_groups_heads_as_the_plan_does(
    seqlen_k: int, num_heads: int, num_kv_heads: int
) -> None:
    p = problem(130, seqlen_k, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=128)
    inputs = make_inputs(p, device="meta")
    for mib in (1, 4, 24):
        kernel, _, arguments, _ = launch_of(inputs, config(HEAD_GROUP_MIB=mib))
        given = dict(zip(kernel.arg_names, arguments, strict=True))
        assert given["heads_per_group"] == heads_per_group(p, mib)


def test_more_than_65535_heads_are_one_dimension_of_the_grid() -> None:  # case B14
    inputs = make_inputs(problem(130, 130, batch=40_000), device="meta")
    _, grid, _, _ = launch_of(inputs, config())
    assert grid == (3 * 80_000,)


@pytest.mark.parametrize(
    ("axis", "steps", "stride"),
    [
        ("batch", 9, 2**28),
        ("heads", 9, 2**28),
        ("tokens", 9, 2**28),  # within a tile
        ("tokens", 65, 2**25),  # from tile to tile
    ],
)
@pytest.mark.parametrize("name", ["q", "k", "v", "out"])
def test_elements_beyond_two_to_the_31_are_addressed(
    name: str, axis: str, steps: int, stride: int, tmp_path: Path
) -> None:
    """The last step along the axis lies 2**31 elements on, which 32 bits cannot name."""
    sizes = {"batch": 1, "heads": 1, "tokens": 3} | {axis: steps}
    tokens, heads = sizes["tokens"], sizes["heads"]
    p = problem(tokens, tokens, batch=sizes["batch"], num_heads=heads, num_kv_heads=heads)
    plain = make_inputs(p)
    expected, _ = run(plain, config())
    # A sparse file of twice the reach, the tensor in its middle: a wrapped address is still ours.
    reach = steps * stride
    file = str(tmp_path / "sparse")
    storage = torch.from_file(file, shared=True, size=2 * reach, dtype=torch.float16)
    tensor = expected if name == "out" else getattr(plain, name)
    strides = [3 * 16, 16, 16, 1]
    strides[("batch", "tokens", "heads").index(axis)] = stride
    far = storage.as_strided(tensor.shape, strides, reach)
    if name == "out":
        out, _ = run(plain, config(), out=far)
    else:
        far.copy_(tensor)
        out, _ = run(replace(plain, **{name: far}), config())
    assert torch.equal(out, expected)
