"""Limits that a comparison must keep, for builds: ``imbalance>1.1`` fails one.

A limit names a figure, optionally of a policy: ``auto.imbalance>1.1``. Without a policy it is that
of the last policy that is no oracle.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Any

from eplb.errors import ConfigError

FIGURES = {
    "imbalance": "imbalance_mean",
    "p95": "imbalance_p95",
    "p99": "imbalance_p99",
    "worst": "imbalance_max_layer",
    "rebalances": "rebalances",
    "experts": "experts_moved",
    "tokens_per_s": "tokens_per_s_per_rank",
}
COMPARED: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
LIMIT = re.compile(r"(?:(?P<policy>[\w:-]+)\.)?(?P<figure>\w+)\s*(?P<sign>[<>]=?)\s*(?P<value>\S+)")


@dataclass(frozen=True)
class Limit:
    """A figure that fails the comparison where the sign holds."""

    text: str
    policy: str | None
    figure: str
    sign: str
    value: float

    def broken_by(self, result: dict[str, Any]) -> str | None:
        """A sentence where a summary breaks the limit; None where it keeps it.

        Raises:
            ConfigError: the summary has no such policy or figure.
        """
        policies: dict[str, dict[str, Any]] = result["policies"]
        compared = [name for name, figures in policies.items() if not figures["oracle"]]
        policy = self.policy or (compared[-1] if compared else next(reversed(policies)))
        if policy not in policies:
            raise ConfigError(
                f"--fail-if {self.text!r}: no policy {policy!r}, expected one of: "
                f"{', '.join(policies)}"
            )
        figures = policies[policy]
        if figures["failed"]:
            return f"{policy} failed: {figures['failed']}"
        found = figures.get(FIGURES[self.figure])
        if found is None:
            raise ConfigError(
                f"--fail-if {self.text!r}: {self.figure} is not known, expected --hardware or "
                "--expert-times, and --model"
            )
        if COMPARED[self.sign](found, self.value):
            return f"{policy}: {self.figure} is {found:.6g}, the limit fails at {self.text}"
        return None


def limit_of(text: str) -> Limit:
    """Read a limit.

    Raises:
        ConfigError: another form, or an unknown figure.
    """
    match = LIMIT.fullmatch(text.strip())
    if match is None:
        raise ConfigError(f"--fail-if is {text!r}, expected a form like 'imbalance>1.1'")
    if match["figure"] not in FIGURES:
        raise ConfigError(
            f"--fail-if {text!r}: unknown figure {match['figure']!r}, expected one of: "
            f"{', '.join(FIGURES)}"
        )
    try:
        value = float(match["value"])
    except ValueError:
        value = float("nan")
    if not isfinite(value):
        raise ConfigError(f"--fail-if {text!r}: {match['value']!r} is no number, expected one")
    return Limit(text.strip(), match["policy"], match["figure"], match["sign"], value)
