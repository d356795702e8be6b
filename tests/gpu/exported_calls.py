"""Calls of an exported module in a process that cannot import autoflash; the results go to files.

Run as a script: MODULE CASES_JSON FOLDER. The parent makes the same tensors again with
`make_tensors` and judges what was written.
"""

import importlib.util
import json
import sys
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def make_tensors(case: dict) -> dict[str, torch.Tensor]:
    """Seeded tensors of a case: q, k, v and, for decode, cache_seqlens and block_table.

    Dead cache slots of contiguous caches hold NaN, dead table entries 2**30.
    """
    generator = torch.Generator(device="cuda").manual_seed(case["seed"])

    def normal(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, device="cuda", dtype=DTYPES[case["dtype"]])
        return empty.normal_(generator=generator)

    batch, heads, kv_heads = case["batch"], case["num_heads"], case["num_kv_heads"]
    keys, head_dim = case["seqlen_k"], case["head_dim"]
    if case["op"] == "prefill":
        return {
            "q": normal(batch, case["seqlen_q"], heads, head_dim),
            "k": normal(batch, keys, kv_heads, head_dim),
            "v": normal(batch, keys, kv_heads, head_dim),
        }
    tensors = {"q": normal(batch, 1, heads, head_dim)}
    lengths = torch.full((batch,), keys, dtype=torch.int32, device="cuda")
    if case["lengths"] == "ragged":
        drawn = torch.rand(batch, device="cuda", generator=generator)
        lengths[1:] = (keys // 8 + drawn[1:] * (keys - keys // 8)).int()
    tensors["cache_seqlens"] = lengths
    page_size = case["page_size"]
    if not page_size:
        tensors["k"] = normal(batch, keys, kv_heads, head_dim)
        tensors["v"] = normal(batch, keys, kv_heads, head_dim)
        dead = torch.arange(keys, device="cuda")[None] >= lengths[:, None]
        for name in ("k", "v"):
            tensors[name][dead] = float("nan")
        return tensors
    columns = -(-keys // page_size)
    pages = batch * columns
    tensors["k"] = normal(pages, page_size, kv_heads, head_dim)
    tensors["v"] = normal(pages, page_size, kv_heads, head_dim)
    ids = torch.randperm(pages, device="cuda", generator=generator, dtype=torch.int32)
    table = ids.view(batch, columns)
    used = -(-lengths // page_size)
    dead = torch.arange(columns, device="cuda")[None] >= used[:, None]
    tensors["block_table"] = table.masked_fill(dead, 2**30)
    return tensors


def call(module, case: dict, tensors: dict) -> tuple[torch.Tensor, torch.Tensor]:
    if case["op"] == "prefill":
        q, k, v = (tensors[name] for name in ("q", "k", "v"))
        return module.prefill(q, k, v, causal=case["causal"], return_lse=True)
    return module.decode(
        tensors["q"],
        tensors["k"],
        tensors["v"],
        tensors["cache_seqlens"],
        block_table=tensors.get("block_table"),
        max_seqlen_k=case["seqlen_k"],
        lengths=case["lengths"],
        return_lse=True,
    )


def main(module_path: str, cases_path: str, folder: str) -> None:
    sys.modules["autoflash"] = None  # any import of it fails from here on
    found = importlib.util.spec_from_file_location("attention_dispatch", module_path)
    module = importlib.util.module_from_spec(found)
    sys.modules["attention_dispatch"] = module
    found.loader.exec_module(module)
    assert not torch.cuda.is_initialized(), "importing the module started CUDA"
    for number, case in enumerate(json.loads(Path(cases_path).read_text())):
        tensors = make_tensors(case)
        out, lse = call(module, case, tensors)
        torch.save({"out": out.cpu(), "lse": lse.cpu()}, Path(folder) / f"{number}.pt")
        del tensors, out, lse
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(*sys.argv[1:])
