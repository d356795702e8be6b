"""Filters: which rows a question is about, shared by the commands that ask the database."""

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

OfGpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A GPU by its name or words of it.")
]
OfOp = Annotated[Literal["prefill", "decode", "backward"] | None, typer.Option("--op")]
Count = Annotated[int | None, typer.Option(min=1)]
Length = Annotated[int | None, typer.Option(min=0)]
Database = Annotated[
    Path | None,
    typer.Option("--db", metavar="FILE", help="The database, else $AUTOFLASH_DB, else yours."),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


def _switch(name: str, meaning: str) -> Any:
    return Annotated[bool | None, typer.Option(f"--{name}/--no-{name}", help=meaning)]


# The options of every command that asks about winners, in the order of its help.
FILTERS: dict[str, Any] = {
    "gpu": OfGpu,
    "op": OfOp,
    "dtype": Annotated[Literal["bf16", "fp16", "fp32"] | None, typer.Option("--dtype")],
    "head_dim": Count,
    "num_heads": Count,
    "num_kv_heads": Count,
    "batch": Count,
    "seqlen_q": Count,
    "seqlen_k": Length,
    "causal": Annotated[
        bool | None,
        typer.Option("--causal/--full", help="Which keys a query sees; decode is causal."),
    ],
    "window": _switch("window", "Only with one, or without."),
    "softcap": _switch("softcap", "Only with capped scores, or without."),
    "alibi": _switch("alibi", "Only with slopes, or without."),
    "bias": _switch("bias", "Only with a bias, or without."),
    "sinks": _switch("sinks", "Only with sinks, or without."),
    "layout": Annotated[
        Literal["bshd", "bhsd", "thd"] | None,
        typer.Option("--layout", help="Of q, k and v; decode's is bshd."),
    ],
    "lengths": Annotated[Literal["equal", "ragged", "captured"] | None, typer.Option("--lengths")],
    "paged": Annotated[
        bool | None, typer.Option("--paged/--contiguous", help="Only the one kind of cache.")
    ],
    "page_size": Annotated[
        int | None, typer.Option(min=0, help="Tokens of a page; 0 is a contiguous cache.")
    ],
    "kv_dtype": Annotated[
        Literal["bf16", "fp16", "fp32", "fp8_e4m3", "int8"] | None,
        typer.Option("--kv-dtype", help="Of keys and values, or of the cache."),
    ],
    "family": Annotated[
        str | None, typer.Option("--family", metavar="NAME", help="A kernel family.")
    ],
}


def filtered(command: Callable[..., None]) -> Callable[..., None]:
    """The command with the options of FILTERS in place of its first parameter, `filters`."""
    _, *others = inspect.signature(command).parameters.values()
    options = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        for name, kind in FILTERS.items()
    ]

    @functools.wraps(command)
    def asked(**given: Any) -> None:
        command(Filters.of(**{name: given.pop(name) for name in FILTERS}), **given)

    others = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in others]
    vars(asked)["__signature__"] = inspect.Signature([*options, *others])
    asked.__annotations__ = {each.name: each.annotation for each in [*options, *others]}
    return asked


@dataclass(frozen=True)
class Filters:
    """What a row must be. `columns` are equal; `gpu` names its GPU; None asks nothing."""

    columns: Mapping[str, str | int]
    gpu: str | None = None
    paged: bool | None = None
    window: bool | None = None

    @classmethod
    def of(
        cls,
        gpu: str | None = None,
        paged: bool | None = None,
        window: bool | None = None,
        **columns: str | int | None,
    ) -> "Filters":
        """The filters that were given; the others are None."""
        given = {name: value for name, value in columns.items() if value is not None}
        return cls(given, gpu, paged, window)

    def also(self, **columns: str | int) -> "Filters":
        """These filters and some more."""
        return replace(self, columns={**self.columns, **columns})

    def __bool__(self) -> bool:
        return self != Filters({})

    def match(self, row: Mapping[str, Any]) -> bool:
        """Whether a row, with the columns of the database's views, is what was asked for."""
        from autoflash.store.foreign import names

        return (
            all(row[column] == value for column, value in self.columns.items())
            and (self.gpu is None or "gpu" not in row or names(self.gpu, row["gpu"]))
            and (self.paged is None or (row["page_size"] > 0) == self.paged)
            and (self.window is None or _windowed(row) == self.window)
        )


def _windowed(row: Mapping[str, Any]) -> bool:
    return max(row["window_left"], row["window_right"]) >= 0
