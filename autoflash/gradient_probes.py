"""Gradient probes: what verify asks of a backward; its gradients are judged by their budget."""

from collections.abc import Callable
from dataclasses import replace

import torch

from autoflash.accuracy import GradientBudget
from autoflash.canary import Canaries
from autoflash.gradients import Gradients
from autoflash.inputs import Inputs
from autoflash.probes import FAR_K, FAR_Q, ODD_SCALE, Make, Probe
from autoflash.subjects import Subject


def judged_gradients(subject: Subject, inputs: Inputs, softmax_scale: float | None = None) -> str:
    """Why the gradients are beyond the error budget, or that an input was written to."""
    given = Canaries(inputs.q.device)
    result = subject.run(given.inputs(inputs), softmax_scale)
    trespass = given.trespass() or ""
    return trespass or GradientBudget(inputs, softmax_scale).judge(*result).reason


def _right(subject: Subject, make: Make) -> str:
    return judged_gradients(subject, make())


def _scale_comes_first(subject: Subject, make: Make) -> str:
    return judged_gradients(subject, subject.attended(make(), ODD_SCALE), ODD_SCALE)


def _strong_scores(subject: Subject, make: Make) -> str:
    return judged_gradients(subject, subject.attended(make(), 1.0), 1.0)


def _of_lse_alone(subject: Subject, make: Make) -> str:
    inputs = make(wide_rows=8)
    assert inputs.dout is not None
    return judged_gradients(subject, replace(inputs, dout=torch.zeros_like(inputs.dout)))


def _sequences_are_apart(subject: Subject, make: Make) -> str:
    inputs = make()
    ends_q, ends_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    assert ends_q is not None and ends_k is not None
    first = {"q": int(ends_q[-2]), "k": int(ends_k[-2])}  # tokens before the last sequence's
    spoilt = {}
    for name in ("q", "k", "v", "out", "dout"):
        spoilt[name] = getattr(inputs, name).clone()
        spoilt[name][first["k" if name in "kv" else "q"] :] = float("nan")
    found, _ = subject.run(replace(inputs, **spoilt))
    # the last sequence's own gradients are no numbers now; those before are judged
    assert isinstance(found, Gradients) and inputs.dout is not None
    cut = {name: getattr(inputs, name)[: first["q"]] for name in ("q", "dout")}
    cut |= {name: getattr(inputs, name)[: first["k"]] for name in ("k", "v")}
    fewer = replace(inputs.problem, batch=inputs.problem.batch - 1)
    cut |= {"cu_seqlens_q": ends_q[:-1], "cu_seqlens_k": ends_k[:-1]}
    for name in ("alibi_slopes", "document_ids", "prefix_lens"):
        if (of_each := getattr(inputs, name)) is not None:
            cut[name] = of_each[:-1]
    rest = replace(inputs, problem=fewer, **cut)
    dq, dk, dv = found
    kept = Gradients(dq[: first["q"]], dk[: first["k"]], dv[: first["k"]])
    return GradientBudget(rest).judge(kept).reason


def _wide_rows(subject: Subject, make: Make) -> str:
    aligned = judged_gradients(subject, make(wide_rows=8))
    return aligned or judged_gradients(subject, make(wide_rows=3))


def _each_in_another_order(subject: Subject, make: Make) -> str:
    for name in ("q", "k", "v", "dout"):
        inputs = make()
        other = getattr(inputs, name).transpose(1, 2).contiguous().transpose(1, 2)
        if reason := judged_gradients(subject, replace(inputs, **{name: other})):
            return f"{name} with its heads and tokens in another order: {reason}"
    return ""


def _each_unaligned(subject: Subject, make: Make) -> str:
    for name in ("q", "k", "v", "dout"):
        inputs = make()
        tensor = getattr(inputs, name)
        memory = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
        other = memory[1:].view(tensor.shape).copy_(tensor)
        if reason := judged_gradients(subject, replace(inputs, **{name: other})):
            return f"{name} beginning an element later: {reason}"
    return ""


def _shared_by_the_batch(subject: Subject, make: Make) -> str:
    inputs = make()
    k, v = (t[:1].expand(t.shape) for t in (inputs.k, inputs.v))
    return judged_gradients(subject, subject.attended(replace(inputs, k=k, v=v)))


def _far_logits(subject: Subject, make: Make) -> str:
    for sign in (-1.0, 1.0):
        inputs = make()
        inputs.q[..., 0], inputs.k[..., 0] = FAR_Q, sign * FAR_K
        if reason := judged_gradients(subject, subject.attended(inputs)):
            return f"logits near {sign * FAR_Q * FAR_K:.3g} before the scale: {reason}"
    return ""


def _probes(clause: str, *named: tuple[str, Callable[[Subject, Make], str]]) -> dict[str, Probe]:
    return {name: Probe(clause, ask) for name, ask in named}


GRADIENT_PROBES = {
    **_probes("positions", ("gradients at the edges of tiles", _right)),
    **_probes(
        "order",
        ("gradients under a scale of their own", _scale_comes_first),
        ("gradients far beyond a softcap", _strong_scores),
    ),
    **_probes("empty rows", ("gradients of rows without keys", _right)),
    **_probes("lse", ("gradients of lse alone", _of_lse_alone)),
    **_probes("dead memory", ("gradients of sequences apart", _sequences_are_apart)),
    **_probes(
        "strides",
        ("gradients of wide rows", _wide_rows),
        ("gradients of tensors in another order", _each_in_another_order),
        ("gradients of unaligned tensors", _each_unaligned),
        ("gradients of keys that the batch shares", _shared_by_the_batch),
    ),
    **_probes(
        "numbers",
        ("gradients of random values", _right),
        ("gradients of scores far from zero", _far_logits),
    ),
}
