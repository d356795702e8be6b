"""Schemas: what the operators of torch take and give.

Required tensors come first; what may be left out comes last, the most used first, with the default
of the functions. The dispatcher converts each argument that it is handed, at each of its layers,
and hands on none past the last one that is no default.
"""

from __future__ import annotations

from ast import literal_eval
from typing import Any

PREFILL_OPTIONS = (
    "bool causal=False, float? softmax_scale=None, str layout='bshd', SymInt window_left=-1,"
    " SymInt window_right=-1, float softcap=0.0, Tensor? alibi_slopes=None, Tensor? bias=None,"
    " Tensor? sinks=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None,"
    " SymInt? max_seqlen_q=None, SymInt? max_seqlen_k=None, bool deterministic=False,"
    " bool check=False, float dropout_p=0.0, Tensor? rng=None, bool training=False"
)
MASK_OPTIONS = (  # of operators of their own: each takes time where it is left out, too
    "Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None,"
    " Tensor? full_kv_indices=None, SymInt mask_block_q=0, SymInt mask_block_k=0,"
    " Tensor? document_ids=None, Tensor? prefix_lens=None, str? mask=None, SymInt? density=None,"
    " Tensor? cache_seqlens=None, Tensor? block_table=None, str kv_layout='nhd',"
    " Tensor? q_num_blocks=None, Tensor? q_indices=None, Tensor? full_q_num_blocks=None,"
    " Tensor? full_q_indices=None"
)
CHUNK_OPTIONS = f"str kv_layout='nhd', {PREFILL_OPTIONS}"  # of operators of their own likewise
DECODE_OPTIONS = (
    "Tensor? block_table=None, SymInt? max_seqlen_k=None, str kv_layout='nhd',"
    " float? softmax_scale=None, Tensor? k_scale=None, Tensor? v_scale=None, float? k_number=None,"
    " float? v_number=None, SymInt window_left=-1, SymInt window_right=-1, float softcap=0.0,"
    " Tensor? alibi_slopes=None, Tensor? bias=None, Tensor? sinks=None,"
    " Tensor? page_positions=None, str lengths='ragged', str pages='permuted', bool check=False"
)
STEP_MASK_OPTIONS = (  # those of decode, likewise
    "str? mask=None, Tensor? document_ids=None, Tensor? prefix_lens=None, SymInt? density=None,"
    " Tensor? kv_num_blocks=None, Tensor? kv_indices=None, Tensor? full_kv_num_blocks=None,"
    " Tensor? full_kv_indices=None, SymInt mask_block_q=0, SymInt mask_block_k=0"
)
APPEND_OPTIONS = (
    "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, float? k_number=None,"
    " float? v_number=None, str kv_layout='nhd'"
)
PREFILL_READ = "Tensor q, Tensor k, Tensor v"
GRADIENTS_READ = (
    f"{PREFILL_READ}, Tensor out, Tensor lse, Tensor? dout, Tensor? dlse, bool of_bias,"
    " bool of_sinks"
)
GRADIENTS = "(Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dsinks)"
CHUNK_READ = f"{PREFILL_READ}, Tensor cache_seqlens, Tensor block_table"
DECODE_READ = "Tensor q, Tensor k_cache, Tensor? v_cache, Tensor cache_seqlens"
OPERATOR_SCHEMAS = {
    "prefill": f"({PREFILL_READ}, {PREFILL_OPTIONS}) -> (Tensor out, Tensor lse)",
    "prefill_out": f"({PREFILL_READ}, Tensor(a!) out, {PREFILL_OPTIONS}) -> Tensor lse",
    "prefill_masked": (
        f"({PREFILL_READ}, {MASK_OPTIONS}, {PREFILL_OPTIONS}) -> (Tensor out, Tensor lse)"
    ),
    "prefill_masked_out": (
        f"({PREFILL_READ}, Tensor(a!) out, {MASK_OPTIONS}, {PREFILL_OPTIONS}) -> Tensor lse"
    ),
    "prefill_chunked": f"({CHUNK_READ}, {CHUNK_OPTIONS}) -> (Tensor out, Tensor lse)",
    "prefill_chunked_out": f"({CHUNK_READ}, Tensor(a!) out, {CHUNK_OPTIONS}) -> Tensor lse",
    "prefill_gradients": f"({GRADIENTS_READ}, {PREFILL_OPTIONS}) -> {GRADIENTS}",
    "prefill_masked_gradients": (
        f"({GRADIENTS_READ}, {MASK_OPTIONS}, {PREFILL_OPTIONS}) -> {GRADIENTS}"
    ),
    "decode": f"({DECODE_READ}, {DECODE_OPTIONS}) -> (Tensor out, Tensor lse)",
    "decode_out": f"({DECODE_READ}, Tensor(a!) out, {DECODE_OPTIONS}) -> Tensor lse",
    "decode_masked": (
        f"({DECODE_READ}, {STEP_MASK_OPTIONS}, {DECODE_OPTIONS}) -> (Tensor out, Tensor lse)"
    ),
    "decode_masked_out": (
        f"({DECODE_READ}, Tensor(a!) out, {STEP_MASK_OPTIONS}, {DECODE_OPTIONS}) -> Tensor lse"
    ),
    "append_kv": (
        "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping,"
        f" {APPEND_OPTIONS}) -> ()"
    ),
    "merge": (
        "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b, str layout='bshd')"
        " -> (Tensor out, Tensor lse)"
    ),
}


def values_left_out(options: str) -> dict[str, Any]:
    """The options of a schema by name, in order: what each is where it is left out."""
    pairs = [option.split()[-1].split("=") for option in options.split(",")]
    return {name: literal_eval(default) for name, default in pairs}


PREFILL_LEFT_OUT = values_left_out(PREFILL_OPTIONS)
MASKS_LEFT_OUT = values_left_out(f"{MASK_OPTIONS}, {PREFILL_OPTIONS}")
CHUNKS_LEFT_OUT = values_left_out(CHUNK_OPTIONS)
DECODE_LEFT_OUT = values_left_out(DECODE_OPTIONS)
STEP_MASKS_LEFT_OUT = values_left_out(f"{STEP_MASK_OPTIONS}, {DECODE_OPTIONS}")
APPEND_LEFT_OUT = values_left_out(APPEND_OPTIONS)
