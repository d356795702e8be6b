"""Subjects: what is verified, a config of a family or an exported module, called on inputs."""

import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

import torch

from autoflash.canary import Canaries
from autoflash.child import Failure
from autoflash.config import Config
from autoflash.errors import AutoflashError
from autoflash.families import family_of
from autoflash.gpu import Gpu
from autoflash.inputs import Inputs
from autoflash.kernel import load, plan_of
from autoflash.problem import Problem, Variant
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.runtime.match import MATCH_EXACT_FIELDS
from autoflash.runtime.problem import PAGES


class Subject(Protocol):
    """What is asked to attend. It gives `out` in the query's layout, and `lse` where wanted."""

    def run(
        self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Outputs are full of NaN before. Raises Failure for a write around one of them."""
        ...


class Candidate:
    """A config of a family, planned as if for `gpu` wherever it runs."""

    def __init__(self, config: Config, gpu: Gpu) -> None:
        self._config, self._gpu = config, gpu

    def run(
        self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        canaries, p = Canaries(inputs.q.device), inputs.problem
        out, lse = _out(canaries, inputs), None
        if with_lse:
            lse = canaries.new("lse", inputs.lse_shape, torch.float32)
        module = _kernels(family_of(self._config.family).variant(p))
        given = (module, inputs, out, lse, self._gpu, self._config, softmax_scale)
        run_plan(plan_of(*given, new_workspace=canaries.workspace))
        _kept(canaries)
        return out, lse


class Exported:
    """The functions of an exported module, which chooses configs by itself."""

    def __init__(self, path: Path) -> None:
        self._module = exported_module(path)

    def run(
        self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        canaries = Canaries(inputs.q.device)
        out = _out(canaries, inputs)
        keywords = {"softmax_scale": softmax_scale, "out": out, "return_lse": with_lse}
        call = self._prefill if inputs.problem.op == "prefill" else self._decode
        result = call(inputs, keywords)
        _kept(canaries)
        return result if with_lse else (result, None)

    def _prefill(self, inputs: Inputs, keywords: dict[str, Any]) -> Any:
        p = inputs.problem
        return self._module.prefill(
            inputs.q,
            inputs.k,
            inputs.v,
            causal=p.causal,
            layout=p.layout,
            **inputs.modifiers._replace(window=(p.window_left, p.window_right))._asdict(),
            **keywords,
        )

    def _decode(self, inputs: Inputs, keywords: dict[str, Any]) -> Any:
        p, scales = inputs.problem, {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        if p.kv_scales == "tensor":  # of which the inputs have one for each head
            scales = {n: None if s is None else s[0, :1].clone() for n, s in scales.items()}
        paged = {"pages": p.pages} if p.paged else {}
        return self._module.decode(
            inputs.q,
            inputs.k,
            inputs.v,
            inputs.cache_seqlens,
            block_table=inputs.block_table,
            kv_layout=p.kv_layout,
            max_seqlen_k=p.seqlen_k,
            lengths=p.lengths,
            **paged,
            **scales,
            **keywords,
        )


def exported_module(path: Path) -> ModuleType:
    """The module in the file. Raises AutoflashError for a file that is none of ours."""
    found = importlib.util.spec_from_file_location("attention_dispatch", path)
    if found is None or found.loader is None or not path.is_file():
        raise AutoflashError(f"{path}: is not a Python file that can be read")
    module = importlib.util.module_from_spec(found)
    sys.modules[found.name] = module  # where its dataclasses look for their names
    try:
        found.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise AutoflashError(f"{path}: cannot be imported: {error}") from None
    if not all(hasattr(module, name) for name in ("prefill", "decode", "coverage")):
        raise AutoflashError(f"{path}: is not a module that `autoflash export` wrote")
    return module


def tuned_problems(module: ModuleType, gpu_name: str) -> list[Problem]:
    """A problem of the very sizes of each row that an exported module has for a GPU type.

    A row tells KV heads of the whole batch: here they are those of sequences with eight, or one.
    """
    tables = [each for each in module.installed().tables.gpus if each.device.name == gpu_name]
    rows = {(row.key, row.sizes): None for table in tables for row in table.rows}
    return [_tuned_problem(key, sizes) for key, sizes in rows]


def _tuned_problem(key: tuple[Any, ...], sizes: Any) -> Problem:
    exact = len(MATCH_EXACT_FIELDS)
    group_size, _, _, windowed = key[exact:]
    kv_heads = 8 if sizes.kv_heads % 8 == 0 else 1
    sides = (sizes.keys_before, sizes.keys_after)
    left, right = (
        side if windowed and side < sizes.seqlen_k else -1 for side in sides
    )  # one that reaches all keys is unbounded
    return Problem(
        **dict(zip(MATCH_EXACT_FIELDS, key[:exact], strict=True)),
        batch=sizes.kv_heads // kv_heads,
        num_heads=kv_heads * group_size,
        num_kv_heads=kv_heads,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        page_size=sizes.page_size,
        lengths="ragged" if sizes.ragged else "equal",
        pages=PAGES[sizes.pages] if sizes.page_size else "",
        window_left=left,
        window_right=right,
    )


def _out(canaries: Canaries, inputs: Inputs) -> torch.Tensor:
    shape = (*inputs.q.shape[:-1], inputs.problem.head_dim_v)
    return canaries.new("out", shape, inputs.q.dtype)


def _kept(canaries: Canaries) -> None:
    trespass = canaries.trespass()
    if trespass:
        raise Failure("correctness", trespass)


@cache
def _kernels(variant: Variant) -> ModuleType:
    return load(render(variant))
