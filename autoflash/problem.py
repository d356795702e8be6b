"""Variant: the structural switches that decide a kernel's text."""

from dataclasses import dataclass

from autoflash.runtime.problem import Problem, ProblemError

__all__ = ["Problem", "ProblemError", "Variant"]


@dataclass(frozen=True, order=True)
class Variant:
    """What is rendered: booleans and enums only. Numbers belong to Config and to arguments."""

    family: str
    op: str
    causal: bool = False
    paged: bool = False

    @property
    def name(self) -> str:
        """The golden's name: the family, then every switch that is on."""
        switches = [switch for switch in ("causal", "paged") if getattr(self, switch)]
        return "_".join([self.family, *switches])
