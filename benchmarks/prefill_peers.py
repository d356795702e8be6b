"""Who takes part in the prefill benchmark: autoflash, its portable family, and the peers.

A contender is made from sets of inputs and calls what its users call. A peer that is not installed,
or cannot do a case, raises: the benchmark names it with the reason.
"""

import functools
from types import ModuleType

import torch

from autoflash.check import plan_for
from autoflash.config import Config
from autoflash.gpu import Gpu
from autoflash.inputs import Inputs
from autoflash.peers import prefill
from autoflash.peers.contender import Contender, Maker
from autoflash.runtime.launch import run_plan

NAMES = ("cudnn", "flash", "flex_attention", "flash_attention_3", "flash_attention_4")
PEERS: dict[str, Maker] = {name: prefill.PEERS[name] for name in NAMES}


def autoflash(module: ModuleType, inputs: list[Inputs]) -> Contender:
    """The exported module's prefill()."""
    p = inputs[0].problem
    ours = functools.partial(module.prefill, causal=p.causal, layout=p.layout)
    return Contender([functools.partial(ours, one.q, one.k, one.v) for one in inputs])


def portable(config: Config, gpu: Gpu, inputs: list[Inputs]) -> Contender:
    """One config of a family, launched without the exported module."""

    def call(one: Inputs) -> torch.Tensor:
        out = torch.empty_like(one.q)
        run_plan(plan_for(one, config, gpu, out, None))
        return out

    return Contender([functools.partial(call, one) for one in inputs])
