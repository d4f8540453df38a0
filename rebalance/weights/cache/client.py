"""A rank's client of its host's cache: leases records, reads them through a mapping, releases them.

The process of the host cache may die and be restarted under the same address. Its leases end with
it; the next load or hint connects again and maps the new process's memory. A mapping outlives its
process, so a running read stays valid, and the digest is checked afterwards.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from eplb.core.bounded_json import MAX_JSON_BYTES
from eplb.errors import MigrationError
from eplb.versions import RANKS, Announcement, announcement_from_dict, refusal
from rebalance.types import CalledOff, Digest, IsWanted, Record, always
from rebalance.weights.cache.address import HostCacheAddress, connect
from rebalance.weights.link.wire import Message, Wire, malformed_responses_fail
from runtime.memory import SharedArena, attach
from runtime.streams import Completion, OnStream, new_stream

log = logging.getLogger(__name__)
Done = TypeVar("Done")

CPU = torch.device("cpu")
ANSWER_MARGIN_S = 1.0  # the client waits this much longer, so that the server's reason arrives
# A stopped host leaves room for some 70 messages; after that a send would block.
SEND_S = 2.0
CONNECT_AGAIN_S = 2.0  # for the greeting of a host that was started again; its rank is at a plan
LOOK_S = 0.25  # latency of a cancellation, which no condition can signal to this thread


class HostCacheClient:
    """A rank's connection: a ``WeightSource`` whose records are leased before they are pulled.

    Used by one thread, and ``hint`` by any.

    Args:
        address: of the host cache.
        num_experts: of a layer.
        record_bytes: of an expert.
        deadline_s: to connect.
        start_deadline_s: for a host cache that does not listen yet.
        device: that records are read into.
        ranks_on_host: that share the host cache.
    """

    ranks: frozenset[int] = frozenset()

    def __init__(
        self,
        address: HostCacheAddress,
        num_experts: int,
        record_bytes: int,
        *,
        deadline_s: float,
        start_deadline_s: float = 0.0,
        device: torch.device = CPU,
        ranks_on_host: int = 1,
    ) -> None:
        self._address, self._name, self._ranks_on_host = address, address.name, ranks_on_host
        self._is_cuda = device.type == "cuda"
        self._stream = OnStream(new_stream(device) if self._is_cuda else None)
        self._num_experts, self.record_bytes = num_experts, record_bytes
        self._num_asked = self._weights_version = 0
        self._sending = threading.Lock()
        self._entry_of: dict[Record, int] = {}  # entries of the leased records
        self._registered: set[int] = set()  # entries; their addresses never change
        self._connect(deadline_s, start_deadline_s)

    def _connect(self, deadline_s: float, start_deadline_s: float = 0.0) -> None:
        """Connect, and map the memory [entries, record_bytes] of the host cache."""
        try:
            wire, hello = self._open(deadline_s, start_deadline_s)
        except MigrationError as exc:
            raise MigrationError(f"the host cache {self._name} does not answer: {exc}") from exc
        try:
            with malformed_responses_fail():
                cache = announcement_from_dict(hello["version"])
            if why := refusal(Announcement(RANKS, ""), cache):
                raise MigrationError(f"host {self._name}: {why}")
            found = hello["num_experts"], hello["record_bytes"]
            if found != (self._num_experts, self.record_bytes):
                raise MigrationError(
                    f"host {self._name} holds {found[0]} experts a layer of {found[1]} bytes, "
                    f"expected {self._num_experts} of {self.record_bytes}"
                )
            memory = attach(hello["handle"], hello["num_bytes"], for_gpu=self._is_cuda)
        except BaseException:
            wire.close()
            raise
        self._wire, self._memory = wire, memory.reshape(-1, self.record_bytes)

    def _open(self, deadline_s: float, start_deadline_s: float) -> tuple[Wire, Message]:
        """A connection to the host cache, and its hello."""
        return connect(self._address, deadline_s, start_deadline_s=start_deadline_s)

    def _connect_again(self) -> None:
        """Connect to the process that has replaced a dead one.

        Raises:
            MigrationError: there is none yet.
        """
        wire, memory = self._wire, self._memory
        with self._sending:  # a hint of another thread must not meet half of a connection
            self._connect(CONNECT_AGAIN_S)
            wire.close()
            if self._registered:  # pages that no copy reads any more
                torch.cuda.synchronize()
                runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                for entry in self._registered:
                    runtime.cudaHostUnregister(memory[entry].ctypes.data)
            self._registered.clear()
            self._entry_of.clear()
        log.info("host %s: attached to the host cache that was started again", self._name)
        if self._weights_version > 0:  # the new process does not know the version
            self.invalidate(self._weights_version, deadline_s=CONNECT_AGAIN_S)

    def _in_either_process(self, act: Callable[[], Done]) -> Done:
        """Run a request that needs no lease; retry once with a restarted process."""
        try:
            return act()
        except HostCacheEnded as lost:
            try:
                self._connect_again()
            except MigrationError as exc:
                log.debug("%s", exc)
                raise lost from exc
            return act()

    # -- leases

    @property
    def num_entries(self) -> int:
        """Records that the host cache has room for."""
        return len(self._memory)

    @property
    def room(self) -> int:
        """An even part of the host cache's entries: as if every rank of the host were at it too."""
        return max(1, self.num_entries // self._ranks_on_host)

    def lease(
        self, records: Sequence[Record], *, deadline_s: float, is_wanted: IsWanted = always
    ) -> int:
        """Lease those records that are not leased yet, as ``load``.

        Returns:
            Bytes that were read from disk into host memory for it.
        """
        missing = [record for record in records if record not in self._entry_of]
        if not missing:
            return 0
        _, from_disk = self.load(missing, deadline_s=deadline_s, is_wanted=is_wanted)
        if self._is_cuda:
            # Here, not at the first pull: locking 44 MB takes longer than copying it.
            self.prepare_for_gpu(missing)
        return from_disk

    def load(
        self,
        records: Sequence[Record],
        *,
        deadline_s: float,
        weights_version: int | None = None,
        is_wanted: IsWanted = always,
    ) -> tuple[list[Digest], int]:
        """Lease ``records``; return their digests and the bytes that are read from disk for it.

        The host cache keeps them until ``release``, or until this process ends.

        Args:
            records: which.
            deadline_s: for all of them.
            weights_version: of the records; None: of the weights that serve.
            is_wanted: asked during the wait.

        Raises:
            CalledOff: ``is_wanted`` has become false; as below.
            MigrationError: a record cannot be read, or not in time; or the host cache has no room
                for all of them. None of ``records`` is leased then that was not before.
        """
        if not records:
            return [], 0
        version = self._weights_version if weights_version is None else weights_version
        message = {"records": list(records), "weights_version": version, "deadline_s": deadline_s}
        what, patience_s = f"{len(records)} records", deadline_s + ANSWER_MARGIN_S
        answer = self._in_either_process(
            lambda: self._ask("load", what, patience_s, message, is_wanted)
        )
        self._entry_of |= zip(records, answer["places"], strict=True)
        return [(plain, weighted) for plain, weighted in answer["digests"]], answer["from_disk"]

    def reload(self, record: Record, *, deadline_s: float, is_wanted: IsWanted = always) -> Digest:
        """Have the host verify a leased record, and reload it from disk if corrupted.

        Raises:
            CalledOff: ``is_wanted`` has become false; the lease is then over.
            MigrationError: the record is not leased, or what is on the disk is not it either; the
                lease is then over.
        """
        message = {"records": [record], "weights_version": 0, "deadline_s": deadline_s}
        try:
            answer = self._ask("reload", "a reloaded record", deadline_s, message, is_wanted)
        except (CalledOff, MigrationError):
            self.release([record])
            raise
        ((plain, weighted),) = answer["digests"]
        return plain, weighted

    def release(self, records: Collection[Record] | None = None) -> None:
        """End leases on records, or all; unknown ones are ignored. Does not wait for an answer.

        Raises:
            MigrationError: the host cache disconnected, or does not read.
        """
        chosen = list(self._entry_of) if records is None else records
        ended = [record for record in chosen if self._entry_of.pop(record, None) is not None]
        if ended:
            self._send({"ask": "release", "records": ended})

    def hint(self, records: Sequence[Record]) -> None:
        """Name records to load next, so that the host reads them when the disk is idle.

        Raises:
            MigrationError: the host cache disconnected, or does not read.
        """
        version = self._weights_version
        hint = {"ask": "hint", "records": list(records), "weights_version": version}
        self._in_either_process(lambda: self._send(hint))

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Have the host invalidate all records of older weights, for every rank.

        Raises:
            MigrationError: the host cache disconnected or timed out.
        """
        self._weights_version = version
        if version > 0:
            self.release()
        what = f"the acknowledgement of weights version {version}"
        self._ask("invalidate", what, deadline_s, {"weights_version": version})

    # -- offers of an engine's rank

    def lacks(self, records: Sequence[Record], *, deadline_s: float) -> list[Record]:
        """Return those records that the host has neither in memory nor on a disk.

        Raises:
            MigrationError: the host cache has a checkpoint, disconnected or timed out.
        """
        message = {"records": list(records)}
        answer = self._ask("lacks", "the records that it lacks", deadline_s, message)
        return [(layer, expert) for layer, expert in answer["records"]]

    def offer(
        self, offered: Sequence[tuple[Record, Digest]], arena: SharedArena, *, deadline_s: float
    ) -> list[str]:
        """Have the host keep records with their digests: copied into its memory, and on its disk.

        Args:
            offered: [n] records and their digests.
            arena: the bytes of the records, one after the other.
            deadline_s: for all of them.

        Returns:
            [n] where each is kept: "memory", "disk" where its memory is full, "" nowhere.

        Raises:
            MigrationError: bytes have another digest; the host cache has a checkpoint, disconnected
                or timed out.
        """
        message = {
            "handle": arena.handle,
            "num_bytes": len(arena.bytes),
            "records": [record for record, _ in offered],
            "digests": [digest for _, digest in offered],
        }
        answer = self._ask("offer", f"the places of {len(offered)} offers", deadline_s, message)
        return [str(place) for place in answer["places"]]

    # -- bytes

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Return to the mover's own stream after each copy."""
        self._stream.back = back

    def pull(self, record: Record, place: object, offset: int, into: torch.Tensor) -> Completion:
        """Order the copy of a part of a leased record, whose place is always the host.

        See ``WeightSource.pull``.
        """
        with self._stream:
            self.read_part(record, offset, into)
            return Completion(is_cuda=self._is_cuda, stream=self._stream.stream)

    def read(self, record: Record, into: torch.Tensor) -> None:
        """Copy a record that is leased into ``into`` [record_bytes].

        Raises:
            MigrationError: it is not leased, or its memory cannot be registered with CUDA.
        """
        self.read_part(record, 0, into)
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()

    def read_part(self, record: Record, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a leased record's bytes from ``offset`` on, on this thread's stream.

        On a CPU it is complete on return; on a GPU once the stream has passed it.

        Raises:
            MigrationError: it is not leased, or its memory cannot be registered with CUDA.
        """
        entry = self._entry_of.get(record)
        if entry is None:
            raise MigrationError(
                f"host {self._name}: layer {record[0]} expert {record[1]} is read without a lease, "
                "expected a load() first"
            )
        part = self._memory[entry, offset : offset + len(into)]
        if into.is_cuda:
            self._register(entry)
            into.copy_(torch.from_numpy(part), non_blocking=True)
        else:
            np.copyto(into.numpy(), part)

    def prepare_for_gpu(self, records: Sequence[Record]) -> None:
        """Register leased records with CUDA now, so that no pull has to.

        Raises:
            MigrationError: the memory cannot be registered.
        """
        for record in records:
            self._register(self._entry_of[record])

    def _register(self, entry: int) -> None:
        """Register an entry's pages with CUDA when they are first read, so that DMA can read them.

        Whole, and kept: an entry's address never changes.
        """
        if entry in self._registered:
            return
        pages = self._memory[entry]
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(pages.ctypes.data, len(pages), 0)
        if int(status) != 0:
            raise MigrationError(
                f"host {self._name}: entry {entry} of the host cache cannot be registered with "
                f"CUDA (status {status}), expected memory that can be locked"
            )
        self._registered.add(entry)

    # -- messages

    def _ask(
        self,
        ask: str,
        what: str,
        deadline_s: float,
        message: Message,
        is_wanted: IsWanted = always,
    ) -> Message:
        self._num_asked += 1
        number, deadline = self._num_asked, time.monotonic() + deadline_s
        self._send({"ask": ask, "number": number} | message)
        try:
            while is_wanted():
                left_s = max(0.0, deadline - time.monotonic())
                if self._wire.is_readable(min(left_s, LOOK_S)):
                    answer = self._receive()
                    if answer["number"] != number:  # to a request that was given up
                        continue
                    if "error" in answer:
                        raise MigrationError(
                            f"preload on host {self._name} failed: {answer['error']}"
                        )
                    return answer
                if left_s <= LOOK_S:
                    raise _Late(
                        f"the host cache {self._name} did not send {what} within {deadline_s:.3g} s"
                    )
            raise CalledOff(f"host {self._name}: the wait for {what} was cancelled")
        except (CalledOff, _Late):
            # Else the host would read on, and hold records for a rank that has no lease for them.
            self._send({"ask": "give up", "number": number})
            raise

    def _send(self, message: Message) -> None:
        with self._sending:
            if not self._wire.is_writable(SEND_S):
                raise MigrationError(
                    f"the host cache {self._name} accepted no message within {SEND_S:g} s"
                )
            try:
                self._wire.send(message)
            except MigrationError as exc:
                raise self._disconnection() from exc

    def _receive(self) -> Message:
        try:
            return self._wire.receive(max_bytes=MAX_JSON_BYTES)
        except MigrationError as exc:
            raise self._disconnection() from exc

    def _disconnection(self) -> HostCacheEnded:
        return HostCacheEnded(f"the host cache {self._name} disconnected")

    def close(self) -> None:
        """Close the connection to the host cache."""
        self._wire.close()


class HostCacheEnded(MigrationError):
    """The process has ended; another may take its place."""


class _Late(MigrationError):
    """No answer yet; one may still come."""
