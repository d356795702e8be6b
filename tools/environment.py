"""Makes .venv with what autoflash needs: `python3 tools/environment.py`, with `dev` for the tests.

- Where this Python already has a torch that sees a GPU, that torch is used, not a second one
  downloaded.
- Without a GPU a CPU build of torch is installed first: the newest torch, which a plain install
  would take, brings gigabytes of CUDA.
- Where no package index answers, the packages that this Python has are used.

autoflash itself is not installed but linked, so that it runs from the checkout. Needs nothing but
the standard library.
"""

import hashlib
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
# The newest torch with a CPU build that the interpreter's results were checked with, and the triton
# that kernels were measured with.
CPU_TORCH = "2.13.0"
CPU_TRITON = "3.6.0"
# In turn: a folder or an index of one's own that has the CPU build; torch's own index of CPU
# builds; the default index, which has CPU builds for some machines and CUDA builds for others.
CPU_TORCH_INSTALLS = (
    (f"torch=={CPU_TORCH}+cpu",),
    (f"torch=={CPU_TORCH}+cpu", "--index-url", "https://download.pytorch.org/whl/cpu"),
    (f"torch=={CPU_TORCH}",),
)
SEES_GPU = "import sys, torch, triton; sys.exit(not torch.cuda.is_available())"


def main() -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 - this is what tells an older Python so
        sys.exit("error: autoflash needs Python 3.11 or newer: make PYTHON=python3.11")
    extras = sorted(set(sys.argv[1:]))
    stamp = VENV / "-".join(["made-for", *extras, _inputs_digest()])
    if stamp.exists():
        return
    _make_venv()
    requirements = _requirements(extras)
    if _succeeds([sys.executable, "-c", SEES_GPU]):
        say("using the torch of this Python, which sees a GPU")
        _lend_packages()
        made = _pip("--no-index", *requirements) or _pip(*requirements)
    elif _has_nvidia_gpu():
        made = _pip(*requirements)
    else:
        say(f"no GPU: installing the CPU build of torch {CPU_TORCH}")
        made = any(_pip(*install) for install in CPU_TORCH_INSTALLS)
        made = made and _pip(f"triton=={CPU_TRITON}", *requirements)
    if not made:
        say("no package index has what is needed: using the packages of this Python")
        _lend_packages()
        if not _pip("--no-index", *requirements):
            sys.exit(
                "error: neither a package index nor this Python has: " + ", ".join(requirements)
            )
    if _has_nvidia_gpu() and not _pip(*_optional("gpu")):
        say("without nvidia-ml-py: trials will record no clocks, temperature or power")
    if "dev" in extras:
        for extra in ("parquet", "datasette"):
            if not _pip(*_optional(extra)):
                say(f"without the extra {extra}: the tests that need it are skipped")
    _link_checkout()
    stamp.touch()


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


def _inputs_digest() -> str:
    """Of everything that decides what is installed: another digest, another installation."""
    inputs = (Path(__file__), ROOT / "pyproject.toml")
    return hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:12]


def _requirements(extras: list[str]) -> list[str]:
    return [*_project()["dependencies"], *(one for extra in extras for one in _optional(extra))]


def _optional(extra: str) -> list[str]:
    return _project()["optional-dependencies"][extra]


def _project() -> dict[str, Any]:
    import tomllib  # from Python 3.11, which an older one is told in main()

    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _make_venv() -> None:
    if PYTHON.exists():
        return
    say(f"making {VENV} with Python {sysconfig.get_python_version()}")
    if not _succeeds([sys.executable, "-m", "venv", "--clear", str(VENV)]):
        sys.exit(
            f"error: {sys.executable} cannot make virtual environments (python3-venv missing?)"
        )


def _has_nvidia_gpu() -> bool:
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return False
    return "GPU" in listed.stdout


def _lend_packages() -> None:
    """Let the environment see this Python's packages after its own, and the linters' commands.

    `--system-site-packages` would not do: where this Python is itself of a virtual environment, it
    gives the system's packages instead.
    """
    folders = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    # Python 3.11 puts an old setuptools into an environment, where it would hide a newer one lent.
    _succeeds([str(PYTHON), "-m", "pip", "uninstall", "--quiet", "--yes", "setuptools"])
    lines = [f"import site; site.addsitedir({folder!r})\n" for folder in folders]
    (_site_packages() / "lent.pth").write_text("".join(lines))
    for name in ("ruff", "pyright"):
        lent, own = Path(sysconfig.get_path("scripts")) / name, VENV / "bin" / name
        if lent.exists() and not own.exists():
            own.symlink_to(lent)


def _link_checkout() -> None:
    """What an editable install does, without a build backend, so that it needs no index."""
    (_site_packages() / "autoflash.pth").write_text(f"{ROOT}\n")
    command = VENV / "bin" / "autoflash"
    run = "from autoflash.cli import main; main()"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(str(PYTHON))} -P -c "{run}" "$@"\n')
    command.chmod(0o755)


def _site_packages() -> Path:
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return VENV / "lib" / version / "site-packages"


def _pip(*arguments: str) -> bool:
    command = [str(PYTHON), "-m", "pip", "install", "--quiet", *arguments]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        say(f"pip: {done.stderr.strip().splitlines()[-1]}")
    return done.returncode == 0


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode == 0


if __name__ == "__main__":
    main()
