"""An attention layer, forward and backward, beside SDPA and FlexAttention: one interleaved run.

Projections, rotary positions, attention and output of 4096 channels in bf16; causal alone, under a
window, and with an additive bias that is learnt, each with dropout and without; tuned by
benchmarks/workloads/training_layer.yaml. What is timed is a forward and the gradients of all
weights and of the input. Beside the times stand the bytes that a pass allocates at most, its own
results included, and how far the gradient of the input is from that of an fp32 attention; with
dropout only ours, as each peer drops others.

Then a small language model (examples/training_step.py) is trained with autoflash, and twice with
SDPA, by cuDNN and by flash, whose sums run in other orders: how far ours is from flash's, and how
far the two are from each other.
"""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from backward import timed
from harness import arguments, case_result, load_module, write_results
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from autoflash.dropout import dropout_weights
from autoflash.peers import peer_versions
from autoflash.peers.contender import Unavailable, told
from autoflash.runtime.dropping import whole_probability
from autoflash.runtime.modifiers import Modifiers

EXAMPLE = Path(__file__).parents[1] / "examples" / "training_step.py"
# q (batch, tokens, heads, head_dim), k, v and the bias or None, to `out`
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
BACKENDS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


@dataclass(frozen=True)
class Case:
    """`window` is how many keys before its own position a query sees, -1 all.

    `dropout` is the share of P that becomes 0.
    """

    name: str
    tokens: int
    batch: int
    window: int = -1
    bias: bool = False
    dropout: float = 0.0
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128


CASES = (
    Case("causal", 4096, 2),
    Case("causal 16k", 16384, 1),
    Case("window 1024", 16384, 1, window=1023),
    Case("bias", 2048, 4, bias=True),
    Case("causal, dropout", 4096, 2, dropout=0.1),
    Case("window 1024, dropout", 4096, 2, window=1023, dropout=0.1),
    Case("bias, dropout", 2048, 4, bias=True, dropout=0.1),
)
RNG = 20, 26  # of the pass whose error is told: seed and offset


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--gpu-ms", type=float, default=400.0, help="for a contender of a case")
    parser.add_argument("--steps", type=int, default=100, help="of training; 0 for none")
    options = parser.parse_args()
    module = load_module(options.module)
    results = []
    for case in CASES:
        if options.cases not in case.name:
            continue
        results.append(result_of(case, module, 1e3 * options.gpu_ms))
        found = results[-1]
        print(f"{case.name:12s} ours {found['ours']} us, peers {found['peers']}")
        print(f"{'':12s} temporary MiB {found['temporary_mib']}, errors {found['errors']}")
        for peer, reason in found.get("unavailable", {}).items():
            print(f"    {peer} is left out: {reason}")
        sys.stdout.flush()
        torch.cuda.empty_cache()
    curves = loss_curves(module, options.steps) if options.steps else {}
    print(curves.get("distances"))
    print(write_results("training_layer", results, peer_versions(), curves=curves))


class AttentionLayer(nn.Module):
    """x (batch, tokens, channels) to the same, by whatever attends; a bias for each head."""

    def __init__(self, case: Case, rotated: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        width, kv_width = (n * case.head_dim for n in (case.num_heads, case.num_kv_heads))
        self.head_dim, self.rotated = case.head_dim, rotated
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        shape = (1, case.num_heads, case.tokens, case.tokens)
        self.bias = nn.Parameter(torch.randn(shape)) if case.bias else None

    def forward(self, x: torch.Tensor, attend: Attend) -> torch.Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, self.head_dim)) for f in (self.q, self.k, self.v))
        q, k = (self.rotated(t.float()).to(x.dtype) for t in (q, k))
        return self.out(attend(q, k, v, self.bias).flatten(2))


def attentions(case: Case, module: ModuleType) -> dict[str, Attend]:
    """Everyone who takes part, by name."""
    found: dict[str, Attend] = {"autoflash": functools.partial(by_autoflash, module, case, None)}
    for name, backend in BACKENDS.items():
        found[name] = functools.partial(by_sdpa, backend, case)
    return {**found, "flex_attention": flex(case)}


def by_autoflash(
    module: ModuleType,
    case: Case,
    rng: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    dropped = {"dropout_p": case.dropout, "rng": rng}
    return module.prefill(q, k, v, causal=True, window=(case.window, -1), bias=bias, **dropped)


def by_sdpa(
    backend: SDPBackend,
    case: Case,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    mask = bias
    if case.window >= 0 or bias is not None:  # SDPA has one mask for all
        mask = visible(case, q.device).float().log().to(q.dtype) + (0.0 if bias is None else bias)
    heads_first = [t.transpose(1, 2) for t in (q, k, v)]
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(
            heads_first[0],
            heads_first[1],
            heads_first[2],
            attn_mask=mask,
            dropout_p=case.dropout,
            is_causal=mask is None,
            enable_gqa=True,
        )
    return out.transpose(1, 2)


def visible(case: Case, device: torch.device) -> torch.Tensor:
    """(tokens, tokens) booleans."""
    places = torch.arange(case.tokens, device=device)
    before = places[:, None] - places
    return (before >= 0) & (before <= (case.window if case.window >= 0 else case.tokens))


def flex(case: Case) -> Attend:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    if case.dropout:

        def none(*_: Any) -> torch.Tensor:
            raise Unavailable("has no dropout")

        return none
    compiled = torch.compile(flex_attention)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= case.window) if case.window >= 0 else i >= j

    mask = create_block_mask(seen, None, None, case.tokens, case.tokens)

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        def added(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return score if bias is None else score + bias[0, h, i, j]

        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out: Any = compiled(q, k, v, score_mod=added, block_mask=mask, enable_gqa=True)
        return out.transpose(1, 2)

    return attend


def result_of(case: Case, module: ModuleType, gpu_us: float) -> dict[str, Any]:
    """One case of the results. Raises SystemExit when it is autoflash that cannot do it."""
    rotated = load_module(EXAMPLE).rotated
    torch.manual_seed(0)
    layer = AttentionLayer(case, rotated).to("cuda", torch.bfloat16)
    shape = (case.batch, case.tokens, case.num_heads * case.head_dim)
    x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    dout = torch.randn_like(x)
    rng = torch.tensor(RNG, device="cuda")
    exact = gradients(layer, x, dout, functools.partial(in_fp32, case, rng))[0]
    calls, left_out, errors, temporary = {}, {}, {}, {}
    for name, attend in attentions(case, module).items():
        call = functools.partial(gradients, layer, x, dout, attend)
        try:
            call()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            found = call()[0]
        except Exception as error:  # a peer may raise anything: it is named with it
            left_out[name] = told(error)
            continue
        temporary[name] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 1)
        if case.dropout and name == "autoflash":
            same = functools.partial(by_autoflash, module, case, rng)
            found = gradients(layer, x, dout, same)[0]
        if not case.dropout or name == "autoflash":
            errors[name] = distance(found, exact)
        calls[name] = [call]
        del found
    if "autoflash" in left_out or not math.isfinite(errors["autoflash"]):
        raise SystemExit(f"error: {case.name}: {left_out.get('autoflash', 'not finite')}")
    times: Mapping[str, Any] = timed(calls, gpu_us)
    medians = {name: one.median_us for name, one in times.items()}
    more = {"temporary_mib": temporary, "errors": errors}
    return case_result(vars(case), medians, left_out, **more)


def gradients(
    layer: AttentionLayer, x: torch.Tensor, dout: torch.Tensor, attend: Attend
) -> tuple[torch.Tensor, ...]:
    """Those of the input and of all weights: a forward and a backward."""
    return torch.autograd.grad(layer(x, attend), (x, *layer.parameters()), dout)


def in_fp32(
    case: Case,
    rng: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Attention with scores in fp32, one head after the other, each computed again backward."""
    dropped = Modifiers(dropout_p=whole_probability(case.dropout), rng=rng)
    places = torch.arange(case.tokens, device=q.device)

    def weights(head: int) -> torch.Tensor | float:
        if not case.dropout:
            return 1.0
        of_head, every = slice(head, head + 1), (places, places, torch.float32)
        numbers = (
            dropout_weights(dropped, b, of_head, case.num_heads, *every) for b in range(q.shape[0])
        )
        return torch.cat([torch.as_tensor(each) for each in numbers])

    def of_head(
        head: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, added: Any
    ) -> torch.Tensor:
        scores = q.float() @ k.float().transpose(-1, -2) * case.head_dim**-0.5
        scores = scores if added is None else scores + added.float()
        scores = scores.masked_fill(~visible(case, q.device), float("-inf"))
        return (scores.softmax(-1) * weights(head) @ v.float()).to(q.dtype)

    from torch.utils.checkpoint import checkpoint

    group, outs = case.num_heads // case.num_kv_heads, []
    for head in range(case.num_heads):
        one = (q[:, :, head], k[:, :, head // group], v[:, :, head // group])
        added = None if bias is None else bias[:, head]
        outs.append(checkpoint(of_head, head, *one, added, use_reentrant=False))
    return torch.stack(outs, dim=2)  # pyright: ignore[reportArgumentType]


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    """The RMS of the difference over that of the exact one."""
    off = (found.float() - exact.float()).pow(2).mean().sqrt()
    return float(off / exact.float().pow(2).mean().sqrt())


def loss_curves(module: ModuleType, steps: int) -> dict[str, Any]:
    """The losses of three trainings, and how far they come from each other."""
    example = load_module(EXAMPLE)

    def by(backend: SDPBackend) -> Callable[..., torch.Tensor]:
        def attend(*qkv: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(backend):
                return example.sdpa(*qkv)

        return attend

    ways = {"autoflash": functools.partial(module.prefill, causal=True)}
    ways |= {name: by(backend) for name, backend in BACKENDS.items()}
    curves = {
        name: example.losses(attend, example.Sizes(), steps, "cuda")
        for name, attend in ways.items()
    }
    largest = {
        f"{one} and flash": max(abs(a - b) for a, b in zip(curves[one], curves["flash"]))
        for one in ("autoflash", "cudnn")
    }
    return {"losses": curves, "distances": largest}


if __name__ == "__main__":
    main()
