"""Check an exported module against torch's SDPA on the shapes of a workload, and print a table.

    python examples/check_against_sdpa.py out/attention_dispatch.py examples/quickstart.yaml

The reference is SDPA in fp64. What is allowed is derived: twice the error that a plain computation
with fp32 scores makes when it rounds P and the output to the input type, plus one rounding unit.
With a GPU the table also has times, each beside SDPA's own in the input type; they are of CUDA
graphs over warm caches, a first look: benchmarks/ measures with care. Without a GPU the kernels run
in triton's interpreter, at small sizes. Exits with 1 if a shape is wrong.
"""

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F

from autoflash.problem import Problem, title
from autoflash.workload import load_workload

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SCORES_AT_ONCE = 2**26  # bounds the fp64 score matrix, in elements
SMALL = {"batch": 2, "num_kv_heads": 2, "seqlen_q": 128, "seqlen_k": 256}  # for the interpreter


@dataclass
class Call:
    """One call of the module: its inputs heads first, what it gave, and how to make it again.

    q is (batch, num_heads, seqlen_q, head_dim), k and v (batch, num_kv_heads, seqlen_k, head_dim).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    again: Callable[[], object]


def main() -> int:
    parser = argparse.ArgumentParser(description="Check an exported module against SDPA.")
    parser.add_argument("module", type=Path, help="the exported attention_dispatch.py")
    parser.add_argument("workload", type=Path, help="a workload's YAML file")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    module = import_by_path(arguments.module)
    problems = [problem for problem, _ in load_workload(arguments.workload).problems]
    if device == "cpu":
        problems = list(dict.fromkeys(map(shrink, problems)))
        print("no GPU: kernels run in triton's interpreter, at small sizes, and are not timed")
    wrong = 0
    for problem in problems:
        call = run(module, problem, device)
        error, allowed = errors(problem, call)
        wrong += error > allowed
        verdict = "right" if error <= allowed else "WRONG"
        print(f"{verdict}  error {error:7.4f} of {allowed:7.4f} allowed", end="")
        if device == "cuda":
            ours, sdpa = microseconds(call.again), microseconds(partial(peer, problem, call))
            print(f"  {ours:9.1f} us, SDPA {sdpa:9.1f} us", end="")
        print(f"  {title(problem)}")
    print(f"{len(problems) - wrong} of {len(problems)} shapes agree with SDPA")
    return 1 if wrong else 0


def import_by_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"error: {path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def shrink(problem: Problem) -> Problem:
    """The problem cut down to what the interpreter does in seconds; its group size stays."""
    sizes = {name: min(getattr(problem, name), most) for name, most in SMALL.items()}
    return replace(problem, num_heads=sizes["num_kv_heads"] * problem.group_size, **sizes)


def run(module: ModuleType, problem: Problem, device: str) -> Call:
    """Random inputs of the problem, given to the module as a server or a trainer would."""
    p, dtype = problem, DTYPES[problem.dtype]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    q = normal(p.batch, p.seqlen_q, p.num_heads, p.head_dim)
    k = normal(p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim)
    v = normal(p.batch, p.seqlen_k, p.num_kv_heads, p.head_dim)
    if p.op == "prefill":
        inputs = [t if p.layout == "bshd" else t.transpose(1, 2).contiguous() for t in (q, k, v)]

        def again() -> torch.Tensor:
            return module.prefill(*inputs, causal=p.causal, layout=p.layout)

        out = again() if p.layout == "bhsd" else again().transpose(1, 2)
    else:
        caches, block_table = (k, v), None
        if p.paged:
            pages = -(-p.seqlen_k // p.page_size)
            order = torch.randperm(p.batch * pages, generator=torch.Generator().manual_seed(0))
            block_table = order.view(p.batch, pages).to(device=device, dtype=torch.int32)
            caches = tuple(paged(cache, block_table, p.page_size) for cache in caches)
        if p.kv_layout == "hnd":
            caches = tuple(cache.transpose(1, 2).contiguous() for cache in caches)
        cache_seqlens = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=device)

        def again() -> torch.Tensor:
            return module.decode(
                q,
                *caches,
                cache_seqlens,
                block_table=block_table,
                kv_layout=p.kv_layout,
                max_seqlen_k=p.seqlen_k,
                lengths="equal",
            )

        out = again().transpose(1, 2)
    return Call(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), out, again)


def paged(cache: torch.Tensor, block_table: torch.Tensor, page_size: int) -> torch.Tensor:
    """A contiguous cache (batch, tokens, kv heads, d) laid into pages in the table's order."""
    _, tokens, heads, head_dim = cache.shape
    padded = F.pad(cache, (0, 0, 0, 0, 0, -tokens % page_size))
    pages = torch.empty((block_table.numel(), page_size, heads, head_dim)).to(cache)
    pages[block_table.flatten().long()] = padded.reshape(-1, page_size, heads, head_dim)
    return pages


def errors(problem: Problem, call: Call) -> tuple[float, float]:
    """The largest error of the module over its row's RMS, and the largest that is allowed."""
    worst = plain_worst = unit = 0.0
    epsilon = torch.finfo(call.out.dtype).eps / 2
    for b, rows, mask in row_blocks(problem, call):
        q, k, v = call.q[b, :, rows], call.k[b], call.v[b]
        expected = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=mask, enable_gqa=True
        ).nan_to_num()  # SDPA gives NaN where a row sees no key
        rms = expected.square().mean(dim=-1, keepdim=True).sqrt().clamp_min(1e-300)
        error = (call.out[b, :, rows].double() - expected).abs() / rms
        if not error.isfinite().all():
            return float("inf"), 0.0
        worst = max(worst, error.max().item())
        plain_error = (plain(q, k, v, mask).double() - expected).abs() / rms
        plain_worst = max(plain_worst, plain_error.max().item())
        unit = max(unit, (epsilon * expected.abs().amax(dim=-1, keepdim=True) / rms).max().item())
    return worst, 2 * plain_worst + unit


def row_blocks(
    problem: Problem, call: Call
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
    """Sequence, query rows and their mask (rows, keys), a bounded number of scores at a time."""
    keys = torch.arange(problem.seqlen_k, device=call.q.device)
    rows_at_once = max(1, SCORES_AT_ONCE // (problem.num_heads * problem.seqlen_k))
    for b in range(problem.batch):
        for rows in torch.arange(problem.seqlen_q, device=call.q.device).split(rows_at_once):
            last_seen = rows + problem.seqlen_k - problem.seqlen_q  # bottom-right aligned
            yield b, rows, keys[None] <= last_seen[:, None] if problem.causal else None


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Attention with fp32 scores and sums, P and the output rounded to the inputs' type."""
    group_size = q.shape[0] // k.shape[0]
    k, v = (t.float().repeat_interleave(group_size, dim=0) for t in (k, v))
    scores = q.float() @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    p = (scores - scores.amax(dim=-1, keepdim=True)).exp()
    return (p.to(q.dtype).float() @ v / p.sum(dim=-1, keepdim=True)).nan_to_num().to(q.dtype)


def peer(problem: Problem, call: Call) -> torch.Tensor:
    """SDPA in the input type on contiguous tensors; its causal mask fits equal lengths only."""
    causal = problem.causal and problem.seqlen_q == problem.seqlen_k
    return F.scaled_dot_product_attention(
        call.q, call.k, call.v, is_causal=causal, enable_gqa=problem.group_size > 1
    )


def microseconds(function: Callable[[], object]) -> float:
    from triton.testing import do_bench_cudagraph

    milliseconds = do_bench_cudagraph(function, return_mode="median")
    assert isinstance(milliseconds, float)
    return 1000 * milliseconds


if __name__ == "__main__":
    sys.exit(main())
