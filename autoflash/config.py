"""The frozen Config: which family, and the numbers its kernels are launched with."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product

KnobValue = int | str


@dataclass(frozen=True)
class Knob:
    """One tunable of a family and the values the search may give it, in order of preference.

    One that is not `compiled` only decides how the kernel is launched.
    """

    name: str
    values: tuple[KnobValue, ...]
    compiled: bool = True


@dataclass(frozen=True, order=True)
class Config:
    """A point of a family's space. `knobs` is sorted by name, so equal configs are equal bytes."""

    family: str
    knobs: tuple[tuple[str, KnobValue], ...]

    @classmethod
    def of(cls, family: str, knobs: Mapping[str, KnobValue]) -> "Config":
        return cls(family, tuple(sorted(knobs.items())))

    @classmethod
    def from_json(cls, family: str, knobs_json: str) -> "Config":
        return cls.of(family, json.loads(knobs_json))

    def as_dict(self) -> dict[str, KnobValue]:
        return dict(self.knobs)

    def to_json(self) -> str:
        return json.dumps(dict(self.knobs), sort_keys=True, separators=(",", ":"))

    def __getitem__(self, name: str) -> KnobValue:
        return dict(self.knobs)[name]

    def __str__(self) -> str:
        return " ".join([self.family, *(f"{name}={value}" for name, value in self.knobs)])


@cache
def grid(family: str, knobs: tuple[Knob, ...]) -> tuple[Config, ...]:
    """Every combination of the knobs' values, in a fixed order."""
    names = [knob.name for knob in knobs]
    every = product(*(knob.values for knob in knobs))
    return tuple(Config.of(family, dict(zip(names, values, strict=True))) for values in every)
