"""The read floor: a plain kernel that reads as many bytes as a decode step, and does no more."""

import functools

import torch
import triton
import triton.language as tl

from autoflash.inputs import Inputs
from autoflash.roofline import cache_bytes
from autoflash.turns import Call, interleaved

RACE_US = 50_000.0  # of GPU time for each shape
# (programs for each SM, numbers of 32 bits a step, warps): what reads fastest is the floor
SHAPES = ((2, 4096, 8), (4, 4096, 8), (8, 2048, 8), (8, 4096, 16))


@triton.jit
def read(  # noqa: ANN201
    k,  # noqa: ANN001
    v,  # noqa: ANN001
    numbers,  # noqa: ANN001
    out,  # noqa: ANN001
    PROGRAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # The first `numbers` of K and of V, a block of each a step; out is written if all sum up to an
    # unlikely number, so that nothing can be left out.
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, numbers, PROGRAMS * BLOCK, num_stages=1):
        inside = start + offsets < numbers
        total += tl.load(k + start + offsets, mask=inside, other=0)
        total += tl.load(v + start + offsets, mask=inside, other=0)
    if tl.sum(total, 0) == 0x1234567:
        tl.store(out, 0)


def readers(inputs: list[Inputs], num_sms: int, shape: tuple[int, int, int]) -> list[Call]:
    """One call for each set of inputs: as many bytes of its caches as their lengths make live."""
    programs, block, num_warps = shape
    calls = []
    for one in inputs:
        k, v = (cache.view(torch.uint8).view(-1).view(torch.int32) for cache in (one.k, one.v))
        out = torch.empty(1, dtype=torch.int32, device=k.device)
        grid = (programs * num_sms,)
        launch = functools.partial(read[grid], PROGRAMS=grid[0], BLOCK=block, num_warps=num_warps)
        half = min(cache_bytes(one.problem) // 8, k.numel())
        calls.append(functools.partial(launch, k, v, half, out))
    return calls


def fastest_readers(inputs: list[Inputs], num_sms: int) -> list[Call]:
    """The calls of the shape that reads these inputs fastest, all timed in turn."""
    made = {str(shape): readers(inputs, num_sms, shape) for shape in SHAPES}
    times = interleaved(made, gpu_us=RACE_US)
    return made[min(times, key=lambda shape: times[shape].median_us)]
