"""Cache layout: what an allocator and a kernel must agree on, as a text that calls are given."""

from __future__ import annotations

import torch

from .problem import KV_LAYOUTS, ProblemError

CACHE_LAYOUT_VERSION = 1  # raised when bytes of a cache come to mean something else


def kv_identity(kv_layout: str = "nhd", page_size: int = 0) -> str:
    """What caches of this layout are called: to be kept with a cache, and given as `kv_layout`.

    decode() and append_kv() refuse it where the module reads caches otherwise, or where the cache
    has pages of another size; 0 is a cache without pages. Raises ProblemError.
    """
    if kv_layout not in KV_LAYOUTS or page_size < 0:
        raise ProblemError(f"kv_identity: no caches are {kv_layout!r} with pages of {page_size}")
    return f"{kv_layout}:{page_size}:{CACHE_LAYOUT_VERSION}"


def identified_layout(
    function: str, kv_layout: str, k_cache: torch.Tensor, paged: bool | None
) -> str:
    """The layout that is given or that an identity names; `paged` is None where no call can tell.

    Raises ProblemError where the cache is not what its identity says.
    """
    name, *told = kv_layout.split(":")
    if not told or name not in KV_LAYOUTS or k_cache.dim() != 4:
        return kv_layout  # no identity: what else is wrong is told later
    page_size = k_cache.shape[1 if name == "nhd" else 2]
    if paged is None:
        paged = told[0] != "0"
    expected = kv_identity(name, page_size if paged else 0)
    if kv_layout != expected:
        raise ProblemError(f"{function}: kv_layout is {kv_layout}, this cache is {expected}")
    return name
