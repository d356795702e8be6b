"""Subjects: what is verified, a config of a family or an exported module, called on inputs."""

import importlib.util
import sys
from dataclasses import replace
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
from autoflash.gradients import Gradients, ModifierGradients
from autoflash.inputs import Inputs
from autoflash.kernel import (
    Beside,
    Result,
    load,
    modifier_gradients_like,
    new_outputs,
    plan_of,
)
from autoflash.problem import Problem, Variant
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.runtime.match import MATCH_EXACT_FIELDS
from autoflash.runtime.problem import CHOSEN, LATENT_WIDTHS, LENGTHS, PAGES


class Subject(Protocol):
    """What is asked to attend. It gives `out` in the query's layout, and `lse` where wanted.

    Of a backward it gives Gradients, and ModifierGradients or None.
    """

    def run(self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True) -> Any:
        """Outputs are full of NaN before. Raises Failure for a write around one of them."""
        ...

    def attended(self, inputs: Inputs, softmax_scale: float | None = None) -> Inputs:
        """The inputs of a backward with what a forward leaves of them, as they are now."""
        ...


class Candidate:
    """A config of a family, planned as if for `gpu` wherever it runs."""

    def __init__(self, config: Config, gpu: Gpu) -> None:
        self._config, self._gpu = config, gpu

    def run(
        self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
    ) -> tuple[Result, Beside]:
        canaries, p = Canaries(inputs.q.device), inputs.problem
        out, lse = _results(canaries, inputs, with_lse)
        module = _kernels(family_of(self._config.family).variant(p))
        given = (module, inputs, out, lse, self._gpu, self._config, softmax_scale)
        run_plan(plan_of(*given, new_workspace=canaries.workspace))
        _kept(canaries)
        return out, lse

    def attended(self, inputs: Inputs, softmax_scale: float | None = None) -> Inputs:
        """With what the portable kernels leave, whose lse has the rounding of their scores."""
        family = family_of("prefill")
        forward = replace(inputs, problem=replace(inputs.problem, op="prefill"))
        out, lse = new_outputs(forward)
        config = family.default(forward.problem, self._gpu)
        module = _kernels(family.variant(forward.problem))
        run_plan(plan_of(module, forward, out, lse, self._gpu, config, softmax_scale))
        return replace(inputs, out=out, lse=lse)


class Exported:
    """The functions of an exported module, which chooses configs by itself."""

    def __init__(self, path: Path) -> None:
        self._module = exported_module(path)

    def run(
        self, inputs: Inputs, softmax_scale: float | None = None, with_lse: bool = True
    ) -> tuple[Result, Beside]:
        if inputs.problem.op == "backward":
            return self._gradients(inputs, softmax_scale)
        canaries = Canaries(inputs.q.device)
        out, _ = _results(canaries, inputs, with_lse=False)
        keywords = {"softmax_scale": softmax_scale, "out": out, "return_lse": with_lse}
        call = self._prefill if inputs.problem.op == "prefill" else self._decode
        result = call(inputs, keywords)
        _kept(canaries)
        return result if with_lse else (result, None)

    def attended(self, inputs: Inputs, softmax_scale: float | None = None) -> Inputs:
        """As they are: a module makes the forward of a backward itself."""
        return inputs

    def _gradients(
        self, inputs: Inputs, softmax_scale: float | None
    ) -> tuple[Gradients, ModifierGradients]:
        """By autograd, of the forward that the module makes itself."""
        names = ("q", "k", "v", "bias", "sinks")
        given = {name: getattr(inputs, name) for name in names}
        leaves = {n: t.detach().requires_grad_() for n, t in given.items() if t is not None}
        keywords = {"softmax_scale": softmax_scale, "return_lse": True}
        results = self._prefill(replace(inputs, **leaves), keywords)
        incoming = (inputs.dout, inputs.dlse)
        wanted = 1 if inputs.dlse is None else 2
        found = torch.autograd.grad(results[:wanted], list(leaves.values()), incoming[:wanted])
        of = dict(zip(leaves, found, strict=True))
        dbias = of.get("bias")
        if dbias is not None:
            dbias = dbias.view(modifier_gradients_like(inputs)["dbias"].shape)
        return Gradients(of["q"], of["k"], of["v"]), ModifierGradients(dbias, of.get("sinks"))

    def _prefill(self, inputs: Inputs, keywords: dict[str, Any]) -> Any:
        p = inputs.problem
        modifiers = inputs.modifiers._replace(window=(p.window_left, p.window_right))
        return self._module.prefill(
            inputs.q,
            inputs.k,
            inputs.v,
            causal=p.causal,
            layout=p.layout,
            **modifiers.of_prefill,
            **keywords,
        )

    def _decode(self, inputs: Inputs, keywords: dict[str, Any]) -> Any:
        p, scales = inputs.problem, {"k_scale": inputs.k_scale, "v_scale": inputs.v_scale}
        if p.kv_scales == "tensor":  # of which the inputs have one for each head
            scales = {n: None if s is None else s[0, :1].clone() for n, s in scales.items()}
        paged = {"pages": p.pages} if p.paged and p.pages != CHOSEN else {}
        on = inputs.modifiers
        modified = {"softcap": on.softcap, "alibi_slopes": on.alibi_slopes, "sinks": on.sinks}
        names = ("bias", "page_positions", "block_mask", "document_ids", "prefix_lens")
        names += ("mask", "density")
        modified |= {name: getattr(on, name) for name in names}
        return self._module.decode(
            inputs.q,
            inputs.k,
            None if p.latent else inputs.v,
            inputs.cache_seqlens,
            block_table=inputs.block_table,
            kv_layout=p.kv_layout,
            max_seqlen_k=p.seqlen_k,
            lengths=p.lengths,
            window=on.window,
            **modified,
            **paged,
            **scales,
            **keywords,
        )


def exported_module(path: Path) -> ModuleType:
    """The module in the file, or package. Raises AutoflashError for what is none of ours."""
    path = path / "__init__.py" if path.is_dir() else path
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
    exact = dict(zip(MATCH_EXACT_FIELDS, key))
    group_size, _, _, windowed = key[len(exact) :]
    widths = exact["head_dim"], exact["head_dim_v"]
    kv_heads = 8 if sizes.kv_heads % 8 == 0 and widths != LATENT_WIDTHS else 1
    sides = (sizes.keys_before, sizes.keys_after)
    left, right = (
        side if windowed and (side < sizes.seqlen_k or exact["op"] == "decode") else -1
        for side in sides
    )  # one that reaches all keys is unbounded, except in decode
    return Problem(
        **exact,
        batch=sizes.kv_heads // kv_heads,
        num_heads=kv_heads * group_size,
        num_kv_heads=kv_heads,
        seqlen_q=sizes.seqlen_q,
        seqlen_k=sizes.seqlen_k,
        page_size=sizes.page_size,
        lengths=LENGTHS[sizes.lengths],
        pages=PAGES[sizes.pages] if sizes.page_size else "",
        window_left=left,
        window_right=right,
        density=sizes.density,
    )


def _results(canaries: Canaries, inputs: Inputs, with_lse: bool) -> tuple[Result, Beside]:
    """What a plan writes, full of NaN."""
    p = inputs.problem
    if p.op == "backward":
        named = zip(Gradients._fields, (inputs.q, inputs.k, inputs.v), strict=True)
        made = {
            name: canaries.new(name, like.shape, like.dtype)
            for name, like in (*named, *modifier_gradients_like(inputs).items())
        }
        gradients = Gradients(*(made.pop(name) for name in Gradients._fields))
        return gradients, ModifierGradients(**made)
    out = canaries.new("out", (*inputs.q.shape[:-1], p.head_dim_v), inputs.q.dtype)
    return out, canaries.new("lse", inputs.lse_shape, torch.float32) if with_lse else None


def _kept(canaries: Canaries) -> None:
    trespass = canaries.trespass()
    if trespass:
        raise Failure("correctness", trespass)


@cache
def _kernels(variant: Variant) -> ModuleType:
    return load(render(variant))
