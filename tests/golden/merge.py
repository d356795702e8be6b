# Rendered by autoflash: the kernels of one variant and the plan that launches them. Do not edit.
# pyright: reportCallIssue=false
import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor


# Merging: two results over different keys become the result over all of them.
#
#   out_a, out_b, out   (batch, seqlen, num_heads, HEAD_DIM), any strides, the last one 1
#   lse_a, lse_b, lse   (batch, num_heads, seqlen) fp32, natural logarithms, any strides
#   stride_xb, stride_xs, stride_xh   elements between sequences, tokens, heads of tensor x
#
#   BLOCK_R   rows of a program, heads times tokens of all sequences
#   BLOCK_D   HEAD_DIM padded to a power of two


@triton.jit(do_not_specialize=["seqlen", "num_heads", "rows"])
def merge_rows(
    out_a,
    lse_a,
    out_b,
    lse_b,
    out,
    lse,
    seqlen,
    num_heads,
    rows,
    stride_ab,
    stride_as,
    stride_ah,
    stride_bb,
    stride_bs,
    stride_bh,
    stride_ob,
    stride_os,
    stride_oh,
    lse_stride_ab,
    lse_stride_as,
    lse_stride_ah,
    lse_stride_bb,
    lse_stride_bs,
    lse_stride_bh,
    lse_stride_ob,
    lse_stride_os,
    lse_stride_oh,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    inside = row < rows
    head = row % num_heads
    token = row // num_heads % seqlen
    batch = row // num_heads // seqlen
    a_place = batch * lse_stride_ab + token * lse_stride_as + head * lse_stride_ah
    b_place = batch * lse_stride_bb + token * lse_stride_bs + head * lse_stride_bh
    a = tl.load(lse_a + a_place, mask=inside, other=float("-inf"))
    b = tl.load(lse_b + b_place, mask=inside, other=float("-inf"))
    larger = tl.maximum(a, b)
    # two parts without keys have no maximum; any finite one keeps -inf - (-inf) away
    shift = tl.where(larger == float("-inf"), 0.0, larger)
    a_weight, b_weight = tl.exp(a - shift), tl.exp(b - shift)
    total = a_weight + b_weight
    offs_d = tl.arange(0, BLOCK_D)
    channels = (offs_d < HEAD_DIM)[None, :]
    # a part without keys is not read: it says nothing, whatever it holds
    a_mask = (inside & (a != float("-inf")))[:, None] & channels
    b_mask = (inside & (b != float("-inf")))[:, None] & channels
    a_row = (batch * stride_ab + token * stride_as + head * stride_ah)[:, None]
    b_row = (batch * stride_bb + token * stride_bs + head * stride_bh)[:, None]
    a_tile = tl.load(out_a + a_row + offs_d[None, :], mask=a_mask, other=0.0).to(tl.float32)
    b_tile = tl.load(out_b + b_row + offs_d[None, :], mask=b_mask, other=0.0).to(tl.float32)
    merged = a_tile * a_weight[:, None] + b_tile * b_weight[:, None]  # (BLOCK_R, BLOCK_D)
    merged = merged / tl.where(total == 0.0, 1.0, total)[:, None]
    out_row = (batch * stride_ob + token * stride_os + head * stride_oh)[:, None]
    tl.store(
        out + out_row + offs_d[None, :],
        merged.to(out.dtype.element_ty),
        mask=inside[:, None] & channels,
    )
    place = batch * lse_stride_ob + token * lse_stride_os + head * lse_stride_oh
    tl.store(lse + place, larger + tl.log(total), mask=inside)  # -inf where both are


def plan(out_a, lse_a, out_b, lse_b, out, lse):
    """What to launch: (kernel, grid, arguments, options). Reads no device memory."""
    batch, seqlen, num_heads, head_dim = out.shape
    rows = batch * seqlen * num_heads
    block_d = triton.next_power_of_2(head_dim)
    block_r = max(1, 2048 // block_d)  # two thousand numbers keep four warps busy
    arguments = (
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        seqlen,
        num_heads,
        rows,
        *(step for each in (out_a, out_b, out) for step in each.stride()[:3]),
        *(each.stride(axis) for each in (lse_a, lse_b, lse) for axis in (0, 2, 1)),
        head_dim,
        block_d,
        block_r,
    )
    return [(merge_rows, (triton.cdiv(rows, block_r),), arguments, {"num_warps": 4})]
