"""Client for the live slots of ranks whose memory is not mapped here.

The receiver drives, without a collective: a request is a pairwise stream with its own deadline, so
a dead or stopped rank breaks only its own stream. It is then in back-off for a while, and staging
takes the next source. Staging verifies the bytes by digest.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Mapping

import torch

from eplb.errors import MigrationError
from rebalance.weights.link.back_off import BackOff
from rebalance.weights.link.bounce import Bounce
from rebalance.weights.link.handshake import client_handshake
from rebalance.weights.link.link_settings import HostAddress
from rebalance.weights.link.rank_link_settings import RankLinkSettings
from rebalance.weights.link.wire import (
    RefusedError,
    Wire,
    break_off,
    check_announced,
    connect,
    field,
    malformed_responses_fail,
)
from rebalance.weights.rank_messages import KEPT_S, PROTOCOL, GroupName, Part, PartRequest
from runtime.streams import Completion

NUM_BOUNCES = 2  # one is filled while the other is copied to the device


class OtherRanks:
    """The ranks that one rank can ask. ``pull`` is for one thread, ``close`` for any.

    Args:
        settings: alike on every rank.
        rank: this one, which is not asked.
        group: the start that it belongs to.
        record_bytes: of an expert.
    """

    def __init__(
        self, settings: RankLinkSettings, rank: int, group: GroupName, record_bytes: int
    ) -> None:
        self._settings, self._group, self._record_bytes = settings, group, record_bytes
        self._others: Mapping[int, _OtherRank] = {
            number: _OtherRank(number, address, settings.back_off_s)
            for number, address in enumerate(settings.addresses)
            if number != rank
        }
        self.ranks = frozenset(self._others)
        self._tls = settings.tls.client_context() if settings.tls else None
        self._lock, self._is_closed = threading.Lock(), False
        self._bounces: list[Bounce] = []  # of a GPU; the next one to use is first

    def pull(self, rank: int, part: Part, into: torch.Tensor) -> Completion:
        """Pull a part of a rank's live slot into ``into`` [part.num_bytes].

        Returns:
            Completion of the copy; on a CPU it is complete on return.

        Raises:
            RefusedError: the rank works and refuses, with the reason; or it is in back-off.
            MigrationError: it is dead or timed out. Nothing writes to ``into`` any more.
        """
        other = self._others[rank]
        deadline = time.monotonic() + self._settings.deadline_s
        if not into.is_cuda:
            self._read(other, part, into.numpy().data, deadline)
            return Completion(is_cuda=False)
        bounce = self._next_bounce(into.device)
        self._read(other, part, bounce.room(part.num_bytes, deadline), deadline)
        return bounce.put_in(into)

    def _next_bounce(self, device: torch.device) -> Bounce:
        if len(self._bounces) < NUM_BOUNCES:
            self._bounces.insert(0, Bounce(device))
        else:
            self._bounces.append(self._bounces.pop(0))
        return self._bounces[0]

    def _read(self, other: _OtherRank, part: Part, into: memoryview, deadline: float) -> None:
        if why := other.back_off.reason():
            raise RefusedError(f"{other}: {why}")
        try:
            with malformed_responses_fail():
                wire = self._connect(other)
                wire.deadline, other.used_at = deadline, time.monotonic()
                self._ask(wire, part, into)
        except RefusedError as exc:
            raise RefusedError(f"{other}: {exc}") from exc
        except MigrationError as exc:
            self._disconnect(other)
            other.back_off.record_failure(str(exc))
            raise MigrationError(f"{other}: {exc}") from exc
        other.back_off.record_success()

    def _ask(self, wire: Wire, part: Part, into: memoryview) -> None:
        settings = self._settings
        ask = PartRequest(self._group, part, 0.5 * settings.silence_s, wire.left_s)
        wire.send(ask.message())
        check_announced(wire.receive_answer(), len(into))
        wire.receive_bytes(into)
        try:
            verdict = wire.receive_answer()
        except RefusedError as exc:
            raise RefusedError(f"received bytes are invalid: {exc}") from exc
        if verdict.get("is_whole") is not True:
            raise MigrationError(f"end of transfer {verdict}, expected is_whole true")

    def _connect(self, other: _OtherRank) -> Wire:
        """The connection that was kept, or a new one to a rank that proves to be the right one."""
        if other.wire is not None:
            if other.is_kept():
                return other.wire
            self._disconnect(other)
        if self._is_closed:
            raise RefusedError("this rank is closing")
        end = connect(other.address, self._settings.silence_s, self._tls)
        with self._lock:
            other.end = end
            if self._is_closed:  # closed meanwhile, without this connection
                break_off(end)
        deadline = time.monotonic() + self._settings.deadline_s
        wire = Wire(end, deadline, self._settings.silence_s)
        try:
            hello = client_handshake(wire, self._settings.secret, protocol=PROTOCOL)
        except RefusedError:
            self._disconnect(other)  # connection refused, not a request
            raise
        found = field(hello, "rank", int), field(hello, "record_bytes", int)
        if found != (other.rank, self._record_bytes):
            raise MigrationError(
                f"found rank {found[0]} with records of {found[1]} bytes, "
                f"expected rank {other.rank} with records of {self._record_bytes} bytes"
            )
        other.wire = wire
        return wire

    def _disconnect(self, other: _OtherRank) -> None:
        with self._lock:
            end, other.end, other.wire = other.end, None, None
        if end is not None:
            end.close()

    def close(self) -> None:
        """Cancel running requests and close all connections; idempotent."""
        with self._lock:
            self._is_closed = True
            for other in self._others.values():
                if other.end is not None:
                    break_off(other.end)
        for other in self._others.values():
            self._disconnect(other)


class _OtherRank:
    """One other rank: the connection that is kept to it, and whether it does answer."""

    def __init__(self, rank: int, address: HostAddress, back_off_s: float) -> None:
        self.rank, self.address = rank, address
        self.back_off = BackOff(str(self), back_off_s)
        self.end: socket.socket | None = None
        self.wire: Wire | None = None  # once it was greeted
        self.used_at = 0.0

    def __str__(self) -> str:
        return "rank {} at {} port {}".format(self.rank, *self.address)

    def is_kept(self) -> bool:
        """Return whether the connection can carry another request.

        False if the rank has closed it, or may be about to, or has sent bytes without a request.
        """
        assert self.wire is not None, "only connections that were greeted are kept"
        return time.monotonic() - self.used_at < KEPT_S and not self.wire.is_readable()
