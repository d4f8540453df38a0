"""Just-in-time replicas: hot experts of one layer, pulled into spare slots for one batch.

    counts -> exchange -> split -> pieces --+-- slots -> dispatch -> resident experts --+
                                            |                                           v
                                            +-- pull records -> close the layer -> spare slots
                                                                                        |
                                                                             combine <--+

A second protocol beside the vote of migrations. The vote changes the committed placement between
steps. A pulled replica serves one layer of one batch: the committed placement, its generation and
the routing table never change. Off by default: a layer without ``pulls`` does none of it.

Rules, and what breaks without them (``benchmarks.pulls`` explores them, and breaks each one):

1. **A pull begins after the layer's exchange of counts.** The exchange of a rank follows the swap
   before its step in stream order. Without: a record is read before its rank swapped it.
2. **A source is a slot that serves the expert in the table of this step**, and has tokens of the
   batch. The table changes at the same step on all ranks, so it says what every peer's slot holds.
3. **A layer is closed before its results are sent.** A rank's part in the closing exchange follows
   its pulls; its combine follows the closing exchange. So no rank is past a layer of which a record
   is still read: whatever it writes next (a swap, new weights, staged bytes in a slot that a flip
   freed, which also waits until all ranks have applied it) overwrites nothing that is read. This
   holds for the last layer of a step too, after which no exchange of counts follows.
4. **The spare records are those of one layer at a time.** The next pull begins after the product
   that reads them. By rule 1 it does: a rank's next exchange follows that product in stream order.
5. **The spare product begins after the pull.** The product of the resident slots does not wait.
6. **All ranks decide alike, and compare their decisions.** Pieces are a function of the gathered
   counts, the table and the rule. Where ranks differ, tokens reach a spare slot with another
   expert; before pulls they could not. The closing exchange carries a digest of what every spare
   slot serves. If two differ, every rank raises ``RankError`` before it sends a result.
7. **A rank that misses the deadline reports it.** Its tokens are under way, and no other rank has
   them. The closing exchange carries the failure, and every rank raises ``BrokenGroup``, as for a
   dead rank. A record of a dead rank stays readable on a host, while it is mapped; the exchanges of
   the layer break.
8. **Tokens count where they came from**: the rank that gives adds them to its slot's counter, and
   no rank counts its spare slots. Telemetry sees the load of the placement.

Shapes:  T tokens, K top-k, N sources, R ranks, C slots of a rank, J spare slots of a rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import torch

from eplb.core.topology import Topology
from eplb.errors import BrokenGroup, ConfigError, RankError
from runtime.batch.counts import Exchange
from runtime.batch.pull_rule import (
    NO_SLOT,
    Ints,
    PullRule,
    Pulls,
    moved_by_slot,
    plan_pulls,
    pulls_digest,
    slot_tokens,
)
from runtime.batch.split import BatchSplit
from runtime.counters import SlotCounter
from runtime.dispatch.all_to_all import Received, first_sentence
from runtime.experts import ExpertBank, PeerBank
from runtime.model.compute import BankExperts
from runtime.streams import new_stream

FAILED = -1  # in place of a digest: this rank could not pull


class HostPulls:
    """Pulls of one rank between processes of one host, in numpy and plain torch.

    A separate thread copies, while the rank's thread dispatches and computes.

    Args:
        split: this rank's, over a table with ``rule.spare_slots`` extra slots.
        topology: the placement's, without spare slots.
        rank: this one, a source and a rank of the topology.
        domain: [R] ranks of one domain can read each other's memory; -1 takes and gives nothing.
        rule: alike on all ranks.
        peers: banks of the ranks of this host, by rank.
        spare: this rank's spare records: one layer of J slots.
        exchange: gathers a word of all ranks.
        counter: with ``rule.spare_slots`` extra slots.
        deadline_s: for the pulls of a layer, from the end of the resident experts' product on.

    Raises:
        ConfigError: the table has another number of extra slots.
    """

    def __init__(
        self,
        split: BatchSplit,
        topology: Topology,
        rank: int,
        domain: Ints,
        rule: PullRule,
        peers: Mapping[int, PeerBank],
        spare: ExpertBank,
        exchange: Exchange,
        counter: SlotCounter,
        *,
        deadline_s: float,
    ) -> None:
        _check_extra_slots(split, rule)
        self._split, self._rank, self._domain, self._rule = split, rank, domain, rule
        self._peers, self._spare, self._deadline_s = peers, spare, deadline_s
        self._exchange, self._counter, self._topology = exchange, counter, topology
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="eplb-pull")
        self._under_way: list[tuple[str, Future[None]]] = []
        self._per_rank = int(topology.slots_of_rank.max())
        self._words = torch.zeros((topology.num_ranks, 1), dtype=torch.int32)
        self._layer, self._word, self._is_open = -1, 0, False

    def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Decide what is pulled, start the pulls, and redirect tokens to the spare slots.

        Called after ``BatchSplit.slots``, which gave ``slots`` [T, K] for ``experts`` [T, K]; by
        every source for the same layers in the same order.

        Returns:
            [T, K] slots of the wider dispatch.
        """
        counts, ends = (
            tensor.numpy().astype(np.int64)
            for tensor in (self._split.batch.totals, self._split.batch.up_to)
        )
        served = slot_tokens(counts, self._split.layout(layer), ends)
        pulls = plan_pulls(served, self._domain, self._rule)
        self._layer, self._word, self._is_open = layer, pulls_digest(pulls, served), True
        self._begin(layer, pulls.source[self._rank])
        moved = moved_by_slot(pulls, self._per_rank)[self._rank]
        mine = int(self._topology.slots_of_rank[self._rank])
        self._counter.add_sampled(layer, torch.from_numpy(moved[:mine]))
        return redirected(pulls, self._topology, self._split.positions(experts), slots)

    def close_layer(self) -> None:
        """Wait for the pulls, and until every rank has all of its own.

        Does nothing for a batch that was not redirected, as all ranks have not: its split was off.

        Raises:
            BrokenGroup: a pull failed or missed its deadline, on all ranks alike; a peer died.
            RankError: ranks decided differently, on all ranks alike.
        """
        if not self._is_open:
            return
        self._is_open = False
        wrong = self._finish()
        word = torch.tensor([FAILED if wrong else self._word], dtype=torch.int32)
        where = f"rank {self._rank}: layer {self._layer}"
        try:
            self._exchange(word, self._words)
        except RuntimeError as exc:
            raise BrokenGroup(
                f"{where} was not closed after its pulls, a peer is dead or late: "
                f"{first_sentence(exc)}"
            ) from exc
        words = self._words.flatten().tolist()
        if FAILED in words:
            failed = [rank for rank, found in enumerate(words) if found == FAILED]
            raise BrokenGroup(
                f"{where} is not served: {wrong or f'ranks {failed} could not pull a record'}"
            )
        if len(set(words)) > 1:
            raise RankError(
                f"{where}: ranks decided different pulls (digests {words}), expected one: their "
                "counts, tables or pull rules differ"
            )

    def _begin(self, layer: int, sources: Ints) -> None:
        """Start the pulls of a layer; those of the layer before are finished."""
        assert not self._under_way, "a layer is closed before the next one pulls"
        for spare in np.flatnonzero(sources != NO_SLOT).tolist():
            rank, slot = divmod(int(sources[spare]), self._per_rank)
            read, into = self._peers[rank].read, self._spare.live(0, spare)
            where = f"the pull of layer {layer} slot {slot} of rank {rank}"
            self._under_way.append((where, self._thread.submit(read, layer, slot, into)))

    def _finish(self) -> str:
        """Wait for the pulls. Returns "", or what was not pulled and why."""
        under_way, self._under_way = self._under_way, []
        _, late = wait([future for _, future in under_way], self._deadline_s)
        for where, future in under_way:
            if future in late:
                return f"{where} was not complete within {self._deadline_s:g} s"
            if (exc := future.exception()) is not None:
                return f"{where} failed: {exc}"
        return ""


class DevicePulls:
    """Pulls of one rank on GPUs that have mapped each other's memory, for CUDA graphs too.

    The host decides nothing: the pieces depend on counts that only the device knows. Pulls and
    closing exchanges run on a side stream, which joins the compute stream before the product of the
    spare slots. There is no deadline in a kernel: an exchange that does not end is detected by the
    host, as for every other exchange of the layer. Buffers have fixed addresses and shapes.

    Args:
        split, topology, rank, domain, rule, spare, counter: as in ``HostPulls``.
        bases: [R] addresses at which this process has the live slots of each rank of its domain.
        exchange: gathers a word of all ranks, on the side stream: over a group of its own.

    Attributes:
        differences: [1] int32: words of closing exchanges that differed from the first one's. Not 0
            on some rank: ranks decided differently, and outputs since are wrong. The host reads it
            with the counters.

    Raises:
        ConfigError: the table has another number of extra slots.
    """

    def __init__(
        self,
        split: BatchSplit,
        topology: Topology,
        rank: int,
        domain: Ints,
        rule: PullRule,
        bases: Sequence[int],
        spare: ExpertBank,
        exchange: Exchange,
        counter: SlotCounter,
    ) -> None:
        from runtime.batch.kernels import pulls

        _check_extra_slots(split, rule)
        device = spare.device
        self._kernels = pulls
        self._split, self._rank, self._rule = split, rank, rule
        self._exchange, self._counter = exchange, counter
        self._per_rank = int(topology.slots_of_rank.max())
        self._records = spare.records(0)
        self._ranks = pulls.Ranks.on(device, topology, domain, rule.spare_slots, bases)
        self._decided = pulls.Decided.on(device, topology.num_ranks * rule.spare_slots)
        self._words = torch.zeros((topology.num_ranks, 1), dtype=torch.int32, device=device)
        self.differences = torch.zeros(1, dtype=torch.int32, device=device)
        self._side, self._is_open = new_stream(device), False

    def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``HostPulls.redirect``; ``slots`` are changed in place."""
        split, batch, decided = self._split, self._split.batch, self._decided
        self._kernels.plan_pulls(
            split.layer_split(layer),
            batch.totals,
            batch.up_to,
            self._ranks,
            self._rule,
            self._rank,
            self._counter.row(layer),
            decided,
        )
        self._is_open = True
        self._side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side):
            self._kernels.pull(
                layer, self._rank, self._ranks, decided, self._per_rank, self._records
            )
            self._exchange(decided.word, self._words)
            self._kernels.count_differences(self._words, self.differences)
        self._kernels.redirect(
            experts,
            batch.blocks,
            batch.starts,
            self._ranks,
            decided,
            self._per_rank,
            slots,
        )
        return slots

    def close_layer(self) -> None:
        """Make the compute stream wait for the side stream; the host continues."""
        if self._is_open:
            torch.cuda.current_stream().wait_stream(self._side)
        self._is_open = False


def _check_extra_slots(split: BatchSplit, rule: PullRule) -> None:
    """Refuse a table whose slots are numbered for another number of spare slots."""
    found = split.table.extra_slots
    if found != rule.spare_slots:
        raise ConfigError(
            f"the routing table has {found} extra slots, expected {rule.spare_slots}, those of the "
            "pull rule"
        )


class PulledExperts:
    """Resident experts, whose product waits for nothing, then those of the spare slots.

    Args:
        resident: experts of the live slots.
        spare: experts of the spare records, a bank of one layer.
        num_resident: C.
        pulls: closes each layer in between.
    """

    def __init__(
        self,
        resident: BankExperts,
        spare: BankExperts,
        num_resident: int,
        pulls: HostPulls | DevicePulls,
    ) -> None:
        self._resident, self._spare = resident, spare
        self._num_resident, self._pulls = num_resident, pulls

    def run(self, layer: int, received: Received) -> torch.Tensor:
        """Results of all rows, spare slots included."""
        results = self._resident.run(layer, received)
        self._pulls.close_layer()
        return self._spare.run(0, received, first_slot=self._num_resident, results=results)


def redirected(
    pulls: Pulls, topology: Topology, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """Slots [T, K] of the wider dispatch, where tokens of the pulled runs go to spare slots.

    Args:
        pulls: decided for the layer.
        topology: the placement's, without spare slots.
        positions: [T, K] numbers of the tokens among all sources' tokens of their expert.
        slots: [T, K] as the split chose them, in the numbers of the wider dispatch.
    """
    first_slot = topology.widened(pulls.source.shape[1]).first_slot
    per_rank = int(topology.slots_of_rank.max())
    changed = slots.clone()
    for taker, spare in np.argwhere(pulls.source != NO_SLOT):
        giver, place = divmod(int(pulls.source[taker, spare]), per_rank)
        is_taken = slots == int(first_slot[giver]) + place
        is_taken &= positions >= int(pulls.first[taker, spare])
        is_taken &= positions < int(pulls.end[taker, spare])
        changed[is_taken] = int(first_slot[taker] + topology.slots_of_rank[taker] + spare)
    return changed
