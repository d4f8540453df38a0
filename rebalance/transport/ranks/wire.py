"""What one rank asks another for: a run of bytes of a live slot.

    asker                                        rank that is asked
      | <------ greeted, with its number ------------ |   see host_link_wire.py
      | ------- who asks, which part ---------------> |
      | <------ how many bytes, the bytes ----------- |   or why not
      | <------ that the slot held still meanwhile -- |   or that the bytes are void, and why
      | ------- the next part, or nothing ----------> |

The last word makes the answer whole: bytes are good only if the slot held the expert, and no update
of the weights had begun, both before the first byte was read and after the last one.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from rebalance.network.wire import Message, field

PROTOCOL = "eplb-ranks-1"
KEPT_S = 10.0  # a connection that was not used for so long is not used again by who asks
IDLE_S = 30.0  # after so long the rank that is asked hangs up


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
class Ask:
    """One question."""

    group: GroupName
    part: Part
    answer_s: float  # until the first byte: who is asked gives up first, so that its reason arrives
    deadline_s: float  # for all of it

    def message(self) -> Message:
        """As it is sent."""
        timing = {"answer_s": self.answer_s, "deadline_s": self.deadline_s}
        return asdict(self.group) | asdict(self.part) | timing

    @staticmethod
    def of(message: Message) -> Ask:
        """Read one.

        Raises:
            TypeError: it is none.
        """
        numbers = {one.name: field(message, one.name, int) for one in fields(Part)}
        group = GroupName(field(message, "run", str), field(message, "membership", int))
        timing = (field(message, name, float) for name in ("answer_s", "deadline_s"))
        return Ask(group, Part(**numbers), *timing)
