"""A record's plain fields, each value checked against its field's type, to and from a mapping."""

import dataclasses
import math
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

Plain = str | int | float | bool | None
KINDS = (str, int, float, bool)


@cache
def plain_fields(record_type: type) -> dict[str, tuple[type, bool]]:
    """The fields that are text, a number or a boolean: the type, and whether None is one too."""
    found = {}
    hints = get_type_hints(record_type)
    for field in dataclasses.fields(record_type):
        hint = hints[field.name]
        kind = next((k for k in get_args(hint) or (hint,) if k in KINDS), None)
        if kind is not None:
            found[field.name] = (kind, NoneType in get_args(hint))
    return found


def to_plain(record: Any, finite: bool = True) -> dict[str, Plain]:
    """The plain fields of `record`. Raises ValueError naming a value that is not of its type.

    NaN is never accepted (SQLite would store NULL), infinity only where `finite` is False.
    """
    return {
        name: _checked(name, getattr(record, name), kind, optional, finite)
        for name, (kind, optional) in plain_fields(type(record)).items()
    }


def from_plain(
    record_type: type, values: Mapping[str, Any], *, finite: bool = True, **others: Any
) -> Any:
    """A `record_type` of the plain `values` and of the `others` that are not plain.

    Raises ValueError naming the field that is missing, unknown or of the wrong type.
    """
    known = plain_fields(record_type)
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of {record_type.__name__}")
    for field in dataclasses.fields(record_type):
        has_default = field.default is not dataclasses.MISSING
        if field.name in known and field.name not in values and not has_default:
            raise ValueError(f"{field.name} is missing")
    checked = {name: _checked(name, value, *known[name], finite) for name, value in values.items()}
    return record_type(**checked, **others)


def number(name: str, value: Any, finite: bool = True) -> float:
    """`value` as a float. Raises ValueError unless it is a number, and a finite one if so asked."""
    numeric = isinstance(value, Real) and not isinstance(value, bool) and _fits(value)
    if numeric and (math.isfinite(value) or not (finite or math.isnan(value))):
        return float(value) + 0.0  # -0.0 becomes 0.0, as sqlite would store it
    raise ValueError(f"{name} is {value!r}, not a {'finite ' if finite else ''}number")


def _checked(name: str, value: Any, kind: type, optional: bool, finite: bool) -> Plain:
    if value is None and optional:
        return None
    if kind is str and isinstance(value, str):
        # what a broken tool printed may hold bytes that are no text, and sqlite refuses them
        return value.encode("utf-8", "backslashreplace").decode()
    if kind is bool and type(value) in (bool, int) and value in (0, 1):
        return bool(value)
    if kind is float:
        return number(name, value, finite)
    if kind is int and isinstance(value, Integral) and not isinstance(value, bool) and _fits(value):
        return int(value)
    raise ValueError(f"{name} is {value!r}, not {kind.__name__}")


def _fits(value: Any) -> bool:
    """Whether a number is no integer beyond the 64 bits that sqlite has for one."""
    return not isinstance(value, Integral) or -(2**63) <= int(value) < 2**63
