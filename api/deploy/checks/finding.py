"""What one check of a deployment found."""

from __future__ import annotations

from dataclasses import dataclass

from eplb.errors import EplbError


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    component: str
    found: str
    expected: str = ""  # "": it is as it should be, or an error says all
    is_error: bool = False

    @property
    def is_ok(self) -> bool:
        """Whether nothing else was expected."""
        return not (self.expected or self.is_error)

    def __str__(self) -> str:
        if self.is_ok:
            return f"ok       {self.component}: {self.found}"
        expected = f", expected {self.expected}" if self.expected else ""
        return f"refused  {self.component}: {self.found}{expected}"


def as_finding(component: str, exc: EplbError) -> Finding:
    """Take an error apart, which names what was found and mostly what was expected."""
    found, _, expected = str(exc).removeprefix(f"{component}: ").partition(", expected ")
    return Finding(component, found, expected, is_error=True)
