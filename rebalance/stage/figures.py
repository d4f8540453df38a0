"""Statistics of staging, for metrics: counted by one thread, read by any."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rebalance.weights.sources import Link


@dataclass(frozen=True)
class LinkFigures:
    """One kind of link, since the start."""

    num_bytes: int = 0  # that landed
    active_s: float = 0.0  # time in which there was something to pull
    throttled_s: float = 0.0  # of that: waited for the budget, or for the engine's hold to end

    @property
    def bytes_per_second(self) -> float:
        """What was achieved; 0 before anything was."""
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
            detail["links"][name]["bytes_per_second"] = round(link.bytes_per_second)
        return detail


class StageMeter:
    """Counts; the mover's thread writes, any thread reads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_source: Counter[str] = Counter()
        self._counts: Counter[str] = Counter()
        self._bytes: Counter[Link] = Counter()
        self._active_s: dict[Link, float] = dict.fromkeys(Link, 0.0)
        self._throttled_s: dict[Link, float] = dict.fromkeys(Link, 0.0)

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
            self._bytes[link] += num_bytes

    def spent(self, link: Link, *, active_s: float = 0.0, throttled_s: float = 0.0) -> None:
        """Add time that a link was active, or throttled."""
        with self._lock:
            self._active_s[link] += active_s
            self._throttled_s[link] += throttled_s

    def snapshot(
        self, *, num_quarantined: int, ring_in_use: int, ring_entries: int
    ) -> StageFigures:
        """Return the current statistics."""
        with self._lock:
            links = {
                link.value: LinkFigures(
                    self._bytes[link],
                    round(self._active_s[link], 6),
                    round(self._throttled_s[link], 6),
                )
                for link in Link
            }
            return StageFigures(
                dict(self._by_source),
                links,
                num_staged=self._counts["num_staged"],
                num_retries=self._counts["num_retries"],
                num_wrong_digests=self._counts["num_wrong_digests"],
                num_quarantined=num_quarantined,
                ring_in_use=ring_in_use,
                ring_entries=ring_entries,
            )
