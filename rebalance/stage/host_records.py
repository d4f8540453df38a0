"""The records that a rank leases from its host cache: loaded before pulls, released afterwards."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from eplb.errors import MigrationError
from rebalance.stage.figures import StageMeter
from rebalance.stage.stage_settings import StageSettings
from rebalance.threads.cancellation import CalledOff, IsWanted
from rebalance.threads.watchdog import Heartbeat
from rebalance.types import Record
from rebalance.weights.interface import WeightTransport

log = logging.getLogger(__name__)


class HostRecords:
    """The records that the host cache leases to one rank; used by one thread."""

    def __init__(
        self,
        transport: WeightTransport,
        settings: StageSettings,
        meter: StageMeter,
        beat: Heartbeat,
    ) -> None:
        self._transport, self._deadline_s = transport, settings.preload_deadline_s
        self._meter, self._beat = meter, beat
        self._held: set[Record] = set()  # records that preload has answered for

    def preload(self, records: Sequence[Record], is_wanted: IsWanted) -> None:
        """Have the host load and lease records. May block; see WeightTransport.preload.

        Raises:
            CalledOff: they are not wanted any more.
            MigrationError: the host cannot, or not in time.
        """
        missing = [record for record in records if record not in self._held]
        if not missing:
            return
        layer, expert = missing[0]
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        self._beat.busy(f"preloading layer {layer} expert {expert}{more} into the host")
        brought = self._transport.preload(missing, self._deadline_s, is_wanted)
        for source, num_bytes in brought.items():
            self._meter.add_bytes(source, num_bytes)
        self._held.update(missing)

    def reload(self, record: Record, is_wanted: IsWanted) -> bool:
        """Have the host reload a record with a wrong digest from disk.

        Raises:
            CalledOff: it is not wanted any more.
        """
        name = f"layer {record[0]} expert {record[1]}"
        self._beat.busy(f"reloading {name} on the host")
        try:
            self._transport.reload(record, self._deadline_s, is_wanted)
        except CalledOff:
            self._held.discard(record)
            raise
        except MigrationError as exc:
            log.warning("%s: %s", name, exc)
            self._held.discard(record)
            return False
        return True

    def release(self, records: Iterable[Record] | None = None) -> None:
        """Release some records, or all that the host holds for this rank.

        Raises:
            MigrationError: the host cache disconnected.
        """
        held = self._held if records is None else self._held.intersection(records)
        self._held = self._held - held  # first: a dead host holds nothing
        if held:
            self._transport.release(sorted(held))
