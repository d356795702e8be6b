"""The options that several commands share: the fields of one problem, and the GPU it is for."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

if TYPE_CHECKING:
    from autoflash.gpu import Gpu

Op = Annotated[
    Literal["prefill", "decode", "backward"] | None, typer.Option(help="What is computed.")
]
Causal = Annotated[
    bool, typer.Option("--causal/--full", help="Which keys a prefill query sees; decode is causal.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Target = Annotated[
    str | None,
    typer.Option(
        "--gpu", metavar="NAME", help="A known GPU type, else the one here, else NVIDIA_H200."
    ),
]


def target_gpu(name: str | None) -> "Gpu":
    """The known GPU of this name; without a name the one of this machine, else the default target.

    Raises DeviceError for a name that is not known.
    """
    from autoflash import gpu

    if name is None and gpu.cuda_available():
        return gpu.detect()
    return gpu.known(name or gpu.DEFAULT_TARGET)


def print_json(value: Any) -> None:
    """Print a value as JSON with sorted keys."""
    import json

    print(json.dumps(value, indent=2, sort_keys=True))
