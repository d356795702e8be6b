"""Writing a file whole or not at all, whoever else writes it and whether the disk is full."""

import os
from pathlib import Path
from threading import get_ident


def write_whole(path: Path, text: str) -> None:
    """Write `text` in UTF-8 beside the file, then rename; what failed leaves nothing behind.

    Raises OSError.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.{get_ident()}")  # this thread's own
    try:
        beside.write_text(text, encoding="utf-8", newline="\n")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
