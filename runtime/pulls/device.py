"""Just-in-time replicas on GPUs that have mapped each other's memory, for CUDA graphs too.

The host decides nothing: the pieces depend on counts that only the device knows. Pulls and closing
exchanges run on a side stream, which joins the compute stream before the product of the spare
slots. There is no deadline in a kernel: an exchange that does not end is detected by the host, as
for every other exchange of the layer.

Shapes:  T tokens, K top-k, N sources, R ranks, C slots of a rank, J spare slots of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from eplb.core.topology import Topology
from runtime.batch.pulls import Ints, PullRule
from runtime.batch_split import BatchSplit, Exchange
from runtime.counters import SlotCounter
from runtime.experts import ExpertBank
from runtime.pulls.layer import check_extra_slots
from runtime.streams import new_stream


class DevicePulls:
    """Pulls of one rank. Buffers have fixed addresses and shapes.

    Args:
        split: of this rank, over a table with ``rule.spare_slots`` extra slots.
        topology: of the placement, without spare slots.
        rank: this one, a source and a rank of the topology.
        domain: [R] ranks of one domain have mapped each other's memory; -1 takes and gives nothing.
        rule: alike on all ranks.
        bases: [R] addresses at which this process has the live slots of each rank of its domain.
        spare: of this rank: one layer of J slots.
        exchange: gathers a word of all ranks, on the side stream: over a group of its own.
        counter: with ``rule.spare_slots`` extra slots.

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
        from runtime.kernels import pull_plan, pulls

        check_extra_slots(split, rule)
        device = spare.device
        self._plan, self._kernels = pull_plan.plan_pulls, pulls
        self._split, self._rank, self._rule = split, rank, rule
        self._exchange, self._counter = exchange, counter
        self._per_rank = int(topology.slots_of_rank.max())
        self._records = spare.records(0)
        self._ranks = pull_plan.Ranks.on(device, topology, domain, rule.spare_slots, bases)
        self._decided = pull_plan.Decided.on(device, topology.num_ranks * rule.spare_slots)
        self._words = torch.zeros((topology.num_ranks, 1), dtype=torch.int32, device=device)
        self.differences = torch.zeros(1, dtype=torch.int32, device=device)
        self._side, self._is_open = new_stream(device), False

    def redirect(self, layer: int, experts: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """See ``runtime.pulls.layer.Pulls``."""
        split, batch, decided = self._split, self._split.batch, self._decided
        self._plan(
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
