"""`autoflash export`: the module that serves what was measured, from databases and for GPUs."""

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from autoflash.cli.notices import counted, notice, store_warnings_told
from autoflash.cli.options import AsJson
from autoflash.cli.table import Drawn, print_rows_as_json, print_table

if TYPE_CHECKING:
    from autoflash.export import Export
    from autoflash.records import Winner

COLUMNS = (
    "gpu",
    "problem",
    "family",
    "knobs_json",
    "loses_percent",
    "unseen_loses_percent",
    "source",
)
DRAWN = Drawn(
    {name: name for name in ("gpu", "source", "problem", "family")}
    | {"loses %": "loses_percent", "unseen loses %": "unseen_loses_percent", "knobs": "knobs_json"},
    above=("gpu", "source", "family"),
    spare=("knobs",),
)


def export(
    output: Annotated[
        Path,
        typer.Option(
            "--output", "-o", metavar="NAME.py|FOLDER", help="The module to write, or a package."
        ),
    ] = Path("attention_dispatch.py"),
    db: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A database, again for others; yours without it."),
    ] = None,
    gpu: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A GPU to keep, again for others; all without it."),
    ] = None,
    allow_predicted: Annotated[
        bool, typer.Option("--allow-predicted", help="Also what was predicted, not measured.")
    ] = False,
    bundle: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Also the compiled kernels, for use_bundle()."),
    ] = None,
    max_configs: Annotated[
        int, typer.Option(min=1, help="At most so many configs for a variant on a GPU.")
    ] = 8,
    as_json: AsJson = False,
) -> None:
    """Write one Python module that serves what was measured.

    A name without .py is that of a package, with a file for each kernel: to read, to profile and to
    step through.

    Databases are laid over each other, the first on top, and over the winners shipped with
    autoflash. The rows printed say which config serves each problem, what it loses against the
    problem's own winner, and what the problem would lose had it not been tuned: an estimate for
    shapes that were not.
    """
    from autoflash.export import export as exported
    from autoflash.export import unseen_loss, write_module

    module = exported(
        winners_over(databases_of(db or [])),
        gpus=gpu or (),
        allow_predicted=allow_predicted,
        most_configs=max_configs,
    )
    main = write_module(module, output)
    if bundle:
        from autoflash.bundle import write_bundle

        count = write_bundle(main, bundle)
        notice(f"{bundle}: {counted(count, 'kernel')}")
    for reason, count in Counter(reason for _, reason in module.left_out).most_common():
        notice(f"{counted(count, 'winner')} left out: {reason}")
    configs = {(row.gpu, row.config) for row in module.rows}
    served, by = counted(len(module.rows), "problem"), counted(len(configs), "config")
    notice(f"{output}: {served} served by {by}")
    if told := unseen_loss(module.rows):
        notice(f"had it not been tuned, a problem would lose {' '.join(told)}")
    _record(databases_of(db or [])[:1], module, max_configs)
    rows = [
        (
            row.gpu.name,
            row.problem,
            row.config.family,
            row.config.to_json(),
            round(100 * row.regret, 2),
            None if row.unseen_regret is None else round(100 * row.unseen_regret, 2),
            row.source,
        )
        for row in module.rows
    ]
    if as_json:
        print_rows_as_json(COLUMNS, rows)
    else:
        print_table(COLUMNS, rows, DRAWN)


def databases_of(given: list[Path]) -> list[Path]:
    """Those given, else the user's own if there is one."""
    from autoflash.store import users_database

    own = None if given else users_database()
    return [own] if own else given


def winners_over(databases: list[Path]) -> list["Winner"]:
    """The winners of the databases, over those shipped."""
    from autoflash.store import Store, shipped_winners
    from autoflash.store.overlay import overlay

    layers = []
    with store_warnings_told():
        for path in databases:
            with Store.open(path, readonly=True) as store:
                layers.append(store.winners())
        return overlay(*layers, shipped_winners())


def _record(topmost: list[Path], module: "Export", most_configs: int) -> None:
    """The export in the topmost database, which may be one that nobody may write."""
    from hashlib import sha256

    from autoflash.errors import StoreError
    from autoflash.store import Store

    digest = sha256(module.text.encode()).hexdigest()
    for path in topmost:
        try:
            with Store.open(path) as store:
                store.record_export(digest, most_configs, module.rows)
        except StoreError as error:
            notice(f"the export is not recorded: {error}")
