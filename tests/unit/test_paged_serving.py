"""The example of a paged cache: it serves, gives every page back, and tells a wrong module."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from autoflash.export import export
from autoflash.store import shipped_winners

SCRIPT = Path(__file__).parents[2] / "examples" / "paged_serving.py"
SMALL = {
    "sequences": 3,
    "batch": 2,
    "prefix": 6,
    "pages": 12,
    "page-size": 4,
    "num-heads": 2,
    "num-kv-heads": 1,
    "head-dim": 16,
}


def served(folder, more=""):
    path = folder / "attention_dispatch.py"
    path.write_text(export(shipped_winners()).text + more)
    options = [f"--{name}={number}" for name, number in SMALL.items()]
    command = [sys.executable, str(SCRIPT), str(path), *options]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder)


def test_sequences_grow_share_their_prefix_and_give_their_pages_back(tmp_path):
    done = served(tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = done.stdout.splitlines()
    assert lines[0] == "step 1: 2 sequences on 6 pages"  # 2 of the prefix, 1 of them of all
    assert lines[-2] == "12 of 12 pages are free again"
    assert lines[-1].startswith("largest error: 0.")


def test_a_module_that_reads_another_page_is_told(tmp_path):
    wrong = (
        "\n_right = decode\n"
        "def decode(q, k, v, *, cache_seqlens, block_table):\n"
        "    return _right(q, k, v, cache_seqlens, block_table=block_table.flip(0))\n"
    )
    done = served(tmp_path, wrong)
    assert done.returncode == 1, done.stderr[-2000:]
    assert "largest error: 0." not in done.stdout


def test_a_page_is_free_when_its_last_holder_has_released_it():
    spec = importlib.util.spec_from_file_location("paged_serving", SCRIPT)
    example = importlib.util.module_from_spec(spec)
    sys.modules["paged_serving"] = example
    spec.loader.exec_module(example)
    pages = example.PageAllocator(2)
    first, second = pages.take(), pages.share(0)
    assert first == second == 0 and pages.num_free == 1
    pages.release(0)
    assert pages.num_free == 1
    pages.release(0)
    assert pages.take() == 0 and pages.take() == 1
    with pytest.raises(IndexError):
        pages.take()
