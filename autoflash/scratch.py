"""Scratch: the cache that the compilers and GPUs of one search share, emptied when it is done."""

import fcntl
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import IO

from autoflash.errors import AutoflashError
from autoflash.kernel import cache_dir


@contextmanager
def scratch_cache(done: Callable[[], bool]) -> Iterator[Mapping[str, str]]:
    """The environment in which triton caches in a folder that no other search uses meanwhile.

    A search that ends, and is `done` by then, leaves no kernel behind. One that was interrupted,
    killed or cut short leaves its folder to the next search, which goes on where it was stopped and
    compiles nothing twice. Raises AutoflashError where no folder can be made.
    """
    try:
        folder, lock = _first_free(cache_dir() / "triton")
    except OSError as error:
        raise AutoflashError(
            f"{error.filename or cache_dir()}: no cache of kernels can be kept: {error.strerror}; "
            "set AUTOFLASH_CACHE"
        ) from None
    with lock:
        yield {"TRITON_CACHE_DIR": str(folder)}
        if done():
            _forget_kernels(folder)


def _first_free(parent: Path) -> tuple[Path, IO[bytes]]:
    """A folder that no living process holds, and the open file that holds it now."""
    parent.mkdir(parents=True, exist_ok=True)
    for number in count():
        lock = (parent / f"{number}.lock").open("wb")
        with suppress(BlockingIOError):
            fcntl.flock(
                lock, fcntl.LOCK_EX | fcntl.LOCK_NB
            )  # gone with its process, however it ends
            folder = parent / str(number)
            folder.mkdir(exist_ok=True)
            return folder, lock
        lock.close()
    raise AssertionError("count() ended")


def _forget_kernels(folder: Path) -> None:
    """All but what triton has a C compiler make: a few small libraries, and seconds each time."""
    for entry in folder.iterdir():
        if not any(entry.glob("*.so")):
            shutil.rmtree(entry, ignore_errors=True)
