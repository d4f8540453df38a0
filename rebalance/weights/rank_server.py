"""Server of a rank's live slots for other ranks.

It reads what serves and changes nothing. The step and the mover do not depend on it: a dead or slow
client costs one waiting thread, up to a deadline. Clients also keep to the rules for mapped peers
(``rebalance.stage.intermediate_placements.readable``). A request is refused if the slot does not
hold the expert by the serving placement, and while the weights are being replaced.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from rebalance.weights.link.bounce import Bounce
from rebalance.weights.link.limits import Budget
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from rebalance.weights.link.server import ConnectionListener, ListenerSettings, listen
from rebalance.weights.link.wire import RefusedError, Wire
from rebalance.weights.rank_messages import IDLE_S, PROTOCOL, GroupName, Part, PartRequest
from runtime.experts import ExpertBank

PIECE_BYTES = 2 * 2**20  # between two looks at the budget: 1.7 ms of it


@dataclass(frozen=True)
class Served:
    """Snapshot of a rank's live slots."""

    slot_to_expert: NDArray[np.int32]  # [L, C] of this rank; EMPTY where none serves
    weights_version: int
    is_open: bool  # False while the engine replaces the weights


class RankLinkServer:
    """Answers other ranks until ``close``.

    Args:
        settings: alike on every rank.
        rank: this one.
        group: the start that it belongs to.
        bank: what it serves from.
        served: how its slots stand now; called from any thread.

    Raises:
        MigrationError: the rank's address cannot be listened on.
    """

    def __init__(
        self,
        settings: RankLinkSettings,
        rank: int,
        group: GroupName,
        bank: ExpertBank,
        served: Callable[[], Served],
    ) -> None:
        self._settings, self._group, self._bank, self._served = settings, group, bank, served
        self._lock, self.num_bytes_sent = threading.Lock(), 0
        is_closing = threading.Event()
        self._outward = Budget(settings.bytes_per_second, is_closing)
        # Its holder is sending.
        self._turns: queue.SimpleQueue[_Reading] = queue.SimpleQueue()
        for _ in range(settings.max_transfers):
            self._turns.put(_Reading(bank.device))
        tls = settings.tls.server_context() if settings.tls else None
        hello = {"rank": rank, "record_bytes": bank.schema.record_bytes}
        self._listener = ConnectionListener(
            listen(settings.addresses[rank], "rank"),
            ListenerSettings("rank", PROTOCOL, settings.secret, settings.silence_s, tls=tls),
            lambda: hello,
            self._serve_client,
            is_closing,
        )

    def _serve_client(self, wire: Wire) -> None:
        """Serve one client, on its own thread."""
        if self._bank.device.type == "cuda":
            torch.cuda.set_device(self._bank.device)
        while wire.wait_for_data(IDLE_S):
            wire.deadline = time.monotonic() + self._settings.deadline_s
            ask = PartRequest.of(wire.receive())
            wire.deadline = min(wire.deadline, time.monotonic() + ask.deadline_s)
            try:
                self._give(wire, ask)
            except RefusedError as exc:
                wire.send({"refused": str(exc)})

    def _give(self, wire: Wire, ask: PartRequest) -> None:
        """Send the requested part.

        Raises:
            RefusedError: the slot does not hold it, or the transfer limit is reached; sent before
                any byte, or after the last one, which invalidates them.
            MigrationError: the connection failed, or the other rank does not read.
        """
        self._refuse(ask)
        answer_at = min(wire.deadline, time.monotonic() + ask.answer_s)
        reading = self._take_turn(answer_at)
        try:
            pieces = list(_pieces(ask.part))
            self._pay_first(len(pieces[0]), answer_at)
            wire.send({"num_bytes": ask.part.num_bytes})
            live = self._bank.live(ask.part.layer, ask.part.slot)
            for number, piece in enumerate(pieces):
                if number:
                    self._outward.spend(len(piece), wire.deadline)
                part = live[piece.start : piece.stop]
                wire.send_bytes(reading.read(part, wire.deadline))
        finally:
            self._turns.put(reading)
        self._refuse(ask)  # a change meanwhile invalidates the bytes
        with self._lock:
            self.num_bytes_sent += ask.part.num_bytes
        wire.send({"is_whole": True})

    def _take_turn(self, answer_at: float) -> _Reading:
        try:
            return self._turns.get(timeout=max(0.0, answer_at - time.monotonic()))
        except queue.Empty:
            num = self._settings.max_transfers
            raise RefusedError(f"transfer limit reached: {num} parts are being sent") from None

    def _pay_first(self, num_bytes: int, answer_at: float) -> None:
        try:
            self._outward.spend(num_bytes, answer_at)
        except MigrationError as exc:
            raise RefusedError(str(exc)) from exc

    def _refuse(self, ask: PartRequest) -> None:
        """Refuse what must not be read now.

        Raises:
            RefusedError: with the reason.
        """
        served, part = self._served(), ask.part
        if ask.group != self._group:
            raise RefusedError(f"request of {ask.group}, expected {self._group}")
        if not served.is_open:
            raise RefusedError("the weights are being replaced")
        if part.weights_version != served.weights_version:
            version = served.weights_version
            raise RefusedError(f"weights version {version}, expected {part.weights_version}")
        num_layers, num_slots = served.slot_to_expert.shape
        if not (0 <= part.layer < num_layers and 0 <= part.slot < num_slots):
            raise RefusedError(
                f"{num_layers} layers of {num_slots} slots, "
                f"found a request for layer {part.layer} slot {part.slot}"
            )
        held, size = int(served.slot_to_expert[part.layer, part.slot]), self._record_bytes
        if held != part.expert or held < 0:
            raise RefusedError(
                f"layer {part.layer} slot {part.slot} holds "
                f"{f'expert {held}' if held >= 0 else 'nothing'}, expected expert {part.expert}"
            )
        if not (0 <= part.offset < part.offset + part.num_bytes <= size):
            raise RefusedError(
                f"a record has {size} bytes, found a request for {part.num_bytes} bytes from byte "
                f"{part.offset} on"
            )

    @property
    def _record_bytes(self) -> int:
        return self._bank.schema.record_bytes

    def close(self) -> None:
        """Stop accepting requests and close all connections."""
        self._listener.close()


class _Reading:
    """A turn to send, and on a GPU the pinned memory for it."""

    def __init__(self, device: torch.device) -> None:
        self._bounce = Bounce(device, PIECE_BYTES) if device.type == "cuda" else None

    def read(self, part: torch.Tensor, deadline: float) -> memoryview:
        """Bytes of a live slot, where the network can take them from."""
        if self._bounce is None:
            return part.numpy().data
        return self._bounce.take_out(part, deadline)


def _pieces(part: Part) -> Iterator[range]:
    last = part.offset + part.num_bytes
    for first in range(part.offset, last, PIECE_BYTES):
        yield range(first, min(first + PIECE_BYTES, last))
