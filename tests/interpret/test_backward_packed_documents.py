"""The portable backwards in the interpreter of packed sequences under documents."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_backward import config, every_way, single
from test_backward_masks import DOCUMENTS, HIDING, RULE, WINDOW
from test_backward_modifiers import SOME, assert_right, changed, packed, run, same_bits
from test_prefill_documents import with_ids

from autoflash.config import Config
from autoflash.families import family_of
from autoflash.inputs import Inputs
from autoflash.kernel import load
from autoflash.render import render

# numpy warns of exponentials of scores that the mask hides, and of what comes of them
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2"),
    pytest.mark.filterwarnings("ignore:invalid value encountered in"),
    pytest.mark.filterwarnings("ignore:divide by zero encountered in log2"),
]

BF16 = {"dtype": "bf16"}


def in_any_order(inputs: Inputs, numbers: int, seed: int = 0) -> Inputs:
    """The same with ids far apart, in any order, some twice and some between others."""
    return changed(inputs, document_ids=with_ids(inputs, numbers, seed).document_ids)


@every_way
@pytest.mark.parametrize(
    "fields",
    [
        {"num_heads": 4, "num_kv_heads": 2},
        {"causal": False, "sinks": True, **BF16},
        {"window_left": 33, "softcap": True, "dropout": True},
        {"mask": RULE, "alibi": True, "causal": False, "density": 100},
        {**WINDOW, "window_left": 20, "mask": HIDING, "bias": True},
        {"head_dim_v": 24, "density": 10},
    ],
    ids=[
        *("causal, groups", "full, sinks", "window, softcap, dropout", "rule, alibi"),
        *("window, rule, bias", "narrow values"),
    ],
)
def test_gradients_of_packed_documents_are_right(fields: dict[str, Any], way: Config) -> None:
    """Sequences without queries, without keys, with fewer keys than queries; each has its own."""
    inputs = packed(*SOME, **DOCUMENTS | fields)
    assert_right(inputs, way)
    load_by = {"pointer": "descriptor", "descriptor": "pointer"}[str(way["LOAD"])]
    other = Config.of(way.family, way.as_dict() | {"LOAD": load_by})
    assert_right(in_any_order(inputs, 3), other)


@every_way
def test_ids_may_be_any_numbers_and_rows_may_lie_in_memory_of_any_width(way: Config) -> None:
    made = packed((130, 150), (3, 0), (150, 130), num_heads=1, causal=False, **DOCUMENTS)
    lowest, highest = -(2**31), 2**31 - 1
    ids = torch.tensor([5, 5, lowest, 7, 5, highest, 7, 7, lowest, 0]).repeat_interleave(17)[:150]
    wide = torch.full((3, 163), 5, dtype=torch.int32)
    wide[:, :150] = torch.stack([ids, ids, ids.flip(0)])
    assert_right(changed(made, document_ids=wide[:, :150]), way)


@every_way
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "full"])
def test_tiles_of_other_documents_are_skipped_and_not_masked(causal: bool, way: Config) -> None:
    """No numbers in the second document, which begins with a tile, change no bit of the first.

    Both are of the second sequence, which begins in the middle of a tile of all tokens.
    """
    fields = {"causal": causal, "bias": True, "num_heads": 1, **DOCUMENTS}
    made = packed((37, 45), (128, 128), (64, 9), **fields)
    ids = (torch.arange(128) // 64).int().expand(3, 128).contiguous()
    inputs = changed(made, document_ids=ids)
    noise = {}
    for name in ("q", "k", "v", "out", "dout"):
        begin = 45 if name in "kv" else 37
        noise[name] = getattr(inputs, name).clone()
        noise[name][begin + 64 : begin + 128] = float("nan")
    expected, found = run(inputs, way), run(replace(inputs, **noise), way)
    for begin, one, other in zip((37, 45, 45), found[0], expected[0], strict=True):
        kept = torch.ones(len(one), dtype=torch.bool)
        kept[begin + 64 : begin + 128] = False
        assert torch.equal(one[kept], other[kept]) and (other[begin : begin + 64] != 0).any()
        assert one[~kept].isnan().any()
    assert found[1].dbias is not None and expected[1].dbias is not None
    assert torch.equal(found[1].dbias[..., :64, :64], expected[1].dbias[..., :64, :64])


@every_way
def test_ids_past_a_sequences_last_key_change_no_bit(way: Config) -> None:
    inputs = in_any_order(packed(*SOME, causal=False, **DOCUMENTS), 4)
    assert inputs.document_ids is not None
    keys = torch.tensor([n for _, n in SOME])[:, None]
    past = torch.arange(inputs.document_ids.shape[1])[None] >= keys
    expected = run(inputs, way)
    for dead in (0, 2**31 - 1, -(2**31)):
        ids = inputs.document_ids.masked_fill(past, dead)
        assert same_bits(run(replace(inputs, document_ids=ids), way), expected)


@pytest.mark.parametrize("where", ["packed", "batch"])
def test_documents_are_found_among_more_tiles_than_a_program_looks_at(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Of the second half of a sequence's tiles too, in whichever half a tile's own lie."""
    made = packed((20, 9), (150, 170), causal=False, num_heads=1, **DOCUMENTS)
    inputs = in_any_order(made, 5)
    if where == "batch":
        p = replace(inputs.problem, layout="bshd", lengths="equal", batch=1)
        ids = {"cu_seqlens_q": None, "cu_seqlens_k": None, "document_ids": inputs.document_ids[1:]}
        ends = {name: 9 if name in "kv" else 20 for name in ("q", "k", "v", "dout")}
        tokens = {name: getattr(inputs, name)[None, end:] for name, end in ends.items()}
        dlse = inputs.dlse[None, :, 20:].contiguous()
        inputs = changed(replace(inputs, problem=p, dlse=dlse, **ids), **tokens)
    for way in (config(), single()):
        module = load(render(family_of(way.family).variant(inputs.problem)))
        monkeypatch.setattr(module, "CHUNKS_AT_ONCE", 2)
        assert_right(inputs, way)
