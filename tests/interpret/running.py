"""Running a config on inputs: every output and workspace is full of NaN before."""

import torch

from autoflash import gpu as gpus
from autoflash.config import Config
from autoflash.families import family_of
from autoflash.inputs import Inputs
from autoflash.kernel import new_outputs, plan_of
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.runtime.load import load_text

DEFAULT_GPU = gpus.known(gpus.DEFAULT_TARGET)


def run(
    inputs: Inputs,
    config: Config,
    *,
    softmax_scale: float | None = None,
    out: torch.Tensor | None = None,
    with_lse: bool = True,
    gpu: gpus.Gpu = DEFAULT_GPU,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`out` and `lse` of the config's kernels on the inputs; `out` is written where given.

    `gpu` says how many SMs a plan spreads its programs over.
    """
    rendered = render(family_of(config.family).variant(inputs.problem))
    module = load_text(f"{rendered.name}.py", rendered.text)
    own_out, lse = new_outputs(inputs)
    out = own_out if out is None else out
    run_plan(
        plan_of(
            module,
            inputs,
            out,
            lse if with_lse else None,
            gpu,
            config,
            softmax_scale,
            poison=True,
        )
    )
    return out, lse if with_lse else None
