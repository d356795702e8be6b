"""Prefixes of packed sequences and over pages: first keys that all queries of a sequence see."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from making import prefill_of, winner_of
from running import run
from test_prefill import LOADS, config
from test_prefill_packed import assert_right, packed
from test_prefill_pages import LENGTHS, PACKED, chunks

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs
from autoflash.subjects import exported_module

PREFIX: dict[str, Any] = {"masked_by": "prefix", "density": 30, "causal": True}
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 3)"
NAN = float("nan")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def with_prefixes(inputs: Inputs, *prefixes: int) -> Inputs:
    """Of the sequences these, again and again."""
    batch = inputs.problem.batch
    each = [prefixes[b % len(prefixes)] for b in range(batch)]
    return replace(inputs, prefix_lens=torch.tensor(each, dtype=torch.int32))


# at edges of tiles of 32, none, and more than a sequence has
EDGES = [(0, 1, 31), (32, 33, 500), (64, 5, 97)]


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("prefixes", EDGES, ids=str)
def test_packed_sequences_see_their_own_prefix(prefixes: tuple, load: str) -> None:
    assert_right(with_prefixes(packed(**PREFIX), *prefixes), config(LOAD=load))


@pytest.mark.parametrize(
    "on",
    [
        {"page_size": 16},
        {"page_size": 64, "load": "descriptor", "softcap": True, "alibi": True, "sinks": True},
        {"page_size": 16, "layout": "thd", "mask": RULE},
        {"page_size": 32, "layout": "thd", "load": "descriptor", "bias": True, "kv_layout": "hnd"},
    ],
    ids=str,
)
def test_chunks_over_pages_see_the_prefix_of_their_sequence(on: dict) -> None:
    fields = {**PREFIX, **on}
    load = fields.pop("load", "pointer")
    for prefixes in EDGES:
        assert_right(with_prefixes(chunks(**fields), *prefixes), config(LOAD=load))


def seen_by(i: int, rows: int, keys: int, prefix: int) -> int:
    """How many keys query `i` sees: those up to its position, and the prefix."""
    return max(0, min(keys, i + 1 + keys - rows), min(prefix, keys))


@pytest.mark.parametrize("layout", ["bshd", "thd"])
def test_with_equal_keys_lse_is_the_log_of_how_many_a_query_of_a_chunk_sees(layout: str) -> None:
    prefixes = (33, 64, 20, 0)
    inputs = with_prefixes(chunks(**PREFIX, layout=layout, dtype="fp32"), *prefixes)
    tiles = config(BLOCK_M=16, BLOCK_N=16)  # the first queries' own end before the prefix
    _, lse = run(replace(inputs, k=inputs.k.nan_to_num() * 0), tiles)
    assert lse is not None
    pairs = PACKED if layout == "thd" else [(40, keys) for keys in LENGTHS]
    counted = [
        torch.tensor([seen_by(i, rows, keys, prefixes[b % 4]) for i in range(rows)])
        for b, (rows, keys) in enumerate(pairs)
    ]
    expected = torch.cat(counted) if layout == "thd" else torch.stack(counted)[:, None]
    assert torch.equal(lse.double().exp().round(), expected.double().expand_as(lse))


def test_keys_behind_the_prefix_and_the_query_are_skipped() -> None:
    lengths = [(160, 160), (64, 64)]
    for inputs in (packed(lengths, **PREFIX), chunks([160], **PREFIX, seqlen_q=160, seqlen_k=160)):
        inputs = with_prefixes(inputs, 40)
        out, _ = run(inputs, config())
        v = inputs.v.clone()
        if inputs.block_table is None:
            v[64:160] = NAN
        else:
            v[inputs.block_table[0, 4:].long()] = NAN
        again, _ = run(replace(inputs, v=v), config())
        first = (slice(64),) if inputs.block_table is None else (0, slice(64))
        assert torch.equal(out[first], again[first]) and again.isnan().any()


SIZES: dict[str, Any] = {"head_dim": 16, "num_heads": 2, "num_kv_heads": 1, "dtype": "fp16"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module whose winners have no prefixes."""
    path = tmp_path_factory.mktemp("prefixes") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of(**SIZES))]).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    given = {**inputs.modifiers.of_prefill, "density": None, "window": (-1, -1), "causal": True}
    given |= {"layout": inputs.problem.layout, "return_lse": True, **changed}
    return module.prefill(inputs.q, inputs.k, inputs.v, **given)


KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "chunks": {"page_size": 16},
    "packed chunks": {"page_size": 16, "layout": "thd"},
}


def made(kind: str, *prefixes: int) -> Inputs:
    inputs = packed(**PREFIX) if kind == "packed" else chunks(**PREFIX, **KINDS[kind])
    return with_prefixes(inputs, *prefixes)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_module_has_prefixes_untuned_and_follows_them_in_place(
    exported: ModuleType, kind: str
) -> None:
    inputs = made(kind, 33, 7)
    for prefix in (33, 70, 2):  # planned, then by its recipe
        assert inputs.prefix_lens is not None
        inputs.prefix_lens[0] = prefix
        verdict = Budget(inputs).judge(*call(exported, inputs))
        assert verdict.correct, verdict.reason
    told = exported.explain(call, exported, inputs)["problem"]
    assert (told.masked_by, told.density) == ("prefix", 10)  # nobody told it
    with pytest.raises(exported.ProblemError, match="prefix: what is beyond it is causal"):
        call(exported, inputs, causal=False)
    with pytest.raises(exported.ProblemError, match=r"prefix_lens is \(1,\), expected"):
        call(exported, inputs, prefix_lens=torch.zeros(1).int())


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes_are_arguments_of_the_operator_in_one_graph(
    exported: ModuleType, kind: str
) -> None:
    inputs = made(kind, 33, 7)

    def layer(q: torch.Tensor) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(inputs.q), layer(inputs.q), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
