"""Masks that dropout drew, read off the results of a prefill and of its backward."""

from dataclasses import replace

import torch

from autoflash.config import Config
from autoflash.dropout import dropout_numbers
from autoflash.forward import forward, of_sequence
from autoflash.gpu import Gpu
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs
from autoflash.subjects import Candidate
from autoflash.visibility import seen_keys


def masks_differ(inputs: Inputs, chosen: Config, gpu: Gpu) -> str:
    """Which of a family's results dropped what the host keeps, or kept what it drops; "" if none.

    `inputs` are a prefill's, with a KV head for each query head, and no more queries or keys of a
    sequence than channels.
    """
    drawn = _drawn(_probing(inputs), chosen, gpu)
    compared = 0
    for b in range(inputs.problem.batch):
        queries = of_sequence(inputs.problem, inputs.cu_seqlens_q, b, inputs.q).shape[1]
        keys = of_sequence(inputs.problem, inputs.cu_seqlens_k, b, inputs.k).shape[1]
        rows = torch.arange(queries, device=inputs.q.device)
        heads = range(inputs.problem.num_heads)
        asked = (inputs.problem, inputs.modifiers.masks, b, heads, rows, keys, queries)
        seen = seen_keys(*asked)
        expected = _host_mask(inputs, b, queries, keys) & seen
        for name, (result, ends) in drawn.items():
            told = of_sequence(inputs.problem, ends, b, result) != 0
            if name == "dv":
                told = told.transpose(1, 2)
            if not torch.equal(told[:, :queries, :keys], expected):
                return f"{name} of sequence {b} has another mask than the host"
        compared += int(seen.sum())
    assert compared > 700
    return ""


def _probing(inputs: Inputs) -> Inputs:
    """Inputs by which each result tells a mask: all elements of P that are seen weigh the same.

    Keys and values are units: a query's `out` and dq have a channel for each key; so are `dout`, by
    which a key's dv has one for each query.
    """
    p = inputs.problem

    def units_like(tensor: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        made = torch.empty_like(tensor)
        units = torch.eye(p.head_dim, dtype=tensor.dtype, device=tensor.device)
        for b in range(p.batch):
            of_b = of_sequence(p, ends, b, made)
            of_b.copy_(units[: of_b.shape[1]].expand_as(of_b))
        return made

    v, dout = units_like(inputs.v, inputs.cu_seqlens_k), units_like(inputs.q, inputs.cu_seqlens_q)
    changed = replace(inputs, q=inputs.q * 0, k=v.clone(), v=v, dout=dout)
    out, lse = forward(p, changed.q, changed.k, changed.v, changed.modifiers)
    return replace(changed, out=out, lse=lse)


def _drawn(
    probing: Inputs, chosen: Config, gpu: Gpu
) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """By name the results that tell masks, and where their sequences begin."""
    candidate = Candidate(chosen, gpu)
    if chosen.family == "prefill":
        out, _ = candidate.run(probing)
        assert isinstance(out, torch.Tensor)
        return {"out": (out, probing.cu_seqlens_q)}
    backward = replace(probing, problem=replace(probing.problem, op="backward"))
    of_units, _ = candidate.run(backward)
    # with a first channel of 1 and all others of 0 dP is 1 everywhere; of an out of 0 delta is 0
    ones = {name: torch.zeros_like(getattr(probing, name)) for name in ("out", "dout", "v")}
    ones["dout"][..., 0] = ones["v"][..., 0] = 1.0
    of_ones, _ = candidate.run(replace(backward, **ones))
    assert isinstance(of_units, Gradients) and isinstance(of_ones, Gradients)
    return {"dv": (of_units.dv, probing.cu_seqlens_k), "dq": (of_ones.dq, probing.cu_seqlens_q)}


def _host_mask(inputs: Inputs, b: int, queries: int, keys: int) -> torch.Tensor:
    """What dropout keeps of sequence `b`: (heads, queries, keys)."""
    assert inputs.rng is not None
    sizes = (inputs.problem.num_heads, queries, keys)
    numbers = dropout_numbers(
        inputs.rng, b, *(torch.arange(n, device=inputs.q.device) for n in sizes)
    )
    return numbers >= round(inputs.dropout_p * 65536)
