"""What one check of a deployment found."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """What one check found."""

    component: str
    found: str
    expected: str = ""  # "": it is as it should be

    @property
    def is_ok(self) -> bool:
        """Whether nothing else was expected."""
        return not self.expected

    def __str__(self) -> str:
        if self.is_ok:
            return f"ok       {self.component}: {self.found}"
        return f"refused  {self.component}: found {self.found}, expected {self.expected}"
