"""The server of a link: sends the bytes that other processes ask for.

    client                                      server
      | ------- what, answer_s, deadline_s -------> |   the answer begins within ``answer_s``
      | <------ number of bytes, the bytes -------- |   or a refusal
      | <------ confirmation ---------------------- |   or the reason why the bytes are invalid
      | ------- the next request, or nothing -----> |

What is served is the owner's: ``lend`` gives records of a host cache (``cache/other_hosts.py``) or
live slots of a rank (``rank_link.py``). A dead or slow client costs one waiting thread, up to a
deadline.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from eplb.errors import MigrationError
from rebalance.weights.link.bounce import Bounce
from rebalance.weights.link.client import KEPT_S
from rebalance.weights.link.limits import ByteBudget
from rebalance.weights.link.link_settings import HostAddress, LinkSettings
from rebalance.weights.link.listener import ConnectionListener, listen
from rebalance.weights.link.wire import Message, RefusedError, Wire
from rebalance.weights.link.wire import field as field_of

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
