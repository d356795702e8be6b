"""Who takes part in the decode benchmark: autoflash, and the peers of autoflash.peers."""

import functools
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from autoflash.inputs import Inputs
from autoflash.peers import decode
from autoflash.peers.contender import Contender, Maker

NAMES = ("cudnn", "flashinfer", "flash_attention_3", "flash_attention_4", "vllm_triton")
PEERS: dict[str, Maker] = {name: decode.PEERS[name] for name in NAMES}


def autoflash(module: ModuleType, hints: Mapping[str, Any], inputs: list[Inputs]) -> Contender:
    """The exported module's decode(), a single query token without an axis of its own."""
    one_token = inputs[0].problem.seqlen_q == 1
    calls = [
        functools.partial(
            module.decode,
            one.q[:, 0] if one_token else one.q,
            one.k,
            one.v,
            one.cache_seqlens,
            block_table=one.block_table,
            kv_layout=one.problem.kv_layout,
            k_scale=one.k_scale,
            v_scale=one.v_scale,
            **hints,
        )
        for one in inputs
    ]
    return Contender(list(calls), lambda out: out.unsqueeze(1) if one_token else out)
