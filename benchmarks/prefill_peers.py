"""Who takes part in the prefill benchmark beside the exported module: a config, and peers."""

import functools

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


def portable(config: Config, gpu: Gpu, inputs: list[Inputs]) -> Contender:
    """One config of a family, launched without the exported module."""

    def call(one: Inputs) -> torch.Tensor:
        out = torch.empty_like(one.q)
        run_plan(plan_for(one, config, gpu, out, None))
        return out

    return Contender([functools.partial(call, one) for one in inputs])
