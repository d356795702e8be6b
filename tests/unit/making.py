"""Made-up winners for tests of selection and export: real families, invented times."""

from autoflash.config import Config
from autoflash.families import FAMILIES, serving, space
from autoflash.gpu import Gpu, known
from autoflash.problem import Problem
from autoflash.records import Decision, Winner
from autoflash.render import render
from autoflash.store import shipped_winners
from autoflash.toolchain import Toolchain

H200 = known("NVIDIA_H200")
CHAIN = Toolchain(driver="580.1", cuda="13.0", torch="2.11.0", triton="3.6.0")


def prefill_of(**changes) -> Problem:
    fields = {
        "op": "prefill",
        "dtype": "bf16",
        "batch": 1,
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_dim": 64,
        "seqlen_q": 512,
        "seqlen_k": 512,
    }
    return Problem(**{**fields, **changes})


def decode_of(**changes) -> Problem:
    return prefill_of(**{"op": "decode", "seqlen_q": 1, **changes})


def backward_of(**changes) -> Problem:
    return prefill_of(**{"op": "backward", **changes})


def candidates(problem: Problem, gpu: Gpu = H200) -> list[Config]:
    """Every valid config of the problem's first family."""
    family = serving(problem, gpu)[0]
    return [config for config, reason in space(family, problem, gpu) if reason is None]


def winner_of(
    problem: Problem,
    config: Config | None = None,
    gpu: Gpu = H200,
    chain: Toolchain = CHAIN,
    **changes,
) -> Winner:
    """A winner whose config is `config`, by default the family's default, at 10 microseconds."""
    family = serving(problem, gpu)[0]
    chosen = config or family.default(problem, gpu)
    fields = {
        "problem": problem,
        "kernel_digest": render(FAMILIES[chosen.family].variant(problem)).digest,
        "winner": chosen,
        "winner_us": 10.0,
        "default": family.default(problem, gpu),
        "default_us": 10.0,
        "margin": 0.0,
        "margin_low": 0.0,
        "margin_high": 0.0,
        "times": ((chosen, 10.0),),
    }
    return Winner(gpu, chain, Decision(**{**fields, **changes}), decided_at="2026-11-29T00:00:00Z")


def shipped_forwards() -> list[Winner]:
    """The shipped winners without those of gradients, which a module then has none of."""
    return [winner for winner in shipped_winners() if winner.decision.problem.op != "backward"]
