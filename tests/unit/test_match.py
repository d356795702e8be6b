"""One table says what every field and argument means for a match; tuner and module share it."""

import inspect

import pytest

from autoflash.runtime.dispatch import decode, prefill
from autoflash.runtime.match import (
    MATCH_RULES,
    match_bucket,
    match_distance,
    match_key,
    match_serves,
    match_sizes,
)
from autoflash.runtime.problem import MODIFIERS, PROBLEM_FIELDS, Problem


def prefill_of(**changes) -> Problem:
    fields = {
        "op": "prefill",
        "dtype": "bf16",
        "batch": 1,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "seqlen_q": 512,
        "seqlen_k": 512,
    }
    return Problem(**{**fields, **changes})


def decode_of(**changes) -> Problem:
    return prefill_of(**{"op": "decode", "seqlen_q": 1, **changes})


def test_every_field_of_problem_and_every_argument_stands_in_the_table():
    arguments = {*inspect.signature(prefill).parameters, *inspect.signature(decode).parameters}
    assert arguments | set(PROBLEM_FIELDS) == set(MATCH_RULES)


def test_a_field_that_matches_exactly_changes_the_key():
    for field, value in (
        ("dtype", "fp16"),
        ("out_dtype", "fp32"),
        ("kv_dtype", "fp16"),
        ("head_dim", 128),
        ("head_dim_v", 32),
        ("causal", False),
        ("layout", "bhsd"),
        ("layout", "thd"),
        ("deterministic", True),
        ("batch_invariant", True),
        ("num_heads", 2),  # another group size
        ("kv_dtype", "int8"),
    ):
        assert match_key(prefill_of(**{field: value})) != match_key(prefill_of()), field
    assert match_key(decode_of(page_size=16)) != match_key(decode_of())
    assert match_key(decode_of(kv_layout="hnd")) != match_key(decode_of())
    assert match_key(decode_of(seqlen_q=2)) != match_key(decode_of())
    assert match_key(decode_of()) != match_key(prefill_of(seqlen_q=1))
    for modifier in MODIFIERS:
        assert match_key(prefill_of(**{modifier: True})) != match_key(prefill_of()), modifier
    assert match_key(prefill_of(window_left=128)) != match_key(prefill_of())
    per_token = decode_of(kv_dtype="int8", kv_scales="token")
    assert match_key(per_token) != match_key(decode_of(kv_dtype="int8"))


def test_sizes_change_the_sizes_and_not_the_key():
    for field, value in (
        ("seqlen_q", 600),
        ("seqlen_k", 600),
        ("batch", 2),
        ("lengths", "ragged"),
    ):
        assert match_key(prefill_of(**{field: value})) == match_key(prefill_of()), field
        assert match_sizes(prefill_of(**{field: value})) != match_sizes(prefill_of()), field
    paged = decode_of(page_size=16)
    assert match_key(paged) == match_key(decode_of(page_size=64))
    for pages in ("contiguous", "shared"):
        other = decode_of(page_size=16, pages=pages)
        assert match_key(other) == match_key(paged) and match_sizes(other) != match_sizes(paged)


def test_the_group_size_counts_and_not_the_number_of_heads():
    twice = prefill_of(num_heads=16, num_kv_heads=4)
    assert match_key(twice) == match_key(prefill_of())
    assert match_sizes(twice) == match_sizes(prefill_of(batch=2))


def test_a_bucket_ends_at_each_power_of_two():
    def bucket(seqlen_k: int) -> int:
        return match_bucket(match_sizes(prefill_of(seqlen_k=seqlen_k))).seqlen_k

    assert [bucket(n) for n in (1, 2, 3, 4, 5, 512, 513, 1024)] == [1, 2, 4, 4, 8, 512, 1024, 1024]
    for n in range(1, 4098):
        assert bucket(n) / 2 < n <= bucket(n)


def test_the_distribution_that_was_tuned_is_nearer_than_another():
    asked = match_sizes(decode_of(page_size=16, lengths="ragged", pages="shared"))
    distances = [
        match_distance(asked, match_sizes(decode_of(page_size=16, lengths=lengths, pages=pages)))
        for lengths in ("ragged", "equal")
        for pages in ("shared", "permuted", "contiguous")
    ]
    assert distances == [0, 0.5, 0.5, 0.5, 1, 1]


@pytest.mark.parametrize(
    ("tuned", "lengths", "schedule", "batch", "serves"),
    [
        ("equal", "equal", "split", 8, True),
        ("equal", "ragged", "split", 8, False),
        ("equal", "captured", "split", 8, False),
        ("equal", "ragged", "group", 8, True),
        ("equal", "ragged", "split", 1, True),  # of one sequence all lengths are equal
        ("ragged", "equal", "split", 8, True),
        ("ragged", "ragged", "split", 8, True),
        ("captured", "ragged", "split", 8, True),
    ],
)
def test_a_schedule_that_cuts_sequences_alike_serves_ragged_ones_where_it_was_tuned_for_them(
    tuned, lengths, schedule, batch, serves
):
    sizes = match_sizes(decode_of(batch=16, lengths=tuned))
    called = decode_of(batch=batch, lengths=lengths)
    assert match_serves(called, sizes, {"SCHEDULE": schedule}) == serves


def test_what_was_tuned_for_a_graphs_replays_serves_captured_calls_first():
    asked = match_sizes(decode_of(lengths="captured"))
    distances = [
        match_distance(asked, match_sizes(decode_of(lengths=lengths)))
        for lengths in ("captured", "ragged", "equal")
    ]
    assert distances == [0, 0.5, 0.5]


def test_a_window_is_as_near_as_its_widths_and_an_open_side_as_wide_as_the_keys():
    def distance(*windows: tuple[int, int]) -> float | None:
        one, other = (
            prefill_of(causal=False, window_left=left, window_right=right)
            for left, right in windows
        )
        assert match_key(one) == match_key(other)
        return match_distance(match_sizes(one), match_sizes(other))

    assert distance((64, 64), (64, 64)) == 0
    assert distance((64, 64), (128, 32)) == 2
    assert distance((256, 64), (-1, 64)) == 1  # of 512 keys
    assert distance((16, 64), (256, 64)) is None
    causal = match_sizes(prefill_of(window_left=64))
    assert (causal.keys_before, causal.keys_after) == (64, 0)
    assert match_bucket(causal._replace(keys_before=65)).keys_before == 128


def test_distance_is_in_doublings_and_ends_at_a_factor_of_eight():
    near, far = match_sizes(prefill_of(seqlen_k=4096)), match_sizes(prefill_of(seqlen_k=4097))
    here = match_sizes(prefill_of())
    assert match_distance(here, here) == 0
    assert match_distance(here, near) == 3
    assert match_distance(here, far) is None
    assert match_distance(near, here) == 3
