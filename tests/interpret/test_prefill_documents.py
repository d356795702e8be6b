"""Documents of packed sequences and over pages: by the positions of keys in each sequence."""

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from making import backward_of, prefill_of, winner_of
from running import run
from test_prefill import LOADS, config
from test_prefill_packed import assert_right, packed
from test_prefill_pages import chunks

from autoflash.accuracy import Budget
from autoflash.export import export
from autoflash.inputs import Inputs
from autoflash.subjects import exported_module

DOCUMENTS: dict[str, Any] = {"masked_by": "documents", "density": 30}
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 3)"
NAN = float("nan")

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]


def lengths_of(inputs: Inputs) -> list[tuple[int, int]]:
    """The queries and the keys of each sequence."""
    p = inputs.problem
    starts = [inputs.cu_seqlens_q, inputs.cu_seqlens_k]
    rows, keys = (None if each is None else each.diff().tolist() for each in starts)
    if inputs.cache_seqlens is not None:
        keys = inputs.cache_seqlens.tolist()
    return list(zip(rows or [p.seqlen_q] * p.batch, keys or [], strict=True))


def with_ids(inputs: Inputs, numbers: int, seed: int = 0) -> Inputs:
    """Ids of so many numbers far apart, in any order, in runs of 1 to 40 keys."""
    assert inputs.document_ids is not None
    made = torch.Generator().manual_seed(seed)
    batch, width = inputs.document_ids.shape
    runs = torch.randint(numbers, (batch, width), generator=made)
    sizes = torch.randint(1, 41, (batch, width), generator=made)
    rows = [r.repeat_interleave(n)[:width] for r, n in zip(runs, sizes, strict=True)]
    ids = (torch.stack(rows) - numbers // 2) * (2**31 // numbers - 1)
    return replace(inputs, document_ids=ids.int())


@pytest.mark.parametrize("load", LOADS)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_see_their_own_documents(causal: bool, load: str) -> None:
    inputs = packed(**DOCUMENTS, causal=causal)
    for each in (inputs, with_ids(inputs, 3), with_ids(inputs, 40, 1)):
        assert_right(each, config(LOAD=load))


@pytest.mark.parametrize(
    "on",
    [
        {"window_left": 40},
        {"window_left": 20, "window_right": 9, "causal": False, "softcap": True, "sinks": True},
        {"bias": True, "causal": False},
        {"alibi": True, "mask": RULE},
        {"dropout": True},
        {"head_dim_v": 24},
    ],
    ids=str,
)
def test_packed_documents_meet_windows_modifiers_and_rules(on: dict) -> None:
    assert_right(with_ids(packed(**{**DOCUMENTS, **on}), 5), config())


@pytest.mark.parametrize(
    "on",
    [
        {"page_size": 16},
        {"page_size": 64, "load": "descriptor", "softcap": True, "alibi": True, "sinks": True},
        {"page_size": 16, "causal": False, "mask": RULE},
        {"page_size": 3, "window_left": 40, "layout": "bhsd"},
        {"page_size": 16, "layout": "thd", "window_left": 20, "window_right": 9, "causal": False},
        {"page_size": 32, "layout": "thd", "load": "descriptor", "bias": True, "kv_layout": "hnd"},
        {"page_size": 64, "layout": "thd", "load": "descriptor", "causal": False},
    ],
    ids=str,
)
def test_chunks_over_pages_see_the_documents_of_their_sequence(on: dict) -> None:
    fields = {**DOCUMENTS, **on}
    load = fields.pop("load", "pointer")
    inputs = chunks(**fields)
    for each in (inputs, with_ids(inputs, 3), with_ids(inputs, 40, 1)):
        assert_right(each, config(LOAD=load))


@pytest.mark.parametrize("where", ["packed", "bshd", "thd"])
def test_with_equal_keys_lse_is_the_log_of_how_many_python_says_are_seen(where: str) -> None:
    fields = {**DOCUMENTS, "causal": True, "dtype": "fp32"}
    inputs = packed(**fields) if where == "packed" else chunks(**fields, layout=where)
    inputs = with_ids(inputs, 4)
    _, lse = run(replace(inputs, k=inputs.k.nan_to_num() * 0), config(BLOCK_M=16, BLOCK_N=16))
    assert lse is not None and inputs.document_ids is not None
    counted = []
    for (rows, keys), ids in zip(lengths_of(inputs), inputs.document_ids.tolist(), strict=True):
        places = range(keys - rows, keys)
        counted.append([p >= 0 and sum(ids[j] == ids[p] for j in range(p + 1)) for p in places])
    if where == "bshd":
        expected = torch.tensor(counted).double()[:, None].expand_as(lse)
    else:
        expected = torch.tensor([n for each in counted for n in each]).double().expand_as(lse)
    assert torch.equal(lse.double().exp().round(), expected)


@pytest.mark.parametrize("where", ["packed", "bshd"])
def test_tiles_of_other_documents_are_skipped(where: str) -> None:
    """Of one document on each side of a tile's edge neither reads the other's values."""
    for causal in (True, False):
        fields = {**DOCUMENTS, "causal": causal}
        lengths = [(160, 160), (64, 64)]
        if where == "packed":
            inputs = packed(lengths, **fields)
        else:
            inputs = chunks([160, 64], **fields, seqlen_q=160, seqlen_k=160)
        assert inputs.document_ids is not None
        inputs.document_ids[0] = (torch.arange(inputs.document_ids.shape[1]) < 64).int() * 7
        out, _ = run(inputs, config())
        v = inputs.v.clone()
        if inputs.block_table is None:
            v[64:160] = NAN
        else:
            v[inputs.block_table[0, 4:10].long()] = NAN
        again, _ = run(replace(inputs, v=v), config())
        first = (0, slice(64)) if where == "bshd" else (slice(64),)
        assert torch.equal(out[first], again[first]) and again.isnan().any()


@pytest.mark.parametrize("where", ["packed", "bshd", "thd"])
def test_ids_past_the_last_key_change_no_bit(where: str) -> None:
    fields = {**DOCUMENTS, "causal": False}
    inputs = packed(**fields) if where == "packed" else chunks(**fields, layout=where)
    assert inputs.document_ids is not None
    expected = run(inputs, config())
    keys = torch.tensor([n for _, n in lengths_of(inputs)])[:, None]
    past = torch.arange(inputs.document_ids.shape[1])[None] >= keys
    assert past.any()
    for dead in (0, 1, 2**31 - 1, -(2**31)):
        other = replace(inputs, document_ids=inputs.document_ids.masked_fill(past, dead))
        pairs = zip(run(other, config()), expected, strict=True)
        assert all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)


SIZES: dict[str, Any] = {"head_dim": 16, "num_heads": 2, "num_kv_heads": 1, "dtype": "fp16"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module whose winners have no documents."""
    path = tmp_path_factory.mktemp("documents") / "attention_dispatch.py"
    path.write_text(export([winner_of(prefill_of(**SIZES))]).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    given = {**inputs.modifiers.of_prefill, "density": None, "window": (-1, -1)}
    given |= {"layout": inputs.problem.layout, "return_lse": True, "causal": inputs.problem.causal}
    return module.prefill(inputs.q, inputs.k, inputs.v, **{**given, **changed})


KINDS: dict[str, dict[str, Any]] = {
    "packed": {},
    "chunks": {"page_size": 16},
    "packed chunks": {"page_size": 16, "layout": "thd"},
}


def made(kind: str, **fields: Any) -> Inputs:
    fields = {**DOCUMENTS, **KINDS[kind], **fields}
    return packed(**fields) if kind == "packed" else chunks(**fields)


@pytest.mark.parametrize("kind", KINDS)
def test_the_exported_module_has_documents_untuned_and_follows_them_in_place(
    exported: ModuleType, kind: str
) -> None:
    for causal in (True, False):
        inputs = made(kind, causal=causal)
        assert inputs.document_ids is not None
        for seed in range(3):  # planned, then by its recipe
            ids = with_ids(inputs, 4, seed).document_ids
            assert ids is not None
            inputs.document_ids.copy_(ids)
            verdict = Budget(inputs).judge(*call(exported, inputs, check=seed == 2))
            assert verdict.correct, verdict.reason
        told = exported.explain(call, exported, inputs)["problem"]
        assert (told.masked_by, told.density) == ("documents", 10)  # nobody told it
        narrow = inputs.document_ids[:, 1:].contiguous()
        with pytest.raises(exported.ProblemError, match=r"document_ids is \(.*\), expected \("):
            call(exported, inputs, document_ids=narrow)


@pytest.mark.parametrize("kind", KINDS)
def test_documents_are_arguments_of_the_operator_in_one_graph(
    exported: ModuleType, kind: str
) -> None:
    inputs = made(kind, causal=True)

    def layer(q: torch.Tensor) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    pairs = zip(compiled(inputs.q), layer(inputs.q), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_gradients_of_packed_documents_that_none_were_tuned_of_are_refused_before_a_launch(
    tmp_path: Path,
) -> None:
    path = tmp_path / "attention_dispatch.py"
    tuned = [each(**SIZES, layout="thd") for each in (prefill_of, backward_of)]
    path.write_text(export([winner_of(p) for p in tuned]).text)
    inputs = made("packed", causal=True)
    trained = replace(inputs, q=inputs.q.clone().requires_grad_())
    module = exported_module(path)
    told = "backward: no kernels for causal with documents with varlen: none were tuned"
    with pytest.raises(module.ProblemError, match=told):
        call(module, trained)
