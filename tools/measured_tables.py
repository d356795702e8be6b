"""Writes the tables of README.md and docs/measured.md from the files under benchmarks/results/.

A table stands between `<!-- table NAME -->` and `<!-- end -->`.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
RESULTS = ROOT / "benchmarks" / "results"
GPU = "NVIDIA_H200"
TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
NAMES = {
    "cudnn": "cuDNN",
    "flashinfer": "FlashInfer",
    "flash_attention_3": "FlashAttention-3",
    "flash_attention_4": "flash-attn-4",
    "flex_attention": "FlexAttention",
    "flash": "SDPA flash",
    "sdpa": "SDPA",
    "vllm_triton": "vLLM Triton",
    "math": "SDPA math",
}
Row = Sequence[object]
Case = dict[str, Any]


def main() -> None:
    for page in PAGES:
        page.write_text(filled(page.read_text()))


def filled(text: str) -> str:
    """The text with each of its tables made of the results."""
    return TABLE.sub(lambda found: f"{found[1]}{_drawn(TABLES[found[2]]())}{found[3]}", text)


def _cases(name: str) -> list[Case]:
    return json.loads((RESULTS / f"{name}-{GPU}.json").read_text())["cases"]


def _drawn(rows: Iterable[Row]) -> str:
    head, *body = rows
    lines = [head, ["---"] * len(head), *body]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def bench_grid() -> Iterator[Row]:
    """Best peer over ours: a row for each batch and kind of cache, a column for each length."""
    ratios: dict[str, dict[int, float]] = {}
    for each in _cases("bench-llama-3-8b"):
        p = each["case"]
        cache = {"prefill": "", "decode": f", {_cache(p)}"}[p["op"]]
        row = ratios.setdefault(f"{p['op']}, batch {p['batch']}{cache}", {})
        row[p["seqlen_k"]] = each["ratio"]
    lengths = sorted({length for row in ratios.values() for length in row})
    yield ["best peer / autoflash", *lengths]
    for name, row in ratios.items():
        yield [name, *(_two(row.get(length)) for length in lengths)]


def bench_all() -> Iterator[Row]:
    peers = [name for name in NAMES if name != "sdpa"]
    yield ["problem", "autoflash", *(NAMES[name] for name in peers), "best peer / autoflash"]
    for each in _cases("bench-llama-3-8b"):
        p, times = each["case"], each["peers"]
        cache = "" if p["op"] == "prefill" else f" {_cache(p)}"
        name = f"{p['op']} {p['batch']} {p['seqlen_k']}{cache}"
        told = (_us(times.get(peer)) for peer in peers)
        yield [name, _us(each["ours"]), *told, _two(each["ratio"])]


def _cache(p: Case) -> str:
    return f"pages of {p['page_size']}" if p["page_size"] else "contiguous"


def backward() -> Iterator[Row]:
    peers = ("cudnn", "flash_attention_4", "flex_attention", "flash")
    first, ratios = "batch, heads, head_dim, tokens, mask", ("best peer / autoflash", "repeating")
    yield [first, "autoflash", *(NAMES[name] for name in peers), *ratios]
    for each in _cases("backward"):
        p, rates = each["case"], each["tflops"]
        mask = "causal" if p["causal"] else "full"
        heads = f"{p['num_heads']}/{p['num_kv_heads']}"
        name = f"{p['batch']} {heads} {p['head_dim']} {p['seqlen']} {mask}"
        told = ("" if rate is None else f"{rate:.0f}" for rate in map(rates.get, peers))
        yield [name, f"{rates['autoflash']:.0f}", *told, _two(each["ratio"]), _two(each["of_best"])]


def masks() -> Iterator[Row]:
    over = ("FlexAttention / autoflash", "dense / masked")
    yield ["problem", "autoflash", "FlexAttention", *over, "served"]
    for each in _cases("masks"):
        flex, served = each["peers"].get("flex_attention"), each["served"]
        how = f"{served['family']}, {served['how']}"
        ours = f"{each['ours']:.0f}"
        yield [
            each["case"]["name"].removeprefix("prefill bf16 "),
            *(ours, "" if flex is None else f"{flex:.0f}"),
            *(_two(each["ratio"]), _two(each["over_dense"]), how),
        ]


def serving() -> Iterator[Row]:
    peers = ("sdpa", "flex_attention")
    slower = "ours minus SDPA's, with 95 %"
    yield ["batch, metric", "autoflash", *(NAMES[name] for name in peers), slower]
    both = sorted(_cases("serving") + _cases("serving-batch-32"), key=lambda c: c["case"]["batch"])
    for each in both:
        p, low_high = each["case"], each["slower_us"]["sdpa"]
        told = (f"{each['peers'][name] / 1e3:.1f}" for name in peers)
        interval = " to ".join(f"{us / 1e3:.1f}" for us in low_high)
        yield [f"{p['batch']}, {p['metric']}", f"{each['ours'] / 1e3:.1f}", *told, interval]


def overhead() -> Iterator[Row]:
    peers = ("sdpa", "flashinfer", "flash_attention_3", "flash_attention_4", "vllm_triton")
    ways = {"out given": ", `out=` given", "direct": "", "operator": " through the operator"}
    yield ["call", "autoflash", *(NAMES[name] for name in peers)]
    for each in _cases("overhead"):
        p = each["case"]
        launches = "one launch" if p["launches"] == 1 else "two launches"
        told = (_us(each["peers"].get(name)) for name in peers)
        yield [f"{p['op']}, {launches}{ways[p['way']]}", _us(each["ours"]), *told]


TABLES: dict[str, Callable[[], Iterator[Row]]] = {
    "bench-grid": bench_grid,
    "bench-all": bench_all,
    "backward": backward,
    "masks": masks,
    "serving": serving,
    "overhead": overhead,
}

if __name__ == "__main__":
    main()
