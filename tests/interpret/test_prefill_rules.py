"""Rules of custom masks of packed sequences and over pages: by places in each sequence."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from making import prefill_of, winner_of
from running import run
from test_prefill import LOADS, config
from test_prefill_packed import RAGGED, assert_right, packed
from test_prefill_pages import chunks, same_bits

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs
from autoflash.subjects import exported_module

# floors negative numbers, and knows heads and sequences apart
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 3) or abs(q_idx - kv_idx) < h + 3"
HIDING = "(b + h) % 2 == 0 and (kv_idx >= 70 or q_idx < 9)"  # whole tiles, rows and heads
ALL: dict[str, Any] = {"softcap": True, "alibi": True, "sinks": True}

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize(
    "on",
    [
        {"causal": True},
        {"causal": False, "bias": True, "sinks": True},
        {"window_left": 20, **ALL},
        {"causal": True, "mask": HIDING},
    ],
    ids=str,
)
def test_a_rule_of_packed_sequences_is_right_under_any_mask(on: dict, load: str) -> None:
    assert_right(packed(**{"mask": RULE, **on}), config(LOAD=load))


@pytest.mark.parametrize(
    "on",
    [
        {"page_size": 16},
        {"page_size": 64, "load": "descriptor", **ALL},
        {"page_size": 3, "kv_layout": "hnd", "causal": False, "bias": True},
        {"page_size": 16, "window_left": 75, "sinks": True, "tile": 16},  # seen whole by all rows
        {"page_size": 16, "layout": "thd", "window_left": 9, "window_right": 30, "causal": False},
        {"page_size": 32, "layout": "thd", "load": "descriptor", "mask": HIDING},
        {"page_size": 16, "layout": "bhsd", "mask": HIDING, "sinks": True},
    ],
    ids=str,
)
def test_a_rule_over_pages_is_right_under_any_mask(on: dict) -> None:
    fields = {"mask": RULE, **on}
    load, tile = fields.pop("load", "pointer"), fields.pop("tile", 32)
    assert_right(chunks(**fields), config(LOAD=load, BLOCK_N=tile))


def places_seen(rule: str, b: int, h: int, i: int, keys: int) -> list[int]:
    """The keys for which Python says that the rule holds."""
    given = {"b": b, "h": h, "q_idx": i}
    return [j for j in range(keys) if eval(rule, {}, given | {"kv_idx": j})]


def test_the_keys_seen_are_counted_in_each_packed_sequence_by_all_four_names() -> None:
    inputs = packed(dtype="fp32", causal=False, mask=RULE)
    v = torch.zeros_like(inputs.v)
    v[..., 1] = torch.cat([torch.arange(keys) for _, keys in RAGGED])[:, None]
    out, lse = run(replace(inputs, k=inputs.k * 0, v=v), config())
    assert lse is not None
    first = 0
    for b, (rows, keys) in enumerate(RAGGED):
        for h in range(2):
            for i in range(rows):
                seen = places_seen(RULE, b, h, i, keys)
                assert round(float(lse[h, first + i].exp())) == len(seen)
                assert round(float(out[first + i, h, 1]) * len(seen)) == sum(seen)
        first += rows


def test_rows_that_the_rule_hides_all_keys_of_are_empty() -> None:
    out, lse = run(packed(causal=False, mask=HIDING), config())
    assert lse is not None
    rows = [(b, i) for b, (rows, _) in enumerate(RAGGED) for i in range(rows)]
    for h in range(2):
        empty = [not places_seen(HIDING, b, h, i, RAGGED[b][1]) for b, i in rows]
        assert any(empty) and not all(empty)
        assert torch.equal(lse[h] == -math.inf, torch.tensor(empty))
        assert (out[torch.tensor(empty), h] == 0).all()


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_a_rule_that_hides_nothing_changes_no_more_than_the_order_of_sums(layout: str) -> None:
    inputs = chunks(mask="kv_idx >= 0", layout=layout)
    plain = replace(inputs, problem=replace(inputs.problem, mask=""))
    verdict = Budget(plain).judge(*run(inputs, config()))
    assert verdict.correct, verdict.reason


def test_a_rule_follows_the_key_and_not_its_page() -> None:
    inputs = chunks([97, 41], mask=RULE)
    assert inputs.block_table is not None
    table, place = inputs.block_table, torch.arange(len(inputs.k)).flip(0)
    table = place[table.clamp(max=len(place) - 1).long()].int().where(table < len(place), table)
    moved = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
    assert same_bits(inputs, moved, config())


OTHER = "kv_idx % 2 == h % 2"
SIZES: dict[str, Any] = {"head_dim": 16, "num_heads": 2, "num_kv_heads": 1, "dtype": "fp16"}
SIZES |= {"lengths": "ragged"}
KINDS: dict[str, dict[str, Any]] = {
    "packed": {"layout": "thd"},
    "chunks": {"page_size": 16},
    "packed chunks": {"layout": "thd", "page_size": 16},
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("rules") / "attention_dispatch.py"
    tuned = [prefill_of(**SIZES, **on, mask=m) for on in KINDS.values() for m in (RULE, OTHER)]
    path.write_text(export([winner_of(p) for p in tuned]).text)
    return exported_module(path)


def made(kind: str, mask: str) -> Inputs:
    return packed(mask=mask) if kind == "packed" else chunks(**KINDS[kind], mask=mask)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    given = {**inputs.modifiers.of_prefill, "density": None, "window": (-1, -1), **changed}
    options = {"causal": True, "layout": inputs.problem.layout, "return_lse": True}
    return module.prefill(inputs.q, inputs.k, inputs.v, **options, **given)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_module_serves_its_rules_each_by_its_own_kernels(
    exported: ModuleType, kind: str
) -> None:
    for mask in (RULE, OTHER, RULE, f" ({OTHER}) "):  # planned, then by their recipes
        inputs = made(kind, mask)
        verdict = Budget(inputs).judge(*call(exported, inputs, mask=mask))
        assert verdict.correct, verdict.reason


@pytest.mark.parametrize("kind", KINDS)
def test_a_rule_is_an_argument_of_the_operator_in_one_graph(
    exported: ModuleType, kind: str
) -> None:
    inputs = made(kind, OTHER)

    def layer(q: torch.Tensor) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(inputs.q), layer(inputs.q), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_masks_that_packed_sequences_and_pages_lack_are_refused_with_what_serves_instead(
    exported: ModuleType,
) -> None:
    told = "prefill: packed: block_mask is not supported yet: mask hides keys"
    for kind in KINDS:
        inputs = made(kind, OTHER)
        over_pages = inputs.problem.layout != "thd"
        told_of = "prefill: block_mask is no BlockMask" if over_pages else f"^{told}$"
        with pytest.raises(exported.ProblemError, match=told_of):
            call(exported, inputs, block_mask=torch.zeros(1))
        with pytest.raises(exported.ProblemError, match="prefill: density 5 is of a mask, and no"):
            call(exported, inputs, mask=None, density=5)
        with pytest.raises(exported.ProblemError, match="q requires grad and there is no backward"):
            call(exported, replace(inputs, q=inputs.q.clone().requires_grad_()))
        with pytest.raises(exported.ProblemError, match=r"no kernels for causal with .*: none"):
            call(exported, inputs, mask="kv_idx > 5")
