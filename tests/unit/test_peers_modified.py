"""Peers under windows, modifiers and packing: each is right, or says what it has not."""

from dataclasses import replace

import fake_peers
import pytest
import torch
from making import decode_of, prefill_of
from torch.nn.attention import flex_attention as torch_flex

from autoflash.accuracy import Budget
from autoflash.inputs import make_inputs
from autoflash.peers import PEERS, Unavailable
from autoflash.peers.contender import told

PREFILLS = {
    "window": {"window_left": 9},
    "right": {"causal": False, "window_left": 9, "window_right": 5},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "window and sinks": {"window_left": 9, "sinks": True, "layout": "bhsd"},
    "packed": {"layout": "thd", "lengths": "ragged"},
    "packed window": {"layout": "thd", "lengths": "ragged", "window_left": 9},
    "prefix": {"masked_by": "prefix", "density": 40},
}
DECODES = {
    "window": {"window_left": 9},
    "softcap": {"softcap": True},
    "alibi": {"alibi": True},
    "bias": {"bias": True},
    "sinks": {"sinks": True},
    "queries": {"window_left": 9, "softcap": True, "seqlen_q": 3},
    "custom": {"mask": "kv_idx % 2 == 0"},
}
NO_SLOPES = "it has no ALiBi of given slopes"
NO_WINDOW = dict.fromkeys(("window", "right", "packed window"), "it has no windows")
NO_SINKS = {"sinks": "it has no sinks", "window and sinks": "it has no sinks"}
NO_PREFIX = {"prefix": "it has no prefixes"}
SDPA = {
    **(NO_WINDOW | NO_SINKS | NO_PREFIX),
    "softcap": "it has no softcap",
    "alibi": NO_SLOPES,
    "window and sinks": "it has no windows and no sinks",
    "packed": "its adapter passes no packed sequences",
}
# Why not, by peer; what is not here it does.
IN_PREFILL = {
    "math": SDPA,
    "flash": SDPA | {"bias": "it has no bias"},
    "flex_attention": {
        "packed": "its adapter passes no packed sequences",
        "packed window": "its adapter passes no packed sequences",
    },
    "flash_attention_2": {
        **(NO_SINKS | NO_PREFIX),
        "bias": "it has no bias",
    },
    "flash_attention_3": {**NO_PREFIX, "alibi": NO_SLOPES, "bias": "it has no bias"},
    "flash_attention_4": {
        "alibi": "its adapter passes no ALiBi of given slopes",
        "bias": "its adapter passes no bias",
        "prefix": "its adapter passes no prefixes",
    },
    "flashinfer": {
        **(NO_SINKS | NO_PREFIX),
        "right": "it has no windows to the right",
        "alibi": NO_SLOPES,
        "bias": "it has no bias",
    },
    "xformers": {
        **(NO_SINKS | NO_PREFIX),
        "window": "its adapter passes no windows",
        "right": "its adapter passes no windows",
        "softcap": "it has no softcap",
        "alibi": NO_SLOPES,
        "bias": "its adapter passes no bias",
        "packed": "its adapter passes no packed sequences",
        "packed window": "its adapter passes no windows and no packed sequences",
    },
}
NO_BIAS = {"bias": "it has no bias", "custom": "it has no custom masks"}
IN_DECODE = {
    "flash_attention_2": NO_BIAS | NO_SINKS,
    "flash_attention_3": NO_BIAS | {"alibi": NO_SLOPES},
    "flash_attention_4": {
        "alibi": "its adapter passes no ALiBi of given slopes",
        "bias": "its adapter passes no bias",
        "custom": "its adapter passes no custom masks",
    },
    "flashinfer": NO_BIAS | NO_SINKS | {"alibi": NO_SLOPES},
    "vllm_triton": NO_BIAS | {"alibi": "it has a slope for each head, none for each sequence's"},
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    fake_peers.install(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, dynamic: function)
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def verdict_of(problem, peer):
    """Why the peer is not right on any of two sets of inputs, or not there; "" where it is."""
    inputs = [make_inputs(problem, seed, poison=False) for seed in range(2)]
    try:
        made = PEERS[problem.op][peer](inputs)
    except Unavailable as error:
        return told(error)
    reasons = [Budget(one).judge(made.out(i), None).reason for i, one in enumerate(inputs)]
    return next(filter(None, reasons), "")


@pytest.mark.parametrize("case", PREFILLS)
@pytest.mark.parametrize("peer", IN_PREFILL)
def test_a_peer_in_prefill_is_right_or_says_what_it_has_not(peer, case):
    problem = prefill_of(batch=2, seqlen_q=48, seqlen_k=48, **PREFILLS[case])
    assert verdict_of(problem, peer) == IN_PREFILL[peer].get(case, "")


@pytest.mark.parametrize("case", DECODES)
@pytest.mark.parametrize("peer", IN_DECODE)
def test_a_peer_over_pages_is_right_or_says_what_it_has_not(peer, case):
    size = 256 if peer == "flash_attention_2" else 16
    problem = decode_of(batch=2, seqlen_k=64, page_size=size, lengths="ragged", **DECODES[case])
    assert verdict_of(problem, peer) == IN_DECODE[peer].get(case, "")


@pytest.mark.parametrize("peer", ["flash_attention_3", "flash_attention_4"])
@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "bhsd", "window_left": 9},
        {"kv_layout": "hnd", "sinks": True},
        {"layout": "thd", "softcap": True},
    ],
    ids=str,
)
def test_a_prefill_over_pages_is_given_its_tables(peer, changes):
    chunk = {"batch": 3, "seqlen_q": 16, "seqlen_k": 64, "page_size": 16, "lengths": "ragged"}
    assert verdict_of(prefill_of(**chunk, **changes), peer) == ""


def test_slopes_of_one_sequence_are_those_of_its_heads():
    assert verdict_of(decode_of(seqlen_k=64, page_size=16, alibi=True), "vllm_triton") == ""


def test_a_bias_is_the_mask_of_sdpa_with_causal_bottom_right():
    for changes in ({}, {"causal": False}, {"seqlen_q": 16}):
        problem = prefill_of(**{"seqlen_q": 48, "seqlen_k": 48, "bias": True, **changes})
        assert verdict_of(problem, "math") == ""
    contiguous = decode_of(batch=2, seqlen_k=64, bias=True)
    assert verdict_of(contiguous, "math") == ""
    assert verdict_of(contiguous, "flash") == "it has no bias"
    assert verdict_of(replace(contiguous, bias=False, window_left=9), "math") == "it has no windows"


def test_what_no_adapter_passes_is_told_by_each():
    pages = prefill_of(seqlen_q=16, seqlen_k=64, page_size=16)
    assert verdict_of(pages, "flashinfer") == "its adapter passes no prefill over pages"
    chosen = decode_of(seqlen_k=64, page_size=16, pages="chosen")
    assert verdict_of(chosen, "flashinfer") == "its adapter passes no chosen pages"
    dropped = prefill_of(seqlen_q=16, seqlen_k=16, dropout=True)
    assert verdict_of(dropped, "math") == "it has no dropout of a given seed"
