"""Filters: which rows a question is about, shared by the commands that ask the database."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

OfGpu = Annotated[
    str | None, typer.Option("--gpu", metavar="NAME", help="A GPU by its name or words of it.")
]
OfOp = Annotated[Literal["prefill", "decode", "backward"] | None, typer.Option("--op")]
OfDtype = Annotated[Literal["bf16", "fp16", "fp32"] | None, typer.Option("--dtype")]
Count = Annotated[int | None, typer.Option(min=1)]
Length = Annotated[int | None, typer.Option(min=0)]
Paged = Annotated[
    bool | None, typer.Option("--paged/--contiguous", help="Only the one kind of cache.")
]
OfFamily = Annotated[str | None, typer.Option("--family", metavar="NAME", help="A kernel family.")]
Database = Annotated[
    Path | None,
    typer.Option("--db", metavar="FILE", help="The database, else $AUTOFLASH_DB, else yours."),
]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV.")]


@dataclass(frozen=True)
class Filters:
    """What a row must be. `columns` are equal; `gpu` names its GPU; None asks nothing."""

    columns: Mapping[str, str | int]
    gpu: str | None = None
    paged: bool | None = None

    @classmethod
    def of(cls, gpu: str | None, paged: bool | None, **columns: str | int | None) -> "Filters":
        """The filters that were given; the others are None."""
        given = {name: value for name, value in columns.items() if value is not None}
        return cls(given, gpu, paged)

    def __bool__(self) -> bool:
        return bool(self.columns) or self.gpu is not None or self.paged is not None

    def match(self, row: Mapping[str, Any]) -> bool:
        """Whether a row, with the columns of the database's views, is what was asked for."""
        from autoflash.store.foreign import names

        return (
            all(row[column] == value for column, value in self.columns.items())
            and (self.gpu is None or "gpu" not in row or names(self.gpu, row["gpu"]))
            and (self.paged is None or (row["page_size"] > 0) == self.paged)
        )
