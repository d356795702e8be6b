"""Documents and prefixes in decode: by positions in the whole sequence, whatever is read of it."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from decoding import (
    LAST,
    check,
    config,
    decode,
    each_choice,
    every_config,
    expect_seen,
    problem,
    same_bits,
    step,
)
from making import decode_of, winner_of

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.inputs import Inputs, make_inputs
from autoflash.subjects import exported_module

DOCUMENTS: dict[str, Any] = {"masked_by": "documents", "density": 30}
PREFIX: dict[str, Any] = {"masked_by": "prefix", "density": 30, "seqlen_q": 4}
EDGES = [100, 0, 1, 2, 15, 16, 17, 31, 32, 33, 64, 65]  # of pages of 16 and of tiles of 32
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 or h == 1"

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


@every_config
def test_documents_of_lengths_around_every_edge_of_tiles_and_pages_are_right(
    config: Config,
) -> None:
    for seqlen_q, page_size in ((1, 16), (4, 0)):
        check(step(EDGES, page_size=page_size, seqlen_q=seqlen_q, **DOCUMENTS), config, splits=3)


@every_config
def test_prefixes_of_lengths_around_every_edge_of_tiles_and_pages_are_right(config: Config) -> None:
    for page_size in (16, 0):
        check(step(EDGES, page_size=page_size, **PREFIX), config, splits=3)


@each_choice
@pytest.mark.parametrize("added", ["alibi", "bias"])
def test_documents_meet_windows_rules_softcap_sinks_and_what_is_added(
    added: str, config: Config
) -> None:
    fields: dict[str, Any] = {"window_left": 20, "softcap": True, "sinks": True, added: True}
    for seqlen_q, page_size in ((1, 0), (3, 16)):
        sizes = {"seqlen_q": seqlen_q, "page_size": page_size}
        check(step([100, 33, 0, 1], 6, 2, mask=RULE, **sizes, **fields, **DOCUMENTS), config)


@each_choice
@pytest.mark.parametrize("added", ["alibi", "bias"])
def test_prefixes_meet_rules_softcap_sinks_and_what_is_added(added: str, config: Config) -> None:
    """Slopes count how far a key of the prefix is from its query, before or after."""
    fields: dict[str, Any] = {"softcap": True, "sinks": True, added: True}
    check(step([100, 33, 0, 2], 6, 2, mask=RULE, page_size=16, **fields, **PREFIX), config)


@pytest.mark.parametrize("masked", [DOCUMENTS, PREFIX], ids=lambda fields: fields["masked_by"])
def test_merging_programs_sixteen_queries_and_other_types_are_right(masked: dict) -> None:
    for dtype, seqlen_q, chosen in (("bf16", 16, LAST), ("fp32", 5, config()), ("bf16", 2, LAST)):
        sizes = {"head_dim": 40, "dtype": dtype, **masked, "seqlen_q": seqlen_q}
        check(step([100, 17, 65, 3], 6, 2, **sizes, sinks=True), chosen, splits=3)


@pytest.mark.parametrize("masked", [DOCUMENTS, PREFIX], ids=lambda fields: fields["masked_by"])
def test_quantised_caches_and_latent_attention_are_right(masked: dict) -> None:
    for kv_dtype, kv_scales, page_size in (("fp8_e4m3", "head", 16), ("int8", "token", 0)):
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, "page_size": page_size}
        for seqlen_q in (1, 3):
            fields |= {"head_dim": 32, **masked, "seqlen_q": seqlen_q}
            check(step([100, 65, 0], **fields), config(), splits=3)
    check(step([100, 65, 64], **fields), LAST, splits=3)
    knobs = {k: v for k, v in config("group").knobs if k != "SWAP"} | {"BLOCK_M": 16}
    latent = {"head_dim": 576, "head_dim_v": 512, "dtype": "bf16", **masked, "seqlen_q": 2}
    for page_size in (0, 16):
        inputs = step([100, 65, 33, 0], 4, 1, page_size=page_size, **latent)
        check(inputs, Config.of("decode_latent", knobs), splits=3)


@each_choice
def test_ids_may_be_any_numbers_in_any_order(config: Config) -> None:
    lengths, width = [100, 66, 5], 128
    for seqlen_q in (1, 3):
        inputs = step(lengths, dtype="fp32", seqlen_q=seqlen_q, seqlen_k=width, **DOCUMENTS)
        generator = torch.Generator().manual_seed(seqlen_q)
        ids = torch.randint(-3, 3, (3, width), generator=generator).int() * (2**31 // 3)
        check(replace(inputs, document_ids=ids), config, splits=3)

        def seen(
            b: int, i: int, _: int, ids: torch.Tensor = ids, queries: int = seqlen_q
        ) -> list[int]:
            place = lengths[b] - queries + i
            return [j for j in range(place + 1) if ids[b, j] == ids[b, place]]

        expect_seen(replace(inputs, document_ids=ids), config, seen)


@each_choice
def test_a_prefix_is_seen_by_all_query_tokens_and_ends_with_its_sequence(config: Config) -> None:
    lengths = [100, 33, 64, 9]
    inputs = step(lengths, dtype="fp32", seqlen_k=128, **PREFIX)
    for prefix in ([98, 33, 10**9, 0], [100, 31, 62, 5], [-5, 29, -(2**31), 10]):
        told = torch.tensor(prefix, dtype=torch.int32)

        def seen(b: int, i: int, _: int, prefix: list[int] = prefix) -> list[int]:
            place = lengths[b] - 4 + i
            return [j for j in range(lengths[b]) if j <= place or j < prefix[b]]

        expect_seen(replace(inputs, prefix_lens=told), config, seen)
        check(replace(inputs, prefix_lens=told), config, splits=3)


@each_choice
def test_a_step_longer_than_its_sequence_sees_its_prefix_and_no_document(config: Config) -> None:
    """Tokens before all keys are of no document, and of a prefix they see what there is."""
    inputs = step([2, 0, 3], seqlen_k=32, **PREFIX)
    told = torch.tensor([1, 5, 3], dtype=torch.int32)
    check(replace(inputs, prefix_lens=told), config)
    _, lse = decode(replace(inputs, prefix_lens=told), config)
    assert torch.isinf(lse).all(dim=1).sum(dim=1).tolist() == [0, 4, 0]
    inputs = step([2, 0, 3], seqlen_q=4, **DOCUMENTS)
    check(inputs, config)
    out, lse = decode(inputs, config)
    assert torch.isinf(lse).all(dim=1).sum(dim=1).tolist() == [2, 4, 1]
    assert not out[:, 0].any()


@each_choice
def test_one_document_and_an_empty_prefix_change_no_bit(config: Config) -> None:
    for page_size in (0, 16):
        inputs = step([100, 0, 33], page_size=page_size, seqlen_q=3, **DOCUMENTS)
        assert inputs.document_ids is not None
        plain = replace(inputs.problem, masked_by="", density=0)
        alike = replace(inputs, document_ids=torch.full_like(inputs.document_ids, 7))
        expected = decode(replace(inputs, problem=plain, document_ids=None), config)
        assert same_bits(decode(alike, config), expected)
        inputs = step([100, 0, 33], page_size=page_size, **PREFIX)
        assert inputs.prefix_lens is not None
        plain = replace(inputs.problem, masked_by="", density=0)
        none = replace(inputs, prefix_lens=torch.zeros_like(inputs.prefix_lens))
        expected = decode(replace(inputs, problem=plain, prefix_lens=None), config)
        assert same_bits(decode(none, config), expected)


@each_choice
def test_ids_and_slots_past_a_length_and_other_documents_values_change_no_bit(
    config: Config,
) -> None:
    for seqlen_q in (1, 3):
        inputs = step([100, 33, 66], seqlen_q=seqlen_q, seqlen_k=128, **DOCUMENTS)
        ids, lengths = inputs.document_ids, inputs.cache_seqlens
        assert ids is not None and lengths is not None
        expected = decode(inputs, config)
        past = torch.arange(128)[None] >= lengths[:, None]
        for dead in (0, 2**30, *ids[0, 97:100].tolist()):
            other = replace(inputs, document_ids=ids.masked_fill(past, dead))
            assert same_bits(decode(other, config), expected)
        # rising ids: what lies before the documents of a step is not read
        first = ids.gather(1, (lengths - seqlen_q).long()[:, None])
        k, v = inputs.k.clone(), inputs.v.clone()
        k[ids < first], v[ids < first] = float("nan"), float("nan")
        assert bool((ids < first)[0].any())
        assert same_bits(decode(replace(inputs, k=k, v=v), config), expected)


@each_choice
@pytest.mark.parametrize("masked", [DOCUMENTS, PREFIX], ids=lambda fields: fields["masked_by"])
def test_of_chosen_pages_positions_are_those_of_the_whole_sequence(
    masked: dict, config: Config
) -> None:
    for seqlen_q in (2, 3) if masked is PREFIX else (1, 3):
        fields = {"pages": "chosen", "page_size": 16, "seqlen_k": 112, **masked}
        check(step([200, 1, 97], **{**fields, "seqlen_q": seqlen_q}, sinks=True), config, splits=3)


@each_choice
def test_masks_follow_the_key_and_not_its_page(config: Config) -> None:
    for masked in (DOCUMENTS, PREFIX):
        fields = {"page_size": 16, "seqlen_q": 3, **masked}
        p = problem(3, 4, 2, **fields)
        inputs = make_inputs(p, lengths=[100, 33, 64], poison=False)
        assert inputs.block_table is not None
        place = torch.arange(len(inputs.k)).flip(0)
        table = place[inputs.block_table.long()].int()
        moved = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
        assert same_bits(decode(moved, config), decode(inputs, config))


SIZES: dict[str, Any] = {"batch": 3, "seqlen_k": 128, "head_dim": 16, "dtype": "fp16"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """A module that no masks were tuned for, but documents beside a bias."""
    path = tmp_path_factory.mktemp("masks") / "attention_dispatch.py"
    biased = decode_of(page_size=16, **SIZES, bias=True, masked_by="documents", density=10)
    path.write_text(export([winner_of(p) for p in (decode_of(**SIZES), biased)]).text)
    return exported_module(path)


def made(seed: int = 0, **fields: Any) -> Inputs:
    p = decode_of(page_size=16, **{**SIZES, **fields})
    return make_inputs(p, seed, lengths=[100, 0, 33])


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    on = inputs.modifiers
    given = {"block_table": inputs.block_table, "return_lse": True, "window": on.window}
    names = ("document_ids", "prefix_lens", "mask", "density", "sinks", "bias")
    given |= {name: getattr(on, name) for name in names}
    read = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens)
    return module.decode(*read, **{**given, **changed})


def expect_right(module: ModuleType, inputs: Inputs, **changed: Any) -> None:
    verdict = Budget(inputs).judge(*call(module, inputs, **changed))
    assert verdict.correct, verdict.reason


def test_a_module_serves_masks_that_nobody_tuned_and_calls_of_one_form_follow_their_values(
    exported: ModuleType,
) -> None:
    for seed in range(3):
        for fields in (DOCUMENTS, PREFIX, {**DOCUMENTS, "seqlen_q": 3}, {"seqlen_q": 4}):
            expect_right(exported, made(seed, **fields))
        expect_right(exported, made(seed, **DOCUMENTS, window_left=20, sinks=True))
        expect_right(exported, made(seed, **DOCUMENTS, bias=True), density=None)
    assert exported.explain(call, exported, made(**PREFIX))["how"] == "default"


def test_a_prefix_of_one_query_token_changes_nothing(exported: ModuleType) -> None:
    inputs, prefix = made(), torch.tensor([100, 3, 10**6], dtype=torch.int32)
    for _ in range(2):  # planned, then by its form
        assert same_bits(call(exported, inputs, prefix_lens=prefix), call(exported, inputs))
    row = replace(inputs, q=inputs.q[:, 0])
    out, _ = call(exported, row, prefix_lens=prefix)
    assert torch.equal(out, call(exported, inputs)[0][:, 0])


def test_steps_of_documents_and_prefixes_are_one_operator_in_a_graph(exported: ModuleType) -> None:
    operators = getattr(torch.ops, exported.operator_namespace())
    for inputs in (made(**DOCUMENTS), made(**PREFIX)):

        def layer(q: torch.Tensor, inputs: Inputs = inputs) -> Any:
            return call(exported, replace(inputs, q=q))

        compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
        assert same_bits(compiled(inputs.q), layer(inputs.q))
        read = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens)
        options = {"block_table": inputs.block_table, "density": 7, "sinks": torch.ones(8)}
        options |= {name: getattr(inputs, name) for name in ("document_ids", "prefix_lens")}
        for name, out in (("decode_masked", ()), ("decode_masked_out", (inputs.q.clone(),))):
            checks = torch.library.opcheck(getattr(operators, name).default, (*read, *out), options)
            assert set(checks.values()) == {"SUCCESS"}


def test_what_was_not_tuned_and_what_is_out_of_range_are_told(exported: ModuleType) -> None:
    message = "decode: no kernels for bias with prefix with paged with queries: none were tuned"
    with pytest.raises(exported.ProblemError, match=message):
        call(exported, made(**PREFIX, bias=True))
    inputs = made(**DOCUMENTS, pages="chosen", seqlen_k=32)
    given = {"page_positions": inputs.page_positions, "check": True}
    expect_right(exported, inputs, **given)
    assert inputs.document_ids is not None
    short = inputs.document_ids[:, :99]
    with pytest.raises(exported.ProblemError, match=r"cache_seqlens holds 100, not in 0\.\.99"):
        call(exported, inputs, **given, document_ids=short)
