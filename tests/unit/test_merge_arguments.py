"""Arguments of merge(): one line that names what does not fit."""

import pytest
import torch

from autoflash.runtime.merging import check_parts
from autoflash.runtime.problem import ProblemError

OUT, LSE = torch.zeros(2, 5, 4, 32, dtype=torch.float16), torch.zeros(2, 4, 5)


def call(out_a=OUT, lse_a=LSE, out_b=OUT, lse_b=LSE, layout="bshd"):
    check_parts(out_a, lse_a, out_b, lse_b, layout)


def test_what_prefill_and_decode_give_fits():
    call()
    call(OUT.transpose(1, 2), LSE, OUT.transpose(1, 2), LSE, "bhsd")
    call(OUT[:, 0], LSE[..., 0], OUT[:, 0], LSE[..., 0])
    call(OUT[0], LSE[0], OUT[0], LSE[0], "thd")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": "sbhd"}, "layout 'sbhd' is none of bshd, bhsd, thd"),
        ({"layout": "thd"}, "out_a has 4 dimensions in layout thd"),
        ({"out_a": OUT.double()}, "out_a is torch.float64, not bf16, fp16 or fp32"),
        ({"out_b": OUT.float()}, "out_b is torch.float32, expected torch.float16"),
        ({"out_b": OUT[:1]}, r"out_b is \(1, 5, 4, 32\), expected \(2, 5, 4, 32\)"),
        ({"lse_a": LSE.half()}, "lse_a is torch.float16, expected torch.float32"),
        ({"lse_b": LSE.transpose(1, 2)}, r"lse_b is \(2, 5, 4\), expected \(2, 4, 5\)"),
        ({"lse_b": LSE.to("meta")}, "lse_b is on meta, out_a on cpu"),
        ({"out_b": OUT.mT.contiguous().mT}, "out_b's last dimension must be contiguous"),
        ({"lse_a": LSE.clone().requires_grad_()}, "lse_a requires grad"),
    ],
)
def test_an_argument_that_does_not_fit_is_named(changes, message):
    with pytest.raises(ProblemError, match=f"merge: {message}"):
        call(**changes)
