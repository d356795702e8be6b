"""Types of the arguments of the exported functions, looked at where a call is not recalled."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .problem import ProblemError


class Kind(NamedTuple):
    """What an argument may be: as it is told, and the types."""

    told: str
    types: tuple[type, ...]


NONE_TYPE = type(None)
ANYTHING = Kind("anything", (object,))
TENSOR = Kind("a tensor", (torch.Tensor,))
TENSOR_OR_NONE = Kind("a tensor or None", (torch.Tensor, NONE_TYPE))
WHOLE_OR_NONE = Kind("a whole number or None", (int, NONE_TYPE))
NUMBER = Kind("a number", (float, int))
NUMBER_OR_NONE = Kind("a number or None", (float, int, NONE_TYPE))
SCALE = Kind("a number, a tensor or None", (float, int, torch.Tensor, NONE_TYPE))
TEXT = Kind("a string", (str,))
SIDES = Kind("(keys before, keys after)", (tuple, list))
MODIFIER_KINDS = {"alibi_slopes": TENSOR_OR_NONE, "bias": TENSOR_OR_NONE, "sinks": TENSOR_OR_NONE}
SCALED_KINDS = {"window": SIDES, "softmax_scale": NUMBER_OR_NONE, "softcap": NUMBER}
ENDS = {"cu_seqlens_q": TENSOR_OR_NONE, "cu_seqlens_k": TENSOR_OR_NONE}
MOST = {"max_seqlen_q": WHOLE_OR_NONE, "max_seqlen_k": WHOLE_OR_NONE}

# In the order of each function's arguments.
KINDS: dict[str, dict[str, Kind]] = {
    "prefill": {
        **dict.fromkeys(("q", "k", "v"), TENSOR),
        "causal": ANYTHING,
        **SCALED_KINDS,
        **MODIFIER_KINDS,
        "block_mask": ANYTHING,
        **dict.fromkeys(("document_ids", "prefix_lens"), TENSOR_OR_NONE),
        **dict.fromkeys(("mask", "density"), ANYTHING),
        **ENDS,
        **MOST,
        **dict.fromkeys(("cache_seqlens", "block_table"), TENSOR_OR_NONE),
        "kv_layout": TEXT,
        **dict.fromkeys(("q_scale", "k_scale", "v_scale"), ANYTHING),
        "layout": TEXT,
        "out": TENSOR_OR_NONE,
        "return_lse": ANYTHING,
        "dropout_p": NUMBER,
        "rng": TENSOR_OR_NONE,
        **dict.fromkeys(("deterministic", "batch_invariant", "check"), ANYTHING),
    },
    "decode": {
        **dict.fromkeys(("q", "k_cache"), TENSOR),
        "v_cache": TENSOR_OR_NONE,
        "cache_seqlens": TENSOR,
        "block_table": TENSOR_OR_NONE,
        "kv_layout": TEXT,
        "max_seqlen_k": WHOLE_OR_NONE,
        **dict.fromkeys(("lengths", "pages"), TEXT),
        **SCALED_KINDS,
        **MODIFIER_KINDS,
        "block_mask": ANYTHING,
        **dict.fromkeys(("document_ids", "prefix_lens"), TENSOR_OR_NONE),
        **dict.fromkeys(("mask", "density"), ANYTHING),
        "page_positions": TENSOR_OR_NONE,
        **dict.fromkeys(("k_scale", "v_scale"), SCALE),
        "out": TENSOR_OR_NONE,
        **dict.fromkeys(("return_lse", "batch_invariant", "check"), ANYTHING),
    },
    "append_kv": {
        **dict.fromkeys(("k", "v", "k_cache", "v_cache", "slot_mapping"), TENSOR),
        "kv_layout": TEXT,
        **dict.fromkeys(("k_scale", "v_scale"), SCALE),
    },
    "merge": {
        **dict.fromkeys(("out_a", "lse_a", "out_b", "lse_b"), TENSOR),
        "layout": TEXT,
    },
}
ALLOWED = {function: [kind.types for kind in kinds.values()] for function, kinds in KINDS.items()}


def refuse_types(function: str, values: tuple[Any, ...]) -> None:
    """Raise ProblemError naming the first of all the function's arguments that is of a wrong type.

    Whether a number is one that fits, or a tensor, is for those to tell who read it.
    """
    if all(map(isinstance, values, ALLOWED[function])):
        return
    for (name, kind), value in zip(KINDS[function].items(), values, strict=True):
        if not isinstance(value, kind.types):
            raise ProblemError(
                f"{function}: {name} must be {kind.told}, given {type(value).__name__}"
            )
