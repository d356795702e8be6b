"""Rules of custom masks in decode: by query tokens of the step and by key positions."""

import math
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from decoding import check, config, decode, each_choice, problem, same_bits
from making import decode_of, winner_of

from autoflash.accuracy import Budget
from autoflash.config import Config
from autoflash.export import export
from autoflash.inputs import Inputs, make_inputs
from autoflash.runtime.mask_rule import normal_rule, rule_digest
from autoflash.subjects import exported_module

LAST = Config.of("decode_last", {k: v for k, v in config("group").knobs if k != "COMBINE_WARPS"})
# floors negative numbers, and knows heads and sequences apart
RULE = "(q_idx - kv_idx) // 8 % 3 != 1 and not (h == 1 and b <= 0) or abs(q_idx - kv_idx) < h + 3"
HIDING = "h != 2 and (b != 0 or kv_idx >= 70) and not (b == 1 and q_idx == 1) and b != 2"
ALL: dict[str, Any] = {"window_left": 40, "softcap": True, "sinks": True}
EDGES = [100, 0, 1, 15, 16, 17, 31, 32, 33, 64]  # of pages of 16 and of tiles of 32

# numpy warns of the -inf that the lse of a row without a visible key is
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:divide by zero encountered"),
]


def ruled(
    lengths: list[int],
    num_heads: int = 3,
    num_kv_heads: int = 1,
    mask: str = RULE,
    **fields: Any,
) -> Inputs:
    p = problem(len(lengths), num_heads, num_kv_heads, mask=mask, **fields)
    return make_inputs(p, lengths=lengths)


def places_seen(rule: str, b: int, h: int, i: int, keys: int, seqlen_q: int) -> list[int]:
    """The keys up to its own that query token `i` of a step sees, as Python reads the rule."""
    upto = range(max(0, keys - seqlen_q + i + 1))
    given = {"b": b, "h": h, "q_idx": i}
    return [j for j in upto if eval(rule, {}, given | {"kv_idx": j})]


def counting(inputs: Inputs) -> Inputs:
    """With K = 0, `lse` is the logarithm of how many keys are seen; V = [1, j] tells which."""
    k, v = inputs.k * 0, inputs.v * 0
    v[..., 0], v[..., 1] = 1.0, torch.arange(v.shape[1], dtype=v.dtype)[:, None]
    return replace(inputs, k=k.nan_to_num(), v=v)


@each_choice
def test_lengths_around_every_edge_of_tiles_and_pages_are_right(config: Config) -> None:
    for seqlen_q, page_size in ((1, 16), (4, 0)):
        check(ruled(EDGES, 4, 2, page_size=page_size, seqlen_q=seqlen_q), config, splits=3)


@each_choice
@pytest.mark.parametrize(("added", "seqlen_q"), [("alibi", 3), ("bias", 1)])
def test_a_rule_meets_windows_softcap_sinks_and_what_is_added(
    added: str, seqlen_q: int, config: Config
) -> None:
    fields = {"seqlen_q": seqlen_q, "page_size": 16 * (seqlen_q == 1), added: True, **ALL}
    check(ruled([100, 0, 33, 1], 6, 2, **fields), config)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_programs_that_merge_sixteen_queries_and_other_types_are_right(dtype: str) -> None:
    for chosen, seqlen_q in ((LAST, 16), (config(), 1)):
        fields = {"head_dim": 40, "dtype": dtype, "seqlen_q": seqlen_q}
        check(ruled([100, 17, 64], 6, 2, **fields), chosen, splits=3)


def test_quantised_caches_and_latent_attention_are_right() -> None:
    for kv_dtype, kv_scales in (("fp8_e4m3", "head"), ("int8", "token")):
        fields = {"kv_dtype": kv_dtype, "kv_scales": kv_scales, "head_dim": 32, "page_size": 16}
        check(ruled([100, 5, 64], 4, 2, **fields), config(), splits=3)
    check(ruled([100, 5, 64], 4, 2, **fields, seqlen_q=3), LAST, splits=3)
    check(ruled([100, 70, 64], 4, 2, HIDING, **fields, seqlen_q=3), config(), splits=3)
    knobs = {k: v for k, v in config("group").knobs if k != "SWAP"} | {"BLOCK_M": 16}
    latent = {"head_dim": 576, "head_dim_v": 512, "dtype": "bf16", "seqlen_q": 2}
    check(ruled([100, 0, 33], **latent), Config.of("decode_latent", knobs), splits=3)


@each_choice
def test_the_keys_seen_are_those_for_which_python_says_that_the_rule_holds(config: Config) -> None:
    for seqlen_q in (1, 3):
        inputs = counting(ruled([100, 33, 2], 4, 2, dtype="fp32", seqlen_q=seqlen_q))
        out, lse = decode(inputs, config, splits=3)
        for b, keys in enumerate([100, 33, 2]):
            for h in range(4):
                for i in range(seqlen_q):
                    seen = places_seen(RULE, b, h, i, keys, seqlen_q)
                    assert round(float(lse[b, h, i].exp())) == len(seen)
                    assert round(float(out[b, i, h, 1]) * len(seen)) == sum(seen)


@pytest.mark.parametrize(
    ("config", "sinks"), [(config("split", 0), False), (LAST, True), (config("group", 1), False)]
)
def test_rows_and_parts_of_which_all_keys_are_hidden_are_as_empty_ones(
    config: Config, sinks: bool
) -> None:
    """Of one sequence all but the last part, of others whole heads, queries or everything."""
    for seqlen_q in (1, 3):
        inputs = ruled([100, 64, 33], 4, 2, HIDING, seqlen_q=seqlen_q, sinks=sinks)
        check(inputs, config, splits=4)
        out, lse = decode(inputs, config, splits=4)
        empty = torch.zeros(3, 4, seqlen_q, dtype=torch.bool)
        empty[:, 2] = empty[2] = empty[1, :, 1:2] = True
        assert (out.transpose(1, 2)[empty] == 0).all()
        if inputs.sinks is None:
            assert torch.equal(lse == -math.inf, empty)
        else:
            sink = inputs.sinks[None, :, None].expand_as(lse)
            torch.testing.assert_close(lse[empty], sink[empty], rtol=2**-20, atol=2**-20)


@each_choice
def test_a_rule_counts_query_tokens_from_the_first_of_the_step(config: Config) -> None:
    inputs = ruled([100, 40], mask="kv_idx == q_idx + 7", seqlen_q=3, dtype="fp32")
    out, lse = decode(inputs, config)
    for b in range(2):
        for h in range(3):
            torch.testing.assert_close(out[b, :, h], inputs.v[b, 7:10, 0])
            expected = (inputs.q[b, :, h] * inputs.k[b, 7:10, 0]).sum(dim=1) / 4
            torch.testing.assert_close(lse[b, h], expected)


@each_choice
def test_a_rule_that_hides_nothing_changes_no_bit(config: Config) -> None:
    for seqlen_q, page_size in ((1, 16), (3, 0)):
        inputs = ruled([100, 0, 33], mask="kv_idx >= 0", seqlen_q=seqlen_q, page_size=page_size)
        plain = replace(inputs, problem=replace(inputs.problem, mask=""))
        assert same_bits(decode(inputs, config), decode(plain, config))


@each_choice
def test_a_rule_may_leave_what_a_window_would(config: Config) -> None:
    inputs = ruled([100], mask="kv_idx >= 77 + q_idx", seqlen_q=3, dtype="fp32")
    p = replace(inputs.problem, mask="", window_left=20)
    verdict = Budget(replace(inputs, problem=p)).judge(*decode(inputs, config))
    assert verdict.correct, verdict.reason


@each_choice
def test_a_rule_follows_the_key_and_not_its_page(config: Config) -> None:
    inputs = make_inputs(
        problem(3, 4, 2, mask=RULE, page_size=16), lengths=[100, 33, 64], poison=False
    )
    assert inputs.block_table is not None
    place = torch.arange(len(inputs.k)).flip(0)
    table = place[inputs.block_table.long()].int()
    moved = replace(inputs, k=inputs.k.flip(0), v=inputs.v.flip(0), block_table=table)
    assert same_bits(decode(moved, config), decode(inputs, config))


@each_choice
def test_of_chosen_pages_a_rule_is_of_positions_in_the_whole_sequence(config: Config) -> None:
    for seqlen_q in (1, 3):
        fields = {"pages": "chosen", "page_size": 16, "seqlen_k": 112, "seqlen_q": seqlen_q}
        check(ruled([200, 1, 97], 4, 2, **fields, sinks=True), config, splits=3)


OTHER = "kv_idx % 2 == h % 2"
SIZES: dict[str, Any] = {"batch": 3, "seqlen_k": 128, "head_dim": 16, "dtype": "fp16"}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path = tmp_path_factory.mktemp("rules") / "attention_dispatch.py"
    tuned = [decode_of(mask=mask, page_size=16, **SIZES) for mask in (RULE, OTHER)]
    latent = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "dtype": "bf16"}
    tuned.append(decode_of(mask=OTHER, **{**SIZES, **latent}))
    path.write_text(export([winner_of(p) for p in tuned]).text)
    return exported_module(path)


def call(module: ModuleType, inputs: Inputs, **changed: Any) -> Any:
    read = (inputs.q, inputs.k, None if inputs.problem.latent else inputs.v, inputs.cache_seqlens)
    given = {"block_table": inputs.block_table, "mask": inputs.problem.mask, "return_lse": True}
    return module.decode(*read, **{**given, **changed})


def test_the_exported_module_serves_its_rules_each_by_its_own_kernels(exported: ModuleType) -> None:
    for seed, mask in enumerate((RULE, OTHER, RULE, f" ({OTHER}) ")):
        p = decode_of(mask=mask, page_size=16, **SIZES)
        inputs = make_inputs(p, seed, lengths=[100, 0, 33])
        verdict = Budget(inputs).judge(*call(exported, inputs, mask=mask))
        assert verdict.correct, verdict.reason
        assert exported.explain(call, exported, inputs)["problem"].mask == normal_rule(mask)
    latent = {"head_dim": 576, "head_dim_v": 512, "num_kv_heads": 1, "dtype": "bf16"}
    inputs = make_inputs(decode_of(mask=OTHER, **{**SIZES, **latent}), lengths=[100, 1, 33])
    assert Budget(inputs).judge(*call(exported, inputs)).correct
    digests = [f"mask_{rule_digest(normal_rule(mask))}" for mask in (RULE, OTHER)]
    names = [each for each in exported.installed().tables.names if each[-1] in digests]
    paged = [("decode", "paged", digest) for digest in digests]
    assert sorted(names) == sorted([*paged, ("decode_latent", digests[1])])


def test_a_rule_is_an_argument_of_the_operator_in_one_graph(exported: ModuleType) -> None:
    inputs = make_inputs(decode_of(mask=OTHER, page_size=16, **SIZES), lengths=[100, 0, 33])

    def layer(q: torch.Tensor) -> Any:
        return call(exported, replace(inputs, q=q))

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(inputs.q), layer(inputs.q))
    operators = getattr(torch.ops, exported.operator_namespace())
    read, given = (inputs.q, inputs.k, inputs.v, inputs.cache_seqlens), inputs.block_table
    for name, out in (("decode_masked", ()), ("decode_masked_out", (inputs.q.clone(),))):
        operator, options = getattr(operators, name).default, {"block_table": given}
        checks = torch.library.opcheck(operator, (*read, *out, OTHER), options)
        assert set(checks.values()) == {"SUCCESS"}


def test_a_rule_that_was_not_tuned_and_what_is_none_are_told(exported: ModuleType) -> None:
    inputs = make_inputs(decode_of(mask="kv_idx > 5", page_size=16, **SIZES), lengths=[9, 0, 33])
    with pytest.raises(
        exported.ProblemError, match=r"decode: no kernels for paged with mask_.*: n"
    ):
        call(exported, inputs)
    for mask, told in (("kv_idx", "mask 'kv_idx': is a number"), (3, "must be an expression")):
        with pytest.raises(exported.ProblemError, match=f"decode: .*{told}"):
            call(exported, inputs, mask=mask)
