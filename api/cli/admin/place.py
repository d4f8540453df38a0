"""Which API a command asks: of a service by its URL, or in this process on a store."""

from __future__ import annotations

from typing import NamedTuple

IN_SERVICE_S = 10.0  # for which a service waits for the controller


class Place(NamedTuple):
    """Which API is asked, as given on the command line."""

    service: str | None
    store: str | None
    deployment: str | None
    wait_s: float = IN_SERVICE_S  # for the controller, with a store

    @property
    def url(self) -> str | None:
        """Of the service; None: a store is used, which was named or is configured."""
        return self.service if self.store is None else None
