"""Phase two, stage: pulls records in chunks, within budgets, and verifies each of them.

    in line -> chunks under way, then its digest -> landed -> right: done
       ^                                               | wrong, or a source failed
       +----------------- from the next source --------+

``Stager.stage`` is a generator: it orders what may be ordered, and yields a Wait when it depends on
time or the device. A record's digest is ordered behind its last chunk, so records follow each other
without a gap. Only the caller's destinations are written.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from eplb.clock import Clock
from eplb.errors import MigrationError
from eplb.migration.build import Move
from rebalance.stage.lanes import Hold, Lane, Pull
from rebalance.stage.source_choice import SourceChoice
from rebalance.stage.stage_settings import StageSettings
from rebalance.threads.waiting import Wait
from rebalance.threads.watchdog import ThreadActivity
from rebalance.types import CalledOff, IsWanted, Record, always
from rebalance.weights.sources import HOST, Link, WeightSources
from runtime.memory import TOGETHER, PendingDigests, RecordDigests, evenly_spaced
from runtime.streams import Completion

log = logging.getLogger(__name__)


@dataclass
class StageFigures:
    """Statistics of staging on one rank: counted by one thread, read by any."""

    # Of records that were proven; "rejected": of wrong digests.
    bytes_by_source: Counter[str] = field(default_factory=Counter)
    num_staged: int = 0  # moves of the present migration that are staged and verified
    num_retries: int = 0  # records that were restarted from another source
    num_wrong_digests: int = 0


class Stager:
    """Brings records for one rank; used by one thread."""

    def __init__(
        self,
        sources: WeightSources,
        choice: SourceChoice,
        digests: torch.Tensor,
        settings: StageSettings,
        clock: Clock,
        *,
        beat: ThreadActivity | None = None,
    ) -> None:
        self._sources, self._choice = sources, choice
        self._settings, self._clock = settings, clock
        self.figures, self.hold = StageFigures(), Hold(clock)
        self._beat = beat or ThreadActivity("mover", clock)
        self._lanes = {link: Lane(link, settings, self.hold) for link in Link}
        self._proofs = Proofs(digests, settings.pull_deadline_s, clock)
        self._has_reported_wait = False  # the heartbeat names the present wait
        self._is_wanted: IsWanted = always  # whether the present records are wanted

    def starts_on_host(self, move: Move, held: NDArray[np.int32]) -> bool:
        """Return whether the host cache is where a move's bytes are taken from first."""
        return self._choice.choose(move, held, (), 0) == (HOST,)

    def use(self, link_part: float) -> None:
        """Use a part of the budget of each link from now on; 1: all of it."""
        for lane in self._lanes.values():
            lane.use(link_part)

    def preload(
        self, wanted: Sequence[tuple[Move, NDArray[np.int32]]], is_wanted: IsWanted
    ) -> None:
        """Have the host load what moves take from it, each with the slots that may be read for it.

        What the host cannot hold is taken from other sources later, if they exist.

        Raises:
            CalledOff: it is not wanted any more.
            MigrationError: the host failed, and other sources do not have all of it.
        """
        try:
            self._lease([(move.layer, move.expert) for move, _ in wanted], is_wanted)
        except MigrationError as exc:
            if not all(self._choice.choose(move, held, (HOST,), 0) for move, held in wanted):
                raise
            log.info("%d records are taken from other sources than the host: %s", len(wanted), exc)

    def _lease(self, records: Sequence[Record], is_wanted: IsWanted) -> None:
        """Have the host load and lease records. May block; see ``HostCacheClient.lease``."""
        layer, expert = records[0]
        more = f" and {len(records) - 1} more" if len(records) > 1 else ""
        self._beat.busy(f"preloading layer {layer} expert {expert}{more} into the host")
        deadline_s = self._settings.preload_deadline_s
        self.figures.bytes_by_source["disk"] += self._sources.host.lease(
            records, deadline_s=deadline_s, is_wanted=is_wanted
        )

    def _reload(self, pull: Pull) -> bool:
        """Have the host reload a record with a wrong digest from disk; once for each pull."""
        pull.is_reloaded = True
        self._beat.busy(f"reloading {pull.name} on the host")
        deadline_s = self._settings.preload_deadline_s
        try:
            self._sources.host.reload(pull.record, deadline_s=deadline_s, is_wanted=self._is_wanted)
        except MigrationError as exc:
            log.warning("%s: %s", pull.name, exc)
            return False
        return True

    def stage(self, pulls: Iterable[Pull], is_wanted: IsWanted) -> Generator[Wait, None, bool]:
        """Pull and verify all of ``pulls``; return False if that is not wanted any more.

        After an early end, ``drain`` must run before the destinations are used again.

        Raises:
            MigrationError: a record has no source left, or a chunk does not land.
        """
        waiting, self._is_wanted = deque(pulls), is_wanted
        while waiting or self._has_work():
            if not is_wanted():
                return False
            try:
                has_moved = self._advance(waiting)
            except CalledOff:
                return False
            if has_moved:
                self._has_reported_wait = False
                continue
            if not self._has_reported_wait:
                self._report_wait()
            yield self._wait()
        return True

    def _advance(self, waiting: deque[Pull]) -> bool:
        """Order, collect and verify what is possible; return whether anything progressed."""
        has_moved = [self._feed(waiting)]
        has_moved += [self._land(lane) for lane in self._lanes.values() if lane.flying]
        has_moved.append(self._prove(is_more_coming=bool(waiting)))
        return any(has_moved)

    def drain(self) -> Generator[Wait, None, None]:
        """Order nothing more, and yield until nothing that was ordered writes any more.

        Raises:
            MigrationError: it does not end.
        """
        deadline = self._clock() + self._settings.pull_deadline_s
        for lane in self._lanes.values():
            lane.stop()
        while left := [done for done in self._completions() if not done.is_complete()]:
            if self._clock() >= deadline:
                raise MigrationError(
                    f"{len(left)} copies into staging did not end "
                    f"within {self._settings.pull_deadline_s:.3g} s after they were cancelled"
                )
            yield Wait("cancelled copies", deadline, (left[-1],))
        for lane in self._lanes.values():
            lane.clear()
        self._proofs.clear()

    def _completions(self) -> list[Completion]:
        flying = [chunk.completion for lane in self._lanes.values() for chunk in lane.flying]
        return flying + self._proofs.completions

    def _has_work(self) -> bool:
        return self._proofs.is_active or any(lane.is_active for lane in self._lanes.values())

    def _begin(self, pull: Pull) -> None:
        """Queue a record for its next source.

        Raises:
            CalledOff: it is not wanted any more.
            MigrationError: no source is left.
        """
        while True:
            failed, tried = tuple(pull.failed), pull.num_tried
            places = self._choice.choose(pull.move, pull.held, failed, tried)
            if not places:
                reasons = "; ".join(f"{place}: {why}" for place, why in pull.failed.items())
                raise MigrationError(f"{pull.name}: no source is left ({reasons or 'none known'})")
            try:
                if places == (HOST,):
                    self._lease([pull.record], self._is_wanted)
                break
            except MigrationError as exc:
                # No attempt: nothing was pulled, and another source may be left.
                pull.failed[HOST] = str(exc)
        pull.begin(places)
        self._lanes[places[0].link].add(pull)

    def _again(self, pull: Pull) -> None:
        self.figures.num_retries += 1
        self._begin(pull)

    def _feed(self, waiting: deque[Pull]) -> bool:
        """Order what may go now, but look after what has landed every few records.

        One record at a time: it is on its way while the next one's source is looked up.
        """
        has_moved = False
        for _ in range(TOGETHER):
            if waiting:
                self._begin(waiting.popleft())
            moved = [self._order(lane) for lane in self._lanes.values() if lane.is_active]
            if not any(moved) and not waiting:
                break
            has_moved = True
        return has_moved

    def _order(self, lane: Lane) -> bool:
        """Order one chunk, if there is one and it may go now."""
        pull = lane.next()
        if pull is None:
            return False
        place = pull.next_place(self._choice.is_alive)
        if place is None:
            self._fail(lane, pull)
            return True
        part = pull.into[pull.offset : pull.offset + lane.chunk_bytes]
        self._beat.busy(f"pulling {pull.name} from {place}")
        try:
            completion = self._sources.pull(pull.record, place, pull.offset, part)
        except MigrationError as exc:
            pull.fails(place, str(exc))
            self._fail(lane, pull)
        else:
            lane.ordered(pull, part.numel(), completion)
            if pull.offset == pull.num_bytes:
                self._proofs.add(pull, completion)
        return True

    def _fail(self, lane: Lane, pull: Pull) -> None:
        """Cancel this attempt; the next starts after its last chunk has arrived."""
        lane.give_up(pull)
        pull.has_failed = True
        if not pull.num_flying:
            self._again(pull)

    def _land(self, lane: Lane) -> bool:
        """Collect the oldest chunk, if it has arrived."""
        pull = lane.land()
        if pull is None:
            return False
        if not pull.num_flying and pull.has_failed:
            self._again(pull)
        return True

    def _prove(self, *, is_more_coming: bool) -> bool:
        """Order digests that are due, and judge the oldest that are there."""
        is_flowing = any(lane.is_flowing for lane in self._lanes.values())
        has_ordered = self._proofs.order(is_more_coming=is_more_coming or is_flowing)
        judged = self._proofs.judged()
        for pull, is_right in judged:
            self._accept(pull) if is_right else self._reject(pull)
        return has_ordered or bool(judged)

    def _accept(self, pull: Pull) -> None:
        place = pull.places[0]
        if len(pull.places) == 1:
            self._choice.right(pull.move, place, pull.suspected)
        self.figures.bytes_by_source[place.name] += pull.num_bytes
        self.figures.num_staged += 1

    def _reject(self, pull: Pull) -> None:
        is_of_host = pull.places == (HOST,)
        if not (is_of_host and not pull.is_reloaded and self._reload(pull)):
            self._choice.wrong(pull.move, pull.places)
            if len(pull.places) == 1:
                pull.failed[pull.places[0]] = "digest mismatch"
            else:
                pull.suspected = pull.places
        self.figures.bytes_by_source["rejected"] += pull.num_bytes
        self.figures.num_wrong_digests += 1
        self._again(pull)

    def _report_wait(self) -> None:
        """Report once what it waits for: repeated reports would count as progress."""
        self._has_reported_wait = True
        for lane in self._lanes.values():
            if lane.flying:
                pull = lane.flying[0].pull
                self._beat.busy(f"pulling {pull.name} from {pull.origin}")
                return
        if (proof := self._proofs.oldest) is not None:
            self._beat.busy(f"computing the digest of {proof.pulls[0].name}")
        else:
            self._beat.idle("waiting for the budget of a link, or for the engine's hold to end")

    def _wait(self) -> Wait:
        """Return what to wait for: the arrival of a chunk or digest, or a time.

        While the budget holds a link back, arrivals are collected with the next chunk: polling the
        device more often would only take the interpreter from the step.
        """
        lanes = [lane for lane in self._lanes.values() if lane.is_active]
        times = [lane.ready_at() for lane in lanes]
        oldest = [
            lane.flying[0].completion
            for lane, ready_at in zip(lanes, times, strict=True)
            if lane.flying and ready_at == math.inf
        ]
        if (proof := self._proofs.oldest) is not None and proof.deadline is not None:
            oldest += proof.digests.completions
            times.append(proof.deadline)
        times += [lane.flying[0].deadline for lane in lanes if lane.flying]
        what = "chunks to land, or the budget of a link"
        return Wait(what, min(times, default=math.inf), tuple(oldest))


@dataclass
class _DigestOrder:
    """Records whose digests were ordered together."""

    pulls: list[Pull]
    digests: PendingDigests
    deadline: float | None = None  # once all of them have landed


class Proofs:
    """The digests under way on one rank, computed while further bytes arrive; used by one thread.

    Digests of a few records are ordered in one launch where more are about to come, because a
    launch takes the host as long as a fast link takes for 44 MB.

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
        self._proofs: deque[_DigestOrder] = deque()

    @property
    def is_active(self) -> bool:
        """Return whether a record is to be proved."""
        return bool(self._ordered or self._proofs)

    @property
    def completions(self) -> list[Completion]:
        """Completions of all digests under way."""
        return self._records.completions

    @property
    def oldest(self) -> _DigestOrder | None:
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
        self._proofs.append(_DigestOrder(pulls, digests))
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
