"""What an attack is and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Outcome:
    """What one attack found."""

    held: bool  # whether the claim held
    figure: str  # what was tried and measured, in a few words


@dataclass(frozen=True)
class Attack:
    """One attempt to break one claim."""

    name: str  # short, unique, lower case with dashes
    claim: str  # what must hold, one sentence
    run: Callable[[Path], Outcome]  # gets an empty folder; raises only if it could not be tried
