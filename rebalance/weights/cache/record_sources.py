"""What fills a host cache: other hosts' memory, its own disk, other hosts' disks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from eplb.errors import CheckpointError, ConfigError, MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.cache_settings import HostCacheSettings
from rebalance.weights.cache.other_hosts import OtherHosts
from rebalance.weights.disk.offered_records import OfferedRecords
from rebalance.weights.disk.record_loader import Loaded, RecordLoader
from rebalance.weights.disk.record_origin import RecordOrigin


class RecordSources:
    """Loads records for a host cache. Thread-safe. Without a disk other hosts must have them.

    Args:
        disk: a checkpoint with its record file, or the records that an engine has offered.
        origin: of the records.
        settings: of the host cache.
        weights_version: returns the current version of the host cache.

    Raises:
        ConfigError: there is neither a disk nor another host.
    """

    def __init__(
        self,
        disk: RecordLoader | OfferedRecords | None,
        origin: RecordOrigin,
        settings: HostCacheSettings,
        weights_version: Callable[[], int],
    ) -> None:
        links = settings.links
        if disk is None and (links is None or not links.others or settings.record_file):
            raise ConfigError(
                "a host cache without a checkpoint has no disk to read, expected other hosts, "
                "and no record file"
            )
        self.disk, self._own_origin = disk, origin
        self.hosts: OtherHosts | None = None
        if links is not None and links.others:
            self.hosts = OtherHosts(links, self._own_origin, weights_version)
        # A host cache without a disk asks memories first too: no host is to read what another has.
        self._asks_hosts_first = links is not None and (
            links.order == "before_disk" or self.disk is None
        )
        self._brought: dict[Record, Digest] = {}  # digests of records from other hosts

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
            CheckpointError: no source has it; with the reason of each.
        """
        failures: list[Exception] = []
        for load, is_host in self._in_order():
            if is_host and is_for_host():
                continue
            try:
                return load(record, into)
            except (CheckpointError, MigrationError, OSError) as exc:
                failures.append(exc)
        raise CheckpointError("; ".join(map(str, failures))) from failures[-1]

    def _in_order(self) -> list[tuple[Callable[[Record, torch.Tensor], Loaded], bool]]:
        """Loaders to try one after the other, and whether each asks other hosts."""
        in_memory, on_disk = (partial(self._from_hosts, from_disk=disk) for disk in (False, True))
        if self.hosts is None:
            return [(self._from_own_disk, False)]
        if self._asks_hosts_first:
            return [(in_memory, True), (self._from_own_disk, False), (on_disk, True)]
        return [(self._from_own_disk, False), (on_disk, True)]

    def _from_own_disk(self, record: Record, into: torch.Tensor) -> Loaded:
        if self.disk is None:
            raise CheckpointError("layer {} expert {}: no checkpoint on this host".format(*record))
        return self.disk.load(record, into)

    def _from_hosts(self, record: Record, into: torch.Tensor, *, from_disk: bool) -> Loaded:
        assert self.hosts is not None, "only called with other hosts"
        expected = self.disk.digest_of(record) if self.disk else self._brought.get(record)
        found = self.hosts.bring(record, into, expected, from_disk=from_disk)
        if self.disk is not None:
            self.disk.learn(record, found)  # a later read of the disk must have this digest
        else:
            self._brought[record] = found
        return Loaded(found, is_from_host=True)

    def close(self) -> None:
        """Close the files. No thread may be loading."""
        if self.disk is not None:
            self.disk.close()
