"""The command `autoflash`: its commands, one file each, and how errors end the process.

Importing this imports typer and nothing heavier: a command imports what it needs when it runs.
"""

import os
import sys
from typing import Annotated

import typer

from autoflash import __version__
from autoflash.cli import db
from autoflash.cli.bench import bench
from autoflash.cli.coverage import coverage
from autoflash.cli.doctor import doctor
from autoflash.cli.explain import explain
from autoflash.cli.export import export
from autoflash.cli.profile import profile
from autoflash.cli.query import query
from autoflash.cli.render import render
from autoflash.cli.report import report
from autoflash.cli.schema import schema
from autoflash.cli.space import space
from autoflash.cli.tune import tune
from autoflash.cli.verify import verify
from autoflash.cli.workload import workload
from autoflash.errors import AutoflashError
from autoflash.runtime.problem import ProblemError

app = typer.Typer(
    rich_markup_mode=None,
    pretty_exceptions_enable=False,  # our own mistakes keep Python's traceback
    add_completion=False,
    no_args_is_help=True,
)
for command in (
    *(tune, export, verify, bench, coverage),
    *(query, explain, profile, report),
    *(render, space, workload, schema, doctor),
):
    app.command()(command)
app.add_typer(db.app, name="db")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"autoflash {__version__}")
        raise typer.Exit


@app.callback()
def autoflash(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Find the fastest correct attention kernels for a GPU, keep what was measured, export them."""


def main() -> None:
    """Run the command line. A user's mistake is `error:` and a line on stderr, exit status 1."""
    try:
        _run()
    except (AutoflashError, ProblemError) as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 1))
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _run() -> None:
    try:
        app(prog_name="autoflash")
    finally:
        sys.stdout.flush()  # here a closed pipe is an error that can be caught, at exit it is noise
