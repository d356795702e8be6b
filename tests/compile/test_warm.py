"""What warmup() compiles is what calls like the tuned ones launch."""

import importlib.util
import sys

import pytest
import torch
from making import backward_of, decode_of, prefill_of, winner_of

from autoflash.export import export
from autoflash.families import family_of
from autoflash.inputs import make_inputs
from autoflash.kernel import load, new_results, plan_of
from autoflash.problem import Problem
from autoflash.render import render
from autoflash.runtime.match import match_key, match_sizes
from autoflash.store import shipped_winners


@pytest.fixture(scope="module")
def exported():
    return export(shipped_winners())


@pytest.fixture(scope="module")
def module(exported, tmp_path_factory):
    return imported(exported, tmp_path_factory.mktemp("exported"))


def imported(exported, folder):
    path = folder / "attention_dispatch.py"
    path.write_text(exported.text)
    spec = importlib.util.spec_from_file_location("warm_dispatch", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def tuned(module, exported):
    """Each row of the tables with what it was made of."""
    rows = [row for table in module.installed().tables.gpus for row in table.rows]
    made_of = sorted(exported.rows, key=lambda each: (each.gpu.slug, each.problem))
    return zip(rows, made_of, strict=True)


def test_rows_are_read_as_the_problems_that_they_were_made_of(module, exported):
    for row, made_of in tuned(module, exported):
        ours = Problem(**vars(module.tuned_problem(row)))
        theirs = made_of.problem
        assert (match_key(ours), match_sizes(ours)) == (match_key(theirs), match_sizes(theirs))
        assert (ours.batch, ours.num_heads) == (theirs.batch, theirs.num_heads)
        assert (ours.window, ours.varlen) == (theirs.window, theirs.varlen)


def described(plan):
    """A plan's launches, with what a kernel is compiled for in place of its tensors."""

    def told(argument):
        argument = getattr(argument, "base", argument)
        if isinstance(argument, torch.Tensor):
            return argument.dtype
        return argument

    return [
        (kernel.__name__, grid, [told(each) for each in arguments], options)
        for kernel, grid, arguments, options in plan
    ]


def test_the_plans_are_those_that_were_measured(module, exported):
    seen = {}
    for row, made_of in tuned(module, exported):
        p, gpu = made_of.problem, made_of.gpu
        kind = (p.op, p.switches, p.dtype, p.kv_dtype, p.layout, p.kv_layout, p.head_dim)
        if (
            kind in seen or p.alibi or p.varlen or p.kv_scales == "tensor"
        ):  # of slopes, lengths and scales that inputs choose otherwise
            continue
        seen[kind] = p
        assert warmed(module, row) == measured(p, gpu, made_of.config), p
    assert {op for op, *_ in seen} >= {"prefill", "decode"}


def warmed(module, row):
    (device,) = {table.device for table in module.installed().tables.gpus if row in table.rows}
    return described(module._warm_plan(module.tuned_problem(row), device, with_lse=True))


def measured(problem, gpu, config):
    inputs = make_inputs(problem, device="meta", poison=False)
    out, lse = new_results(inputs)
    own = load(render(family_of(config.family).variant(problem)))
    return described(plan_of(own, inputs, out, lse, gpu, config))


def test_the_plans_of_chunks_modified_steps_and_backward_masks_are_those_that_were_measured(
    tmp_path,
):
    problems = [
        prefill_of(seqlen_k=2048, page_size=64, kv_layout="hnd", lengths="ragged"),
        prefill_of(seqlen_k=2048, page_size=16, layout="thd", window_left=100, sinks=True),
        prefill_of(seqlen_k=2040, page_size=16, lengths="ragged", bias=True),
        prefill_of(seqlen_k=2040, page_size=16, layout="thd", mask="kv_idx % 4 < h"),
        prefill_of(layout="thd", mask="kv_idx % 4 < h"),
        prefill_of(layout="thd", masked_by="prefix", density=10),
        prefill_of(seqlen_k=2040, page_size=16, lengths="ragged", masked_by="prefix", density=10),
        prefill_of(layout="thd", masked_by="documents", density=10),
        prefill_of(
            seqlen_k=2040,
            page_size=16,
            lengths="ragged",
            masked_by="blocks",
            density=10,
            mask_block_q=128,
            mask_block_k=64,
        ),
        prefill_of(seqlen_k=2040, page_size=16, layout="thd", masked_by="documents", density=10),
        decode_of(page_size=16, window_left=100, sinks=True),
        decode_of(page_size=16, pages="chosen", lengths="ragged"),
        decode_of(seqlen_k=500, page_size=16, seqlen_q=3, bias=True),
        decode_of(bias=True),
        decode_of(mask="kv_idx % 4 < h", seqlen_q=3),
        decode_of(masked_by="documents", density=10, page_size=16, seqlen_k=500),
        decode_of(masked_by="documents", density=10, seqlen_q=3, window_left=100, sinks=True),
        decode_of(masked_by="prefix", density=10, seqlen_q=3, kv_dtype="int8", kv_scales="head"),
        decode_of(masked_by="blocks", density=10, mask_block_k=64, page_size=16, seqlen_k=500),
        backward_of(mask="kv_idx % 4 < h"),
        backward_of(masked_by="prefix", density=10),
        backward_of(masked_by="documents", density=10),
        backward_of(layout="thd", masked_by="documents", density=10),
        backward_of(masked_by="blocks", density=10, mask_block_q=128, mask_block_k=64),
    ]
    exported = export([winner_of(problem) for problem in problems])
    module = imported(exported, tmp_path)
    for row, made_of in tuned(module, exported):
        assert warmed(module, row) == measured(made_of.problem, made_of.gpu, made_of.config)
