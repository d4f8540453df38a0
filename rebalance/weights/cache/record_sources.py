"""Record sources of a host cache: other hosts' memory, its own disk, other hosts' disks."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from eplb.core.model import ModelShape
from eplb.errors import CheckpointError, ConfigError, MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.other_hosts import OtherHosts
from rebalance.weights.disk.record_loader import Loaded, RecordLoader
from rebalance.weights.disk.record_origin import RecordOrigin
from runtime.checkpoints.checkpoint import Checkpoint
from runtime.experts import ExpertSchema

log = logging.getLogger(__name__)


class RecordSources:
    """Loads records for a host cache. Thread-safe. Without a checkpoint other hosts must have them.

    Raises:
        CheckpointError: a weight file is missing.
        ConfigError: there is neither a checkpoint nor another host.
    """

    def __init__(
        self,
        checkpoint: Checkpoint | None,
        model: ModelShape,
        schema: ExpertSchema,
        settings: HostCacheSettings,
        weights_version: Callable[[], int],
    ) -> None:
        links = settings.links
        if checkpoint is None and (links is None or not links.others or settings.record_file):
            raise ConfigError(
                "a host cache without a checkpoint has no disk to read, expected other hosts, "
                "and no record file"
            )
        self.disk: RecordLoader | None = None
        if checkpoint is not None:
            self.disk = RecordLoader(checkpoint, model, schema, settings.record_file)
        self._own_origin = self.disk.origin if self.disk else RecordOrigin.of(None, model, schema)
        self.hosts: OtherHosts | None = None
        if links is not None and links.others:
            self.hosts = OtherHosts(links, self._own_origin, weights_version)
        self._asks_hosts_first = links is not None and links.order == "before_disk"
        self._brought: dict[Record, Digest] = {}  # of those that other hosts gave

    def origin(self) -> RecordOrigin:
        """Return the origin of the records, as far as it is known."""
        return self.hosts.origin if self.hosts is not None else self._own_origin

    @property
    def num_damaged(self) -> int:
        """Records that had another digest than they must, wherever they came from."""
        on_disk = self.disk.num_damaged if self.disk is not None else 0
        return on_disk + (self.hosts.num_wrong if self.hosts is not None else 0)

    def load(
        self, record: Record, into: torch.Tensor, *, is_for_host: Callable[[], bool]
    ) -> Loaded:
        """Fill ``into`` [record_bytes], page-aligned, from the first source that has the record.

        Args:
            record: which.
            into: where to.
            is_for_host: returns whether only another host requests it: then no third host is asked.

        Raises:
            CheckpointError: the disk does not have it.
            MigrationError: other hosts do not have it, and there is no disk.
        """
        if self.hosts is None:
            return self._read(record, into)
        # A host cache without a disk asks memories first too: no host is to read what another
        # holds.
        if (self._asks_hosts_first or self.disk is None) and not is_for_host():
            try:
                return self._bring(self.hosts, record, into, from_disk=False)
            except MigrationError as exc:
                log.debug("%s", exc)  # of every host that failed there was a warning
        try:
            return self._read(record, into)
        except (CheckpointError, OSError) as exc:
            if is_for_host():
                raise
            try:
                return self._bring(self.hosts, record, into, from_disk=True)
            except MigrationError as none:
                raise CheckpointError(f"{exc}; {none}") from exc

    def _read(self, record: Record, into: torch.Tensor) -> Loaded:
        if self.disk is None:
            layer, expert = record
            raise CheckpointError(f"layer {layer} expert {expert}: this host has no checkpoint")
        return self.disk.load(record, into)

    def _bring(
        self, hosts: OtherHosts, record: Record, into: torch.Tensor, *, from_disk: bool
    ) -> Loaded:
        expected = self.disk.digest_of(record) if self.disk else self._brought.get(record)
        found = hosts.bring(record, into, expected, from_disk=from_disk)
        if self.disk is not None:
            self.disk.learn(record, found)  # what the disk gives later must be the same
        else:
            self._brought[record] = found
        return Loaded(found, is_from_host=True)

    def close(self) -> None:
        """Close the files. No thread may be loading."""
        if self.disk is not None:
            self.disk.close()
