"""Who takes part in the prefill benchmark: autoflash, its portable family, and the peers.

A contender is made from sets of inputs and calls what its users call. A peer that is not installed,
or cannot do a case, raises: the benchmark names it with the reason.
"""

import functools
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F
from harness import Call, Unavailable
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.check import plan_for
from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.inputs import Inputs
from autoflash.runtime.launch import run_plan

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Contender:
    """One call for each set of inputs; a call gives `out`, 4-D, in `layout`."""

    calls: list[Call]
    layout: str

    def out(self, inputs: Inputs, number: int = 0) -> torch.Tensor:
        """What a call gives, in the layout of the inputs' problem."""
        result = self.calls[number]()
        return result if self.layout == inputs.problem.layout else result.transpose(1, 2)


Maker = Callable[[list[Inputs]], Contender]


def in_layout(one: Inputs, layout: str) -> Tensors:
    """q, k, v in the layout that a contender wants, contiguous."""
    tensors = (one.q, one.k, one.v)
    if layout == one.problem.layout:
        return tensors
    q, k, v = (tensor.transpose(1, 2).contiguous() for tensor in tensors)
    return q, k, v


def autoflash(module: ModuleType, inputs: list[Inputs]) -> Contender:
    """The exported module's prefill()."""
    p = inputs[0].problem
    ours = functools.partial(module.prefill, causal=p.causal, layout=p.layout)
    return Contender([functools.partial(ours, one.q, one.k, one.v) for one in inputs], p.layout)


def portable(config: Config, gpu: Gpu, inputs: list[Inputs]) -> Contender:
    """One config of a family, launched without the exported module."""

    def call(one: Inputs) -> torch.Tensor:
        out = torch.empty_like(one.q)
        run_plan(plan_for(one, config, gpu, out, None))
        return out

    return Contender([functools.partial(call, one) for one in inputs], inputs[0].problem.layout)


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
    return Contender(list(calls), "bhsd")


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
    return Contender(list(calls), "bhsd")


def flash_attention_3(inputs: list[Inputs]) -> Contender:
    """FlashAttention-3's varlen call, as vLLM ships it."""
    from vllm.vllm_flash_attn.flash_attn_interface import flash_attn_varlen_func

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
    return Contender(list(calls), "bshd")


def flash_attention_4(inputs: list[Inputs]) -> Contender:
    """flash-attn-4's CuTe kernels."""
    from flash_attn.cute.interface import flash_attn_func

    p = inputs[0].problem

    def call(tensors: Tensors) -> torch.Tensor:
        out, _ = flash_attn_func(*tensors, causal=p.causal)
        return out

    calls = [functools.partial(call, in_layout(one, "bshd")) for one in inputs]
    return Contender(list(calls), "bshd")


PEERS: dict[str, Maker] = {
    "cudnn": functools.partial(sdpa, SDPBackend.CUDNN_ATTENTION),
    "flash": functools.partial(sdpa, SDPBackend.FLASH_ATTENTION),
    "flex_attention": flex_attention,
    "flash_attention_3": flash_attention_3,
    "flash_attention_4": flash_attention_4,
}


def peer_versions() -> dict[str, str]:
    """Versions of what the peers come from, where they are installed."""
    found = {"cudnn": str(torch.backends.cudnn.version())}
    for package in ("vllm", "flash-attn-4", "nvidia-cutlass-dsl"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
