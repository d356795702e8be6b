"""`autoflash workload`: a workload file from a model's config."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from autoflash.cli.notices import notice


def workload(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG.json", help="A Hugging Face model config.")
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE.yaml", help="Write it to a file.")
    ] = None,
    prefill_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Again for others; 1 and 4 if not given.")
    ] = None,
    prefill_tokens: Annotated[
        list[int] | None, typer.Option(min=1, help="512, 2048 and 8192 if not given.")
    ] = None,
    decode_batch: Annotated[
        list[int] | None, typer.Option(min=1, help="1, 8 and 64 if not given.")
    ] = None,
    decode_keys: Annotated[
        list[int] | None, typer.Option(min=1, help="1024, 8192 and 32768 if not given.")
    ] = None,
    page_size: Annotated[
        list[int] | None, typer.Option(min=0, help="16 if not given; 0 is a contiguous cache.")
    ] = None,
    tensor_parallel: Annotated[
        int, typer.Option(min=1, help="GPUs that the heads are dealt to.")
    ] = 1,
) -> None:
    """Write a workload from a model's config.json; what cannot be served is noticed.

    Weights are numbers of layers: edit the file where calls of prefill and decode are not as many.
    """
    from dataclasses import replace

    from autoflash.errors import AutoflashError
    from autoflash.hugging_face import Shapes, import_config
    from autoflash.whole_file import write_whole

    given = {
        "prefill_batches": prefill_batch,
        "prefill_lengths": prefill_tokens,
        "decode_batches": decode_batch,
        "decode_lengths": decode_keys,
        "page_sizes": page_size,
    }
    shapes = replace(Shapes(), **{name: value for name, value in given.items() if value})
    imported = import_config(config, shapes, tensor_parallel)
    for line in imported.notices:
        notice(line)
    if output is None:
        sys.stdout.write(imported.text)
        return
    try:
        write_whole(output, imported.text)
    except OSError as error:
        raise AutoflashError(f"cannot write {output}: {error.strerror}") from None
