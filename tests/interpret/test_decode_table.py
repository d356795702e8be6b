"""A block table at the very end of memory: nothing behind its last entry is read."""

import subprocess
import sys
from pathlib import Path

# The page of memory after the table is forbidden. The table's pages are all in use, and a kernel
# that looks one tile ahead comes to its end.
AT_THE_END_OF_MEMORY = """
import ctypes, mmap, sys
from dataclasses import replace
import torch
sys.path[:0] = [sys.argv[1]]
from autoflash.inputs import make_inputs
from decoding import check, config, problem

inputs = make_inputs(problem(2, seqlen_k=96, page_size=16), lengths=[96, 90])
pages = mmap.mmap(-1, 4 * mmap.PAGESIZE)
start = ctypes.addressof(ctypes.c_char.from_buffer(pages))
end = 3 * mmap.PAGESIZE
forbidden = ctypes.CDLL(None).mprotect(ctypes.c_void_p(start + end), mmap.PAGESIZE, 0)
assert forbidden == 0
ids = torch.frombuffer(pages, dtype=torch.int32, count=12, offset=end - 4 * 12)
ids = ids.view(2, 6).copy_(inputs.block_table)
for schedule in ("split", "group"):
    check(replace(inputs, block_table=ids), config(schedule, block_n=32))
"""


def test_a_table_is_not_read_past_its_last_entry() -> None:  # case B13
    here = str(Path(__file__).parent)
    command = [sys.executable, "-c", AT_THE_END_OF_MEMORY, here]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"
