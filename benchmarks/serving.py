"""Serving end to end: time to the first token and for each further one, of a Llama of transformers.

Its weights are random; attention is SDPA's, FlexAttention's and ours, through transformers' own
interface and a static cache. Contenders take turns, a generation each, and the host reads every
token. Tokens must be the same in fp32; in bf16 a sequence may diverge first only where the two
largest logits are no further apart than what bf16 changes of a logit there.
"""

import argparse
import importlib
import importlib.util
import inspect
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from harness import arguments, case_result, load_module, write_results

from autoflash.turns import turns

NAME = "attention_dispatch"  # of the module among transformers' attentions
PEERS = ("sdpa", "flex_attention")
ROUNDS, UNTIMED = 12, 2
# Logits (batch, vocabulary) and which step they are of to tokens (batch, 1).
Choose = Callable[[torch.Tensor, int], torch.Tensor]
NORMAL_95 = 1.96  # standard errors on both sides of a mean


@dataclass(frozen=True)
class Generation:
    """The tokens of a batch, (batch, tokens), their logits, and the seconds of each step."""

    tokens: torch.Tensor
    logits: list[torch.Tensor]
    seconds: list[float]

    @property
    def first_us(self) -> float:
        return 1e6 * self.seconds[0]

    @property
    def each_us(self) -> float:
        return 1e6 * statistics.fmean(self.seconds[1:])


def main() -> int:
    options = parsed()
    load_module(options.module).register_attention(NAME)
    names = {"autoflash": NAME, **{name: name for name in PEERS}}
    shape = {name: getattr(options, name) for name in ("layers", "hidden", "tokens")}
    results, agree = [], True
    with torch.inference_mode():
        model = llama(options, torch.bfloat16)
        for batch in options.batches:
            prompt = torch.randint(1, options.vocabulary, (batch, options.prompt), device="cuda")
            times, generations, left_out = timed(model, names, prompt, options.tokens)
            wrong = divergences_beyond_bf16(model, generations, prompt)
            wrong += different_in_fp32(options, names, prompt)
            agree = agree and not wrong
            for metric in ("first token", "output token"):
                samples = {name: each[metric] for name, each in times.items()}
                case = {"batch": batch, "prompt": options.prompt, "metric": metric}
                medians = {name: statistics.median(each) for name, each in samples.items()}
                told = {"slower_us": slower_by(samples), "tokens": wrong or "as they must be"}
                results.append(case_result(case, medians, left_out, **told))
                print(case, {name: round(us, 1) for name, us in medians.items()}, told)
            # after every batch: whoever stops the run keeps what was done
            print(write_results("serving", results, model=shape, rounds=ROUNDS), flush=True)
    return 0 if agree else 1


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__ or "")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=4096, help="heads of 128, a KV head for four")
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens of each sequence")
    parser.add_argument("--tokens", type=int, default=64, help="generated for each")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    return parser.parse_args()


def llama(options: Any, dtype: torch.dtype, device: str = "cuda") -> Any:
    """A model of the same random weights in every dtype."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    heads = max(4, options.hidden // 128)
    config = transformers.LlamaConfig(
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 7 // 2,
        num_hidden_layers=options.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 4,
        max_position_embeddings=options.prompt + options.tokens,
    )
    with torch.device(device):  # where weights are drawn in seconds
        return transformers.LlamaForCausalLM(config).to(dtype).eval()


def greedy(logits: torch.Tensor, step: int) -> torch.Tensor:
    return logits.argmax(-1, keepdim=True)


def generated(
    model: Any, attention: str, prompt: torch.Tensor, tokens: int, choose: Choose = greedy
) -> Generation:
    """Generation with this attention, each token read by the host before the next step."""
    model.set_attn_implementation(attention)
    named = inspect.signature(model.forward).parameters  # which transformers renames
    static = importlib.import_module("transformers").StaticCache
    cache = static(config=model.config, max_cache_len=prompt.shape[1] + tokens)
    held = {"cache" if "cache" in named else "past_key_values": cache, "use_cache": True}
    given, made, logits, seconds = prompt, [], [], []
    for step in range(tokens):
        synchronize(prompt)
        start = time.perf_counter()
        last = model(input_ids=given, **held, logits_to_keep=1).logits[:, -1]
        given = choose(last, step)
        made.append(given.tolist())
        seconds.append(time.perf_counter() - start)
        logits.append(last)
    return Generation(torch.tensor(made)[..., 0].T, logits, seconds)


def synchronize(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


def timed(
    model: Any, names: Mapping[str, str], prompt: torch.Tensor, tokens: int, rounds: int = ROUNDS
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Generation], dict[str, str]]:
    """Microseconds by contender and metric, each one's last generation, and who is left out."""
    generations, left_out = {}, {}
    for name, attention in names.items():
        try:
            generations[name] = generated(model, attention, prompt, tokens)
        except Exception as error:  # a peer may raise anything: it is named with it
            if name == "autoflash":
                raise
            left_out[name] = f"{type(error).__name__}: {error}".splitlines()[0]
    times: dict[str, dict[str, list[float]]] = {
        name: {"first token": [], "output token": []} for name in generations
    }
    for number in range(-UNTIMED, rounds):
        for name in turns(list(generations), max(number, 0)):
            one = generated(model, names[name], prompt, tokens)
            generations[name] = one
            if number >= 0:
                times[name]["first token"].append(one.first_us)
                times[name]["output token"].append(one.each_us)
    return times, generations, left_out


def slower_by(samples: Mapping[str, Sequence[float]]) -> dict[str, tuple[float, float]]:
    """By how many us we are slower than each peer, with 95 %: from, to. Rounds are paired."""
    told = {}
    for name, theirs in samples.items():
        if name != "autoflash":
            pairs = zip(samples["autoflash"], theirs, strict=True)
            differences = [ours - peer for ours, peer in pairs]
            error = statistics.stdev(differences) / len(differences) ** 0.5
            mean = statistics.fmean(differences)
            told[name] = (round(mean - NORMAL_95 * error, 1), round(mean + NORMAL_95 * error, 1))
    return told


def divergences_beyond_bf16(
    model: Any, generations: Mapping[str, Generation], prompt: torch.Tensor
) -> list[str]:
    """Where our tokens leave SDPA's first though its two largest logits are told apart by bf16."""
    ours, theirs = generations["autoflash"], generations["sdpa"]
    wrong = []
    for row, step in first_divergences(ours.tokens, theirs.tokens):
        before = theirs.tokens[row, :step].to(prompt.device)
        seen = torch.cat([prompt[row], before])[None]
        logits = theirs.logits[step][row].double()
        largest = logits.topk(2).values
        gap, error = float(largest[0] - largest[1]), largest_change(model, seen, logits)
        if gap > error:
            wrong.append(f"sequence {row}, token {step}: gap {gap:.3g}, error {error:.3g}")
    return wrong


def largest_change(model: Any, seen: torch.Tensor, logits: torch.Tensor) -> float:
    """By how much bf16 changes a logit of the token after these, as SDPA computes them."""
    model.set_attn_implementation("sdpa")
    exact = model.float()(input_ids=seen, logits_to_keep=1).logits[0, -1].double()
    model.bfloat16()  # whose values survived fp32
    return float((logits - exact).abs().max())


def first_divergences(ours: torch.Tensor, theirs: torch.Tensor) -> list[tuple[int, int]]:
    """(sequence, token) at which each sequence that differs does so first."""
    differs = ours != theirs
    return [
        (row, int(differs[row].int().argmax())) for row in range(len(ours)) if differs[row].any()
    ]


def different_in_fp32(
    options: Any, names: Mapping[str, str], prompt: torch.Tensor, device: str = "cuda"
) -> list[str]:
    """Which sequences of a model of two layers get other tokens from us than from SDPA in fp32."""
    small = argparse.Namespace(**{**vars(options), "layers": 2, "hidden": 512})
    model = llama(small, torch.float32, device)
    ours, theirs = (
        generated(model, names[name], prompt, min(options.tokens, 16)).tokens
        for name in ("autoflash", "sdpa")
    )
    return [f"fp32: sequence {row}, token {step}" for row, step in first_divergences(ours, theirs)]


if __name__ == "__main__":
    sys.exit(main())
