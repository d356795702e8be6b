"""The portable backwards in the interpreter under masks beyond windows."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_backward import config, every_way, problem, single
from test_backward_modifiers import assert_right, changed, run

from autoflash.accuracy import GradientBudget
from autoflash.config import Config
from autoflash.inputs import make_inputs

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
]

BF16 = {"dtype": "bf16"}
WINDOW = {"causal": False, "window_right": 9}
# floors negative numbers, and knows heads and sequences apart
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b == 1) or abs(q_idx - kv_idx) < h + 3"
HIDING = "(b + h) % 2 == 0 and (kv_idx >= 70 or q_idx < 9)"  # whole tiles, rows and heads


@every_way
@pytest.mark.parametrize(
    ("lengths", "fields"),
    [
        ((97, 40), {"mask": RULE}),
        ((70, 97), {"mask": HIDING, "causal": False, "layout": "bhsd", "sinks": True}),
        ((70, 97), {"mask": RULE, "window_left": 33, "softcap": True, "bias": True, **BF16}),
        ((97, 40), {"mask": HIDING, **WINDOW, "window_left": 60, "alibi": True}),
    ],
    ids=["causal", "hides whole heads", "window, bias", "window, alibi"],
)
def test_gradients_under_a_rule_are_right(
    lengths: tuple[int, int], fields: dict[str, Any], way: Config
) -> None:
    """Rows without a visible key, keys that no row sees, several sequences and heads."""
    assert_right(make_inputs(problem(*lengths, batch=2, **fields), wide_rows=1), way)


PREFIX = {"masked_by": "prefix", "density": 40}


@every_way
@pytest.mark.parametrize(
    ("lengths", "fields"),
    [
        ((120, 150), {"density": 20, "sinks": True, "dropout": True}),
        ((97, 40), {"density": 100, "softcap": True, "bias": True, **BF16}),
        ((97, 40), {"mask": RULE, "alibi": True, "layout": "bhsd"}),
    ],
    ids=["sinks", "all keys, bias", "rule, alibi"],
)
def test_gradients_under_a_prefix_are_right(
    lengths: tuple[int, int], fields: dict[str, Any], way: Config
) -> None:
    """Whole tiles of a prefix, one that ends within a tile, and rows before all keys."""
    assert_right(make_inputs(problem(*lengths, batch=2, **PREFIX | fields), wide_rows=1), way)


@pytest.mark.parametrize("prefix", [0, 1, 32, 33, 63, 65, 500])
def test_a_prefix_may_end_anywhere(prefix: int) -> None:
    made = make_inputs(problem(65, 97, num_heads=1, **PREFIX))
    inputs = changed(made, prefix_lens=torch.tensor([prefix], dtype=torch.int32))
    for way in (config(), single()):
        assert_right(inputs, way)


DOCUMENTS = {"masked_by": "documents", "density": 30}


@every_way
@pytest.mark.parametrize(
    ("lengths", "fields"),
    [
        ((170, 170), {"num_heads": 1}),
        ((97, 40), {"causal": False, "sinks": True, "layout": "bhsd"}),
        ((40, 97), {"window_left": 33, "softcap": True, "bias": True, **BF16}),
        ((40, 97), {"mask": RULE, "causal": False, "density": 100, "alibi": True}),
        ((97, 97), {"mask": HIDING, "window_left": 60}),
    ],
    ids=["causal", "full, sinks", "window, bias", "rule, alibi", "rule in a window"],
)
def test_gradients_under_documents_are_right(
    lengths: tuple[int, int], fields: dict[str, Any], way: Config
) -> None:
    """Documents that hold whole tiles and that end in one, and rows before all keys."""
    assert_right(make_inputs(problem(*lengths, batch=2, **DOCUMENTS | fields), wide_rows=1), way)


@every_way
def test_documents_in_any_order_are_right(way: Config) -> None:
    """Some come twice, some between others; ids are any numbers."""
    lowest, highest = -(2**31), 2**31 - 1
    ids = torch.tensor([5, 5, lowest, 7, 5, highest, 7, 7, lowest, 0]).repeat_interleave(17)[:150]
    for fields in ({"causal": False}, {"bias": True}):
        made = make_inputs(problem(130, 150, num_heads=1, **DOCUMENTS | fields))
        assert_right(changed(made, document_ids=ids[None].int()), way)


@every_way
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tiles_of_other_documents_are_skipped_and_not_masked(causal: bool, way: Config) -> None:
    """No numbers in the second document, which begins with a tile, change no bit of the first."""
    fields = {"causal": causal, "bias": True, **DOCUMENTS}
    made = make_inputs(problem(128, 128, num_heads=1, **fields))
    inputs = changed(made, document_ids=(torch.arange(128) // 64)[None].int())
    noise = {}
    for name in ("q", "k", "v", "out", "dout"):
        noise[name] = getattr(inputs, name).clone()
        noise[name][:, 64:] = float("nan")
    expected, found = run(inputs, way), run(replace(inputs, **noise), way)
    for one, other in zip(found[0], expected[0], strict=True):
        assert torch.equal(one[:, :64], other[:, :64])
    assert found[1].dbias is not None and expected[1].dbias is not None
    assert torch.equal(found[1].dbias[..., :64, :64], expected[1].dbias[..., :64, :64])
    assert (found[1].dbias[..., :64, 64:] == 0).all()


BLOCKS = {"masked_by": "blocks", "density": 50, "mask_block_q": 64, "mask_block_k": 64}


@every_way
@pytest.mark.parametrize(
    ("lengths", "fields"),
    [
        ((97, 256), {"causal": False, "mask_block_k": 128}),
        ((150, 170), {"mask": RULE, "sinks": True, "layout": "bhsd", "mask_block_q": 128}),
        ((97, 90), {"mask": HIDING, "causal": False, "softcap": True, "alibi": True, **BF16}),
        ((97, 256), {"causal": False, "mask_block_k": 128, "bias": True, "num_heads": 4}),
        ((150, 170), {"mask": RULE, "bias": True, "dropout": True, "softcap": True, **BF16}),
    ],
    ids=["full", "causal, rule", "rule, alibi", "full, bias", "causal, rule, bias"],
)
def test_gradients_under_listed_blocks_are_right(
    lengths: tuple[int, int], fields: dict[str, Any], way: Config
) -> None:
    """Lists of each head, blocks past the last query and key, rows and keys in no block."""
    assert_right(make_inputs(problem(*lengths, batch=2, **BLOCKS | fields), wide_rows=1), way)


def test_blocks_that_tiles_of_16_alone_divide_are_right() -> None:
    sizes = {"mask_block_q": 48, "mask_block_k": 80}
    p = problem(100, 170, num_heads=1, **BLOCKS | sizes | {"causal": False, "sinks": True})
    tiles = {"KV_BLOCK_M": 16, "KV_BLOCK_N": 16}
    assert_right(make_inputs(p), single(**tiles))
    assert_right(make_inputs(p), config(**tiles, Q_BLOCK_M=16, Q_BLOCK_N=16))


@pytest.mark.parametrize("shared", ["heads", "all", "no full blocks"])
def test_lists_may_be_shared_and_there_may_be_none_of_full_blocks(shared: str) -> None:
    made = make_inputs(problem(70, 130, batch=2, **BLOCKS))
    lists = made.block_mask
    assert lists is not None
    counts, indices, full, full_indices = (
        each if each is None else each[: 1 if shared == "all" else 2, :1] for each in lists[:4]
    )
    kept = (full, full_indices) if shared != "no full blocks" else (None, None)
    given = lists._replace(
        kv_num_blocks=counts,
        kv_indices=indices,
        full_kv_num_blocks=kept[0],
        full_kv_indices=kept[1],
    )
    inputs = changed(made, block_mask=given)
    for way in (config(), single()):
        assert_right(inputs, way)


@every_way
def test_blocks_that_are_in_no_list_are_not_visited(way: Config) -> None:
    """No numbers in the second block of queries and of keys, which see and are seen by nobody."""
    made = make_inputs(problem(128, 128, causal=False, num_heads=1, **BLOCKS))
    counts, indices = (torch.zeros_like(t) for t in made.block_mask[:2])
    counts[..., 0] = 1
    lists = made.block_mask._replace(kv_num_blocks=counts, kv_indices=indices)
    inputs = changed(made, block_mask=lists._replace(full_kv_num_blocks=counts * 0))
    noise = {}
    for name in ("q", "k", "v", "dout"):
        noise[name] = getattr(inputs, name).clone()
        noise[name][:, 64:] = float("nan")
    expected, found = run(inputs, way)[0], run(replace(inputs, **noise), way)[0]
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one[:, :64], other[:, :64]) and (one[:, :64] != 0).any()
    assert (expected.dq[:, 64:] == 0).all() and (found.dk[:, 64:] == 0).all()


MASKS: dict[str, dict[str, Any]] = {
    "rule": {"mask": RULE},
    "prefix": PREFIX,
    "documents": DOCUMENTS,
    "blocks": BLOCKS,
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_a_mask_is_felt(mask: dict[str, Any]) -> None:
    """What is found right are not the gradients without it."""
    plain = make_inputs(problem(70, 97))
    masked = replace(plain.problem, **mask)
    for way in (config(), single()):
        found, _ = run(make_inputs(masked), way)
        assert not GradientBudget(plain).judge(found).correct


def test_rows_and_keys_that_a_rule_hides_have_no_gradients() -> None:
    made = make_inputs(problem(40, 97, mask="kv_idx < 60 and q_idx % 2 == 0", causal=False))
    for way in (config(), single()):
        gradients, _ = assert_right(made, way)
        assert (gradients.dq[:, 1::2] == 0).all() and (gradients.dq[:, ::2] != 0).any()
        assert (gradients.dk[:, 60:] == 0).all() and (gradients.dv[:, 60:] == 0).all()
        assert torch.isfinite(gradients.dk).all()
