"""The committed tables of measured times."""

from pathlib import Path

from autoflash.gpu import known
from autoflash.search.recorded import read_table

GPU = known("NVIDIA_H200")
PATH = Path(__file__).parents[1] / "data" / f"recorded-{GPU.slug}.jsonl"
TABLE = read_table(PATH)
