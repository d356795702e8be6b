"""`autoflash space`: the candidates of a problem on a GPU, and why other configs are refused."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from autoflash.cli.options import AsJson, Causal, Op, Target, print_json, target_gpu

if TYPE_CHECKING:
    from autoflash.config import Config
    from autoflash.gpu import Gpu
    from autoflash.problem import Problem


def space(
    workload: Annotated[
        Path | None, typer.Argument(metavar="WORKLOAD", help="A YAML file, or else --op.")
    ] = None,
    op: Op = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option()] = "bf16",
    batch: Annotated[int, typer.Option(min=1)] = 1,
    num_heads: Annotated[int, typer.Option(min=1)] = 32,
    num_kv_heads: Annotated[int, typer.Option(min=1)] = 8,
    head_dim: Annotated[int, typer.Option(min=1)] = 128,
    seqlen_q: Annotated[
        int | None, typer.Option(min=1, help="Query tokens; 1 in decode, else as many as keys.")
    ] = None,
    seqlen_k: Annotated[int, typer.Option(min=1, help="Keys of the longest sequence.")] = 4096,
    causal: Causal = True,
    page_size: Annotated[int, typer.Option(min=0, help="Tokens per page; 0 is contiguous.")] = 0,
    layout: Annotated[Literal["bshd", "bhsd"], typer.Option()] = "bshd",
    kv_layout: Annotated[Literal["nhd", "hnd"], typer.Option()] = "nhd",
    gpu: Target = None,
    refused: Annotated[
        bool, typer.Option("--refused", help="Also why configs are refused, with their number.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List the candidates of a problem, or of a workload's."""
    if (op is None) == (workload is None):
        raise typer.BadParameter("give either a workload or --op with its fields")
    from autoflash.problem import Problem
    from autoflash.workload import load_workload

    problems = [problem for problem, _ in load_workload(workload).problems] if workload else []
    if op:
        tokens = seqlen_q or (1 if op == "decode" else seqlen_k)
        problem = Problem(
            op=op,
            dtype=dtype,
            batch=batch,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            seqlen_q=tokens,
            seqlen_k=seqlen_k,
            causal=causal,
            page_size=page_size,
            layout=layout,
            kv_layout=kv_layout,
        )
        problems.append(problem)
    target = target_gpu(gpu)
    if as_json:
        print_json([_as_json(problem, target) for problem in problems])
        return
    for problem in problems:
        _print(problem, target, refused)


def _spaces(
    problem: "Problem", gpu: "Gpu"
) -> dict[str, tuple[list["Config"], list[tuple[str, int]]]]:
    """By family: the candidates, and the reasons with how many configs each refuses."""
    from autoflash import families

    found = {}
    for family in families.serving(problem, gpu):
        judged = list(families.space(family, problem, gpu))
        candidates = [config for config, reason in judged if reason is None]
        reasons = Counter(reason for _, reason in judged if reason is not None)
        found[family.name] = (candidates, reasons.most_common())
    return found


def _print(problem: "Problem", gpu: "Gpu", refused: bool) -> None:
    from autoflash.problem import title

    print(f"{title(problem)}, on {gpu.name}")
    for family, (candidates, reasons) in _spaces(problem, gpu).items():
        others = sum(count for _, count in reasons)
        print(f"  {family}: {len(candidates)} candidates, {others} configs refused")
        for config in candidates:
            print("    " + " ".join(f"{name}={value}" for name, value in config.knobs))
        for reason, count in reasons if refused else []:
            print(f"    refused {count}: {reason}")


def _as_json(problem: "Problem", gpu: "Gpu") -> dict[str, Any]:
    from dataclasses import asdict

    families = {
        family: {
            "candidates": [config.as_dict() for config in candidates],
            "refused": dict(reasons),
        }
        for family, (candidates, reasons) in _spaces(problem, gpu).items()
    }
    return {"problem": asdict(problem), "gpu": gpu.name, "families": families}
