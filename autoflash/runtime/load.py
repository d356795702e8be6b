"""Loading of kernel text: a module made from a string, with working tracebacks and @triton.jit.

The texts stand in the exported module, or each in a file of its own beside it.
"""

from __future__ import annotations

import linecache
from pathlib import Path
from types import ModuleType


def load_text(name: str, text: str) -> ModuleType:
    """The module that `text` defines, known to tracebacks and to triton by `name`."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module = ModuleType(name.rpartition("/")[2].removesuffix(".py"))
    module.__file__ = name
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module


class KernelFiles:
    """Kernel texts by name, each read from a file of a folder when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __getitem__(self, name: str) -> str:
        return Path(self.path(name)).read_text(encoding="utf-8")

    def path(self, name: str) -> str:
        return str(self._folder / f"{name}.py")
