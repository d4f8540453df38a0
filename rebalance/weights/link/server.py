"""The server of a link: sends the bytes that other processes ask for.

    client                                      server
      | ------- what, answer_s, deadline_s -------> |   the answer begins within ``answer_s``
      | <------ number of bytes, the bytes -------- |   or a refusal
      | <------ confirmation ---------------------- |   or the reason why the bytes are invalid
      | ------- the next request, or nothing -----> |

What is served is the owner's: ``lend`` gives records of a host cache (``cache/other_hosts.py``) or
live slots of a rank (``rank_link.py``). A dead or slow client costs one waiting thread, up to a
deadline.

``Bounce`` is host memory between a rank's device and the network; a CPU's ranks need none. Its
copies run on a stream of their own of the lowest priority: no kernel of serving waits for them, and
they wait for none. Pinned, so that a copy engine makes them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from eplb.errors import MigrationError
from rebalance.weights.link.client import KEPT_S
from rebalance.weights.link.limits import ByteBudget
from rebalance.weights.link.link_settings import HostAddress, LinkSettings
from rebalance.weights.link.listener import ConnectionListener, listen
from rebalance.weights.link.wire import Message, RefusedError, Wire
from rebalance.weights.link.wire import field as field_of
from runtime.streams import Completion, OnStream, new_stream


class Bounce:
    """One piece of pinned memory and a stream; used by one thread at a time.

    Args:
        device: the other end.
        num_bytes: to pin now, because it takes longer than copying them; more is pinned if needed.
    """

    def __init__(self, device: torch.device, num_bytes: int = 0) -> None:
        self._device = device
        self._stream = OnStream(new_stream(device))
        self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=num_bytes > 0)
        self._last = Completion(is_cuda=False)  # completion of the newest copy out of it or into it

    def take_out(self, part: torch.Tensor, deadline: float) -> memoryview:
        """Copy bytes of the device here; good until the next call.

        Raises:
            MigrationError: the device is not done in time.
        """
        room = self._room(len(part), deadline)
        with self._stream:
            room.copy_(part, non_blocking=True)
            self._last = Completion(is_cuda=True, stream=self._stream.stream)
        self._wait(deadline)
        return room.numpy().data

    def room(self, num_bytes: int, deadline: float) -> memoryview:
        """Memory to be filled, and then put in; what was put in before has landed.

        Raises:
            MigrationError: it has not, in time.
        """
        return self._room(num_bytes, deadline).numpy().data

    def put_in(self, into: torch.Tensor) -> Completion:
        """Order the copy of what ``room`` was filled with to the device."""
        with self._stream:
            into.copy_(self._pinned[: len(into)], non_blocking=True)
            self._last = Completion(is_cuda=True, stream=self._stream.stream)
        return self._last

    def _room(self, num_bytes: int, deadline: float) -> torch.Tensor:
        self._wait(deadline)
        if len(self._pinned) < num_bytes:  # once: chunks and pieces have one size each
            self._pinned = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        return self._pinned[:num_bytes]

    def _wait(self, deadline: float) -> None:
        if not self._last.wait_until(deadline):
            raise MigrationError(f"a copy between {self._device} and the network timed out")


PIECE_BYTES = 2 * 2**20  # between two looks at the budget: 1.7 ms of it
IDLE_S = 3 * KEPT_S  # a connection that was idle for longer is closed

CPU = torch.device("cpu")


def always_valid() -> None:
    """Bytes that cannot change while they are lent."""


@dataclass(frozen=True)
class Lent:
    """What is sent for one request."""

    data: torch.Tensor  # [num_bytes]
    header: Message = field(default_factory=dict)  # fields of the answer
    check: Callable[[], None] = always_valid  # raises RefusedError if the bytes were not valid


# Takes a request, and a time by which the answer must begin. Raises RefusedError, or TypeError for
# a malformed request.
Lend = Callable[[Message, float], AbstractContextManager[Lent]]


class LinkServer:
    """Serves bytes until ``close``.

    Args:
        kind: of the servers and clients, "host" or "rank", for messages.
        address: where it listens.
        protocol: of this kind of server.
        settings: secret, limits and deadlines.
        hello: what an authenticated client receives about the owner.
        lend: gives what a request names, until the context ends.
        device: of the bytes that are lent.

    Raises:
        MigrationError: the address cannot be listened on.
    """

    def __init__(
        self,
        kind: str,
        address: HostAddress,
        protocol: str,
        settings: LinkSettings,
        hello: Callable[[], Message],
        lend: Lend,
        device: torch.device = CPU,
    ) -> None:
        self._settings, self._lend, self._device = settings, lend, device
        self._lock, self.num_bytes_sent = threading.Lock(), 0
        is_closing = threading.Event()
        self._outward = ByteBudget(settings.bytes_per_second, is_closing)
        # Who holds a turn is sending; on a GPU a turn comes with pinned memory.
        self._turns: queue.SimpleQueue[Bounce | None] = queue.SimpleQueue()
        for _ in range(settings.max_transfers):
            self._turns.put(Bounce(device, PIECE_BYTES) if device.type == "cuda" else None)
        self._listener = ConnectionListener(
            listen(address, kind),
            kind,
            protocol,
            settings.secret,
            hello=hello,
            serve=self._serve,
            silence_s=settings.silence_s,
            tls=settings.tls.server_context() if settings.tls else None,
            is_closing=is_closing,
        )

    def _serve(self, wire: Wire) -> None:
        """Serve one client, on its own thread."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        while wire.wait_for_data(IDLE_S):
            wire.deadline = time.monotonic() + self._settings.deadline_s
            ask = wire.receive()
            now = time.monotonic()
            wire.deadline = min(wire.deadline, now + field_of(ask, "deadline_s", float))
            answer_at = min(wire.deadline, now + field_of(ask, "answer_s", float))
            try:
                with self._lend(ask, answer_at) as lent:
                    self._send(wire, lent, answer_at)
                    lent.check()  # a change meanwhile invalidates the bytes
            except RefusedError as exc:  # before any byte, or after the last one
                wire.send({"refused": str(exc)})
                continue
            with self._lock:
                self.num_bytes_sent += len(lent.data)
            wire.send({"is_whole": True})

    def _send(self, wire: Wire, lent: Lent, answer_at: float) -> None:
        """Send the bytes when it is this request's turn.

        Raises:
            RefusedError: the limit of transfers or of bytes is reached.
            MigrationError: the connection failed, or the client does not read.
        """
        try:
            bounce = self._turns.get(timeout=max(0.0, answer_at - time.monotonic()))
        except queue.Empty:
            num = self._settings.max_transfers
            raise RefusedError(f"transfer limit reached: {num} transfers are under way") from None
        try:
            pieces = torch.split(lent.data, PIECE_BYTES)
            try:
                self._outward.spend(len(pieces[0]), answer_at)
            except MigrationError as exc:
                raise RefusedError(str(exc)) from exc
            wire.send(lent.header | {"num_bytes": len(lent.data)})
            for number, piece in enumerate(pieces):
                if number:
                    self._outward.spend(len(piece), wire.deadline)
                # Of a CPU's memory the bytes are sent from where they are.
                here = bounce.take_out(piece, wire.deadline) if bounce else piece.numpy().data
                wire.send_bytes(here)
        finally:
            self._turns.put(bounce)

    def close(self) -> None:
        """Stop accepting requests and close all connections."""
        self._listener.close()
