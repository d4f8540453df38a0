"""Verifies staged records: computes each digest while further bytes are under way.

Digests of a few records are ordered in one launch where more are about to come, because a launch
takes the host as long as a fast link takes for 44 MB.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from eplb.clock import Clock
from eplb.errors import MigrationError
from rebalance.stage.lanes import Pull
from runtime.memory.digests import TOGETHER, PendingDigests, RecordDigests, evenly_spaced
from runtime.streams import Completion


@dataclass
class _Proof:
    """Records whose digests were ordered together."""

    pulls: list[Pull]
    digests: PendingDigests
    deadline: float | None = None  # once all of them have landed


class Proofs:
    """The digests under way on one rank; used by one thread.

    Args:
        digests: [L, E, 2] of every expert, agreed by all ranks.
        deadline_s: for a digest, once its record has landed.
        clock: of seconds.
    """

    def __init__(self, digests: torch.Tensor, deadline_s: float, clock: Clock) -> None:
        self._expected = digests.numpy()  # the same memory: reading a tensor takes ten times longer
        self._deadline_s, self._clock = deadline_s, clock
        self._records = RecordDigests()
        self._ordered: list[tuple[Pull, Completion]] = []  # all chunks, but no digest yet
        self._proofs: deque[_Proof] = deque()

    @property
    def is_active(self) -> bool:
        """Return whether a record is to be proved."""
        return bool(self._ordered or self._proofs)

    @property
    def completions(self) -> list[Completion]:
        """Completions of all digests under way."""
        return self._records.completions

    @property
    def oldest(self) -> _Proof | None:
        """The next proof to check, if all of its chunks have arrived."""
        if self._proofs and not any(pull.num_flying for pull in self._proofs[0].pulls):
            return self._proofs[0]
        return None

    def add(self, pull: Pull, completion: Completion) -> None:
        """Queue a record whose last chunk was ordered, with the completion of that chunk."""
        self._ordered.append((pull, completion))

    def order(self, *, is_more_coming: bool) -> bool:
        """Order the next digests, unless it is better to wait for more records."""
        if not self._ordered or (is_more_coming and len(self._ordered) < TOGETHER):
            return False
        num = evenly_spaced([pull.into for pull, _ in self._ordered[:TOGETHER]])
        together, self._ordered = self._ordered[:num], self._ordered[num:]
        pulls, after = [pull for pull, _ in together], [landed for _, landed in together]
        digests = self._records.order([pull.into for pull in pulls], after)
        self._proofs.append(_Proof(pulls, digests))
        return True

    def judged(self) -> list[tuple[Pull, bool]]:
        """Return the oldest records and whether each is right; none while they are not known.

        Raises:
            MigrationError: their digests are late.
        """
        proof = self.oldest
        if proof is None:
            return []
        if proof.deadline is None:
            proof.deadline = self._clock() + self._deadline_s
        if not proof.digests.is_complete():
            if self._clock() < proof.deadline:
                return []
            raise MigrationError(f"{proof.pulls[0].name}: its digest was not computed in time")
        self._proofs.popleft()
        found = self._records.read(proof.digests)
        return [
            (pull, list(digest) == self._expected[pull.record].tolist())
            for pull, digest in zip(proof.pulls, found, strict=True)
        ]

    def clear(self) -> None:
        """Forget everything; nothing may be under way any more."""
        self._ordered.clear()
        self._proofs.clear()
        self._records.clear()
