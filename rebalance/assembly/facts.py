"""What all ranks of a group must have alike, compared here for every change of the group.

    at a start, before the group is formed   configuration, topology, secret
    at a join, once it is formed             the same, and the version of the weights
    before any group serves                  the version of the weights, the placement

Each rank tells its facts, and all of them judge the facts of all: they refuse alike.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eplb.errors import RankError

HELLO, PROOF = "hello", "proof"
SERVED = {"weights": "weights of versions", "placement": "placements"}  # by key of what is told

Exchange = Callable[[str, Any], Sequence[Any]]  # what it is, and this rank's message
Told = Mapping[int, Mapping[str, Any]]  # the facts of each rank


@dataclass(frozen=True)
class Attendance:
    """One rank as it comes to the others."""

    rank: int
    members: Sequence[int]  # ranks that meet, by number; the first one listens
    host: str  # address of its host, for messages
    key: bytes  # proves the deployment's secret
    summary: Mapping[str, str]  # of its configuration

    def hello(self) -> dict[str, Any]:
        """What it tells of itself."""
        nonce = secrets.token_hex(16)
        own = {"host": self.host, "pid": os.getpid(), "nonce": nonce}
        return own | {"summary": dict(self.summary)}

    def proof_of(self, rank: int, transcript: str) -> str:
        """What a rank with the deployment's secret answers to what all have told."""
        return hmac.new(self.key, f"rank {rank} {transcript}".encode(), "sha256").hexdigest()


def exchange_facts(
    mine: Attendance, exchange: Exchange, served: Mapping[str, Any] | None = None
) -> dict[int, dict[str, Any]]:
    """Have ranks tell their facts, and prove that they have one secret; collective.

    Args:
        mine: this rank.
        exchange: gives every member's message, in their order, for this rank's own.
        served: what it tells beside its configuration; see ``compare_facts``.

    Raises:
        RankError: a rank has another configuration, secret or weights.
    """
    hellos = exchange(HELLO, mine.hello() | dict(served or {}))
    told = dict(zip(mine.members, hellos, strict=True))
    compare_facts(mine.rank, told)
    transcript = hashlib.sha256(json.dumps(hellos, sort_keys=True).encode()).hexdigest()
    proofs = exchange(PROOF, mine.proof_of(mine.rank, transcript))
    wrong = [
        f"rank {rank} on {told[rank]['host']}"
        for rank, proof in zip(mine.members, proofs, strict=True)
        if not hmac.compare_digest(str(proof), mine.proof_of(rank, transcript))
    ]
    if wrong:
        raise RankError(
            f"rank {mine.rank} on {mine.host}: authentication failed: the secret of "
            f"{', '.join(wrong)} differs, expected the deployment's on all hosts"
        )
    return told


def compare_facts(rank: int, told: Told) -> None:
    """Refuse ranks of which one cannot serve, or that would not serve the same.

    Args:
        rank: this one.
        told: of each rank "summary", of its configuration; "weights", their version; "placement",
            its hash, or "" if it takes that of the others; "refusal", why it cannot serve. What is
            not told was compared before.

    Raises:
        RankError: on all ranks alike.
    """
    own = told[rank]
    for at, other in told.items():
        if refusal := other.get("refusal"):
            raise RankError(f"the ranks cannot serve on: rank {at}: {refusal}")
        for name, expected in own.get("summary", {}).items():
            value = other["summary"].get(name)
            if value != expected:
                raise RankError(
                    f"rank {rank} on {own['host']}: the configurations of the hosts differ: "
                    f"{name} is {value} for rank {at} on {other['host']}, expected {expected} "
                    "as here"
                )
    for key, words in SERVED.items():
        values = {other[key] for other in told.values() if other.get(key, "") != ""}
        if len(values) > 1:
            raise RankError(
                f"rank {rank}: ranks would serve {words} {sorted(values)}, expected one"
            )
