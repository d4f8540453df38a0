"""The checkpoint of a deployment: its first start stores which one, and a later start compares.

Compared are sizes, headers and samples of all weight files (``runtime.checkpoints.identity``), and
the layout of records: host caches and ranks of two layouts would exchange wrong weights. An
operator accepts another checkpoint with ``eplb check --accept-checkpoint``.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path

from eplb.errors import CheckpointError
from runtime.checkpoints.identity import INDEX_FILE, SINGLE_FILE, Identity, identity_of
from telemetry.state.events import Event
from telemetry.state.store import StateStore

CHECKPOINT_EVENT = "checkpoint"
# The store forgets old events: a start writes the identity again after so many others.
REPEAT_AFTER = 1000
ACCEPT = "eplb check --accept-checkpoint"


@dataclass(frozen=True)
class ServedCheckpoint:
    """What a deployment serves, as this host has it."""

    folder: Path
    layout: str = "eplb"  # of records, model.layout


def check_same_checkpoint(store: StateStore, served: ServedCheckpoint | None) -> None:
    """Refuse a checkpoint that is not the one of the first start; reads only.

    Args:
        store: of the deployment.
        served: on this host; None, or without weights: nothing is compared.

    Raises:
        CheckpointError: it differs, with the file and, where it is known, the tensor.
        StoreError: the store cannot be used.
    """
    _compared(store, served)


def record_checkpoint(store: StateStore, served: ServedCheckpoint | None, by: str) -> None:
    """Store which checkpoint the deployment serves, at its first start; later compare.

    Raises:
        CheckpointError: as ``check_same_checkpoint``.
        StoreError: the store cannot be used.
    """
    known, found = _compared(store, served)
    newest = next(iter(store.latest_events(limit=1)), None)
    is_old = known is not None and newest is not None and newest.id - known.id > REPEAT_AFTER
    if served is not None and found is not None and (known is None or is_old):
        _write(store, served, found, by)


def accept_checkpoint(store: StateStore, served: ServedCheckpoint | None, by: str) -> str:
    """Make the checkpoint of this host the deployment's; returns what that changes.

    Raises:
        CheckpointError: it cannot be read, or there is none.
        StoreError: the store cannot be used.
    """
    if served is None:
        raise CheckpointError("model.checkpoint is not set, expected the checkpoint to accept")
    found, known = identity_of(served.folder), _known(store)
    change = "none was stored" if known is None else _difference(known, served, found)
    _write(store, served, found, by)
    return f"accepted {served.folder}: {change or 'it is the one that was stored'}"


def _write(store: StateStore, served: ServedCheckpoint, found: Identity, by: str) -> None:
    detail = {"by": by, "identity": asdict(found), "layout": served.layout}
    store.add_event(CHECKPOINT_EVENT, detail)


def _difference(known: Event, served: ServedCheckpoint, found: Identity) -> str:
    """Return in what this host's differs from the one that was stored, or nothing."""
    before = Identity.parse(known.detail.get("identity"), f"store: event {known.id}")
    if change := before.difference(found, served.folder):
        return change
    layout = known.detail.get("layout")
    if layout == served.layout:
        return ""
    return f"records have layout {served.layout} (model.layout) here and {layout} there"


def _known(store: StateStore) -> Event | None:
    return next(store.events_backwards({CHECKPOINT_EVENT}), None)


def _compared(
    store: StateStore, served: ServedCheckpoint | None
) -> tuple[Event | None, Identity | None]:
    if served is None or not any(
        (served.folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)
    ):
        return None, None
    known, found = _known(store), identity_of(served.folder)
    if known is not None and (change := _difference(known, served, found)):
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(known.time))
        raise CheckpointError(
            f"checkpoint: {served.folder} differs from the one that deployment "
            f"{store.deployment!r} serves since {since} ({known.detail.get('by')}): {change}; "
            "expected the same; to serve this one, stop all ranks and host caches and run "
            f"`{ACCEPT}`"
        )
    return known, found
