"""Transformers: models of Hugging Face's library attend by prefill() and decode()."""

from __future__ import annotations

from typing import Any

import torch

from .dispatch import decode, prefill
from .problem import ProblemError

STEP_TOKENS = 16  # queries of a sequence that decode() takes at most


def register_attention(name: str = "attention_dispatch") -> None:
    """Make `attn_implementation=name` of transformers' models call this module.

    With caches that grow and static ones, sliding windows, softcaps and sinks. Batches of several
    lengths that are padded are refused; a server keeps them in pages. Raises ProblemError for a
    name with "flash" in it, which transformers takes for a package that it is to load.
    """
    from transformers import (  # pyright: ignore[reportMissingImports]
        AttentionInterface,
        AttentionMaskInterface,
    )

    if "flash" in name:
        raise ProblemError(
            f"register_attention: name {name!r} has 'flash' in it: transformers would look for a"
            " package of that name"
        )
    AttentionInterface.register(name, attend_layer)
    AttentionMaskInterface.register(name, lengths_for_mask)


def attend_layer(
    layer: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """As transformers calls it, `attention_mask` of lengths_for_mask() and `s_aux` the sinks.

    query, key and value are (batch, heads, tokens, head_dim), the result (batch, tokens, heads,
    head_dim).
    """
    if is_causal is None:
        is_causal = bool(getattr(layer, "is_causal", True))
    modified = {
        "window": (sliding_window - 1, -1) if sliding_window else (-1, -1),
        "softmax_scale": scaling,
        "softcap": softcap or 0.0,
        "sinks": s_aux,
    }
    q = query.transpose(1, 2)  # as it lies, and the result: the layer's next product copies nothing
    if query.shape[2] <= STEP_TOKENS and is_causal and not dropout:
        if attention_mask is None:
            lengths = key.new_full(key.shape[:1], key.shape[2], dtype=torch.int32)
        else:
            lengths = attention_mask.flatten()
        return decode(q, key, value, lengths, kv_layout="hnd", **modified), None
    if attention_mask is not None:  # what a static cache holds so far
        keys = _keys_so_far(attention_mask)
        key, value = key[:, :, :keys], value[:, :, :keys]
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    return prefill(q, k, v, causal=is_causal, dropout_p=dropout, **modified), None


def lengths_for_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | torch.Tensor = 0,
    kv_offset: int | torch.Tensor = 0,
    attention_mask: torch.Tensor | None = None,
    device: torch.device | str | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """In place of a mask: how many keys there are up to the last query, int32 (batch, 1, 1, 1).

    None where that is all of them, as in caches that grow. Raises ProblemError for padded batches.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ProblemError("padded batches are not supported: pages take lengths that differ")
    keys = q_offset + q_length - kv_offset
    if isinstance(keys, int) and keys == kv_length:
        return None
    lengths = (torch.zeros(batch_size, 1, 1, 1, dtype=torch.int32, device=device) + keys).int()
    if isinstance(keys, int):
        lengths.keys_so_far = keys  # pyright: ignore[reportAttributeAccessIssue]
    return lengths


def _keys_so_far(lengths: torch.Tensor) -> int:
    """What all of the lengths are, asked of the device once for all layers of a step."""
    keys = getattr(lengths, "keys_so_far", None)
    if keys is None:
        keys = int(lengths.flatten()[0])
        lengths.keys_so_far = keys  # pyright: ignore[reportAttributeAccessIssue]
    return keys
