"""The model of a deployment: its shape, its weights, and that all processes have the same weights.

The shape is of the settings, or of the `config.json` beside the weights. The first start stores
which checkpoint it serves, and a later start compares: sizes, headers and samples of all weight
files (``runtime.checkpoints.identity``), and the layout of records, because host caches and ranks
of two layouts would exchange wrong weights. An operator accepts another checkpoint with
``eplb check --accept-checkpoint``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from api.config.deployment import ModelSettings
from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, counted
from runtime.checkpoints.identity import (
    INDEX_FILE,
    SINGLE_FILE,
    Identity,
    digest_of_bytes,
    identity_of,
)
from runtime.checkpoints.model_config import CONFIG_FILE, read_config
from telemetry.state.events import Event, read_event
from telemetry.state.store import StateStore

if TYPE_CHECKING:
    from runtime.experts import ExpertSchema

TRANSFORMERS = "transformers"  # a value of model.layout
OWN_PRECISION = "bfloat16"  # precision of eplb's own layout if none is set
CHECKPOINT_EVENT = "checkpoint"
# The store forgets old events: a start writes the identity again after so many others.
REPEAT_AFTER = 1000
WEIGHTS_EVENT = "weights"  # kind: digests of all bytes of a checkpoint's files
ACCEPT = "eplb check --accept-checkpoint"
SHAPES = ("layers", "experts", "top_k", "hidden", "intermediate")


@dataclass(frozen=True)
class StoredCheckpoint:
    """Detail of the event of a checkpoint: which one the deployment serves."""

    by: str
    identity: Any  # of an Identity, which reads it
    layout: str  # of records


@dataclass(frozen=True)
class ReadWeights:
    """Detail of the event of a read of all bytes."""

    by: str
    identity: Any
    digests: Mapping[str, str]  # by file


def model_shape(settings: ModelSettings) -> ModelShape:
    """Give the shape of the deployment's model; loads no torch.

    Layers of multi-token prediction (MTP) are not part of it: which of them have experts is known
    of the weight files alone. ``check_checkpoint`` and the host cache report them.

    Raises:
        ConfigError: a shape is missing, or is another than in the checkpoint's `config.json`.
        CheckpointError: the folder or its `config.json` cannot be read, or its family is unknown.
    """
    given = {name: int(getattr(settings, name)) for name in SHAPES}
    _check_layout(settings)
    if settings.checkpoint is not None:
        return _of_checkpoint(settings, given)
    if missing := [name for name, value in given.items() if not value]:
        raise ConfigError(
            f"model.{missing[0]} is 0, expected a number, or model.checkpoint with a {CONFIG_FILE}"
        )
    return ModelShape(
        tuple(range(given["layers"])),
        num_experts=given["experts"],
        top_k=given["top_k"],
        hidden=given["hidden"],
        intermediate=given["intermediate"],
    )


def _of_checkpoint(settings: ModelSettings, given: dict[str, int]) -> ModelShape:
    folder = settings.checkpoint
    assert folder is not None, "asked about a checkpoint"
    if not folder.is_dir():
        raise CheckpointError(f"model.checkpoint {folder} is no folder, expected one")
    found = read_config(folder).figures.shape()
    read = (found.num_layers, found.num_experts, found.top_k, found.hidden, found.intermediate)
    for (name, value), expected in zip(given.items(), read, strict=True):
        if value not in (0, expected):
            raise ConfigError(
                f"model.{name} is {value}, expected {expected} as in {folder}/{CONFIG_FILE}, or 0"
            )
    return found


def _check_layout(settings: ModelSettings) -> None:
    if settings.layout != TRANSFORMERS:
        return
    if settings.checkpoint is None:
        raise ConfigError(
            f'model.layout is "{TRANSFORMERS}" and model.checkpoint is not set, expected the '
            "checkpoint whose tensors decide the layout"
        )
    if settings.precision is not None:
        raise ConfigError(
            f'model.precision is "{settings.precision}" beside the layout "{TRANSFORMERS}", '
            "expected it not to be set: records have the types of the checkpoint"
        )


def record_schema(settings: ModelSettings, model: ModelShape) -> ExpertSchema:
    """What belongs to an expert's record, for host caches, ranks and checks alike; loads torch.

    Raises:
        CheckpointError: the checkpoint cannot be read, or has no such layout.
    """
    from rebalance.assembly.description import schema_of
    from runtime.checkpoints.checkpoint import Checkpoint, transformers_schema

    if settings.layout == TRANSFORMERS:
        assert settings.checkpoint is not None, "refused by model_shape"
        return transformers_schema(Checkpoint(settings.checkpoint))
    return schema_of(model.hidden, model.intermediate, settings.precision or OWN_PRECISION)


def check_checkpoint(settings: ModelSettings, model: ModelShape) -> str:
    """Compare the expert tensors of a checkpoint with the model; loads torch.

    Returns:
        What was found, in a few words.

    Raises:
        CheckpointError: a file or tensor is missing, or has another shape or type.
    """
    from runtime.checkpoints.checkpoint import Checkpoint

    folder = settings.checkpoint
    if folder is None:
        return "none: the engine loads its weights itself"
    checkpoint = Checkpoint(folder)
    schema = record_schema(settings, model)
    checkpoint.check(model, schema)
    kind = settings.precision or OWN_PRECISION
    if settings.layout == TRANSFORMERS:
        types = sorted({str(spec.dtype).removeprefix("torch.") for spec in schema.tensors})
        kind = f"{', '.join(types)}, layout {TRANSFORMERS}"
    return (
        f"{folder}: {checkpoint.config.family.name}, {model.num_layers} MoE layers x "
        f"{model.num_experts} experts in {kind}{unserved(checkpoint.mtp_layers)}"
    )


def unserved(mtp_layers: Sequence[int]) -> str:
    """Say that the commands leave layers of multi-token prediction (MTP) to the engine."""
    if not mtp_layers:
        return ""
    return (
        f"; MTP layers {', '.join(map(str, mtp_layers))} are neither served nor balanced: the "
        "engine loads their experts itself"
    )


def check_same_checkpoint(
    store: StateStore, weights: ModelSettings, recorded_by: str | None = None
) -> None:
    """Refuse a checkpoint that is not the one of the deployment's first start.

    Args:
        store: of the deployment.
        weights: their folder on this host, and the layout of records; without weight files nothing
            is compared.
        recorded_by: the process that stores the checkpoint where none is stored; None: this reads
            only.

    Raises:
        CheckpointError: it differs, with the file and, where it is known, the tensor.
        StoreError: the store cannot be used.
    """
    folder = weights.checkpoint
    if folder is None or not any((folder / name).exists() for name in (INDEX_FILE, SINGLE_FILE)):
        return
    known, found = _stored_checkpoint(store), identity_of(folder)
    if known is not None and (change := _difference(known, weights, found)):
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(known.time))
        raise CheckpointError(
            f"checkpoint: {folder} differs from the one that deployment {store.deployment!r} "
            f"serves since {since} ({read_event(known, StoredCheckpoint).by}): {change}; "
            "expected the same; to "
            f"serve this one, stop all ranks and host caches and run `{ACCEPT}`"
        )
    newest = next(iter(store.latest_events(limit=1)), None)
    is_old = known is not None and newest is not None and newest.id - known.id > REPEAT_AFTER
    if recorded_by is not None and (known is None or is_old):
        _store_checkpoint(store, weights, found, recorded_by)


def accept_checkpoint(store: StateStore, weights: ModelSettings, by: str) -> str:
    """Make the checkpoint of this host the deployment's; returns what that changes.

    Raises:
        CheckpointError: it cannot be read, or there is none.
        StoreError: the store cannot be used.
    """
    folder = weights.checkpoint
    if folder is None:
        raise CheckpointError("model.checkpoint is not set, expected the checkpoint to accept")
    found, known = identity_of(folder), _stored_checkpoint(store)
    change = "none was stored" if known is None else _difference(known, weights, found)
    _store_checkpoint(store, weights, found, by)
    return f"accepted {folder}: {change or 'it is the one that was stored'}"


def check_weights(
    store: StateStore, weights: ModelSettings, by: str, advance: Callable[[int], object]
) -> str:
    """Read every byte of the checkpoint, compare with what was read first, and say what was found.

    The first read of a checkpoint is recorded in the store, for all hosts.

    Args:
        advance: is told how many files are read.

    Raises:
        CheckpointError: bytes differ though sizes, headers and samples are the same; or it cannot
            be read, or there is none.
        StoreError: the store cannot be used.
    """
    folder = weights.checkpoint
    if folder is None:
        raise CheckpointError("model.checkpoint is not set, expected the checkpoint to read")
    identity, digests = identity_of(folder), dict[str, str]()
    for file, _, _ in identity.files:
        digests[file] = digest_of_bytes(folder / file)
        advance(len(digests))
    for known in store.events_backwards({WEIGHTS_EVENT}):
        first = read_event(known, ReadWeights)
        before = Identity.parse(first.identity, f"store: event {known.id}")
        if before.difference(identity, folder):
            continue  # of another checkpoint
        if changed := [file for file in digests if first.digests.get(file) != digests[file]]:
            when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(known.time))
            raise CheckpointError(
                f"weights: {', '.join(changed)} of {folder} have other bytes than {when} "
                f"({first.by}), of the same size and tensors; expected the same: one of "
                "the copies is damaged"
            )
        return f"{folder}: every byte of {counted(len(digests), 'file')} is as it was first read"
    store.add_event(WEIGHTS_EVENT, ReadWeights(by, asdict(identity), digests))
    return f"{folder}: every byte of {counted(len(digests), 'file')} was read, for the first time"


def _store_checkpoint(store: StateStore, weights: ModelSettings, found: Identity, by: str) -> None:
    store.add_event(CHECKPOINT_EVENT, StoredCheckpoint(by, asdict(found), weights.layout))


def _stored_checkpoint(store: StateStore) -> Event | None:
    return next(store.events_backwards({CHECKPOINT_EVENT}), None)


def _difference(known: Event, weights: ModelSettings, found: Identity) -> str:
    """Return in what this host's differs from the one that was stored, or nothing."""
    assert weights.checkpoint is not None, "identified by its folder"
    stored = read_event(known, StoredCheckpoint)
    before = Identity.parse(stored.identity, f"store: event {known.id}")
    if change := before.difference(found, weights.checkpoint):
        return change
    if stored.layout == weights.layout:
        return ""
    return f"records have layout {weights.layout} (model.layout) here and {stored.layout} there"
