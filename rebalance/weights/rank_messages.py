"""Messages between two ranks: requests for a part of a live slot.

    client                                       server
      | <------ hello, with its rank -------------- |   after the handshake of network/handshake.py
      | ------- group, part ----------------------> |
      | <------ number of bytes, the bytes -------- |   or a refusal
      | <------ confirmation ---------------------- |   or the reason why the bytes are invalid
      | ------- the next part, or nothing --------> |

The confirmation completes the answer: bytes are valid only if the slot held the expert, and no
update of the weights had begun, both before the first byte was read and after the last one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from rebalance.weights.link.wire import Message, field

PROTOCOL = "eplb-ranks-1"
KEPT_S = 10.0  # a client does not reuse a connection that was idle for longer
IDLE_S = 30.0  # a server closes a connection that was idle for longer


@dataclass(frozen=True)
class GroupName:
    """Which start of which group of ranks; another one may listen at the same address."""

    run: str
    membership: int

    def __str__(self) -> str:
        return f"run {self.run!r} membership {self.membership}"


@dataclass(frozen=True)
class Part:
    """A run of bytes of the record in one live slot, and what it must be of."""

    weights_version: int
    layer: int
    slot: int  # of the rank that is asked, from 0 on
    expert: int
    offset: int
    num_bytes: int


@dataclass(frozen=True)
class PartRequest:
    """One request."""

    group: GroupName
    part: Part
    answer_s: float  # until the first byte; below the client's deadline, so a refusal arrives
    deadline_s: float  # for all of it

    def message(self) -> Message:
        """As it is sent."""
        timing = {"answer_s": self.answer_s, "deadline_s": self.deadline_s}
        return asdict(self.group) | asdict(self.part) | timing

    @staticmethod
    def of(message: Message) -> PartRequest:
        """Read one.

        Raises:
            TypeError: it is none.
        """
        numbers = {one.name: field(message, one.name, int) for one in fields(Part)}
        group = GroupName(field(message, "run", str), field(message, "membership", int))
        timing = (field(message, name, float) for name in ("answer_s", "deadline_s"))
        return PartRequest(group, Part(**numbers), *timing)
