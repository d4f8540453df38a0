"""Live slots of ranks whose memory is not mapped here: asked for, and given, over a link.

A request is for a part of the record in one slot. It names what the slot must hold, and is refused
if the slot does not hold that by the serving placement, or while the weights are being replaced.
Bytes are valid only if that was so both before the first byte was read and after the last one.
Receivers also keep to the rules for mapped peers (``rebalance.stage.share.Share.readable``).

The server reads what serves and changes nothing. The step and the mover do not depend on it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.errors import MigrationError
from rebalance.types import Record
from rebalance.weights.link.client import LinkClient
from rebalance.weights.link.link_settings import RankLinkSettings
from rebalance.weights.link.server import Bounce, Lent, LinkServer
from rebalance.weights.link.wire import Message, RefusedError, field
from rebalance.weights.sources import Place
from runtime.experts import ExpertBank
from runtime.streams import Completion

PROTOCOL = "eplb-ranks-3"
NUM_BOUNCES = 2  # one is filled while the other is copied to the device


@dataclass(frozen=True)
class GroupName:
    """Which start of which group of ranks; another one may listen at the same address."""

    run: str
    membership: int

    def __str__(self) -> str:
        return f"run {self.run!r} membership {self.membership}"


@dataclass(frozen=True)
class SlotPart:
    """A run of bytes of the record in one live slot, and what the slot must hold."""

    weights_version: int
    layer: int
    slot: int  # number among the slots of the asked rank, from 0 on
    expert: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class Served:
    """Snapshot of a rank's live slots."""

    slot_to_expert: NDArray[np.int32]  # [L, C] of this rank; EMPTY where none serves
    weights_version: int
    is_open: bool  # False while the engine replaces the weights


def serve_slots(
    settings: RankLinkSettings,
    rank: int,
    group: GroupName,
    bank: ExpertBank,
    served: Callable[[], Served],
) -> LinkServer:
    """Serve a rank's live slots to other ranks, until the server is closed.

    Args:
        settings: alike on every rank.
        rank: this one.
        group: the start that it belongs to.
        bank: what it serves from.
        served: returns how its slots stand now; called from any thread.

    Raises:
        MigrationError: the rank's address cannot be listened on.
    """
    record_bytes = bank.schema.record_bytes

    @contextmanager
    def lend(ask: Message, answer_at: float) -> Iterator[Lent]:
        asked = GroupName(field(ask, "run", str), field(ask, "membership", int))
        part = SlotPart(**{one.name: field(ask, one.name, int) for one in fields(SlotPart)})
        if asked != group:
            raise RefusedError(f"request of {asked}, expected {group}")

        def check() -> None:
            refuse(part, served(), record_bytes)

        check()
        live = bank.live(part.layer, part.slot)
        yield Lent(live[part.offset : part.offset + part.num_bytes], check=check)

    hello = {"rank": rank, "record_bytes": record_bytes}
    address = settings.addresses[rank]
    return LinkServer("rank", address, PROTOCOL, settings, lambda: hello, lend, bank.device)


def refuse(part: SlotPart, served: Served, record_bytes: int) -> None:
    """Refuse a part that must not be read now.

    Raises:
        RefusedError: with the reason.
    """
    if not served.is_open:
        raise RefusedError("the weights are being replaced")
    if part.weights_version != served.weights_version:
        raise RefusedError(
            f"weights version {served.weights_version}, expected {part.weights_version}"
        )
    num_layers, num_slots = served.slot_to_expert.shape
    if not (0 <= part.layer < num_layers and 0 <= part.slot < num_slots):
        raise RefusedError(
            f"{num_layers} layers of {num_slots} slots, "
            f"found a request for layer {part.layer} slot {part.slot}"
        )
    held = int(served.slot_to_expert[part.layer, part.slot])
    if held != part.expert or held < 0:
        raise RefusedError(
            f"layer {part.layer} slot {part.slot} holds "
            f"{f'expert {held}' if held >= 0 else 'nothing'}, expected expert {part.expert}"
        )
    if not (0 <= part.offset < part.offset + part.num_bytes <= record_bytes):
        raise RefusedError(
            f"a record has {record_bytes} bytes, found a request for {part.num_bytes} bytes from "
            f"byte {part.offset} on"
        )


class OtherRanks:
    """The ranks that one rank can ask: a ``WeightSource``. ``close`` may come from any thread.

    Args:
        settings: alike on every rank.
        rank: this one, which is not asked.
        group: the start that it belongs to.
        record_bytes: of an expert.
    """

    def __init__(
        self, settings: RankLinkSettings, rank: int, group: GroupName, record_bytes: int
    ) -> None:
        self._deadline_s, self._group = settings.deadline_s, group
        self._weights_version = 0
        tls = settings.tls.client_context() if settings.tls else None

        def link(number: int) -> LinkClient:
            def check(hello: Message) -> None:
                found = field(hello, "rank", int), field(hello, "record_bytes", int)
                if found != (number, record_bytes):
                    raise MigrationError(
                        f"found rank {found[0]} with records of {found[1]} bytes, "
                        f"expected rank {number} with records of {record_bytes} bytes"
                    )

            name = "rank {} at {} port {}".format(number, *settings.addresses[number])
            return LinkClient(name, settings.addresses[number], PROTOCOL, settings, tls, check)

        others = [number for number in range(len(settings.addresses)) if number != rank]
        self._links: Mapping[int, LinkClient] = {number: link(number) for number in others}
        self.ranks = frozenset(self._links)
        self._bounces: list[Bounce] = []  # pinned memory, on a GPU; the next one to use is first

    def begin(self, back: torch.cuda.Stream | None) -> None:
        """Nothing to do: bytes arrive on streams of their own."""

    def pull(self, record: Record, place: Place, offset: int, into: torch.Tensor) -> Completion:
        """Receive a part of a record; blocks until it is here. See ``WeightSource.pull``."""
        layer, expert = record
        part = SlotPart(self._weights_version, layer, place.slot, expert, offset, into.numel())
        return self.fetch(place.rank, part, into)

    def fetch(self, rank: int, part: SlotPart, into: torch.Tensor) -> Completion:
        """Fetch a part of a rank's live slot into ``into`` [part.num_bytes].

        Returns:
            Completion of the copy; on a CPU it is complete on return.

        Raises:
            RefusedError: the rank works and refuses, with the reason; or it is in back-off.
            MigrationError: it is dead or timed out. Nothing writes to ``into`` any more.
        """
        link, ask = self._links[rank], asdict(self._group) | asdict(part)
        if not into.is_cuda:
            link.fetch(ask, into.numpy().data)
            return Completion(is_cuda=False)
        if len(self._bounces) < NUM_BOUNCES:
            self._bounces.insert(0, Bounce(into.device))
        else:
            self._bounces.append(self._bounces.pop(0))
        bounce = self._bounces[0]
        link.fetch(ask, bounce.room(part.num_bytes, time.monotonic() + self._deadline_s))
        return bounce.put_in(into)

    def invalidate(self, version: int, *, deadline_s: float) -> None:
        """Ask for weights of this version from now on."""
        self._weights_version = version

    def close(self) -> None:
        """Cancel running requests and close all connections; idempotent."""
        for link in self._links.values():
            link.close()
