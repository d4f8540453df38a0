"""Phase one, preload: a process per host that brings experts from disk into shared host memory.

The slab holds cooked records: an expert's tensors in kernel layout, page-aligned, so that the next
phase copies bytes and nothing else. Ranks ask for records over a local socket and read them from
the slab directly. Records are loaded once, when first asked for, and stay.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener

import numpy as np
import torch

from eplb.errors import EplbError, MigrationError
from eplb.model import ModelShape
from rebalance.transport import Record
from runtime.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import SharedArena, attach, digest

READERS = 2  # threads that read and cook; disks want more than one request in flight
Digest = tuple[int, int]


@dataclass(frozen=True)
class SlabAddress:
    """How ranks find their host's slab. Abstract socket: no file is left behind by a kill."""

    name: str
    key: bytes = field(repr=False)  # keeps other users of the machine out

    @property
    def socket(self) -> str:
        """Address in Linux's abstract namespace."""
        return f"\0eplb-slab-{self.name}"


class HostSlab:
    """The slab's owner: cooks records on demand and answers ranks until ``close``."""

    def __init__(
        self, address: SlabAddress, checkpoint: Checkpoint, model: ModelShape, schema: ExpertSchema
    ) -> None:
        self._checkpoint, self._schema, self._model = checkpoint, schema, model
        num_bytes = model.num_layers * model.num_experts * schema.record_bytes
        # Untouched pages of the arena take no memory: the slab grows with what is asked for.
        self._arena = SharedArena("eplb-slab", num_bytes)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="preload")
        self._lock = threading.Lock()
        self._loads: dict[Record, Future[Digest]] = {}
        self._listener = Listener(address.socket, "AF_UNIX", backlog=64, authkey=address.key)
        threading.Thread(target=self._accept, name="slab-accept", daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listener.accept()
            except (AuthenticationError, EOFError, ConnectionError):
                continue  # a stranger without the key, or a rank that died while it called
            except OSError:  # closed
                return
            threading.Thread(
                target=self._serve, args=(connection,), name="slab-rank", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            hello = {"handle": self._arena.handle, "num_bytes": len(self._arena.bytes)}
            connection.send_bytes(json.dumps(hello).encode())
            while True:
                try:
                    records = json.loads(connection.recv_bytes())
                except (EOFError, OSError):  # the rank is gone
                    return
                connection.send_bytes(json.dumps(self._answer(records)).encode())

    def _answer(self, records: list[list[int]]) -> dict[str, object]:
        loads = [self._load((layer, expert)) for layer, expert in records]
        try:
            digests = [load.result() for load, _ in loads]
        except (EplbError, OSError) as exc:
            return {"error": str(exc)}
        from_disk = sum(is_new for _, is_new in loads) * self._schema.record_bytes
        return {"digests": digests, "from_disk": from_disk}

    def _load(self, record: Record) -> tuple[Future[Digest], bool]:
        with self._lock:
            known = self._loads.get(record)
            # A load that failed is tried again: a disk may have come back.
            if known is not None and not (known.done() and known.exception()):
                return known, False
            self._loads[record] = self._readers.submit(self._cook, record)
            return self._loads[record], True

    def _cook(self, record: Record) -> Digest:
        layer, expert = record
        span = record_span(record, self._model.num_experts, self._schema.record_bytes)
        target = self._arena.bytes[span]
        self._checkpoint.cook(layer, expert, self._schema, target)
        return digest(target)

    def close(self) -> None:
        """Stop answering."""
        self._listener.close()
        self._readers.shutdown(wait=True, cancel_futures=True)


class SlabReader:
    """A rank's view of its host's slab. Used by one thread."""

    def __init__(
        self, address: SlabAddress, num_experts: int, record_bytes: int, *, deadline_s: float
    ) -> None:
        self._num_experts, self._record_bytes = num_experts, record_bytes
        self._name = address.name
        try:
            self._connection = Client(address.socket, "AF_UNIX", authkey=address.key)
        except OSError as exc:
            raise MigrationError(
                f"the preload process of host {address.name} does not answer: {exc}"
            ) from exc
        hello = json.loads(self._receive("its greeting", deadline_s))
        self._slab = attach(hello["handle"], hello["num_bytes"])

    def load(self, records: Sequence[Record], *, deadline_s: float) -> tuple[list[Digest], int]:
        """Have the slab hold ``records``; return their digests and the bytes read from disk.

        Raises:
            MigrationError: a record cannot be read, or not in time.
        """
        if not records:
            return [], 0
        try:
            self._connection.send_bytes(json.dumps(list(records)).encode())
        except OSError as exc:
            raise MigrationError(f"the preload process of host {self._name} is gone") from exc
        answer = json.loads(self._receive(f"{len(records)} records", deadline_s))
        if "error" in answer:
            raise MigrationError(f"preload on host {self._name} failed: {answer['error']}")
        return [(plain, weighted) for plain, weighted in answer["digests"]], answer["from_disk"]

    def read(self, record: Record, into: torch.Tensor) -> None:
        """Copy a record that ``load`` has answered for."""
        span = record_span(record, self._num_experts, self._record_bytes)
        np.copyto(into.numpy(), self._slab[span])

    def _receive(self, what: str, deadline_s: float) -> bytes:
        try:
            if self._connection.poll(deadline_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as exc:
            raise MigrationError(f"the preload process of host {self._name} is gone") from exc
        raise MigrationError(
            f"the preload process of host {self._name} has not sent {what} in {deadline_s:.0f} s"
        )

    def close(self) -> None:
        """Let go of the slab."""
        self._connection.close()


def record_span(record: Record, num_experts: int, record_bytes: int) -> slice:
    """Where a record lies in the slab."""
    layer, expert = record
    start = (layer * num_experts + expert) * record_bytes
    return slice(start, start + record_bytes)
