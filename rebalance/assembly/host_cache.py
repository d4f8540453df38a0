"""Builds the weight cache of one host: the process that brings experts from disk into memory."""

from __future__ import annotations

import logging
from pathlib import Path

from eplb.core.model import ModelShape
from rebalance.weights.cache.address import HostCacheAddress
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.engine_records import EngineRecords
from rebalance.weights.cache.server import HostCacheServer
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema

log = logging.getLogger(__name__)


def build_host_cache(
    settings: HostCacheSettings,
    address: HostCacheAddress,
    model: ModelShape,
    schema: ExpertSchema,
    checkpoint: Path,
) -> HostCacheServer:
    """Build a host's cache; it answers from now on, until ``close``.

    Args:
        settings: alike on every host.
        address: where the ranks of this host find it.
        model: the MoE layers and their experts.
        schema: what an expert consists of.
        checkpoint: folder of the weights. Where ranks offer the engine's own weights, see
            ``build_engine_records``.

    Raises:
        CheckpointError: a weight file is missing.
        MigrationError: the address is in use, or there is no memory.
    """
    weights = Checkpoint(checkpoint)
    if left := set(weights.mtp_layers) - set(model.layer_ids):
        log.warning(
            "%s: layers %s of multi-token prediction (MTP) are neither served nor balanced: the "
            "engine loads their experts itself",
            checkpoint,
            ", ".join(map(str, sorted(left))),
        )
    return HostCacheServer.of_checkpoint(address, weights, model, schema, settings)


def build_engine_records(
    settings: HostCacheSettings,
    place: HostCacheAddress,
    *,
    server: HostCacheServer | None = None,
) -> EngineRecords:
    """Build what waits for an engine's ranks, and keeps what they offer; until ``close``.

    Args:
        settings: as for ``build_host_cache``.
        place: as for the ranks, with ``takes_offers``; of a deployment ``place_of_records``.
        server: a host cache that ends when an engine comes, unless ranks use it.

    Raises:
        MigrationError: the place is in use.
    """
    return EngineRecords(place, settings, server)
