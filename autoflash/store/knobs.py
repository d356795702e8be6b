"""Configs to JSON and back: what a row says of knobs is believed only if the family has them."""

import json
from collections.abc import Mapping
from typing import Any

from autoflash.config import Config
from autoflash.families import FAMILIES
from autoflash.store.fields import number

Timed = tuple[Config, float]


def read_config(family: Any, knobs: Any) -> Config:
    """The Config of these knobs. Raises ValueError for knobs the family lacks or that are missing.

    Whether their values are valid for a problem is for the family's predicate to say.
    """
    if not isinstance(family, str) or family not in FAMILIES:
        raise ValueError(f"no family is called {family!r}")
    if not isinstance(knobs, dict):
        raise ValueError(f"knobs are {knobs!r}, not an object")
    names = {knob.name for knob in FAMILIES[family].knobs}
    for name in sorted(names ^ set(knobs)):
        what = "is missing" if name in names else "is unknown"
        raise ValueError(f"knob {name} of {family} {what}")
    for name, value in knobs.items():
        if isinstance(value, bool) or not isinstance(value, int | str):
            raise ValueError(f"knob {name} of {family} is {value!r}")
    return Config.of(family, knobs)


def config_object(config: Config) -> dict[str, Any]:
    return {"family": config.family, "knobs": config.as_dict()}


def read_config_object(value: Any) -> Config:
    """The Config of `{"family": ..., "knobs": {...}}`. Raises ValueError."""
    if not isinstance(value, dict) or set(value) != {"family", "knobs"}:
        raise ValueError(f"a config is {value!r}")
    return read_config(value["family"], value["knobs"])


def timed_object(timed: Timed) -> dict[str, Any]:
    return {**config_object(timed[0]), "us": number("us", timed[1])}


def read_timed_object(value: Any) -> Timed:
    """The config and time of `{"family": ..., "knobs": {...}, "us": ...}`. Raises ValueError."""
    if not isinstance(value, dict) or "us" not in value:
        raise ValueError(f"a timed config is {value!r}")
    rest = {name: part for name, part in value.items() if name != "us"}
    return read_config_object(rest), number("us", value["us"])


def objects(value: Any) -> list[Any]:
    """`value`, which must be a list. Raises ValueError."""
    if not isinstance(value, list):
        raise ValueError(f"{value!r} is not a list")
    return value


def to_json(value: Mapping[str, Any] | list[Any]) -> str:
    """One spelling of `value`. Raises ValueError for NaN and infinity, which are no JSON."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
