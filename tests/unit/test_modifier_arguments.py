"""Windows and modifiers that do not fit are refused in a line; what fits fills the problem."""

import pytest
import torch

from autoflash.runtime.arguments import check_cache_entries, decode_problem, prefill_problem
from autoflash.runtime.modifiers import Modifiers, modifiers_of
from autoflash.runtime.problem import Problem, ProblemError


def posed(causal=False, layout="bshd", **given) -> Problem:
    """The problem of 2 sequences, 4 heads of 2 KV heads, 5 queries and 7 keys."""
    q, k, v = (torch.zeros(2, *shape, 32).half() for shape in ((5, 4), (7, 2), (7, 2)))
    if layout == "bhsd":
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return prefill_problem(q, k, v, causal, layout, Modifiers(**given))


SLOPES, BIAS, SINKS = torch.zeros(4), torch.zeros(5, 7).half(), torch.zeros(4)
RNG = torch.tensor([3, 5])


@pytest.mark.parametrize("layout", ["bshd", "bhsd"])
def test_what_is_given_is_a_switch_of_the_problem(layout):
    assert posed(layout=layout).modifiers == () and not posed(layout=layout).windowed
    on = posed(layout=layout, softcap=30.0, alibi_slopes=SLOPES, sinks=SINKS)
    assert on.modifiers == ("softcap", "alibi", "sinks")
    assert posed(layout=layout, bias=BIAS, window=(2, 1)).switches == ("window", "bias")


@pytest.mark.parametrize(
    ("window", "causal", "kept"),
    [
        ((-1, -1), False, (-1, -1, False)),
        ((5, -1), False, (5, -1, False)),
        ((6, -1), False, (-1, -1, False)),  # the last query sees the first of 7 keys
        ((-1, 3), False, (-1, 3, False)),
        ((-1, 4), False, (-1, -1, False)),  # the first of 5 queries sees the last key
        ((2, 0), False, (2, -1, True)),
        ((2, 3), True, (2, -1, True)),
        ((9, 0), False, (-1, -1, True)),
    ],
)
def test_a_window_has_one_spelling_and_none_where_it_hides_nothing(window, causal, kept):
    p = posed(causal, window=window)
    assert (p.window_left, p.window_right, p.causal) == kept


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": (-2, 0)}, r"window \(-2, 0\) is not \(keys before, keys after\)"),
        ({"window": (0, -3)}, r"window \(0, -3\) is not \(keys before, keys after\)"),
        ({"window": (4,)}, r"window \(4,\) is not"),
        ({"window": (4.0, 0)}, "window .* is not"),
        ({"softcap": -1.0}, "softcap -1.0 is not from 0 upwards"),
        ({"softcap": float("nan")}, "softcap nan is not from 0 upwards"),
        ({"softcap": float("inf")}, "softcap inf is not from 0 upwards"),
        ({"alibi_slopes": SLOPES.half()}, "alibi_slopes is torch.float16, expected torch.float32"),
        ({"alibi_slopes": torch.zeros(2)}, r"alibi_slopes is \(2,\), expected \(4,\) or \(2, 4\)"),
        ({"bias": BIAS.float()}, "bias is torch.float32, expected torch.float16"),
        ({"bias": BIAS.T}, r"bias is \(7, 5\), which does not broadcast to \(2, 4, 5, 7\)"),
        ({"bias": BIAS[None, None, None]}, "which does not broadcast"),
        ({"bias": BIAS.bool()}, "bias is torch.bool, not bf16, fp16 or fp32"),
        ({"sinks": torch.zeros(2)}, r"sinks is \(2,\), expected \(4,\)"),
        ({"sinks": torch.zeros(8)[::2]}, "sinks must be contiguous"),
        ({"sinks": torch.zeros(4, device="meta")}, "sinks is on meta, q is on cpu"),
        ({"sinks": torch.zeros(4, requires_grad=True)}, "sinks requires grad"),
        ({"bias": BIAS, "alibi_slopes": SLOPES}, "alibi and bias exclude each other"),
        ({"dropout_p": 1.0, "rng": RNG}, "dropout_p 1.0 is not from 0 to less than 1"),
        ({"dropout_p": -0.1, "rng": RNG}, "dropout_p -0.1 is not from 0"),
        ({"dropout_p": float("nan"), "rng": RNG}, "dropout_p nan is not from 0"),
        ({"dropout_p": 0.1, "rng": (1, 2)}, "rng must be a tensor, given tuple"),
        ({"dropout_p": 0.1, "rng": RNG.int()}, r"rng is \(2,\) torch.int32, expected \(2,\)"),
        ({"dropout_p": 0.1, "rng": RNG[:1]}, r"rng is \(1,\) torch.int64, expected \(2,\)"),
        ({"dropout_p": 0.1, "rng": torch.empty(2).long().to("meta")}, "rng is on meta, q is on"),
        ({"dropout_p": 0.1, "rng": RNG.repeat(2)[::2]}, "rng must be contiguous"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(given, message):  # case B42
    with pytest.raises(ProblemError, match=message):
        posed(**given)


@pytest.mark.parametrize("strides", [(2**23, 1), (0, 2**23)])
def test_a_bias_whose_steps_do_not_fit_32_bits_within_a_tile_is_refused(strides):
    far = torch.empty_strided((5, 7), strides, dtype=torch.float16, device="meta")
    q = torch.zeros(2, 5, 4, 32, dtype=torch.float16, device="meta")
    k = torch.zeros(2, 7, 2, 32, dtype=torch.float16, device="meta")
    with pytest.raises(ProblemError, match="bias has queries or keys 8388608 elements apart"):
        prefill_problem(q, k, k, False, "bshd", Modifiers(bias=far))


@pytest.mark.parametrize("shape", [(5, 7), (1, 1, 1, 1), (2, 1, 5, 1), (4, 1, 7), (7,)])
def test_plans_take_slopes_and_biases_with_a_stride_for_every_axis(shape):
    bias = torch.randn(shape).half()
    taken = modifiers_of(posed(bias=bias), Modifiers(bias=bias))
    assert taken.bias is not None and taken.bias.shape == (2, 4, 5, 7)
    assert taken.bias.data_ptr() == bias.data_ptr()
    slopes = modifiers_of(posed(alibi_slopes=SLOPES), Modifiers(alibi_slopes=SLOPES)).alibi_slopes
    assert slopes is not None and slopes.stride() == (0, 1)
    causal = posed(True, window=(2, -1))
    assert modifiers_of(causal, Modifiers((2, -1))).window == (2, 0)


def stepped(seqlen_q=1, max_seqlen_k=None, table=None, **given) -> Problem:
    """The problem of 2 sequences, 4 heads of 2 KV heads, and caches of 48 tokens."""
    q, cache = torch.zeros(2, seqlen_q, 4, 32).half(), torch.zeros(2, 48, 2, 32).half()
    lengths = torch.tensor([7, 48], dtype=torch.int32)
    call = (table, "nhd", max_seqlen_k, "ragged", "permuted", None, None)
    return decode_problem(q, cache, cache, lengths, *call, Modifiers(**given))


def test_what_a_step_is_given_is_a_switch_of_the_problem():
    assert stepped().modifiers == () and not stepped().windowed
    on = stepped(softcap=30.0, alibi_slopes=SLOPES, sinks=SINKS, window=(5, 0))
    assert on.switches == ("window", "softcap", "alibi", "sinks")
    assert stepped(bias=torch.zeros(1, 48).half()).switches == ("bias",)
    assert stepped(window=(-1, 3)) == stepped()  # a step is causal: it has no keys to the right


@pytest.mark.parametrize("shape", [(), (48,), (4, 1, 1), (2, 1, 3, 48), (2, 4, 1, 1)], ids=str)
def test_a_bias_of_a_step_has_a_stride_for_every_axis_and_all_keys_of_the_cache(shape):
    """Fewer may be expected: those that come are biased too."""
    bias = torch.randn(shape).half()
    for most in (None, 7, 1):
        p = stepped(3, most, bias=bias)
        taken = modifiers_of(p, Modifiers(bias=bias)).bias
        assert taken is not None and taken.shape[:3] == (2, 4, 3) and taken.shape[3] >= 2
        assert taken.data_ptr() == bias.data_ptr()
        assert taken.stride(3) == (1 if shape[-1:] == (48,) else 0)


def test_a_bias_of_a_step_may_have_steps_of_any_size():
    far = torch.empty_strided((3, 48), (2**40, 2**33), dtype=torch.float16, device="meta")
    q, cache = (torch.zeros(2, n, 4, 32, device="meta").half() for n in (3, 48))
    lengths = torch.zeros(2, dtype=torch.int32, device="meta")
    call = (None, "nhd", None, "ragged", "permuted", None, None)
    p = decode_problem(q, cache, cache, lengths, *call, Modifiers(bias=far))
    taken = modifiers_of(p, Modifiers(bias=far)).bias
    assert taken is not None and taken.stride() == (0, 0, 2**40, 2**33)


def test_a_bias_of_chosen_pages_has_the_keys_of_whole_sequences():
    table = torch.zeros(2, 3, dtype=torch.int32)
    for keys in (1, 7, 1000):
        bias = torch.zeros(2, 1, 1, keys).half()
        p = stepped(table=table, page_positions=table, bias=bias)
        taken = modifiers_of(p, Modifiers(bias=bias)).bias
        assert taken is not None and taken.shape[3] == (p.seqlen_k if keys == 1 else keys)
    given = (p, torch.zeros(2, 48, 2, 32), torch.tensor([7, 1001]), table, table)
    check_cache_entries(*given)
    with pytest.raises(ProblemError, match=r"cache_seqlens holds 1001, not in 0\.\.1000"):
        check_cache_entries(*given, bias)


def test_a_window_of_a_step_is_kept_however_short_the_cache_is():
    for right in (-1, 0, 3):
        p = stepped(window=(47, right))
        assert (p.window_left, p.window_right, p.causal) == (47, -1, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"window": (-2, 0)}, r"decode: window \(-2, 0\) is not"),
        ({"softcap": -1.0}, "decode: softcap -1.0 is not from 0 upwards"),
        ({"alibi_slopes": torch.zeros(2)}, r"decode: alibi_slopes is \(2,\), expected"),
        ({"sinks": torch.zeros(2, 4)}, r"decode: sinks is \(2, 4\), expected \(4,\)"),
        ({"bias": torch.zeros(48)}, "decode: bias is torch.float32, expected torch.float16"),
        ({"bias": BIAS[0]}, r"bias is \(7,\), which does not broadcast to \(2, 4, 1, 48\)"),
        ({"bias": torch.zeros(2, 48).half()}, "which does not broadcast"),
        ({"bias": BIAS[0, :1], "alibi_slopes": SLOPES}, "alibi and bias exclude each other"),
    ],
)
def test_a_modifier_of_a_step_that_does_not_fit_is_refused(given, message):
    with pytest.raises(ProblemError, match=message):
        stepped(**given)
