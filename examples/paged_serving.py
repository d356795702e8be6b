"""Serve a batch of growing sequences from a paged cache, with an exported module.

    python examples/paged_serving.py out/attention_dispatch.py

A shared prompt is in the cache once: the full pages of it stand in every sequence's block table and
are given back when the last of them ends. What a sequence has beyond it is prefilled over its
pages, in one chunk. Each step appends one token a sequence and decodes the batch; sequences end at
different lengths, their pages go to those that wait. One attention layer
with random keys, values and queries stands for a model. Every result is compared with attention
written out in fp64: twice the error of the same sums in fp32 with P and the output rounded is
allowed. Without a GPU the kernels run in triton's interpreter. Exits with 1 if a result is wrong.
"""

import argparse
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

import torch

DTYPE = torch.bfloat16
ALLOWED_RATIO = 2.0


class PageAllocator:
    """Hands out pages; a page is free again when everyone who holds it has released it."""

    def __init__(self, num_pages: int) -> None:
        self._free = list(range(num_pages))[::-1]
        self._holders = [0] * num_pages

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int:
        """A free page. Raises IndexError when there is none: a server would let a request wait."""
        page = self._free.pop()
        self._holders[page] = 1
        return page

    def share(self, page: int) -> int:
        """The same page for one more holder."""
        self._holders[page] += 1
        return page

    def release(self, page: int) -> None:
        self._holders[page] -= 1
        if self._holders[page] == 0:
            self._free.append(page)


@dataclass
class Sequence:
    """A request: its pages, and the keys and values it has, which only the check looks at."""

    ends_at: int  # tokens
    pages: list[int] = field(default_factory=list)
    k: torch.Tensor = field(default_factory=lambda: torch.empty(0))  # (tokens, kv heads, head_dim)
    v: torch.Tensor = field(default_factory=lambda: torch.empty(0))


class Server:
    """The cache of one layer, its pages, and the sequences that are being served."""

    def __init__(self, module: ModuleType, sizes: argparse.Namespace, device: str) -> None:
        self.module, self.sizes, self.device = module, sizes, device
        self.allocator = PageAllocator(sizes.pages)
        shape = (sizes.pages, sizes.page_size, sizes.num_kv_heads, sizes.head_dim)
        # what no token was written to may hold anything
        self.k_cache, self.v_cache = (
            torch.full(shape, float("nan"), device=device, dtype=DTYPE) for _ in "kv"
        )
        self.made = torch.Generator(device).manual_seed(0)
        self.worst = 0.0  # of errors over what is allowed

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device, generator=self.made).to(DTYPE)

    def tokens(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of new tokens, as a model's projections would give them."""
        shape = (count, self.sizes.num_kv_heads, self.sizes.head_dim)
        return self.normal(*shape), self.normal(*shape)

    def append(self, sequence: Sequence, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write tokens behind those that the sequence has, on new pages where the last is full."""
        size, first = self.sizes.page_size, len(sequence.k)
        slots = []
        for token in range(first, first + len(k)):
            if token == len(sequence.pages) * size:
                sequence.pages.append(self.allocator.take())
            slots.append(sequence.pages[token // size] * size + token % size)
        slot_mapping = torch.tensor(slots, device=self.device)
        self.module.append_kv(k, v, self.k_cache, self.v_cache, slot_mapping)
        sequence.k = torch.cat([sequence.k, k]) if first else k
        sequence.v = torch.cat([sequence.v, v]) if first else v

    def admit(self, prefix: Sequence, own_tokens: int, ends_at: int) -> Sequence:
        """A sequence that begins with the prefix and has tokens of its own, prefilled."""
        size = self.sizes.page_size
        shared = len(prefix.k) // size  # full pages; a page that is still written to is not shared
        sequence = Sequence(ends_at, [self.allocator.share(page) for page in prefix.pages[:shared]])
        sequence.k, sequence.v = prefix.k[: shared * size], prefix.v[: shared * size]
        rest_k, rest_v = prefix.k[shared * size :], prefix.v[shared * size :]
        own_k, own_v = self.tokens(own_tokens)
        self.append(sequence, torch.cat([rest_k, own_k]), torch.cat([rest_v, own_v]))
        q = self.normal(1, own_tokens, self.sizes.num_heads, self.sizes.head_dim)
        # the queries of its own tokens, over all keys: positions are aligned at the end
        caches = (self.k_cache, self.v_cache)
        out = self.module.prefill(q, *caches, causal=True, **self.tables([sequence]))
        self.check(out[0], q[0], sequence)
        return sequence

    def tables(self, batch: list[Sequence]) -> dict[str, torch.Tensor]:
        """How many keys each sequence has, and on which pages they are."""
        lengths = torch.tensor([len(each.k) for each in batch], dtype=torch.int32)
        table = torch.zeros(len(batch), max(len(each.pages) for each in batch), dtype=torch.int32)
        for row, sequence in enumerate(batch):
            table[row, : len(sequence.pages)] = torch.tensor(sequence.pages)
        return {
            "cache_seqlens": lengths.to(self.device),
            "block_table": table.to(self.device),
        }

    def step(self, batch: list[Sequence]) -> None:
        """One more token of every sequence: appended, then attended from."""
        for sequence in batch:
            self.append(sequence, *self.tokens(1))
        q = self.normal(len(batch), self.sizes.num_heads, self.sizes.head_dim)
        out = self.module.decode(q, self.k_cache, self.v_cache, **self.tables(batch))
        for row, sequence in enumerate(batch):
            self.check(out[row : row + 1], q[row : row + 1], sequence)

    def retire(self, batch: list[Sequence]) -> list[Sequence]:
        """Those that go on; the pages of the others are released."""
        for sequence in batch:
            if len(sequence.k) >= sequence.ends_at:
                for page in sequence.pages:
                    self.allocator.release(page)
        return [sequence for sequence in batch if len(sequence.k) < sequence.ends_at]

    def check(self, out: torch.Tensor, q: torch.Tensor, sequence: Sequence) -> None:
        """Compare the last tokens' results, (tokens, heads, head_dim), with fp64."""
        exact = attention(q, sequence.k, sequence.v, torch.float64)
        rounded = attention(q, sequence.k, sequence.v, torch.float32).to(DTYPE).double()
        rms = exact.pow(2).mean(dim=-1, keepdim=True).sqrt()
        unit = torch.finfo(DTYPE).eps / 2 * exact.abs().amax(dim=-1, keepdim=True) / rms
        error = ((out.double() - exact).abs() / rms - unit).max()
        allowed = ALLOWED_RATIO * ((rounded - exact).abs() / rms).max()
        ratio = (error / allowed).item()
        self.worst = max(self.worst, ratio if ratio == ratio else float("inf"))


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Causal attention of the last tokens, (tokens, heads, head_dim); in fp32 P is rounded."""
    group_size = q.shape[1] // k.shape[1]
    queries = q.to(dtype).transpose(0, 1)
    keys, values = (
        each.to(dtype).transpose(0, 1).repeat_interleave(group_size, 0) for each in (k, v)
    )
    scores = queries @ keys.transpose(1, 2) * q.shape[2] ** -0.5
    hidden = torch.ones(len(q), len(k), device=q.device).triu(len(k) - len(q) + 1).bool()
    p = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    if dtype == torch.float32:
        p = p.to(DTYPE).float()
    return (p @ values).transpose(0, 1)


def main() -> int:
    arguments = parsed()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    server = Server(import_by_path(arguments.module), arguments, device)
    prefix = Sequence(ends_at=arguments.prefix)
    server.append(prefix, *server.tokens(arguments.prefix))
    waiting = list(range(arguments.sequences))
    batch: list[Sequence] = []
    steps = 0
    while waiting or batch:
        while waiting and len(batch) < arguments.batch:
            number = waiting.pop(0)
            own, more = 3 + number % 5, 4 + 3 * number % 7  # prompts and answers of several lengths
            batch.append(server.admit(prefix, own, arguments.prefix + own + more))
        server.step(batch)
        steps += 1
        held = arguments.pages - server.allocator.num_free
        print(f"step {steps}: {len(batch)} sequences on {held} pages")
        batch = server.retire(batch)
    server.retire([prefix])
    print(f"{server.allocator.num_free} of {arguments.pages} pages are free again")
    print(f"largest error: {server.worst:.2f} of what is allowed")
    return 0 if server.worst <= 1 and server.allocator.num_free == arguments.pages else 1


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serve growing sequences from a paged cache.")
    parser.add_argument("module", type=Path, help="the exported attention_dispatch.py")
    parser.add_argument("--sequences", type=int, default=24, help="requests in all")
    parser.add_argument("--batch", type=int, default=8, help="requests that are served at once")
    parser.add_argument("--prefix", type=int, default=100, help="tokens that all begin with")
    parser.add_argument("--pages", type=int, default=128)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--num-heads", type=int, default=8)
    parser.add_argument("--num-kv-heads", type=int, default=2)
    parser.add_argument("--head-dim", type=int, default=128)
    return parser.parse_args()


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
