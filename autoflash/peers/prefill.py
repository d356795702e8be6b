"""Peers in prefill, each called as its users call it. One that cannot do a case raises."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.inputs import Inputs
from autoflash.peers.contender import Contender, Maker, Unavailable
from autoflash.problem import Problem

FLASHINFER_WORKSPACE = 256 * 2**20

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def in_layout(one: Inputs, layout: str) -> Tensors:
    """q, k, v in the layout that a contender wants, contiguous."""
    tensors = (one.q, one.k, one.v)
    if layout == one.problem.layout:
        return tensors
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    return q, k, v


def from_layout(problem: Problem, layout: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """What brings an `out` in `layout` to the problem's."""
    return (lambda out: out) if layout == problem.layout else (lambda out: out.transpose(1, 2))


def sdpa(backend: SDPBackend, inputs: list[Inputs]) -> Contender:
    """torch's scaled_dot_product_attention, held to one backend."""
    p = inputs[0].problem
    if p.causal and p.seqlen_q != p.seqlen_k:
        raise Unavailable("its causal mask is aligned top-left")

    def call(tensors: Tensors) -> torch.Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(
                *tensors, is_causal=p.causal, enable_gqa=p.group_size > 1
            )

    calls = [functools.partial(call, in_layout(one, "bhsd")) for one in inputs]
    return Contender(list(calls), from_layout(p, "bhsd"))


def flex_attention(inputs: list[Inputs]) -> Contender:
    """torch's FlexAttention, compiled for these very shapes, causal by a BlockMask."""
    import torch._inductor.config
    from torch.nn.attention.flex_attention import create_block_mask
    from torch.nn.attention.flex_attention import flex_attention as flex

    p = inputs[0].problem
    torch._dynamo.reset()  # or the ninth shape would run uncompiled
    torch._inductor.config.compile_threads = 1  # one kernel needs no pool of processes
    compiled = torch.compile(flex, dynamic=False)
    offset = p.seqlen_k - p.seqlen_q
    block_mask = None
    if p.causal:
        block_mask = create_block_mask(
            lambda b, h, i, j: j <= i + offset,
            None,
            None,
            p.seqlen_q,
            p.seqlen_k,
            device=inputs[0].q.device,
        )
    call = functools.partial(compiled, block_mask=block_mask, enable_gqa=p.group_size > 1)
    calls = [functools.partial(call, *in_layout(one, "bhsd")) for one in inputs]
    return Contender(list(calls), from_layout(p, "bhsd"))


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call, as vLLM ships it."""
    from vllm.vllm_flash_attn.flash_attn_interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_varlen_func,
    )

    p = inputs[0].problem
    numbers = torch.arange(p.batch + 1, dtype=torch.int32, device=inputs[0].q.device)
    starts_q, starts_k = numbers * p.seqlen_q, numbers * p.seqlen_k

    def call(tensors: Tensors) -> torch.Tensor:
        q, k, v = (tensor.flatten(0, 1) for tensor in tensors)
        out = flash_attn_varlen_func(
            q,
            k,
            v,
            max_seqlen_q=p.seqlen_q,
            cu_seqlens_q=starts_q,
            max_seqlen_k=p.seqlen_k,
            cu_seqlens_k=starts_k,
            causal=p.causal,
            fa_version=3,
        )
        return out.unflatten(0, (p.batch, p.seqlen_q))

    calls = [functools.partial(call, in_layout(one, "bshd")) for one in inputs]
    return Contender(list(calls), from_layout(p, "bshd"))


def flash_attention_4(inputs: list[Inputs]) -> Contender:
    """flash-attn-4's CuTe kernels."""
    from flash_attn.cute.interface import (  # pyright: ignore[reportMissingImports]
        flash_attn_func,
    )

    p = inputs[0].problem

    def call(tensors: Tensors) -> torch.Tensor:
        out, _ = flash_attn_func(*tensors, causal=p.causal)
        return out

    calls = [functools.partial(call, in_layout(one, "bshd")) for one in inputs]
    return Contender(list(calls), from_layout(p, "bshd"))


def flash_attention_2(inputs: list[Inputs]) -> Contender:
    """FlashAttention-2's call."""
    from flash_attn import flash_attn_func  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    call = functools.partial(flash_attn_func, causal=p.causal)
    calls = [functools.partial(call, *in_layout(one, "bshd")) for one in inputs]
    return Contender(list(calls), from_layout(p, "bshd"))


def flashinfer(inputs: list[Inputs]) -> Contender:
    """FlashInfer's ragged wrapper, planned on the host once, as its users do each step."""
    import flashinfer  # pyright: ignore[reportMissingImports]

    p = inputs[0].problem
    numbers = torch.arange(p.batch + 1, dtype=torch.int32, device=inputs[0].q.device)
    heads = (p.num_heads, p.num_kv_heads, p.head_dim)
    calls = []
    for one in inputs:
        workspace = torch.empty(FLASHINFER_WORKSPACE, dtype=torch.uint8, device=one.q.device)
        wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
        starts = (numbers * p.seqlen_q, numbers * p.seqlen_k)
        wrapper.plan(*starts, *heads, causal=p.causal, q_data_type=one.q.dtype)
        tokens = (tensor.flatten(0, 1) for tensor in in_layout(one, "bshd"))
        calls.append(functools.partial(wrapper.run, *tokens))
    to_problem = from_layout(p, "bshd")
    return Contender(calls, lambda out: to_problem(out.unflatten(0, (p.batch, p.seqlen_q))))


def xformers(inputs: list[Inputs]) -> Contender:
    """xFormers' memory-efficient attention; grouped heads as an axis of their own."""
    from xformers.ops import (  # pyright: ignore[reportMissingImports]
        LowerTriangularFromBottomRightMask,
        memory_efficient_attention,
    )

    p = inputs[0].problem
    mask = LowerTriangularFromBottomRightMask() if p.causal else None
    calls = []
    for one in inputs:
        q, k, v = in_layout(one, "bshd")
        if p.group_size > 1:
            q = q.unflatten(2, (p.num_kv_heads, p.group_size))
            k, v = (each.unsqueeze(3).expand(-1, -1, -1, p.group_size, -1) for each in (k, v))
        calls.append(functools.partial(memory_efficient_attention, q, k, v, attn_bias=mask))
    to_problem = from_layout(p, "bshd")
    return Contender(calls, lambda out: to_problem(out.flatten(2, -2)))


PEERS: dict[str, Maker] = {
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "math": functools.partial(sdpa, SDPBackend.MATH),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "flex_attention": flex_attention,
    "flash_attention_2": flash_attention_2,
    "flash_attention_3": flash_attention_3,
    "flash_attention_4": flash_attention_4,
    "flashinfer": flashinfer,
    "xformers": xformers,
}
