"""Statistics of staging, for metrics: counted by one thread, read by any."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rebalance.weights.sources import Link


@dataclass
class LinkFigures:
    """One kind of link, since the start."""

    num_bytes: int = 0  # bytes that landed
    active_s: float = 0.0  # time in which there was something to pull
    throttled_s: float = 0.0  # part of it: waits for the budget, or for the engine's hold to end

    @property
    def bytes_per_second(self) -> float:
        """Achieved rate; 0 before any time was active."""
        return self.num_bytes / self.active_s if self.active_s > 0 else 0.0


@dataclass(frozen=True)
class StageFigures:
    """Statistics of staging on one rank: an immutable copy."""

    bytes_by_source: Mapping[str, int] = field(default_factory=dict)  # records that were proven
    links: Mapping[str, LinkFigures] = field(default_factory=dict)
    num_staged: int = 0  # moves of the present migration that are staged and verified
    num_retries: int = 0  # records that were restarted from another source
    num_wrong_digests: int = 0
    num_quarantined: int = 0  # slots and host records that gave wrong bytes
    ring_in_use: int = 0
    ring_entries: int = 0

    def as_detail(self) -> dict[str, Any]:
        """The fields of a rank's report beside ``bytes_by_source``; JSON-ready."""
        detail = asdict(self)
        del detail["bytes_by_source"]
        for name, link in self.links.items():
            detail["links"][name] = {
                "num_bytes": link.num_bytes,
                "active_s": round(link.active_s, 6),
                "throttled_s": round(link.throttled_s, 6),
                "bytes_per_second": round(link.bytes_per_second),
            }
        return detail


class StageMeter:
    """Counts; the mover's thread writes, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: Counter[str] = Counter()
        self._counts = Counter(num_staged=0, num_retries=0, num_wrong_digests=0)
        self._links = {link: LinkFigures() for link in Link}

    def add_bytes(self, source: str, num_bytes: int) -> None:
        """Count bytes by their source; "rejected" after a digest mismatch."""
        with self._lock:
            self._by_source[source] += num_bytes

    def add(self, name: str, count: int = 1) -> None:
        """Add ``count`` to a field of StageFigures."""
        with self._lock:
            self._counts[name] += count

    def restart(self) -> None:
        """A new migration: nothing of it is staged."""
        with self._lock:
            self._counts["num_staged"] = 0

    def landed(self, link: Link, num_bytes: int) -> None:
        """Count a chunk that arrived."""
        with self._lock:
            self._links[link].num_bytes += num_bytes

    def spent(self, link: Link, *, active_s: float = 0.0, throttled_s: float = 0.0) -> None:
        """Add time that a link was active, or throttled."""
        with self._lock:
            self._links[link].active_s += active_s
            self._links[link].throttled_s += throttled_s

    def snapshot(
        self, *, num_quarantined: int, ring_in_use: int, ring_entries: int
    ) -> StageFigures:
        """Return the current statistics."""
        with self._lock:
            return StageFigures(
                dict(self._by_source),
                {link.value: replace(found) for link, found in self._links.items()},
                **self._counts,
                num_quarantined=num_quarantined,
                ring_in_use=ring_in_use,
                ring_entries=ring_entries,
            )
