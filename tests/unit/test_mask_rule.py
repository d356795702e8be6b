"""Custom masks: what may stand in a rule, its one spelling, and what of it reaches a kernel."""

import ast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autoflash.problem import Problem, ProblemError
from autoflash.rule import in_triton
from autoflash.runtime.mask_rule import RULE_NAMES, normal_rule, rule_digest
from autoflash.visibility import in_torch

WRONG = [
    ("", "is not an expression"),
    ("q_idx >=", "is not an expression"),
    ("x = q_idx > 0", "is not an expression"),
    ("q_idx > 0; h > 0", "is not an expression"),
    ("q_idx - kv_idx", "is a number, not true or false"),
    ("q_idx > k", "k is none of b, h, q_idx, kv_idx"),
    ("q_idx.device > 0", "q_idx.device may not stand in a mask"),
    ("q_idx[0] > 0", "may not stand"),
    ("open('f') > q_idx", "may not stand"),
    ("__import__('os') > q_idx", "may not stand"),
    ("print(q_idx) > 0", "may not stand"),
    ("(lambda: 1)() > q_idx", "may not stand"),
    ("[q_idx for b in h] > 0", "may not stand"),
    ("q_idx > 1.5", "1.5 may not stand"),
    ("q_idx > True", "True may not stand"),
    ("q_idx > 'a'", "may not stand"),
    ("q_idx ** 2 > kv_idx", "may not stand"),
    ("q_idx << 2 > kv_idx", "may not stand"),
    ("q_idx / 2 > kv_idx", "may not stand"),
    ("q_idx is kv_idx", "is no comparison of numbers"),
    ("q_idx // h == 0", "divides by something else than a positive number"),
    ("q_idx % 0 == 0", "divides by something else than a positive number"),
    ("q_idx % -3 == 0", "divides by something else than a positive number"),
    ("not q_idx", "q_idx is not true or false"),
    ("q_idx > 0 and kv_idx", "kv_idx is not true or false"),
    ("(q_idx > 0) + 1 > 0", "q_idx > 0 is not a number"),
    ("(q_idx > 0) & 1", "1 is not true or false"),
    ("1 > 0", "names none of b, h, q_idx, kv_idx"),
    ("max(1, 2) > q_idx", "names none of"),
    ("min(q_idx, 1, 2) > 0", "min takes 2"),
    ("q_idx > 4294967296", "4294967296 does not fit in 32 bits"),
    ("q_idx > 0 " + "and q_idx > 0 " * 100, "more than 1000 characters"),
]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_what_may_not_stand_in_a_rule_is_told(text, reason):
    with pytest.raises(ValueError, match=reason.replace("(", r"\(")):
        normal_rule(text)


def test_spellings_of_a_rule_are_one_problem():
    def of(rule):
        return Problem("prefill", "bf16", 1, 1, 1, 64, 8, 8, mask=rule)

    assert of("(q_idx>=kv_idx)") == of("  q_idx >= kv_idx ")
    assert of("q_idx >= kv_idx").switches != of("q_idx > kv_idx").switches
    with pytest.raises(ProblemError, match="mask 'q_idx': is a number"):
        of("q_idx")


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("q_idx >= kv_idx", "q_idx >= kv_idx"),
        ("0 <= q_idx - kv_idx < 8", "(0 <= q_idx - kv_idx) & (q_idx - kv_idx < 8)"),
        ("not h == 1 or b < 2", "~(h == 1) | (b < 2)"),
        ("q_idx // 64 == kv_idx // 64", "floor_quotient(q_idx, 64) == floor_quotient(kv_idx, 64)"),
        ("(q_idx - kv_idx) % 3 == 0", "floor_remainder(q_idx - kv_idx, 3) == 0"),
        ("min(abs(q_idx), 4) > h", "tl.minimum(tl.abs(q_idx), 4) > h"),
    ],
)
def test_a_kernel_has_the_rule_in_its_own_words(rule, text):
    assert in_triton(normal_rule(rule)) == text


numbers = st.deferred(
    lambda: (
        st.sampled_from(RULE_NAMES)
        | st.builds("({} {} {})".format, numbers, st.sampled_from("+-"), st.integers(0, 9))
        | st.builds("({} {} {})".format, numbers, st.sampled_from(["//", "%"]), st.integers(1, 9))
        | st.builds("abs({})".format, numbers)
        | st.builds("{}({}, {})".format, st.sampled_from(["min", "max"]), numbers, numbers)
    )
)
comparisons = st.builds(
    "({} {} {})".format, numbers, st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbers
)
rules = st.deferred(
    lambda: (
        comparisons
        | st.builds("({} {} {})".format, rules, st.sampled_from(["and", "or", "&", "|"]), rules)
        | st.builds("(not {})".format, rules)
    )
)


@given(rules.filter(lambda rule: len(rule) < 500), st.lists(st.integers(0, 40), min_size=4))
def test_the_reference_means_by_a_rule_what_python_does(rule, values):
    """Rules have no names but these four here, so Python may evaluate them."""
    normal = normal_rule(rule)
    assert normal_rule(normal) == normal and len(rule_digest(normal)) == 8
    given_values: dict[str, int] = dict(zip(RULE_NAMES, values))
    tensors = {name: torch.tensor(v, dtype=torch.int32) for name, v in given_values.items()}
    assert bool(in_torch(normal, tensors)) is bool(eval(rule, {}, given_values))
    ast.parse(in_triton(normal))
