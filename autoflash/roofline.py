"""The roofline: flops, bytes and the least time a problem can take on a GPU."""

from dataclasses import dataclass, replace

from autoflash.gpu import Gpu
from autoflash.inputs import packed_lengths, sequence_lengths
from autoflash.pages import shared_tokens
from autoflash.problem import Problem
from autoflash.runtime.problem import CHOSEN, DTYPE_BYTES
from autoflash.structures import document_lengths


@dataclass(frozen=True)
class Floor:
    """What a problem must do at least. `floor_us` is 0 when the GPU's rates are not known."""

    flops: int
    bytes_moved: int
    floor_us: float
    bound: str  # "compute" or "memory"

    def tflops(self, us: float) -> float:
        return self.flops / us / 1e6

    def gbps(self, us: float) -> float:
        return self.bytes_moved / us / 1e3

    def percent(self, us: float) -> float:
        return 100 * self.floor_us / us


def visible_pairs(problem: Problem) -> int:
    """Query-key pairs that are visible, summed over the batch, for one head.

    Of blocks as many as their density says, and of a custom mask all that it could show.
    """
    p = problem
    if p.masked_by == "documents" and p.op == "decode":
        return _pairs_in(p, [p.seqlen_q] * p.batch, _last_documents(p))
    if p.masked_by == "documents" and p.seqlen_q == p.seqlen_k and not p.paged:
        own = _lengths(p)[1]
        every = [keys for lengths in document_lengths(p, lengths=own) for keys in lengths]
        return _pairs_in(p, every, every)
    if p.masked_by == "blocks" and p.op == "decode":
        return max(1, p.seqlen_q * sum(_listed_keys(p)))
    if p.masked_by == "blocks":
        return max(1, p.batch * p.seqlen_q * p.seqlen_k * p.density // 100)
    lengths = _lengths(p)
    pairs = _pairs_in(p, *lengths)
    beyond = p.masked_by == "prefix" and p.op != "decode"  # where it reaches few keys
    for rows, keys in zip(*lengths, strict=True) if beyond else ():
        prefix = min(keys, p.seqlen_k * p.density // 100)  # of which causal hides some
        pairs += rows * prefix - _clamped_sum(keys - rows + 1, rows, prefix)
    return pairs


def _pairs_in(problem: Problem, every_q: list[int], every_k: list[int]) -> int:
    """The same of sequences of these lengths, under causal and windows alone."""
    left, right = problem.window
    total = 0
    for rows, keys in zip(every_q, every_k, strict=True):
        position = keys - rows  # of the first query
        end = _clamped_sum(position + right + 1, rows, keys) if right >= 0 else rows * keys
        total += end - (_clamped_sum(position - left, rows, keys) if left >= 0 else 0)
    return total


def _last_documents(problem: Problem) -> list[int]:
    """The keys that a step reads of each sequence: about those of its last document."""
    return [max(1, keys * problem.density // 100) for keys in sequence_lengths(_read(problem))]


def _listed_keys(problem: Problem) -> list[int]:
    """The keys that a step reads of each sequence: as many percent as its blocks' density says."""
    return [keys * problem.density // 100 for keys in sequence_lengths(problem)]


def _lengths(problem: Problem) -> tuple[list[int], list[int]]:
    """The queries and the keys of each sequence."""
    if problem.varlen:
        return packed_lengths(problem)
    return [problem.seqlen_q] * problem.batch, sequence_lengths(_read(problem))


def _read(problem: Problem) -> Problem:
    """The problem of sequences that are as long as what of them is read."""
    return replace(problem, pages="") if problem.pages == CHOSEN else problem


def _clamped_sum(first: int, count: int, top: int) -> int:
    """The sum of first, first + 1, ... (`count` of them), each put between 0 and `top`."""

    def below(end: int) -> int:  # of all from 0 up to `end`
        ramp = min(max(end, 0), top)
        return ramp * (ramp - 1) // 2 + top * max(end - top, 0)

    return below(first + count) - below(first)


def cache_bytes(problem: Problem) -> int:
    """Bytes of K and V, scales of tokens included, that the sequences' queries see."""
    p = _read(problem)
    first, *others = sequence_lengths(p)
    live = (first, *(max(0, keys - shared_tokens(p)) for keys in others))  # each once
    reach = p.seqlen_q + p.window_left if p.window_left >= 0 else p.seqlen_k
    if p.op == "decode" and p.masked_by == "documents":
        live = tuple(min(each, own) for each, own in zip(live, _last_documents(p)))
    if p.op == "decode" and p.masked_by == "blocks":
        live = tuple(min(each, own) for each, own in zip(live, _listed_keys(p)))
    keys = sum(min(each, reach) for each in live)
    scales = 2 * 4 if p.kv_scales == "token" else 0  # fp32, of K and of V
    width = p.head_dim if p.latent else p.head_dim + p.head_dim_v
    return keys * p.num_kv_heads * (width * p.kv_dtype_bytes + scales)


def floor(problem: Problem, gpu: Gpu) -> Floor:
    """Flops of both products on visible pairs, five of a backward; bytes moved once each."""
    p = problem
    flops = 2 * p.num_heads * visible_pairs(p) * (p.head_dim + p.head_dim_v)
    rows = sum(_lengths(p)[0]) * p.num_heads
    moved = rows * (p.head_dim * p.dtype_bytes + p.head_dim_v * DTYPE_BYTES[p.out_dtype])
    moved += cache_bytes(p)
    if p.op == "backward":  # q k^T, dout v^T and the products of three gradients
        flops = 2 * p.num_heads * visible_pairs(p) * (3 * p.head_dim + 2 * p.head_dim_v)
        moved *= 2  # dout and dq beside q and out, dk and dv beside k and v
        moved += rows * 4  # lse
    if p.bias:  # the same for all sequences, but in decode, where each has its own
        shared_by = 1 if p.op == "decode" else p.batch
        moved += visible_pairs(p) // shared_by * p.num_heads * p.dtype_bytes
    if not (gpu.dram_gbps and gpu.tflops_16bit):
        return Floor(flops, moved, 0.0, "memory" if p.op == "decode" else "compute")
    # fp32 products run as fp32 on the ordinary cores: a sixteenth of the 16-bit tensor rate
    rate = gpu.tflops_16bit if p.dtype != "fp32" else gpu.tflops_16bit / 16
    compute_us, memory_us = flops / rate / 1e6, moved / gpu.dram_gbps / 1e3
    bound = "compute" if compute_us >= memory_us else "memory"
    return Floor(flops, moved, max(compute_us, memory_us), bound)
