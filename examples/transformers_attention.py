"""Hugging Face models with an exported module's kernels.

    import attention_dispatch
    import transformers_attention

    transformers_attention.register(attention_dispatch)
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="attention_dispatch")

For inference of sequences without padding: a mask that hides more than what is causal or a sliding
window is refused, not ignored.
"""

from types import ModuleType
from typing import Any

import torch

NAME = "attention_dispatch"  # transformers takes a name with "flash" in it for a FlashAttention
MOST_QUERIES = 16  # of a decode step


def register(attention: ModuleType) -> None:
    """Make `attn_implementation="attention_dispatch"` call the module's prefill and decode."""
    from transformers import AttentionInterface  # pyright: ignore[reportMissingImports]

    def forward(
        layer: torch.nn.Module,
        query: torch.Tensor,  # (batch, heads, queries, head_dim)
        key: torch.Tensor,  # (batch, kv_heads, keys, head_dim), the cache's among them
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        if attention_mask is not None:
            raise ValueError("it serves sequences without padding: give no attention_mask")
        queries, keys = query.shape[2], key.shape[2]
        window = sliding_window if sliding_window and sliding_window < keys else 0
        if queries <= MOST_QUERIES < keys and not (window or softcap):
            lengths = torch.full((len(key),), keys, dtype=torch.int32, device=key.device)
            out = attention.decode(
                query.transpose(1, 2),
                key,
                value,
                lengths,
                kv_layout="hnd",
                max_seqlen_k=keys,
                lengths="equal",
                softmax_scale=scaling,
            )
            return out, None
        out = attention.prefill(
            query,
            key,
            value,
            causal=getattr(layer, "is_causal", True),
            window=(window - 1 if window else -1, -1),
            softcap=softcap or 0.0,
            softmax_scale=scaling,
            layout="bhsd",
        )
        return out.transpose(1, 2), None

    AttentionInterface.register(NAME, forward)
