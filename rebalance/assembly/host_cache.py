"""Builds the weight cache of one host: the process that brings experts from disk into memory."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from eplb.core.model import ModelShape
from eplb.errors import ConfigError
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
    checkpoint: Path | None,
    *,
    host: int = 0,
) -> HostCacheServer:
    """Build a host's cache; it answers from now on, until ``close``.

    Args:
        settings: alike on every host. Where they name several hosts (``links.hosts``), this one
            listens for the others at its own address of them.
        address: where the ranks of this host find it.
        model: the MoE layers and their experts.
        schema: what an expert consists of.
        checkpoint: folder of the weights; None: other hosts of ``settings.links`` give them. Where
            ranks offer the engine's own weights, see ``build_engine_records``.
        host: number of this host in ``links.hosts``.

    Raises:
        ConfigError: this host is not among ``links.hosts``, or the settings leave no room or no
            source for a record.
        CheckpointError: a weight file is missing.
        MigrationError: the address is in use, or there is no memory.
    """
    settings = _at(host, settings)
    weights = Checkpoint(checkpoint) if checkpoint is not None else None
    if weights is not None and (left := set(weights.mtp_layers) - set(model.layer_ids)):
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
    host: int = 0,
    server: HostCacheServer | None = None,
) -> EngineRecords:
    """Build what waits for an engine's ranks, and keeps what they offer; until ``close``.

    Args:
        settings: as for ``build_host_cache``.
        place: as for the ranks, with ``takes_offers``; of a deployment ``place_of_records``.
        host: number of this host in ``links.hosts``.
        server: a host cache that ends when an engine comes, unless ranks use it.

    Raises:
        ConfigError: this host is not among ``links.hosts``.
        MigrationError: the place is in use.
    """
    return EngineRecords(place, _at(host, settings), server)


def _at(host: int, settings: HostCacheSettings) -> HostCacheSettings:
    """Settings of one host, which listens for the others at its own address of them."""
    links = settings.links
    if links is None:
        return settings
    if not 0 <= host < len(links.hosts):
        raise ConfigError(
            f"host {host} has no address in links.hosts, expected 0..{len(links.hosts) - 1}"
        )
    return replace(settings, links=replace(links, listen=links.hosts[host]))
