"""Soak of decode: random shapes, pages, lengths and configs, and what must not change a bit.

`python tests/soak/soak_decode.py --seconds 480` on a GPU; without one, TRITON_INTERPRET=1 set, tiny
shapes in the interpreter. Every round is made from its own seed, which a complaint tells:
`--seed N --rounds 1` repeats it. It exits with 0 if there was no complaint.
"""

import argparse
import faulthandler
import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from autoflash.accuracy import Budget
from autoflash.canary import tensors_of
from autoflash.check import Checker, plan_for
from autoflash.child import Failure
from autoflash.config import Config, grid
from autoflash.families import decode, decode_last
from autoflash.gpu import DEFAULT_TARGET, Gpu, detect, known
from autoflash.inputs import POISON_PAGE, Inputs, make_inputs
from autoflash.kernel import load, new_outputs
from autoflash.problem import Problem, Variant, title
from autoflash.quantised import POISON_BYTES, spoil
from autoflash.render import render
from autoflash.runtime.launch import Launch, interpreted, run_plan

HUNG_S = 180.0  # a round that takes longer, compiling included, ends the soak
REPLAYS = 3
STREAM_CALLS = 8
Result = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class Sizes:
    """How large a random problem may be, and how often its kernels get other inputs.

    `rows` are query heads of a KV head times queries.
    """

    draws: int
    batch: int
    keys: int
    fp32_keys: int  # whose reference sums in order, one key after the other
    kv_heads: int
    rows: int
    head_dims: tuple[int, ...]


INTERPRETED = Sizes(1, 3, 100, 40, 2, 8, (16, 40))
ON_GPU = Sizes(6, 70, 5000, 150, 8, 130, (64, 72, 80, 96, 128, 128, 192, 256))


@dataclass(frozen=True)
class Place:
    """Where it runs: `cuda`, or `cpu` in the interpreter; `gpu` says how many SMs there are."""

    device: str
    gpu: Gpu
    sizes: Sizes

    def run(self, inputs: Inputs, config: Config, with_lse: bool = True) -> Result:
        """`out` and `lse`; raises Failure when something was written around them."""
        return Checker(self.device, self.gpu).run(inputs, config, with_lse)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=480.0)
    parser.add_argument("--rounds", type=int, default=10**9)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    place, deadline = this_place(), time.monotonic() + options.seconds
    kinds, complaints = Counter[tuple[str, ...]](), 0
    for seed in range(options.seed, options.seed + options.rounds):
        if time.monotonic() > deadline:
            break
        faulthandler.dump_traceback_later(HUNG_S, exit=True)
        problem, config, found = soak_round(place, seed)
        faulthandler.cancel_dump_traceback_later()
        kinds[config.family, str(config["SCHEDULE"]), problem.kv_dtype, *problem.switches] += 1
        complaints += len(found)
        for complaint in found:
            print(f"--seed {seed}: {complaint}\n    {title(problem)}\n    {config}", flush=True)
    for kind, count in sorted(kinds.items()):
        print(f"{count:5d} {' '.join(kind)}")
    print(f"{kinds.total()} rounds, {complaints} complaints")
    raise SystemExit(bool(complaints))


def this_place() -> Place:
    """What this machine can do. Raises SystemExit without a GPU and without the interpreter."""
    if interpreted():
        return Place("cpu", known(DEFAULT_TARGET), INTERPRETED)
    if not torch.cuda.is_available():
        raise SystemExit("error: there is no GPU; set TRITON_INTERPRET=1")
    return Place("cuda", detect(), ON_GPU)


def soak_round(place: Place, seed: int) -> tuple[Problem, Config, list[str]]:
    """One problem with one config: what is wrong with it, in words."""
    drawn = random.Random(seed)
    problem = random_problem(drawn, place.sizes)
    config = random_config(drawn, problem, place.gpu)
    if place.device == "cpu":  # few programs, for they run one after the other
        place = replace(place, gpu=replace(place.gpu, num_sms=drawn.randint(1, 8)))
    elif drawn.random() < 0.5:  # another number of splits than usual
        gpu = replace(place.gpu, num_sms=drawn.randint(1, 2 * place.gpu.num_sms))
        place = replace(place, gpu=gpu)
    try:
        return problem, config, list(complaints_of(place, problem, config, drawn))
    except Failure as failure:
        return problem, config, [str(failure)]


def complaints_of(
    place: Place, problem: Problem, config: Config, drawn: random.Random
) -> Iterator[str]:
    wide_rows = drawn.choice([0, 0, 1, 8])
    for _ in range(place.sizes.draws):  # compiling takes longer than all the rest
        yield from called(place, problem, config, drawn, wide_rows)
        yield from replayed(place, problem, config, drawn)
        if place.device == "cuda":
            yield from on_two_streams(place, problem, config, drawn)


def called(
    place: Place, problem: Problem, config: Config, drawn: random.Random, wide_rows: int
) -> Iterator[str]:
    """Every call of the same sequences is right, and those of one kernel have the same bits."""
    inputs = random_inputs(place, problem, drawn, wide_rows)
    budget, expected = Budget(inputs), place.run(inputs, config)
    results = [("as it is", inputs, expected)]
    results.append(("without lse", inputs, place.run(inputs, config, with_lse=False)))
    results += [(what, other, place.run(other, config)) for what, other in alike(inputs, drawn)]
    for what, other, (out, lse) in results:
        verdict = budget.judge(out, lse)
        if not verdict.correct:
            yield f"{what}: {verdict.reason}"
        if (
            lse is not None
            and forms(other) == forms(inputs)
            and not same_bits((out, lse), expected)
        ):
            yield f"{what}: other bits of the same kernel"


def random_problem(drawn: random.Random, sizes: Sizes) -> Problem:
    seqlen_q = drawn.choice([1, 1, 1, 2, 4, drawn.randint(1, 16)])
    group = drawn.randint(1, max(1, sizes.rows // seqlen_q))
    kv_heads = drawn.randint(1, sizes.kv_heads)
    dtype = drawn.choice(["bf16", "bf16", "bf16", "fp16", "fp16", "fp32"])
    kv_dtype = drawn.choice(["", "fp8_e4m3", "int8"]) if dtype != "fp32" else ""
    return Problem(
        op="decode",
        dtype=dtype,
        batch=drawn.randint(1, sizes.batch if dtype != "fp32" else 4),
        num_heads=group * kv_heads,
        num_kv_heads=kv_heads,
        head_dim=drawn.choice(sizes.head_dims),
        seqlen_q=seqlen_q,
        seqlen_k=drawn.randint(1, sizes.keys if dtype != "fp32" else sizes.fp32_keys),
        page_size=drawn.choice([0, 1, 3, 16, 16, 48, 64, 128, drawn.randint(1, 200)]),
        kv_layout=drawn.choice(["nhd", "hnd"]),
        lengths=drawn.choice(["equal", "ragged"]),
        pages=drawn.choice(["permuted", "contiguous", "shared"]),
        kv_dtype=kv_dtype,
        kv_scales=drawn.choice(["tensor", "head", "token"]) if kv_dtype else "",
        window_left=drawn.choice([-1, -1, -1, 0, drawn.randint(1, sizes.keys)]),
        softcap=drawn.random() < 0.2,
        alibi=drawn.random() < 0.2,
        sinks=drawn.random() < 0.2,
    )


def random_config(drawn: random.Random, problem: Problem, gpu: Gpu) -> Config:
    """Any config that can serve the problem on the GPU, slow ones too."""
    family = drawn.choice([decode.FAMILY, decode_last.FAMILY])
    every = list(grid(family.name, family.knobs))
    while True:
        config = drawn.choice(every)
        if family.misfit(problem, config.as_dict(), gpu) is None:
            return config


def random_inputs(
    place: Place, problem: Problem, drawn: random.Random, wide_rows: int = 0
) -> Inputs:
    """Lengths from 0 to the most, often beside the edges of tiles and pages; dead slots are NaN."""
    most = problem.seqlen_k
    ends = [0, most, 16, 32, 64, 128, problem.page_size]
    edges = [n for n in (end + i for end in ends for i in (-1, 0, 1)) if 0 <= n <= most]
    lengths = [
        drawn.choice(edges) if drawn.random() < 0.5 else drawn.randint(0, most)
        for _ in range(problem.batch)
    ]
    seed = drawn.randrange(2**31)
    return make_inputs(problem, seed, place.device, lengths, wide_rows=wide_rows)


def alike(inputs: Inputs, drawn: random.Random) -> Iterator[tuple[str, Inputs]]:
    """The same sequences otherwise."""
    assert inputs.cache_seqlens is not None
    table = inputs.block_table
    k, v = (repoisoned(cache) for cache in (inputs.k, inputs.v))
    other = replace(inputs, k=k, v=v)
    if inputs.problem.kv_scales == "token":
        assert inputs.k_scale is not None and inputs.v_scale is not None
        k_scale, v_scale = repoisoned(inputs.k_scale), repoisoned(inputs.v_scale)
        other = replace(other, k_scale=k_scale, v_scale=v_scale)
    if table is not None:
        other = replace(other, block_table=table.where(table != POISON_PAGE, drawn.choice([-1, 0])))
    yield "other values in dead slots and table entries", other
    long_table = None if table is None else table.long()
    lengths = inputs.cache_seqlens.long()
    yield "64-bit indices", replace(inputs, cache_seqlens=lengths, block_table=long_table)
    k, v = torch.stack([as_bytes(inputs.k), as_bytes(inputs.v)], dim=1).unbind(1)
    yield "K and V in one tensor", replace(inputs, k=typed_as(k, inputs.k), v=typed_as(v, inputs.v))
    if table is not None:
        yield "pages in another order", reordered(inputs, table, drawn)
    if not inputs.problem.quantised:
        yield "appended token by token", appended(inputs, drawn)


def forms(inputs: Inputs) -> list[tuple[object, ...]]:
    """What tells kernels apart: equal ones are the same, which gives the same bits."""
    given = tensors_of(inputs).values()
    return [(each.dtype, each.stride(), each.data_ptr() % 16 == 0) for each in given]


def repoisoned(cache: torch.Tensor) -> torch.Tensor:
    """The same with infinities for NaN, and in bytes, ones for the poison."""
    if cache.dtype in POISON_BYTES:
        stored = as_bytes(cache)
        return typed_as(stored.where(stored != POISON_BYTES[cache.dtype], 1), cache)
    return cache.nan_to_num(nan=float("inf"), posinf=None)


def as_bytes(cache: torch.Tensor) -> torch.Tensor:
    """A cache of bytes as integers, which torch can do more with; others as they are."""
    return cache.view(torch.uint8) if cache.element_size() == 1 else cache


def typed_as(stored: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    return stored.view(cache.dtype)


def reordered(inputs: Inputs, table: torch.Tensor, drawn: random.Random) -> Inputs:
    """Every page of the cache somewhere else, and the table that finds it."""
    order = list(range(len(inputs.k)))
    drawn.shuffle(order)
    new_ids = torch.tensor(order, device=table.device)
    old_ids = new_ids.argsort()
    names = ["k", "v"]
    if inputs.problem.kv_scales == "token":
        names += ["k_scale", "v_scale"]
    moved = {name: getattr(inputs, name) for name in names}
    moved = {name: typed_as(as_bytes(each)[old_ids], each) for name, each in moved.items()}
    used = table < len(order)
    new_table = new_ids[table.where(used, 0).long()].where(used, -1)
    return replace(inputs, block_table=new_table.to(table.dtype), **moved)


def appended(inputs: Inputs, drawn: random.Random) -> Inputs:
    """The same caches, written by append_kv() into memory full of NaN, in any order."""
    p = inputs.problem
    slots, tokens = [], []
    for b, keys in enumerate(inputs.cache_seqlens.tolist()):
        places = torch.arange(keys, device=inputs.q.device)
        if inputs.block_table is None:
            slots.append(b * max(1, p.seqlen_k) + places)
        else:
            pages = inputs.block_table[b, places // p.page_size].long()
            slots.append(pages * p.page_size + places % p.page_size)
        tokens.append([cache.transpose(0, 1) for cache in inputs.sequence(b)[1:]])
    order = list(range(sum(len(each) for each in slots)))
    drawn.shuffle(order)
    mixed = torch.tensor(order, device=inputs.q.device, dtype=torch.long)
    k, v = (torch.cat(each)[mixed] for each in zip(*tokens, strict=True))
    caches = [torch.empty_like(cache) for cache in (inputs.k, inputs.v)]
    for cache in caches:
        spoil(cache)
    if order:
        module = load(render(Variant("append_kv", "append_kv")))
        run_plan(module.plan(k, v, *caches, torch.cat(slots)[mixed], p.kv_layout))
    return replace(inputs, k=caches[0], v=caches[1])


def replayed(place: Place, problem: Problem, config: Config, drawn: random.Random) -> Iterator[str]:
    """A captured plan follows whatever changes in place: tokens, caches, lengths and tables."""
    held = random_inputs(place, problem, drawn)
    out, lse = new_outputs(held)
    replay = captured(plan_for(held, config, place.gpu, out, lse), place.device)
    names = ["q", "k", "v", "cache_seqlens", *(["block_table"] if problem.paged else [])]
    if problem.kv_scales == "token":
        names += ["k_scale", "v_scale"]
    names += ["sinks"] if problem.sinks else []
    for number in range(REPLAYS):
        after = random_inputs(place, problem, drawn)
        for name in names:
            getattr(held, name).copy_(getattr(after, name))
        out.fill_(float("nan")), lse.fill_(float("nan"))
        replay()
        if not same_bits((out, lse), place.run(after, config)):
            yield f"replay {number} has other bits than a call"


def captured(plan: list[Launch], device: str) -> Callable[[], None]:
    """What launches the plan again: a CUDA graph, or in the interpreter the plan itself."""
    run_plan(plan)
    if device == "cpu":
        return partial(run_plan, plan)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run_plan(plan)

    def replay() -> None:
        assert plan  # kept: the graph names its workspaces
        graph.replay()

    return replay


def on_two_streams(
    place: Place, problem: Problem, config: Config, drawn: random.Random
) -> Iterator[str]:
    """Calls of two streams side by side, each with workspaces of its own."""
    several = [random_inputs(place, problem, drawn) for _ in range(2)]
    expected = [place.run(inputs, config) for inputs in several]
    outputs = [new_outputs(inputs) for inputs in several]
    plans = [
        plan_for(inputs, config, place.gpu, *each)
        for inputs, each in zip(several, outputs, strict=True)
    ]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in several]
    for _ in range(STREAM_CALLS):
        for stream, plan in zip(streams, plans, strict=True):
            with torch.cuda.stream(stream):
                run_plan(plan)
    torch.cuda.synchronize()
    for number, (result, alone) in enumerate(zip(outputs, expected, strict=True)):
        if not same_bits(result, alone):
            yield f"stream {number} has other bits beside another than alone"


def same_bits(a: Result, b: Result) -> bool:
    """Both with lse. A NaN would not be like itself, and none belongs here."""
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


if __name__ == "__main__":
    main()
