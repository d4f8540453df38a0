"""Client for the host caches of other hosts, a record source between local memory and local disk.

Each transfer is a pairwise TCP stream with its own deadline. A dead host breaks only its own
streams, where the members of a collective would hang or abort together.

Received bytes are verified: their digest must be the one that the other host announced, and the one
that this host cache knows, if any. A host that fails is in back-off for a while.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from rebalance.types import Digest, Record
from rebalance.weights.cache.known_host import KnownHost
from rebalance.weights.disk.record_origin import RecordOrigin
from rebalance.weights.link.handshake import client_handshake
from rebalance.weights.link.host_link_settings import HostLinkSettings
from rebalance.weights.link.limits import CHUNK_BYTES, Budget
from rebalance.weights.link.wire import (
    Message,
    RefusedError,
    Wire,
    break_off,
    check_announced,
    connect,
    field,
    malformed_responses_fail,
)
from runtime.memory.shared import RunningDigest

log = logging.getLogger(__name__)


class WrongBytesError(MigrationError):
    """The digest of received bytes is not the announced one."""


class OtherHosts:
    """Requests records from other hosts. Thread-safe.

    Args:
        settings: addresses, secret and limits.
        origin: origin of this host cache's records. Without a checkpoint, the origin of the first
            host that sends a record is adopted.
        weights_version: returns the current version of this host cache.
    """

    def __init__(
        self,
        settings: HostLinkSettings,
        origin: RecordOrigin,
        weights_version: Callable[[], int],
    ) -> None:
        self._settings, self._weights_version = settings, weights_version
        self.origin = origin
        self._hosts = [KnownHost(address, settings.back_off_s) for address in settings.others]
        self._is_closing = threading.Event()
        self._inward = Budget(settings.bytes_per_second, self._is_closing)
        self._tls = settings.tls.client_context() if settings.tls else None
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self.num_failures = 0  # hosts that were late, dead or wrong
        self.num_wrong = 0  # of that: wrong bytes

    def bring(
        self, record: Record, into: torch.Tensor, expected: Digest | None, *, from_disk: bool
    ) -> Digest:
        """Fill ``into`` [record_bytes] with a record that another host has.

        Args:
            record: which.
            into: what it held is lost in any case.
            expected: its digest, if that is known.
            from_disk: have other hosts read it from their disks, if none has it in memory.

        Raises:
            MigrationError: no other host gives it; with the reason of each.
        """
        reasons = []
        for host in self._in_turn(record):
            try:
                if why := self._reason_to_skip(host, record, from_disk=from_disk):
                    reasons.append(f"{host}: {why}")
                    continue
                brought = self._fetch(host, record, into, expected, from_disk=from_disk)
            except RefusedError as exc:
                reasons.append(f"{host}: {exc}")
            except MigrationError as exc:
                self._note_failure(host, record, exc)
                reasons.append(f"{host}: {exc}")
            else:
                host.back_off.record_success()
                host.wrong.discard(record)
                return brought
        name = "layer {} expert {}".format(*record)
        raise MigrationError(f"no other host provides {name}: {'; '.join(reasons)}")

    def _in_turn(self, record: Record) -> list[KnownHost]:
        """All hosts, another one first for every record: none is asked for all of them."""
        first = self.origin.number_of(record) % max(1, len(self._hosts))
        return self._hosts[first:] + self._hosts[:first]

    def _reason_to_skip(self, host: KnownHost, record: Record, *, from_disk: bool) -> str:
        """Why a host is not asked for a record; "" if it is."""
        if why := host.back_off.reason():
            return why
        if from_disk:
            return ""
        if record in host.wrong:
            return "digest mismatch in an earlier transfer"
        self._refresh_inventory(host)
        return "" if host.holds(self.origin.number_of(record)) else "record not in its memory"

    def _note_failure(self, host: KnownHost, record: Record, failure: MigrationError) -> None:
        with self._lock:
            self.num_failures += 1
            self.num_wrong += isinstance(failure, WrongBytesError)
        if isinstance(failure, WrongBytesError) and record not in host.wrong:
            # The wire or its memory erred once: asked again, it looks at its own bytes first.
            host.wrong.add(record)
            log.warning("%s: %s", host, failure)
            return
        host.back_off.record_failure(str(failure))

    # -- one request

    def _refresh_inventory(self, host: KnownHost) -> None:
        """Ask a host what it holds, if that is not known; one thread asks."""
        # Another thread waits for its answer only where there is no older one to go by.
        patience_s = 0.0 if host.has_inventory else self._settings.silence_s
        if not host.is_inventory_old() or not host.requesting_inventory.acquire(timeout=patience_s):
            return
        try:
            if host.is_inventory_old():
                host.note_inventory(self._request_inventory(host))
        except MigrationError:
            host.note_inventory(0)  # not again for a while
            raise
        finally:
            host.requesting_inventory.release()

    def _request_inventory(self, host: KnownHost) -> int:
        with self._call(host) as wire:
            wire.send({"ask": "book", "deadline_s": self._settings.silence_s})
            return int.from_bytes(bytes.fromhex(field(wire.receive(), "held", str)), "little")

    def _fetch(
        self,
        host: KnownHost,
        record: Record,
        into: torch.Tensor,
        expected: Digest | None,
        *,
        from_disk: bool,
    ) -> Digest:
        settings = self._settings
        with self._call(host) as wire:
            # It is to give up first, so that its reason arrives in time.
            answer_s = 0.8 * wire.left_s if from_disk else 0.5 * settings.silence_s
            ask = {
                "ask": "record",
                "record": record,
                "from_disk": from_disk,
                "is_suspect": record in host.wrong,
                "weights_version": self._weights_version(),
                "answer_s": answer_s,
                "deadline_s": settings.deadline_s,
            }
            wire.send(ask)
            answer = wire.receive_answer(until_deadline=from_disk)
            plain, weighted = field(answer, "digest", list)
            declared = int(plain), int(weighted)
            if expected not in (None, declared):
                raise WrongBytesError(f"it announced digest {declared}, expected {expected}")
            check_announced(answer, len(into))
            self._receive(wire, into.numpy(), declared)
            return declared

    def _receive(self, wire: Wire, data: NDArray[np.uint8], declared: Digest) -> None:
        running = RunningDigest()
        for first in range(0, len(data), CHUNK_BYTES):
            chunk = data[first : first + CHUNK_BYTES]
            try:
                self._inward.spend(len(chunk), wire.deadline)
            except MigrationError as exc:
                raise RefusedError(str(exc)) from exc  # the local budget, not the other host
            wire.receive_bytes(chunk.data)
            running.add(chunk)
        if running.value != declared:
            raise WrongBytesError(f"digest mismatch: found {running.value}, expected {declared}")

    @contextmanager
    def _call(self, host: KnownHost) -> Iterator[Wire]:
        """Reach a host that proves to be of this deployment, and to have the same records."""
        settings = self._settings
        with connect(host.address, settings.silence_s, self._tls) as end:
            with self._lock:
                self._open.add(end)
            try:
                with malformed_responses_fail():
                    wire = Wire(end, time.monotonic() + settings.deadline_s, settings.silence_s)
                    self._check(client_handshake(wire, settings.secret))
                    yield wire
            finally:
                with self._lock:
                    self._open.discard(end)

    def _check(self, hello: Message) -> None:
        """Reject a host whose records have another origin or version.

        Raises:
            RefusedError: it has none yet, or of other weights.
            MigrationError: it has another checkpoint, model or layout.
        """
        found = field(hello, "origin", dict)
        if not found.get("checkpoint"):
            raise RefusedError("it has no checkpoint yet")
        version, own = hello["weights_version"], self._weights_version()
        if version != own:
            raise RefusedError(f"weights version {version}, expected {own}")
        with self._lock:
            whole = self.origin
            if not whole.checkpoint:
                whole = replace(whole, checkpoint=str(found["checkpoint"]))
            if asdict(whole) != found:
                raise MigrationError(f"record origin differs: {whole.difference(found)}")
            self.origin = whole

    def close(self) -> None:
        """Break off whatever is under way."""
        self._is_closing.set()
        with self._lock:
            for end in self._open:
                break_off(end)
