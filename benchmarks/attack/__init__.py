"""Attacks on a running deployment and on its files, each with the claim that it tries to break.

    python -m benchmarks.attack [--only NAME ...] [--list]

Every attack uses real parts (processes, sockets, files, a redis-server), sends only to loopback
addresses, is bounded in count and time, and answers whether the claim held and the figure reached.
"""

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
