"""Dropout on the host: the mask that kernels draw by Philox, element for element the same.

Philox 4x32-10 and 2x32-10 (Salmon and others, Parallel random numbers: as easy as 1, 2, 3, 2011).
"""

import torch

from autoflash.runtime.dropping import DROPOUT_STEPS
from autoflash.runtime.modifiers import Modifiers

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PAIR_MULTIPLIER = 0xD256D193
KEY_STEPS = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF  # of 32 bits
Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Four random words of a counter's four under a key of two; int64 tensors that broadcast."""
    a, b, c, d = counter
    low, high = key
    for _ in range(ROUNDS):
        # a product of 64 bits wraps in int64 and has the right bits all the same
        of_a, of_c = a * MULTIPLIERS[0], c * MULTIPLIERS[1]
        a, c = (of_c >> 32 & WORD) ^ b ^ low, (of_a >> 32 & WORD) ^ d ^ high
        b, d = of_c & WORD, of_a & WORD
        low, high = low + KEY_STEPS[0] & WORD, high + KEY_STEPS[1] & WORD
    return a, b, c, d


def philox_pair(
    counter: tuple[torch.Tensor, torch.Tensor], key: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same of a counter and an answer of two words, under a key of one: Philox 2x32-10."""
    a, b = counter
    for _ in range(ROUNDS):
        product = a * PAIR_MULTIPLIER
        a, b = (product >> 32 & WORD) ^ key ^ b, product & WORD
        key = key + KEY_STEPS[0] & WORD
    return a, b


def dropout_numbers(
    rng: torch.Tensor,
    b: int,
    heads: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
) -> torch.Tensor:
    """The 16-bit numbers of elements of sequence `b`, (heads, queries, keys), int64.

    `heads`, `queries` and `keys` are indices. A counter of the call's offset, the head and the
    sequence gives the head's key and from where its rows count. Of each 16 queries i and i + 8
    share a row, of each 16 keys j and j + 8 a column: a counter of both gives the two words of the
    two queries, whose lower half is the first key's.
    """
    zero = torch.zeros((), dtype=torch.int64, device=rng.device)
    seed, offset = rng
    of_call = (offset & WORD, offset >> 32 & WORD, heads[:, None, None], zero + b)
    key, first_row, _, _ = philox(of_call, (seed & WORD, seed >> 32 & WORD))
    rows, of_query = torch.unique(_shared_by_two(queries), return_inverse=True)
    columns, of_key = torch.unique(_shared_by_two(keys), return_inverse=True)
    words = philox_pair((columns, rows[:, None] + first_row & WORD), key)
    halves = [torch.stack((word & 0xFFFF, word >> 16), dim=-1) for word in words]
    numbers = torch.stack(halves, dim=-2)  # (heads, rows, columns, 2 words, 2 halves)
    return numbers[:, of_query[:, None], of_key, (queries // 8 % 2)[:, None], keys // 8 % 2]


def _shared_by_two(places: torch.Tensor) -> torch.Tensor:
    """What i and i + 8 of each 16 have in common."""
    return places // 16 * 8 + places % 8


def dropped(
    p: torch.Tensor,
    modifiers: Modifiers,
    b: int,
    heads: slice,
    num_heads: int,
    queries: torch.Tensor,
) -> torch.Tensor:
    """P of sequence `b`, (heads, queries, all keys), after dropout; itself where there is none."""
    if modifiers.rng is None or not modifiers.dropout_p:
        return p
    keys = torch.arange(p.shape[2], device=p.device)
    return p * dropout_weights(modifiers, b, heads, num_heads, queries, keys, p.dtype)


def dropout_weights(
    modifiers: Modifiers,
    b: int,
    heads: slice,
    num_heads: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor | float:
    """What P of sequence `b` is multiplied by, (heads, queries, keys): 0 or 1 / (1 - p).

    `modifiers` are those that plans take; 1.0 without dropout.
    """
    if modifiers.rng is None or not modifiers.dropout_p:
        return 1.0
    every_head = torch.arange(num_heads, device=queries.device)[heads]
    numbers = dropout_numbers(modifiers.rng, b, every_head, queries, keys)
    kept = numbers >= round(modifiers.dropout_p * DROPOUT_STEPS)
    return kept.to(dtype) / (1.0 - modifiers.dropout_p)
