"""A small serving engine around an exported module: prompts, pages dealt as needed, decode steps.

    python examples/serving.py attention_dispatch.py

One layer of attention with random projections stands for the model. Without a GPU set
TRITON_INTERPRET=1: the kernels run in Triton's interpreter, slowly.
"""

import argparse
import importlib.util
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 8, 2, 64
PAGE_SIZE, NUM_PAGES = 16, 256
DTYPE = torch.bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("module", type=Path, help="made by autoflash export")
    parser.add_argument("--steps", type=int, default=8)
    options = parser.parse_args()
    engine = Engine(load(options.module), "cuda" if torch.cuda.is_available() else "cpu")
    for tokens in (37, 5, 64):
        engine.add_prompt(tokens)
    for _ in range(options.steps):
        engine.step()
    print(f"sequences of {[s.length for s in engine.sequences]} tokens")
    print(f"calls served: {engine.attention.coverage()}")


def load(path: Path) -> ModuleType:
    """The exported module at `path`."""
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None, f"{path} is no Python file"
    module = importlib.util.module_from_spec(found)
    sys.modules[path.stem] = module  # where dataclasses of the module are looked up
    found.loader.exec_module(module)
    return module


@dataclass
class Sequence:
    """One request: its pages in order, how many tokens they hold, and its last hidden state."""

    hidden: torch.Tensor  # (NUM_HEADS * HEAD_DIM,)
    pages: list[int] = field(default_factory=list)
    length: int = 0


class Engine:
    """Serves sequences with one layer of attention over a cache of pages."""

    def __init__(self, attention: ModuleType, device: str, seed: int = 0) -> None:
        self.attention, self.device = attention, device
        self.generator = torch.Generator(device).manual_seed(seed)
        width, kv_width = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        self.project = self._normal(width, width + 2 * kv_width) * width**-0.5
        cache = (NUM_PAGES, PAGE_SIZE, NUM_KV_HEADS, HEAD_DIM)
        self.k_cache = torch.zeros(cache, dtype=DTYPE, device=device)
        self.v_cache = torch.zeros(cache, dtype=DTYPE, device=device)
        self.free = list(range(NUM_PAGES))
        self.sequences: list[Sequence] = []

    def add_prompt(self, tokens: int) -> torch.Tensor:
        """Attention over a prompt of random tokens, whose k and v go to the cache.

        Gives (tokens, NUM_HEADS, HEAD_DIM).
        """
        q, k, v = self._qkv(self._normal(tokens, NUM_HEADS * HEAD_DIM))
        out = self.attention.prefill(q[None], k[None], v[None], causal=True)[0]
        sequence = Sequence(hidden=out[-1].flatten())
        slots = self._grow(sequence, tokens)
        self.attention.append_kv(k, v, self.k_cache, self.v_cache, self._long(slots))
        self.sequences.append(sequence)
        return out

    def step(self) -> torch.Tensor:
        """One more token for every sequence; gives (sequences, NUM_HEADS, HEAD_DIM)."""
        q, k, v = self._qkv(torch.stack([s.hidden for s in self.sequences]))
        slots = [self._grow(sequence, 1)[0] for sequence in self.sequences]
        self.attention.append_kv(k, v, self.k_cache, self.v_cache, self._long(slots))
        lengths = [sequence.length for sequence in self.sequences]
        out = self.attention.decode(
            q,
            self.k_cache,
            self.v_cache,
            torch.tensor(lengths, dtype=torch.int32, device=self.device),
            block_table=self.block_table(),
            max_seqlen_k=max(lengths),
        )
        for sequence, hidden in zip(self.sequences, out.flatten(1), strict=True):
            sequence.hidden = hidden
        return out

    def block_table(self) -> torch.Tensor:
        """The pages of each sequence; entries past the last page are never read."""
        widest = max(len(sequence.pages) for sequence in self.sequences)
        rows = [s.pages + [-1] * (widest - len(s.pages)) for s in self.sequences]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def _grow(self, sequence: Sequence, tokens: int) -> list[int]:
        """Room for so many tokens more, in pages that are free: the slot of each."""
        places = range(sequence.length, sequence.length + tokens)
        sequence.length += tokens
        while len(sequence.pages) * PAGE_SIZE < sequence.length:
            sequence.pages.append(self.free.pop())
        return [sequence.pages[at // PAGE_SIZE] * PAGE_SIZE + at % PAGE_SIZE for at in places]

    def _qkv(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """q, k and v of some tokens: (tokens, heads, HEAD_DIM) each."""
        heads = (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        parts = (hidden @ self.project).split([count * HEAD_DIM for count in heads], dim=-1)
        return tuple(
            part.unflatten(-1, (count, HEAD_DIM)) for part, count in zip(parts, heads, strict=True)
        )

    def _normal(self, *shape: int) -> torch.Tensor:
        drawn = torch.randn(shape, generator=self.generator, device=self.device)
        return drawn.to(DTYPE)

    def _long(self, slots: list[int]) -> torch.Tensor:
        return torch.tensor(slots, dtype=torch.int64, device=self.device)


if __name__ == "__main__":
    main()
