"""The checkpoint of a deployment: its first start stores which one, and a later start compares.

Compared are sizes, headers and samples of all weight files (``runtime.checkpoints.identity``). An
operator accepts another checkpoint with ``eplb check --accept-checkpoint``.
"""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path

from eplb.errors import CheckpointError
from runtime.checkpoints.identity import INDEX_FILE, SINGLE_FILE, Identity, identity_of
from telemetry.store import Event, LoadStore, events_backwards

CHECKPOINT_EVENT = "checkpoint"
# The store forgets old events: a start writes the identity again after so many others.
REPEAT_AFTER = 1000
ACCEPT = "eplb check --accept-checkpoint"


def check_same_checkpoint(store: LoadStore, folder: Path | None) -> None:
    """Refuse a checkpoint that is not the one of the first start; reads only.

    Args:
        store: of the deployment.
        folder: of the weights on this host; None, or without weights: nothing is compared.

    Raises:
        CheckpointError: it differs, with the file and, where it is known, the tensor.
        StoreError: the store cannot be used.
    """
    _compared(store, folder)


def record_checkpoint(store: LoadStore, folder: Path | None, by: str) -> None:
    """Store which checkpoint the deployment serves, at its first start; later compare.

    Raises:
        CheckpointError: as ``check_same_checkpoint``.
        StoreError: the store cannot be used.
    """
    known, found = _compared(store, folder)
    newest = next(iter(store.latest_events(limit=1)), None)
    is_old = known is not None and newest is not None and newest.id - known.id > REPEAT_AFTER
    if found is not None and (known is None or is_old):
        _write(store, found, by)


def accept_checkpoint(store: LoadStore, folder: Path | None, by: str) -> str:
    """Make the checkpoint of this host the deployment's; returns what that changes.

    Raises:
        CheckpointError: it cannot be read, or there is none.
        StoreError: the store cannot be used.
    """
    if folder is None:
        raise CheckpointError("model.checkpoint is not set, expected the checkpoint to accept")
    found, known = identity_of(folder), _known(store)
    before = Identity.parse(known.detail["identity"], "store") if known else None
    _write(store, found, by)
    change = before.difference(found, folder) if before else "none was stored"
    return f"accepted {folder}: {change or 'it is the one that was stored'}"


def _write(store: LoadStore, found: Identity, by: str) -> None:
    store.add_event(CHECKPOINT_EVENT, {"by": by, "identity": asdict(found)})


def _known(store: LoadStore) -> Event | None:
    return next(events_backwards(store, {CHECKPOINT_EVENT}), None)


def _compared(store: LoadStore, folder: Path | None) -> tuple[Event | None, Identity | None]:
    if folder is None or not any((folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)):
        return None, None
    known, found = _known(store), identity_of(folder)
    if known is not None:
        before = Identity.parse(known.detail.get("identity"), f"store: event {known.id}")
        if change := before.difference(found, folder):
            since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(known.time))
            raise CheckpointError(
                f"checkpoint: {folder} differs from the one that deployment {store.deployment!r} "
                f"serves since {since} ({known.detail.get('by')}): {change}; expected the same; to "
                f"serve this one, stop all ranks and host caches and run `{ACCEPT}`"
            )
    return known, found
