"""Phase one, preload: a process per host that brings experts from disk into shared host memory.

The slab holds cooked records: an expert's tensors in kernel layout, page-aligned, so that the next
phase copies bytes and nothing else. Ranks ask for records over a local socket and read them from
the slab directly. Records are loaded once, when first asked for, and stay.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any

import numpy as np
import torch

from eplb.errors import EplbError, MigrationError
from eplb.model import ModelShape
from rebalance.transport import Record
from runtime.checkpoint import Checkpoint
from runtime.experts import ExpertSchema
from runtime.memory import PAGE_BYTES, SharedArena, attach, digest

ACCEPT_RETRY_S = 1.0
CLOSE_DEADLINE_S = 10.0
HANDSHAKE_DEADLINE_S = 10.0
READERS = 2  # threads that read and cook; disks want more than one request in flight
Digest = tuple[int, int]

log = logging.getLogger(__name__)


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
    """The slab's owner: cooks records on demand and answers ranks until ``close``.

    Raises:
        MigrationError: another process listens under this name.
    """

    def __init__(
        self, address: SlabAddress, checkpoint: Checkpoint, model: ModelShape, schema: ExpertSchema
    ) -> None:
        self._checkpoint, self._schema, self._model = checkpoint, schema, model
        num_bytes = model.num_layers * model.num_experts * schema.record_bytes
        # Untouched pages of the arena take no memory: the slab grows with what is asked for.
        self._arena = SharedArena("eplb-slab", num_bytes)
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="preload")
        # One reader first, alone: after a fork torch remakes its thread pool at a new thread's
        # first use, and of two that do so at once one finds none.
        self._readers.submit(digest, self._arena.bytes[:PAGE_BYTES]).result()
        self._lock = threading.Lock()
        self._loads: dict[Record, Future[Digest]] = {}
        self._key = address.key
        self._is_closed = threading.Event()
        self._listening = socket.socket(socket.AF_UNIX)
        try:
            self._listening.bind(address.socket)
            self._listening.listen(64)
        except OSError as exc:
            self._listening.close()
            raise MigrationError(
                f"the preload process of host {address.name} cannot listen: {exc}"
            ) from exc
        self._accepting = threading.Thread(target=self._accept, name="slab-accept", daemon=True)
        self._accepting.start()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listening.accept()
            except OSError as exc:
                if self._is_closed.is_set():
                    return
                log.warning("a rank could not be answered: %s", exc)
                self._is_closed.wait(ACCEPT_RETRY_S)  # out of file descriptors, say
                continue
            connection = Connection(caller.detach())
            threading.Thread(
                target=self._serve, args=(connection,), name="slab-rank", daemon=True
            ).start()

    def _serve(self, connection: Connection) -> None:
        with connection:
            try:
                # Here, not in accept: a stranger who says nothing must not keep ranks waiting.
                with socket.socket(fileno=os.dup(connection.fileno())) as end:
                    _limit_waits(end, HANDSHAKE_DEADLINE_S)
                    deliver_challenge(connection, self._key)
                    answer_challenge(connection, self._key)
                    _limit_waits(end, 0.0)
                hello = {"handle": self._arena.handle, "num_bytes": len(self._arena.bytes)}
                connection.send_bytes(json.dumps(hello).encode())
                while True:
                    request = json.loads(connection.recv_bytes())
                    answer = {"number": request["number"]} | self._answer(request["records"])
                    connection.send_bytes(json.dumps(answer).encode())
            except (AuthenticationError, EOFError, OSError):
                return  # a stranger without the key, or a rank that is gone

    def _answer(self, records: list[list[int]]) -> dict[str, object]:
        loads = [self._load((layer, expert)) for layer, expert in records]
        try:
            digests = [load.result() for load, _ in loads]
        except (EplbError, OSError) as exc:
            return {"error": str(exc)}
        except Exception as exc:
            # A bug here must reach the rank that waits, and not only this process's log.
            log.exception("a record could not be cooked")
            return {"error": f"{type(exc).__name__}: {exc}"}
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
        self._is_closed.set()
        self._listening.shutdown(socket.SHUT_RDWR)  # ends the accept, which close alone does not
        self._listening.close()
        self._accepting.join(CLOSE_DEADLINE_S)  # the name is free once no accept waits on it
        self._readers.shutdown(wait=True, cancel_futures=True)


class SlabReader:
    """A rank's view of its host's slab. Used by one thread."""

    def __init__(
        self,
        address: SlabAddress,
        num_experts: int,
        record_bytes: int,
        *,
        deadline_s: float,
        for_gpu: bool = False,
    ) -> None:
        self._num_experts, self._record_bytes = num_experts, record_bytes
        self._name = address.name
        self._num_asked = 0
        try:
            self._connection = _call(address, deadline_s)
            answer_challenge(self._connection, address.key)
            deliver_challenge(self._connection, address.key)
        except (AuthenticationError, EOFError, OSError) as exc:
            raise MigrationError(
                f"the preload process of host {address.name} does not answer: {exc or 'it hung up'}"
            ) from exc
        hello = json.loads(self._receive("its greeting", deadline_s))
        self._slab = attach(hello["handle"], hello["num_bytes"], for_gpu=for_gpu)
        self._registered: set[Record] = set()

    def load(self, records: Sequence[Record], *, deadline_s: float) -> tuple[list[Digest], int]:
        """Have the slab hold ``records``; return their digests and the bytes read from disk.

        Raises:
            MigrationError: a record cannot be read, or not in time.
        """
        if not records:
            return [], 0
        self._num_asked += 1
        request = {"number": self._num_asked, "records": list(records)}
        try:
            self._connection.send_bytes(json.dumps(request).encode())
        except OSError as exc:
            raise MigrationError(f"the preload process of host {self._name} is gone") from exc
        answer = self._answer_to(self._num_asked, f"{len(records)} records", deadline_s)
        if "error" in answer:
            raise MigrationError(f"preload on host {self._name} failed: {answer['error']}")
        return [(plain, weighted) for plain, weighted in answer["digests"]], answer["from_disk"]

    def read(self, record: Record, into: torch.Tensor) -> None:
        """Copy a record that ``load`` has answered for."""
        self.read_part(record, 0, into)
        if into.is_cuda:
            torch.cuda.current_stream().synchronize()

    def read_part(self, record: Record, offset: int, into: torch.Tensor) -> None:
        """Order the copy of a record's bytes from ``offset`` on, on this thread's stream.

        On a CPU it is complete on return; on a GPU once the stream has passed it.
        """
        start = record_span(record, self._num_experts, self._record_bytes).start + offset
        part = self._slab[start : start + len(into)]
        if into.is_cuda:
            self._register(record)
            into.copy_(torch.from_numpy(part), non_blocking=True)
        else:
            np.copyto(into.numpy(), part)

    def _register(self, record: Record) -> None:
        """Register a record's pages with CUDA when it is first read, so that DMA can read them."""
        if record in self._registered:
            return
        span = record_span(record, self._num_experts, self._record_bytes)
        source = torch.from_numpy(self._slab[span])
        runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        status = runtime.cudaHostRegister(source.data_ptr(), len(source), 0)
        if int(status) != 0:
            raise MigrationError(
                f"host {self._name}: layer {record[0]} expert {record[1]} cannot be registered "
                f"with CUDA (status {status}), expected memory that may be locked"
            )
        self._registered.add(record)

    def _answer_to(self, number: int, what: str, deadline_s: float) -> dict[str, Any]:
        deadline = time.monotonic() + deadline_s
        while True:
            left_s = max(0.0, deadline - time.monotonic())
            answer: dict[str, Any] = json.loads(self._receive(what, left_s))
            if answer["number"] == number:  # else to a request that was given up as late
                return answer

    def _receive(self, what: str, deadline_s: float) -> bytes:
        try:
            if self._connection.poll(deadline_s):
                return self._connection.recv_bytes()
        except (EOFError, OSError) as exc:
            raise MigrationError(f"the preload process of host {self._name} is gone") from exc
        raise MigrationError(
            f"the preload process of host {self._name} has not sent {what} in {deadline_s:.3g} s"
        )

    def close(self) -> None:
        """Let go of the slab."""
        self._connection.close()


def record_span(record: Record, num_experts: int, record_bytes: int) -> slice:
    """Where a record lies in the slab."""
    layer, expert = record
    start = (layer * num_experts + expert) * record_bytes
    return slice(start, start + record_bytes)


def _call(address: SlabAddress, deadline_s: float) -> Connection:
    with socket.socket(socket.AF_UNIX) as calling:
        _limit_waits(calling, deadline_s)
        calling.connect(address.socket)
        return Connection(calling.detach())


def _limit_waits(end: socket.socket, seconds: float) -> None:
    """Let no single read or write take longer; 0 for as long as it may."""
    timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
