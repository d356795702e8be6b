"""Calls of an exported module in a process that cannot import autoflash; the results go to files.

Run as a script: MODULE CASES_JSON FOLDER DEVICE. A case is a Problem's fields, a seed and the rows
to keep. The parent makes the same tensors again with `make_tensors` and judges those rows.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
QUANTISED = {"fp8_e4m3": (torch.float8_e4m3fn, 448.0), "int8": (torch.int8, 127.0)}


def make_tensors(case: dict, device: str) -> dict[str, torch.Tensor]:
    """Seeded tensors of a case: q, k, v and, for decode, cache_seqlens, block_table and scales.

    Dead slots of contiguous caches hold NaN, dead table entries 2**30.
    """
    generator = torch.Generator(device=device).manual_seed(case["seed"])

    def normal(*shape: int) -> torch.Tensor:
        empty = torch.empty(shape, device=device, dtype=DTYPES[case["dtype"]])
        return empty.normal_(generator=generator)

    batch, heads, kv_heads = case["batch"], case["num_heads"], case["num_kv_heads"]
    keys, head_dim = case["seqlen_k"], case["head_dim"]
    if case["op"] == "prefill":
        return {
            "q": normal(batch, case["seqlen_q"], heads, head_dim),
            "k": normal(batch, keys, kv_heads, head_dim),
            "v": normal(batch, keys, kv_heads, head_dim),
            **modifiers(case, normal),
        }

    latent = case["head_dim_v"] != head_dim  # values are channels of the keys

    def cache(name: str, *shape: int) -> None:
        if name == "v" and latent:
            tensors["v"] = tensors["k"][..., : case["head_dim_v"]]
            return
        tensors[name] = normal(*shape)
        if case["kv_dtype"] in QUANTISED:
            tensors[name], tensors[f"{name}_scale"] = quantised(tensors[name], case)

    tensors = {"q": normal(batch, case["seqlen_q"], heads, head_dim), **modifiers(case, normal)}
    lengths = torch.full((batch,), keys, dtype=torch.int32, device=device)
    if case["lengths"] == "ragged":
        drawn = torch.rand(batch, device=device, generator=generator)
        lengths[1:] = (keys // 8 + drawn[1:] * (keys - keys // 8)).int()
    tensors["cache_seqlens"] = lengths
    page_size = case["page_size"]
    if not page_size:
        dead = torch.arange(keys, device=device)[None] >= lengths[:, None]
        for name in ("k", "v"):
            cache(name, batch, keys, kv_heads, head_dim)
            if case["kv_dtype"] == case["dtype"]:
                tensors[name][dead] = float("nan")
        return tensors
    columns = -(-keys // page_size)
    pages = batch * columns
    cache("k", pages, page_size, kv_heads, head_dim)
    cache("v", pages, page_size, kv_heads, head_dim)
    ids = torch.randperm(pages, device=device, generator=generator, dtype=torch.int32)
    used = -(-lengths // page_size)
    dead = torch.arange(columns, device=device)[None] >= used[:, None]
    tensors["block_table"] = ids.view(batch, columns).masked_fill(dead, 2**30)
    if case["pages"] == "chosen":  # some of four times as many
        places = torch.rand(batch, 4 * columns, device=device, generator=generator).argsort()
        tensors["page_positions"] = places[:, :columns].int()
        tensors["cache_seqlens"] = lengths * 0 + 4 * columns * page_size - 3
    return tensors


def modifiers(case: dict, normal: Callable[..., torch.Tensor]) -> dict:
    """What the case has on: a bias that all sequences and heads share, the rest of each head."""
    heads, made = case["num_heads"], {}
    keys, size = case["seqlen_k"], case["page_size"] or 1
    if case["softcap"]:
        made["softcap"] = 1.5
    if case["alibi"]:
        made["alibi_slopes"] = normal(case["batch"], heads).float().abs()
    if case["bias"]:
        made["bias"] = normal(1, 1, case["seqlen_q"], -(-keys // size) * size)
    if case["sinks"]:
        made["sinks"] = normal(heads)
    return made


def quantised(values: torch.Tensor, case: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """The stored values and their scales: for tokens, or (batch, num_kv_heads)."""
    dtype, limit = QUANTISED[case["kv_dtype"]]
    values = values.float()
    if case["kv_scales"] == "token":
        scale = values.abs().amax(dim=-1) / limit
        steps = scale[..., None]
    else:
        ranges = 4 + torch.arange(case["num_kv_heads"], device=values.device) % 3
        if case["kv_scales"] == "tensor":
            ranges = ranges[:1].expand(case["num_kv_heads"])
        scale, steps = (ranges / limit).expand(case["batch"], -1), (ranges / limit)[:, None]
    stored = (values / steps).clamp(-limit, limit)
    return (stored.round() if dtype == torch.int8 else stored).to(dtype), scale


def call(module, case: dict, tensors: dict) -> tuple[torch.Tensor, torch.Tensor]:
    window = (case["window_left"], case["window_right"])
    if case["op"] == "prefill":
        return module.prefill(**tensors, causal=case["causal"], window=window, return_lse=True)
    return module.decode(
        tensors["q"],
        tensors["k"],
        tensors["v"] if case["head_dim_v"] == case["head_dim"] else None,
        tensors["cache_seqlens"],
        block_table=tensors.get("block_table"),
        max_seqlen_k=case["seqlen_k"],
        lengths=case["lengths"],
        k_scale=tensors.get("k_scale"),
        v_scale=tensors.get("v_scale"),
        window=window,
        softcap=tensors.get("softcap", 0.0),
        alibi_slopes=tensors.get("alibi_slopes"),
        bias=tensors.get("bias"),
        sinks=tensors.get("sinks"),
        page_positions=tensors.get("page_positions"),
        return_lse=True,
    )


def load_module(path):
    """The exported module at `path`, as imported for the first time."""
    found = importlib.util.spec_from_file_location("attention_dispatch", path)
    module = importlib.util.module_from_spec(found)
    sys.modules["attention_dispatch"] = module
    found.loader.exec_module(module)
    return module


def main(module_path: str, cases_path: str, folder: str, device: str) -> None:
    sys.modules["autoflash"] = None  # any import of it fails from here on
    module = load_module(module_path)
    assert not torch.cuda.is_initialized(), "importing the module started CUDA"
    for number, case in enumerate(json.loads(Path(cases_path).read_text())):
        tensors = make_tensors(case, device)
        out, lse = call(module, case, tensors)
        b, h, i = torch.tensor(case["rows"], device=device).T
        kept = {
            "out": out[b, i, h].cpu(),
            "lse": lse[b, h, i].cpu(),
            "finite": bool(out.isfinite().all()),
        }
        torch.save(kept, Path(folder) / f"{number}.pt")
        del tensors, out, lse
        if device == "cuda":
            torch.cuda.empty_cache()


def wrong_results(module_path: Path, problems: list, folder: Path, device: str) -> list[str]:
    """Call the module on every problem in a child process; what is beyond the error budget."""
    from autoflash.accuracy import Budget
    from autoflash.check import sample_rows
    from autoflash.inputs import Inputs

    cases = [
        {**dataclasses.asdict(p), "seed": 1000 + n, "rows": sample_rows(p, seed=n)}
        for n, p in enumerate(problems)
    ]
    (folder / "cases.json").write_text(json.dumps(cases))
    arguments = [str(module_path), str(folder / "cases.json"), str(folder), device]
    child = [sys.executable, __file__, *arguments]
    done = subprocess.run(child, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    wrong = []
    for number, (problem, case) in enumerate(zip(problems, cases, strict=True)):
        inputs = Inputs(problem, **make_tensors(case, device))
        kept = torch.load(folder / f"{number}.pt", map_location=device)
        budget = Budget(inputs, rows=[tuple(row) for row in case["rows"]])
        verdict = budget.judge(kept["out"], kept["lse"])
        if not verdict.correct or not kept["finite"]:
            wrong.append(f"{problem}: {verdict.reason or 'out is not finite'}")
        del inputs, budget
    return wrong


if __name__ == "__main__":
    main(*sys.argv[1:])
