"""What a paged decode asks for before it waits: what it reads first, and nothing beyond."""

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from decoding import H200, config, problem

from autoflash.config import Config
from autoflash.families import family_of
from autoflash.inputs import Inputs, make_inputs
from autoflash.kernel import new_outputs, plan_of
from autoflash.render import render
from autoflash.runtime.launch import run_plan
from autoflash.runtime.load import load_text

each_schedule = pytest.mark.parametrize("schedule", ["split", "group"])


@dataclass
class Program:
    """Addresses of a program: what it prefetches, a length and a page id; the id it reads first."""

    prefetched: list[int] = field(default_factory=list)
    read: int = 0  # of a program with nothing to read


def programs_of(inputs: Inputs, config: Config, splits: int) -> list[Program]:
    """Every program of a call's first kernel, run as a GPU with dependent launch would run it."""
    p, table = inputs.problem, inputs.block_table
    assert table is not None
    rendered = render(family_of(config.family).variant(p))
    module: Any = load_text(f"{rendered.name}.py", rendered.text)
    programs: list[Program] = []
    load_page_ids = module.load_page_ids

    def prefetch(pointer: Any) -> None:
        if not programs or len(programs[-1].prefetched) == 2:
            programs.append(Program())
        programs[-1].prefetched.append(pointer.handle.data.item())

    def load(row: Any, tile: Any, max_pages: Any, block_n: int, page_size: int) -> Any:
        page = int(tile) * block_n // page_size
        address = row.handle.data.item() + page * table.element_size()
        programs[-1].read = programs[-1].read or address
        return load_page_ids(row, tile, max_pages, block_n, page_size)

    module.prefetch, module.load_page_ids = prefetch, load
    module.gdc_wait = module.gdc_launch_dependents = lambda: None
    sequences = p.batch if config["SCHEDULE"] == "split" else 1
    gpu = replace(H200, num_sms=splits * p.num_kv_heads * sequences)
    kernel, grid, arguments, options = plan_of(module, inputs, *new_outputs(inputs), gpu, config)[0]
    run_plan([(kernel, grid, (*arguments[:-1], 1), options)])  # the last one is DEPENDENT_LAUNCH
    assert len(programs) == grid[0]
    return programs


def in_wider_rows(inputs: Inputs) -> Inputs:
    """The same with a table whose rows are parts of longer ones."""
    assert inputs.block_table is not None
    wide = torch.nn.functional.pad(inputs.block_table, (1, 1))
    return replace(inputs, block_table=wide[:, 1:-1])


@each_schedule
@pytest.mark.parametrize(("page_size", "window_left"), [(1, -1), (16, 70), (64, 70)])
def test_the_page_id_that_full_sequences_read_first_is_prefetched(
    schedule: str, page_size: int, window_left: int
) -> None:
    p = problem(3, seqlen_k=192, page_size=page_size, window_left=window_left)
    programs = programs_of(in_wider_rows(make_inputs(p)), config(schedule), splits=5)
    assert sum(each.read > 0 for each in programs) > p.batch
    assert all(each.prefetched[1] == each.read for each in programs if each.read)


@each_schedule
@pytest.mark.parametrize("splits", [5, 8])  # shares past the end of a sequence, of all
def test_nothing_but_page_ids_and_lengths_of_the_call_is_prefetched(
    schedule: str, splits: int
) -> None:
    p = problem(3, num_heads=2, num_kv_heads=2, seqlen_k=100, page_size=16)
    inputs = in_wider_rows(make_inputs(p, lengths=[100, 1, 37]))
    table, lengths = inputs.block_table, inputs.cache_seqlens
    assert table is not None and lengths is not None
    entries = {page.data_ptr() for row in table for page in row}
    for each in programs_of(inputs, config(schedule, block_n=16), splits):
        of_length, of_page = each.prefetched
        assert of_length in {length.data_ptr() for length in lengths}
        assert of_page in entries
