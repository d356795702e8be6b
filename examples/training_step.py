"""Train a small language model some steps with an exported module's attention, and with SDPA's.

    python examples/training_step.py out/attention_dispatch.py

The module must carry a backward: one exported from a workload in which a prefill says
`training: true`. Both models begin with the same weights and see the same tokens, sequences in
which each token follows from the two before it; their losses are printed side by side. Without a
GPU the kernels run in triton's interpreter, at a small size. Exits with 1 if a loss is not finite
or the last one is not below the first.
"""

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import nn

# q (batch, tokens, num_heads, head_dim), k and v (batch, tokens, num_kv_heads, head_dim) to `out`
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Sizes:
    batch: int = 8
    tokens: int = 1024
    vocabulary: int = 64
    layers: int = 4
    num_heads: int = 8
    num_kv_heads: int = 2
    head_dim: int = 64


SMALL = Sizes(batch=2, tokens=24, vocabulary=8, layers=1, num_heads=2, num_kv_heads=1, head_dim=16)


def main() -> int:
    parser = argparse.ArgumentParser(description="Train a small model with an exported module.")
    parser.add_argument("module", type=Path, help="the exported attention_dispatch.py")
    parser.add_argument("--steps", type=int, default=0, help="of training; 100, without a GPU 4")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        print("no GPU: kernels run in triton's interpreter, at a small size")
    module = import_by_path(arguments.module)
    sizes, steps = (Sizes(), 100) if device == "cuda" else (SMALL, 4)
    attend = partial(module.prefill, causal=True)
    ours, sdpas = (losses(each, sizes, arguments.steps or steps, device) for each in (attend, sdpa))
    for step, (loss, other) in enumerate(zip(ours, sdpas, strict=True), 1):
        print(f"step {step:4d}  loss {loss:8.5f}  with SDPA {other:8.5f}")
    return 0 if all(map(math.isfinite, ours)) and ours[-1] < ours[0] else 1


def losses(attend: Attention, sizes: Sizes, steps: int, device: str) -> list[float]:
    """The loss of each step of training a model that attends so, always from the same weights."""
    torch.manual_seed(0)
    model = LanguageModel(sizes, attend).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(steps):
        tokens = sequences(sizes, generator).to(device)
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def sequences(sizes: Sizes, generator: torch.Generator) -> torch.Tensor:
    """(batch, tokens + 1), in which each token is the sum of the two before it."""
    rows = torch.empty(sizes.batch, sizes.tokens + 1, dtype=torch.long)
    rows[:, :2] = torch.randint(sizes.vocabulary, (sizes.batch, 2), generator=generator)
    for i in range(2, sizes.tokens + 1):
        rows[:, i] = (rows[:, i - 1] + rows[:, i - 2]) % sizes.vocabulary
    return rows


class LanguageModel(nn.Module):
    """Embedding, layers of attention and MLP, and a head; fp32, with attention in bf16."""

    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        width = sizes.num_heads * sizes.head_dim
        self.embedding = nn.Embedding(sizes.vocabulary, width)
        self.layers = nn.ModuleList(Layer(sizes, attend) for _ in range(sizes.layers))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, sizes.vocabulary))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Layer(nn.Module):
    def __init__(self, sizes: Sizes, attend: Attention) -> None:
        super().__init__()
        width, kv_width = (n * sizes.head_dim for n in (sizes.num_heads, sizes.num_kv_heads))
        self.attend, self.head_dim = attend, sizes.head_dim
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, kv_width, bias=False) for _ in range(2))
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norms[0](x)
        q, k, v = (
            linear(normed).unflatten(-1, (-1, self.head_dim)) for linear in (self.q, self.k, self.v)
        )
        q, k = rotated(q), rotated(k)
        attended = self.attend(q.bfloat16(), k.bfloat16(), v.bfloat16())
        x = x + self.out(attended.flatten(2).to(x.dtype))
        return x + self.mlp(self.norms[1](x))


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Rotary positions of (batch, tokens, heads, head_dim), the halves of a head in pairs."""
    tokens, half = x.shape[1], x.shape[3] // 2
    rates = 1e4 ** -(torch.arange(half, device=x.device) / half)
    angles = torch.arange(tokens, device=x.device)[:, None, None] * rates
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


def sdpa(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def import_by_path(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise SystemExit(f"error: {path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.exit(main())
