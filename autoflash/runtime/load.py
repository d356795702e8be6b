"""Loading of kernel text: a module made from a string, with working tracebacks and @triton.jit."""

from __future__ import annotations

import linecache
from types import ModuleType


def load_text(name: str, text: str) -> ModuleType:
    """The module that `text` defines, known to tracebacks and to triton by `name`."""
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    module = ModuleType(name.rpartition("/")[2].removesuffix(".py"))
    module.__file__ = name
    exec(compile(text, name, "exec", dont_inherit=True), module.__dict__)
    return module
