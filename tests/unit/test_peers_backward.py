"""Peers in backward: gradients of their forwards are right, or each says what it has not."""

import fake_peers
import pytest
from making import backward_of

from autoflash.accuracy import GradientBudget
from autoflash.inputs import make_inputs
from autoflash.peers import PEERS, Unavailable
from autoflash.peers.contender import told


@pytest.fixture(autouse=True)
def libraries(monkeypatch):
    fake_peers.install(monkeypatch)


def verdict_of(problem, peer):
    """Why gradients of one of two sets of inputs are not right, or not there; "" where they are."""
    inputs = [make_inputs(problem, seed, poison=False) for seed in range(2)]
    try:
        made = PEERS["backward"][peer](inputs)
    except Unavailable as error:
        return told(error)
    reasons = [GradientBudget(one).judge(made.out(i)).reason for i, one in enumerate(inputs)]
    return next(filter(None, reasons), "")


# FlexAttention has no backward on CPUs
CASES = (
    ({}, {}),
    ({"layout": "bhsd", "causal": False}, {}),
    ({"softcap": True, "window_left": 9}, {"math": "it has no windows and no softcap"}),
    ({"bias": True}, {"flash_attention_2": "it has no bias"}),
    ({"alibi": True}, {"math": "it has no ALiBi of given slopes"}),
    ({"layout": "thd", "lengths": "ragged"}, {"math": "its adapter passes no packed sequences"}),
)


@pytest.mark.parametrize("peer", ["math", "flash_attention_2", "flash_attention_4"])
@pytest.mark.parametrize(("changes", "reasons"), CASES, ids=str)
def test_gradients_of_a_peer_are_right_or_it_says_what_it_has_not(peer, changes, reasons):
    problem = backward_of(batch=2, seqlen_q=48, seqlen_k=48, head_dim=32, **changes)
    of_four = {"bias": "its adapter passes no bias"}
    of_four["alibi"] = "its adapter passes no ALiBi of given slopes"
    four = next((of_four[name] for name in changes if name in of_four), "")
    expected = four if peer == "flash_attention_4" else reasons.get(peer, "")
    assert verdict_of(problem, peer) == expected


def test_gradients_that_must_be_equal_bit_by_bit_have_no_peer():
    problem = backward_of(seqlen_q=16, seqlen_k=16, deterministic=True)
    for peer in ("math", "flex_attention", "flash_attention_2", "flash_attention_4"):
        assert verdict_of(problem, peer) == "its adapter passes no deterministic gradients"


def test_who_has_a_backward_stands_beside_it():
    told_of = {"cudnn", "flash", "flex_attention", "flash_attention_2", "flash_attention_4"}
    assert set(PEERS["backward"]) == told_of | {"math"}
