"""Numerics end to end: a Llama of transformers with our attention and with SDPA's, token by token.

Its weights are random; tokens are the largest logits, or drawn with noise of a seed that both get.
In fp32 the tokens must be the same. In bf16 and fp16 a sequence may diverge first only where the
two that were largest are no further apart than the dtype itself changes a logit there, by SDPA's
and a model in fp64. How far our logits are from SDPA's, and both from fp64's, is told of all steps
along SDPA's tokens.
"""

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from harness import arguments, load_module, write_results
from serving import NAME, Choose, first_divergences, generated, llama

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUANTILES = (0.5, 0.99, 0.9999, 1.0)
# What is added to logits (batch, vocabulary) of a step before the largest is taken.
Noise = Callable[[torch.Tensor, int], torch.Tensor]


@dataclass(frozen=True)
class Streams:
    """The tokens of both, (batch, tokens), and logits along SDPA's, (batch, tokens, vocabulary)."""

    ours: torch.Tensor
    theirs: torch.Tensor
    our_logits: torch.Tensor
    their_logits: torch.Tensor
    exact: torch.Tensor


def main() -> int:
    options = parsed()
    load_module(options.module).register_attention(NAME)
    results, agree = [], True
    with torch.inference_mode():
        prompt = torch.randint(1, options.vocabulary, (options.batch, options.prompt))
        for dtype in DTYPES:
            model = llama(options, DTYPES[dtype])
            for way, noise in ways(options.seed).items():
                streams = streams_of(model, NAME, prompt.cuda(), options.tokens, noise)
                result = case_of(dtype, way, streams, noise)
                agree = agree and not result["unexplained"]
                results.append(result)
                print(result)
    names = ("layers", "hidden", "vocabulary", "batch", "prompt", "tokens", "seed")
    shape = {name: getattr(options, name) for name in names}
    print(
        write_results("numerics", results, {"transformers": version("transformers")}, model=shape)
    )
    return 0 if agree else 1


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048, help="heads of 128, a KV head for four")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=500, help="tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    return parser.parse_args()


def ways(seed: int) -> dict[str, Noise]:
    """How tokens are chosen, by name."""

    def drawn(logits: torch.Tensor, step: int) -> torch.Tensor:
        # the largest of logits and such noise is a draw from their softmax (Gumbel)
        generator = torch.Generator(logits.device).manual_seed(seed * 2**20 + step)
        like = torch.empty(logits.shape, dtype=torch.float64, device=logits.device)
        return -like.exponential_(generator=generator).log()

    return {"greedy": lambda logits, step: torch.zeros_like(logits), "sampled": drawn}


def streams_of(model: Any, ours: str, prompt: torch.Tensor, tokens: int, noise: Noise) -> Streams:
    """What the model says with the attention named `ours`, and with SDPA."""

    def choose(logits: torch.Tensor, step: int) -> torch.Tensor:
        return (logits + noise(logits, step)).argmax(-1, keepdim=True)

    theirs = generated(model, "sdpa", prompt, tokens, choose)
    own = generated(model, ours, prompt, tokens, choose)
    forced = generated(model, ours, prompt, tokens, following(theirs.tokens))
    our_logits, their_logits = (torch.stack(each.logits, 1).double() for each in (forced, theirs))
    exact = exact_logits(model, prompt, theirs.tokens)
    return Streams(own.tokens, theirs.tokens, our_logits, their_logits, exact)


def following(tokens: torch.Tensor) -> Choose:
    """These tokens, whatever the logits are."""
    return lambda logits, step: tokens[:, step, None].to(logits.device)


def exact_logits(model: Any, prompt: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The logits along these tokens of the same weights in fp64, all at once."""
    dtype = model.dtype
    model.set_attn_implementation("sdpa")
    seen = torch.cat([prompt, tokens[:, :-1].to(prompt.device)], 1)
    exact = model.double()(input_ids=seen, logits_to_keep=tokens.shape[1]).logits
    model.to(dtype)  # whose values survived
    return exact


def case_of(dtype: str, way: str, streams: Streams, noise: Noise) -> dict[str, Any]:
    """One entry of `cases`: errors of logits are root mean squares."""
    errors = {
        name: float((logits - streams.exact).square().mean().sqrt())
        for name, logits in (("ours", streams.our_logits), ("sdpa", streams.their_logits))
    }
    parted = first_divergences(streams.ours, streams.theirs)
    return {
        "case": {"dtype": dtype, "way": way},
        "unit": "logit",
        "ours": errors["ours"],
        "peers": {"sdpa": errors["sdpa"]},
        "ratio": round(errors["sdpa"] / errors["ours"], 4),
        "largest_logit": float(streams.exact.abs().max()),
        "difference_quantiles": quantiles(streams.our_logits - streams.their_logits),
        "sequences_that_part": [{"sequence": row, "token": step} for row, step in parted],
        "unexplained": unexplained(dtype, streams, noise),
    }


def quantiles(differences: torch.Tensor) -> Mapping[str, float]:
    ordered = differences.abs().flatten().sort().values
    last = ordered.numel() - 1
    return {str(each): float(ordered[round(each * last)]) for each in QUANTILES}


def unexplained(dtype: str, streams: Streams, noise: Noise) -> list[str]:
    """Where our tokens leave SDPA's first though the dtype does not explain it."""
    wrong = []
    for row, step in first_divergences(streams.ours, streams.theirs):
        logits = streams.their_logits[:, step]
        largest = (logits + noise(logits, step))[row].topk(2).values
        gap = float(largest[0] - largest[1])
        error = float((logits - streams.exact[:, step])[row].abs().max())
        if dtype == "fp32" or gap > error:
            wrong.append(f"sequence {row}, token {step}: gap {gap:.3g}, error {error:.3g}")
    return wrong


if __name__ == "__main__":
    sys.exit(main())
