"""Bundle: a folder of kernels that were compiled before, which are taken instead of compiling.

`autoflash export --bundle` makes it, without a GPU. A kernel in it is told by its text, what it is
specialised on, its options and its target: another's is never taken.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import triton
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction
from triton.runtime.cache import FileCacheManager

BUNDLE_MANIFEST = "manifest.json"
BUNDLE_KERNELS, BUNDLE_BUILT = "kernels", "built"  # the folders: kernels, and what C was built to
UNBUNDLED_OPTIONS = ("extern_libs",)  # where a file of triton's own lies
GLUON = "triton.experimental.gluon"


_bundles: list[tuple[Path, tuple[str, ...]]] = []  # with the targets of each
_kept_in: list[Path] = []
_bundle_notices: set[str] = set()


def use_bundle(folder: str) -> bool:
    """Take kernels from a folder that `autoflash export --bundle` made, before any is compiled.

    Gives whether it is used: one of another triton is not, with a warning. A process with
    AUTOFLASH_BUNDLE=FOLDER in its environment does so when it imports the module. Raises ValueError
    for a folder that is no bundle.
    """
    path = Path(folder).absolute()
    try:
        manifest = json.loads((path / BUNDLE_MANIFEST).read_text())
        made_with, targets = manifest["triton"], tuple(manifest["targets"])
        gluon = manifest["gluon"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"use_bundle: {folder} is no bundle of kernels: {error}") from None
    if made_with != triton.__version__:
        told = f"made with triton {made_with}, this is {triton.__version__}"
        _bundle_notice(f"the bundle {folder} is not used: {told}")
        return False
    _install_built(path)
    if gluon:
        import_module(GLUON)  # takes longer than all else that a first call does
    _bundles.insert(0, (path, targets))
    return True


def bundle_kernels_of(module: ModuleType) -> None:
    """Let the kernels of a loaded text come from bundles."""
    for value in vars(module).values():
        if isinstance(value, JITFunction):
            kernel: Any = value
            kernel._do_compile = partial(_compile_from_bundles, kernel)


def keep_compiled(folder: Path) -> None:
    """Write what is compiled from now on to the folder, as a bundle has it."""
    _kept_in[:] = [folder]


def bundle_target(target: Any) -> str:
    """A target as a bundle's manifest lists it."""
    return f"{target.backend}:{target.arch}"


def _compile_from_bundles(kernel: Any, *given: Any) -> Any:
    """What triton does for a kernel that it has not seen, with our way to compile."""
    kernel.compile = _bundled_or_compiled
    return type(kernel)._do_compile(kernel, *given)


def _bundled_or_compiled(src: Any, target: Any = None, options: Any = None, **more: Any) -> Any:
    """triton.compile, but for kernels that a bundle has."""
    key = _bundle_key(src, target, options)
    unusual = knobs.compilation.always_compile or knobs.compilation.override
    for path, targets in () if unusual else _bundles:
        kernel = path / BUNDLE_KERNELS / key
        if kernel.is_dir():
            group = {file.name: str(file) for file in kernel.iterdir()}
            return CompiledKernel(src, group, key)
        if bundle_target(target) not in targets:
            told = f"it is for {', '.join(targets)}, this is {bundle_target(target)}"
            _bundle_notice(f"the bundle {path} is not used: {told}")
    compiled = triton.compile(src, target=target, options=options, **more)
    for folder in _kept_in:
        _keep(folder / BUNDLE_KERNELS / key, compiled)
    return compiled


def _bundle_key(src: Any, target: Any, options: Any) -> str:
    """What makes a compiled kernel this one, but for the version of triton.

    The name of its text has the text's digest; triton's own hash of the source takes longer than
    the rest of a first call, and is another one after a kernel that calls the same functions.
    """
    told = {name: str(value) for name, value in options.items() if name not in UNBUNDLED_OPTIONS}
    source = (src.fn.fn.__code__.co_filename, src.name, str(sorted(src.attrs.items())))
    compiled_for = (str(sorted(each.items())) for each in (src.signature, src.constants, told))
    parts = (*source, *compiled_for, str(target))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _keep(folder: Path, compiled: Any) -> None:
    """The binary of a kernel and what its launch needs to know."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, path in compiled.metadata_group.items():
        kept = folder / name
        if name.endswith(".json"):
            told = json.loads(Path(path).read_text()) | dict.fromkeys(UNBUNDLED_OPTIONS, ())
            kept.write_text(json.dumps(told, sort_keys=True))
        elif name.endswith((".cubin", ".hsaco")):
            kept.write_bytes(Path(path).read_bytes())


def _install_built(path: Path) -> None:
    """Leave what triton's build would make in triton's own cache, where it looks first."""
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    manager: Any = knobs.cache.manager_class or FileCacheManager
    for file in sorted((path / BUNDLE_BUILT).glob("*/*")):
        if not file.name.endswith(suffix):
            told = f"{file.name} is of another Python, it is compiled here"
            _bundle_notice(f"of the bundle {path} launchers are not used: {told}")
            return
        cache = manager(file.parent.name)
        if cache.get_file(file.name) is None:
            cache.put(file.read_bytes(), file.name, binary=True)


def _bundle_notice(text: str) -> None:
    """Warn once a process about each thing."""
    if text not in _bundle_notices:
        _bundle_notices.add(text)
        warnings.warn(f"autoflash: {text}", stacklevel=3)
