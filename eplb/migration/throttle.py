"""Limits of one request on the pace of its migration, within those of the deployment."""

from __future__ import annotations

from dataclasses import dataclass, replace

from eplb.errors import ConfigError
from eplb.migration.transactions import Pace


@dataclass(frozen=True)
class Throttle:
    """How much slower than the deployment a migration is to go; None: as the deployment.

    Raises:
        ConfigError: a figure out of range.
    """

    experts_per_transaction: int | None = None  # experts that arrive on a rank; copy mode only
    layers_per_transaction: int | None = None
    link_part: float | None = None  # part of the budget of each of a rank's links

    def __post_init__(self) -> None:
        for name in ("experts_per_transaction", "layers_per_transaction"):
            found = getattr(self, name)
            if found is not None and found < 1:
                raise ConfigError(f"throttle: {name} is {found}, expected 1 or more")
        if self.link_part is not None and not 0 < self.link_part <= 1:
            raise ConfigError(
                f"throttle: link_part is {self.link_part}, expected more than 0 and at most 1"
            )

    def of(self, pace: Pace) -> Pace:
        """Return the slower of the two in each figure.

        Args:
            pace: the deployment's.

        Raises:
            ConfigError: a limit that its mode does not have.
        """
        if pace.mode != "copy" and self.experts_per_transaction is not None:
            raise ConfigError(
                f"throttle: experts_per_transaction is set in {pace.mode} mode, expected "
                "layers_per_transaction, which limits it there"
            )
        most = pace.experts_per_transaction or pace.staging_experts // 2
        return replace(
            pace,
            experts_per_transaction=_least(
                pace.experts_per_transaction, self.experts_per_transaction, most
            ),
            layers_per_transaction=_least(
                pace.layers_per_transaction, self.layers_per_transaction, 0
            ),
            link_part=min(pace.link_part, self.link_part or pace.link_part),
        )


def _least(own: int, asked: int | None, most: int) -> int:
    """Return the smaller; 0 of the deployment is its default, ``most``; 0 of that: no limit."""
    if asked is None:
        return own
    limit = own or most
    if limit and asked >= limit:
        return own
    return asked
