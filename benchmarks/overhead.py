"""Host time of a call: what the CPU spends until it has queued the work, beside the peers.

Calls are queued one after the other, fewer of them than a stream holds, and only the host's clock
counts: the GPU may lag behind. Contenders take turns, our ways to call among them. A case without
`out` makes its result anew.
"""

import functools
import statistics
import time
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from harness import arguments, case_result, load_module, write_results

from autoflash.inputs import Inputs, make_inputs
from autoflash.peers import PEERS, Maker, peer_versions
from autoflash.peers.contender import told
from autoflash.peers.prefill import in_layout
from autoflash.problem import Problem
from autoflash.turns import Call, turns

CALLS = 200  # in a turn: two launches each are fewer than the 1024 that a stream holds
ROUNDS, UNTIMED = 41, 3

PREFILL = Problem("prefill", "bf16", 1, 32, 8, 128, 512, 512)
DECODE = Problem("decode", "bf16", 8, 32, 8, 128, 1, 1024, page_size=16, lengths="ragged")


def main() -> None:
    options = arguments(__doc__ or "").parse_args()
    module = load_module(options.module)
    timed = []
    with torch.no_grad():  # inference mode would pass by what the operator has of autograd
        for problem, ours, peers in (
            (PREFILL, prefill_calls(module), prefill_makers()),
            (DECODE, decode_calls(module), decode_makers()),
        ):
            inputs = make_inputs(problem, 0, "cuda", poison=False)
            calls, left_out = admitted(peers, inputs)
            ways = {way: make(inputs) for way, make in ours.items()}
            timed.append((problem.op, ways, host_times({**ways, **calls}), left_out))
        # a profiler may leave hooks behind that each later launch passes
        launches = [{way: launches_of(call) for way, call in ways.items()} for _, ways, *_ in timed]
    results = [
        result
        for (op, ways, times, left_out), counted in zip(timed, launches, strict=True)
        for result in cases_of(op, times, counted, left_out)
    ]
    for result in results:
        print(result["case"], {"autoflash": result["ours"], **result["peers"]})
    operator = f"{module.operator_namespace()}::prefill"
    autograd = torch._C._dispatch_has_kernel_for_dispatch_key(operator, "Autograd")
    more = {"calls": CALLS, "rounds": ROUNDS, "autograd_registered": autograd}
    print(write_results("overhead", results, peer_versions(), **more))


def cases_of(
    op: str, times: Mapping[str, float], launches: Mapping[str, int], left_out: Mapping[str, str]
) -> list[dict[str, Any]]:
    """A case of each way to call ours, whose `launches` these are, beside the peers."""
    peers = {name: us for name, us in times.items() if name not in launches}
    return [
        case_result(
            {"op": op, "way": way, "launches": count}, {"autoflash": times[way], **peers}, left_out
        )
        for way, count in launches.items()
    ]


def prefill_calls(module: ModuleType) -> dict[str, Callable[[Inputs], Call]]:
    """The ways to call our prefill, by name."""

    def given_out(one: Inputs) -> Call:
        out = torch.empty_like(one.q)
        return functools.partial(module.prefill, one.q, one.k, one.v, causal=True, out=out)

    def direct(one: Inputs) -> Call:
        return functools.partial(module.prefill, one.q, one.k, one.v, causal=True)

    def operator(one: Inputs) -> Call:
        operators = getattr(torch.ops, module.operator_namespace())
        return functools.partial(operators.prefill.default, one.q, one.k, one.v, True)  # causal

    return {"out given": given_out, "direct": direct, "operator": operator}


def decode_calls(module: ModuleType) -> dict[str, Callable[[Inputs], Call]]:
    """The ways to call our decode, by name."""

    def given_out(one: Inputs, **more: Any) -> Call:
        return functools.partial(
            module.decode,
            one.q[:, 0],
            one.k,
            one.v,
            one.cache_seqlens,
            block_table=one.block_table,
            max_seqlen_k=one.problem.seqlen_k,
            **more,
        )

    def operator(one: Inputs) -> Call:
        operators = getattr(torch.ops, module.operator_namespace())
        read = (one.q[:, 0], one.k, one.v, one.cache_seqlens, one.block_table)
        return functools.partial(operators.decode.default, *read, one.problem.seqlen_k)

    return {
        "out given": lambda one: given_out(one, out=torch.empty_like(one.q[:, 0])),
        "direct": given_out,
        "operator": operator,
    }


def prefill_makers() -> dict[str, Callable[[Inputs], Call]]:
    def sdpa(one: Inputs) -> Call:
        tensors = in_layout(one, "bhsd")
        attention = F.scaled_dot_product_attention  # torch chooses the backend, as for its users
        return functools.partial(attention, *tensors, is_causal=True, enable_gqa=True)

    others = ("flash_attention_3", "flash_attention_4")
    return {"sdpa": sdpa, **{name: first_call(PEERS["prefill"][name]) for name in others}}


def decode_makers() -> dict[str, Callable[[Inputs], Call]]:
    others = ("flashinfer", "flash_attention_3", "flash_attention_4", "vllm_triton")
    return {name: first_call(PEERS["decode"][name]) for name in others}


def first_call(maker: Maker) -> Callable[[Inputs], Call]:
    """The call that a peer of the other benchmarks makes of one set of inputs."""
    return lambda one: maker([one]).calls[0]


def admitted(
    makers: Mapping[str, Callable[[Inputs], Call]], inputs: Inputs
) -> tuple[dict[str, Call], dict[str, str]]:
    """The peers' calls, and why others are left out."""
    calls, left_out = {}, {}
    for name, make in makers.items():
        try:
            call = make(inputs)
            call()
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[name] = told(error)
        else:
            calls[name] = call
    return calls, left_out


def host_times(calls: Mapping[str, Call]) -> dict[str, float]:
    """Median microseconds that the host takes for a call of each."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(-UNTIMED, ROUNDS):
        for name in turns(list(calls), max(number, 0)):
            us = host_us(calls[name])
            if number >= 0:
                samples[name].append(us)
    return {name: statistics.median(each) for name, each in samples.items()}


def host_us(call: Call) -> float:
    """Microseconds a call, of CALLS that are queued on an idle GPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    taken = time.perf_counter() - start
    torch.cuda.synchronize()
    return 1e6 * taken / CALLS


def launches_of(call: Call) -> int:
    """How many kernels a call launches."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return sum("CUDA" in str(event.device_type) for event in seen.events() or ())


if __name__ == "__main__":
    main()
