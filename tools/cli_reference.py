"""Writes docs/cli.md, the reference of every command and option, from the commands themselves."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from autoflash.cli import app

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
INTRODUCTION = """\
# Commands

Written by `make docs` from the commands themselves.

Rows go to stdout, progress and notices to stderr. A user's mistake is one line after `error:` and
exit status 1; wrong usage ends with 2, Ctrl-C with 130, and a budget spent before any problem
was decided with 3.
"""


def main() -> None:
    REFERENCE.write_text(reference())


def reference() -> str:
    """The text of docs/cli.md."""
    return "\n".join([INTRODUCTION, *(_section(name, each) for name, each in commands())])


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its full name, such as `db dump`, in the order of `--help`."""
    pending = [("", typer.main.get_command(app))]
    while pending:
        name, command = pending.pop(0)
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            yield name.strip(), command
        else:
            pending[:0] = [(f"{name} {sub}", each) for sub, each in subcommands.items()]


def options(command: Any) -> list[str]:
    """Every spelling of every option of a command."""
    return [one for each in command.params for one in (*each.opts, *each.secondary_opts)]


def _section(name: str, command: Any) -> str:
    arguments = [each for each in command.params if each.param_type_name == "argument"]
    usage = " ".join(["autoflash", name, *(_placeholder(each) for each in arguments)])
    lines = [f"## `{usage}`", "", inspect.cleandoc(command.help), ""]
    for each in command.params:
        if each not in arguments and "--help" not in each.opts:
            lines.append(f"- `{_spelling(each)}`{_meaning(each)}")
    return "\n".join(lines).rstrip() + "\n"


def _placeholder(argument: Any) -> str:
    name = argument.metavar or argument.name.upper()
    return name if argument.required else f"[{name}]"


def _spelling(option: Any) -> str:
    names = ", ".join(sorted(option.opts, key=len, reverse=True))
    if option.secondary_opts:
        return f"{names} / {', '.join(option.secondary_opts)}"
    return names if option.is_flag else f"{names} {_value(option)}"


def _value(option: Any) -> str:
    """What stands for the option's value: its choices, its name for people, or the option's."""
    kind = getattr(option, "type_descriptor", None) or option.type  # typer 0.29, and before
    choices = getattr(kind, "choices", None)
    if choices:
        return "|".join(map(str, choices))
    return option.metavar or option.name.upper()


def _meaning(option: Any) -> str:
    default = option.default
    if option.secondary_opts and default is not None:
        default = option.opts[0] if default else option.secondary_opts[0]
    known = default is not None and not isinstance(default, bool)
    parts = [option.help or "", f"(default `{default}`)" if known else ""]
    text = " ".join(filter(None, parts))
    return f": {text}" if text else ""


if __name__ == "__main__":
    main()
