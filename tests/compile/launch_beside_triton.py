"""One launch by triton's generated C launcher, then by ours, on a libcuda that says what it gets.

Run as a script: FOLDER of the fake libcuda, DEPENDENT (0 or 1).
"""

import ctypes
import subprocess
import sys
import sysconfig
from pathlib import Path

from triton.backends.nvidia import driver

from autoflash.runtime.cuda_launch import CudaLaunch, cuda_launcher

PARAMETERS = [
    ("*bf16", 0x7F0012345670),
    ("i32", -3),
    ("i64", 2**40 + 1),
    ("constexpr", "any"),
    ("fp32", 0.1),
    ("i64", -(2**33)),
    ("i1", True),
    ("*fp32", 0x7F00FFFFFF80),
    ("i32", 2**31 - 1),
]
SIZES = {"*bf16": 8, "*fp32": 8, "i32": 4, "i64": 8, "fp32": 4, "i1": 1}


def build(source: str, library: Path, *folders: str) -> None:
    path = library.with_suffix(".c")
    path.write_text(source)
    includes = [f"-I{folder}" for folder in folders]
    command = ["gcc", "-O1", "-shared", "-fPIC", "-w", str(path), "-o", str(library), *includes]
    subprocess.run(command, check=True)


def main(folder: str, dependent: str) -> None:
    cuda_headers = str(Path(driver.__file__).parent / "include")
    fake = Path(folder) / "libcuda.so.1"
    build((Path(__file__).parent / "fake_cuda.c").read_text(), fake, cuda_headers)
    told = ctypes.CDLL(str(fake), mode=ctypes.RTLD_GLOBAL)
    kinds = [kind for kind, _ in PARAMETERS if kind != "constexpr"]
    sizes = [*(SIZES[kind] for kind in kinds), 8, 8]  # both scratch pointers
    (ctypes.c_int * 64).in_dll(told, "sizes")[: len(sizes)] = sizes
    ctypes.c_int.in_dll(told, "count").value = len(sizes)

    signature = {f"p{n}": kind for n, (kind, _) in enumerate(PARAMETERS)}
    constants = {(n,): value for n, (kind, value) in enumerate(PARAMETERS) if kind == "constexpr"}
    source = driver.make_launcher(constants, signature, None)
    name = "__triton_launcher"
    library = Path(folder) / f"{name}.so"
    build(source, library, cuda_headers, sysconfig.get_paths()["include"])
    sys.path.insert(0, folder)
    launcher = __import__(name)
    grid, stream, function, warps, shared = (5, 2, 1), 0x77, 0x1234, 8, 70_000
    values = [value for _, value in PARAMETERS]
    hooks = (None, None, None)
    launcher.launch(
        *grid,
        stream,
        function,
        False,
        bool(int(dependent)),
        *(None, None),
        (warps, 1, shared),
        *hooks,
        *values,
    )

    given = [each for each in PARAMETERS if each[0] != "constexpr"]
    parameters = [*given, ("*i8", None), ("*i8", None)]
    launch = CudaLaunch(function, grid, warps, shared, bool(int(dependent)), parameters)
    for place, (kind, value) in enumerate(given):
        if kind[0] == "*":
            launch.words[place] = value
    launch.config.stream = stream
    assert cuda_launcher()(launch.config_at, launch.function, launch.places_at, None) == 0


if __name__ == "__main__":
    main(*sys.argv[1:])
