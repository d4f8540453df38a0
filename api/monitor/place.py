"""The store itself: whether it answers, whether it takes changes, and the room on its disk."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import inf
from pathlib import Path
from shutil import disk_usage

from api.monitor.state import OrderState, StoreState
from telemetry.state.live import LiveState
from telemetry.state.runs import LEAST_SILENCE_S, RankState
from telemetry.state.store import StateStore


class StoreFold:
    """Follows the store of a deployment. Its owner serialises calls.

    Args:
        folder: the state folder; None: not known here.
    """

    def __init__(self, folder: Path | None) -> None:
        self.live = LiveState()
        self.is_read = False  # once at least
        self._groups: tuple[str, ...] = ()
        self._folder, self._free_bytes = folder, free_bytes(folder)
        self._has_failed, self._answers_since = False, -inf  # when the store answered again
        self._full, self._full_until = "", -inf  # why it takes no changes, and until when
        self._audit_waiting = 0

    def begin_look(self) -> bool:
        """Note that a look at the store begins; whether the one before failed."""
        had_failed, self._has_failed = self._has_failed, True  # until all is read
        return had_failed

    def end_look(self, now: float, *, had_failed: bool) -> None:
        """Note that all was read."""
        if had_failed:
            self._answers_since = now
        self.is_read, self._has_failed = True, False

    def answered_s(self, now: float) -> float:
        """For how long the store has answered again; also after its clock was set back."""
        return abs(now - self._answers_since)

    def read(self, store: StateStore) -> None:
        """Read what the store has of itself, and the settings that are in force.

        Raises:
            StoreError: it cannot be read.
        """
        self.live, self._groups = store.live(), tuple(store.groups())
        self._audit_waiting = len(store.audit_lines())
        self._free_bytes = free_bytes(self._folder)

    def look_for_room(self, why_full: str, states: Iterable[RankState], now: float) -> None:
        """Note whether the store takes changes: nobody can report to one that is full.

        One that was full counts as such until somebody has written to it again.

        Args:
            why_full: why it takes none now; "": it does.
            states: the latest reports of the ranks.
            now: seconds since the epoch.
        """
        if why_full:
            self._full, self._full_until = why_full, now
            self._answers_since = now
        elif self._full and (
            any(state.time > self._full_until for state in states)
            or now - self._full_until > LEAST_SILENCE_S
        ):
            self._full = ""

    def state(self, deployment: str, now: float) -> StoreState:
        """Put together what is known of the store."""
        return StoreState(
            deployment=deployment,
            groups=self._groups,
            time=now,
            unread="",
            store_full=self._full,
            free_bytes=self._free_bytes,
            audit_waiting=self._audit_waiting,
        )

    def orders(self, open_proposals: int) -> OrderState:
        """Put together what operators have ordered.

        Args:
            open_proposals: how many wait for a decision.
        """
        control = self.live.control
        return OrderState(
            movement=control.movement,
            observe=control.observe,
            until=self.live.until.get("movement"),
            stage=self.live.text("stage"),
            open_proposals=open_proposals,
            switched=self.live.changes.get("movement"),
        )


def free_bytes(folder: Path | None) -> int | None:
    """Return the room on the disk of a folder; None: there is none yet."""
    with suppress(OSError):
        return None if folder is None else disk_usage(folder).free
    return None
